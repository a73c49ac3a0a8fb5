"""AGREE: what ranks compare once, before the first batch: settings, versions and the schema of their batches."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import torch

from commons.distributed.control import ControlChannel
from commons.distributed.errors import attempt
from commons.distributed.local_rows import LocalRows
from commons.distributed.options import ShufflerOptions
from commons.perf_model.calibration import Calibration
from commons.perf_model.partitioner.core import SOURCES
from commons.sequence_batch.schema import BatchSchema
from commons.version import __version__


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
            "versions": {"evenrank": __version__, "planner": SOURCES, "torch": torch.__version__},
        }
        text = "" if local[0].schema is None else json.dumps(local[0].schema.to_json())
    except Exception as caught:  # whatever it is, the others are waiting for it
        error = error or caught
    most_words = int(channel.agree("shuffle", None if error else settings, error, [words], step).max())
    texts = zip(channel.members, channel.gather_text(text, step))
    schemas = {rank: BatchSchema.from_json(json.loads(said)) for rank, said in texts if said}
    if not schemas:
        return None, 0
    first = next(iter(schemas))
    for rank, other in schemas.items():
        different = schemas[first].differences(other)
        if different:
            raise SchemasDifferError(
                f"the batches of ranks {first} and {rank} differ: {'; '.join(different)}; all ranks must bring the "
                "same type, keys, dtypes and plain values: make them equal, or a property what depends on the rows"
            )
    _, error = attempt(schemas[first].empty_batch)  # of a type that this rank may not have imported
    channel.agree("agreement on the batch type", {}, error, step=step)
    return schemas[first], most_words
