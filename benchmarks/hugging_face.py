"""Rows dealt to ranks and micro-batches: Hugging Face's strategies beside `balanced(trainer)`, on the same lengths.

    python -m benchmarks.hugging_face            # a minute of plans, and ten of training on two ranks
    python -m benchmarks.hugging_face --quick    # few rows and steps: shows that it runs

Needs `pip install "transformers>=5.23" accelerate`. Costs are those of transformers' own BatchRebalanceSampler, which
ours is given too: rows × (longest + 0.001 · longest²). Two ranks train a tiny Llama by the Trainer with each strategy
in turn.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.lengths import described, draw
from benchmarks.shared.report import Page, interleaved_seconds, run_ranks
from commons.datasets import BalancedBatchSampler
from commons.perf_model.partitioner import padded_groups

BATCH, ACCUMULATED, TRAINED_STEPS = 8, 4, 8
STRATEGIES = ("group_by_length", "batch_rebalance", "balanced", "balanced, window 4")


def cost_of(lengths: np.ndarray) -> np.ndarray:
    """int64 `(n,)`: 1,000 times what BatchRebalanceSampler takes a row of a micro-batch to cost."""
    return 1000 * lengths + lengths * lengths


def read_by_rank(strategy: str, lengths: np.ndarray, ranks: int, rank: int | None) -> list[list[int]]:
    """An epoch's batches of one rank, or of all ranks in turn, as the strategy's own code makes them."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

    if strategy == "group_by_length":  # then Accelerate deals every W-th batch to each of W ranks
        generator = torch.Generator().manual_seed(1)
        order = list(LengthGroupedSampler(BATCH * ACCUMULATED, lengths=lengths.tolist(), generator=generator))
        return [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
    if strategy == "batch_rebalance":
        own = range(ranks) if rank is None else [rank]
        per_step = ranks * BATCH * ACCUMULATED
        samplers = [BatchRebalanceSampler(lengths.tolist(), per_step, ranks, ACCUMULATED, rank=each) for each in own]
        return [batch for batches in zip(*samplers) for batch in batches]
    window = ACCUMULATED * (4 if "window" in strategy else 1)
    options = {"num_ranks": ranks, "rank": rank, "window": window, "seed": 1, "padded": True, "drop_last": True}
    return list(BalancedBatchSampler(cost_of(lengths), BATCH, **options))


def measure(strategy: str, lengths: np.ndarray, ranks: int) -> dict[str, Any]:
    """Plan an epoch; the page says what each column means."""
    costs, batches = cost_of(lengths), read_by_rank(strategy, lengths, ranks, None)
    of_step = ranks * ACCUMULATED
    peaks, slowest, ours, means = [], 0, 0, 0.0
    steps = [batches[at : at + of_step] for at in range(0, len(batches) - of_step + 1, of_step)]
    for step in steps:
        work = np.array([len(rows) * int(costs[rows].max()) for rows in step]).reshape(ACCUMULATED, ranks)
        sorted_costs = np.sort(costs[np.concatenate(step)])[::-1]
        groups = padded_groups(sorted_costs, num_groups=of_step, steps=ACCUMULATED)
        starts = np.searchsorted(groups, np.arange(of_step))
        best = (np.bincount(groups) * sorted_costs[starts]).reshape(ACCUMULATED, ranks)
        peaks.append(int(work.max()) / int(best.max()))
        slowest += int(work.max(axis=1).sum())
        ours += int(best.max(axis=1).sum())
        means += float(work.mean(axis=1).sum())
    planning = min(interleaved_seconds({0: partial(read_by_rank, strategy, lengths, ranks, 0)}, 9, show=False)[0])
    return {
        "strategy": strategy,
        "peak ÷ optimum": statistics.fmean(peaks),
        "max ÷ mean": slowest / means,
        "padded work of the slowest ÷ ours": slowest / ours,
        "planning, ms per step": planning / len(steps) * 1e3,
    }


def training(rounds: int) -> list[dict[str, Any]]:
    """Steps of a tiny Llama on two ranks, by the Trainer itself."""
    found = run_ranks(train, 2, rounds, timeout=3600)[0]
    rows = []
    for name, seconds in found.items():
        ratios = np.sort(np.divide(seconds, found["balanced"]))
        ratio = f"{np.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        rows.append({"strategy": name, "ms per step": statistics.median(seconds) * 1e3, "÷ ours": ratio})
    return rows


def train(rank: int, rounds: int) -> dict[str, list[float]]:
    """Be one rank of two: seconds of a step by strategy and round; the first round is not counted."""
    ranks = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= ranks  # where Accelerate looks for them
    with tempfile.TemporaryDirectory() as folder:
        found = [{name: _seconds(folder, name) for name in STRATEGIES[:3]} for _ in range(rounds + 1)][1:]
    return {name: [of_round[name] for of_round in found] for name in STRATEGIES[:3]}


class _Rows(torch.utils.data.Dataset):
    """Rows of ones, each with its length."""

    column_names = ("input_ids", "length")

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, at: int | str) -> Any:
        return self._lengths if at == "length" else {"input_ids": [1] * self._lengths[at]}


def _pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    tokens = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    return {"input_ids": tokens, "attention_mask": tokens, "labels": tokens.masked_fill(tokens == 0, -100)}


def _seconds(folder: str, strategy: str) -> float:
    """Of a step, on this rank."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from commons.integrations.transformers import balanced

    clock: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.append(time.perf_counter())

        on_train_end = on_train_begin

    lengths = draw("texts", 2 * BATCH * ACCUMULATED * TRAINED_STEPS, 0).clip(max=1024).tolist()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATED,
        train_sampling_strategy="random" if strategy == "balanced" else strategy,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)),
        args=arguments,
        train_dataset=_Rows(lengths),
        data_collator=_pad,
        callbacks=[Clock()],
    )
    if strategy == "balanced":
        balanced(trainer, lengths=lengths, cost=cost_of)
    trainer.train()
    began, ended = clock
    return (ended - began) / TRAINED_STEPS


def main(ranks: int = 8, rounds: int = 5, quick: Quick = False) -> None:
    """Plan, train, print, and write benchmarks/results/hugging_face.md.

    Args:
        ranks: that are planned for; two are trained.
        rounds: of training.
    """
    page = Page(
        "Hugging Face's Trainer",
        f"Padded micro-batches: {ranks} ranks × {ACCUMULATED} accumulated micro-batches of {BATCH} rows on average, "
        "an epoch of 40 steps. Costs as transformers' BatchRebalanceSampler counts them, for all of them. "
        f"{described(('texts', 'cut texts'))}",
    )
    for name in ("texts", "cut texts"):
        lengths = draw(name, ranks * BATCH * ACCUMULATED * (8 if quick else 40), 0)
        page.section("", f"{name}, {ranks} ranks:", [measure(strategy, lengths, ranks) for strategy in STRATEGIES])
    page.section("", "Trained, two CPU ranks, texts to 1,024:", training(1 if quick else rounds), _READING)
    page.finish(quick=quick)


_READING = (
    "*Peak ÷ optimum*: the costliest micro-batch of a step beside the best that its rows allow, in groups that follow "
    "one another in the order of their lengths. *Max ÷ mean*: ranks wait for each other in every micro-batch. *Padded "
    "work of the slowest*: summed over an epoch, beside `balanced(trainer)`. *Planning*: CPU time of one rank for its "
    "own batches, the least of nine epochs. `group_by_length` sorts rows and looks at no costs; a plan of all ranks' "
    "rows takes more than one sort, and where the loader has a worker process it is hidden behind a step. Training: a "
    "Llama of two layers of width 64, an epoch of eight steps, five rounds, interleaved, after one that is not counted."
)


if __name__ == "__main__":
    from_command_line(main, __doc__)
