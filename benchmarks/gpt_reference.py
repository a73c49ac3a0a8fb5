"""A plain GPT decoder over jagged rows, as the cost model's second subject: nothing in it is tuned.

Linear layers see all tokens of a batch at once; attention runs row by row through torch's fused causal kernel, so that
a row costs its own pairs and no padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from commons.perf_model.measurement import RowTokens
from commons.perf_model.task_estimator import SelfAttentionTask


class _Block(nn.Module):
    def __init__(self, task: SelfAttentionTask) -> None:
        super().__init__()
        hidden, self.heads, self.dim = task.hidden_size, task.num_heads, task.head_dim
        width, ffn = self.heads * self.dim, task.ffn_hidden_size or 4 * hidden
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])
        self.qkv, self.out = nn.Linear(hidden, 3 * width), nn.Linear(width, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        qkv = self.qkv(self.norms[0](x)).view(-1, 3, self.heads, self.dim)
        rows = []
        for row in qkv.split(lengths):
            q, k, v = row.permute(1, 2, 0, 3).unsqueeze(1)  # each (1, heads, length, dim)
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            rows.append(attended[0].transpose(0, 1).flatten(1))
        x = x + self.out(torch.cat(rows))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class GPTCostTarget:
    """The decoder with a vocabulary head, as a `commons.perf_model.measurement.CostTarget`."""

    def __init__(self, task: SelfAttentionTask, batch_size: int, max_length: int, device: torch.device) -> None:
        self.task, self.batch_size, self.max_length, self.device = task, batch_size, max_length, device
        torch.manual_seed(0)
        self.vocab_size = task.vocab_size or 1
        self._embedding = nn.Embedding(self.vocab_size, task.hidden_size, sparse=True)
        self._blocks = nn.ModuleList(_Block(task) for _ in range(task.num_layers))
        self._head = nn.Linear(task.hidden_size, self.vocab_size)
        self._model = nn.ModuleList([self._embedding, self._blocks, self._head]).to(device)

    def make_batch(self, lengths: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        tokens = torch.randint(self.vocab_size, (sum(lengths),))
        return tokens.to(self.device), list(lengths)

    def train_step(self, batch: tuple[torch.Tensor, list[int]]) -> None:
        tokens, lengths = batch
        x = self._embedding(tokens)
        for block in self._blocks:
            x = block(x, lengths)
        functional.cross_entropy(self._head(x), tokens, reduction="sum").backward()
        self._model.zero_grad(set_to_none=True)

    def row_tokens(self, batch: tuple[torch.Tensor, list[int]]) -> RowTokens:
        return RowTokens(torch.tensor(batch[1]))

    def host_batches(self) -> Iterator[Any]:
        return iter(())
