"""HSTU's attention, one sequence at a time."""

from __future__ import annotations

import torch

from hstu.model.attention import time_buckets


def sees(
    i: int, j: int, history: int, group_size: int, is_causal: bool, contextual: int = 0, max_attn_len: int | None = None
) -> bool:
    """Whether query i of a row sees key j, as the text says it."""
    if is_causal and i < contextual:
        return j < history
    distance = position(i, history, group_size, is_causal) - position(j, history, group_size, is_causal)
    if max_attn_len is not None and abs(distance) > max_attn_len:
        return False
    if not is_causal:
        return True
    if j > i:
        return False
    return j < history or (i - history) // group_size == (j - history) // group_size


def position(i: int, history: int, group_size: int, is_causal: bool) -> int:
    """Where the bias sees token i: each group of targets stands directly behind the history."""
    return i if i < history or not is_causal else history + (i - history) % group_size


def reference_attention(
    query,
    key,
    value,
    bias,
    lengths,
    targets,
    *,
    normalizer,
    is_causal,
    group_size,
    contextual=None,
    max_attn_len=None,
    times=None,
    time_bias=None,
):
    """Row by row, pair by pair, from the formula."""
    rows = []
    start = 0
    sees_ahead = not is_causal or contextual is not None
    for row, (length, num_targets) in enumerate(zip(lengths, targets)):
        history = length - num_targets
        q, k, v = (tensor[start : start + length].transpose(0, 1) for tensor in (query, key, value))
        mask = torch.zeros(length, length, dtype=query.dtype)
        column = torch.zeros(length, length, dtype=torch.int64)
        for i in range(length):
            for j in range(length):
                context = 0 if contextual is None else contextual[row]
                if sees(i, j, history, group_size, is_causal, context, max_attn_len):
                    mask[i, j] = 1
                    distance = position(i, history, group_size, is_causal)
                    distance -= position(j, history, group_size, is_causal)
                    column[i, j] = distance + bias.shape[1] // 2 if sees_ahead else distance
        scores = q @ k.transpose(1, 2) + bias[:, column]
        if times is not None:
            when = times[start : start + length]
            scores = scores + time_bias[:, time_buckets(when[:, None] - when, time_bias.shape[1])]
        weights = torch.nn.functional.silu(scores) / normalizer * mask
        rows.append((weights @ v).transpose(0, 1))
        start += length
    return torch.cat(rows) if rows else query[:0]
