"""One of several ranks of Hugging Face's Trainer with balanced rows; writes down what it trained.

Started by torchrun: `python -m torch.distributed.run … -m tests.extras.balanced_trainer FOLDER`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from evenrank.integrations.transformers import balanced
from tests.helpers.ranks.faults import error_of

RANKS, NUM_ROWS, EPOCHS, ACCUMULATED, BATCH, RATE = 2, 90, 2, 2, 3, 0.05
PAD = 0


def make_model() -> LlamaForCausalLM:
    """A tiny model, the same on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=PAD,
            attn_implementation="eager",
        )
    )


def make_rows(num_rows: int = NUM_ROWS) -> list[dict[str, list[int]]]:
    """Rows of heavy-tailed lengths; the first token is the row's number + 1, some labels are left out."""
    drawn = np.random.default_rng(0)
    rows = []
    for row in range(num_rows):
        length = int(np.clip(drawn.lognormal(2, 1), 2, 60))
        tokens = [row + 1, *drawn.integers(1, 256, length - 1).tolist()]
        rows.append({"input_ids": tokens, "labels": [-100, *tokens[1:]]})
    return rows


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A padding collator."""
    longest = max(len(row["input_ids"]) for row in rows)
    padded = {
        "input_ids": [row["input_ids"] + [PAD] * (longest - len(row["input_ids"])) for row in rows],
        "labels": [row["labels"] + [-100] * (longest - len(row["labels"])) for row in rows],
        "attention_mask": [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows],
    }
    return {name: torch.tensor(values) for name, values in padded.items()}


def recording(trainer: type[Trainer]) -> type[Trainer]:
    """Notes the rows of every micro-batch."""

    class Recorder(trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            tokens = inputs["input_ids"]
            starts = tokens[:, 0] if "attention_mask" in inputs else tokens[0, inputs["position_ids"][0] == 0]
            self.seen.append((starts - 1).tolist())
            return super().training_step(model, inputs, *args, **kwargs)

    return Recorder


Recorder = recording(Trainer)


def make_trainer(
    folder: Path, kind: type[Trainer] = Trainer, model: torch.nn.Module | None = None, **arguments
) -> Trainer:
    """A trainer of one process, with these arguments of its settings."""
    settings = TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **arguments)
    return kind(model=model or make_model(), args=settings, train_dataset=make_rows(), data_collator=pad)


def train(folder: Path, name: str, **changes) -> dict:
    """Train, and say what was trained."""
    options = {
        "data_collator": pad,
        "train_dataset": make_rows(),
        "balance": {},
        "resume": None,
        "args": {},
        "hides": "",
    } | changes
    arguments = TrainingArguments(
        output_dir=str(folder / name),
        num_train_epochs=EPOCHS,
        gradient_accumulation_steps=ACCUMULATED,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=11,
        **{"per_device_train_batch_size": BATCH, **options["args"]},
    )
    model, rows, collator = make_model(), options["train_dataset"], options["data_collator"]
    if name == "documented":
        Trainer = Recorder
        trainer = balanced(Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator))
    else:
        trainer = Recorder(model=model, args=arguments, train_dataset=rows, data_collator=collator)
        if options["hides"]:
            delattr(trainer, options["hides"])
        balanced(trainer, **options["balance"])
    trainer.seen = []
    trainer.train(resume_from_checkpoint=options["resume"])
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {"seen": trainer.seen, "losses": losses, "weight": float(trainer.model.lm_head.weight.double().pow(2).sum())}


class Stream(torch.utils.data.IterableDataset):
    """A data set without a length."""

    def __iter__(self):
        return iter(make_rows())


def main(folder: Path) -> None:
    """Train in every way, and write what this rank saw."""
    split = {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": BATCH * RANKS}
    wrong = [len(row["input_ids"]) + 1 for row in make_rows()]
    found = {
        "padded": train(folder, "padded"),
        "documented": train(folder, "documented"),
        "resumed": train(folder, "padded", resume=str(folder / "padded" / "checkpoint-12")),
        "second epoch": train(folder, "padded", resume=str(folder / "padded" / "checkpoint-8")),
        "free": train(folder, "free", data_collator=DataCollatorWithFlattening()),
        "split": train(folder, "split", args=split),
        "window": train(folder, "window", balance={"window": 3}),
        "refused": [
            error_of(train, folder, "refused", hides="compute_loss_func"),
            error_of(train, folder, "refused", train_dataset=Stream(), args={"max_steps": 3}),
            error_of(train, folder, "refused", train_dataset=[(1, 2)] * 8),
            error_of(train, folder, "refused", balance={"lengths": wrong}),
            error_of(train, folder, "refused", balance={"lengths": [1]}),
            error_of(train, folder, "refused", args={"average_tokens_across_devices": False}),
            error_of(train, folder, "refused", args={"data_seed": int(os.environ["RANK"])}),
        ],
    }
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
