"""WORKLOAD: what a sample costs, in floating-point operations of the forward pass.

Pure functions count one layer; a task adds the dimensions of a model and turns sequence lengths into int64 workloads.
Only matrix multiplications are counted (2 operations per multiply-add), elementwise work is linear and small beside
them. All arithmetic is in int64 or in Python integers: an int32 length of 4096 does not overflow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import numpy as np
import torch

IntLike = TypeVar("IntLike", int, np.ndarray, torch.Tensor)

_INT64_MAX = 2**63 - 1


def attention_pairs(seqlen: Any, num_targets: Any = 0, *, causal: bool = True, target_group_size: int = 1) -> Any:
    """Number of (query, key) pairs that the attention mask keeps.

    Full attention keeps L². Under a causal mask, with the last T tokens being targets in groups of g, a history token
    sees itself and what precedes it, and a target sees the whole history and its own group up to itself:

        (L − T)(L − T + 1) ÷ 2  +  T·(L − T)  +  T·(g + 1) ÷ 2

    which is L(L + 1) ÷ 2 without targets. A last group of r < g targets keeps r(r + 1) ÷ 2 pairs within itself.

    Args:
        seqlen: tokens per row, targets included; an int or an integer array or tensor.
        num_targets: targets per row, of the same kind.
        causal: whether the mask is causal.
        target_group_size: targets that may see one another.

    Returns:
        Pairs per row, of the same kind.
    """
    if not causal:
        return seqlen * seqlen
    history = seqlen - num_targets
    groups, rest = num_targets // target_group_size, num_targets % target_group_size
    within_groups = groups * (target_group_size * (target_group_size + 1) // 2) + rest * (rest + 1) // 2
    return history * (history + 1) // 2 + num_targets * history + within_groups


def hstu_layer_flops(seqlen: Any, pairs: Any, *, hidden_size: int, num_heads: int, head_dim: int) -> Any:
    """Forward operations of one HSTU layer (Zhai et al. 2024, "Actions Speak Louder than Words").

    With p = heads · head_dim: the joint U, V, Q, K projection 2·L·h·4p, the two products of pointwise attention
    4·p·pairs, and the output projection 2·L·p·h.
    """
    projected = num_heads * head_dim
    return (2 * hidden_size * 4 * projected + 2 * projected * hidden_size) * seqlen + 4 * projected * pairs


def transformer_layer_flops(
    seqlen: Any,
    pairs: Any,
    *,
    hidden_size: int,
    num_heads: int,
    head_dim: int,
    num_query_groups: int,
    ffn_hidden_size: int,
    gated_ffn: bool,
) -> Any:
    """Forward operations of one transformer layer (Vaswani et al. 2017), grouped queries and gated FFN allowed.

    With p = heads · head_dim and G query groups: the Q, K, V projections 2·L·h·(H + 2G)·d, attention 4·p·pairs, the
    output projection 2·L·p·h, and the feed-forward block 4·L·h·f, or 6·L·h·f when gated.
    """
    projected = num_heads * head_dim
    qkv = 2 * hidden_size * (num_heads + 2 * num_query_groups) * head_dim
    ffn = (6 if gated_ffn else 4) * hidden_size * ffn_hidden_size
    return (qkv + 2 * projected * hidden_size + ffn) * seqlen + 4 * projected * pairs


@dataclass(frozen=True)
class _AttentionTask(ABC):
    """Dimensions of a stack of attention layers."""

    hidden_size: int
    num_heads: int
    head_dim: int
    num_layers: int = 1

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if isinstance(value, bool) or value is None:
                continue
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; a model dimension must be a positive integer: correct it")

    @abstractmethod
    def _layer_flops(self, seqlen: Any, num_targets: Any) -> Any:
        """Forward operations of one layer, for lengths and targets of one kind."""

    @overload
    def get_workloads(self, seqlen: int, num_targets: int | None = None) -> int: ...
    @overload
    def get_workloads(self, seqlen: torch.Tensor, num_targets: torch.Tensor | None = None) -> torch.Tensor: ...
    @overload
    def get_workloads(self, seqlen: Any, num_targets: Any = None) -> np.ndarray: ...
    def get_workloads(self, seqlen: Any, num_targets: Any = None) -> Any:
        """Forward operations per row.

        Args:
            seqlen: tokens that the model computes for a row (context, interleaved history and targets): an int, or
                integers `(batch_size,)` of any dtype as tensor, array or list.
            num_targets: how many of the last tokens are targets, of the same shape; none if not given.

        Returns:
            int for an int, an int64 tensor on the same device for a tensor, an int64 array for an array or a list.

        Raises:
            TypeError: lengths that are no integers.
            ValueError: on the host: a negative length, more targets than tokens, or a result beyond int64.
        """
        lengths, targets = (
            _as_int64(seqlen, "seqlen"),
            _as_int64(0 if num_targets is None else num_targets, "num_targets"),
        )
        if isinstance(lengths, torch.Tensor) and not isinstance(targets, torch.Tensor):
            targets = torch.as_tensor(targets, device=lengths.device)
        self._check(lengths, targets)
        return self.num_layers * self._layer_flops(lengths, targets)

    def _check(self, lengths: Any, targets: Any) -> None:
        """Look at values that lie on the host; a device is not asked for its values."""
        if isinstance(lengths, torch.Tensor):
            if lengths.device.type != "cpu" or targets.device.type != "cpu":
                return
            lengths, targets = lengths.numpy(), targets.numpy()
        lengths, targets = np.atleast_1d(lengths), np.atleast_1d(targets)
        if lengths.size == 0:
            return
        if lengths.min() < 0:
            raise ValueError(f"seqlen holds {lengths.min()}; a length cannot be negative: correct the lengths")
        if targets.size and targets.min() < 0:
            raise ValueError(f"num_targets holds {targets.min()}; a count cannot be negative: correct it")
        excess = targets - lengths
        if excess.max() > 0:
            row = int(excess.argmax())
            raise ValueError(
                f"row {row} has {lengths[row] + excess[row]} targets in {lengths[row]} tokens; targets are among the "
                "tokens: give seqlen with its targets included"
            )
        longest = int(lengths.max())
        if self.num_layers * self._layer_flops(longest, 0) > _INT64_MAX:
            raise ValueError(
                f"a row of {longest} tokens costs more than 2**63 operations; workloads are int64: check seqlen"
            )


@dataclass(frozen=True)
class HSTUAttentionTask(_AttentionTask):
    """Cost of a stack of HSTU layers.

    Args:
        hidden_size: width of the residual stream.
        num_heads: attention heads.
        head_dim: width of a head; heads · head_dim may differ from hidden_size.
        num_layers: layers in the stack.
        causal: whether attention is causal.
        target_group_size: targets that may see one another.

    Raises:
        ValueError: a dimension below 1.

    >>> HSTUAttentionTask(hidden_size=4, num_heads=2, head_dim=2).get_workloads([0, 1, 2])
    array([  0, 176, 368])
    """

    causal: bool = field(default=True, kw_only=True)
    target_group_size: int = field(default=1, kw_only=True)

    def _layer_flops(self, seqlen: Any, num_targets: Any) -> Any:
        pairs = attention_pairs(seqlen, num_targets, causal=self.causal, target_group_size=self.target_group_size)
        return hstu_layer_flops(
            seqlen, pairs, hidden_size=self.hidden_size, num_heads=self.num_heads, head_dim=self.head_dim
        )


@dataclass(frozen=True)
class SelfAttentionTask(_AttentionTask):
    """Cost of a stack of transformer layers.

    Args:
        hidden_size: width of the residual stream.
        num_heads: query heads.
        head_dim: width of a head.
        num_layers: layers in the stack.
        ffn_hidden_size: width of the feed-forward block; 4 · hidden_size if not given.
        num_query_groups: key and value heads; num_heads if not given.
        gated_ffn: whether the feed-forward block is gated (three matrices instead of two).
        causal: whether attention is causal.

    Raises:
        ValueError: a dimension below 1, or query groups that do not divide the heads.

    >>> SelfAttentionTask(hidden_size=4, num_heads=2, head_dim=2).get_workloads(2)
    816
    """

    ffn_hidden_size: int | None = field(default=None, kw_only=True)
    num_query_groups: int | None = field(default=None, kw_only=True)
    gated_ffn: bool = field(default=False, kw_only=True)
    causal: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_query_groups is not None and self.num_heads % self.num_query_groups:
            raise ValueError(
                f"num_query_groups is {self.num_query_groups}, num_heads is {self.num_heads}; the groups share the "
                "heads evenly: choose a divisor"
            )

    def _layer_flops(self, seqlen: Any, num_targets: Any) -> Any:
        return transformer_layer_flops(
            seqlen,
            attention_pairs(seqlen, num_targets, causal=self.causal),
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_query_groups=self.num_query_groups or self.num_heads,
            ffn_hidden_size=self.ffn_hidden_size or 4 * self.hidden_size,
            gated_ffn=self.gated_ffn,
        )


def _as_int64(value: Any, name: str) -> Any:
    """An int as it is, a tensor or anything array-like as int64 of the same kind."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{name} has dtype {value.dtype}; lengths are integers: convert them")
        return value.to(torch.int64)
    array = np.asarray(value)
    if array.size == 0:
        return array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} has dtype {array.dtype}; lengths are integers: convert them")
    return array.astype(np.int64)
