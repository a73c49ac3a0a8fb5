"""Random lengths of sequences, and random times of their items."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from commons.checks import as_count

# Data sets without a file, whose size is `num_batches`.
RANDOM_DATASETS = ("random", "sid-random")

# Largest exponent of a Zipf distribution, whose values are then all the lowest one.
STEEPEST = 100

# The parameters that each distribution requires.
_NEEDS = {"uniform": ("high",), "normal": ("mean", "std"), "zipf": ("alpha",), "lognormal": ("mean", "std")}
# Timestamps of items: histories begin in the ten years from 2000 on, gaps are between a second and a month.
_FIRST_SECOND, _STARTS, _LONGEST_GAP = 946_684_800, 10 * 365 * 86_400, 30 * 86_400
# Largest draw: below int64's limit (9.2e18), and exact in float64 because it is a power of two.
_LARGEST = float(2**62)


@dataclass(frozen=True)
class RandomDistribution:
    """A distribution of non-negative integers, clipped to `[low, high]`.

    | `dist_type` | distribution before clipping                  | requires          |
    | ----------- | --------------------------------------------- | ----------------- |
    | uniform     | integers of `[low, high]`, equally likely     | `high`            |
    | normal      | N(mean, std²), rounded                        | `mean`, `std`     |
    | zipf        | low − 1 + k with P(k) ∝ k^−alpha, k = 1, 2, … | 1 < `alpha` ≤ 100 |
    | lognormal   | exp N(µ, σ²) of the given mean and std        | `mean` > 0, `std` |

    `mean` and `std` describe the numbers before clipping (for lognormal too, where σ² = ln(1 + std²/mean²) and
    µ = ln(mean) − σ²/2). Clipping sets numbers outside the range to its bounds; it does not draw again. Parameters that
    a distribution does not require are ignored.

    Raises:
        ValueError: an unknown distribution, a missing parameter or a parameter out of range.

    Examples:
        >>> lengths = RandomDistribution("uniform", low=2, high=4).sample(5, generator=torch.Generator().manual_seed(0))
        >>> lengths.dtype, bool(((lengths >= 2) & (lengths <= 4)).all())
        (torch.int64, True)
    """

    dist_type: str  # "uniform", "normal", "zipf" or "lognormal"
    low: int = 0  # smallest value, at least 0
    high: int | None = None  # largest value; None for no bound
    mean: float | None = None  # see above
    std: float | None = None  # see above
    alpha: float | None = None  # see above

    def __post_init__(self) -> None:
        if self.dist_type not in _NEEDS:
            raise ValueError(
                f"dist_type is {self.dist_type!r}; known distributions are {', '.join(_NEEDS)}: choose one of them"
            )
        for name in ("low", "high"):
            bound = getattr(self, name)
            if isinstance(bound, float) and bound.is_integer():  # such as 1e3
                object.__setattr__(self, name, int(bound))
        as_count(self.low, "low", 0)
        if self.high is not None and as_count(self.high, "high", 0) < self.low:
            raise ValueError(f"high is {self.high}, low is {self.low}; high must not be lower: raise high or lower low")
        for name in _NEEDS[self.dist_type]:
            value = getattr(self, name)
            if value is None or not math.isfinite(value):
                raise ValueError(f"{name} is {value}; dist_type {self.dist_type!r} needs a finite {name}: set it")
        if "std" in _NEEDS[self.dist_type] and self.std is not None and self.std < 0:
            raise ValueError(f"std is {self.std}; a standard deviation is not negative: set it to 0 or more")
        if self.dist_type == "lognormal" and self.mean is not None and self.mean <= 0:
            raise ValueError(f"mean is {self.mean}; the mean of a lognormal distribution is positive: raise it")
        if self.dist_type == "zipf" and self.alpha is not None and not 1 < self.alpha <= STEEPEST:
            raise ValueError(
                f"alpha is {self.alpha}; k^-alpha has no finite sum for alpha <= 1, and above {STEEPEST} values are "
                f"equal: set alpha above 1 and at most {STEEPEST}"
            )

    def sample(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Draw numbers: int64 `(size,)`.

        Args:
            size: number of draws.
            device: device of the result; None for the generator's device.
            generator: source of randomness; None for torch's global CPU generator. Numbers are drawn on the generator's
                device, so `device` does not change them.
        """
        drawn = self._draw(size, generator)  # float64 (size,)
        high = _LARGEST if self.high is None else float(self.high)
        return drawn.round_().clamp_(float(self.low), high).to(torch.int64).to(device or drawn.device)

    def _draw(self, size: int, generator: torch.Generator | None) -> torch.Tensor:
        if self.dist_type == "zipf":
            return _draw_zipf(size, float(self.alpha or 0), self.low, generator)
        drawn = _empty(size, generator)
        if self.dist_type == "uniform":
            return drawn.random_(self.low, int(self.high or 0) + 1, generator=generator)
        mean, std = float(self.mean or 0), float(self.std or 0)
        if self.dist_type == "normal":
            return drawn.normal_(mean, std, generator=generator)
        variance = math.log1p((std / mean) ** 2)
        return drawn.normal_(math.log(mean) - variance / 2, math.sqrt(variance), generator=generator).exp_()


@dataclass(frozen=True)
class LengthDistribution:
    """Distribution of the number of items per row of random data; defaults depend on the maximum length.

    Raises:
        ValueError: as `RandomDistribution`; a parameter that the distribution does not have.

    Examples:
        >>> LengthDistribution("zipf", alpha=1.2).within(4096).high
        4096
    """

    # Kind of distribution; see RandomDistribution.
    dist_type: Literal["lognormal", "zipf", "normal", "uniform"] = "lognormal"
    low: int = 1  # minimum number of items per row
    # Maximum number of items per row; None for the data set's maximum. Longer draws are cut to it.
    high: int | None = None
    mean: float | None = None  # mean of normal and lognormal lengths; None for a quarter of the data set's maximum
    std: float | None = None  # standard deviation of normal and lognormal lengths; None for the mean
    # Exponent of Zipf lengths, above 1: a row has low + k items with probability ∝ (k + 1)^-alpha.
    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.mean is not None and self.mean < 0:  # checked first, because the mean is the default of std
            raise ValueError(f"mean is {self.mean}; lengths are not negative: raise it")
        largest = max(self.low, 1 << 31) if self.high is None else self.high
        takes = _NEEDS[self._over(largest).dist_type]
        for name in ("mean", "std", "alpha"):
            if getattr(self, name) is not None and name not in takes:
                raise ValueError(
                    f"{name} is {getattr(self, name)} and dist_type is {self.dist_type!r}, which has no {name}: remove "
                    "it, or set dist_type"
                )

    def within(self, most_items: int) -> RandomDistribution:
        """The distribution for rows of at most `most_items` items; ValueError if `low` or `high` exceeds it."""
        for name, value in (("low", self.low), ("high", self.high)):
            if value is not None and value > most_items:
                raise ValueError(
                    f"length_distribution.{name} is {value}; rows have at most {most_items} items: lower it, or raise "
                    "max_history_seqlen"
                )
        return self._over(most_items)

    def _over(self, most_items: int) -> RandomDistribution:
        mean = max(most_items / 4, 1.0) if self.mean is None else self.mean
        high = most_items if self.high is None else self.high
        std = mean if self.std is None else self.std
        return RandomDistribution(self.dist_type, self.low, high, mean, std, self.alpha)


def _draw_zipf(size: int, alpha: float, low: int, generator: torch.Generator | None) -> torch.Tensor:
    """Draw with Devroye's rejection method for the zeta distribution (Non-Uniform Random Variate Generation, X.6.1)."""
    exponent = alpha - 1
    scale = 2.0**exponent
    parts: list[torch.Tensor] = []
    missing = size
    while missing > 0:
        u, v = _empty(2 * missing, generator).uniform_(generator=generator).view(2, missing)
        # 1 - u lies in (0, 1]: no division by zero.
        k = (1 - u).pow_(-1 / exponent).clamp_(max=_LARGEST).floor_()
        growth = torch.expm1(exponent * torch.log1p(1 / k))  # (1 + 1/k)^exponent - 1, also for huge k
        accepted = k[v * k * growth / (scale - 1) <= (1 + growth) / scale]
        parts.append(accepted)
        missing -= accepted.numel()
    return torch.cat(parts) + (low - 1) if parts else _empty(0, generator)


def draw_device(generator: torch.Generator | None) -> torch.device:
    """The device where numbers are drawn: the generator's, or without one the CPU, not torch's default device."""
    return torch.device("cpu") if generator is None else generator.device


def _empty(size: int, generator: torch.Generator | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.float64, device=draw_device(generator))


def random_times(lengths: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Random timestamps in seconds since 1970, rising within a row; gaps are log-uniform from a second to a month.

    `lengths` is int64 `(num_rows,)`, the items per row, on the generator's device; the result is int64
    `(sum(lengths),)`, row after row.

    >>> times = random_times(torch.tensor([2, 0, 1]), torch.Generator().manual_seed(0))
    >>> times.shape, bool(times[1] > times[0])
    (torch.Size([3]), True)
    """
    num_items, device = int(lengths.sum()), lengths.device
    gaps = torch.rand(num_items, generator=generator, device=device).mul(math.log(_LONGEST_GAP)).exp().to(torch.int64)
    elapsed = torch.nn.functional.pad(gaps.cumsum(0), (1, 0))  # (num_items + 1,)
    starts = torch.randint(_STARTS, lengths.shape, generator=generator, device=device) + _FIRST_SECOND
    starts = starts - elapsed[lengths.cumsum(0) - lengths]
    return elapsed[1:] + torch.repeat_interleave(starts, lengths, output_size=num_items)
