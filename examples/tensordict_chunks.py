"""Split a TensorDict into chunks of even work, compute each chunk, and restore the order of the predictions.

A trainer like verl's has one global batch and sends a chunk of it to every data-parallel worker. Chunks cut in order
have uneven work because response lengths differ, and all workers wait for the slowest. Here rows are divided by the
FLOPs that a Llama-7B needs for them. The four responses to one prompt stay together.

Examples:
    python examples/tensordict_chunks.py
    python examples/tensordict_chunks.py --prompts 256 --chunks 16
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import nn

from commons.checks import require_at_least
from commons.console import print_summary
from commons.trainer.config.load import load_config
from commons.trainer.ranks.errors import run_main
from evenrank import SelfAttentionTask, split_balanced

VOCABULARY = 1000
LLAMA_7B = SelfAttentionTask(4096, 32, 128, 32, ffn_hidden_size=11008, gated_ffn=True, vocab_size=32000)


@dataclass
class Config:
    """The settings of the example."""

    prompts: int = 64  # prompts of the batch
    responses: int = 4  # responses to each prompt
    chunks: int = 8  # number of chunks, such as one per data-parallel worker
    longest: int = 4096  # most tokens of a row
    seed: int = 0  # seed of data and weights

    def __post_init__(self) -> None:
        for name in ("prompts", "responses", "chunks", "longest"):
            require_at_least(name, getattr(self, name), 1)


def make_rollouts(config: Config) -> TensorDict:
    """Responses of heavy-tailed lengths: for every row its tokens (ragged), and the number and text of its prompt."""
    generator = torch.Generator().manual_seed(config.seed)
    rows = config.prompts * config.responses
    draws = torch.exp(torch.randn(rows, generator=generator) * 1.2 + 5)
    lengths = draws.to(torch.int64).clamp(8, config.longest)
    tokens = [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths.tolist()]
    prompt = torch.arange(rows) // config.responses
    batch = TensorDict(
        {"input_ids": torch.nested.nested_tensor(tokens, layout=torch.jagged), "prompt": prompt}, batch_size=[rows]
    )
    batch.set("text", NonTensorStack(*(NonTensorData(f"prompt {number}") for number in prompt.tolist())))
    return batch


class Scorer(nn.Module):
    """Computes a reward per row, with a small network over the mean embedding of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(VOCABULARY, 32, mode="mean")
        self.head = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, chunk: TensorDict) -> torch.Tensor:
        """Rewards `(rows,)`."""
        tokens = chunk["input_ids"]
        return self.head(self.embedding(tokens.values(), tokens.offsets()[:-1]))[:, 0]


def main() -> None:
    """Split, compute and restore, and print how even the chunks were."""
    config = load_config(Config, sys.argv[1:], prog="tensordict_chunks.py", description=__doc__)
    torch.manual_seed(config.seed)
    batch, scorer = make_rollouts(config), Scorer()
    workloads = LLAMA_7B.get_workloads(batch["input_ids"].offsets().diff())

    chunks = split_balanced(batch, config.chunks, workloads, groups=batch["prompt"])
    with torch.no_grad():
        # Predictions may be any batch with a row per row, here a dictionary of two tensors.
        predictions = [{"reward": scorer(chunk), "tokens": chunk["input_ids"]} for chunk in chunks]
        restored = chunks.restore(predictions)
        largest_difference = float((restored["reward"] - scorer(batch)).abs().max())

    in_order = torch.stack([part.sum() for part in workloads.chunk(config.chunks)])
    rows = [len(indices) for indices in chunks.indices]
    print_summary(
        f"{len(workloads)} rows in {config.chunks} chunks",
        {
            "work cut in order": f"largest chunk {float(in_order.max() / in_order.double().mean()):.3f} × the mean",
            "chunks of even work": f"largest chunk {1 + chunks.imbalance:.3f} × the mean",
            "rows per chunk": f"{min(rows)} to {max(rows)}, whole prompts of {config.responses}",
            "predictions restored": f"largest difference to the whole batch {largest_difference:.1e}",
        },
    )


if __name__ == "__main__":
    run_main(main)
