"""The start of a rank: its process group, its device and its seeds."""

from __future__ import annotations

import random
import shlex
import socket
import sys
from typing import Literal, get_args

import numpy as np
import torch
import torch.distributed as dist

from commons.checks import require_one_of
from commons.distributed.channel.store import attempt_of_store
from commons.trainer.ranks.cuda_check import device_problem, driver_problem
from commons.trainer.ranks.rank_info import RankInfo

DeviceType = Literal["auto", "cpu", "cuda"]
# Stores of the groups that this process has made: the host of the first one, and its count of ranks, stay for the next.
_STORES: list[dist.Store] = []


def initialize_ranks(device_type: DeviceType = "auto", *, ranks: RankInfo | None = None) -> torch.device:
    """Use the existing process group, such as Ray Train's, or create one for the ranks that torchrun started.

    In a new group, every rank has its own GPU and uses NCCL, or has one CPU thread and uses gloo. An existing
    group and the number of threads stay unchanged.

    Args:
        device_type: "auto" uses GPUs if the machine has one for each of its ranks, else the CPU; in an existing group,
            GPUs if the group has NCCL.
        ranks: the rank of this process, if torchrun has not started it.

    Returns:
        The device of this rank; in an existing group, the GPU to which the group is bound, else torch's current GPU.

    Raises:
        ValueError: not started by torchrun; more ranks than GPUs; GPUs that have failed, or that this torch or fbgemm
            cannot use, unless the device is "cpu"; a GPU for this rank and none for rank 0, or the reverse; or an
            existing group with another device, number of ranks or rank.
    """
    require_one_of("device_type", device_type, get_args(DeviceType))
    joins = dist.is_initialized()
    if joins:
        here, there = dist.get_rank(), dist.get_world_size()
        if ranks is not None and (ranks.rank, ranks.world_size) != (here, there):
            raise ValueError(
                f"ranks has rank {ranks.rank} of {ranks.world_size}, this process is rank {here} of {there} of the "
                "existing process group, which is used: leave ranks out"
            )
    elif ranks is None:
        if not dist.is_torchelastic_launched():
            raise ValueError(
                "this process was not started by torchrun; every rank is a process of its own: run "
                f"`torchrun --standalone --nproc_per_node=2 {_program()}`, or under Slurm `srun torchrun` "
                "as in examples/slurm.sbatch, or, in a notebook, pass ranks=RankInfo(...) to train"
            )
        ranks = RankInfo.of_torchrun()
    if device_type != "cpu" and (problem := driver_problem()) is not None:
        raise ValueError(problem)
    device = _device_of_group(device_type) if joins or ranks is None else _own_device(device_type, ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if (problem := device_problem(device)) is not None:
            raise ValueError(problem)
    if not joins and ranks is not None:
        ranks.set_environment()
        backend = dist.Backend("gloo" if device.type == "cpu" else "nccl")
        timeout = dist.distributed_c10d._get_default_timeout(backend)
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        _STORES.append(store)
        store.set_timeout(timeout)
        store = _join(store, f"default_pg/{attempt_of_store(store)}/{world_size}", world_size)
        _require_device_of_rank_0(device, device_type, rank, store)
        if device.type == "cpu":
            torch.set_num_threads(1)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            device_id=None if device.type == "cpu" else device,
        )
    return device


def describe_ranks(device: torch.device) -> str:
    """A line for the start of a run: the number of ranks and their devices."""
    ranks = f"{dist.get_world_size()} rank{'s' if dist.get_world_size() > 1 else ''}"
    if device.type == "cuda":
        return f"{ranks}, one {torch.cuda.get_device_name(device)} each (NCCL)"
    threads = torch.get_num_threads()
    return f"{ranks} on the CPU, {'one thread' if threads == 1 else f'{threads} threads'} each (gloo)"


def seed_all(seed: int) -> None:
    """Seed Python, NumPy, and torch on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _program() -> str:
    """The running program as arguments for torchrun: `-m package.module`, or a file, and its arguments."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = ["-m", spec.name] if spec is not None else [sys.argv[0]]
    return shlex.join([*program, *sys.argv[1:]])


def _join(store: dist.Store, prefix: str, world_size: int) -> dist.Store:
    """The part of a store for its next group over so many ranks, once all of them have come.

    A store may outlast attempts of torchrun, and a process's earlier groups, with the addresses of ended ranks.
    """
    come = store.add(f"{prefix}/ranks", 1)
    number = (come - 1) // world_size
    of_group = dist.PrefixStore(f"{prefix}/{number}", store)
    if come == (number + 1) * world_size:
        of_group.set("complete", "")
    try:
        of_group.wait(["complete"])
    except Exception:  # a rank that gives up does not count
        store.add(f"{prefix}/ranks", -1)
        raise
    return of_group


def _own_device(device_type: DeviceType, ranks: RankInfo) -> torch.device:
    """The device of a rank that creates its process group."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = num_gpus >= ranks.local_world_size if ranks.gpu is None else num_gpus > ranks.gpu
    if device_type == "cuda" and not enough:
        raise ValueError(
            f"device is 'cuda', this machine has {num_gpus} GPUs for {ranks.local_world_size} ranks; every rank has a "
            "GPU of its own: start fewer ranks, or choose 'cpu' or 'auto'"
        )
    if device_type == "cpu" or not enough:
        return torch.device("cpu")
    return torch.device("cuda", ranks.local_rank if ranks.gpu is None else ranks.gpu)


def _require_device_of_rank_0(device: torch.device, device_type: DeviceType, rank: int, store: dist.Store) -> None:
    """Refuse a GPU here and none there: ranks with NCCL and ranks with gloo would wait for each other.

    With "auto", one machine whose GPU has failed would be enough.
    """
    key = "evenrank/device of rank 0"
    if rank == 0:
        store.set(key, device.type)
        return
    of_rank_0 = store.get(key).decode()
    if device.type != of_rank_0:
        names = {"cpu": "the CPU", "cuda": "a GPU"}
        raise ValueError(
            f"device is {device_type!r}, rank {rank} (on {socket.gethostname()}) has {names[device.type]}, rank 0 has "
            f"{names[of_rank_0]}; all ranks need the same: see nvidia-smi on the machine without a GPU for each of its "
            "ranks, or choose 'cpu' for all"
        )


def _device_of_group(device_type: DeviceType) -> torch.device:
    """The device of a rank in an existing process group."""
    backends = dist.get_backend_config()
    kinds = ["cuda"] if "nccl" in backends and torch.cuda.is_available() else []
    kinds += ["cpu"] if "gloo" in backends else []
    if not kinds or device_type not in ("auto", *kinds):
        raise ValueError(
            f"device is {device_type!r}, the existing process group has {backends}; ranks on GPUs use NCCL, ranks on "
            "the CPU gloo: choose a device of its backends, or create it with another backend"
        )
    if device_type == "cpu" or kinds[0] == "cpu":
        return torch.device("cpu")
    bound = None if dist.group.WORLD is None else dist.group.WORLD.bound_device_id
    return bound or torch.device("cuda", torch.cuda.current_device())
