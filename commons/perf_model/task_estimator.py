"""WORKLOAD: the cost of a sample, in floating-point operations of the forward pass.

A task has the dimensions of a model and computes int64 workloads from sequence lengths. It counts only matrix
multiplications (2 operations per multiply-add); elementwise work is linear and small beside them. All arithmetic is in
int64 or in Python integers: an int32 length of 4096 does not overflow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np
import torch

from commons.checks import Count, require_field_types, require_unmasked, take_python_scalars
from commons.perf_model.attention_pairs import as_wide, attention_pairs, is_zero

IntLike = TypeVar("IntLike", int, np.ndarray, torch.Tensor)

_INT64_MAX = 2**63 - 1
_COUNTS = ("seqlen", "num_targets", "num_contextual")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# The backward pass of a matrix product has two products of the same size, one for each of its factors.
_PASSES_OF_TRAINING = 3


def training_flops(forward_flops: IntLike) -> IntLike:
    """Operations of the forward and the backward pass: three times those of the forward pass.

    Recomputation to save memory (activation checkpointing, the scores of a fused attention) is not counted, as usual
    for the utilisation of a model (Chowdhery et al. 2022, "PaLM", appendix B).
    """
    return _PASSES_OF_TRAINING * forward_flops


def vocabulary_head_flops(num_tokens: Any, *, hidden_size: int, vocab_size: int) -> Any:
    """Forward operations of a head that scores a vocabulary: 2·L·h·V for L tokens."""
    return 2 * hidden_size * vocab_size * num_tokens


def on_host(compute: Callable[..., Any], *given: Any) -> Any:
    """`compute(*given)`, in numpy if the integers are on the host: its calls take a third of the time of torch's."""
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    fit = (
        each.device.type == "cpu" and each.dtype in _INTEGERS and not each.is_nested and each.dim() > 0
        for each in tensors
    )
    if not isinstance(given[0], torch.Tensor) or not all(fit):
        return compute(*given)
    return torch.from_numpy(compute(*(each.numpy() if isinstance(each, torch.Tensor) else each for each in given)))


@dataclass(frozen=True)
class AttentionTask(ABC):
    """Dimensions of a stack of attention layers."""

    hidden_size: Count  # width of the residual stream
    num_heads: Count  # query heads
    head_dim: Count  # width of a head; heads · head_dim may differ from hidden_size
    num_layers: Count = 1  # layers in the stack

    def __post_init__(self) -> None:
        take_python_scalars(self)
        require_field_types(self)

    @abstractmethod
    def _pairs(self, seqlen: Any, num_targets: Any, num_contextual: Any) -> Any:
        """Pairs that the mask of one layer keeps; for ints, arrays or tensors."""

    @abstractmethod
    def forward_flops(self, tokens: Any, pairs: Any) -> Any:
        """Forward operations of the whole stack; for ints, arrays or tensors, of rows or sums over rows.

        Args:
            tokens: tokens that the model computes, of any integer or floating dtype.
            pairs: (query, key) pairs of the mask of a layer, see `tokens_and_pairs`.
        """

    @overload
    def get_workloads(self, seqlen: int, num_targets: int | None = None, num_contextual: int | None = None) -> int: ...
    @overload
    def get_workloads(
        self, seqlen: torch.Tensor, num_targets: torch.Tensor | None = None, num_contextual: torch.Tensor | None = None
    ) -> torch.Tensor: ...
    @overload
    def get_workloads(self, seqlen: Any, num_targets: Any = None, num_contextual: Any = None) -> np.ndarray: ...
    def get_workloads(self, seqlen: Any, num_targets: Any = None, num_contextual: Any = None) -> Any:
        """Forward operations per row.

        Args:
            seqlen: tokens that the model computes for a row (context, interleaved history and targets): an int, or
                integers `(batch_size,)` of any dtype as tensor, array or list.
            num_targets: how many of the last tokens are targets, of the same shape; None for no targets.
            num_contextual: how many of the first tokens attend to all tokens except the targets, of the same shape;
                None for 0.

        Returns:
            int for an int, an int64 tensor on the same device for a tensor, an int64 array for an array or a list.

        Raises:
            TypeError: lengths that are not integers.
            ValueError: on the host: a negative length, more targets than tokens, or a result beyond int64.
        """
        return on_host(
            lambda *given: self.forward_flops(*self.tokens_and_pairs(*given)), seqlen, num_targets, num_contextual
        )

    def tokens_and_pairs(self, seqlen: Any, num_targets: Any = None, num_contextual: Any = None) -> tuple[Any, Any]:
        """Tokens per row, and the (query, key) pairs of the mask of a layer, from which a cost is computed.

        Args:
            seqlen: as for `get_workloads`.
            num_targets: as for `get_workloads`.
            num_contextual: as for `get_workloads`.

        Returns:
            Both as int for an int, int64 tensors for a tensor, int64 arrays for an array or a list.

        Raises:
            TypeError, ValueError: as for `get_workloads`.
        """
        lengths = _as_int64(seqlen, "seqlen")
        targets = _as_int64(0 if num_targets is None else num_targets, "num_targets")
        contextual = _as_int64(0 if num_contextual is None else num_contextual, "num_contextual")
        if isinstance(lengths, torch.Tensor):
            # Integers stay on the host: copying them to a device would wait for it.
            targets, contextual = (
                torch.as_tensor(part, device=lengths.device) if isinstance(part, np.ndarray) else part
                for part in (targets, contextual)
            )
        elif isinstance(lengths, np.ndarray):
            targets, contextual = (
                part.cpu().numpy() if isinstance(part, torch.Tensor) else part for part in (targets, contextual)
            )
        for name, part in (("num_targets", targets), ("num_contextual", contextual)):
            if not isinstance(part, int) and np.shape(part) != np.shape(lengths):
                raise ValueError(
                    f"{name} has shape {tuple(np.shape(part))}, seqlen has {tuple(np.shape(lengths))}; every row has "
                    "one number of each: match them"
                )
        self._check(lengths, targets, contextual)
        return lengths, self._pairs(lengths, targets, contextual)

    def _check(self, lengths: Any, targets: Any, contextual: Any) -> None:
        """Check values on the host; values on a device are not read."""
        given = lengths, targets, contextual
        if any(isinstance(part, torch.Tensor) and part.device.type != "cpu" for part in given):
            return
        arrays = [np.asarray(part) for part in given]
        if arrays[0].size == 0:
            return
        counts = [array for array, part in zip(arrays[1:], given[1:]) if not is_zero(part)]
        if min(int(part.min()) for part in (arrays[0] - sum(counts) if counts else arrays[0], *counts)) < 0:
            _refuse_counts(*map(np.atleast_1d, arrays))
        longest = int(arrays[0].max())
        # An upper limit with all pairs, in Python's integers, which do not overflow.
        if self.forward_flops(longest, longest * longest) > _INT64_MAX:
            raise ValueError(
                f"a row of {longest} tokens can cost more than 2**63 operations; workloads are int64: check seqlen"
            )


def _refuse_counts(lengths: np.ndarray, targets: np.ndarray, contextual: np.ndarray) -> None:
    """Raise ValueError about a negative number, or a row with more targets and contextual tokens than tokens."""
    for name, what, part in zip(_COUNTS, ("a length", "a count", "a count"), (lengths, targets, contextual)):
        if part.min() < 0:
            raise ValueError(f"{name} holds {part.min()}; {what} cannot be negative: correct it")
    for name, parts in (("targets", targets), ("targets and contextual tokens", targets + contextual)):
        excess = parts - lengths
        if excess.max() > 0:
            row = int(excess.argmax())
            raise ValueError(
                f"row {row} has {lengths[row] + excess[row]} {name} in {lengths[row]} tokens; {name} are among the "
                "tokens: give seqlen with all of them included"
            )


@dataclass(frozen=True, kw_only=True)  # of the fields below, not of the inherited ones
class HSTUAttentionTask(AttentionTask):
    """Cost of a stack of HSTU layers.

    Raises:
        ValueError: a dimension below 1.

    Examples:
        >>> HSTUAttentionTask(hidden_size=4, num_heads=2, head_dim=2).get_workloads([0, 1, 2])
        array([  0, 176, 368])
    """

    causal: bool = True  # whether attention is causal
    target_group_size: Count = 1  # targets that may attend to one another
    value_dim: Count | None = None  # width of a head of u and v; None for head_dim
    # Whether the output projection reads [u, x, y] instead of only y, where x is attention's result and y its product
    # with u, as in the STU layers of generative-recommenders. There, hidden_size is called embedding_dim, head_dim
    # attention_dim and value_dim hidden_dim.
    concat_ux: bool = False
    # The largest distance at which a token attends to another one, as in `hstu.model.HSTUConfig`; None for no window.
    max_attn_len: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_dim == self.head_dim:  # so that equal models compare equal
            object.__setattr__(self, "value_dim", None)

    def _pairs(self, seqlen: Any, num_targets: Any, num_contextual: Any) -> Any:
        return attention_pairs(
            seqlen,
            num_targets,
            num_contextual,
            causal=self.causal,
            target_group_size=self.target_group_size,
            max_attn_len=self.max_attn_len,
        )

    def forward_flops(self, tokens: Any, pairs: Any) -> Any:
        """Forward operations of the whole stack; see AttentionTask.

        For a layer (Zhai et al. 2024, "Actions Speak Louder than Words"), with p = heads · head_dim: the joint U, V, Q,
        K projection 2·L·h·4p, the two products of pointwise attention 4·p·pairs, and the output projection 2·L·p·h.
        If u and v have another width, w = heads · value_dim, these are 2·L·h·2(p + w), 2·(p + w)·pairs and 2·L·w·h;
        the last is three times as much if it reads [u, x, y].
        """
        keys, values = self.num_heads * self.head_dim, self.num_heads * (self.value_dim or self.head_dim)
        projected = 2 * self.hidden_size * (2 * (keys + values) + (3 if self.concat_ux else 1) * values)
        return self.num_layers * (projected * as_wide(tokens) + 2 * (keys + values) * as_wide(pairs))


@dataclass(frozen=True, kw_only=True)  # of the fields below, not of the inherited ones
class SelfAttentionTask(AttentionTask):
    """Cost of a stack of transformer layers.

    Raises:
        ValueError: a dimension below 1, query groups that do not divide the heads, or more active experts than experts.

    Examples:
        >>> SelfAttentionTask(hidden_size=4, num_heads=2, head_dim=2).get_workloads(2)
        816
    """

    ffn_hidden_size: Count | None = None  # width of the feed-forward block; None for 4 · hidden_size
    num_query_groups: Count | None = None  # key and value heads; None for num_heads
    gated_ffn: bool = False  # whether the feed-forward block is gated (three matrices instead of two)
    causal: bool = True  # whether attention is causal
    num_experts: Count = 1  # feed-forward blocks of a layer from which a router chooses; 1 for a layer without a router
    num_active_experts: Count = 1  # blocks that a token passes
    vocab_size: Count | None = None  # classes that the head scores for every token; None for no head

    def __post_init__(self) -> None:
        super().__post_init__()
        # Fill in defaults that depend on other dimensions, so that equal models compare equal.
        if self.ffn_hidden_size is None:
            object.__setattr__(self, "ffn_hidden_size", 4 * self.hidden_size)
        if self.num_query_groups is None:
            object.__setattr__(self, "num_query_groups", self.num_heads)
        if self.num_active_experts > self.num_experts:
            raise ValueError(
                f"num_active_experts is {self.num_active_experts}, num_experts is {self.num_experts}; a token passes "
                "some of the experts: raise num_experts"
            )
        if self.num_heads % (self.num_query_groups or self.num_heads):
            raise ValueError(
                f"num_query_groups is {self.num_query_groups}, num_heads is {self.num_heads}; the groups share the "
                "heads evenly: choose a divisor"
            )

    def _pairs(self, seqlen: Any, num_targets: Any, num_contextual: Any) -> Any:
        return attention_pairs(seqlen, num_targets, num_contextual, causal=self.causal)

    def forward_flops(self, tokens: Any, pairs: Any) -> Any:
        """Forward operations of the whole stack; see AttentionTask.

        For a layer (Vaswani et al. 2017), with p = heads · head_dim and G query groups: the Q, K, V projections
        2·L·h·(H + 2G)·d, attention 4·p·pairs, the output projection 2·L·p·h, and the feed-forward block 4·L·h·f, or
        6·L·h·f when gated. With several experts (Shazeer et al. 2017) a token passes k feed-forward blocks and a router
        of 2·L·h·experts.
        """
        groups, ffn_size = self.num_query_groups or self.num_heads, self.ffn_hidden_size or 4 * self.hidden_size
        projected = self.num_heads * self.head_dim
        qkv = 2 * (self.num_heads + 2 * groups) * self.head_dim
        ffn = (6 if self.gated_ffn else 4) * ffn_size * self.num_active_experts
        router = 2 * self.num_experts if self.num_experts > 1 else 0
        per_token = self.hidden_size * (qkv + 2 * projected + ffn + router)
        tokens = as_wide(tokens)
        return self.num_layers * (per_token * tokens + 4 * projected * as_wide(pairs)) + vocabulary_head_flops(
            tokens, hidden_size=self.hidden_size, vocab_size=self.vocab_size or 0
        )


def _as_int64(value: Any, name: str) -> Any:
    """An int for an int, an int64 tensor for a tensor, an int64 array for anything array-like."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            raise TypeError(f"{name} is a nested tensor; one length per row is needed: pass the lengths of its rows")
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{name} has dtype {value.dtype}; lengths are integers: convert them")
        return value.to(torch.int64)
    require_unmasked(name, value)
    array = np.asarray(value)
    if array.dtype == np.int64:
        return array
    if array.size == 0:
        return array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} has dtype {array.dtype}; lengths are integers: convert them")
    return array.astype(np.int64)
