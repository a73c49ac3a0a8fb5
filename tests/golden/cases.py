"""Golden cases: thousands of requests to the planner, and a digest of each answer in digests.txt.

They guard plans, routes and tables while the code behind them changes: a change that is not meant to alter plans leaves
every digest as it is. test_golden.py compares; `python -m tests.golden.cases` writes the file anew, for a change that
alters plans on purpose.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.one_of_many_ranks import packed_rows
from commons.perf_model.partitioner import lower_bound, partition, partition_grid
from commons.perf_model.partitioner.core import read_columns
from commons.perf_model.shuffle_plan import GatheredRows, ShufflePlanner, plan_shuffle
from tests.golden.draws import KINDS, Draws

DIGESTS = Path(__file__).with_name("digests.txt")
METHODS = ("refined", "karmarkar_karp", "lpt", "snake")
SLACKS = (0.0, 0.01, 0.3, 5e-324, 1.0)
# Ranks × rows of a rank (× steps) beyond the small ones, few of each: the cases together take half a minute.
LARGE = [(64, 32), (64, 8), (128, 16), (256, 16), (600, 8), (1024, 32), (4096, 32)]
LARGE_GRIDS = [(64, 32, 4), (64, 8, 8), (256, 16, 2), (256, 16, 4), (600, 4, 4), (1024, 8, 4), (4096, 4, 2)]

NODES: dict[str, Any] = {"ranks_per_node": 8, "best_effort": True}
Answer = Iterator[Any]


def _cost(draws: Draws, kind: str, lengths: np.ndarray) -> np.ndarray:
    return 5120 * lengths + lengths**2 if kind != "huge" and draws.integer(0, 2) else lengths


def _home(draws: Draws, rows: int, places: int) -> np.ndarray | None:
    kinds = [None, np.arange(rows) * places // rows, draws.integers(0, places, rows), np.full(rows, places - 1)]
    return draws.choice(kinds)


def _options(draws: Draws, lengths: np.ndarray, parts: int, cells: int) -> dict[str, Any]:
    tokens = draws.choice([None, lengths, draws.integers(0, 50, len(lengths))])
    options: dict[str, Any] = {
        "method": draws.choice([*METHODS, "refined", "refined"]),
        "equal_size": bool(draws.integer(0, 2)),
        "tokens": tokens,
        "home": _home(draws, len(lengths), parts),
        "ranks_per_node": draws.choice([None, 1, 2, 8]),
        "slack": draws.choice(SLACKS),
        "best_effort": True,
    }
    if tokens is not None and draws.integer(0, 2):
        hundredths = draws.choice([50, 100, 103, 130, 300])
        options["max_tokens"] = max(1, int(tokens.sum()) * hundredths // (100 * cells))
    return options


def _plan(draws: Draws, number: int) -> Answer:
    parts = draws.choice([1, 2, 3, 4, 5, 8, 16, 17, 33])
    kind, rows = draws.choice(KINDS), draws.integer(1, draws.choice([4, 12, 40, 150]) + 1)
    lengths = draws.lengths(kind, rows)
    yield from _planned(_cost(draws, kind, lengths), parts, **_options(draws, lengths, parts, parts))


def _planned(workloads: np.ndarray, parts: int, **options: Any) -> Answer:
    plan = partition(workloads, parts, **options)
    yield from (plan.assignment, plan.loads, plan.lower_bound)
    yield lower_bound(workloads, parts, not options["equal_size"])


def _grid(draws: Draws, number: int) -> Answer:
    ranks, steps = draws.choice([1, 2, 3, 4, 8, 16]), draws.choice([1, 2, 3, 4, 8])
    kind, rows = draws.choice(KINDS), draws.integer(1, draws.choice([4, 40, 150, 400]) + 1)
    lengths = draws.lengths(kind, rows)
    workloads, options = _cost(draws, kind, lengths), _options(draws, lengths, ranks, ranks * steps)
    yield from _planned_grid(workloads, ranks, steps, home_step=_home(draws, rows, steps), seed=number, **options)


def _planned_grid(workloads: np.ndarray, ranks: int, steps: int, **options: Any) -> Answer:
    grid = partition_grid(workloads, ranks, steps, **options)
    yield from (grid.step, grid.assignment, grid.loads, grid.lower_bound)


def _window_cap(draws: Draws, number: int) -> Answer:
    """Windows near home under a cap on tokens, of which many rows have as many as others."""
    ranks, steps, rows = draws.choice([3, 11, 33]), draws.choice([2, 3, 4]), draws.integer(2, 13)
    lengths = draws.lengths(draws.choice(KINDS[:-1]), ranks * steps * rows)
    tokens, place = draws.integers(0, 50, len(lengths)), np.arange(len(lengths)) // rows
    hundredths = draws.choice([101, 105, 120])
    yield from _planned_grid(
        5120 * lengths + lengths**2,
        ranks,
        steps,
        method=draws.choice(["refined", "refined", "lpt"]),
        equal_size=bool(draws.integer(0, 2)),
        tokens=tokens,
        max_tokens=max(1, int(tokens.sum()) * hundredths // (100 * ranks * steps)),
        home=place // steps,
        home_step=place % steps,
        ranks_per_node=draws.choice([None, 2, 8]),
        slack=draws.choice(SLACKS),
        speeds=draws.choice([None, draws.integers(1, 100, ranks) + 1]),
        seed=number,
        best_effort=True,
    )


def _large(draws: Draws, number: int) -> Answer:
    ranks, rows = LARGE[number % len(LARGE)]
    kind = KINDS[1:][number // len(LARGE) % (len(KINDS) - 1)]
    lengths = draws.lengths(kind, ranks * rows)
    near_home = {"home": np.arange(len(lengths)) // rows, "slack": 0.01} if number % 2 == 0 else {}
    options = {"equal_size": number % 3 > 0, "tokens": lengths if kind != "huge" else None}
    yield from _planned(_cost(draws, kind, lengths), ranks, **options, **NODES, **near_home)


def _large_cut(draws: Draws, number: int) -> Answer:
    """Lengths as of Zipf 1.2, a fifth of them cut: swaps with the lightest ranks leave some above the limit."""
    ranks, rows = 512 + 8 * number, 32
    ratio = np.minimum(2**30 // (1 + draws.integers(0, 2**20, ranks * rows)), 6 * 2**10)
    lengths = np.clip(ratio**5 // 5 * 3 // 2**50, 1, 4096)
    options = {"equal_size": True, "tokens": lengths, "home": np.arange(len(lengths)) // rows, "slack": 0.01}
    yield from _planned(5120 * lengths + lengths**2, ranks, **options, **NODES)


def _large_grid(draws: Draws, number: int) -> Answer:
    ranks, rows, steps = LARGE_GRIDS[number % len(LARGE_GRIDS)]
    kind = KINDS[1:][number // len(LARGE_GRIDS) % (len(KINDS) - 1)]
    lengths = draws.lengths(kind, ranks * rows * steps)
    place = np.arange(len(lengths)) // rows
    near_home = {"home": place // steps, "home_step": place % steps, "slack": 0.01} if number % 2 == 0 else {}
    options = {"tokens": lengths if kind != "huge" else None, "seed": number}
    yield from _planned_grid(_cost(draws, kind, lengths), ranks, steps, **options, **NODES, **near_home)


def _gathered(draws: Draws) -> GatheredRows:
    """Rows of a batch or a window: ragged places, padding, ranks without rows, keys with any lengths."""
    ranks, steps = draws.choice([1, 2, 3, 8]), draws.choice([1, 1, 2, 4])
    rows = draws.integers(0, draws.choice([1, 4, 9]), ranks * steps)
    real = np.maximum(rows - draws.integers(0, 3, len(rows)), 0)
    keys, most = draws.integer(0, 5), draws.choice([1, 5, 3000, 2**40])
    lengths = draws.integers(0, most, int(real.sum()) * keys).reshape(-1, keys) if keys else np.zeros((real.sum(), 0))
    lengths, kept = lengths.astype(np.int64), draws.integers(-(2**40), 2**40, int(real.sum()))[:, None]
    of_rows = lengths.sum(axis=1)
    return packed_rows(rows, real, of_rows * 3 + 1, of_rows, lengths, kept, steps)


def _routes(draws: Draws, number: int) -> Answer:
    gathered, parts, key = _gathered(draws), [], 0
    keys = gathered.num_keys
    while key < keys:
        count = draws.integer(1, keys - key + 1)
        parts += [[key, count, words] for words in draws.choice([[1], [2], [4, 1]])]
        key += count
    parts += [[-1, 1, draws.integer(0, 6)] for _ in range(draws.integer(0 if parts else 1, 3))]
    destination = gathered.home.copy()
    moves = draws.integers(0, 10, len(destination)) < draws.choice([0, 3, 10])
    destination[moves] = draws.integers(0, gathered.num_places, int(moves.sum()))
    pads = bool(draws.integer(0, 2))
    order = draws.permutation(len(parts))
    rank, all_gather = draws.integer(0, gathered.num_ranks), bool(draws.integer(0, 2))
    yield from _routed(gathered, destination, pads, np.array(parts, np.int64)[order], rank, all_gather)


def _routed(
    gathered: GatheredRows, destination: np.ndarray, pads: bool, parts: np.ndarray, rank: int, all_gather: bool
) -> Answer:
    def allocate(size: int) -> tuple[np.ndarray, int]:
        array = np.empty(size, np.int64)
        return array, array.ctypes.data

    exchange = {"parts": parts, "rank": rank, "all_gather": all_gather, "allocate": allocate}
    planner = ShufflePlanner(gathered.num_ranks, gathered.steps, pads=pads, **exchange)
    planner.plan(gathered, destination)
    head, numbers = planner.head, iter(planner.exchange)
    indices = planner.indices[: head["index_room"]]

    def take(count: int) -> list[int]:
        return [next(numbers) for _ in range(count)]

    splits = [take(3), take(gathered.num_ranks), take(gathered.num_ranks)]
    own_parts = [take(len(parts) + 1) for _ in range(gathered.steps)]
    results = [take(3 + len(parts) + gathered.num_keys) for _ in range(gathered.steps)]
    # What the host keeps lies behind the lengths of each result; the digests are of an array without it.
    at, kept = head["buffer_segments"], np.zeros(len(indices), bool)
    for result in results:
        at += gathered.num_keys * result[1]
        kept[at : at + gathered.num_kept * result[1]] = True
        at += gathered.num_kept * result[1]
    yield from (indices[~kept], head["moves"], head["block_words"], head["sent_words"])
    yield from ([head["own_segments"], head["buffer_segments"], head["sent_segments"]], *splits, *own_parts)
    for changes, rows, real, *beside in results:
        yield from (changes, rows, real, beside[: len(parts)], beside[len(parts) :])


def _table(draws: Draws, number: int) -> Answer:
    gathered = _gathered(draws)
    every = np.arange(len(gathered.workloads))
    of_rows = (gathered.workloads, gathered.tokens, *_lengths_and_kept(gathered, every))
    table = packed_rows(gathered.rows, gathered.real_rows, *of_rows)
    yield from read_columns(table, [0, 1])
    rows = np.flatnonzero(draws.integers(0, 2, int(table.real_rows.sum())))
    yield from (table.words, *_lengths_and_kept(table, rows), table.lengths_of_keys(range(table.num_keys)[::-1]))


def _lengths_and_kept(table: GatheredRows, rows: np.ndarray) -> list[np.ndarray]:
    """`(len(rows), num_keys)` and `(len(rows), num_kept)`, what some rows have."""
    columns = range(2, table.num_columns)
    return [read_columns(table, each)[:, rows].T for each in (columns[: table.num_keys], columns[table.num_keys :])]


def _shuffle(draws: Draws, number: int) -> Answer:
    """The plan of a gathered batch or window: gates, caps, modes; and what the stats count of it."""
    gathered = _gathered(draws)
    plan = plan_shuffle(
        gathered,
        method=draws.choice(["refined", "refined", "lpt", "karmarkar_karp"]),
        equal_size=bool(draws.integer(0, 2)),
        slack=draws.choice(SLACKS),
        ranks_per_node=draws.choice([None, 1, 2]),
        max_tokens=draws.choice([None, 1, max(1, int(gathered.tokens.sum()) // gathered.num_places)]),
        min_gain=draws.choice([0.0, 0.02, 0.5]),
        carry_out=draws.integer(0, 4) > 0,
        pads=bool(draws.integer(0, 2)),
    )
    yield from (plan.destination, plan.planned, plan.lower_bound, plan.gated, plan.excess_tokens, plan.digest())
    yield from (plan.loads_before, plan.loads_after, plan.result_real_rows)
    planner = ShufflePlanner(gathered.num_ranks, gathered.steps, ranks_per_node=draws.integer(1, 4))
    yield planner.plan(gathered, plan.destination).moved


def _speeds(draws: Draws, number: int) -> Answer:
    """Plans, grids and shuffles for ranks of different speeds."""
    parts, steps = draws.choice([2, 3, 5, 8, 33]), draws.choice([2, 3, 4])
    kind, rows = draws.choice(KINDS[:-1]), draws.integer(1, draws.choice([12, 40, 150]) + 1)
    lengths, speeds = draws.lengths(kind, rows), draws.integers(1, draws.choice([3, 1000]), parts) + 1
    at_once = _options(draws, lengths, parts, parts) | {"method": draws.choice(["refined", "refined", "lpt"])}
    plan = partition(_cost(draws, kind, lengths), parts, speeds=speeds, **at_once)
    yield from (plan.assignment, plan.loads, plan.times, plan.lower_bound)
    in_steps = _options(draws, lengths, parts, parts * steps) | {"method": draws.choice(["refined", "refined", "lpt"])}
    yield from _planned_grid(_cost(draws, kind, lengths), parts, steps, seed=number, speeds=speeds, **in_steps)
    gathered = _gathered(draws)
    of_ranks = draws.integers(1, 1000, gathered.num_ranks)
    shuffled = plan_shuffle(gathered, speeds=of_ranks, slack=draws.choice(SLACKS), min_gain=draws.choice([0.0, 0.02]))
    yield from (shuffled.destination, shuffled.lower_bound, shuffled.gated, shuffled.loads_after, shuffled.digest())


GROUPS: dict[str, tuple[Callable[[Draws, int], Answer], int]] = {
    "plan": (_plan, 3000),
    "grid": (_grid, 1500),
    "routes": (_routes, 1000),
    "table": (_table, 500),
    "shuffle": (_shuffle, 1000),
    "speeds": (_speeds, 600),
    "window_cap": (_window_cap, 400),
    "large": (_large, 126),
    "large_cut": (_large_cut, 40),
    "large_grid": (_large_grid, 63),
}


def digest_of(group: str, number: int) -> str:
    """12 hexadecimal digits over the answer to one case: dtypes do not count, shapes and numbers do."""
    answer, _ = GROUPS[group]
    hashed = hashlib.blake2b(digest_size=6)
    for part in answer(Draws(hash_of_name(group) + number), number):
        array = np.asarray(part).astype(np.int64)
        hashed.update(np.array([array.ndim, *array.shape], "<i8").tobytes())
        hashed.update(array.astype("<i8").tobytes())
    return hashed.hexdigest()


def hash_of_name(name: str) -> int:
    """32 bits of a group's name, so that groups draw different numbers."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def expected() -> dict[str, list[str]]:
    """The digests in the file, by group."""
    lines = (line.split(" ") for line in DIGESTS.read_text().splitlines())
    return {name: list(digests) for name, *digests in lines}


def compute(group: str) -> list[str]:
    """The digests of a group's cases."""
    return [digest_of(group, number) for number in range(GROUPS[group][1])]


if __name__ == "__main__":
    DIGESTS.write_text("".join(f"{group} {' '.join(compute(group))}\n" for group in GROUPS))
