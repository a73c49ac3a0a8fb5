import numpy as np

METHODS: tuple[str, ...]
PACKINGS: int
PLANS: int

def plan(
    workloads: np.ndarray,
    num_parts: int,
    method: str,
    equal_size: bool,
    tokens: np.ndarray | None,
    max_tokens: int | None,
    home: np.ndarray | None,
    ranks_per_node: int,
    slack_mantissa: int,
    slack_shift: int,
    assignment: np.ndarray,
    loads: np.ndarray,
    /,
) -> tuple[int, int]: ...
def lower_bound(workloads: np.ndarray, num_parts: int, equal_size: bool, /) -> int: ...
def pack(
    values: np.ndarray,
    capacity: int,
    algorithm: str,
    min_groups: int,
    divisor: int,
    equal_size: bool,
    /,
) -> list[list[int]] | None: ...
