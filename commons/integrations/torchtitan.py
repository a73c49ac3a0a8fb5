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
    """The fewest rows of at most `seq_len` tokens, ordered so that the batcher assigns even work to ranks.

    The batcher assigns rows in turn to the cells of a grid of micro-batches and ranks. The cost of a row is the sum of
    its samples' tokens squared, as in attention. Rows are sorted by cost, so that the ranks of a micro-batch compute
    rows of similar cost; the order is reversed in every second turn.

    Args:
        self: the Batcher.
        training_samples: samples of all ranks.

    Returns:
        The samples of each row; every sample once.

    Raises:
        ValueError: a sample is longer than a row; the error has its number.
    """
    if not training_samples:
        return []
    tokens = np.array([self.num_tokens_to_pack(sample) for sample in training_samples], np.int64)
    rows = refined_allocate(tokens, self.seq_len)
    costs = [int((tokens[row] ** 2).sum()) for row in rows]
    heaviest_first = sorted(range(len(rows)), key=lambda row: (-costs[row], row))
    ranks = self._dp_degree
    places = math.ceil(len(rows) / (self.local_batch_size * ranks)) * ranks  # micro-batches · ranks, as in the batcher
    turns = [heaviest_first[start : start + places] for start in range(0, len(rows), places)]
    in_turns = [row for turn, part in enumerate(turns) for row in (part[::-1] if turn % 2 else part)]
    return [[training_samples[sample] for sample in rows[row]] for row in in_turns]
