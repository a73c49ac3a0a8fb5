"""Planner, micro-batches and dispatch where TorchRec, fbgemm and megatron-core cannot be imported, on two gloo ranks.

The ranks of `tests/helpers/ranks/rank_pool.py` have imported TorchRec, so this file runs itself.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder

import pytest

from tests.helpers.jobs.programs import ROOT, TWO_RANKS, run_program

BLOCKED = ("torchrec", "fbgemm_gpu", "megatron")


class _Blocked(MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{fullname} is not installed", name=fullname)
        return None


@pytest.mark.slow
def test_dispatch_micro_batches_and_planner_work_without_torchrec():
    done = run_program(*TWO_RANKS, __file__, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


def _rows(first, count):
    """Rows of several kinds; `id` names each, a row has as many tokens as its id says."""
    import numpy as np
    import torch
    from tensordict import TensorDict

    ids = torch.arange(first, first + count)
    lengths = ids % 7 + 1
    tokens = [torch.full((int(n),), float(i)) for i, n in zip(ids, lengths)]
    return {
        "id": ids,
        "tokens": torch.nested.nested_tensor(tokens, layout=torch.jagged),
        "score": np.arange(first, first + count) * 0.5,
        "text": [f"row {row}" for row in range(first, first + count)],
        "inner": TensorDict({"double": ids * 2}, batch_size=[count]),
    }, lengths


def _one_rank(rank):
    """Everything is called once; tests/distributed/dispatch and micro_batching compare what comes of it."""
    import torch

    import evenrank

    batch, lengths = _rows(0, 12)
    chunks = evenrank.split_balanced(batch, 4, lengths)
    assert chunks.restore([chunk["id"] * 10 for chunk in chunks]).tolist() == (batch["id"] * 10).tolist()
    workloads = evenrank.SelfAttentionTask(64, 4, 16).get_workloads(lengths)
    assert evenrank.partition(workloads, 3).loads.sum() == workloads.sum()
    assert evenrank.get_allocate_fn("refined")(lengths, 12)
    assert list(evenrank.BalancedBatchSampler([3, 1], 1, num_ranks=2, rank=0, shuffle=False)) == [[0]]
    assert list(evenrank.BudgetBatchSampler([3, 1], budget_per_rank=4, num_ranks=1, rank=0, shuffle=False)) == [[0, 1]]

    own, own_lengths = _rows(100 * rank, 9 if rank == 0 else 1)
    spec = evenrank.MicroBatchSpec(n_mbs=2, max_tokens_per_mb=32, packing_algorithm="refined")
    micro_batches = evenrank.pack_micro_batches(own, spec, own_lengths, joint=True)
    share = evenrank.scatter_balanced(*((batch, lengths) if rank == 0 else (None, None)))
    moved = evenrank.redistribute_balanced(own, own_lengths)
    loader = evenrank.SingleRankLoader([_rows(0, 8)[0]] if rank == 0 else None, lambda rows: rows["id"])
    for part in (*chunks, *micro_batches, share.batch, moved.batch, *loader):
        assert part["text"] == [f"row {row}" for row in part["id"].tolist()]
    assert moved.num_moved > 0 and moved.send_home(moved.batch["id"]).tolist() == own["id"].tolist()
    back = share.gather_back(share.batch)
    assert (back is not None) == (rank == 0) and (back is None or back["id"].tolist() == list(range(12)))
    loss = evenrank.global_mean_loss(torch.tensor(3.0 + rank, requires_grad=True).sum(), 2)
    assert loss.item() == (3.0 + rank) / 2

    # What the examples for such batches import besides.
    for module in ("config.load", "ranks.errors", "ranks.launch"):
        importlib.import_module(f"commons.trainer.{module}")
    importlib.import_module("commons.console")
    imported = sorted(name for name in sys.modules if name.partition(".")[0] in BLOCKED)
    assert not imported, imported
    with pytest.raises(ImportError, match="torchrec"):
        _ = evenrank.balanced


if __name__ == "__main__":
    sys.meta_path.insert(0, _Blocked())
    import torch.distributed as dist

    dist.init_process_group("gloo")
    _one_rank(dist.get_rank())
    dist.destroy_process_group()
