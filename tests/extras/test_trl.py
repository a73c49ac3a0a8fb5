"""TRL's SFTTrainer with `balanced`: a padding collator and a padding-free one train the same steps."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest

pytestmark = [pytest.mark.extra("trl"), pytest.mark.timeout(400)]


def make_trainer(folder, rows, **changes):
    """An SFTTrainer of one process, which notes the rows of every micro-batch."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from tests.extras.balanced_trainer import make_model, recording

    special = {"pad_token": "0", "eos_token": "1", "unk_token": "0"}
    words = Tokenizer(models.WordLevel({str(token): token for token in range(256)}, special["unk_token"]))
    arguments = SFTConfig(
        output_dir=str(folder),
        max_steps=5,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        **{"max_length": None, "per_device_train_batch_size": 3, **changes},
    )
    trainer = recording(SFTTrainer)(
        model=make_model(),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **special),
    )
    trainer.seen = []
    return trainer


def train(folder, padding_free):
    """The rows of every micro-batch, and the loss of every step, of one process."""
    from commons.integrations.transformers import balanced
    from tests.extras.balanced_trainer import make_rows

    trainer = make_trainer(folder, make_rows(40), padding_free=padding_free)
    balanced(trainer).train()
    return trainer.seen, [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_both_collators_train_the_same_steps(tmp_path):
    padded, losses = train(tmp_path / "padded", padding_free=False)
    free, free_losses = train(tmp_path / "free", padding_free=True)
    assert losses == pytest.approx(free_losses, abs=2e-3) and len(losses) == 5
    for seen in (padded, free):
        rows = Counter(row for batch in seen for row in batch)
        assert len(seen) == 10 and set(rows.values()) == {1} and sum(rows.values()) == 30
    assert [sorted(padded[at] + padded[at + 1]) for at in range(0, 10, 2)] == [
        sorted(free[at] + free[at + 1]) for at in range(0, 10, 2)
    ]
    assert padded != free


def test_packed_rows_cost_what_their_sequences_cost(tmp_path):
    from commons.integrations.transformers import balanced

    lengths = [64] * 8 + [8] * 64  # packed into 8 rows of one sequence and 8 rows of eight
    rows = [{"input_ids": [1] * length, "labels": [1] * length} for length in lengths]
    trainer = make_trainer(tmp_path, rows, packing=True, max_length=64, per_device_train_batch_size=1)
    balanced(trainer, cost=lambda lengths: lengths**2, window=4)
    sequences, of_ranks = [len(packed) for packed in trainer.train_dataset["seq_lengths"]], []
    for rank in range(2):
        with mock.patch.multiple(type(trainer.args), world_size=2, process_index=rank):
            of_ranks.append([sequences[row] for (row,) in trainer.get_train_dataloader().batch_sampler])
    assert of_ranks[0] == of_ranks[1] and sorted(of_ranks[0]) == [1] * 4 + [8] * 4
