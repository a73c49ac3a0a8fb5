"""Random states: what is drawn after setting them is what was drawn after taking them, for every generator."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from commons.trainer.checkpoint.random_state import kept_random_state, random_state, set_random_state


def draw():
    """Gaussians too: both Mersenne twisters keep the second of a pair for the next call."""
    gaussians = [random.gauss(0, 1), float(np.random.standard_normal())]
    return [*gaussians, random.random(), float(np.random.random()), *torch.randn(3).tolist()]


@pytest.mark.parametrize("drawn_before", [0, 1, 2])
def test_a_state_is_set_again(drawn_before):
    for _ in range(drawn_before):
        draw()
    state = random_state()
    expected = [draw(), draw()]
    set_random_state(state)
    assert [draw(), draw()] == expected


def test_states_are_on_the_host_whatever_the_default_device_is():
    expected = random_state()
    with torch.device("meta"), kept_random_state():
        pass
    assert all(torch.equal(value, expected[name]) for name, value in random_state().items())


def test_draws_inside_change_nothing():
    torch.manual_seed(5)
    expected = random_state()
    with pytest.raises(ValueError), kept_random_state():
        draw()
        raise ValueError
    assert all(torch.equal(value, expected[name]) for name, value in random_state().items())
