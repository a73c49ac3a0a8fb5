"""Ranks: how a process that torchrun started becomes one, and the seeds it starts from."""

from __future__ import annotations

import os
import random
import shlex
import sys
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from commons.trainer.cuda_check import device_problem, driver_problem

DeviceType = Literal["auto", "cpu", "cuda"]


def initialize_ranks(world_size: int | None = None, device_type: DeviceType = "auto") -> torch.device:
    """Join the process group that torchrun describes.

    Ranks on GPUs have one each and use NCCL; ranks on the CPU have one thread each and use gloo.

    Args:
        world_size: the number of ranks to be; None for any.
        device_type: "auto" takes GPUs where there is one for every rank of the machine, else the CPU.

    Returns:
        The device of this rank.

    Raises:
        ValueError: not started by torchrun, with another number of ranks, or with more ranks than GPUs; or, unless the
            device is "cpu", GPUs whose driver is too old for this torch, or for which torch or fbgemm has no code.
    """
    if not dist.is_torchelastic_launched():
        raise ValueError(
            "this process was not started by torchrun; every rank is a process of its own: run "
            f"`torchrun --standalone --nproc_per_node={world_size or 2} {_program()}`"
        )
    local_rank = dist.get_node_local_rank()
    # torch.distributed has no function for the number of ranks on this machine; torchrun tells it to every rank.
    ranks_here = int(os.environ["LOCAL_WORLD_SIZE"])
    if device_type != "cpu" and (problem := driver_problem()) is not None:
        raise ValueError(problem)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device_type == "cuda" and num_gpus < ranks_here:
        raise ValueError(
            f"device is 'cuda', this machine has {num_gpus} GPUs for {ranks_here} ranks; every rank has a GPU of its "
            "own: start fewer ranks, or choose 'cpu' or 'auto'"
        )
    if device_type != "cpu" and num_gpus >= ranks_here:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        if (problem := device_problem(device)) is not None:
            raise ValueError(problem)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    if world_size is not None and dist.get_world_size() != world_size:
        raise ValueError(
            f"torchrun started {dist.get_world_size()} ranks, world_size is {world_size}; the settings are made for "
            f"that many: run torchrun with --nproc_per_node={world_size}, or set world_size to "
            f"{dist.get_world_size()}"
        )
    return device


def describe_ranks(device: torch.device) -> str:
    """Number of ranks and what they run on, for a line at the start of a run."""
    ranks = f"{dist.get_world_size()} rank{'s' if dist.get_world_size() > 1 else ''}"
    if device.type == "cuda":
        return f"{ranks}, one {torch.cuda.get_device_name(device)} each (NCCL)"
    return f"{ranks} on the CPU, one thread each (gloo)"


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch, all devices included."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _program() -> str:
    """The running program as torchrun takes it: `-m package.module`, or a file, and its arguments."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = ["-m", spec.name] if spec is not None else [sys.argv[0]]
    return shlex.join([*program, *sys.argv[1:]])
