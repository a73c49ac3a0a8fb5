"""WORKLOAD: the description of a rank's batch before the gather, with the costs of its rows, and its message."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from commons.checks import require_names
from commons.distributed.spans import span
from commons.perf_model.calibration import CalibratedTask, describe_device, load_calibration
from commons.perf_model.partitioner import as_int64_workloads
from commons.perf_model.partitioner.core import encode_rows
from commons.perf_model.partitioner.inputs import as_groups
from commons.perf_model.task_estimator import AttentionTask
from commons.sequence_batch.fields import Path, batch_items, field_names, path_name, require_dataclass
from commons.sequence_batch.jagged_fields import require_sum
from commons.sequence_batch.open_batch import open_batch, require_no_grad, require_one_device, row_counts
from commons.sequence_batch.plain_values import register_type
from commons.sequence_batch.schema import BatchSchema

if TYPE_CHECKING:
    from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler


@dataclass(eq=False)  # not frozen, because a frozen one takes longer to make, and one is made per batch
class LocalRows:
    """The description of one rank's batch at one step: the numbers to gather, and the sizes that identify the batch."""

    schema: BatchSchema | None = None  # of the batch; None without a batch
    rows: int = 0  # batch_size
    real_rows: int = 0  # rows that are no padding
    sizes: tuple[int, ...] = ()  # of every row field, see `BatchSchema.sizes`
    workloads: Any = None  # the result of `get_workloads`, on the host; None in mode "off"
    lengths: Sequence[np.ndarray] = ()  # lengths `(keys, rows)` of every jagged field; none in mode "off"
    # `(rows,)` of every field with host values, see `BaseBatch`; none in mode "off".
    host_values: Sequence[np.ndarray] = ()
    groups: Any = None  # the result of `get_groups`, on the host; None if every row moves independently
    copied: torch.Event | None = None  # the event after which copies from a device are complete
    error: Exception | None = None  # an error in the batch or its description

    @property
    def lookups(self) -> int:
        """Values of the KeyedJaggedTensors except the labels; 0 in mode "off"."""
        jagged = () if self.schema is None else self.schema.jagged
        return sum(size for field, size in zip(jagged, self.sizes) if field.is_lookup)

    def table(self, counted: Sequence[int] | np.ndarray = ()) -> np.ndarray:
        """Pack workload, tokens, lengths, host values and group of every real row; waits for copies from a device.

        The lengths of the keys with the indices `counted` add up to a row's tokens; without any, a row is one token.

        Returns:
            int64 `(words,)`, see `GatheredRows`; none in mode "off", and without a batch.

        Raises:
            TypeError, ValueError: workloads that are not one int64 per row, or lengths that do not fit the values.
        """
        if self.workloads is None:
            return np.zeros(0, dtype=np.int64)
        if self.copied is not None:
            self.copied.synchronize()
        workloads, sums = self.workloads, self.sizes[: len(self.lengths)]
        kept = list(self.host_values)
        if self.groups is not None:
            kept.append(as_groups(self.groups, self.rows))
        words = None
        if type(workloads) is np.ndarray and workloads.dtype == np.int64 and workloads.flags.c_contiguous:
            words = encode_rows(workloads, self.lengths, sums, kept, counted, self.rows, self.real_rows)
        if words is None:
            # Another type, such as a masked array, or a mistake, which these two functions report.
            workloads = as_int64_workloads(_one_per_row(self.workloads, self.rows)[: self.real_rows])
            self._require_lengths()
            lengths = [each[:, : self.real_rows] for each in self.lengths]
            kept = [values[: self.real_rows] for values in kept]
            words = encode_rows(workloads, lengths, sums, kept, counted, self.real_rows, self.real_rows)
        assert words is not None  # noqa: S101  everything has been checked
        return words

    def _require_lengths(self) -> None:
        """ValueError unless the lengths of every jagged field fit its values."""
        assert self.schema is not None  # noqa: S101  a rank without a batch has no lengths
        for field, lengths, num_values in zip(self.schema.jagged, self.lengths, self.sizes):
            table, name = lengths.astype(np.int64), path_name(field.path)
            if table.min(initial=0) < 0:
                raise ValueError(f"field {name!r} has a length of {table.min()}; lengths are not negative: correct it")
            require_sum(field.path, int(table.sum()), num_values)
            if self.real_rows < self.rows and table[:, self.real_rows :].any():
                raise ValueError(
                    f"field {name!r} has values in padding rows [{self.real_rows}, {self.rows}); padding rows "
                    "have zero lengths: raise actual_batch_size or empty these rows"
                )


class RowCosts:
    """Describes batches with the methods of a shuffler, to which it holds no strong reference."""

    def __init__(self, shuffler: BaseTaskBalancedBatchShuffler, has_groups: bool) -> None:
        self.has_groups = has_groups  # whether its class overrides `get_groups`
        self.calibrated: CalibratedTask | None = None  # converts operations to times; None without a calibration
        self._mode = shuffler.options.mode
        self._file = None if self._mode == "off" else shuffler.options.calibration
        self._shuffler = weakref.ref(shuffler)
        self._error: Exception | None = None
        self._checked_device: torch.device | None = None
        self._batch_type: type | None = None  # of the last batch
        self._known: dict[Any, BatchSchema] = {}  # cache of `BatchSchema.of`: the schema of the last batch

    @property
    def shuffler(self) -> BaseTaskBalancedBatchShuffler:
        """The shuffler; RuntimeError if it has been garbage-collected."""
        shuffler = self._shuffler()
        if shuffler is None:
            raise RuntimeError("the shuffler was garbage-collected while it was in use; keep a reference to it")
        return shuffler

    @property
    def token_features(self) -> tuple[str, ...] | None:
        """Keys whose values are tokens; None for all except the labels'."""
        names = self.shuffler.token_feature_names
        return None if names is None else tuple(require_names("token_feature_names", names))

    def calibrate(self, task: AttentionTask) -> AttentionTask | CalibratedTask:
        """See `BaseTaskBalancedBatchShuffler.calibrated`."""
        if self._file is None:
            return task
        try:
            self.calibrated = CalibratedTask(task, load_calibration(self._file))
        except (OSError, ValueError) as error:
            self._error = self._refused(error)
            return task
        return self.calibrated

    def problem(self, device: torch.device | None) -> Exception | None:
        """Why the calibration cannot be used for batches on a device (None: not known yet); None if it can."""
        if self._file is None:
            return None
        if self.calibrated is None and self._error is None:
            return ValueError(
                f"calibration is {self._file!r}, but {type(self.shuffler).__name__} does not compute its workloads "
                "with self.calibrated(task), so that the file has no effect: remove the option, or use calibrated() in "
                "its constructor"
            )
        if self.calibrated is not None and self._error is None and device not in (None, self._checked_device):
            self._checked_device = device
            try:
                self.calibrated.calibration.require_match(None, describe_device(device))
            except ValueError as error:
                self._error = self._refused(error)
        return self._error

    def describe(self, batch: Any | None, error: Exception | None = None) -> LocalRows:
        """Describe a batch; a mistake in it becomes `LocalRows.error`, which all ranks raise.

        Starts copies to the host of tensors on CUDA, and does not wait for them. `error` is an earlier one, such as the
        dataloader's.
        """
        if batch is None or error is not None:
            return LocalRows(error=error)
        try:
            if type(batch) is not self._batch_type:
                require_dataclass(batch)
                register_type(type(batch))
                self._batch_type = type(batch)
            with span("workload"):
                return self._describe(batch)
        except Exception as mistake:
            return LocalRows(error=mistake)

    def workloads_of(self, batch: Any) -> torch.Tensor:
        """Workloads of the real rows of a batch, int64 `(real_rows,)` on the host; waits for the device.

        Raises:
            Exception: a mistake in the batch or in `get_workloads`.
        """
        rows, real = row_counts(batch)
        workloads = self._returned("get_workloads", batch, BatchSchema.of(batch))
        on_host = workloads.cpu() if isinstance(workloads, torch.Tensor) else workloads
        return torch.from_numpy(as_int64_workloads(_one_per_row(on_host, rows)[:real]))

    def tokens_of(self, batch: Any) -> np.ndarray:
        """Tokens of the real rows of a batch, as for the cap on tokens: int64 `(real_rows,)` on the host."""
        local, schema, leaves = self._fields_of(batch)
        lengths = [row for each in schema.jagged for row in leaves[each.path].lengths().view(-1, local.rows)]
        counted = [lengths[key] for key in counted_keys(schema, self.token_features)]
        tokens = torch.stack(counted).sum(0).cpu().numpy() if counted else np.ones(local.rows, dtype=np.int64)
        return tokens[: local.real_rows]

    def _describe(self, batch: Any) -> LocalRows:
        local, schema, leaves = self._fields_of(batch)
        if self._mode != "off":
            before = batch_items(batch)
            costs = self._costs(batch, schema)
            if _keeps_in_field(batch, before):
                local, schema, leaves = self._fields_of(batch)
            lengths = [leaves[field.path].lengths().view(len(field.keys), local.rows) for field in schema.jagged]
            kept = [leaves[field.path] for field in schema.host_fields]
            (workloads, groups, *rest), local.copied = _on_host([*costs, *lengths, *kept])
            local.workloads, local.groups = _as_array(workloads), _as_array(groups)
            # Arrays, even while their values are still being copied: each torch call on the worker would release the
            # GIL and wait to get it back.
            arrays = [values.numpy() for values in rest]
            local.lengths, local.host_values = arrays[: len(lengths)], arrays[len(lengths) :]
        return local

    def _fields_of(self, batch: Any) -> tuple[LocalRows, BatchSchema, dict[Path, Any]]:
        """The description of a batch without costs, its schema and its leaves."""
        tree = open_batch(batch)
        leaves = tree.leaves
        rows, real = row_counts(batch, tree)
        require_one_device(leaves)
        if self._mode == "balance":  # in every step, whether or not rows move in it
            require_no_grad(leaves)
        schema = BatchSchema.of(batch, tree, self._known)
        local = LocalRows(schema, rows, real, schema.sizes(schema.row_tensors(batch, leaves)))
        return local, schema, leaves

    def _costs(self, batch: Any, schema: BatchSchema) -> tuple[Any, Any]:
        """The workloads and the groups of a batch; None for no groups."""
        if names := self.token_features:
            keys = [key for field in schema.jagged if not field.is_label for key in field.keys]
            if unknown := [name for name in names if name not in keys]:
                raise KeyError(
                    f"features {unknown} are not among the batch's keys {keys}: correct token_feature_names, which a "
                    "tokens shuffler takes as feature_names"
                )
        workloads = self._returned("get_workloads", batch, schema)
        return workloads, self._returned("get_groups", batch, schema) if self.has_groups else None

    def _returned(self, method: str, batch: Any, schema: BatchSchema) -> Any:
        """The result of a method of the shuffler for a batch."""
        try:
            values = getattr(self.shuffler, method)(batch)
        except KeyError as error:
            missing = str(error.args[0]) if error.args else ""
            keys = [key for field in schema.jagged for key in field.keys]
            if len(missing.split()) != 1 or missing in keys:
                raise  # a sentence, or the key of another dict
            # batch.features["item"] raises only the key, which would explain nothing on the other ranks.
            raise KeyError(f"{method} reads {missing!r}; the batch's keys are {keys}: correct {method}") from error
        if values is None:
            raise TypeError(f"{method} returned None; it returns an integer per row, padding included: return a tensor")
        return values

    def _refused(self, error: Exception) -> ValueError:
        return ValueError(f"calibration {self._file!r}: {error}")


def message_of(
    step: int, local: Sequence[LocalRows], tables: Sequence[np.ndarray], header: int, capacity: int
) -> np.ndarray:
    """The message of a rank about its batches, int64 `(header + capacity,)`; shuffle_plan.py describes the numbers.

    `tables` has the packed rows of each batch, which are cut off at the capacity. Entries of `local` without a schema
    are skipped.
    """
    message, numbers, at = np.zeros(header + capacity, dtype=np.int64), [step, 0], header
    for each, words in zip(local, tables):
        if each.schema is not None:
            numbers[1] += 1
            numbers += (each.rows, each.real_rows, len(words))
            message[at : at + len(words)] = words[: max(0, len(message) - at)]
            at += len(words)
    message[: len(numbers)] = numbers
    return message


def counted_keys(schema: BatchSchema, features: tuple[str, ...] | None) -> np.ndarray:
    """Indices of the keys whose lengths count as tokens, int64: those in `features`, or all except the labels'."""
    keys = [key for field in schema.jagged for key in ((None,) * len(field.keys) if field.is_label else field.keys)]
    counted = [key is not None and (features is None or key in features) for key in keys]
    return np.flatnonzero(np.array(counted, dtype=bool))


def _keeps_in_field(batch: Any, before: dict[str, Any]) -> bool:
    """Whether a user's method has set a field of the batch; undoes what it has set in other attributes.

    Such a cache is of the rows before the shuffle, and the batch's own `to` may not copy it. `before` are the items of
    the batch before the call.
    """
    fields, missing = field_names(batch.__class__), object()
    changed = [name for name, value in batch_items(batch).items() if before.get(name, missing) is not value]
    for name in set(changed).difference(fields):
        if name in before:
            object.__setattr__(batch, name, before[name])
        else:
            object.__delattr__(batch, name)
    return any(name in fields for name in changed)


def _one_per_row(workloads: Any, rows: int) -> Any:
    if not hasattr(workloads, "__len__") or getattr(workloads, "ndim", 1) != 1:
        shape = tuple(getattr(workloads, "shape", ()))
        raise ValueError(
            f"workloads have shape {shape}, batch_size is {rows}; one number per row is needed: return shape ({rows},)"
        )
    if len(workloads) != rows:
        raise ValueError(
            f"workloads has {len(workloads)} entries, batch_size is {rows}; one per row is needed, padding included: "
            "return one per sample"
        )
    return workloads


def _as_array(workloads: Any) -> Any:
    """A one-dimensional integer tensor as an array that shares its memory; any other value unchanged."""
    if isinstance(workloads, torch.Tensor) and workloads.dim() == 1 and not workloads.is_floating_point():
        return workloads.detach().numpy()
    return workloads


def _on_host(values: list[Any]) -> tuple[list[Any], torch.Event | None]:
    """Copy tensors and arrays, from CUDA to pinned memory; returns them, and the event after which they are complete.

    Those on the host are copied too: a method may return the same memory for the next batch before this one is packed,
    and numpy() forbids to resize a storage, as TorchRec does to free features early.
    """
    device = next((value.device for value in values if isinstance(value, torch.Tensor) and value.is_cuda), None)

    def copy(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and device is not None:
            pinned = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
            return pinned.copy_(value, non_blocking=True)
        if isinstance(value, torch.Tensor):
            return value.clone()
        return value.copy() if isinstance(value, np.ndarray) else value

    host = [copy(value) for value in values]
    if device is None:
        return host, None
    # On the current stream of the tensors' device, which need not be the current device.
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(device))
    return host, copied
