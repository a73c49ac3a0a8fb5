"""The random states of a rank: of Python, NumPy, torch and the CUDA device."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, torch.Tensor]:
    """The states by generator, each uint8, 1-dimensional."""
    twister: dict[str, Any] = np.random.get_state(legacy=False)
    twister["state"] = {"key": twister["state"]["key"].tolist(), "pos": twister["state"]["pos"]}
    state = {"cpu": torch.get_rng_state(), "python": _as_bytes(random.getstate()), "numpy": _as_bytes(twister)}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    """Set states that `random_state` returned; a generator without an entry keeps its state."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    if "python" in state:
        version, numbers, next_gauss = json.loads(bytes(state["python"].tolist()))
        random.setstate((version, tuple(numbers), next_gauss))
    if "numpy" in state:
        np.random.set_state(json.loads(bytes(state["numpy"].tolist())))


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """A context that restores the random states at its end."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def _as_bytes(state: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8, device="cpu")
