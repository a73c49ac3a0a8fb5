"""ShufflerOptions: every setting of a shuffler, validated when made."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from commons.checks import require_field_types, require_one_of, take_python_scalars
from commons.perf_model.partitioner import METHODS
from commons.perf_model.partitioner.arguments import METHODS_WITH_SPEEDS

Mode = Literal["balance", "observe", "off"]
Transport = Literal["auto", "all_to_all", "all_gather"]
Speeds = Literal["equal", "observe", "measured"]


@dataclass(frozen=True)
class ShufflerOptions:
    """How a batch shuffler works; the same on all ranks.

    Attributes:
        mode: "balance" moves rows, "observe" plans and reports the gain, but moves no rows; in "off" the
            ranks only agree on the end of the data.
        partitioner: the planning algorithm: "refined", "karmarkar_karp", "lpt" or "snake", as of `partition`.
        equal_size: if rows move, the row counts of the ranks differ by at most one afterwards.
        transport: "all_to_all" sends each row once, "all_gather" sends it to all ranks; "auto" uses "all_to_all" if
            the backend has it. Both give bit-identical batches.
        slack: in [0, 1], by which fraction the largest load may exceed the best one found, to keep more rows on
            the rank that loaded them.
        ranks_per_node: ranks of the group per node; a row that leaves its node then counts as four moved rows. None:
            nodes are ignored.
        max_tokens_per_rank: cap on the tokens of a rank (the shuffler's token_feature_names selects the keys that are
            counted); if no plan keeps it, the plan with the smallest excess is used. None: no cap.
        min_gain: no row moves if the largest load would fall by less than this fraction; 0 switches this off.
        calibration: a file of `evenrank calibrate`, with which workloads are measured times instead of operations.
            None: operations.
        speeds: "equal" gives all ranks equal loads, "measured" gives slow ranks smaller ones (`report_step_time`),
            and "observe" reports the gain of "measured" without using it.
        timeout: seconds after which a rank that has not joined a collective is reported.
        verify: compare a checksum of every row before and after the exchange; for debugging, waits for the device.

    Raises:
        ValueError: a value outside its range, or an unknown name.
    """

    mode: Mode = "balance"
    partitioner: str = "refined"
    equal_size: bool = True
    transport: Transport = "auto"
    slack: float = 0.01
    ranks_per_node: int | None = None
    max_tokens_per_rank: int | None = None
    min_gain: float = 0.0
    calibration: str | None = None
    speeds: Speeds = "equal"
    timeout: float = 600.0
    verify: bool = False

    def __post_init__(self) -> None:
        take_python_scalars(self)
        if isinstance(self.calibration, os.PathLike):
            object.__setattr__(self, "calibration", os.fspath(self.calibration))
        if not (self.calibration is None or (isinstance(self.calibration, str) and self.calibration)):
            raise ValueError(f"calibration is {self.calibration!r}; it names a file, or is None: correct it")
        require_field_types(self)
        require_one_of("partitioner", self.partitioner, sorted(METHODS))
        if self.speeds == "measured" and self.partitioner not in METHODS_WITH_SPEEDS:
            raise ValueError(
                f"speeds is 'measured' and partitioner is {self.partitioner!r}, which makes equal loads; "
                f"{' and '.join(METHODS_WITH_SPEEDS)} follow speeds: choose one of these, or speeds='equal'"
            )
        for name in ("slack", "min_gain"):
            if not _is_number(value := getattr(self, name)) or not 0 <= value <= 1:
                raise ValueError(f"{name} is {value!r}; it must be in [0, 1]: correct it")
        if (error := timeout_error(self.timeout)) is not None:
            raise error
        for name in ("ranks_per_node", "max_tokens_per_rank"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**63):
                raise ValueError(f"{name} is {value!r}; it is a positive integer below 2**63, or None: correct it")

    def plan_arguments(self) -> dict[str, Any]:
        """These options as arguments of `ShufflePlanner`."""
        return {
            "method": self.partitioner,
            "equal_size": self.equal_size,
            "slack": self.slack,
            "ranks_per_node": self.ranks_per_node,
            "max_tokens": self.max_tokens_per_rank,
            "min_gain": self.min_gain,
        }


def timeout_error(timeout: Any) -> ValueError | None:
    """The error in a timeout in seconds, if any."""
    if _is_number(timeout) and 0 < timeout <= 1e9:
        return None
    return ValueError(f"timeout is {timeout!r}; it is a number of seconds above 0 and at most 1e9: correct it")


def reject_options_as(**arguments: Any) -> None:
    """Raise TypeError if one of the arguments is a ShufflerOptions, passed by position by mistake."""
    for name, value in arguments.items():
        if isinstance(value, ShufflerOptions):
            raise TypeError(f"{name} is a ShufflerOptions; a shuffler's settings have a keyword: pass options=...")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
