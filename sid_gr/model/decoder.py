"""The decoder: tokens ─► megatron-core's transformer layers ─► a head for every hierarchy ─► loss."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.datasets.gpt_sid_batch import GPTSIDBatch
from commons.distributed import global_mean_loss
from sid_gr.megatron_core import (
    HAVE_TE,
    ModuleSpec,
    TransformerBlock,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    parallel_state,
)
from sid_gr.model.attention import BeamStep, CausalRows, DecodingCache, PatternAttention
from sid_gr.model.config import SIDGRConfig
from sid_gr.model.token_layout import TokenLayout, lay_out_batch
from sid_gr.parallel import tensor_parallel_size


@dataclass(frozen=True)
class LossOutput:
    """The results of a step besides the loss, detached from the graph."""

    loss_sum: torch.Tensor  # 0-dimensional, the sum of the cross-entropies of all candidate codes of this rank
    num_loss_tokens: int  # number of these codes


class SIDDecoder(nn.Module):
    """The dense part of the model: layers, heads and loss.

    Whole weights are drawn on the CPU from torch's default generator, and a tensor-parallel rank keeps its part: with
    the same seed, the weights are the same for any `tensor_model_parallel_size`.

    Args:
        config: dimensions of the decoder.
        pg_group: ranks that share the global batch; None for megatron-core's data-parallel group.

    Raises:
        RuntimeError: megatron-core's parallel_state is not initialised.
        ValueError: parallel_state was initialised for another tensor-parallel size.
    """

    def __init__(self, config: SIDGRConfig, pg_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if tensor_parallel_size() != config.tensor_model_parallel_size:
            raise ValueError(
                f"tensor_model_parallel_size is {config.tensor_model_parallel_size}, the groups were made for "
                f"{tensor_parallel_size()}; both are the number of ranks that share a decoder: pass the same number to "
                "initialize_model_parallel"
            )
        self.config = config
        self._pg_group = pg_group
        self.heads_per_rank = config.num_attention_heads // config.tensor_model_parallel_size
        self.transformer_config = transformer_config(config)
        self.bos = nn.Parameter(torch.empty(1, config.hidden_size))
        self.positions = nn.Parameter(torch.empty(config.max_items + 1, config.hidden_size))
        # Tensor-parallel ranks have different parts, each with its own name, so that a checkpoint contains all parts.
        self._layers = "layers"
        if config.tensor_model_parallel_size > 1:
            self._layers = f"layers_of_tensor_parallel_rank_{parallel_state.get_tensor_model_parallel_rank()}"
        self.add_module(self._layers, TransformerBlock(self.transformer_config, layer_spec()))
        widths = config.codebook_sizes if config.heads == "separate" else (max(config.codebook_sizes),)
        self.heads = nn.ParameterList(torch.empty(width, config.hidden_size) for width in widths)
        for weight in (self.bos, self.positions, *self.heads):
            nn.init.normal_(weight, std=config.init_method_std)
        self.register_state_dict_post_hook(_drop_extra_state)

    def forward(self, embeddings: Mapping[str, JaggedTensor], batch: GPTSIDBatch) -> tuple[torch.Tensor, LossOutput]:
        """The loss of a batch: cross-entropy of every code of the candidates, given all codes before it.

        The layout is made from the host's lengths, see `GPTSIDBatch.host_lengths`, without waiting for the device.

        Args:
            embeddings: embeddings of the history's and the candidates' ids, values `(num_ids, hidden_size)`.
            batch: the batch, with labels.

        Returns:
            The loss to call `backward` on, W × local sum ÷ global count, and the other results of the step.

        Raises:
            ValueError: labels do not fit the candidates, or as `lay_out`.
            TypeError: labels are no KeyedJaggedTensor.
        """
        layout = self.lay_out(batch)
        history, candidates = (
            embeddings[name].values() for name in (batch.history_feature_name, batch.candidate_feature_name)
        )
        return self.loss(self.encode(history, candidates, layout), layout, batch)

    def lay_out(self, batch: GPTSIDBatch, *, generates: bool = False) -> TokenLayout:
        """The token layout of a batch; with `generates` an item is generated after every history.

        Raises:
            ValueError: another number of hierarchies or other codebooks than the model's, or a row with too many items.
        """
        if batch.num_hierarchies != self.config.num_hierarchies:
            raise ValueError(
                f"the batch has {batch.num_hierarchies} hierarchies, the model {self.config.num_hierarchies}; an item "
                "has one code for each codebook of the model: make both equal"
            )
        sizes = list(self.config.codebook_sizes)
        if batch.codebook_sizes not in (None, sizes):
            raise ValueError(
                f"codebook_sizes of the batch are {batch.codebook_sizes}, those of the model {sizes}; the id of a "
                "code depends on the sizes of all codebooks before its own: make both equal"
            )
        history, candidates = batch.host_lengths(batch.history_feature_name, batch.candidate_feature_name)
        items = (history + candidates) // self.config.num_hierarchies
        if items.size and int(items.max()) > self.config.max_items:
            raise ValueError(
                f"row {int(items.argmax())} has {int(items.max())} items, max_items is {self.config.max_items}; "
                "the model has no more positions: raise max_items or cut the histories"
            )
        # The first code is predicted by the history's last token; only the codes after it need the item's position.
        longest = history.max(initial=0) // self.config.num_hierarchies
        if generates and self.config.num_hierarchies > 1 and longest >= self.config.max_items:
            raise ValueError(
                f"row {int(history.argmax())} has a history of {longest} items, max_items is {self.config.max_items}; "
                "the generated item needs a position too: raise max_items or cut the histories"
            )
        assert batch.actual_batch_size is not None  # noqa: S101  set in __post_init__
        return lay_out_batch(
            history,
            candidates,
            num_rows=batch.actual_batch_size,
            num_hierarchies=self.config.num_hierarchies,
            num_heads=self.heads_per_rank,
            device=self.bos.device,
        )

    def encode(
        self,
        history: torch.Tensor,
        candidates: torch.Tensor,
        layout: TokenLayout,
        cache: DecodingCache | None = None,
    ) -> torch.Tensor:
        """Hidden states `(num_tokens, hidden_size)`, from the embeddings of all history ids and all candidate ids.

        `cache` receives the keys and values, for `step`.
        """
        ids = torch.cat([part.to(self.bos.dtype) for part in (self.bos, history, candidates)])
        tokens = ids.index_select(0, layout.source) + self.positions.index_select(0, layout.positions)
        return self._apply_layers(tokens, CausalRows(layout=layout, cache=cache))

    def _apply_layers(self, tokens: torch.Tensor, pattern: CausalRows | BeamStep) -> torch.Tensor:
        layers = self.get_submodule(self._layers)
        if tokens.shape[0] == 0:  # all weights stay in the graph, because all ranks average their gradients
            return tokens + 0 * torch.stack([each.sum() for each in layers.parameters()]).sum()
        return layers(tokens.unsqueeze(1), None, packed_seq_params=pattern).squeeze(1)

    def logits(self, hidden: torch.Tensor, hierarchy: int) -> torch.Tensor:
        """Scores of the codes of one hierarchy: at least float32 `(..., codebook_sizes[hierarchy])`."""
        weight = self.heads[hierarchy if self.config.heads == "separate" else 0]
        scores = functional.linear(hidden, weight[: self.config.codebook_sizes[hierarchy]])
        return scores if scores.dtype == torch.float64 else scores.float()

    def loss(self, hidden: torch.Tensor, layout: TokenLayout, batch: GPTSIDBatch) -> tuple[torch.Tensor, LossOutput]:
        """The loss of a batch from its hidden states `(num_tokens, hidden_size)`; see `forward`."""
        labels = candidate_codes(batch, layout.predicting.numel())
        predicting = layout.predicting.view(-1, self.config.num_hierarchies)
        terms = [
            functional.cross_entropy(
                self.logits(hidden.index_select(0, predicting[:, hierarchy]), hierarchy),
                labels[:, hierarchy],
                reduction="sum",
            )
            for hierarchy in range(self.config.num_hierarchies)
        ]
        loss_sum = torch.stack(terms).sum()
        num_loss_tokens = batch.num_loss_tokens()
        global_count = batch.global_loss_terms(self._pg_group)
        loss = global_mean_loss(loss_sum, num_loss_tokens, self._pg_group, global_count=global_count)
        return loss, LossOutput(loss_sum.detach(), num_loss_tokens)

    def step(self, embeddings: torch.Tensor, cache: DecodingCache, num_beams: int) -> torch.Tensor:
        """Hidden states of one new code per beam.

        Args:
            embeddings: `(num_rows · num_beams, hidden_size)`, in the layout's order of rows.
            cache: cache of the beams; the new codes are added to it.
            num_beams: number of beams per row.

        Returns:
            `(num_rows · num_beams, hidden_size)`.
        """
        # All codes of the generated item have the position after the history.
        items = (cache.layout.prefix_lengths - 1) // self.config.num_hierarchies + 1
        tokens = embeddings.to(self.bos.dtype) + self.positions.index_select(0, items).repeat_interleave(num_beams, 0)
        return self._apply_layers(tokens, BeamStep(cache=cache, num_beams=num_beams))


def _drop_extra_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Remove the None values that megatron-core's linear layers put into a state dict as their extra state."""
    for name in [name for name, value in state.items() if value is None and name.startswith(prefix)]:
        del state[name]


def candidate_codes(batch: GPTSIDBatch, num_codes: int) -> torch.Tensor:
    """Labels of a batch, int64 `(num_candidates, num_hierarchies)`.

    Raises:
        TypeError: no KeyedJaggedTensor.
        ValueError: other than one key, or another number of codes than the candidates have.
    """
    if not isinstance(batch.labels, KeyedJaggedTensor):
        raise TypeError(
            f"labels are {type(batch.labels).__name__}; the loss needs a KeyedJaggedTensor with the codes of the "
            "candidates: give the batch such labels"
        )
    if batch.labels.length_per_key() != [num_codes]:
        raise ValueError(
            f"labels have {batch.labels.length_per_key()} values by key, the candidates have {num_codes} codes; labels "
            "have one key, with a value per candidate code: give the labels these lengths"
        )
    return batch.labels.values().view(-1, batch.num_hierarchies)


def transformer_config(config: SIDGRConfig) -> TransformerConfig:
    """megatron-core's config of the layers: pre-norm, GELU, without positional encoding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the default of an option that is not used here
        return TransformerConfig(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            kv_channels=config.head_dim,
            ffn_hidden_size=config.ffn_width,
            hidden_dropout=config.dropout,
            attention_dropout=0.0,
            layernorm_epsilon=config.layer_norm_eps,
            init_method_std=config.init_method_std,
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            use_cpu_initialization=True,
            # These need Apex or Transformer Engine.
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
        )


def layer_spec() -> ModuleSpec:
    """megatron-core's GPT layer, with Transformer Engine's modules where installed, and attention over packed rows."""
    spec = get_gpt_layer_with_transformer_engine_spec() if HAVE_TE else get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(module=PatternAttention)
    return spec
