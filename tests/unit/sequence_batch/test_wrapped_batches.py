"""Batches on their way from a worker process: one tensor, everything in it, storage of its own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.datasets.loader import resumable as resumable_loader
from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.loader.resumable import WrappedBatch, unwrap, wrap
from commons.datasets.sids.map import SIDMap


@dataclass
class Noted:
    """A batch of the user's own."""

    values: torch.Tensor
    note: object = None
    pinned: bool = field(default=False)

    def pin_memory(self):
        return dataclasses.replace(self, pinned=True)


def named_loader(name, num_workers):
    codes = np.stack(np.divmod(np.arange(16), 4), axis=1)
    sid_map = SIDMap(np.arange(16), codes, (4, 4))
    options = {"sid_map": sid_map} if name == "sid-random" else {"max_num_candidates": 2}
    return get_data_loader(name, batch_size=4, max_history_seqlen=6, num_batches=5, num_workers=num_workers, **options)


def test_a_batch_travels_as_one_tensor_in_shared_memory():
    batch = next(iter(named_loader("random", 0)))
    wrapped = wrap(batch)
    assert isinstance(wrapped, WrappedBatch) and wrapped.message.is_shared()
    opened = unwrap(wrapped)
    wrapped.message.zero_()  # nothing of it is left in the batch
    assert torch.equal(opened.features.values(), batch.features.values())
    assert opened.features.values().any() and not opened.features.values().is_shared()


def test_tensors_that_a_message_cannot_hold():
    variable = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(5),
        lengths=torch.tensor([1, 2, 2]),
        stride_per_key_per_rank=[[1], [2]],
    )
    strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    sparse = torch.eye(3).to_sparse()
    for held in (variable, strided, sparse, torch.empty(2, device="meta")):
        batch = {"ids": torch.arange(3), "held": held}
        assert wrap(batch) is batch
    assert isinstance(wrap(Noted(torch.ones(1))), WrappedBatch)


def test_the_pinning_thread_unwraps(monkeypatch):
    unwrapped = wrap(Noted(torch.ones(3))).pin_memory()
    assert unwrapped.pinned and unwrapped.values.tolist() == [1.0] * 3
    assert unwrap(unwrapped) is unwrapped
    plain = wrap([torch.ones(2), {"note": "of no class that could pin itself"}])
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor * 2)
    assert str(plain.pin_memory()) == str([torch.full((2,), 2.0), {"note": "of no class that could pin itself"}])
    monkeypatch.setattr(resumable_loader, "decode", None)
    assert unwrap(unwrapped) is unwrapped
