"""The rank of a process, from torchrun's variables or from the user's script."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class RankInfo:
    """The rank of a process, and the address of the ranks' store.

    Raises:
        ValueError: inconsistent numbers, or no valid address.
    """

    rank: int  # from 0 to world_size - 1
    world_size: int  # number of ranks
    local_rank: int  # rank within this machine, from 0
    local_world_size: int  # number of ranks on this machine
    address: str  # `host:port` on which rank 0 listens for all ranks
    gpu: int | None = None  # index of this rank's GPU among the process's visible GPUs; None for `local_rank`

    def __post_init__(self) -> None:
        for name, of in (("rank", "world_size"), ("local_rank", "local_world_size")):
            if not 0 <= getattr(self, name) < getattr(self, of):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, {of} is {getattr(self, of)}; ranks count from 0 to {of} - 1: "
                    "correct the launcher's numbers"
                )
        if self.local_world_size > self.world_size or self.local_rank > self.rank:
            raise ValueError(
                f"rank {self.rank} of {self.world_size} is number {self.local_rank} of {self.local_world_size} on its "
                "machine; a machine cannot have more ranks than the run: correct the launcher's numbers"
            )
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(
                f"address is {self.address!r}; it is `host:port`, equal on all ranks and reachable from all of them: "
                "give rank 0's host and a free port there"
            )

    @classmethod
    def of_torchrun(cls) -> RankInfo:
        """Read the environment variables that torchrun sets for each rank."""
        variables = os.environ
        return cls(
            rank=int(variables["RANK"]),
            world_size=int(variables["WORLD_SIZE"]),
            local_rank=int(variables["LOCAL_RANK"]),
            local_world_size=int(variables["LOCAL_WORLD_SIZE"]),
            address=f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}",
        )

    def set_environment(self) -> None:
        """Set the environment variables that torchrun would set: torch and TorchRec read them."""
        host, _, port = self.address.rpartition(":")
        variables = {name.upper(): str(value) for name, value in asdict(self).items() if name not in ("address", "gpu")}
        os.environ.update(variables, MASTER_ADDR=host.strip("[]"), MASTER_PORT=port)


def rank_of_process() -> tuple[int, int]:
    """Rank and number of ranks: of the process group or, before there is one, by the launcher's variables."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
