"""Calibrations without a measurement, and a shuffler that plans with one."""

from __future__ import annotations

import dataclasses

import torch

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.perf_model.calibration import Calibration, DeviceShape, FitQuality, describe_device, describe_task
from commons.perf_model.task_estimator import HSTUAttentionTask
from tests.helpers.models.torchrec_model import KEYS

TASK = HSTUAttentionTask(64, 4, 16, 2)
DEVICE = DeviceShape("cpu", "some processor", 1)
QUALITY = FitQuality(60, 0.99, 0.99, 0.01, 0.05, 0.08)


def make_calibration(per_step=3.0, per_row=0.01, per_token=0.008, per_pair=4e-5, task=TASK):
    return Calibration(describe_task(task), DEVICE, per_step, per_row, per_token, per_pair, QUALITY)


class MeasuredShuffler(BaseTaskBalancedBatchShuffler):
    """Costs of SampleBatch's rows by the length of their first key, as a calibration file has them."""

    task = HSTUAttentionTask(8, 2, 4, 2)

    def __init__(self, options=None, pg_group=None):
        super().__init__(options, pg_group)
        self.cost = self.calibrated(self.task)

    def get_workloads(self, batch):
        return self.cost.get_workloads(batch.features.lengths().view(len(KEYS), -1)[0])


def write_calibration(path, task=MeasuredShuffler.task, **device):
    """The path of a file of this machine's CPU, or of a device that differs in something."""
    here = dataclasses.replace(describe_device(torch.device("cpu")), **device)
    dataclasses.replace(make_calibration(2.0, 0.25, 0.5, 0.0, task), device=here).save(path)
    return str(path)
