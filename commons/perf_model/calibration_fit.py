"""FIT: from measured steps to a Calibration.

Coefficients are not negative (non-negative least squares; Lawson and Hanson 1974, "Solving Least Squares Problems").
The fit minimises relative errors, so that short steps count as much as long ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.optimize import nnls

from commons.perf_model.calibration import Calibration, DeviceShape, FitQuality, describe_task
from commons.perf_model.task_estimator import AttentionTask

# Every n-th measurement is held out of the fit, to measure how well the fit predicts others.
_HELD_OUT_EVERY = 4
MIN_MEASUREMENTS = 16
# Below this, times hardly depend on the terms, and a calibration would be noise.
_LEAST_R2 = 0.5
# The smallest advantage over operations that the measurements should be able to show, as a fraction of their error.
_ADVANTAGE_SOUGHT = 0.1
# As a fraction of a step's time; less is rounding.
_LEAST_ADVANTAGE = 1e-4


@dataclass(frozen=True)
class StepMeasurement:
    """One measured step: forward and backward pass of a batch."""

    rows: int  # rows of the batch
    tokens: int  # tokens that the model computed
    pairs: int  # pairs of the mask of one layer, over all rows
    ms: float  # milliseconds


@dataclass(frozen=True)
class Verdict:
    """Whether a calibration predicts steps better than operations do, which predict time = c0 + c · FLOPs."""

    error: float  # mean relative error of the calibration on held-out measurements
    operations_error: float  # the same of the operations
    better: bool  # whether the calibration's error is smaller, with 95 % confidence, paired
    # How many measurements, held-out ones included, would show a difference of the present size and spread. If that
    # many were made and `better` is False, operations predict as well.
    measurements: int


def fit_calibration(measurements: Sequence[StepMeasurement], task: AttentionTask, device: DeviceShape) -> Calibration:
    """Fit the cost of a step.

    Args:
        measurements: at least 16 steps, of batches that differ in rows, lengths and their spread; every fourth is held
            out of the fit.
        task: the model that was measured.
        device: where it was measured.

    Raises:
        ValueError: too few measurements, a time that is not a positive number, batches too alike to separate the four
            terms, or times that hardly depend on them.
    """
    terms, times = _as_arrays(measurements)
    if len(times) < MIN_MEASUREMENTS:
        raise ValueError(
            f"there are {len(times)} measurements; a fit needs at least {MIN_MEASUREMENTS}: measure more batches"
        )
    if not (np.isfinite(times) & (times > 0)).all():
        wrong = int(np.argmin(np.isfinite(times) & (times > 0)))
        raise ValueError(f"measurement {wrong} took {times[wrong]} ms; a step takes a positive time: measure again")
    held_out = _is_held_out(len(times))
    _require_spread(terms[~held_out])
    coefficients = _fit(terms[~held_out], times[~held_out])
    predicted = terms @ coefficients
    errors = np.abs(predicted / times - 1)[held_out]
    explained = _r2(predicted, times)
    if not explained >= _LEAST_R2:
        raise ValueError(
            f"rows, tokens and pairs explain {max(explained, 0.0):.0%} of the variation of the times; a fit needs "
            f"{_LEAST_R2:.0%}: measure with nothing else running, longer rows or larger batches"
        )
    quality = FitQuality(
        num_measurements=len(times),
        r2=explained,
        held_out_r2=_r2(predicted[held_out], times[held_out]),
        held_out_mean_error=float(errors.mean()),
        held_out_worst_error=float(errors.max()),
        flops_mean_error=float(_operations_errors(terms, times, task).mean()),
    )
    per_step, per_row, per_token, per_pair = coefficients.tolist()
    return Calibration(describe_task(task), device, per_step, per_row, per_token, per_pair, quality)


def judge_calibration(
    calibration: Calibration, measurements: Sequence[StepMeasurement], task: AttentionTask
) -> Verdict:
    """Compare a calibration with operations, on the measurements that were held out of both fits.

    Args:
        calibration: fitted to `measurements`.
        measurements: as for `fit_calibration`.
        task: the model that was measured.
    """
    terms, times = _as_arrays(measurements)
    errors = np.abs(terms @ np.array(calibration.coefficients) / times - 1)[_is_held_out(len(times))]
    operations_errors = _operations_errors(terms, times, task)
    gains = operations_errors - errors  # float64 (held out,)
    # Student's t: the advantage is significant if its mean is above `reach` standard errors.
    gain, spread, reach = float(gains.mean()), float(gains.std(ddof=1)), float(stats.t.ppf(0.975, len(gains) - 1))
    sought = max(gain, _ADVANTAGE_SOUGHT * float(operations_errors.mean()))
    held_out_needed = math.ceil((reach * spread / sought) ** 2) if sought > 0 else 0
    return Verdict(
        error=float(errors.mean()),
        operations_error=float(operations_errors.mean()),
        better=gain > max(reach * spread / math.sqrt(len(gains)), _LEAST_ADVANTAGE),
        measurements=max(MIN_MEASUREMENTS, _HELD_OUT_EVERY * held_out_needed),
    )


def _as_arrays(measurements: Sequence[StepMeasurement]) -> tuple[np.ndarray, np.ndarray]:
    """The terms of each step's time, float64 `(n, 4)`, and the times, `(n,)`."""
    numbers = np.array([[1, m.rows, m.tokens, m.pairs, m.ms] for m in measurements], dtype=np.float64).reshape(-1, 5)
    return numbers[:, :4], numbers[:, 4]


def _is_held_out(num_measurements: int) -> np.ndarray:
    """Which measurements are held out, bool `(num_measurements,)`."""
    return np.arange(num_measurements) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1


def _operations_errors(terms: np.ndarray, times: np.ndarray, task: AttentionTask) -> np.ndarray:
    """Relative errors of time = c0 + c · FLOPs on the held-out measurements."""
    held_out = _is_held_out(len(times))
    flops = np.stack([np.ones_like(times), task.forward_flops(terms[:, 2], terms[:, 3])], axis=1)
    predicted = flops @ _fit(flops[~held_out], times[~held_out])
    return np.abs(predicted / times - 1)[held_out]


def _fit(terms: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Non-negative coefficients of least relative error; columns are scaled, because they differ by many decades."""
    relative = terms / times[:, None]
    scale = np.linalg.norm(relative, axis=0)
    solution, _ = nnls(relative / scale, np.ones(len(times)))
    return solution / scale


def _require_spread(terms: np.ndarray) -> None:
    scaled = terms / np.maximum(np.linalg.norm(terms, axis=0), 1e-300)
    if np.linalg.matrix_rank(scaled, tol=1e-6) < terms.shape[1]:
        raise ValueError(
            f"the batches have {len(np.unique(terms[:, 1]))} different numbers of rows and "
            f"{len(np.unique(terms[:, 2]))} of tokens, too alike to separate the costs of a step, a row, a token and a "
            "pair: measure batches of different sizes, lengths and spreads"
        )


def _r2(predicted: np.ndarray, times: np.ndarray) -> float:
    """Coefficient of determination; 0 for times that do not vary."""
    variation = float(np.square(times - times.mean()).sum())
    return 1 - float(np.square(times - predicted).sum()) / variation if variation else 0.0
