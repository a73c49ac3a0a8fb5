"""The semantic-ID model: code embeddings ─► decoder ─► loss, and in evaluation generated items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.datasets.gpt_sid_batch import GPTSIDBatch, codebook_offsets
from sid_gr.model.attention import DecodingCache
from sid_gr.model.beam_search import GeneratedItems, beam_search, require_beam_width
from sid_gr.model.config import SIDGRConfig
from sid_gr.model.decoder import LossOutput, SIDDecoder, candidate_codes
from sid_gr.model.token_layout import TokenLayout
from sid_gr.model.trie import SIDTrie

TABLE = "codes"  # name of the table


@dataclass(frozen=True)
class GenerationOutput(LossOutput):
    """The results of an evaluation step besides the loss."""

    generated: GeneratedItems  # items of the real rows, in the order of the rows
    # int64 `(num_candidates,)`, leaves of the true items, row after row; a negative number for an SID that is not
    # valid, the same for equal SIDs of the batch.
    candidates: torch.Tensor
    num_candidates: torch.Tensor  # int64 `(num_rows,)`, number of true items of each real row


class SIDGRModel(nn.Module):
    """A GPT-style decoder of semantic IDs.

    In training its output is the loss; in evaluation mode it also generates the likeliest items of every row. The table
    is in `embedding`, which DistributedModelParallel shards; all other layers are in `dense`, which it copies to every
    rank.

    Args:
        config: dimensions of the model.
        trie: the valid items; None for a model that does not generate.
        beam_width: number of items generated per row.
        feature_names: keys of the histories' and the candidates' ids.
        pg_group: ranks that share the global batch; None for megatron-core's data-parallel group.
        embedding_device: device of the table, None for the CPU; with "meta", sharding makes the table.

    Raises:
        RuntimeError: megatron-core's parallel_state is not initialised.
        ValueError: parallel_state was initialised for another tensor-parallel size, the trie has other codebooks, or
            beam_width is above the number of items.
    """

    def __init__(
        self,
        config: SIDGRConfig,
        *,
        trie: SIDTrie | None = None,
        beam_width: int = 10,
        feature_names: tuple[str, str] = ("history", "candidate"),
        pg_group: dist.ProcessGroup | None = None,
        embedding_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if trie is not None:
            if trie.codebook_sizes != config.codebook_sizes:
                raise ValueError(
                    f"codebook_sizes of the model are {list(config.codebook_sizes)}, those of the valid SIDs "
                    f"{list(trie.codebook_sizes)}; a head scores one codebook of the map: make both equal"
                )
            require_beam_width(beam_width, trie)
        self.config = config
        self.trie = trie
        self.beam_width = beam_width
        table = EmbeddingConfig(
            name=TABLE,
            embedding_dim=config.hidden_size,
            num_embeddings=sum(config.codebook_sizes),
            feature_names=list(feature_names),
        )
        self.embedding = EmbeddingCollection(tables=[table], device=embedding_device)
        self.dense = SIDDecoder(config, pg_group)

    def forward(self, batch: GPTSIDBatch) -> tuple[torch.Tensor, LossOutput]:
        """The loss of a batch, and the other results of the step: in evaluation mode with a trie a GenerationOutput.

        In evaluation mode this is a collective call, because ranks look up codes of beams in the sharded table.

        Raises:
            ValueError, TypeError: as `SIDDecoder.forward`.
        """
        embeddings = self.embedding(batch.features)
        if self.training or self.trie is None:
            return self.dense(embeddings, batch)
        layout, hidden, generated = self._generate(embeddings, batch)
        loss, output = self.dense.loss(hidden, layout, batch)
        lengths = batch.code_lengths(batch.candidate_feature_name)[: layout.num_rows]
        codes = candidate_codes(batch, layout.predicting.numel())
        leaves, number = self.trie.lookup(codes), codes.unique(dim=0, return_inverse=True)[1]
        truth = torch.where(leaves < 0, -1 - number, leaves)
        return loss, GenerationOutput(
            output.loss_sum, output.num_loss_tokens, generated, truth, lengths // self.config.num_hierarchies
        )

    @torch.no_grad()
    def generate(self, batch: GPTSIDBatch) -> GeneratedItems:
        """The likeliest next items of every real row, given its history; candidates and labels are ignored.

        A collective call if the table is sharded.

        Raises:
            RuntimeError: the model has no trie.
            ValueError: as `SIDDecoder.lay_out`.
        """
        if self.trie is None:
            raise RuntimeError("the model has no trie; generation needs the valid SIDs: make the model with a trie")
        return self._generate(self.embedding(batch.features), batch)[2]

    def _generate(
        self, embeddings: Mapping[str, JaggedTensor], batch: GPTSIDBatch
    ) -> tuple[TokenLayout, torch.Tensor, GeneratedItems]:
        """The layout of a batch, its hidden states, and the items of beam search, in the order of the batch's rows."""
        assert self.trie is not None  # noqa: S101  checked by the callers
        decoder = self.dense
        layout = decoder.lay_out(batch, generates=True)
        cache = DecodingCache(layout)
        history, candidates = (
            embeddings[name].values() for name in (batch.history_feature_name, batch.candidate_feature_name)
        )
        hidden = decoder.encode(history, candidates, layout, cache)
        first = decoder.logits(hidden.index_select(0, layout.last_history), 0)

        def next_logits(hierarchy: int, codes: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
            cache.choose_beams(parents)
            new = decoder.step(self._embed_codes(codes, hierarchy - 1, batch), cache, codes.shape[1])
            return decoder.logits(new, hierarchy).unflatten(0, codes.shape)

        found = beam_search(self.trie, self.beam_width, first, next_logits)
        back = torch.empty_like(layout.order)
        back[layout.order] = torch.arange(layout.num_rows, device=back.device)
        return layout, hidden, GeneratedItems(found.leaves[back], found.log_probs[back])

    def _embed_codes(self, codes: torch.Tensor, hierarchy: int, batch: GPTSIDBatch) -> torch.Tensor:
        """Embeddings of generated codes: a lookup in the sharded table, so a collective call.

        Args:
            codes: int64 `(num_rows, num_beams)`.
            hierarchy: hierarchy of the codes.
            batch: the batch, whose real rows the codes are for.

        Returns:
            `(num_rows · num_beams, hidden_size)`.
        """
        num_rows, num_beams = codes.shape
        keys, own = batch.features.keys(), batch.candidate_feature_name  # a sharded table expects the order of all keys
        lengths = torch.zeros(len(keys), batch.batch_size, dtype=torch.int64, device=codes.device)
        lengths[keys.index(own), :num_rows] = num_beams  # as candidates; the other sequences are empty
        features = KeyedJaggedTensor(
            keys=keys,
            values=codes.flatten() + codebook_offsets(self.config.codebook_sizes)[hierarchy],
            lengths=lengths.flatten(),
            stride=batch.batch_size,
            length_per_key=[num_rows * num_beams if key == own else 0 for key in keys],
        )
        return self.embedding(features)[own].values()
