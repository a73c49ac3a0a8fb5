"""The exchange on a pretended device: one rank of 8 and of 16 starts and finishes a shuffle, every operation is seen.

Messages, plan and index arrays are the real ones. Nothing may wait for the device, and how many kernels and copies
there are is known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.shared.one_of_many_ranks import fake_ranks, record_all_ranks
from commons.datasets.hstu_batch import HSTUBatch
from commons.distributed.exchange.payload import PayloadLayout
from commons.distributed.options import ShufflerOptions
from commons.sequence_batch.batch import BaseBatch
from commons.sequence_batch.open_batch import row_fields
from commons.sequence_batch.schema import BatchSchema
from hstu import HSTUBalancedBatchShuffler
from tests.helpers.batches.easyrec import ClicksShuffler, easyrec_batch
from tests.helpers.batches.random_batches import JAGGED_DTYPES, random_kjt, random_values
from tests.helpers.cuda.pretended_cuda import CUDA, Watch, fake_mode, pretended_pinning
from tests.helpers.models import hstu_models
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler
from tests.helpers.ranks.on_ranks import on

RANK = 3
DENSE_DTYPES = [*JAGGED_DTYPES, torch.complex64, torch.complex128]


def wide_batch(rank: int) -> BaseBatch:
    """Jagged fields of each dtype, with and without weights, and dense ones."""
    generator, rows, real = torch.Generator().manual_seed(rank), 6 + rank, 6 + rank - rank % 2
    sizes = {"rows": rows, "real": real, "generator": generator}
    batch = BaseBatch(
        features=random_kjt(["a", "b"], **sizes, weights_dtype=torch.float32),
        batch_size=rows,
        feature_to_max_seqlen={"a": 6, "b": 6},
        labels=torch.zeros(rows, 3, dtype=torch.bfloat16),
        actual_batch_size=real,
    )
    for number, dtype in enumerate(JAGGED_DTYPES):
        lengths = (torch.int32, torch.int64)[number % 2]
        weights = (None, torch.float64, torch.float16)[number % 3]
        batch.__dict__[f"jagged_{number}"] = random_kjt(
            [f"k{number}", f"l{number}"], **sizes, dtype=dtype, lengths_dtype=lengths, weights_dtype=weights
        )
    for number, dtype in enumerate(DENSE_DTYPES):
        batch.__dict__[f"dense_{number}"] = random_values(rows * 5, dtype, generator).view(rows, 5)
    return batch


def hstu_batch(rank: int) -> HSTUBatch:
    return hstu_models.random_batch(
        32, longest=512, max_num_candidates=10, actual_batch_size=20 if rank == 5 else 32, seed=rank
    )


KINDS: dict[str, tuple[Callable[[int], Any], Callable[[ShufflerOptions], Any]]] = {
    "hstu": (hstu_batch, lambda options: HSTUBalancedBatchShuffler(64, 4, 16, 2, options=options)),
    "every dtype": (wide_batch, CubicShuffler),
    "nested": (lambda rank: easyrec_batch(range(100 * rank, 100 * rank + 20), 24 - rank % 3), ClicksShuffler),
}


@pytest.mark.parametrize("world_size", [8, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("kind", KINDS)
@on("pretended")
def test_an_exchange_waits_for_nothing(kind: str, transport: Any, world_size: int) -> None:
    make_batch, make_shuffler = KINDS[kind]
    batches = [make_batch(rank) for rank in range(world_size)]
    with (
        fake_ranks(world_size, RANK),
        pretended_pinning() as pinned,
        closing(make_shuffler(ShufflerOptions(transport=transport))) as shuffler,
    ):
        record_all_ranks(shuffler, batches)
        shuffler.engine.connect(device=CUDA)
        handle = shuffler.start_shuffle(batches[RANK])
        exchange = handle.prepared().exchange
        assert exchange is not None
        for _, value in row_fields(batches[RANK]):
            if isinstance(value, KeyedJaggedTensor):
                value.length_per_key()  # as BaseBatch.to does on the host, where sums can be known
        with fake_mode():
            on_device = batches[RANK].to(CUDA, non_blocking=True)
            with Watch(pinned) as watch:
                result = shuffler.finish_shuffle(on_device, handle)
                for _, value in row_fields(result):
                    if isinstance(value, KeyedJaggedTensor):  # as TorchRec's input distribution asks
                        value.length_per_key()
                        value.offset_per_key()
                        value.dist_splits([1] * len(value.keys()))
            tensors = [part.tensor_of(result) for part in exchange.layout.parts]
    assert handle.stats is not None and handle.stats.moved and exchange.changes
    assert [tensor.device for tensor in tensors] == [CUDA] * len(tensors)
    layout = PayloadLayout.of(BatchSchema.of(batches[RANK]))
    assert [part.dtype for part in layout.parts] == [tensor.dtype for tensor in tensors]
    assert not watch.waits and not watch.mixed, (watch.waits, watch.mixed)
    assert len(watch.collectives) == 1, watch.collectives
    (copy,) = watch.copies  # the one of ours from the host, out of pinned memory
    assert copy.non_blocking and copy.pinned and copy.shape[0] == exchange.indices.numel(), copy
    # Each tensor is written once and read once, two permutes, the row of padding, and each field's lengths; an
    # all-gather pads its block.
    most = 2 * len(layout.parts) + len(layout.schema.jagged) + 3 + (2 if transport == "all_gather" else 0)
    assert watch.num_launches <= most, watch.launches
