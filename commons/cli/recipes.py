"""The recipe of the model that a subcommand looks at."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from commons.datasets.loader.data_loader import SID_DATASETS
from commons.perf_model.measurement import CostTarget
from commons.trainer.config.files import find_config, read_config_file
from commons.user_package import import_user_module


def load_recipe(model: str | None, config: Path, device: torch.device) -> CostTarget:
    """The recipe of a model package, from its module `recipe`, in one process.

    The module names its Recipe, RECIPE, whose `load(config, device)` is called. The package is installed or in the
    working directory; without one it is that of ours which trains on the config's data set. A config such as
    `hstu/configs/random.toml` is found in the installed package too.

    Raises:
        FileNotFoundError: no config.
        ValueError: no such package, one that cannot be imported, or one without a recipe; or what the recipe says of
            the config.
    """
    config = find_config(config)
    if not config.is_file():
        raise FileNotFoundError(f"{config} does not exist; --config names the TOML or YAML file of a training run")
    if model is None:
        model = _model_of(config)
    if not all(part.isidentifier() for part in model.split(".")):
        raise ValueError(f"model is {model!r}; it names an importable package, such as 'hstu': correct it")
    name = f"{model}.recipe"
    try:
        module = import_user_module(name)
    except (ImportError, SyntaxError) as error:
        # A package that the model itself lacks is another mistake than a wrong name.
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"model is {model!r}, and there is no module {name}, neither installed nor in {Path.cwd()}; it names "
                "the model's Recipe RECIPE: give 'hstu', or add such a module to your package"
            ) from None
        raise ValueError(f"module {name} cannot be imported ({error}): correct it, or install what it needs") from error
    if not hasattr(module, "RECIPE"):
        raise ValueError(f"module {name} has no RECIPE, the model's class derived from Recipe: add it")
    return module.RECIPE.load(config, device)


def _model_of(config: Path) -> str:
    """The package of ours that trains on the config's data set."""
    dataset = read_config_file(config).get("dataset")
    name = dataset.get("dataset_name") if isinstance(dataset, Mapping) else None
    return "sid_gr" if name in SID_DATASETS else "hstu"


def choose_device(name: str, threads: int) -> torch.device:
    """The device for "auto" (a GPU where there is one), "cpu" or "cuda"; `threads` are those on the CPU.

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
