"""Options of a command that state what a row of a given length costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from commons.checks import require_at_least
from commons.perf_model.task_estimator import AttentionTask, HSTUAttentionTask, SelfAttentionTask


@dataclass
class RowCost:
    """A model's dimensions."""

    _remedy: ClassVar[str] = ""  # what else to do about rows that are too long

    task: Literal["hstu", "transformer", "tokens"] = "hstu"
    """What a row costs: operations of HSTU or transformer layers (SID-GR, language models), or tokens."""

    hidden_size: int = 256
    """Width of the model."""

    num_heads: int = 4
    """Attention heads."""

    head_dim: int = 64
    """Width of a head."""

    num_layers: int = 8
    """Layers."""

    value_dim: int | None = None
    """Width of a head of u and v, with --task hstu; None for --head-dim."""

    concat_ux: bool = False
    """The output projection reads [u, x, y], with --task hstu, as in generative-recommenders; y alone otherwise."""

    max_attn_len: int | None = None
    """Largest distance at which a token sees another one, with --task hstu; None for no window."""

    tokens_per_item: int = 1
    """Tokens that the model computes per unit of length; 2 for HSTU with interleaved actions."""

    extra_tokens: int = 0
    """Tokens of every row besides, such as its context."""

    def check(self) -> None:
        """Raise ValueError for a value out of its range."""
        require_at_least("tokens_per_item", self.tokens_per_item, 1)
        require_at_least("extra_tokens", self.extra_tokens, 0)
        if self.task != "hstu" and (self.value_dim, self.concat_ux, self.max_attn_len) != (None, False, None):
            raise ValueError(
                f"task is {self.task!r}; value_dim, concat_ux and max_attn_len are dimensions of HSTU: leave them out, "
                "or give --task hstu"
            )
        self.model()

    def model(self) -> AttentionTask | None:
        """What counts the operations; None where tokens are the cost."""
        if self.task == "tokens":
            return None
        dimensions = self.hidden_size, self.num_heads, self.head_dim, self.num_layers
        if self.task == "hstu":
            return HSTUAttentionTask(
                *dimensions, value_dim=self.value_dim, concat_ux=self.concat_ux, max_attn_len=self.max_attn_len
            )
        return SelfAttentionTask(*dimensions)

    def tokens(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens that the model computes, int64 as the lengths."""
        return lengths * self.tokens_per_item + self.extra_tokens

    def costs(self, tokens: np.ndarray) -> np.ndarray:
        """What rows of so many tokens cost, int64 as the tokens."""
        model = self.model()
        if model is None:
            return tokens
        try:
            return model.get_workloads(tokens)
        except ValueError:
            raise ValueError(
                f"a row of {int(tokens.max()):,} tokens can cost more than 2**63 operations, which no plan counts: "
                f"check the lengths{self._remedy}"
            ) from None
