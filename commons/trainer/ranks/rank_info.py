"""Which rank a process is, as torchrun or a script of one's own states it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class RankInfo:
    """A process among the ranks of a run.

    Raises:
        ValueError: numbers that do not fit each other, or no address.
    """

    rank: int  # of `world_size`, from 0
    world_size: int  # number of ranks
    local_rank: int  # of the ranks of this machine, from 0
    local_world_size: int  # number of ranks of this machine
    address: str  # `host:port`, where rank 0 listens and all ranks meet
    gpu: int | None = None  # this rank's GPU among those that the process sees; None for that of its local rank

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
                "machine; a machine has some of the ranks: correct the launcher's numbers"
            )
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(
                f"address is {self.address!r}; it is `host:port` of a machine that all ranks reach, the same on all of "
                "them: give rank 0's host and a free port there"
            )

    @classmethod
    def of_torchrun(cls) -> RankInfo:
        """From the variables that torchrun sets for each rank."""
        variables = os.environ
        return cls(
            rank=int(variables["RANK"]),
            world_size=int(variables["WORLD_SIZE"]),
            local_rank=int(variables["LOCAL_RANK"]),
            local_world_size=int(variables["LOCAL_WORLD_SIZE"]),
            address=f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}",
        )

    @classmethod
    def if_launched(cls) -> RankInfo | None:
        """`of_torchrun`; None for a process that no launcher has started."""
        return cls.of_torchrun() if "RANK" in os.environ else None

    def tell_libraries(self) -> None:
        """Set the variables that torchrun sets: torch and TorchRec look there for the ranks of a machine."""
        host, _, port = self.address.rpartition(":")
        variables = {name.upper(): str(value) for name, value in asdict(self).items() if name not in ("address", "gpu")}
        os.environ.update(variables, MASTER_ADDR=host.strip("[]"), MASTER_PORT=port)
