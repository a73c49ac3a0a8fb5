"""One of two ranks that train a tiny Llama by Hugging Face's Trainer, with each strategy in turn; see hugging_face.py.

python -m torch.distributed.run --nproc_per_node=2 -m benchmarks.hugging_face_trainer --folder FOLDER
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.command_line import from_command_line
from benchmarks.hugging_face import ACCUMULATED, BATCH, cost_of, draw
from commons.integrations.transformers import balanced

STEPS = 8


class _Clock(TrainerCallback):
    """Seconds of an epoch."""

    seconds = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.seconds -= time.perf_counter()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds += time.perf_counter()


def _pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for at, row in enumerate(rows):
        tokens[at, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[at, : len(row["input_ids"])] = 1
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


class _Rows(torch.utils.data.Dataset):
    """Rows of ones, each with its length."""

    column_names = ("input_ids", "length")

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, at: int | str) -> Any:
        return self._lengths if at == "length" else {"input_ids": [1] * self._lengths[at]}


def _seconds(folder: Path, strategy: str) -> float:
    lengths = draw("lognormal", 2 * BATCH * ACCUMULATED * STEPS, 0).clip(max=1024).tolist()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    clock = _Clock()
    arguments = TrainingArguments(
        output_dir=str(folder),
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
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=_Rows(lengths),
        data_collator=_pad,
        callbacks=[clock],
    )
    if strategy == "balanced":
        balanced(trainer, lengths=lengths, cost=cost_of)
    trainer.train()
    return clock.seconds / STEPS


def main(folder: Path, rounds: int = 5) -> None:
    """Train, and leave the seconds of a step by round and strategy.

    Args:
        folder: where seconds.json is written.
        rounds: that are measured, behind one that is not.
    """
    torch.set_num_threads(1)
    names = ("group_by_length", "batch_rebalance", "balanced")
    found = [{name: _seconds(folder, name) for name in names} for _ in range(rounds + 1)][1:]
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        (folder / "seconds.json").write_text(json.dumps(found))


if __name__ == "__main__":
    from_command_line(main, __doc__)
