"""Finding the model whose cost a subcommand is asked about."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from commons.perf_model.measurement import CostTarget
from commons.trainer.config import find_config


def load_cost_target(model: str, config: Path, device: torch.device) -> CostTarget:
    """The target of a model package, from its module `cost`.

    Args:
        model: importable package, such as "hstu"; its module `cost` has a function `cost_target(config, device)`.
        config: the training config; `hstu/configs/random.toml` is found in the installed package too.
        device: where to run.

    Raises:
        FileNotFoundError: no config.
        ValueError: no such package, or one without a cost target; or what its function says of the config.
    """
    config = find_config(config)
    if not config.is_file():
        raise FileNotFoundError(f"{config} does not exist; --config names the TOML or YAML file of a training run")
    if not all(part.isidentifier() for part in model.split(".")):
        raise ValueError(f"model is {model!r}; it names an importable package, such as 'hstu': correct it")
    name = f"{model}.cost"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A package that the model itself lacks is another mistake than a wrong name.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"model is {model!r}, and there is no module {name}; it has a function cost_target(config, device): give "
            "'hstu', or add such a module to your package"
        ) from None
    if not hasattr(module, "cost_target"):
        raise ValueError(f"module {name} has no function cost_target(config, device): add it")
    return module.cost_target(config, device)


def choose_device(name: str, threads: int) -> torch.device:
    """The device that a subcommand runs on: "auto" takes a GPU where there is one.

    Args:
        name: "auto", "cpu" or "cuda".
        threads: threads of a process on the CPU.

    Raises:
        ValueError: "cuda" without a GPU, or threads below 1.
    """
    if threads < 1:
        raise ValueError(f"threads is {threads}; ranks on the CPU have at least one: give 1 or more")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', this machine has no GPU that torch can use: choose 'cpu' or 'auto'")
    if name != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(threads)
    return torch.device("cpu")
