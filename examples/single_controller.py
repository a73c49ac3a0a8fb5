"""Reinforcement learning with a single controller: rank 0 generates rollouts, every rank trains on an even share.

A step, as in AReaL's `single_rank_load`:

1. Only rank 0 has the rollouts: token ids padded to the longest rollout, their mask and a reward per row.
2. `scatter_balanced` sends every rank a share of equal FLOPs, padded only to the share's own longest row.
3. All ranks compute log-probabilities; `gather_back` sends these to rank 0, in the order of the rollouts.
4. Rank 0 computes advantages from rewards and log-probabilities; `scatter_more` sends them to the same shares.
5. Every rank trains on its share; the loss is the mean over the tokens of all shares.

Examples:
    torchrun --nproc-per-node 2 examples/single_controller.py
    torchrun --nproc-per-node 4 examples/single_controller.py --rows 128 --steps 5
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from commons.checks import require_at_least
from commons.console import print_summary
from commons.trainer.config.load import load_config
from commons.trainer.ranks.errors import run_main
from commons.trainer.ranks.launch import initialize_ranks
from evenrank import SelfAttentionTask, Trim, global_mean_loss, scatter_balanced

VOCABULARY, HIDDEN, HEADS = 500, 64, 4
# The columns after the last column that the mask uses are padding, and are cut off.
TRIM = Trim("attention_mask", fields=["input_ids"])


@dataclass
class Config:
    """The settings of the example."""

    rows: int = 64  # rollouts per step, over all ranks
    longest: int = 512  # most tokens of a rollout
    steps: int = 3  # steps to train
    seed: int = 0  # seed of rollouts and weights

    def __post_init__(self) -> None:
        for name in ("rows", "longest", "steps"):
            require_at_least(name, getattr(self, name), 1)


class Policy(nn.Module):
    """A one-layer causal language model: from tokens `(rows, width)` to the log-probability of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probabilities float32 `(rows, width)`; 0 for the first token, which is not predicted."""
        hidden = self.embedding(tokens)
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = hidden + self.attention(hidden, hidden, hidden, attn_mask=causal, is_causal=True)[0]
        scores = self.head(hidden[:, :-1]).log_softmax(-1)
        return functional.pad(scores.gather(-1, tokens[:, 1:, None])[..., 0], (1, 0))


def generate(config: Config, step: int) -> dict[str, Any]:
    """Rollouts of heavy-tailed lengths, padded on the right, in place of an inference engine's."""
    generator = torch.Generator().manual_seed(config.seed * 1000 + step)
    lengths = torch.exp(torch.randn(config.rows, generator=generator) * 1.1 + 4).long().clamp(4, config.longest)
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    tokens = torch.randint(VOCABULARY, mask.shape, generator=generator) * mask
    reward = torch.rand(config.rows, generator=generator)
    return {"input_ids": tokens, "attention_mask": mask, "reward": reward, "engine": f"step {step}"}


def advantages_of(rollouts: dict[str, Any], logprobs: torch.Tensor) -> torch.Tensor:
    """float32 `(rows,)`: rewards minus a penalty for unlikely tokens, centred over the rollouts."""
    tokens = rollouts["attention_mask"].sum(1)
    score = rollouts["reward"] + 0.01 * logprobs.sum(1) / tokens
    return score - score.mean()


def main() -> None:
    """Train as one rank."""
    config = load_config(Config, sys.argv[1:], prog="single_controller.py", description=__doc__)
    initialize_ranks(device_type="cpu")
    is_controller = dist.get_rank() == 0
    torch.manual_seed(config.seed)
    policy = DistributedDataParallel(Policy())
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    task = SelfAttentionTask(HIDDEN, HEADS, HIDDEN // HEADS, vocab_size=VOCABULARY)

    for step in range(config.steps):
        rollouts, workloads = {}, None
        if is_controller:
            rollouts = generate(config, step)
            workloads = task.get_workloads(rollouts["attention_mask"].sum(1))
        share = scatter_balanced(rollouts or None, workloads, trim=TRIM)

        mask = share.batch["attention_mask"].float()
        mask[:, 0] = 0  # the first token is not predicted
        with torch.no_grad():
            old = policy(share.batch["input_ids"]) * mask
        # The share may be narrower than the rollouts, so results per token are padded to the full width first.
        logprobs = share.gather_back(share.untrim(old))
        advantages = share.scatter_more(None if logprobs is None else advantages_of(rollouts, logprobs))

        ratio = torch.exp(policy(share.batch["input_ids"]) * mask - old)
        loss = global_mean_loss(-(ratio * advantages.unsqueeze(1) * mask).sum(), int(mask.sum()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        received = torch.tensor(share.bytes_received)
        dist.reduce(received, 0, op=dist.ReduceOp.MAX)
        if logprobs is not None:
            whole = sum(field.nbytes for field in rollouts.values() if isinstance(field, torch.Tensor))
            print_summary(
                f"step {step + 1} of {config.steps}",
                {
                    "work": f"largest rank {1 + share.imbalance:.3f} × the mean",
                    "received": f"at most {int(received) / 1e3:.0f} kB by a rank, of {whole / 1e3:.0f} kB",
                    "mean log-probability": f"{float(logprobs.sum() / rollouts['attention_mask'].sum()):.3f}",
                },
            )


if __name__ == "__main__":
    run_main(main)
