"""torchtitan's RL batcher: a method that packs training samples into rows.

from torchtitan.experiments.rl.components.batcher import Batcher
Batcher._assign_training_samples_to_rows = evenrank.integrations.torchtitan.assign_training_samples_to_rows
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np

from commons.micro_batching import refined_allocate

S = TypeVar("S")


def assign_training_samples_to_rows(self: Any, training_samples: list[S]) -> list[list[S]]:
    """The fewest rows of at most `seq_len` tokens, ordered so that the batcher deals even work to ranks.

    The batcher deals rows in turn to the micro-batches and ranks of a grid. A row costs the squares of its samples'
    tokens, as attention does. Rows are sorted by it, so that the ranks of a micro-batch compute rows of like cost; each
    further row of a place is taken from the other end.

    Args:
        self: the Batcher.
        training_samples: of all ranks.

    Returns:
        The samples of each row; every one once.

    Raises:
        ValueError: a sample longer than a row, by its number.
    """
    if not training_samples:
        return []
    tokens = np.array([self.num_tokens_to_pack(sample) for sample in training_samples], np.int64)
    rows = refined_allocate(tokens, self.seq_len)
    costs = [int((tokens[row] ** 2).sum()) for row in rows]
    heaviest_first = sorted(range(len(rows)), key=lambda row: (-costs[row], row))
    return [[training_samples[sample] for sample in rows[row]] for row in in_turns(heaviest_first, _places(self, rows))]


def _places(batcher: Any, rows: list[list[int]]) -> int:
    """Micro-batches times ranks, as the batcher makes them."""
    ranks = batcher._dp_degree
    return math.ceil(len(rows) / (batcher.local_batch_size * ranks)) * ranks


def in_turns(numbers: list[int], places: int) -> list[int]:
    """Numbers in the order in which they are dealt to places, there and back again."""
    turns = [numbers[start : start + places] for start in range(0, len(numbers), places)]
    return [number for turn, part in enumerate(turns) for number in (part[::-1] if turn % 2 else part)]
