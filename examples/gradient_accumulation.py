"""Gradient accumulation over packed micro-batches, compared with the whole padded batch at once.

A batch from Hugging Face's tokenizers and collators (input_ids, attention_mask, position_ids, labels, padded to the
longest row) is cut into micro-batches under a token budget. The rows of a micro-batch are concatenated into one row
without padding, with new position ids and a block-diagonal attention mask. The accumulated gradient equals that of the
whole batch, to rounding; the backward pass needs only the activations of one micro-batch.

With --joint one plan covers all ranks, for ranks that synchronise at every micro-batch (FSDP, expert parallelism): rows
change rank so that the FLOPs of every micro-batch are even over the ranks, and tokens stay under the budget.

Examples:
    python examples/gradient_accumulation.py
    python examples/gradient_accumulation.py --rows 128 --micro-batches.max-tokens-per-mb 1024
    torchrun --nproc-per-node 2 examples/gradient_accumulation.py
    torchrun --nproc-per-node 2 examples/gradient_accumulation.py --joint
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from commons.checks import require_at_least
from commons.console import print_summary
from commons.trainer.config.load import load_config
from commons.trainer.ranks.errors import run_main
from evenrank import (
    MicroBatches,
    MicroBatchSpec,
    SelfAttentionTask,
    Trim,
    count_loss_tokens,
    global_mean_loss,
    pack_micro_batches,
    pack_rows,
)

VOCABULARY, IGNORED = 1000, -100


@dataclass
class Config:
    """The settings of the example."""

    rows: int = 48  # rows of a rank's batch
    longest: int = 512  # most tokens of a row
    seed: int = 0  # seed of data and weights
    joint: bool = False  # one plan for the micro-batches of all ranks
    # How the batch is cut.
    micro_batches: MicroBatchSpec = field(
        default_factory=lambda: MicroBatchSpec(max_tokens_per_mb=1024, packing_algorithm="refined")
    )

    def __post_init__(self) -> None:
        for name in ("rows", "longest"):
            require_at_least(name, getattr(self, name), 1)


class Layer(nn.Module):
    """Attention under a mask, and a feed-forward block."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.ffn = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, stream: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
        """From `(rows, width, hidden)` to the same shape; `sees`, bool `(rows, 1, width, width)`, is the mask."""
        qkv = self.qkv(self.norms[0](stream)).unflatten(-1, (3, self.heads, -1))  # (rows, width, 3, heads, head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=sees)
        stream = stream + self.out(attended.transpose(1, 2).flatten(2))
        return stream + self.ffn(self.norms[1](stream))


class CausalLM(nn.Module):
    """A small language model with the arguments of Hugging Face's models; the attention mask is four-dimensional."""

    def __init__(self, longest: int, hidden: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Embedding(longest, hidden)
        self.layers = nn.ModuleList([Layer(hidden, heads) for _ in range(layers)])
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """The sum of the losses of all tokens that have a label; every token predicts the next one."""
        stream = self.tokens(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            stream = layer(stream, attention_mask)
        logits, targets = self.head(stream)[:, :-1], labels[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def draw_batch(rows: int, longest: int, seed: int) -> dict[str, torch.Tensor]:
    """Random token ids of heavy-tailed lengths, padded on the right; the first quarter of a row is its prompt."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (48 * torch.randn(rows, generator=generator).mul(0.8).exp()).long().clamp(4, longest)
    width = int(lengths.max())
    place = torch.arange(width).expand(rows, width)
    tokens = place < lengths.unsqueeze(1)
    input_ids = torch.randint(1, VOCABULARY, (rows, width), generator=generator) * tokens
    answer = tokens & (place >= lengths.unsqueeze(1) // 4)
    return {
        "input_ids": input_ids,
        "attention_mask": tokens.long(),
        "position_ids": place * tokens,
        "labels": torch.where(answer, input_ids, IGNORED),
    }


@contextmanager
def kept_for_backward(model: nn.Module) -> Iterator[dict[int, int]]:
    """Collect the storages, except weights, that autograd saves in a forward pass, with their bytes."""
    kept: dict[int, int] = {}
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def gradients(model: nn.Module) -> torch.Tensor:
    """All gradients as one vector, averaged over the ranks as in DistributedDataParallel; then clears the gradients."""
    flat = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    model.zero_grad()
    if dist.is_initialized():
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
    return flat


def whole_batch(model: CausalLM, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Gradient of the mean loss over the batches of all ranks, in one pass, and the bytes saved for backward."""
    width = batch["input_ids"].shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    sees = causal & batch["attention_mask"].bool()[:, None, None, :]
    with kept_for_backward(model) as kept:
        loss = model(**{**batch, "attention_mask": sees})
        num_bytes = sum(kept.values())
    global_mean_loss(loss, int(count_loss_tokens(batch["labels"]).sum())).backward()
    return gradients(model), num_bytes


def cut(batch: dict[str, torch.Tensor], spec: MicroBatchSpec, joint: bool) -> MicroBatches[dict[str, torch.Tensor]]:
    """The micro-batches of this rank: of its own rows or, with `joint`, of the rows of all ranks."""
    lengths, terms = batch["attention_mask"].sum(1), count_loss_tokens(batch["labels"])
    if not joint:
        return pack_micro_batches(batch, spec, lengths, loss_tokens=terms)
    work = SelfAttentionTask(hidden_size=64, num_heads=4, head_dim=16, num_layers=2).get_workloads(lengths)
    trim = Trim("attention_mask", fill={"labels": IGNORED})  # each rank pads to its own longest row
    return pack_micro_batches(batch, spec, lengths, workloads=work, loss_tokens=terms, joint=True, trim=trim)


def accumulated(
    model: CausalLM, batch: dict[str, torch.Tensor], spec: MicroBatchSpec, joint: bool = False
) -> tuple[torch.Tensor, int, dict[str, Any]]:
    """The same gradient from packed micro-batches, the most bytes saved for one of these, and the packing's metrics."""
    micro_batches = cut(batch, spec, joint)
    most_bytes = 0
    for micro_batch in micro_batches:
        packed = pack_rows(micro_batch, mask="causal")
        with kept_for_backward(model) as kept:
            loss = model(**packed.inputs)
            most_bytes = max(most_bytes, sum(kept.values()))
        # The loss is a sum: without labels in a micro-batch it is 0, where a mean would be 0 ÷ 0.
        (micro_batches.loss_scale * loss).backward()
    return gradients(model), most_bytes, micro_batches.metrics


def main() -> None:
    """Compare the two gradients, and print what packing saves."""
    config = load_config(Config, sys.argv[1:], description=__doc__)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(config.seed)
    model = CausalLM(config.longest).double()
    # Ranks have different rows, and different numbers of rows.
    batch = draw_batch(config.rows + rank, config.longest, config.seed + rank)

    expected, whole_bytes = whole_batch(model, batch)
    reached, most_bytes, metrics = accumulated(model, batch, config.micro_batches, config.joint)
    difference, largest = float((reached - expected).abs().max()), float(expected.abs().max())
    if rank == 0:
        num_tokens, num_padded = int(batch["attention_mask"].sum()), batch["attention_mask"].numel()
        rows = {
            "rows": f"{len(batch['input_ids'])}, up to {batch['input_ids'].shape[1]} tokens",
            "tokens of the padded batch": f"{num_padded}, of which {1 - num_tokens / num_padded:.0%} padding",
            "tokens of the packed micro-batches": f"{sum(metrics['group_sums'])}, none of them padding",
            "micro-batches": f"{metrics['n_groups']} of {metrics['min_load']} to {metrics['max_load']} tokens",
            "packing": f"{metrics['seconds'] * 1e3:.2f} ms, {metrics['utilization']:.1%} of the budget used",
            "kept for backward": f"{whole_bytes / 2**20:.1f} MiB at once, {most_bytes / 2**20:.1f} MiB per micro-batch",
            "largest gradient": f"{largest:.6f}",
            "largest difference of gradients": f"{difference:.1e}",
        }
        if config.joint:
            evenness = ", ".join(f"{ratio:.3f}" for ratio in metrics["rank_load_ratios"])
            rows["costliest rank ÷ mean, at each"] = evenness
        print_summary("Whole batch and packed micro-batches, float64", rows)
    if difference > 1e-12:
        raise RuntimeError(f"the gradients differ by {difference}; they should be equal to rounding")


if __name__ == "__main__":
    run_main(main)
