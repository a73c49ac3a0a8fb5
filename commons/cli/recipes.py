"""Loads the recipe of a model for subcommands, and reads the rows of its training data."""

from __future__ import annotations

import functools
import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from commons.checks import require_file
from commons.cli.simulate.simulation import OF_LAYERS, Source, describe_task
from commons.datasets.loader.data_loader import SID_DATASETS
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.distributed.options import ShufflerOptions
from commons.perf_model.calibration import CalibratedTask, load_calibration
from commons.perf_model.gain import LoadedRows, StepCost
from commons.trainer.config.files import find_config, read_config_file
from commons.trainer.recipe import Recipe
from commons.user_package import import_user_module


def load_recipe(model: str | None, config: Path, device: torch.device) -> Recipe:
    """Load RECIPE, the model's Recipe, from the module `recipe` of a package, for one process.

    The package is installed or in the working directory; `model` None selects hstu or sid_gr by the config's data set.
    A config such as `hstu/configs/random.toml` is also found in the installed package. OSError if there is no config;
    ValueError if the package does not exist, cannot be imported or has no recipe, or for the config.
    """
    config = find_config(config)
    require_file(config, "--config names the TOML or YAML file of a training run: correct the path")
    read_as = ""
    if model is None:
        dataset = read_config_file(config).get("dataset")
        name = dataset.get("dataset_name") if isinstance(dataset, Mapping) else None
        model = "sid_gr" if name in SID_DATASETS else "hstu"
        read_as = f"; without --model, this is a config of {model}: name your own package with --model"
    if not all(part.isidentifier() for part in model.split(".")):
        raise ValueError(f"model is {model!r}; it names an importable package, such as 'hstu': correct it")
    name = f"{model}.recipe"
    try:
        module = import_user_module(name)
    except (ImportError, SyntaxError) as error:
        # Distinguish a wrong name from a package that the model imports and that is missing.
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"model is {model!r}, and there is no module {name}, neither installed nor in {Path.cwd()}; this "
                "module must define RECIPE, the model's Recipe: give 'hstu', or add the module to your package"
            ) from None
        raise ValueError(f"module {name} cannot be imported ({error}): correct it, or install what it needs") from error
    recipe_class = getattr(module, "RECIPE", None)
    if not (isinstance(recipe_class, type) and issubclass(recipe_class, Recipe)):
        raise ValueError(f"module {name} has no RECIPE, the model's class derived from Recipe: add it")
    try:
        return recipe_class.load(config, device)
    except ValueError as error:
        raise ValueError(f"{error}{read_as}") from error


def choose_device(name: str, threads: int) -> torch.device:
    """The device for "auto" (a GPU if there is one), "cpu" or "cuda"; on the CPU, sets the number of threads.

    ValueError for "cuda" without a GPU, or for less than one thread.
    """
    if threads < 1:
        raise ValueError(f"threads is {threads}; ranks on the CPU have at least one: give 1 or more")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', this machine has no GPU that torch can use: choose 'cpu' or 'auto'")
    if name != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(threads)
    return torch.device("cpu")


def share_global_batch(recipe: Recipe, ranks: Sequence[int]) -> None:
    """Set the rows per rank to a rank's part of the config's `global_batch_size`, if it has one.

    ValueError unless `ranks` is one number, which divides it.
    """
    if (rows := recipe.config.trainer.global_batch_size) is None:
        return
    if len(set(ranks)) != 1:
        given = f"--ranks is {' '.join(map(str, ranks))}" if ranks else "--ranks is not given"
        raise ValueError(
            f"global_batch_size is {rows} and {given}; the rows of a rank depend on the number of ranks: give one "
            "number of ranks"
        )
    recipe.share_batch(ranks[0])


def read_config_rows(
    config: Path, model: str | None, shuffler: ShufflerOptions, ranks: Sequence[int], steps: int
) -> Source:
    """The rows of the first `steps` steps of a training run (fewer if the data end) on `ranks`, for `simulate`.

    Rows are distributed to ranks as by the run's loaders, and cost what the run's shuffler says. Arguments and errors
    as for `load_recipe`; also errors of the shuffler and its calibration, and ValueError for several numbers of ranks
    that share a `global_batch_size`.
    """
    calibration = None if shuffler.calibration is None else load_calibration(shuffler.calibration)
    recipe, num_batches = load_recipe(model, config, torch.device("cpu")), max(ranks) * steps
    share_global_batch(recipe, ranks)
    calibrated = None if calibration is None else CalibratedTask(recipe.task, calibration)
    flags = list(_flags(shuffler, recipe.config.trainer.shuffler))
    used = _shuffler_of(recipe, shuffler)
    if used is None:  # with its shuffler, the run would move no row
        flags.insert(0, f"--shuffler-type {getattr(type(recipe.config), 'shuffler_type', '...')}")
    batches, counts_operations = _read_batches(recipe, used, calibrated, num_batches)
    task, of_what = describe_task(recipe.task), OF_LAYERS
    if not counts_operations:
        task = f"workloads of shuffler {recipe.config.shuffler_type!r}"
        of_what = f"in the {task}"
    if calibrated is not None:
        of_what = "of a whole step, by the calibration"
    no_rows = np.empty(0, np.int64)
    costs, tokens = (np.concatenate(columns) for columns in zip((no_rows, no_rows), *batches))
    return Source(
        name=str(config),
        load=functools.partial(_rows_of_ranks, batches, recipe.draws_per_rank),
        num_rows=len(tokens) if len(batches) < num_batches else None,
        batch_size=recipe.batch_size,
        tokens=tokens,
        costs=costs,
        task=task,
        remedy="lower --ranks, or train_batch_size in the config",
        of_what=of_what,
        cost=StepCost(1 / calibrated.units_per_ms, calibrated.calibration.per_step) if calibrated else None,
        plan_options=shuffler.plan_arguments(),
        flags=lambda window: " ".join([*flags, *_instead(recipe, window)]),
        options=_in_python(shuffler),
        notes=tuple(_not_simulated(shuffler, used)),
    )


def _read_batches(
    recipe: Recipe, used: BaseTaskBalancedBatchShuffler | None, calibrated: CalibratedTask | None, num_batches: int
) -> tuple[list[tuple[np.ndarray, np.ndarray]], bool]:
    """Workloads and tokens of the real rows of each batch, as a single rank reads them.

    Also whether the shuffler's workloads are the operations or, with a calibration, their times.
    """
    batches, counts_operations = [], True
    first_batches = itertools.islice(recipe.host_batches(), num_batches)
    for batch in tqdm(first_batches, "read", num_batches, unit="batch", leave=False, disable=None):
        sizes = recipe.row_tokens(batch)
        workloads = recipe.row_flops(batch) if calibrated is None else calibrated.get_workloads(*sizes)
        tokens = recipe.task.tokens_and_pairs(*sizes)[0].numpy()
        if used is not None:  # it may count fewer tokens than the model has; its cap and the log of the run count them
            operations, workloads = workloads, used.engine.costs.workloads_of(batch)
            tokens = used.engine.costs.tokens_of(batch)
            counts_operations &= torch.equal(workloads, operations)
        batches.append((workloads.numpy(), tokens))
    return batches, counts_operations


def _rows_of_ranks(
    batches: Sequence[tuple[np.ndarray, np.ndarray]], draws_per_rank: bool, num_ranks: int, steps: int
) -> LoadedRows:
    """The rows of the first steps of `num_ranks` ranks, which draw batches of their own or share those of a file."""
    some = batches[: num_ranks * steps]
    sizes = [len(workloads) for workloads, _ in some]
    step = np.repeat(np.arange(len(some)) // num_ranks, sizes)
    if draws_per_rank:
        rank = np.repeat(np.arange(len(some)) % num_ranks, sizes)
    else:
        rank = (np.arange(len(step)) - np.searchsorted(step, step)) % num_ranks
    workloads, tokens = (np.concatenate(columns) for columns in zip(*some))
    return LoadedRows(workloads, tokens, step, rank, num_ranks)


def _not_simulated(shuffler: ShufflerOptions, used: BaseTaskBalancedBatchShuffler | None) -> Iterator[str]:
    if used is not None and used.engine.costs.has_groups:
        yield "Plans are without the shuffler's groups (get_groups): training keeps them together, and gains less."
    if shuffler.speeds == "measured":
        yield 'Plans are for equally fast ranks: with speeds="measured", training gives slow ranks less work.'


def _shuffler_of(recipe: Recipe, options: ShufflerOptions) -> BaseTaskBalancedBatchShuffler | None:
    """The shuffler of the run with these options; None for one that moves no row.

    ValueError if it makes no use of the calibration in the options.
    """
    recipe.config.trainer.shuffler = options
    shuffler = recipe.build_shuffler(balances=True)
    if problem := shuffler.engine.costs.problem(None):
        raise problem
    return None if isinstance(shuffler, IdentityBalancedBatchShuffler) else shuffler


def _flags(shuffler: ShufflerOptions, configured: ShufflerOptions) -> Iterator[str]:
    """Yield the flags of our trainers for the options that are not those of the config."""
    for option, value in _changed(shuffler, configured).items():
        name = option.replace("_", "-")
        if isinstance(value, bool):
            yield f"--trainer.shuffler.{'' if value else 'no-'}{name}"
        else:
            yield f"--trainer.shuffler.{name} {shlex.quote(str(value))}"


def _instead(recipe: Recipe, window: int) -> Iterator[str]:
    """Yield the flags of our trainers that replace settings of the config, with which its run would have other plans.

    `window` is the number of batches of every rank that are planned together.
    """
    trainer = recipe.config.trainer
    for name in ("balance_batch", "balance_sampler", *(["single_rank_load"] if window > 1 else [])):
        if getattr(trainer, name):
            yield f"--trainer.no-{name.replace('_', '-')}"
    if trainer.budget_per_rank is not None:
        yield "--trainer.budget-per-rank None"
    if window == 1 < trainer.shuffle_window:
        yield "--trainer.shuffle-window 1"


def _in_python(shuffler: ShufflerOptions) -> str:
    """The options that are not the default as a call of ShufflerOptions; "" without such options."""
    keywords = ", ".join(f"{name}={value!r}" for name, value in _changed(shuffler, ShufflerOptions()).items())
    return f"ShufflerOptions({keywords})" if keywords else ""


def _changed(shuffler: ShufflerOptions, base: ShufflerOptions) -> dict[str, Any]:
    """The options that are not those of `base`, by name."""
    values = {option.name: getattr(shuffler, option.name) for option in fields(shuffler)}
    return {name: value for name, value in values.items() if value != getattr(base, name)}
