"""The random states of a rank: Python's, NumPy's and torch's, the CUDA device's included."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, torch.Tensor]:
    """The states by generator, 1-dimensional: bytes of torch's, float64 of the others, which hold their integers."""
    version, numbers, next_gauss = random.getstate()
    twister: dict[str, Any] = np.random.get_state(legacy=False)
    state = {
        "cpu": torch.get_rng_state(),
        "python": _numbers([version, *numbers, *([] if next_gauss is None else [next_gauss])]),
        "numpy": _numbers(
            [*twister["state"]["key"].tolist(), twister["state"]["pos"], twister["has_gauss"], twister["gauss"]]
        ),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    """Set the states that `random_state` gave; generators without an entry stay as they are."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    if "python" in state:
        version, *numbers = state["python"].tolist()
        words, gauss = [int(number) for number in numbers[:625]], numbers[625:]
        random.setstate((int(version), tuple(words), gauss[0] if gauss else None))
    if "numpy" in state:
        *words, position, has_gauss, gauss = state["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), int(position), int(has_gauss), gauss))


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Whatever is drawn inside, the states are afterwards what they were before."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def _numbers(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)
