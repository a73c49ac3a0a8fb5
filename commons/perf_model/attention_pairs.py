"""How many pairs of a query and a key a mask keeps, in closed form, for integers, arrays and tensors alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from commons.checks import as_boolean

_LARGEST_GROUP = 2**31  # no row has as many targets, and the pairs of such a group still fit into int64


def attention_pairs(
    seqlen: Any,
    num_targets: Any = 0,
    num_contextual: Any = 0,
    *,
    causal: bool = True,
    target_group_size: int = 1,
    max_attn_len: int | None = None,
) -> Any:
    """Number of (query, key) pairs that the attention mask keeps.

    Full attention keeps L². Under a causal mask whose last T tokens are targets in groups of g, a history token attends
    to itself and all tokens before it, and a target to the whole history and to its own group up to itself:

        (L − T)(L − T + 1) ÷ 2  +  T·(L − T)  +  T·(g + 1) ÷ 2

    which is L(L + 1) ÷ 2 without targets. A last group of r < g targets keeps r(r + 1) ÷ 2 pairs within itself. If the
    first C tokens attend to all tokens except the targets, C·(L − T) − C(C + 1) ÷ 2 pairs are added.

    With a window w, a query attends to no key at a distance above w; every group of targets is placed directly after
    the history, and the first C tokens attend to all tokens except the targets whatever the window. With S(n, m) =
    Σ min(u, m) over u from 1 to n, full attention then keeps 2·S(L, w + 1) − L pairs and a causal mask S(L − T, w + 1)
    without targets; a group of g targets adds S(w, L − T) − S(max(w − g, 0), L − T) + S(g, w + 1), and the first C
    tokens add C·(L − T) − S(C, w + 1).

    Args:
        seqlen: tokens per row, targets included; an int or an array or tensor of any integer dtype.
        num_targets: targets per row, of the same kind.
        num_contextual: tokens at the front of a row that are exempt from the causal mask, of the same kind; 0 for a
            mask that treats contextual tokens as history.
        causal: whether the mask is causal.
        target_group_size: targets that may attend to one another.
        max_attn_len: w, the largest distance of a key; None for no window.

    Returns:
        Pairs per row, an int for an int, else int64.
    """
    seqlen, num_targets, num_contextual = as_wide(seqlen), as_wide(num_targets), as_wide(num_contextual)
    target_group_size, causal = min(target_group_size, _LARGEST_GROUP), as_boolean(causal, "causal")
    if max_attn_len is not None:
        window = _least(seqlen, max_attn_len)
        return _pairs_in_window(seqlen, num_targets, num_contextual, window, causal, target_group_size)
    if not causal:
        return seqlen * seqlen
    history = seqlen if is_zero(num_targets) else seqlen - num_targets
    pairs = history * (history + 1) // 2
    if not is_zero(num_targets):
        groups, rest = num_targets // target_group_size, num_targets % target_group_size
        within_groups = groups * (target_group_size * (target_group_size + 1) // 2) + rest * (rest + 1) // 2
        pairs = pairs + num_targets * history + within_groups
    if not is_zero(num_contextual):
        pairs = pairs + num_contextual * history - num_contextual * (num_contextual + 1) // 2
    return pairs


def _pairs_in_window(
    seqlen: Any, num_targets: Any, num_contextual: Any, window: Any, causal: bool, target_group_size: int
) -> Any:
    """Pairs in windows that are at most as wide as the rows are long; see `attention_pairs`."""
    if not causal:
        return 2 * _capped_sum(seqlen, window + 1) - seqlen
    history = seqlen - num_targets

    def of_group(size: Any) -> Any:
        nearest = window - _least(window, size)  # keys of the history that the whole group attends to
        return _capped_sum(window, history) - _capped_sum(nearest, history) + _capped_sum(size, window + 1)

    pairs = _capped_sum(history, window + 1)
    if not is_zero(num_targets):
        groups, rest = num_targets // target_group_size, num_targets % target_group_size
        pairs = pairs + groups * of_group(target_group_size) + of_group(rest)
    if not is_zero(num_contextual):
        pairs = pairs + num_contextual * history - _capped_sum(num_contextual, window + 1)
    return pairs


def _capped_sum(count: Any, cap: Any) -> Any:
    """Σ min(u, cap) over u from 1 to `count`, for integers of any kind."""
    rising = _least(count, cap)
    return rising * (rising + 1) // 2 + (count - rising) * cap


def _least(one: Any, other: Any) -> Any:
    """The smaller of two integers, elementwise for arrays and tensors."""
    return one + (other - one) * (other < one)


def as_wide(numbers: Any) -> Any:
    """int64 for integers of an array or a tensor, whose products may overflow a narrower dtype; others unchanged."""
    if isinstance(numbers, torch.Tensor):
        return numbers if numbers.is_floating_point() else numbers.to(torch.int64)
    if isinstance(numbers, (np.ndarray, np.integer)) and numbers.dtype.kind in "iu":
        return numbers.astype(np.int64)
    return numbers


def is_zero(count: Any) -> bool:
    """Whether a count is the plain integer 0, for all rows."""
    return isinstance(count, int) and count == 0
