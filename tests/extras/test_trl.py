"""TRL's SFTTrainer with `balanced`: a padding collator and a padding-free one train the same steps."""

from __future__ import annotations

from collections import Counter

import pytest

pytestmark = [pytest.mark.extra("trl"), pytest.mark.timeout(400)]


def train(folder, padding_free):
    """The rows of every micro-batch, and the loss of every step, of one process."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from commons.integrations.transformers import balanced
    from tests.extras.balanced_trainer import make_model, make_rows, recording

    special = {"pad_token": "0", "eos_token": "1", "unk_token": "0"}
    words = Tokenizer(models.WordLevel({str(token): token for token in range(256)}, special["unk_token"]))
    arguments = SFTConfig(
        output_dir=str(folder),
        max_steps=5,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        padding_free=padding_free,
        max_length=None,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trainer = recording(SFTTrainer)(
        model=make_model(),
        args=arguments,
        train_dataset=Dataset.from_list(make_rows(40)),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **special),
    )
    trainer.seen = []
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
