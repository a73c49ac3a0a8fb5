"""BaseBatch: the samples one rank trains on in one step.

Rows `[0, actual_batch_size)` are samples, rows `[actual_batch_size, batch_size)` are padding with zero lengths and, in
dense fields, zeros. Padding is stated by `actual_batch_size` and never inferred, because a real user may have an empty
history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from commons.checks import as_count, kind_of, require_names
from commons.sequence_batch.fields import Path, path_name
from commons.sequence_batch.host_copies import carry_host_copy, host_arrays
from commons.sequence_batch.open_batch import batch_device, replace_rows, row_counts, row_fields, value_at
from commons.sequence_batch.row_leaves import describe_leaf, pinned
from commons.sequence_batch.rows import select_rows

B = TypeVar("B", bound="BaseBatch")


class _Slots:
    """Attributes that are neither fields nor in `vars`, of which a user's own `to` may make the copy.

    Attributes:
        _global_batch: the GlobalBatch, see `commons.distributed.global_batch`.
        _identity: the same for copies of the whole batch: it identifies them among batches with equal fields.
    """

    __slots__ = ("_global_batch", "_identity")
    _global_batch: Any
    _identity: int


@dataclass
class BaseBatch(Pipelineable, _Slots):
    """A batch of sequences with labels; only `features` are required, and `labels` for training.

    Subclasses are dataclasses that add fields. Every tensor and KeyedJaggedTensor field must have `batch_size` rows;
    its rows are selected and exchanged without further code, also in dicts, lists and other branches (`rows.py` has the
    table). Any other field is a plain value that must be equal on all ranks, unless `register_batch_type` declares it
    `per_rank`: turn values that depend on the rows into properties. `__init__` and `__post_init__` run when a batch is
    loaded, and not again when its rows move. Gradients do not follow rows to other ranks: a shuffler that balances
    refuses fields that require grad.

    When a batch goes to a device, the host keeps the values that plan a step: the lengths of every KeyedJaggedTensor
    and the fields that a subclass names in `host_fields`, integer tensors `(batch_size,)`. `to`, the exchange of a
    shuffler and `index_select` keep these host copies. A host copy belongs to one tensor object: after
    `dataclasses.replace` with other features, those features' own lengths count. Torch does not count every write to a
    tensor: after a collective, DLPack or numpy has written into such a field, call
    `torch.autograd.graph.increment_version` on its tensor to drop the host copy.

    Raises:
        ValueError: fields with different numbers of rows, a `batch_size` that is not an integer of at least 0,
            `actual_batch_size` outside `[0, batch_size]`, duplicate keys, a variable batch per key, a padding row that
            is not empty (checked on CPU only), or a contextual feature that is not a key of `features` or is named
            twice.
        TypeError: `features` that is no KeyedJaggedTensor; `contextual_feature_names`, or `host_fields` of a subclass,
            is one string; `labels` without a tensor, such as a list of numbers.
    """

    host_fields: ClassVar[tuple[str, ...]] = ()

    features: KeyedJaggedTensor  # sequences, `K` keys over `batch_size` rows
    # Number of rows, including padding; None for the number of rows of the fields.
    batch_size: int = None  # type: ignore[assignment]  # an int after __post_init__
    feature_to_max_seqlen: dict[str, int] = field(default_factory=dict)  # of keys, for models that need it
    contextual_feature_names: list[str] = field(default_factory=list)  # keys that describe the user, not the history
    labels: KeyedJaggedTensor | torch.Tensor | None = None  # over `batch_size` rows, or a tensor `(batch_size, ...)`
    actual_batch_size: int | None = None  # number of real rows; None for all rows

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "host_fields" in vars(cls):
            cls.host_fields = tuple(require_names("host_fields", cls.host_fields))

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            as_count(self.batch_size, "batch_size", 0)  # other batch types may have one below 0, which states nothing
        self.batch_size, self.actual_batch_size = row_counts(self)
        if not isinstance(self.features, KeyedJaggedTensor):
            raise TypeError(
                f"features is {kind_of(self.features)}; sequences are a KeyedJaggedTensor: convert them, or add a field"
            )
        self.contextual_feature_names = require_names("contextual_feature_names", self.contextual_feature_names)
        unknown = [name for name in self.contextual_feature_names if name not in self.features.keys()]
        if unknown:
            raise ValueError(
                f"contextual features {unknown} are not among the keys {self.features.keys()}; contextual features are "
                "keys of `features`: add or rename them"
            )
        if len(set(self.contextual_feature_names)) < len(self.contextual_feature_names):
            raise ValueError(
                f"contextual_feature_names is {self.contextual_feature_names}; a repeated name would add a feature's "
                "tokens again: name every feature once"
            )
        self._check_labels_have_rows()
        self._check_padding_is_empty()

    def _check_labels_have_rows(self) -> None:
        """Raise TypeError for labels that would stay while their rows move, and count as no loss terms."""
        if self.labels is None or (isinstance(self.labels, dict) and not self.labels):
            return
        if next(row_fields(self.labels), None) is None:
            raise TypeError(
                f"labels is {kind_of(self.labels)} without tensors; labels move with their rows as a tensor "
                "(batch_size, ...) or a KeyedJaggedTensor: convert them, or leave them out"
            )

    def _check_padding_is_empty(self) -> None:
        if self.actual_batch_size == self.batch_size:
            return
        for path, value in row_fields(self):
            # On a device this check would synchronise.
            if not isinstance(value, torch.Tensor) and value.lengths().device.type == "cpu":
                padding = value.lengths().view(-1, self.batch_size)[:, self.actual_batch_size :]
                if bool(padding.any()):
                    raise ValueError(
                        f"field {path_name(path)!r} has values in padding rows [{self.actual_batch_size}, "
                        f"{self.batch_size}); padding rows have zero lengths: raise actual_batch_size or empty these "
                        "rows"
                    )

    def num_loss_tokens(self) -> int:
        """Number of label values in real rows, over all label keys; 0 without labels. Never synchronises."""
        return sum(
            # Padding rows of a jagged tensor hold no values.
            value[: self.actual_batch_size].numel() if isinstance(value, torch.Tensor) else value.values().numel()
            for _, value in row_fields(self.labels)
        )

    def global_loss_terms(self, pg_group: Any = None) -> int | None:
        """The sum of `num_loss_tokens` over all ranks, if it is known without communication.

        It is known after a shuffle that moved rows, for the step that trains its batches: on all ranks or on none, if
        all ranks treat their batches in the same way.

        Args:
            pg_group: the ranks that share the loss; default as for `global_mean_loss`.

        Returns:
            None if unknown: without such a shuffle or after a shuffle over another group, if labels, `batch_size` or
            `actual_batch_size` were replaced after the shuffle, and for a subclass that overrides `num_loss_tokens`.
        """
        known = getattr(self, "_global_batch", None)
        if known is None or type(self).num_loss_tokens is not BaseBatch.num_loss_tokens:
            return None
        return known.loss_terms(self, pg_group)

    def global_lengths(self, key: str, pg_group: Any = None) -> list[np.ndarray] | None:
        """The lengths of a key of `features` on all ranks, if they are known; see `global_loss_terms`.

        Args:
            key: a key of `features`.
            pg_group: the ranks; default as for `global_mean_loss`.

        Returns:
            For each rank of the group int64 `(real rows,)`, in the order of the rank's rows; None if unknown.

        Raises:
            KeyError: unknown key.
        """
        self._require_keys(key)
        known = getattr(self, "_global_batch", None)
        return None if known is None else known.lengths(self, key, pg_group)

    def host_lengths(self, *keys: str) -> list[np.ndarray]:
        """Lengths of keys of `features` on the host, for each key int64 `(batch_size,)`; writing changes the batch.

        `to`, a shuffler and `index_select` keep host copies of the lengths. For a batch that was made on its device,
        the lengths are read back once, together with `host_fields`.

        Raises:
            KeyError: unknown key.
        """
        known = self._require_keys(*keys)
        table = self._host_arrays()[0].reshape(len(known), self.batch_size)
        return [table[known.index(key)] for key in keys]

    def _require_keys(self, *keys: str) -> list[str]:
        """The keys of `features`; KeyError if one of `keys` is not among them."""
        known = self.features.keys()
        if unknown := [key for key in keys if key not in known]:
            raise KeyError(f"features {unknown} are not among the batch's keys {known}: correct the names")
        return known

    def host_values(self, name: str) -> np.ndarray:
        """Values of one of `host_fields` on the host, int64 `(batch_size,)`; see `host_lengths`.

        Raises:
            KeyError: a field that is not in `host_fields`, or None in this batch.
        """
        names = self._present_host_fields()
        if name not in names:
            raise KeyError(
                f"{name!r} is not among the host_fields of this {type(self).__name__}, {names}; only host_fields have "
                "a host copy: name it there, and give the batch its tensor"
            )
        return self._host_arrays()[1 + names.index(name)]

    def _present_host_fields(self) -> list[str]:
        return [name for name in self.host_fields if isinstance(getattr(self, name), torch.Tensor)]

    def _host_arrays(self) -> list[np.ndarray]:
        return host_arrays([self.features.lengths(), *(getattr(self, name) for name in self._present_host_fields())])

    def index_select(self: B, indices: torch.Tensor | list[int]) -> B:
        """Rows of this batch as a new batch.

        Args:
            indices: int64 `(N,)` tensor or list of rows in `[0, batch_size)`; any order, repeats allowed, but a padding
                row may not come before a real one.

        Returns:
            A batch of `N` rows whose `actual_batch_size` is the number of real rows among them.

        Raises:
            ValueError: an index outside the batch, or padding before a real row.
        """
        return select_rows(self, indices)

    def to(
        self: B,
        device: torch.device,
        non_blocking: bool = False,
        data_copy_stream: torch.Stream | None = None,
    ) -> B:
        """A copy on `device`.

        Args:
            device: device of the copy.
            non_blocking: do not wait for the copy (the source should be pinned).
            data_copy_stream: copy on this stream into memory of the caller's stream (TorchRec's in-place copy); the
                caller waits for `data_copy_stream` before using the result.
        """
        if data_copy_stream is None:
            return self._known_to(self._map(lambda _, value: _to_device(value, device, non_blocking)))
        current = torch.get_device_module(device).current_stream(device)
        targets: list[tuple[torch.Tensor, torch.Tensor]] = []

        def allocate(tensor: torch.Tensor) -> torch.Tensor:
            target = torch.empty_like(tensor, device=device)
            targets.append((target, tensor))
            return target

        moved = self._map(lambda path, value: describe_leaf(path, value).map(value, allocate))
        # Earlier kernels of the caller's stream may still use the memory: copy after them.
        data_copy_stream.wait_stream(current)
        with torch.get_device_module(device).stream(data_copy_stream):
            for target, source in targets:
                target.copy_(source, non_blocking=non_blocking)
        return self._known_to(moved)

    def pin_memory(self: B) -> B:
        """A copy in pinned host memory."""
        return self._map(pinned)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses every field; a host batch has no stream to wait for."""
        if batch_device(self).type == "cpu":
            return
        for _, value in row_fields(self):
            value.record_stream(stream)

    def _map(self: B, transform: Callable[[Path, Any], Any]) -> B:
        result = replace_rows(self, {path: transform(path, value) for path, value in row_fields(self)})
        identity = getattr(self, "_identity", None)
        if identity is not None:
            result._identity = identity
        known = getattr(self, "_global_batch", None)
        if known is not None:
            result._global_batch = known.of_copy(self, result)
        return result

    def _known_to(self: B, copied: B) -> B:
        """Attach the host copies of this batch to its copy on a device."""
        for path, value in row_fields(self):
            if not isinstance(value, torch.Tensor):
                carry_host_copy(value.lengths(), value_at(copied, path).lengths())
            elif len(path) == 1 and path[0] in self.host_fields:
                carry_host_copy(value, value_at(copied, path))
        return copied


def _to_device(value: Any, device: torch.device, non_blocking: bool) -> Any:
    if isinstance(value, KeyedJaggedTensor) and value.lengths().device.type == "cpu":
        value.length_per_key()  # sums on the host and caches, so that the copy never reads them from the device
    return value.to(device, non_blocking=non_blocking)
