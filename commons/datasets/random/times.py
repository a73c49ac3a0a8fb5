"""Random times of items, for batches of a model that looks at when they happened."""

from __future__ import annotations

import math

import torch

_FIRST_SECOND, _STARTS = 946_684_800, 10 * 365 * 86_400  # histories begin in the years from 2000 on
_LONGEST_GAP = 30 * 86_400


def random_times(lengths: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Seconds since 1970, rising within a row: gaps of a second to a month, those of every order equally likely.

    Args:
        lengths: int64 `(num_rows,)`, items per row.
        generator: source of randomness on the device of `lengths`; torch's global one if not given.

    Returns:
        int64 `(sum(lengths),)`, row after row.

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
