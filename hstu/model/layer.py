"""The HSTU layer and a stack of layers, after Zhai et al. 2024, "Actions Speak Louder than Words", section 3.

A layer computes from the tokens x of a row:

    U, V, Q, K = SiLU(Linear(LayerNorm(x)))
    A          = SiLU(Q Kᵀ + bias) ÷ N, masked; with a bias by position and, if the config sets time_bias, by time
    y          = x + Dropout(Linear(LayerNorm(A V) · U))
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hstu.model.attention import TokenTimes, hstu_attention
from hstu.model.attention_plan import AttentionPlan, plan_attention
from hstu.model.config import HSTUConfig
from hstu.model.execution import execution_of
from hstu.model.triton_attention import in_two_parts, triton_attention
from hstu.model.triton_plan import TritonPlan, plan_triton_attention


class RelativePositionBias(nn.Module):
    """A learned number per head and distance i − j between query and key, or per head and bucket of distances."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        reach = config.max_sequence_length
        sees_ahead = config.contextual_mask or not config.is_causal
        distances = torch.arange(1 - reach if sees_ahead else 0, reach)
        columns = distances - distances[0]
        if config.position_bias == "bucketed":
            columns = distance_buckets(distances, config.position_buckets, reach)
        self.columns: torch.Tensor | None
        self.weight = _bias(config, int(columns.max()) + 1) if config.position_bias != "none" else None
        self.register_buffer("columns", columns if config.position_bias == "bucketed" else None, persistent=False)

    def forward(self) -> torch.Tensor | None:
        """Bias by rising distance; None for no bias.

        Returns:
            `(num_heads, max_sequence_length)` if no token attends to later tokens, else `(num_heads,
            2 · max_sequence_length − 1)`.
        """
        if self.weight is None or self.columns is None:
            return self.weight
        return self.weight.index_select(1, self.columns)


def distance_buckets(distances: torch.Tensor, num_buckets: int, reach: int) -> torch.Tensor:
    """Bucket of every distance: each small distance has its own bucket, larger distances share wider buckets.

    Half of the buckets are exact, the others grow geometrically up to `reach` (Raffel et al. 2020, "Exploring the
    Limits of Transfer Learning with a Unified Text-to-Text Transformer", section 2.1).

    Args:
        distances: int64 `(n,)`, in `(−reach, reach)`.
        num_buckets: buckets for distances of one sign; negative distances get as many further buckets after these.
        reach: an upper bound of the distances.

    Returns:
        int64 `(n,)`.

    >>> distance_buckets(torch.tensor([0, 1, 2, 3, 5, 8, 15, 99, -1]), 8, 100).tolist()
    [0, 1, 2, 3, 4, 4, 5, 7, 9]
    """
    num_exact = num_buckets // 2
    magnitude = distances.abs()
    octaves = torch.log(magnitude.clamp(min=num_exact).double() / num_exact)
    scale = torch.log(torch.tensor(max(reach / num_exact, 1.0 + 1e-9), dtype=torch.float64))
    grown = num_exact + (octaves / scale * (num_buckets - num_exact)).to(torch.int64)
    bucket = torch.where(magnitude < num_exact, magnitude, grown.clamp(max=num_buckets - 1))
    return bucket + num_buckets * (distances < 0)


def _bias(config: HSTUConfig, columns: int) -> nn.Parameter:
    """A learned number per head and column."""
    return nn.Parameter(nn.init.normal_(torch.empty(config.num_attention_heads, columns), std=0.02))


class HSTULayer(nn.Module):
    """One HSTU layer on the tokens of a jagged batch."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self._num_heads, self._head_dim = config.num_attention_heads, config.kv_channels
        self._normalizer = config.max_sequence_length
        width = config.num_attention_heads * config.kv_channels
        self.input_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.uvqk = nn.Linear(config.hidden_size, 4 * width)
        self.position_bias = RelativePositionBias(config)
        self.time_bias = _bias(config, config.time_buckets) if config.time_bias else None
        self.attention_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.output = nn.Linear(width, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        tokens: torch.Tensor,
        plan: AttentionPlan | TritonPlan,
        times: torch.Tensor | None = None,
        compiles: bool = False,
    ) -> torch.Tensor:
        """Apply the layer: `(num_tokens, hidden_size)`.

        Args:
            tokens: input `(num_tokens, hidden_size)`, row after row.
            plan: the blocks or tiles of this batch.
            times: timestamps of the tokens int64 `(num_tokens,)`, or for a TritonPlan the result of `in_two_parts`;
                None without a time bias.
            compiles: whether to compile the parts before and after the attention with torch.compile.
        """
        project, combine = type(self).project, type(self).combine
        if compiles:
            project, combine = _compiled(project), _compiled(combine)
        u, v, q, k = project(self, tokens)
        attention: Any = triton_attention if isinstance(plan, TritonPlan) else hstu_attention
        token_times = None if times is None or self.time_bias is None else TokenTimes(times, self.time_bias)
        attended = attention(q, k, v, self.position_bias(), plan, normalizer=self._normalizer, times=token_times)
        return combine(self, tokens, attended, u)

    def project(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """U `(num_tokens, num_heads · head_dim)`, and V, Q, K `(num_tokens, num_heads, head_dim)`."""
        u, v, q, k = torch.nn.functional.silu(self.uvqk(self.input_norm(tokens))).chunk(4, dim=1)
        heads = (self._num_heads, self._head_dim)
        return u, v.unflatten(1, heads), q.unflatten(1, heads), k.unflatten(1, heads)

    def combine(self, tokens: torch.Tensor, attended: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """The layer's output, from its input and the output of the attention."""
        gated = self.attention_norm(attended.flatten(1)) * u
        return tokens + self.dropout(self.output(gated))


@functools.cache
def _compiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled method, for all layers and lengths; the attention, whose blocks differ by batch, is not compiled."""
    return torch.compile(method, dynamic=True)


class HSTUEncoder(nn.Module):
    """A stack of HSTU layers and a final layer norm."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        num_targets: torch.Tensor | None = None,
        num_contextual: torch.Tensor | None = None,
        times: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Encode the rows of a jagged batch; a row's result does not depend on the rows beside it.

        Args:
            tokens: `(num_tokens, hidden_size)`, row after row.
            lengths: int64 `(batch_size,)`, tokens per row. Lengths on a device are copied to the host, the only wait
                for the device.
            num_targets: int64 `(batch_size,)`, number of targets, which are a row's last tokens; None for no targets.
            num_contextual: int64 `(batch_size,)`, number of contextual tokens, which are a row's first tokens; None for
                none. Only used with `contextual_mask`.
            times: int64 `(num_tokens,)`, timestamps of the tokens; only used with `time_bias`.

        Returns:
            `(num_tokens, hidden_size)`.

        Raises:
            ValueError: a row longer than `max_sequence_length`, lengths that do not sum to the number of tokens, no
                times with `time_bias`, or a device or dtype that the kernel backend does not support.
        """
        config = self.config
        if config.time_bias and times is None:
            raise ValueError(
                "time_bias is True and there are no times; the time bias needs timestamps: give the batch the feature "
                f"{config.timestamp_feature_name!r}, one integer per item, or unset time_bias"
            )
        dtype = tokens.dtype
        if torch.is_autocast_enabled(tokens.device.type):
            dtype = torch.get_autocast_dtype(tokens.device.type)
        execution = execution_of(config, tokens.device, dtype)
        if not config.contextual_mask:
            num_contextual = None
        elif num_contextual is None:
            num_contextual = torch.zeros_like(lengths)
        rows = (lengths, num_targets, num_contextual)
        masks: dict[str, Any] = {
            "is_causal": config.is_causal,
            "target_group_size": config.target_group_size,
            "max_attn_len": config.max_attn_len,
            "device": tokens.device,
        }
        plan: AttentionPlan | TritonPlan
        if execution.uses_triton:
            plan = plan_triton_attention(*rows, **masks)
        else:
            plan = plan_attention(*rows, num_heads=config.num_attention_heads, **masks)
        plan.require_reach(config.max_sequence_length)
        if times is not None and isinstance(plan, TritonPlan):
            times = in_two_parts(times)
        saves_memory = config.execution.activation_checkpointing and torch.is_grad_enabled()
        # In DDP, torch.compile would split each graph at the boundaries of DDP's buckets, to overlap communication with
        # the backward pass; graphs of half a layer are small enough for that overlap.
        with torch._dynamo.config.patch(optimize_ddp=False) if execution.compiles else contextlib.nullcontext():
            for layer in self.layers:
                inputs = (tokens, plan, times, execution.compiles)
                tokens = checkpoint(layer, *inputs, use_reentrant=False) if saves_memory else layer(*inputs)
        return self.norm(tokens)
