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

# The exception types that travel by name: a user's mistake raises the same type on every rank.
_USER_ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError, "KeyError": KeyError}


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
    mine = {
        "error": None if error is None else describe_error(error),
        "schema": None if schema is None else schema.to_json(),
        "options": json.loads(options.to_json()),
        "calibrations": None if calibration is None else dataclasses.asdict(calibration),
        "shuffler": shuffler_type,
        "versions": {"evenrank": __version__, "torch": torch.__version__},
        "real_rows": real_rows,
        "states_padding": schema is not None and schema.states_padding,
    }
    said = [json.loads(text) for text in channel.gather_text(json.dumps(mine), step)]
    raise_first_error([item["error"] for item in said], error, channel.members)
    for name in ("options", "calibrations", "shuffler", "versions"):
        _require_equal(name, [item[name] for item in said], channel.members)
    described = {rank: BatchSchema.from_json(item["schema"]) for rank, item in enumerate(said) if item["schema"]}
    if not described:
        return Agreement(None, 0)
    first_rank = min(described)
    for rank, other in described.items():
        different = described[first_rank].differences(other)
        if different:
            raise ValueError(
                f"the batches of ranks {channel.members[first_rank]} and {channel.members[rank]} differ: "
                f"{'; '.join(different)}; all ranks must bring the same type, keys, dtypes and plain values: make "
                "them equal"
            )
    agreed = described[first_rank]
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
        texts = channel.gather_text("" if error is None else "\n".join(describe_error(error)), step)
        raise_first_error([text.split("\n", 1) if text else None for text in texts], error, channel.members)


def describe_error(error: Exception) -> list[str]:
    """Type name and text of an error, for the other ranks."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return [type(error).__name__, str(text)]


def raise_first_error(
    described: list[list[str] | None], own: Exception | None, members: Sequence[int] | None = None
) -> None:
    """Raise the errors of all ranks as one, of the first failing rank's type where that is a user's mistake.

    The error's attribute `failed_ranks` lists these ranks; its cause is this rank's own.

    Args:
        described: what `describe_error` says of each rank's error; None or nothing for a rank without one.
        own: this rank's error, if it has one.
        members: the ranks' global numbers, by which they are named; 0, 1, … if not given.
    """
    names = range(len(described)) if members is None else members
    failed = [(rank, *item) for rank, item in zip(names, described) if item]
    if not failed:
        return
    first_type = failed[0][1]
    error: Exception
    if first_type in _USER_ERRORS:
        error = _USER_ERRORS[first_type]("; ".join(f"rank {rank}: {text}" for rank, _, text in failed))
    else:
        error = RuntimeError("; ".join(f"rank {rank}: {name}: {text}" for rank, name, text in failed))
    error.failed_ranks = [rank for rank, *_ in failed]  # type: ignore[attr-defined]
    raise error from own


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
