"""Lengths of rows, costs of rows, and batches, for all benchmark programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.datasets.hstu_batch import HSTUBatch

NODE = 8  # ranks of a node
CONTEXT = ["user_id", "gender", "age", "occupation", "zip"]

COSTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tokens": lambda lengths: lengths,
    "HSTU": lambda lengths: 5120 * lengths + lengths**2,
    "L²": lambda lengths: lengths**2,
}


def _bimodal(rng: np.random.Generator, count: int) -> np.ndarray:
    short = rng.normal(128, 32, count).clip(1)
    return np.where(rng.random(count) < 0.2, 4096 - np.abs(rng.normal(0, 256, count)), short)


def _gsm8k(rng: np.random.Generator, count: int) -> np.ndarray:
    lengths = rng.lognormal(np.log(90), 0.35, count) + rng.lognormal(np.log(200), 0.5, count)
    return lengths.clip(1, 1024)


# By name: the function that draws lengths, and a description.
_LENGTHS: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], str]] = {
    "uniform": (lambda _, n: np.full(n, 512), "uniform, all 512"),
    "zipf": (lambda rng, n: rng.zipf(1.2, n).clip(1, 4096), "Zipf 1.2 to 4096"),
    "lognormal": (
        lambda rng, n: rng.lognormal(np.log(512) - np.log(2) / 2, np.sqrt(np.log(2)), n).clip(1, 4096),
        "lognormal, mean and deviation 512, to 4096",
    ),
    "bimodal": (_bimodal, "bimodal, 80 % near 128 and 20 % near 4096"),
    "user-like": (
        lambda rng, n: (20 + rng.lognormal(np.log(130), 1.4, n)).clip(20, 8192),
        "user-like, 20 and a lognormal of median 130 and sigma 1.4, to 8192",
    ),
    "user-like, mean 165": (
        lambda rng, n: (20 + 125 * rng.weibull(0.76, n)).clip(20, 2314),
        "user-like of mean 165, 20 and a Weibull of shape 0.76, to 2314",
    ),
    "gsm8k-like": (
        _gsm8k,
        "GSM8K-like, a question of median 90 and an answer of median 200, both lognormal, to 1024",
    ),
    "rollouts": (
        lambda rng, n: (20 + rng.lognormal(np.log(400), 1.0, n)).clip(1, 4096),
        "rollouts, 20 and a lognormal of median 400 and sigma 1, to 4096",
    ),
    "texts": (
        lambda rng, n: rng.lognormal(np.log(300), 1, n).clip(8, 4096),
        "texts, lognormal of median 300 and sigma 1, to 4096",
    ),
    "cut texts": (
        lambda rng, n: np.where(rng.random(n) < 0.02, 4096, rng.integers(20, 300, n)),
        "cut texts, 2 % at 4096, the others 20 to 300",
    ),
}


def draw(name: str, count: int, seed: int) -> np.ndarray:
    """Lengths of rows, int64 `(count,)`, from the distribution with this name; see `described`."""
    return _LENGTHS[name][0](np.random.default_rng(seed), count).astype(np.int64)


def described(names: Iterable[str]) -> str:
    """A sentence that describes the distributions with these names."""
    return f"Lengths: {'; '.join(_LENGTHS[name][1] for name in names)}."


def make_batch(
    lengths: np.ndarray, contextual: list[str] = CONTEXT, num_ids: int | None = None, *, actions: bool = True
) -> HSTUBatch:
    """A ranking batch: contextual features, items, actions, and one label per item; ids are below `num_ids`."""
    rows, total = len(lengths), int(lengths.sum())
    histories = ["item", "action"] if actions else ["item"]
    item_lengths = torch.from_numpy(lengths).to(torch.int32)
    ids = torch.arange(len(contextual) * rows + len(histories) * total)
    labels = torch.arange(total).remainder_(2).float()
    return HSTUBatch(
        features=KeyedJaggedTensor(
            keys=[*contextual, *histories],
            values=ids if num_ids is None else ids.remainder_(num_ids),
            lengths=torch.cat(
                [torch.ones(len(contextual) * rows, dtype=torch.int32)] + [item_lengths] * len(histories)
            ),
        ),
        batch_size=rows,
        feature_to_max_seqlen=dict.fromkeys(histories, 4096),
        contextual_feature_names=contextual,
        labels=KeyedJaggedTensor(keys=["task_0"], values=labels, lengths=item_lengths),
        item_feature_name="item",
        action_feature_name="action" if actions else None,
    )
