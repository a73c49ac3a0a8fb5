"""Calibrations without a measurement."""

from __future__ import annotations

from commons.perf_model.calibration import (
    Calibration,
    DeviceShape,
    FitQuality,
    describe_task,
)
from commons.perf_model.task_estimator import HSTUAttentionTask

TASK = HSTUAttentionTask(64, 4, 16, 2)
DEVICE = DeviceShape("cpu", "some processor", 1)
QUALITY = FitQuality(60, 0.99, 0.99, 0.01, 0.05, 0.08)


def make_calibration(per_step=3.0, per_row=0.01, per_token=0.008, per_pair=4e-5, task=TASK):
    return Calibration(describe_task(task), DEVICE, per_step, per_row, per_token, per_pair, QUALITY)
