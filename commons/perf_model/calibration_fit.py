"""FIT: from measured steps to a Calibration.

Coefficients are not negative (non-negative least squares; Lawson and Hanson 1974, "Solving Least Squares Problems"),
and relative errors are what is minimised, so that short steps count as much as long ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from commons.perf_model.calibration import Calibration, DeviceShape, FitQuality, describe_task
from commons.perf_model.task_estimator import AttentionTask

# Every n-th measurement is held out of the fit, to say how well it predicts what it has not seen.
_HELD_OUT_EVERY = 4
_MIN_MEASUREMENTS = 16
# Below this a calibration would be no better than chance.
_LEAST_R2 = 0.5


@dataclass(frozen=True)
class StepMeasurement:
    """One measured step: forward and backward pass of a batch.

    Attributes:
        rows: rows of the batch.
        tokens: tokens that the model computed.
        pairs: pairs that the mask of one layer keeps, over all rows.
        ms: milliseconds.
    """

    rows: int
    tokens: int
    pairs: int
    ms: float


def fit_calibration(measurements: Sequence[StepMeasurement], task: AttentionTask, device: DeviceShape) -> Calibration:
    """Fit the cost of a step.

    Args:
        measurements: at least 16 steps, of batches that differ in rows, lengths and their spread; every fourth is held
            out of the fit.
        task: the model that was measured.
        device: what it was measured on.

    Raises:
        ValueError: too few measurements, times that are no positive numbers, batches too alike to tell the four terms
            apart, or times that hardly depend on them.
    """
    times = np.array([measurement.ms for measurement in measurements], dtype=np.float64)
    if len(times) < _MIN_MEASUREMENTS:
        raise ValueError(
            f"there are {len(times)} measurements; a fit needs at least {_MIN_MEASUREMENTS}: measure more batches"
        )
    if not (np.isfinite(times) & (times > 0)).all():
        wrong = int(np.argmin(np.isfinite(times) & (times > 0)))
        raise ValueError(f"measurement {wrong} took {times[wrong]} ms; a step takes a positive time: measure again")
    terms = np.array([[1, m.rows, m.tokens, m.pairs] for m in measurements], dtype=np.float64)
    held_out = np.arange(len(times)) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
    _require_spread(terms[~held_out])
    coefficients = _fit(terms[~held_out], times[~held_out])
    flops = np.stack([np.ones_like(times), task.forward_flops(terms[:, 2], terms[:, 3])], axis=1)
    flops_only = flops @ _fit(flops[~held_out], times[~held_out])
    predicted = terms @ coefficients
    errors = np.abs(predicted / times - 1)[held_out]
    explained = _r2(predicted, times)
    if not explained >= _LEAST_R2:
        raise ValueError(
            f"rows, tokens and pairs explain {explained:.0%} of the variation of the times; a fit needs "
            f"{_LEAST_R2:.0%}: measure with nothing else running, longer rows or larger batches"
        )
    quality = FitQuality(
        num_measurements=len(times),
        r2=explained,
        held_out_r2=_r2(predicted[held_out], times[held_out]),
        held_out_mean_error=float(errors.mean()),
        held_out_worst_error=float(errors.max()),
        flops_mean_error=float(np.abs(flops_only / times - 1)[held_out].mean()),
    )
    per_step, per_row, per_token, per_pair = coefficients.tolist()
    return Calibration(describe_task(task), device, per_step, per_row, per_token, per_pair, quality)


def _fit(terms: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Coefficients of least relative error, none negative; columns are scaled, for they differ by many decades."""
    relative = terms / times[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(relative / scale, np.ones(len(times)))
    return solution / scale


def _require_spread(terms: np.ndarray) -> None:
    scaled = terms / np.maximum(np.linalg.norm(terms, axis=0), 1e-300)
    if np.linalg.matrix_rank(scaled, tol=1e-6) < terms.shape[1]:
        raise ValueError(
            f"the batches have {len(np.unique(terms[:, 1]))} different numbers of rows and "
            f"{len(np.unique(terms[:, 2]))} of tokens, too alike to tell the cost of a step, a row, a token and a pair "
            "apart: measure batches of different sizes, lengths and spreads"
        )


def _r2(predicted: np.ndarray, times: np.ndarray) -> float:
    """Coefficient of determination; 0 for times that do not vary."""
    variation = float(np.square(times - times.mean()).sum())
    return 1 - float(np.square(times - predicted).sum()) / variation if variation else 0.0
