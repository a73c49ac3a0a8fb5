"""The rows of a training config for `evenrank simulate`: its batches are read, and nothing is trained."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from commons.cli.recipes import load_recipe
from commons.cli.simulate.simulation import OF_LAYERS, Source, describe
from commons.distributed.options import ShufflerOptions
from commons.perf_model.calibration import CalibratedTask, load_calibration
from commons.perf_model.gain import LoadedRows, StepCost


def read_config_rows(config: Path, model: str | None, shuffler: ShufflerOptions, num_batches: int) -> Source:
    """The rows of the first batches of a training run, dealt to ranks as its loaders deal them; fewer where data end.

    Arguments and errors as those of `load_recipe`, and errors of the shuffler's calibration.
    """
    calibration = None if shuffler.calibration is None else load_calibration(shuffler.calibration)
    target = load_recipe(model, config, torch.device("cpu"))
    calibrated = None if calibration is None else CalibratedTask(target.task, calibration)
    batches = []  # workloads and tokens of the real rows of each, as a single rank reads them
    wanted = itertools.islice(target.host_batches(), num_batches)
    for batch in tqdm(wanted, "read", num_batches, unit="batch", leave=False, disable=None):
        rows = target.row_tokens(batch)
        tokens, _ = target.task.tokens_and_pairs(*rows)
        batches.append(((calibrated or target.task).get_workloads(*rows).numpy(), tokens.numpy()))
    num_rows = sum(len(workloads) for workloads, _ in batches)
    ends = len(batches) < num_batches
    # In training every rank ends with as few rows; here one rank alone would.
    if ends and batches and len(batches[-1][0]) < target.batch_size:
        del batches[-1]
    # A target that is no Recipe may not say; its rows are dealt as those of files are.
    draws_per_rank = getattr(target, "draws_per_rank", False)

    def load(num_ranks: int, steps: int) -> LoadedRows:
        some = batches[: num_ranks * steps]
        sizes = [len(workloads) for workloads, _ in some]
        step = np.repeat(np.arange(len(some)) // num_ranks, sizes)
        if draws_per_rank:
            rank = np.repeat(np.arange(len(some)) % num_ranks, sizes)
        else:
            rank = (np.arange(len(step)) - np.searchsorted(step, step)) % num_ranks
        workloads, tokens = (np.concatenate(columns) for columns in zip(*some))
        return LoadedRows(workloads, tokens, step, rank, num_ranks)

    none = np.empty(0, np.int64)
    costs, tokens = (np.concatenate([none, *columns]) for columns in zip((none, none), *batches))
    return Source(
        name=str(config),
        load=load,
        num_rows=num_rows if ends else None,
        batch_size=target.batch_size,
        tokens=tokens,
        costs=costs,
        task=describe(target.task),
        remedy="lower --ranks, or train_batch_size in the config",
        of_what=OF_LAYERS if calibrated is None else "of a whole step, by the calibration",
        cost=StepCost(1 / calibrated.units_per_ms, calibrated.calibration.per_step) if calibrated else None,
        plan_options=shuffler.plan_arguments(),
    )
