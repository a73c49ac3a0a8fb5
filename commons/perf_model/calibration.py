"""WORKLOAD, measured: the cost of a sample on the user's own hardware, in time.

    measured steps ─► calibration_fit ─► Calibration (a small TOML) ─► CalibratedTask: workloads in units of time

A step of a rank takes

    time = c0 + c1 · rows + c2 · tokens + c3 · Σ pairs

where pairs are the (query, key) pairs that the attention mask keeps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from commons.checks import require_file
from commons.perf_model.task_estimator import AttentionTask, on_host
from commons.whole_folder import whole_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_INT64_MAX = 2**63 - 1
# Load sums of this many rows of this many tokens fit into int64: 1024 ranks × 32 rows × 8 batches at once.
_LONGEST_ROW = 2**17
_MOST_ROWS = 2**18
# A unit of time is between a millisecond and 2^-60 of it.
_FINEST_UNIT = 60
FORMAT_VERSION = 1
_TERMS = ("per_step", "per_row", "per_token", "per_pair")


@dataclass(frozen=True)
class DeviceShape:
    """The device of a calibration."""

    type: str  # "cpu" or "cuda"
    name: str  # of the processor
    threads: int = 1  # of a process on the CPU; 1 on a GPU


@dataclass(frozen=True)
class FitQuality:
    """How well a fit predicts."""

    num_measurements: int  # steps measured, held-out ones included
    r2: float  # coefficient of determination over all measurements
    held_out_r2: float  # the same over the measurements that were held out of the fit
    held_out_mean_error: float  # their mean relative error
    held_out_worst_error: float  # their largest relative error
    flops_mean_error: float  # mean relative error, on the same measurements, of time = c0 + c · FLOPs


@dataclass(frozen=True)
class Calibration:
    """The cost of a step, in milliseconds, for one model on one device.

    Raises:
        ValueError: a coefficient is negative or not finite, rows, tokens and pairs all cost nothing, or a cost is too
            large for any device.
    """

    model: dict[str, Any]  # name of the task's class as "task", and its dimensions
    device: DeviceShape  # where it was measured
    per_step: float  # fixed milliseconds of a step
    per_row: float  # milliseconds per row
    per_token: float  # milliseconds per token
    per_pair: float  # milliseconds per pair of the mask of one layer
    quality: FitQuality  # of the fit

    def __post_init__(self) -> None:
        for name in _TERMS:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise ValueError(
                    f"{name} is {value!r}; a cost is a number of milliseconds, not negative: measure again"
                )
        if max(self.per_row, self.per_token, self.per_pair) == 0:
            raise ValueError(
                "per_row, per_token and per_pair are all 0; with them every row would cost nothing: measure again"
            )
        if not (math.isfinite(self._longest_ms) and 0 <= self.unit_exponent <= _FINEST_UNIT):
            raise ValueError(
                f"per_row is {self.per_row}, per_token is {self.per_token} and per_pair is {self.per_pair}; no device "
                f"takes {self._longest_ms:.3g} ms for a row of {_LONGEST_ROW:,} tokens: measure again"
            )

    @property
    def unit_exponent(self) -> int:
        """The e of the workloads' unit, 2^-e ms: the finest in which sums of many long rows fit into int64."""
        # A margin of a thousandth, because costs may be rounded up.
        return 63 - math.frexp(_MOST_ROWS * 1.001 * self._longest_ms)[1]

    @property
    def _longest_ms(self) -> float:
        """Milliseconds of a very long row with full attention."""
        return self.per_row + self.per_token * _LONGEST_ROW + self.per_pair * _LONGEST_ROW**2

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Milliseconds per step, row, token and pair."""
        return self.per_step, self.per_row, self.per_token, self.per_pair

    def require_match(self, task: AttentionTask | None, device: DeviceShape | None) -> None:
        """Raise ValueError unless the calibration was measured for this model on such a device.

        Args:
            task: the model; None to leave it unchecked.
            device: the device; None to leave it unchecked.
        """
        checks = []
        if task is not None:
            # A file older than an option of the task lacks it, and was measured with its default.
            options = {item.name: item.default for item in dataclasses.fields(task) if item.kw_only}
            measured_model = options | self.model
            checks.append(("model", measured_model, describe_task(task)))
        if device is not None:
            checks.append(("device", dataclasses.asdict(self.device), dataclasses.asdict(device)))
        for what, measured, present in checks:
            for name in sorted(measured.keys() | present.keys()):
                if measured.get(name) != present.get(name):
                    raise ValueError(
                        f"the calibration was measured with {what}.{name} = {measured.get(name)!r}, here it is "
                        f"{present.get(name)!r}; costs hold for one model on one device: run `evenrank calibrate` here"
                    )

    def save(self, path: str | Path) -> None:
        """Write the calibration as TOML, see `load_calibration`; after a failure an earlier file is unchanged."""
        with whole_file(Path(path)) as file:
            file.write(self._to_toml().encode())

    def _to_toml(self) -> str:
        sections = {
            "": {"version": FORMAT_VERSION},
            "milliseconds": {name: getattr(self, name) for name in _TERMS},
            "model": self.model,
            "device": dataclasses.asdict(self.device),
            "quality": dataclasses.asdict(self.quality),
        }
        lines = ["# What a step costs: per_step + per_row · rows + per_token · tokens + per_pair · Σ pairs"]
        for name, values in sections.items():
            lines += ["", f"[{name}]"] if name else []
            # JSON and TOML write strings, numbers and booleans alike.
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        return "\n".join(lines) + "\n"


def is_calibration(path: Path) -> bool:
    """Whether `load_calibration` can read a file."""
    try:
        load_calibration(path)
    except (ValueError, OSError):
        return False
    return True


def load_calibration(path: str | Path) -> Calibration:
    """Read a file that `Calibration.save` wrote.

    Raises:
        OSError: no file, or it cannot be read.
        ValueError: not TOML, another format, or a missing or wrong value.
    """
    require_file(Path(path), "`evenrank calibrate` writes calibrations, which are files: run it, or correct the path")
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML ({error}): run `evenrank calibrate` again") from None
    if content.get("version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has version {content.get('version')!r}; this release reads version {FORMAT_VERSION}: run "
            "`evenrank calibrate` again"
        )
    try:
        return Calibration(
            model=dict(content["model"]),
            device=DeviceShape(**content["device"]),
            quality=FitQuality(**content["quality"]),
            **{name: content["milliseconds"][name] for name in _TERMS},
        )
    except KeyError as error:
        raise ValueError(
            f"{path} lacks {error.args[0]!r}; a calibration has it: run `evenrank calibrate` again"
        ) from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a calibration ({error}): run `evenrank calibrate` again") from None


def describe_task(task: AttentionTask) -> dict[str, Any]:
    """Class and dimensions of a model, as in a calibration's file."""
    dimensions = {name: value for name, value in dataclasses.asdict(task).items() if value is not None}
    return {"task": type(task).__name__, **dimensions}


def describe_device(device: torch.device) -> DeviceShape:
    """The shape of a device, as in a calibration's file."""
    if device.type == "cuda":
        return DeviceShape("cuda", torch.cuda.get_device_name(device))
    return DeviceShape(device.type, cpu_name(), torch.get_num_threads())


class CalibratedTask:
    """A task whose workloads are measured times; used in place of the task that it is made from.

    Workloads are in units of 2^-e milliseconds; e depends only on the coefficients. The loads of 262,144 rows (1024
    ranks × 32 rows, in windows of 8) of 131,072 tokens fit into int64, and rounding changes the time of a row of up to
    131,072 tokens by at most 0.15 %, mostly by far less. All further arithmetic is in integers, equal on every rank.

    Args:
        task: the model.
        calibration: measured for this model.

    Raises:
        ValueError: the calibration is of another model.
    """

    def __init__(self, task: AttentionTask, calibration: Calibration) -> None:
        calibration.require_match(task, None)
        self.task = task
        self.calibration = calibration
        self.units_per_ms: int = 2**calibration.unit_exponent
        self._per_row, self._per_token, self._per_pair = (
            round(value * self.units_per_ms) for value in calibration.coefficients[1:]
        )

    def get_workloads(self, seqlen: Any, num_targets: Any = None, num_contextual: Any = None) -> Any:
        """Time per row, in units of 1 ÷ `units_per_ms` milliseconds; arguments and result as for the task.

        Raises:
            TypeError, ValueError: as for the task; also if the time of a row does not fit into int64.
        """
        return on_host(self._workloads, seqlen, num_targets, num_contextual)

    def _workloads(self, seqlen: Any, num_targets: Any, num_contextual: Any) -> Any:
        tokens, pairs = self.task.tokens_and_pairs(seqlen, num_targets, num_contextual)
        self._check(tokens, pairs)
        return self._cost(tokens, pairs)

    def _cost(self, tokens: Any, pairs: Any) -> Any:
        return self._per_row + self._per_token * tokens + self._per_pair * pairs

    def _check(self, tokens: Any, pairs: Any) -> None:
        """Check values on the host; values on a device are not read."""
        if isinstance(tokens, torch.Tensor) and tokens.device.type != "cpu":
            return
        most_tokens, most_pairs = (int(np.max(np.asarray(part), initial=0)) for part in (tokens, pairs))
        if self._cost(most_tokens, most_pairs) > _INT64_MAX:
            raise ValueError(
                f"a row of {most_tokens} tokens takes more than 2**63 of the calibration's time units; workloads are "
                "int64: check seqlen"
            )


def cpu_name() -> str:
    """The processor's name from the system, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
