"""Collectives of the trainer: what they return on every rank, and how much they send."""

from __future__ import annotations

import json
from unittest import mock

import torch
import torch.distributed as dist

from commons.trainer.ranks.collectives import on_all_ranks, on_rank_0
from tests.helpers.ranks.faults import error_of
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


@on_ranks
def test_an_error_names_the_first_rank_that_has_it():
    """Not the one that reports it, whose disk may be fine."""

    def work():
        if dist.get_rank() > 0:
            raise OSError(30, "Read-only file system")

    said = error_of(on_all_ranks, work, torch.device("cpu"))
    assert said == "ValueError: rank 1: [Errno 30] Read-only file system" and len(set(of_all([said]))) == 1
