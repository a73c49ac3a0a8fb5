"""AGREE: before the first batch, ranks compare their settings and the schemas of their batches."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from commons.distributed.channel.agree import CALL_NUMBERS, ControlChannel
from commons.distributed.errors import capture_error, name_ranks
from commons.distributed.gather.local_rows import LocalRows
from commons.perf_model.partitioner.inputs import as_array
from commons.sequence_batch.schema import BatchSchema

logger = logging.getLogger(__name__)
S = TypeVar("S")
# Batches with fewer different costs may be alike by chance.
_TELLING_COSTS = 8


class SchemasDifferError(ValueError):
    """The first batches of the ranks have different schemas; raised on every rank."""


def agree_on_schema(
    channel: ControlChannel,
    step: int,
    settings: dict[str, Any],
    local: Sequence[LocalRows],
    tables: Sequence[np.ndarray],
) -> tuple[BatchSchema | None, int]:
    """Compare settings and schemas over the ranks; a rank without data learns the schema.

    The JSON values of `settings` must be equal on all ranks. This rank's batches are `local`, see
    `ShuffleSession.prepare`, and `tables` are their packed rows. Ranks that have read the same rows are logged once.

    Returns:
        The schema, or None if no rank has a batch; and the largest number of words of any rank.

    Raises:
        SchemasDifferError: the batches of two ranks differ; the message names the ranks and the differences.
        ValueError: ranks differ in their settings.
        KeyError: the batches' type is not imported on a rank without a batch.
        Exception: an error in describing a batch of any rank, raised on all.
    """
    own = local[0].schema
    # The other ranks wait for any error here. An error in a batch may be the reason for different settings.
    text, problem = capture_error(lambda: "" if own is None else own.text)
    error = next((each.error for each in local if each.error is not None), None) or problem
    numbers = [sum(map(len, tables)), _digest_of(local, tables)]
    words, digests = channel.agree("shuffle", None if error else settings, error, numbers, step, CALL_NUMBERS).T
    most_words = int(words.max())
    _warn_of_same_rows(channel, digests)
    texts = {rank: text for rank, text in zip(channel.members, channel.gather_text(text or "", step)) if text}
    if not texts:
        return None, 0
    # Fails on a rank that has not imported the batches' type.
    schemas, error = capture_error(lambda: {rank: BatchSchema.from_text(each) for rank, each in texts.items()})
    channel.agree("agreement on the schema", {}, error, step=step)
    assert schemas is not None  # noqa: S101  an error has been raised
    schema = next(iter(schemas.values()))
    if (found := find_difference(schemas, BatchSchema.differences)) is not None:
        what, other = found
        raise SchemasDifferError(
            f"{what}; all ranks must have the same type, structure, keys, dtypes and plain values: make them equal, or "
            f"turn values that depend on the rows into properties{schema.way_out(other)}"
        )
    _, error = capture_error(schema.empty_batch)  # also fails where the type is not imported
    channel.agree("agreement on the batch type", {}, error, step=step)
    return schema, most_words


def _digest_of(local: Sequence[LocalRows], tables: Sequence[np.ndarray]) -> int:
    """A positive digest of the packed rows of a rank; 0 if they do not tell ranks apart."""
    known = [as_array(each.workloads, "workloads") for each, table in zip(local, tables) if len(table)]
    costs = {cost for array in known for cost in array.tolist()}
    if len(costs) < _TELLING_COSTS:
        return 0
    digest = hashlib.blake2b(b"".join(table.tobytes() for table in tables), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _warn_of_same_rows(channel: ControlChannel, digests: np.ndarray) -> None:
    values, counts = np.unique(digests[digests > 0], return_counts=True)
    if channel.rank == 0 and counts.max(initial=0) > 1:
        alike = np.flatnonzero(digests == values[counts.argmax()]).tolist()
        logger.warning(
            "%s have read the same rows, by the costs and lengths of their first batch, so that each row is "
            "trained several times; ranks that share a global batch read different rows: give each rank its own, such "
            "as by torch's DistributedSampler, or pass the data-parallel group as pg_group if these ranks are peers",
            name_ranks([channel.members[rank] for rank in alike]),
        )


def find_difference(batches: Mapping[int, S], differences: Callable[[S, S], Sequence[str]]) -> tuple[str, S] | None:
    """A text about the first rank and the first one that differs from it, and that one's description; None for none.

    `batches` are descriptions by rank, without ranks that have no batch; `differences` returns texts about two of them.
    """
    first = next(iter(batches), -1)
    for rank, other in batches.items():
        if different := differences(batches[first], other):
            return f"the batches of ranks {first} and {rank} differ: {'; '.join(different)}", other
    return None
