from collections.abc import Sequence

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
    words: np.ndarray,
    first: np.ndarray,
    num_columns: int,
    num_keys: int,
    parts: np.ndarray,
    steps: int,
    rank: int,
    all_gather: bool,
    pads: bool,
    /,
) -> tuple[np.ndarray, np.ndarray]: ...
def encode_rows(
    workloads: np.ndarray,
    lengths: Sequence[np.ndarray],
    sums: Sequence[int],
    kept: Sequence[np.ndarray],
    counted: Sequence[int],
    rows: int,
    real_rows: int,
    /,
) -> np.ndarray | None: ...
def read_columns(
    words: np.ndarray, first: np.ndarray, real_rows: np.ndarray, num_columns: int, columns: Sequence[int], /
) -> np.ndarray: ...
def read_rows(
    words: np.ndarray,
    first: np.ndarray,
    real_rows: np.ndarray,
    num_columns: int,
    rows: np.ndarray,
    first_column: int,
    count: int,
    /,
) -> np.ndarray: ...
def place_of_rows(real_rows: np.ndarray, /) -> np.ndarray: ...
def sum_at(place: np.ndarray, values: np.ndarray | None, num_places: int, /) -> np.ndarray: ...
def count_moves(
    home: np.ndarray, destination: np.ndarray, tokens: np.ndarray, steps: int, ranks_per_node: int, /
) -> np.ndarray: ...
def digest(arrays: Sequence[np.ndarray], /) -> int: ...
def all_within(values: np.ndarray, largest: int, largest_sum: int, /) -> bool: ...
def lower_bound(workloads: np.ndarray, num_parts: int, equal_size: bool, /) -> int: ...
