"""GlobalBatch: the lengths of all rows of a global batch, by rank, attached to a rank's part of it.

A model that needs a count over all ranks, such as that of its loss terms, reads it from there without a collective. The
attachment survives copies of the whole batch, and is valid while the batch's fields and row counts are unchanged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from commons.distributed.engine.shuffle_handle import PreparedShuffle
from commons.distributed.process_group import resolve_process_group
from commons.perf_model.loads import members
from commons.perf_model.shuffle_plan import ShufflePlan
from commons.sequence_batch.batch import BaseBatch
from commons.sequence_batch.fields import copy_batch
from commons.sequence_batch.schema import BatchSchema


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """The global batch of one step, of which a rank's batch is a part."""

    schema: BatchSchema  # of the batches
    plan: ShufflePlan  # the place of every row
    step: int  # within the plan's window; 0 if the plan is of one batch
    members: Sequence[int]  # global ranks of the group
    described: dict[str, Any]  # by name, the top-level row fields of the rank's batch
    row_counts: tuple[int, int | None]  # `batch_size` and `actual_batch_size` of the rank's batch

    def of_copy(self, batch: BaseBatch, copied: BaseBatch) -> GlobalBatch:
        """The attachment for a copy of a whole batch."""
        fields = {name: getattr(copied, name) for name in self.described if self._describes(batch, name)}
        return dataclasses.replace(self, described=fields)

    def loss_terms(self, batch: BaseBatch, pg_group: dist.ProcessGroup | None) -> int | None:
        """See `BaseBatch.global_loss_terms`."""
        if not self._is_of(pg_group):
            return None
        columns = self._columns("labels")
        dense = next((field for field in self.schema.dense if field.path == ("labels",)), None)
        if columns is None and dense is None:
            return 0 if batch.labels is None else None
        if not self._describes(batch, "labels"):
            return None
        if dense is not None:
            return len(self.plan.destination[self._trained_now]) * math.prod(dense.trailing)
        assert columns is not None  # noqa: S101  labels are one or the other
        return int(self.plan.gathered.lengths_of_keys(columns)[:, self._trained_now].sum())

    def lengths(self, batch: BaseBatch, key: str, pg_group: dist.ProcessGroup | None) -> list[np.ndarray] | None:
        """See `BaseBatch.global_lengths`."""
        columns = self._columns("features")
        if columns is None or not self._is_of(pg_group) or not self._describes(batch, "features"):
            return None
        plan, steps = self.plan, self.plan.gathered.steps
        here = np.flatnonzero(plan.destination % steps == self.step)
        rank = plan.destination[here] // steps
        (of_key,) = plan.gathered.lengths_of_keys([columns[batch.features.keys().index(key)]])[:, here]
        return [of_key[own] for own in members(rank, plan.gathered.num_ranks)]

    @property
    def _trained_now(self) -> np.ndarray | slice:
        """The rows of this step: bool `(N,)`, or a slice of all."""
        steps = self.plan.gathered.steps
        return slice(None) if steps == 1 else self.plan.destination % steps == self.step

    def _columns(self, field_name: str) -> range | None:
        """Columns of the keys of a KeyedJaggedTensor field in the gathered lengths."""
        first = 0
        for field in self.schema.jagged:
            if field.path == (field_name,) and field.row_shape is None:
                return range(first, first + len(field.keys))
            first += len(field.keys)
        return None

    def _is_of(self, pg_group: dist.ProcessGroup | None) -> bool:
        group = resolve_process_group(pg_group, with_context_parallel=True)
        return list(self.members) == ([0] if group is None else dist.get_process_group_ranks(group))

    def _describes(self, batch: BaseBatch, name: str) -> bool:
        if (batch.batch_size, batch.actual_batch_size) != self.row_counts:  # changed since the exchange
            return False
        return name in self.described and getattr(batch, name, None) is self.described[name]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # not kept by pickles and deep copies, whose fields are other objects


def attach_global_batches(batches: Sequence[Any], prepared: PreparedShuffle, members: Sequence[int]) -> list[Any]:
    """Attach a GlobalBatch to each batch that a rank trains.

    If no rank's rows change, the batches are the caller's own objects, which may be trained in other steps too: nothing
    is attached, on any rank. If only other ranks' rows change, this rank's batch is returned as a copy.

    The batches are one for each step of the plan, after the exchange; `members` are the global ranks of the group.
    """
    plan, schema, exchange = prepared.plan, prepared.schema, prepared.exchange
    if plan is None or schema is None or exchange is None or not plan.changes:
        return list(batches)
    if not all(isinstance(batch, BaseBatch) for batch in batches):
        return list(batches)
    paths = [field.path for field in schema.jagged] + [field.path for field in schema.dense]
    names, results = [path[0] for path in paths if len(path) == 1], []
    for step, (batch, (changes, *_)) in enumerate(zip(batches, exchange.results)):
        result = batch if changes else copy_batch(batch, {})
        described = {name: getattr(result, name) for name in names}
        counts = result.batch_size, result.actual_batch_size
        result._global_batch = GlobalBatch(schema, plan, step, members, described, counts)
        results.append(result)
    return results
