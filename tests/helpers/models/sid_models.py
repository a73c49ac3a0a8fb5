"""What tests of the semantic-ID decoder share: groups, small models and data, and the decoder in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torchrec.distributed.model_parallel import DistributedModelParallel

from commons.datasets.gpt_sid_batch import GPTSIDBatch, RandomDistribution, codebook_offsets
from commons.datasets.random.dataset import RandomSIDDataset
from commons.datasets.sids.dataset import CANDIDATE, HISTORY
from commons.datasets.sids.map import random_sid_map
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.distributed.process_group import resolve_process_group
from commons.pipeline import TrainPipelineFactory
from commons.trainer.sharding import dense_parameters
from sid_gr import SIDGRBalancedBatchShuffler
from sid_gr.megatron_core import parallel_state
from sid_gr.model import SIDDecoder, SIDGRConfig, SIDGRModel, SIDTrie
from sid_gr.parallel import initialize_model_parallel
from sid_gr.sharding import build_distributed_model

CPU = torch.device("cpu")
SIZES = (5, 3, 4)
SID_MAP = random_sid_map(23, SIZES, seed=1)
MAX_HISTORY = 12
MAX_CANDIDATES = 3


@contextmanager
def model_parallel(tensor_parallel_size: int = 1) -> Iterator[None]:
    """megatron-core's groups, for as long as a test needs them: its state is global."""
    initialize_model_parallel(tensor_parallel_size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def make_config(**changes) -> SIDGRConfig:
    sizes = {"hidden_size": 16, "num_layers": 2, "num_attention_heads": 4, "kv_channels": 3, "ffn_hidden_size": 24}
    return SIDGRConfig(SIZES, MAX_HISTORY + MAX_CANDIDATES, **sizes | {"init_method_std": 0.3} | changes)


def make_model(beam_width: int = 5, *, embedding_device=None, **changes) -> SIDGRModel:
    torch.manual_seed(0)
    trie = SIDTrie(SID_MAP.codes, SIZES)
    model = SIDGRModel(make_config(**changes), trie=trie, beam_width=beam_width, embedding_device=embedding_device)
    if embedding_device is None:
        with torch.no_grad():  # larger than TorchRec's, so that embeddings matter
            for weight in model.embedding.parameters():
                weight.copy_(torch.sin(torch.arange(weight.numel(), dtype=torch.float64)).view_as(weight))
    return model


def make_batch(seed: int, batch_size: int = 6, num_real: int | None = None, **options) -> GPTSIDBatch:
    """Heavy-tailed histories, empty ones among them; up to three candidates, none now and then."""
    return GPTSIDBatch.random(
        batch_size,
        SIZES,
        MAX_HISTORY,
        MAX_CANDIDATES,
        HISTORY,
        CANDIDATE,
        num_real,
        **{
            "history_dist": RandomDistribution("zipf", low=0, high=MAX_HISTORY, alpha=1.3),
            "candidate_dist": RandomDistribution("uniform", low=0, high=MAX_CANDIDATES),
            **options,
        },
        sids=torch.from_numpy(SID_MAP.codes),
        device=CPU,
        generator=torch.Generator().manual_seed(seed),
    )


def heavy_tailed_batches(num_batches: int) -> RandomSIDDataset:
    """This rank's; the last batch is incomplete, by another number of rows on every data-parallel rank."""
    group = resolve_process_group()
    rank = dist.get_rank(group)
    return RandomSIDDataset(
        SID_MAP,
        batch_size=6,
        num_batches=num_batches,
        max_history_length=MAX_HISTORY,
        max_candidate_length=MAX_CANDIDATES,
        history_dist=RandomDistribution("zipf", low=1, high=MAX_HISTORY, alpha=1.2),
        last_batch_size=1 + rank % 4,
        seed=5,
        rank=rank,
        world_size=dist.get_world_size(group),
    )


def build_sharded(sharding: str, device: torch.device = CPU, **changes) -> DistributedModelParallel:
    """The model with tables on all ranks, which SGD trains."""
    options = {"embedding_optimizer": "sgd", "sharding": sharding}
    learning_rate = changes.pop("embedding_lr", 0.5)
    return build_distributed_model(make_model(**changes), device=device, embedding_lr=learning_rate, **options)


def make_pipeline(
    name: str, model: DistributedModelParallel, balances: bool, device: torch.device = CPU
) -> tuple[Any, BaseTaskBalancedBatchShuffler]:
    """A pipeline that trains the model, and its shuffler."""
    shuffler: BaseTaskBalancedBatchShuffler = IdentityBalancedBatchShuffler()
    if balances:
        shuffler = SIDGRBalancedBatchShuffler(16, 4, 3, 2, ffn_hidden_size=24)
    optimizer = torch.optim.SGD(dense_parameters(model).values(), lr=0.2)
    pipeline = TrainPipelineFactory.create(
        name, model=model, optimizer=optimizer, device=device, batch_shuffler=shuffler
    )
    return pipeline, shuffler


def codes_of_rows(batch: GPTSIDBatch, key: str) -> list[torch.Tensor]:
    """Codes of every real row, int64 `(num_items, num_hierarchies)`."""
    rows = batch.features[key].to_dense()[: batch.actual_batch_size]
    return [row.view(-1, len(SIZES)) - torch.tensor(codebook_offsets(SIZES)) for row in rows]


def metric_of_user(name: str, ranking: list[int], true: set[int]) -> float:
    """A metric of generated items by its definition: of one user's ranking, best first, and true items."""
    kind, top_k = name.split("@")
    hits = [item in true for item in ranking[: int(top_k)]]
    if kind in ("HR", "HitRate"):
        return float(any(hits))
    if kind == "Recall":
        return sum(hits) / len(true)
    best = [True] * min(int(top_k), len(true))
    gain, ideal = (sum(hit / math.log2(place + 2) for place, hit in enumerate(row)) for row in (hits, best))
    return gain / ideal


class PlainDecoder:
    """The decoder by its definition: one row at a time, in float64, from the weights of a SIDDecoder and its table."""

    def __init__(self, decoder: SIDDecoder, table: torch.Tensor) -> None:
        self.config = decoder.config
        self.weights = {name: value.detach().double().requires_grad_() for name, value in decoder.named_parameters()}
        self.table = table.detach().double().requires_grad_()

    def hidden(self, codes: torch.Tensor) -> torch.Tensor:
        """Hidden states `(1 + num_codes, hidden_size)` behind BOS and codes, given one after the other."""
        hierarchies = self.config.num_hierarchies
        place = torch.arange(len(codes))
        ids = codes + torch.tensor(codebook_offsets(self.config.codebook_sizes))[place % hierarchies]
        x = torch.cat([self.weights["bos"], self.table[ids]])
        x = x + self.weights["positions"][torch.cat([torch.zeros(1, dtype=torch.int64), place // hierarchies + 1])]
        for layer in range(self.config.num_layers):
            prefix = f"layers.layers.{layer}."
            x = x + self._attend(self._norm(x, prefix + "input_layernorm"), prefix + "self_attention.")
            y = self._linear(self._norm(x, prefix + "pre_mlp_layernorm"), prefix + "mlp.linear_fc1")
            x = x + self._linear(functional.gelu(y), prefix + "mlp.linear_fc2")
        return self._norm(x, "layers.final_layernorm")

    def logits(self, hidden: torch.Tensor, hierarchy: int) -> torch.Tensor:
        head = self.weights[f"heads.{hierarchy if self.config.heads == 'separate' else 0}"]
        return hidden @ head[: self.config.codebook_sizes[hierarchy]].T

    def log_probs(self, history: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        """Log-probability of every code of `future`, each given all before it; both `(num_items, num_hierarchies)`."""
        codes = torch.cat([history.flatten(), future.flatten()])
        hidden = self.hidden(codes[:-1])
        first = history.numel()
        return torch.stack(
            [
                self.logits(hidden[place], place % self.config.num_hierarchies).log_softmax(0)[code]
                for place, code in enumerate(codes.tolist())
                if place >= first
            ]
        )

    def loss_sum(self, batch: GPTSIDBatch) -> torch.Tensor:
        rows = zip(codes_of_rows(batch, HISTORY), codes_of_rows(batch, CANDIDATE))
        terms = [-self.log_probs(history, future).sum() for history, future in rows if len(future)]
        return torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64)

    def ranking(self, history: torch.Tensor, sids: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """All items by falling probability, and the log-probability of each."""
        with torch.no_grad():
            scores = torch.stack([self.log_probs(history, sid[None]).sum() for sid in sids])
        return scores.argsort(descending=True, stable=True).tolist(), scores

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        centred = x - x.mean(1, keepdim=True)
        variance = (centred**2).mean(1, keepdim=True)
        return centred / (variance + self.config.layer_norm_eps).sqrt() * weight + bias

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _attend(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        heads, width = self.config.num_attention_heads, self.config.head_dim
        # Head after head: its query, its key, its value.
        q, k, v = self._linear(x, prefix + "linear_qkv").view(-1, heads, 3, width).unbind(2)
        scores = torch.einsum("qhd,khd->hqk", q, k) / width**0.5
        ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(ahead, -torch.inf).softmax(2)
        return self._linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), prefix + "linear_proj")
