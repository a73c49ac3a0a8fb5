"""Collectives of the trainer: what they return on every rank, and how much they send."""

from __future__ import annotations

import json
from unittest import mock

import torch
import torch.distributed as dist

from commons.trainer.ranks.collectives import on_rank_0
from tests.helpers.ranks.on_ranks import of_all, on_ranks


@on_ranks
def test_a_result_of_rank_0_is_sent_once():
    """Not once per rank: with a thousand ranks, the digests of a checkpoint's files would be 100 MB."""
    result = {"files": [f"ä{number}" for number in range(500)]}
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent:
        found = on_rank_0(lambda: result, torch.device("cpu"))
    assert of_all([found]) == [result] * dist.get_world_size()
    assert max(call.args[0].nbytes for call in sent.call_args_list) <= len(json.dumps(result)) + 8
    assert on_rank_0(lambda: None, torch.device("cpu")) is None
