import numpy as np

METHODS: tuple[str, ...]
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
    slack: float,
    num_steps: int | None = None,
    home_step: np.ndarray | None = None,
    /,
) -> tuple[np.ndarray, np.ndarray, int, int]: ...
def route_rows(
    rows: np.ndarray,
    real_rows: np.ndarray,
    destination: np.ndarray,
    lengths: np.ndarray,
    parts: np.ndarray,
    steps: int,
    rank: int,
    all_gather: bool,
    pads: bool,
    /,
) -> tuple[np.ndarray, np.ndarray]: ...
def lower_bound(workloads: np.ndarray, num_parts: int, equal_size: bool, /) -> int: ...
