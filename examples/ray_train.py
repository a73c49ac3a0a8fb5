"""Balanced HSTU training on random data with lognormal lengths, with ranks started by Ray Train.

Needs the extra `ray`. Ray makes the process group of its workers, and `hstu.train.train` uses it. `train` takes a
TrainConfig or nested dictionaries; here the dictionaries are read from a config file, and a few values are replaced.

Examples:
    python examples/ray_train.py
    python examples/ray_train.py --num-workers 4 --steps 100
    python examples/ray_train.py --address auto --use-gpu --run-dir /shared/runs/ray
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commons.checks import require_at_least
from commons.console import print_summary
from commons.trainer.config.files import find_config, read_config_file
from commons.trainer.config.load import load_config
from commons.trainer.ranks.errors import run_main


@dataclass
class Options:
    """The settings of the example."""

    num_workers: int = 2  # number of ranks; each is a Ray worker
    steps: int = 20  # steps to train
    # Folder of the run, on a disk that all workers share; an earlier run in it is replaced.
    run_dir: Path = Path("runs/ray")
    # Address of the Ray cluster; "local" starts a cluster for this run, "auto" uses one running on this machine.
    address: str = "local"
    use_gpu: bool = False  # give every worker a GPU

    def __post_init__(self) -> None:
        require_at_least("num_workers", self.num_workers, 1)
        require_at_least("steps", self.steps, 1)


def main() -> None:
    """Start the workers, wait for them and print the results."""
    options = load_config(Options, sys.argv[1:], prog="python examples/ray_train.py", description=__doc__)
    try:
        import ray
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
    except ImportError as error:
        raise ImportError(f"Ray Train cannot be imported ({error}): install evenrank's extra 'ray'") from None
    import torch

    from hstu.train import train

    run_dir = options.run_dir.resolve()  # workers may have another working directory
    settings: dict[str, Any] = dict(read_config_file(find_config("hstu/configs/random.toml")))
    settings["trainer"] |= {
        "max_train_iters": options.steps,
        "enable_balanced_shuffler": True,
        "run_dir": str(run_dir),
        "overwrite": True,
    }
    # Ranks exchange rows directly, so Ray's object store may be small.
    small = {"num_cpus": options.num_workers, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    cluster: dict[str, Any] = small if options.address == "local" else {}
    if options.use_gpu and options.address == "local" and torch.cuda.device_count() < options.num_workers:
        raise ValueError(  # Ray would wait for another machine
            f"use_gpu is set for {options.num_workers} workers, this machine has {torch.cuda.device_count()} GPUs; "
            "each worker needs a GPU: start fewer workers, or leave use_gpu out"
        )
    try:
        ray.init(address=options.address, log_to_driver=False, **cluster)
    except ConnectionError as error:
        raise ValueError(
            f"address is {options.address!r}, where no Ray cluster responds ({error}); the workers need a cluster: "
            'start it with `ray start --head`, or give "local"'
        ) from error
    result = TorchTrainer(
        train,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=options.num_workers, use_gpu=options.use_gpu),
        run_config=RunConfig(name="ray", storage_path=str(run_dir)),
    ).fit()
    ray.shutdown()
    summary = result.return_value  # rank 0's
    before, after = summary.shuffle["imbalance_before"], summary.shuffle["imbalance_after"]
    print_summary(
        f"{options.num_workers} workers of Ray",
        {
            "steps": str(summary.steps),
            "loss": f"{summary.loss:.4f}",
            "imbalance (max ÷ mean − 1)": f"{before:.1%} → {after:.2%}",
            "log": str(options.run_dir / "log.jsonl"),
        },
    )


if __name__ == "__main__":
    run_main(main)
