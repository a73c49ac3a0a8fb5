"""The semantic-ID model: code embeddings ─► decoder ─► loss, and in evaluation generated items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.datasets.gpt_sid_batch import GPTSIDBatch, codebook_offsets
from sid_gr.embedding import CodeEmbedding
from sid_gr.model.attention import CausalRows
from sid_gr.model.beam_search import GeneratedItems, beam_search, check_beam_width
from sid_gr.model.config import SIDGRConfig
from sid_gr.model.decoder import LossOutput, SIDDecoder, candidate_codes
from sid_gr.model.decoding_cache import DecodingCache
from sid_gr.model.token_layout import RowSpans, TokenLayout, lay_out
from sid_gr.model.trie import SIDTrie


@dataclass(frozen=True)
class GenerationOutput(LossOutput):
    """The results of an evaluation step besides the loss."""

    generated: GeneratedItems  # items of the real rows, in the order of the rows
    # int64 `(num_candidates,)`, leaves of the true items, row after row; −1 for an SID that is not valid.
    candidates: torch.Tensor
    num_candidates: torch.Tensor  # int64 `(num_rows,)`, number of true items of each real row


class SIDGRModel(nn.Module):
    """A GPT-style decoder of semantic IDs.

    In training its output is the loss; in evaluation mode it also generates the likeliest items of every row. The table
    is in `embedding`, which DistributedModelParallel shards; all other layers are in `dense`, which megatron-core's
    DistributedDataParallel copies to every rank.

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
            check_beam_width(beam_width, trie)
        self.config = config
        self.trie = trie
        self.beam_width = beam_width
        self.embedding = CodeEmbedding(
            feature_names, sum(config.codebook_sizes), config.hidden_size, device=embedding_device
        )
        self.dense: nn.Module = SIDDecoder(config, pg_group)

    @property
    def decoder(self) -> SIDDecoder:
        """The decoder, without its data-parallel wrapper."""
        dense = self.dense
        return dense if isinstance(dense, SIDDecoder) else cast(SIDDecoder, dense.module)

    def forward(self, batch: GPTSIDBatch) -> tuple[torch.Tensor, LossOutput]:
        """The loss of a batch, and the other results of the step: in evaluation mode with a trie a GenerationOutput.

        In evaluation mode this is a collective call, because ranks look up codes of beams in the sharded table.

        Raises:
            ValueError, TypeError: as `SIDDecoder.forward`.
        """
        embeddings = self.embedding(batch.features)
        if self.training or self.trie is None:
            return self.dense(embeddings, batch)
        decoder = self.decoder
        layout = decoder.lay_out(batch)
        cache = DecodingCache(layout)
        hidden = decoder.encode(decoder.tokens(embeddings, batch, layout), CausalRows(layout=layout, cache=cache))
        loss, output = decoder.loss(hidden, layout, batch)
        generated = self._decode(hidden, layout, cache, batch)
        num_rows = layout.num_rows
        lengths = batch.code_lengths(batch.candidate_feature_name)[:num_rows]
        truth = self.trie.lookup(candidate_codes(batch, layout.predicting.numel()))
        return loss, GenerationOutput(
            output.loss_sum, output.num_loss_tokens, generated, truth, lengths // self.config.num_hierarchies
        )

    @torch.no_grad()
    def generate(self, batch: GPTSIDBatch, *, use_cache: bool = True) -> GeneratedItems:
        """The likeliest next items of every real row, given its history; candidates are ignored.

        A collective call if the table is sharded.

        Args:
            batch: a batch; labels are not needed.
            use_cache: whether to keep the keys and values of histories. If False, the whole sequence of every beam is
                recomputed for every code: the same result, slower.

        Raises:
            RuntimeError: the model has no trie.
            ValueError: as `SIDDecoder.lay_out`.
        """
        if self.trie is None:
            raise RuntimeError("the model has no trie; generation needs the valid SIDs: make the model with a trie")
        decoder = self.decoder
        embeddings = self.embedding(batch.features)
        layout = decoder.lay_out(batch)
        cache = DecodingCache(layout) if use_cache else None
        hidden = decoder.encode(decoder.tokens(embeddings, batch, layout), CausalRows(layout=layout, cache=cache))
        return self._decode(hidden, layout, cache, batch, embeddings)

    def _decode(
        self,
        hidden: torch.Tensor,
        layout: TokenLayout,
        cache: DecodingCache | None,
        batch: GPTSIDBatch,
        embeddings: Mapping[str, JaggedTensor] | None = None,
    ) -> GeneratedItems:
        """Beam search from the hidden states of the histories; results are in the order of the batch's rows."""
        assert self.trie is not None  # noqa: S101  checked by the callers
        first = self.decoder.logits(hidden.index_select(0, layout.last_history), 0)
        if cache is not None:
            steps: _CachedSteps | _RepeatedSteps = _CachedSteps(self, layout, cache, batch)
        else:
            assert embeddings is not None  # noqa: S101  given by `generate`
            steps = _RepeatedSteps(self, layout, batch, embeddings)
        found = beam_search(self.trie, self.beam_width, first, steps)
        back = torch.empty_like(layout.order)
        back[layout.order] = torch.arange(layout.num_rows, device=back.device)
        return GeneratedItems(found.leaves[back], found.log_probs[back])

    def embed_codes(self, codes: torch.Tensor, hierarchy: int, batch: GPTSIDBatch) -> torch.Tensor:
        """Embeddings of generated codes: a lookup in the sharded table, so a collective call.

        Args:
            codes: int64 `(num_rows, num_beams)`.
            hierarchy: hierarchy of the codes.
            batch: the batch, whose real rows the codes are for.

        Returns:
            `(num_rows · num_beams, hidden_size)`.
        """
        num_rows, num_beams = codes.shape
        lengths = torch.zeros(2, batch.batch_size, dtype=torch.int64, device=codes.device)
        lengths[1, :num_rows] = num_beams  # as candidates; histories are empty
        features = KeyedJaggedTensor(
            keys=self.embedding.feature_names,
            values=codes.flatten() + codebook_offsets(self.config.codebook_sizes)[hierarchy],
            lengths=lengths.flatten(),
            stride=batch.batch_size,
            length_per_key=[0, num_rows * num_beams],
        )
        return self.embedding(features)[self.embedding.feature_names[1]].values()


class _CachedSteps:
    """`next_logits` of `beam_search` with cached keys and values of histories and beams."""

    def __init__(self, model: SIDGRModel, layout: TokenLayout, cache: DecodingCache, batch: GPTSIDBatch) -> None:
        self._model, self._layout, self._cache, self._batch = model, layout, cache, batch
        self._hierarchy = 0

    def __call__(self, codes: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """See `beam_search`."""
        self._cache.choose_beams(parents)
        embeddings = self._model.embed_codes(codes, self._hierarchy, self._batch)
        hidden = self._model.decoder.step(embeddings, self._cache, codes.shape[1])
        self._hierarchy += 1
        return self._model.decoder.logits(hidden, self._hierarchy).unflatten(0, codes.shape)


class _RepeatedSteps:
    """`next_logits` of `beam_search` that recomputes the whole sequence of every beam."""

    def __init__(
        self, model: SIDGRModel, layout: TokenLayout, batch: GPTSIDBatch, embeddings: Mapping[str, JaggedTensor]
    ) -> None:
        self._model, self._batch = model, batch
        self._history = embeddings[batch.history_feature_name].values()
        (lengths,) = batch.host_lengths(batch.history_feature_name)
        rows = layout.order.cpu().numpy()
        self._starts, self._lengths = (np.cumsum(lengths) - lengths)[rows], lengths[rows]
        self._generated: torch.Tensor | None = None  # (num_rows, num_beams, codes so far, hidden_size)
        self._hierarchy = 0

    def __call__(self, codes: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """See `beam_search`."""
        decoder = self._model.decoder
        num_rows, num_beams = codes.shape
        new = self._model.embed_codes(codes, self._hierarchy, self._batch).unflatten(0, (num_rows, num_beams, 1))
        if self._generated is not None:
            rows = torch.arange(num_rows, device=codes.device)[:, None]
            new = torch.cat([self._generated[rows, parents], new], dim=2)
        self._generated = new
        self._hierarchy += 1
        sequences = num_rows * num_beams
        spans = RowSpans(
            np.repeat(self._starts, num_beams),
            np.repeat(self._lengths, num_beams),
            np.arange(sequences) * self._hierarchy,
            np.full(sequences, self._hierarchy),
        )
        layout = lay_out(
            spans,
            num_history_ids=self._history.shape[0],
            predicted=np.zeros(sequences, np.int64),
            num_hierarchies=self._model.config.num_hierarchies,
            num_heads=decoder.heads_per_rank,
            device=codes.device,
        )
        source = torch.cat([decoder.bos, self._history.to(decoder.bos.dtype), new.flatten(0, 2).to(decoder.bos.dtype)])
        tokens = source.index_select(0, layout.source) + decoder.positions.index_select(0, layout.positions)
        hidden = decoder.encode(tokens, CausalRows(layout=layout))
        # The last token of every sequence, in the order of the sequences.
        last = torch.empty_like(layout.order)
        last[layout.order] = layout.last_history + self._hierarchy
        return decoder.logits(hidden.index_select(0, last), self._hierarchy).unflatten(0, codes.shape)
