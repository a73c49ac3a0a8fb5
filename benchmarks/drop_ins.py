"""evenrank.integrations beside the functions that verl, AReaL and torchtitan have there, on the same lengths.

python -m benchmarks.drop_ins
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.command_line import from_command_line
from benchmarks.report import heading, table, write_page

CAP, ROWS = 8192, 256
Groups = list[list[int]]


class PretendedVllm(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """vLLM, which torchtitan's generators import and its batcher does not use."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """A package for each of its modules."""
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "vllm" else None

    def create_module(self, spec: Any) -> Any:
        """A module with every name."""
        return mock.MagicMock(__path__=[], __name__=spec.name, __spec__=spec)

    def exec_module(self, module: Any) -> None:
        """Nothing to run."""


def draw(seed: int, rows: int = ROWS) -> list[int]:
    """Tokens of rollouts, lognormal, median 400, up to 4,096."""
    return (20 + np.random.default_rng(seed).lognormal(np.log(400), 1.0, rows)).astype(int).clip(1, 4096).tolist()


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


@dataclass
class DropIns:
    """Compare groups of rows."""

    seeds: int = 40
    """Batches of rows."""

    quick: bool = False
    """Few batches, and no page."""

    def run(self) -> None:
        """Group, print, and write benchmarks/results/drop_ins.md."""
        pairs = {
            "verl `rearrange_micro_batches`": of_verl(),
            'AReaL `get_allocate_fn("ffd")`': of_areal("ffd"),
            'AReaL `get_allocate_fn("kk")`': of_areal("kk"),
            "torchtitan `_assign_training_samples_to_rows`": of_torchtitan(),
        }
        rows = [[name, *self._compare(functions)] for name, functions in pairs.items()]
        head = ("function", "groups, theirs", "ours", "largest load ÷ mean, theirs", "ours", "ms, theirs", "ours")
        page = table(head, rows)
        print(page)
        if not self.quick:
            write_page("drop_ins", "\n\n".join([_head(self.seeds), page, _READING]))

    def _compare(self, functions: dict[str, Callable[[list[int]], Groups]]) -> list[str]:
        found: dict[str, list[tuple[int, float, float]]] = {name: [] for name in functions}
        for seed in range(2 if self.quick else self.seeds):
            lengths = draw(seed)
            for name, function in functions.items():
                started = time.perf_counter()
                groups = function(lengths)
                seconds = time.perf_counter() - started
                loads = [sum(lengths[row] for row in group) for group in groups]
                found[name].append((len(groups), max(loads) * len(loads) / sum(loads), seconds * 1e3))
        columns = [list(zip(*found[name])) for name in ("theirs", "ours")]
        return [
            *(f"{sum(each[0])}" for each in columns),
            *(f"{statistics.fmean(each[1]):.3f}" for each in columns),
            *(f"{statistics.median(each[2]):.2f}" for each in columns),
        ]


def _head(seeds: int) -> str:
    return heading("Functions of other frameworks", "python -m benchmarks.drop_ins") + (
        f"\n{seeds} batches of {ROWS} rollouts, lognormal with a median of 400 tokens, up to 4,096; at most {CAP:,} "
        "tokens a group."
    )


_READING = (
    "Groups of all batches added up; fewer are less work for the launches and the optimizer. Loads are tokens. verl's "
    "micro-batches are even in its estimate of work, 24,576·L + L², by both functions; its time has the selection of "
    "rows."
)

if __name__ == "__main__":
    from_command_line(DropIns, __doc__).run()
