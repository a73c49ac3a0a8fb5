"""Ragged random batches of several types: a rank's stream is a pure function of its seed, and can be read again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.helpers.batches.random_batches import JAGGED_DTYPES, random_batch
from tests.helpers.models import hstu_models, sid_models
from tests.helpers.models.torchrec_model import make_batch

MOST_ROWS = 8
LONGEST = 40
# By type: SampleBatch has weights and a dense target, and is what the sharded model trains; RichBatch has labels, bf16
# images, flags and a second jagged field of any dtype; TorchRec's own Batch cannot state padding.
KINDS = ("sample", "rich", "hstu", "sid", "torchrec")


@dataclass(frozen=True)
class Stream:
    """Batches of one rank."""

    kind: str  # of the batches, one of KINDS
    seed: int  # of the stream; the same on all ranks
    rank: int  # whose
    length: int  # how many batches
    dtype: int = 0  # of what a type leaves open, an index of JAGGED_DTYPES; the same on all ranks

    def batches(self, first: int = 0) -> Iterator[Any]:
        """The batches from one on."""
        return (self.batch(index) for index in range(first, self.length))

    def batch(self, index: int) -> Any:
        """One batch: 0 to 8 rows, of which some or all may be padding, now and then with a long row."""
        draw = np.random.default_rng([self.seed, self.rank, index])
        rows = int(draw.integers(0, MOST_ROWS + 1))
        real = rows if draw.random() < 0.5 else int(draw.integers(0, rows + 1))
        longest = LONGEST if draw.random() < 0.2 else 6
        seed = int(draw.integers(2**31))
        if self.kind == "sample":
            first = 1 + (self.rank * 100_000 + index) * 100
            # A real row more than there are rows of padding: TorchRec wants one row at least.
            return make_batch(list(range(first, first + real)), max(rows, 1), longest=longest)
        if self.kind == "rich":
            return random_batch(
                seed,
                rows,
                real,
                first_id=(self.rank * 100_000 + index) * 100,
                tiny_dtype=JAGGED_DTYPES[self.dtype % len(JAGGED_DTYPES)],
                weights_dtype=None if self.dtype % 3 == 0 else torch.float32,
                max_length=longest,
            )
        rows = max(rows, 1)
        if self.kind == "hstu":
            candidates = 3 if self.dtype % 2 else 0
            options = {"longest": longest, "most": LONGEST, "seed": seed, "max_num_candidates": candidates}
            return hstu_models.random_batch(rows, actual_batch_size=real, **options)
        if self.kind == "sid":
            return sid_models.make_batch(seed, rows, real)
        return self._torchrec(rows, longest, torch.Generator().manual_seed(seed))

    def _torchrec(self, rows: int, longest: int, generator: torch.Generator) -> TorchRecBatch:
        lengths = torch.randint(0, longest, (2 * rows,), generator=generator, dtype=torch.int32)
        values = torch.randint(0, 10**6, (int(lengths.sum()),), generator=generator)
        return TorchRecBatch(
            dense_features=torch.rand(rows, 3, generator=generator),
            sparse_features=KeyedJaggedTensor(["a", "b"], values, lengths=lengths, stride=rows),
            labels=torch.randint(0, 2, (rows,), generator=generator),
        )
