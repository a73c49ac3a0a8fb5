"""Speeds of ranks by simulated times: the cost of an evaluation, and the gain of speeds at many ranks."""

from __future__ import annotations

import time

import numpy as np
from tqdm import tqdm

from benchmarks.shared.lengths import COSTS, draw
from commons.perf_model.partitioner import partition
from commons.perf_model.speed_control import FASTEST, LOOK_STEPS, SpeedControl

FIXED = 0.2  # fixed part of the time of a mean load
ROWS = 32
SLOW_RANKS = ("always the same ranks", "episodes")
# Slow ranks: how many, how long, by which factor.
_SLOW, _EPISODE, _FACTORS = 0.02, 500, (1.15, 2.0)


def times_by_load(rng: np.random.Generator, factors: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """float64 `(ranks,)`: times proportional to loads, with noise, a tail and pauses; shares are of the mean load."""
    times = factors * (FIXED + (1 - FIXED) * shares) * rng.gamma(1000, 1 / 1000, len(shares))
    return (times + rng.exponential(0.02, len(shares))) * np.where(rng.random(len(shares)) < 0.002, 3.0, 1.0)


def _report(control: SpeedControl, times: np.ndarray, loads: np.ndarray) -> None:
    control.take(np.rint(times * 1e7).astype(np.int64), np.rint(loads).astype(np.int64))


def measure_evaluation(ranks: int) -> dict[str, float]:
    """Microseconds of a step that evaluates speeds, and of the mean step."""
    rng, control, took = np.random.default_rng(0), SpeedControl(ranks), []
    for _ in range(40 * LOOK_STEPS):
        loads = np.full(ranks, rng.uniform(0.8, 1.2))
        times = times_by_load(rng, np.ones(ranks), loads)
        started = time.thread_time()
        _report(control, times, loads * 1e9)
        took.append((time.thread_time() - started) * 1e6)
    per_look = np.array(took[len(took) // 2 :]).reshape(-1, LOOK_STEPS)
    return {
        "an evaluation, µs": float(np.median(per_look.max(axis=1))),
        "a step on average, µs": float(np.median(per_look.mean(axis=1))),
    }


def slow_factors(rng: np.random.Generator, ranks: int, steps: int, *, episodes: bool) -> np.ndarray:
    """float64 `(steps, ranks)`: the factor by which each rank is slower."""
    factors = np.ones((steps, ranks))
    number = max(1, round(_SLOW * ranks))
    if not episodes:
        factors[:, rng.choice(ranks, number, replace=False)] = rng.uniform(*_FACTORS, number)
        return factors
    for _ in range(number):  # a sequence of slow ranks for each of `number` slots
        step = 0
        while step < steps:
            last = step + int(rng.exponential(_EPISODE)) + 1
            factors[step:last, rng.integers(ranks)] = rng.uniform(*_FACTORS)
            step = last
    return factors


def _ideal(factors: np.ndarray) -> np.ndarray:
    """int64 `(ranks,)`: the speeds at which all ranks end together, if no rank gets less than half of the most."""
    together = 1.0 / np.mean(1.0 / factors)
    shares = 1.0 + (together / factors - 1.0) / (1.0 - FIXED)
    return np.rint(np.maximum(shares / shares.max(), 0.5) * FASTEST).astype(np.int64)


def measure_gain(ranks: int, steps: int, slow: str) -> dict[str, float]:
    """The gain of measured speeds, and the possible gain."""
    rng = np.random.default_rng(ranks)
    factors = slow_factors(rng, ranks, steps, episodes=slow == "episodes")
    control, took = SpeedControl(ranks), np.zeros((3, steps))
    mean = float(COSTS["HSTU"](draw("user-like", 1 << 16, 0)).mean()) * ROWS  # load of a rank
    gaps = []
    for step in tqdm(range(steps), desc=f"{ranks} ranks", leave=False):
        work = COSTS["HSTU"](draw("user-like", ranks * ROWS, step))
        known = _ideal(factors[step])
        noise = int(rng.integers(1 << 32))
        for variant, speeds in enumerate((None, control.speeds, known)):
            plan = partition(work, ranks, speeds=speeds)
            shares = plan.loads / mean
            times = times_by_load(np.random.default_rng(noise), factors[step], shares)
            took[variant, step] = times.max()
            if variant == 1:
                reported = times, plan.loads
                gaps.append(plan.optimality_gap)
        _report(control, *reported)
    equal, measured, possible = took.sum(axis=1)
    settled = took[:, steps // 2 :].sum(axis=1)
    return {
        "equal ÷ measured": equal / measured,
        "second half": settled[0] / settled[1],
        "equal ÷ possible": equal / possible,
        "second half.": settled[0] / settled[2],
        "largest time ÷ bound − 1": float(np.mean(gaps)),
    }
