"""Which rank a process is, as its launcher tells it: torchrun, Slurm's srun, or a script of one's own."""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import asdict, dataclass
from typing import Literal

Launcher = Literal["torchrun", "slurm"]

# Ports for the ranks of Slurm jobs, below those that Linux gives to connections.
_FIRST_PORT, _NUM_PORTS = 15000, 15000
_SRUN = "start the ranks with `srun`, as examples/slurm.sbatch does"


@dataclass(frozen=True)
class RankInfo:
    """A process among the ranks of a run.

    Attributes:
        rank: of `world_size`, from 0.
        world_size: number of ranks.
        local_rank: of the ranks of this machine, from 0.
        local_world_size: number of ranks of this machine.
        address: `host:port`, where rank 0 listens and all ranks meet.
        gpu: this rank's GPU among those that the process sees; None for that of its local rank.

    Raises:
        ValueError: numbers that do not fit each other, or no address.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    gpu: int | None = None

    def __post_init__(self) -> None:
        for name, of in (("rank", "world_size"), ("local_rank", "local_world_size")):
            if not 0 <= getattr(self, name) < getattr(self, of):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, {of} is {getattr(self, of)}; ranks count from 0 to {of} - 1: "
                    "correct what the launcher tells"
                )
        if self.local_world_size > self.world_size or self.local_rank > self.rank:
            raise ValueError(
                f"rank {self.rank} of {self.world_size} is number {self.local_rank} of {self.local_world_size} on its "
                "machine; a machine has some of the ranks: correct what the launcher tells"
            )
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(
                f"address is {self.address!r}; it is `host:port` of a machine that all ranks reach, the same on all of "
                "them: give rank 0's host and a free port there"
            )

    @classmethod
    def of_torchrun(cls) -> RankInfo:
        """What torchrun tells each of its ranks."""
        told = os.environ
        return cls(
            rank=int(told["RANK"]),
            world_size=int(told["WORLD_SIZE"]),
            local_rank=int(told["LOCAL_RANK"]),
            local_world_size=int(told["LOCAL_WORLD_SIZE"]),
            address=f"{told['MASTER_ADDR']}:{told['MASTER_PORT']}",
        )

    @classmethod
    def of_slurm(cls) -> RankInfo:
        """What srun tells each of its tasks.

        Rank 0 listens on the step's first machine, at a port that follows from the number of the job and of the step.

        Raises:
            ValueError: no task of srun, or numbers that are none.
        """
        counts = _tasks_per_node(_slurm("STEP_TASKS_PER_NODE"))
        node = _slurm_number("NODEID")
        if node >= len(counts):
            raise ValueError(
                f"SLURM_NODEID is {node}, SLURM_STEP_TASKS_PER_NODE tells of {len(counts)} machines; a task runs on "
                f"one of them: {_SRUN}"
            )
        job = f"{_slurm('JOB_ID')}.{_slurm('STEP_ID')}"
        return cls(
            rank=_slurm_number("PROCID"),
            world_size=_slurm_number("NTASKS"),
            local_rank=_slurm_number("LOCALID"),
            local_world_size=counts[node],
            address=f"{_first_host(_slurm('STEP_NODELIST'))}:{_FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS}",
            # With --gpus-per-task every task sees its own GPU alone.
            gpu=0 if "SLURM_GPUS_PER_TASK" in os.environ else None,
        )

    def tell_libraries(self) -> None:
        """Set the variables that torchrun sets: torch and TorchRec look there for the ranks of a machine."""
        host, _, port = self.address.rpartition(":")
        told = {name.upper(): str(value) for name, value in asdict(self).items() if name not in ("address", "gpu")}
        os.environ.update(told, MASTER_ADDR=host.strip("[]"), MASTER_PORT=port)


def is_task_of_slurm() -> bool:
    """Whether srun, or a script of Slurm's, has started this process."""
    return "SLURM_PROCID" in os.environ


def is_first_task() -> bool:
    """Whether this is task 0 of srun, or no task at all."""
    return os.environ.get("SLURM_PROCID", "0") == "0"


def _slurm(name: str) -> str:
    value = os.environ.get(f"SLURM_{name}")
    if value is None:
        raise ValueError(f"SLURM_{name} is not set, launcher is 'slurm'; srun sets it for each of its tasks: {_SRUN}")
    return value


def _slurm_number(name: str) -> int:
    value = _slurm(name)
    if not value.isdecimal():
        raise ValueError(f"SLURM_{name} is {value!r}; it is a number from 0 on: {_SRUN}")
    return int(value)


def _tasks_per_node(text: str) -> list[int]:
    """Tasks on each machine of a step.

    >>> _tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    if not all(found):
        raise ValueError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}; it is a list such as 8(x2),4: {_SRUN}")
    return [int(part[1]) for part in found if part for _ in range(int(part[2] or 1))]


def _first_host(nodes: str) -> str:
    """The first of Slurm's list of machines.

    >>> [_first_host(nodes) for nodes in ("gpu[007-012,3],cpu1", "rack[2,5]n[01-04]-ib", "host-a,host-b")]
    ['gpu007', 'rack2n01-ib', 'host-a']
    """
    first = re.match(r"(?:[^,\[\]]|\[\w[^\[\]]*\])+", nodes)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST is {nodes!r}; it is a list of machines such as gpu[01-04]: {_SRUN}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])
