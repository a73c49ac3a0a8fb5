"""AGREE: what ranks compare once, before the first batch: settings, versions and the schema of their batches."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from commons.distributed.channel.agree import ControlChannel
from commons.distributed.errors import attempt
from commons.distributed.local_rows import LocalRows
from commons.distributed.options import ShufflerOptions
from commons.perf_model.calibration import Calibration
from commons.perf_model.partitioner.core import SOURCES
from commons.sequence_batch.schema import BatchSchema
from commons.version import __version__

S = TypeVar("S")


class SchemasDifferError(ValueError):
    """The first batches of the ranks differ in schema; raised on every rank, of which none is known to be right."""


def agree_on_schema(
    channel: ControlChannel,
    step: int,
    options: ShufflerOptions,
    shuffler_type: str,
    calibration: Calibration | None,
    window: int,
    token_features: tuple[str, ...] | None,
    has_groups: bool,
    local: Sequence[LocalRows],
    words: int,
) -> tuple[BatchSchema | None, int]:
    """Compare settings and schemas over the ranks; a rank without data learns the schema.

    Args:
        channel: the ranks.
        step: number of the step.
        options: of the shuffler.
        shuffler_type: name of its class.
        calibration: what its workloads are measured with, if anything.
        window: most batches of a rank that are planned together.
        token_features: keys that count as tokens; None for all but the labels'.
        has_groups: whether its rows have groups.
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
    # An error comes first: it may be why settings differ.
    settings, text, error = None, "", next((each.error for each in local if each.error is not None), None)
    try:
        settings = {
            "options": json.loads(options.to_json()),
            "calibrations": None if calibration is None else dataclasses.asdict(calibration),
            "shuffler": shuffler_type,
            "window": window,
            "token_features": None if token_features is None else list(token_features),
            "has_groups": has_groups,
            "versions": {"evenrank": __version__, "planner": SOURCES, "torch": torch.__version__},
        }
        text = "" if local[0].schema is None else local[0].schema.text
    except Exception as caught:  # whatever it is, the others are waiting for it
        error = error or caught
    most_words = int(channel.agree("shuffle", None if error else settings, error, [words], step).max())
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
    first = next(iter(batches))
    for rank, other in batches.items():
        if different := differences(batches[first], other):
            return f"the batches of ranks {first} and {rank} differ: {'; '.join(different)}", other
    return None
