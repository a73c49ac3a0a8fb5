"""evenrank.integrations compared with the functions of verl, AReaL and torchtitan, on the same lengths.

python -m benchmarks.drop_ins
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.lengths import described, draw
from benchmarks.shared.report import Page, every, measured, query
from commons.dispatch import split_balanced
from commons.perf_model.partitioner import partition_grid
from commons.perf_model.task_estimator import SelfAttentionTask

CAP, ROWS = 8192, 256
RANKS, MINI_BATCHES = 8, 4
TASK = SelfAttentionTask(hidden_size=4096, num_heads=32, head_dim=128, num_layers=32, vocab_size=32000)
Groups = list[list[int]]


class PretendedVllm(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A stand-in for vLLM, which torchtitan's generators import but its batcher does not use."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "vllm" else None

    def create_module(self, spec: Any) -> Any:
        return mock.MagicMock(__path__=[], __name__=spec.name, __spec__=spec)

    def exec_module(self, module: Any) -> None:
        """Nothing to run."""


def of_verl() -> dict[str, Callable[[list[int]], Groups]]:
    """Micro-batches of one rank."""
    from verl.utils import seqlen_balancing

    from commons.integrations.verl import rearrange_micro_batches

    def micro_batches(function: Callable[..., Any]) -> Callable[[list[int]], Groups]:
        def call(lengths: list[int]) -> Groups:
            from tensordict import TensorDict

            rows = [torch.zeros(length, dtype=torch.int64) for length in lengths]
            ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            return function(TensorDict({"input_ids": ids}, len(lengths)), CAP)[1]

        return call

    return {
        "theirs": micro_batches(seqlen_balancing.rearrange_micro_batches),
        "ours": micro_batches(rearrange_micro_batches),
    }


def of_areal(algorithm: str) -> dict[str, Callable[[list[int]], Groups]]:
    """Groups under a capacity."""
    from areal.utils import seqpack

    from commons.integrations.areal import get_allocate_fn

    theirs, ours = seqpack.get_allocate_fn(algorithm), get_allocate_fn(algorithm)
    return {"theirs": lambda lengths: theirs(lengths, CAP, 1), "ours": lambda lengths: ours(lengths, CAP, 1)}


def of_torchtitan() -> dict[str, Callable[[list[int]], Groups]]:
    """Rows of a batch."""
    sys.meta_path.insert(0, PretendedVllm())
    from torchtitan.experiments.rl.components.batcher import Batcher

    from commons.integrations.torchtitan import assign_training_samples_to_rows

    def rows(function: Callable[..., Any]) -> Callable[[list[int]], Groups]:
        def call(lengths: list[int]) -> Groups:
            batcher = SimpleNamespace(
                seq_len=CAP, local_batch_size=1, _dp_degree=1, num_tokens_to_pack=lambda each: lengths[each]
            )
            return function(batcher, list(range(len(lengths))))

        return call

    return {"theirs": rows(Batcher._assign_training_samples_to_rows), "ours": rows(assign_training_samples_to_rows)}


def measure_groups(
    function: str, whose: str, seed: int, *, functions: Mapping[str, dict[str, Callable[[list[int]], Groups]]]
) -> dict[str, float]:
    """Number, evenness and time of the groups of one batch."""
    lengths = draw("rollouts", ROWS, seed).tolist()
    started = time.perf_counter()
    groups = functions[function][whose](lengths)
    seconds = time.perf_counter() - started
    assert sorted(row for group in groups for row in group) == list(range(ROWS))
    loads = [sum(lengths[row] for row in group) for group in groups]
    return {"groups": len(groups), "spread": max(loads) * len(loads) / sum(loads), "ms": seconds * 1e3}


def mini_batches_of_verl(lengths: np.ndarray) -> np.ndarray:
    """Rows (ranks, mini-batches, rows of one): parts as its `_balance_batch` orders them, light rows at both ends."""
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    work = calculate_workload(torch.from_numpy(lengths)).tolist()
    parts = [sorted(part, key=work.__getitem__) for part in get_seqlen_balanced_partitions(work, RANKS, True)]
    return np.array([part[::2] + part[1::2][::-1] for part in parts]).reshape(RANKS, MINI_BATCHES, -1)


def mini_batches_of_chunks(lengths: np.ndarray) -> np.ndarray:
    """The same of `split_balanced`."""
    rows = torch.arange(len(lengths))
    chunks = split_balanced({"row": rows}, RANKS, TASK.get_workloads(torch.from_numpy(lengths)))
    return torch.cat(chunks.indices).numpy().reshape(RANKS, MINI_BATCHES, -1)


def mini_batches_of_grid(lengths: np.ndarray) -> np.ndarray:
    """The same of `partition_grid`, as docs/from_verl.md shows."""
    grid = partition_grid(TASK.get_workloads(lengths), RANKS, MINI_BATCHES)
    return np.lexsort((grid.step, grid.assignment)).reshape(RANKS, MINI_BATCHES, -1)


def measure_mini_batches(function: str, seed: int) -> dict[str, float]:
    """Sum over the mini-batches of the largest load of a rank ÷ that of the mean load."""
    lengths = draw("lognormal", RANKS * MINI_BATCHES * 8, seed)
    loads = TASK.get_workloads(lengths)[MINI[function](lengths)].sum(axis=2)
    return {"ratio": loads.max(axis=0).sum() / loads.mean(axis=0).sum()}


MINI = {
    "verl": mini_batches_of_verl,
    "`split_balanced`": mini_batches_of_chunks,
    "`partition_grid`": mini_batches_of_grid,
}


def main(seeds: int = 40, quick: Quick = False) -> None:
    """Group, print, and write benchmarks/results/drop_ins.md.

    Args:
        seeds: number of batches.
    """
    functions = {
        "verl `rearrange_micro_batches`": of_verl(),
        'AReaL `get_allocate_fn("ffd")`': of_areal("ffd"),
        'AReaL `get_allocate_fn("kk")`': of_areal("kk"),
        "torchtitan `_assign_training_samples_to_rows`": of_torchtitan(),
    }
    page = Page(
        "Functions of other frameworks",
        f"{seeds} batches of {ROWS} rollouts; at most {CAP:,} tokens a group. {described(['rollouts'])}",
    )
    cases = every(function=functions, whose=("theirs", "ours"), seed=range(2 if quick else seeds))
    page.section("", query(measured(measure_groups, cases, functions=functions), _TABLE), _READING)
    cases = every(function=MINI, seed=range(2 if quick else seeds))
    page.section(
        "Mini-batches",
        f"{RANKS} ranks, {MINI_BATCHES} mini-batches of 8 rows per rank, cut from a rank's rows in their order; "
        "workloads as in docs/from_verl.md. Sum over the mini-batches of the largest load ÷ sum of the mean loads. "
        f"{described(['lognormal'])}",
        query(measured(measure_mini_batches, cases), _RATIOS),
    )
    page.finish(quick=quick)


_TABLE = """
    SELECT function, whose, sum(groups)::INT AS groups, avg(spread) AS "largest load ÷ mean", median(ms) AS ms
    FROM found GROUP BY ALL ORDER BY min(number)
"""
_RATIOS = """
    SELECT function, avg(ratio) AS "largest ÷ mean, mean", max(ratio) AS worst
    FROM found GROUP BY ALL ORDER BY min(number)
"""
_READING = (
    "Groups are summed over all batches; fewer groups mean fewer launches and less work for the optimizer. Loads are "
    "tokens, although both functions for verl balance its estimate of work, 24,576·L + L²; their times include the "
    "selection of rows."
)

if __name__ == "__main__":
    from_command_line(main, __doc__, needs=("verl", "areal", "torchtitan"))
