"""Hugging Face's Trainer on two ranks, its rows dealt by `balanced`: every row once, the losses of one process."""

from __future__ import annotations

import io
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils import data

from tests.extras.conftest import answers_of_ranks

pytestmark = [pytest.mark.extra("transformers"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def trainers():
    """What the program of the ranks has, in this process."""
    from tests.extras import balanced_trainer

    return balanced_trainer


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    return answers_of_ranks("balanced_trainer", tmp_path_factory.mktemp("transformers"))


def steps_of(of_ranks, name):
    """The micro-batches of every optimizer step, of all ranks: two steps of accumulation, or the last of an epoch."""
    micro_batches = list(zip(*(rank[name]["seen"] for rank in of_ranks), strict=True))
    begins = [begin for epoch in range(0, len(micro_batches), 15) for begin in range(epoch, epoch + 15, 2)]
    ends = [min(begin + 2, begin - begin % 15 + 15) for begin in begins]
    return [[batch for at in micro_batches[begin:end] for batch in at] for begin, end in zip(begins, ends)]


def losses_of_one_process(steps, trainers):
    """The mean loss over all tokens of each step, and SGD by its gradient, row by row without padding."""
    model, rows, losses = trainers.make_model(), trainers.make_rows(), []
    for step in steps:
        total, terms = torch.zeros(()), 0
        for row in (row for batch in step for row in batch):
            tokens, labels = torch.tensor(rows[row]["input_ids"]), torch.tensor(rows[row]["labels"])
            logits = model(input_ids=tokens[None]).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
            terms += int((labels != -100).sum())
        loss = total / terms
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= trainers.RATE * weight.grad
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["padded", "free", "window"])
def test_every_row_once_per_epoch_and_the_losses_of_one_process(of_ranks, trainers, name):
    steps = steps_of(of_ranks, name)
    rows = [row for step in steps for batch in step for row in batch]
    assert len(rows) == 180 and all(Counter(rows[begin : begin + 90]) == Counter(range(90)) for begin in (0, 90))
    assert rows[:90] != rows[90:]
    expected = losses_of_one_process(steps, trainers)
    for rank in of_ranks:
        assert rank[name]["losses"] == pytest.approx(expected, abs=2e-5)
    assert of_ranks[0][name]["weight"] == pytest.approx(of_ranks[1][name]["weight"], rel=1e-9)


@pytest.mark.parametrize("name", ["documented", "split"])
def test_the_documented_line_and_split_batches_of_all_ranks_are_the_padded_run(of_ranks, name):
    for rank in of_ranks:
        assert rank[name] == rank["padded"]


def test_a_step_keeps_its_rows_unless_a_window_shares_them(of_ranks):
    rows = {
        name: [sorted(row for batch in step for row in batch) for step in steps_of(of_ranks, name)]
        for name in ("padded", "free", "window")
    }
    assert rows["padded"] == rows["free"] and [len(step) for step in rows["padded"]] == [*[12] * 7, 6] * 2
    assert rows["window"] != rows["padded"]
    of_window, of_steps = (Counter(row for step in rows[name][:3] for row in step) for name in ("window", "padded"))
    assert of_window == of_steps


def test_padded_micro_batches_are_even_by_rows_times_longest(of_ranks, trainers):
    lengths = [len(row["input_ids"]) for row in trainers.make_rows()]

    def slowest(steps):
        return sum(max(len(rows) * max(lengths[row] for row in rows) for rows in step) for step in steps)

    steps = steps_of(of_ranks, "padded")
    in_order = [sorted(row for batch in step for row in batch) for step in steps]
    assert slowest(steps) < 0.75 * slowest([[rows[begin::4] for begin in range(4)] for rows in in_order])


@pytest.mark.parametrize(("name", "batches_before"), [("resumed", 15 + 8), ("second epoch", 15)])
def test_a_resumed_run_trains_exactly_the_rest(of_ranks, name, batches_before):
    for rank in of_ranks:
        assert len(rank["padded"]["seen"]) == 30
        assert rank[name]["seen"] == rank["padded"]["seen"][batches_before:]
        assert rank[name]["losses"] == pytest.approx(rank["padded"]["losses"], abs=1e-6)
        assert rank[name]["weight"] == pytest.approx(rank["padded"]["weight"], rel=1e-6)


def test_a_run_of_other_micro_batches_resumes_without_losing_rows_or_is_refused(trainers, tmp_path):
    """The Trainer skips as many steps as were trained, which are other rows in another plan of a window."""

    def train(name, batch, accumulated, resume=None, window=2, is_balanced=True, **options):
        options |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, "save_steps": 1}
        trainer = trainers.make_trainer(tmp_path / name, trainers.Recorder, num_train_epochs=1, **options)
        trainer.seen = []
        if is_balanced:
            trainers.balanced(trainer, window=window)
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / resume))
        return trainer.seen

    def refused(*arguments, **options):
        with pytest.raises(ValueError, match="; rows would be lost or trained twice: resume with the same ") as error:
            train("other", *arguments, **options)
        return str(error.value)

    runs = {"window": train("window", 3, 2), "alone": train("alone", 3, 2, window=1)}
    for name, step, window in (("window", 4, 2), ("alone", 3, 1)):
        rest = train("other", 2, 3, f"{name}/checkpoint-{step}", window, restore_callback_states_from_checkpoint=True)
        assert sorted(row for batch in (*runs[name][: step * 2], *rest) for row in batch) == list(range(90))
    within = "the checkpoint has steps 2, batch_size 3, window 4, this run steps 3, batch_size 2, window 6;"
    assert refused(2, 3, "window/checkpoint-3").startswith(f"after 3 steps {within}")
    assert refused(3, 1, "alone/checkpoint-3", 1).startswith("after 3 steps the checkpoint has row 18, this run row 9;")
    train("stock", 3, 2, is_balanced=False)
    assert refused(3, 2, "stock/checkpoint-1").startswith("after 1 steps the checkpoint's run was not balanced;")
    rows = Counter(row for batch in train("other", 2, 3, "window/checkpoint-3", ignore_data_skip=True) for row in batch)
    assert len(rows) == 72 and set(rows.values()) == {1}  # the epoch again, up to the Trainer's number of steps


def test_a_checkpoint_that_a_callback_saves_at_the_end_of_a_step_can_be_resumed(trainers, tmp_path):
    """As the Trainer's own callback for SIGTERM does (enable_jit_checkpoint=True)."""
    from transformers import TrainerCallback

    class Saving(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer._save_checkpoint(trainer.model, trial=None)

    def train(resume=None):
        nonlocal trainer
        options = {"num_train_epochs": 1, "per_device_train_batch_size": 9, "save_strategy": "no"}
        trainer = trainers.make_trainer(tmp_path, trainers.Recorder, **options)
        trainer.add_callback(Saving)
        trainer.seen = []
        trainers.balanced(trainer).train(resume_from_checkpoint=resume)
        return trainer.seen

    trainer = None
    whole = train()
    for step in (1, 4):
        assert train(str(tmp_path / f"checkpoint-{step}")) == whole[step:]


def test_a_batch_size_that_does_not_fit_is_halved(trainers, tmp_path):
    class Full(trainers.Recorder):
        def training_step(self, model, inputs, *args, **kwargs):
            if self._train_batch_size > trainers.BATCH:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *args, **kwargs)

    options = {"per_device_train_batch_size": 8, "num_train_epochs": 1, "auto_find_batch_size": True}
    trainer = trainers.balanced(trainers.make_trainer(tmp_path, Full, save_strategy="no", **options))
    trainer.seen = []
    trainer.train()
    assert sorted(row for batch in trainer.seen for row in batch) == list(range(90))
    assert len(trainer.seen) == trainer.state.max_steps == -(-90 // trainer._train_batch_size)


def test_a_collator_of_ones_own_that_flattens_needs_no_padded_micro_batches(trainers, tmp_path):
    class Flattening(trainers.DataCollatorWithFlattening):
        """As one that adds fields."""

    trainer = trainers.make_trainer(tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=2)
    trainer.data_collator = Flattening()
    batches = trainers.balanced(trainer).get_train_dataloader().batch_sampler
    assert {len(rows) for rows in batches} == {3}


def test_processes_that_share_a_sample_are_refused(trainers, tmp_path):
    trainer = trainers.make_trainer(tmp_path)
    trainer.get_tp_size = lambda: 2
    config = SimpleNamespace(cp_size=4, sp_size=1)
    with (
        mock.patch.object(type(trainer.accelerator), "parallelism_config", config),
        pytest.raises(ValueError, match=r"tensor, context and sequence parallel sizes are \[2, 4, 1\]; balanced"),
    ):
        trainers.balanced(trainer).get_train_dataloader()


def test_a_trainer_keeps_the_order_of_rows_that_it_chooses(trainers, tmp_path):
    def choosing(make_sampler):
        chooses = {"_get_train_sampler": lambda trainer, *args: make_sampler(trainer.train_dataset)}
        kind = type("Choosing", (trainers.Trainer,), chooses)
        trainer = trainers.make_trainer(tmp_path, kind, gradient_accumulation_steps=2, per_device_train_batch_size=3)
        return trainers.balanced(trainer).get_train_dataloader().batch_sampler

    batches = list(choosing(data.SequentialSampler))
    assert [sorted(batches[at] + batches[at + 1]) for at in range(0, 30, 2)] == [
        list(range(begin, begin + 6)) for begin in range(0, 90, 6)
    ]
    with pytest.raises(ValueError, match="Choosing chooses its rows by a WeightedRandomSampler, which balancing would"):
        choosing(lambda rows: data.WeightedRandomSampler([1.0] * 90, 90))
    with pytest.raises(ValueError, match="Choosing chooses its rows by a"):
        choosing(lambda rows: data.RandomSampler(rows, replacement=True, num_samples=90))


def test_what_computes_the_loss_decides_whether_rows_are_counted(trainers, tmp_path):
    from commons.integrations.transformers import _has_mean_loss

    def passes_on(self, logits, labels, **kwargs):
        return self.helper_loss(logits, labels, kwargs)

    def ignores(self, logits, labels, **kwargs):
        return self.helper_loss(logits, labels)

    def keeps_its_function(self, tokens, labels, **kwargs):
        logits = self.backbone(tokens, **kwargs)
        return self.loss_fn(logits, labels)

    def has_no_name_of_a_loss(self, logits, labels, **kwargs):
        return self.distance(logits, labels)

    assert not _has_mean_loss(passes_on)
    assert all(map(_has_mean_loss, (ignores, keeps_its_function, has_no_name_of_a_loss)))
    trainer = trainers.make_trainer(tmp_path, label_smoothing_factor=0.1)
    trainer.label_smoother = lambda outputs, labels, shift_labels=False: outputs.loss  # as in older releases
    with pytest.raises(ValueError, match="the loss of label_smoothing_factor is a mean over a micro-batch"):
        trainers.balanced(trainer).get_train_dataloader()


def small(head):
    """A model with this head."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = getattr(transformers, head)
    return model(model.config_class(vocab_size=256, **sizes))


@pytest.mark.parametrize(
    ("head", "why"),
    [
        ("BertForSequenceClassification", "the loss of BertForSequenceClassification is a mean over a micro-batch"),
        ("BertForMaskedLM", "the loss of BertForMaskedLM is a mean"),
        ("BertForQuestionAnswering", "the labels are start_positions, end_positions, and the"),
        ("LlamaForSequenceClassification", "the loss of LlamaForSequenceClassification is a mean"),
    ],
)
def test_a_model_that_takes_the_count_of_items_and_does_not_use_it_is_refused(trainers, tmp_path, head, why):
    trainer = trainers.make_trainer(tmp_path, model=small(head))
    if not trainer.model_accepts_loss_kwargs:  # as in older releases
        why = "the model takes no num_items_in_batch"
    with pytest.raises(ValueError, match=why):
        trainers.balanced(trainer).get_train_dataloader()
    trainers.balanced(trainer, padded=False).get_train_dataloader()
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.loss
    with pytest.raises(ValueError, match="<lambda> of Trainer does not use num_items_in_batch; micro-batches"):
        trainers.balanced(trainer).get_train_dataloader()
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch: outputs.loss / num_items_in_batch
    trainers.balanced(trainer).get_train_dataloader()


def test_a_forward_that_calls_its_parents_has_the_loss_of_that(trainers, tmp_path):
    """As that of Gemma3ForSequenceClassification."""

    def load(model):
        class Calling(type(model)):
            def forward(self, *args, **kwargs):
                return super().forward(*args, **kwargs)

        model.__class__ = Calling
        trainers.balanced(trainers.make_trainer(tmp_path, model=model)).get_train_dataloader()

    load(trainers.make_model())
    compiled = trainers.make_trainer(tmp_path)
    compiled.model = torch.compile(compiled.model)
    trainers.balanced(compiled).get_train_dataloader()
    with pytest.raises(ValueError, match="the (loss of Calling is a mean|model takes no)"):
        load(small("LlamaForSequenceClassification"))


def test_a_loss_of_a_subclass_must_use_the_count_of_items(trainers, tmp_path):
    class Mean(trainers.Trainer):
        loss_is_scaled_for_ga = False

    class Remedied(Mean):
        loss_is_scaled_for_ga = True

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).logits.sum() / num_items_in_batch

    class Weighted(trainers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return torch.nn.functional.cross_entropy(model(**inputs).logits, inputs["labels"])

    class Counted(trainers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).logits.sum() / num_items_in_batch

    class Logged(trainers.Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            return super().compute_loss(model, inputs, **kwargs)

    def load(kind, model=None, **options):
        trainers.balanced(trainers.make_trainer(tmp_path, kind, model), **options).get_train_dataloader()

    for kind, model, why in (
        (Mean, None, "its loss is a mean over a micro-batch .*of Mean have .*with loss_is_scaled_for_ga ="),
        (Weighted, None, "compute_loss of Weighted does not use num_items_in_batch; micro-batches"),
        (Logged, small("BertForSequenceClassification"), "the (loss of BertForSequenceCl.* is|model takes no)"),
    ):
        with pytest.raises(ValueError, match=f"{why}.*or pass padded=False and set dataloader_drop_last=True"):
            load(kind, model)
        load(kind, model, padded=False)
    load(Counted)
    load(Remedied)
    load(Logged)


def test_the_remedy_for_mean_losses_gives_all_micro_batches_as_many_rows(trainers, tmp_path):
    """TRL's trainers for preferences also gather values per row, which needs equal shapes."""
    options = {"per_device_train_batch_size": 4, "dataloader_drop_last": True}
    trainer, sizes = trainers.balanced(trainers.make_trainer(tmp_path, **options), padded=False), []
    for rank in range(2):
        with mock.patch.multiple(type(trainer.args), world_size=2, process_index=rank):
            sizes += map(len, trainer.get_train_dataloader().batch_sampler)
    assert sizes == [4] * 22


def test_a_data_set_is_read_by_its_length(trainers, tmp_path):
    class Endless(data.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, row):
            assert row < 20, "a row behind the last one was read"
            return trainers.make_rows(20)[row]

    trainer, balanced = trainers.make_trainer(tmp_path, per_device_train_batch_size=2), trainers.balanced
    trainer.train_dataset = Endless()
    assert len(balanced(trainer).get_train_dataloader()) == 10
    with pytest.raises(ValueError, match=r"cost\(lengths\) has 1 entries, there are 20 rows; one per row is needed"):
        balanced(trainer, cost=lambda lengths: lengths[:1]).get_train_dataloader()
    with pytest.raises(TypeError, match="cost is an int; it must be a function from lengths to workloads: pass one"):
        balanced(trainer, cost=3)


def test_bad_input_ends_before_the_first_step(of_ranks):
    expected = [
        "has no Trainer.compute_loss_func, which balancing needs: install a newer one, as pip install",
        "TypeError: train_dataset is a Stream without a length; balancing needs the lengths",
        "ValueError: rows of train_dataset have no field 'input_ids' to count tokens in",
        "tokens, its length is given as",
        "ValueError: lengths has 1 entries, there are 90 rows",
        "divide by num_items_in_batch of all ranks (average_tokens_across_devices=True), or pass",
        "ValueError: seed is 0 on rank 0 and 1 on rank 1 in balanced; all ranks pass the same",
    ]
    for rank in of_ranks:
        assert len(rank["refused"]) == len(expected)
        for message, part in zip(rank["refused"], expected):
            assert part in message and "\n" not in message


def test_a_progress_bar_that_is_drawn_changes_no_length(trainers, tmp_path, monkeypatch):
    """tqdm's update() returns True after it has drawn the bar; rank 0 alone then had rows of one token."""
    from tqdm import tqdm

    from commons.integrations import transformers as ours

    monkeypatch.setattr(ours, "progress_bar", lambda *_, **__: tqdm(file=io.StringIO(), mininterval=0))
    lengths = ours._lengths(trainers.make_trainer(tmp_path))
    assert lengths == [len(row["input_ids"]) for row in trainers.make_rows()]


def test_one_process_needs_no_average_over_devices(trainers, tmp_path):
    """Older releases of transformers set it to False themselves."""
    trainer = trainers.make_trainer(tmp_path, per_device_train_batch_size=3, average_tokens_across_devices=False)
    assert len(trainers.balanced(trainer).get_train_dataloader()) == 30
