"""AGREE: what ranks compare once, before the first batch: settings, versions and the schema of their batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from commons.distributed.channel.agree import ControlChannel
from commons.distributed.errors import attempt
from commons.distributed.gather.local_rows import LocalRows
from commons.perf_model.partitioner.core import SOURCES
from commons.sequence_batch.schema import BatchSchema
from commons.version import __version__

S = TypeVar("S")


class SchemasDifferError(ValueError):
    """The first batches of the ranks differ in schema; raised on every rank, of which none is known to be right."""


def agree_on_schema(
    channel: ControlChannel,
    step: int,
    settings: Callable[[], dict[str, Any]],
    local: Sequence[LocalRows],
    words: int,
) -> tuple[BatchSchema | None, int]:
    """Compare settings and schemas over the ranks; a rank without data learns the schema.

    Args:
        channel: the ranks.
        step: number of the step.
        settings: gives what all ranks have alike, as JSON holds it; their versions are added.
        local: what this rank brings, its batches in order; a single entry without a schema for none.
        words: what it has to say of its rows.

    Returns:
        The schema, None while no rank has had a batch, and the largest number of words of a rank.

    Raises:
        SchemasDifferError: the batches of two ranks differ; the message says which and in what.
        ValueError: ranks differ in their settings.
        KeyError: a rank without a batch does not know the type of the others'.
        Exception: a rank could not describe its batch; its error, on every rank.
    """
    own, versions = local[0].schema, {"evenrank": __version__, "planner": SOURCES, "torch": torch.__version__}
    # Whatever goes wrong here, the others are waiting for it. An error of the rows may be why settings differ.
    said, problem = attempt(lambda: (settings(), "" if own is None else own.text))
    error = next((each.error for each in local if each.error is not None), None) or problem
    compared, text = said or ({}, "")
    options = None if error else compared | {"versions": versions}
    most_words = int(channel.agree("shuffle", options, error, [words], step).max())
    texts = {rank: text for rank, text in zip(channel.members, channel.gather_text(text, step)) if text}
    if not texts:
        return None, 0
    # A type of another rank's batch may not be imported here; then this rank alone fails.
    schemas, error = attempt(lambda: {rank: BatchSchema.from_text(each) for rank, each in texts.items()})
    channel.agree("agreement on the schema", {}, error, step=step)
    assert schemas is not None  # noqa: S101  an error has been raised
    schema = next(iter(schemas.values()))
    if (found := find_difference(schemas, BatchSchema.differences)) is not None:
        what, other = found
        raise SchemasDifferError(
            f"{what}; all ranks must bring the same type, structure, keys, dtypes and plain values: make them equal, "
            f"or a property what depends on the rows{schema.way_out(other)}"
        )
    _, error = attempt(schema.empty_batch)  # of a type that this rank may not have imported
    channel.agree("agreement on the batch type", {}, error, step=step)
    return schema, most_words


def find_difference(batches: Mapping[int, S], differences: Callable[[S, S], Sequence[str]]) -> tuple[str, S] | None:
    """Compare what ranks say of their batches.

    Args:
        batches: by rank, what a rank without a batch does not have.
        differences: short texts of what differs between two of them.

    Returns:
        A text that names the first rank and the next one that differs, and what that one says; None if none does.
    """
    first = next(iter(batches), -1)  # of no batch, none differs
    for rank, other in batches.items():
        if different := differences(batches[first], other):
            return f"the batches of ranks {first} and {rank} differ: {'; '.join(different)}", other
    return None
