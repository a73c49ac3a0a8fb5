"""Shufflers that plan with a calibration file."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
import torch.distributed as dist

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.perf_model.calibration import Calibration, FitQuality, describe_device, describe_task
from commons.perf_model.task_estimator import HSTUAttentionTask
from tests.helpers.faults import raised_by
from tests.helpers.models import make_batch

TASK = HSTUAttentionTask(8, 2, 4, 2)


class MeasuredShuffler(BaseTaskBalancedBatchShuffler):
    """Costs of the tests' batches, by the length of their first key."""

    def __init__(self, options=None, pg_group=None):
        super().__init__(options, pg_group)
        self.cost = self.calibrated(TASK)

    def get_workloads(self, batch):
        return self.cost.get_workloads(batch.features.lengths().view(-1, batch.batch_size)[0])


def write_calibration(path, per_token=0.5, task=TASK, **device):
    here = dataclasses.replace(describe_device(torch.device("cpu")), **device)
    quality = FitQuality(60, 0.99, 0.99, 0.01, 0.05, 0.08)
    Calibration(describe_task(task), here, 2.0, 0.25, per_token, 0.0, quality).save(path)
    return str(path)


def my_batch():
    rank = dist.get_rank()
    return make_batch(list(range(1 + 100 * rank, 7 + 100 * rank)), 6, longest=40 if rank == 0 else 4)


def attempt(shuffler):
    with contextlib.closing(shuffler):
        return raised_by(lambda: shuffler.shuffle(my_batch()))
