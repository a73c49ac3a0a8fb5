"""AGREE: what ranks compare once, before the first batch: schema, options and versions, as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from commons.distributed.control import ControlChannel
from commons.distributed.options import ShufflerOptions
from commons.perf_model.calibration import Calibration
from commons.sequence_batch.schema import BatchSchema
from commons.version import __version__


@dataclass(frozen=True)
class Agreement:
    """What all ranks agreed on.

    Attributes:
        schema: the batch schema; None while no rank has had a batch.
        max_real_rows: the largest number of real rows among the ranks' first batches.
        states_padding: whether batches of the schema's type can say which rows are padding.
    """

    schema: BatchSchema | None
    max_real_rows: int
    states_padding: bool = True


def agree(
    channel: ControlChannel,
    step: int,
    options: ShufflerOptions,
    shuffler_type: str,
    schema: BatchSchema | None,
    real_rows: int,
    error: Exception | None,
    calibration: Calibration | None = None,
) -> Agreement:
    """Compare schemas, options, calibrations and versions over the ranks; a rank without data learns the schema.

    Raises:
        ValueError: ranks differ; the message says which and in what.
        Exception: a rank could not describe its batch; its error, on every rank.
    """
    mine = ""
    if error is None:
        try:
            described = {
                "schema": None if schema is None else schema.to_json(),
                "options": json.loads(options.to_json()),
                "calibrations": None if calibration is None else dataclasses.asdict(calibration),
                "shuffler": shuffler_type,
                "versions": {"evenrank": __version__, "torch": torch.__version__},
                "real_rows": real_rows,
                "states_padding": schema is not None and schema.states_padding,
            }
            mine = json.dumps(described)
        except Exception as caught:  # whatever it is, the others are waiting for it
            error = caught
    texts = channel.gather_text(mine, step)
    if not all(texts):
        channel.raise_on_all(error, step)
    said = [json.loads(text) for text in texts]
    for name in ("options", "calibrations", "shuffler", "versions"):
        _require_equal(name, [item[name] for item in said], channel.members)
    schemas = {rank: BatchSchema.from_json(item["schema"]) for rank, item in enumerate(said) if item["schema"]}
    if not schemas:
        return Agreement(None, 0)
    first_rank = min(schemas)
    for rank, other in schemas.items():
        different = schemas[first_rank].differences(other)
        if different:
            raise ValueError(
                f"the batches of ranks {channel.members[first_rank]} and {channel.members[rank]} differ: "
                f"{'; '.join(different)}; all ranks must bring the same type, keys, dtypes and plain values: make "
                "them equal, or a property what depends on the rows"
            )
    agreed = schemas[first_rank]
    _require_known_type(channel, step, agreed)
    return Agreement(agreed, max(item["real_rows"] for item in said), said[first_rank]["states_padding"])


def _require_known_type(channel: ControlChannel, step: int, schema: BatchSchema) -> None:
    """Raise KeyError, on all ranks, if one of them could not build an empty batch of the agreed type."""
    error: Exception | None = None
    try:
        schema.empty_batch()
    except Exception as caught:
        error = caught
    failed = channel.gather(np.array([error is not None]), step, "gather of known batch types")[:, 0]
    if failed.any():
        channel.raise_on_all(error, step)


def _require_equal(name: str, values: list[Any], members: Sequence[int]) -> None:
    for rank, value in zip(members, values):
        if value == values[0]:
            continue
        if isinstance(value, dict) and isinstance(values[0], dict):
            keys = [key for key in value if value[key] != values[0].get(key)]
            shown = [{key: item.get(key) for key in keys} for item in (values[0], value)]
        else:
            shown = [values[0], value]
        raise ValueError(
            f"{name} differ: rank {members[0]} has {shown[0]}, rank {rank} has {shown[1]}; all ranks must use the "
            "same: make them equal"
        )
