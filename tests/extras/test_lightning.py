"""Lightning's Trainer on two ranks with a balanced sampler: every row once per epoch, and exact resume."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.extras.conftest import answers_of_ranks

pytestmark = [pytest.mark.extra("lightning"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    return answers_of_ranks("balanced_lightning", tmp_path_factory.mktemp("lightning"))


def weight_of_one_process(of_ranks, kind):
    """SGD by the mean of the ranks' gradients, as DDP has it."""
    from tests.extras.balanced_lightning import NUM_ROWS

    weight = 1.0
    for batches in zip(*(rank[kind]["seen"] for rank in of_ranks), strict=True):
        slopes = []
        for rows in batches:
            x = [row / NUM_ROWS for row in rows]
            slopes.append(sum(2 * (weight * each - 0.5) * each for each in x) / len(x))
        weight -= 0.1 * sum(slopes) / len(slopes)
    return weight


@pytest.mark.parametrize("kind", ["balanced", "budget"])
def test_every_row_once_per_epoch(of_ranks, kind):
    from tests.extras.balanced_lightning import EPOCHS, NUM_ROWS

    steps = list(zip(*(rank[kind]["seen"] for rank in of_ranks), strict=True))
    rows = [row for step in steps for batch in step for row in batch]
    epochs = [rows[begin : begin + NUM_ROWS] for begin in range(0, len(rows), NUM_ROWS)]
    assert len(epochs) == EPOCHS and all(Counter(epoch) == Counter(range(NUM_ROWS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    for rank in of_ranks:
        assert rank[kind]["weight"] == pytest.approx(weight_of_one_process(of_ranks, kind), rel=1e-12)


def test_loads_are_even(of_ranks):
    from tests.extras.balanced_lightning import LENGTHS

    steps = list(zip(*(rank["balanced"]["seen"] for rank in of_ranks), strict=True))
    loads = [[int(LENGTHS[batch].sum()) for batch in step] for step in steps]
    in_turn = [
        [int(LENGTHS[sorted(rows)[begin::2]].sum()) for begin in range(2)]
        for rows in ([row for batch in step for row in batch] for step in steps)
    ]
    assert sum(map(max, loads)) < 0.9 * sum(map(max, in_turn))


@pytest.mark.parametrize("kind, step", [("balanced", 3), ("balanced", 5), ("balanced", 6), ("budget", 2)])
def test_a_resumed_run_trains_exactly_the_rest(of_ranks, kind, step):
    for rank in of_ranks:
        whole, resumed = rank[kind], rank[f"{kind} from {step}"]
        assert resumed["seen"] == whole["seen"][step:]
        assert resumed["weight"] == pytest.approx(whole["weight"], rel=1e-12)


@pytest.mark.parametrize("workers", [0, 1])
def test_epochs_of_different_numbers_of_batches_are_trained_whole(workers):
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from commons.datasets import BudgetBatchSampler
    from commons.integrations.lightning import BalancedBatches
    from tests.extras.balanced_lightning import LENGTHS, NUM_ROWS, Rows

    class Validated(Rows):
        def validation_step(self, rows, index):
            self.seen.append("validated")

    def make():
        return BudgetBatchSampler(LENGTHS, budget_per_rank=int(LENGTHS.sum()) // 8, num_ranks=1, rank=0, seed=0)

    expected, drawn = [], make()
    epochs = [list(drawn) for _ in range(4)]
    for batches in epochs:
        expected += [*batches, "validated"]
    counts = [len(batches) for batches in epochs]
    assert counts[0] < max(counts[1:]) and counts[0] > min(counts[1:])
    module, sampler = Validated(), make()
    options = {"accelerator": "cpu", "max_epochs": 4, "logger": False, "enable_checkpointing": False}
    shown = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = Trainer(callbacks=[BalancedBatches(sampler)], use_distributed_sampler=False, **options, **shown)
    trainer.fit(module, DataLoader(range(NUM_ROWS), batch_sampler=sampler, num_workers=workers), DataLoader([0]))
    assert module.seen == expected


def test_a_resumed_run_of_limited_epochs_begins_the_next_epoch(tmp_path):
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from commons.datasets import BalancedBatchSampler
    from commons.integrations.lightning import BalancedBatches
    from tests.extras.balanced_lightning import LENGTHS, NUM_ROWS, Rows

    options = {"accelerator": "cpu", "max_epochs": 3, "limit_train_batches": 3, "logger": False}
    shown = {"enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False}

    def train(resume):
        sampler = BalancedBatchSampler(LENGTHS, 4, num_ranks=1, rank=0, window=2)
        saved = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        module, trainer = Rows(), Trainer(callbacks=[BalancedBatches(sampler), saved], **options, **shown)
        trainer.fit(module, DataLoader(range(NUM_ROWS), batch_sampler=sampler), ckpt_path=resume)
        return module.seen

    whole, epochs = train(None), BalancedBatchSampler(LENGTHS, 4, num_ranks=1, rank=0, window=2)
    assert whole == [batch for _ in range(3) for batch in list(epochs)[:3]]
    assert train(tmp_path / "step=3.ckpt") == whole[3:]


def test_a_sampler_of_another_rank_is_refused(of_ranks):
    for rank, answer in enumerate(of_ranks):
        assert answer["refused"].startswith(f"the sampler is for rank {1 - rank} of 2, this is rank {rank} of 2")
        assert "\n" not in answer["refused"]


def test_a_loader_with_another_sampler_and_another_kind_are_refused():
    from lightning.pytorch import Trainer
    from torch.utils.data import BatchSampler, DataLoader

    from commons.datasets import BalancedBatchSampler
    from commons.integrations.lightning import BalancedBatches
    from tests.extras.balanced_lightning import Rows

    with pytest.raises(TypeError, match="sampler is a BatchSampler; .*: make one of these"):
        BalancedBatches(BatchSampler(range(4), 2, False))
    sampler = BalancedBatchSampler([1] * 4, 2, num_ranks=1, rank=0)
    options = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    trainer = Trainer(callbacks=[BalancedBatches(sampler)], enable_progress_bar=False, **options)
    with pytest.raises(ValueError, match="the training loader has another batch_sampler than this callback"):
        trainer.fit(Rows(), DataLoader(range(4), batch_size=2))


def fit(folder, callback, sampler, resume=None, workers=0, every_n_epochs=None, **changes):
    """The batches of a run of one process, with a checkpoint after every step or epoch."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from tests.extras.balanced_lightning import NUM_ROWS, Rows

    options = {"accelerator": "cpu", "max_epochs": 2, "logger": False, "use_distributed_sampler": False, **changes}
    shown = {"enable_progress_bar": False, "enable_model_summary": False}
    every = {"every_n_train_steps": None if every_n_epochs else 1, "every_n_epochs": every_n_epochs}
    saved = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **every)
    module, trainer = Rows(), Trainer(callbacks=[callback, saved], **options, **shown)
    loader = DataLoader(range(NUM_ROWS), batch_sampler=sampler, num_workers=workers)
    trainer.fit(module, loader, ckpt_path=resume)
    return module.seen


def test_fits_in_a_row_with_one_callback(tmp_path):
    from commons.datasets import BalancedBatchSampler
    from commons.integrations.lightning import BalancedBatches
    from tests.extras.balanced_lightning import LENGTHS

    def make():
        sampler = BalancedBatchSampler(LENGTHS, 4, num_ranks=1, rank=0, window=2)
        return BalancedBatches(sampler), sampler

    one, sampler = make()
    whole = fit(tmp_path / "first", one, sampler)
    assert len(whole) == 20 and fit(tmp_path / "second", one, sampler) == whole
    assert fit(tmp_path / "resumed", one, sampler, tmp_path / "second" / "step=3.ckpt", max_epochs=1) == whole[3:10]
    assert fit(tmp_path / "third", one, sampler, max_epochs=1) == whole[:10]
    assert fit(tmp_path / "fourth", *make(), tmp_path / "resumed" / "step=5.ckpt") == whole[5:]


def test_overfitted_batches_are_the_same_in_every_epoch(tmp_path):
    from commons.datasets import BalancedBatchSampler
    from commons.integrations.lightning import BalancedBatches
    from tests.extras.balanced_lightning import LENGTHS

    sampler = BalancedBatchSampler(LENGTHS, 4, num_ranks=1, rank=0)
    expected = list(sampler)[:2]
    first = fit(tmp_path, BalancedBatches(sampler), sampler, max_epochs=3, every_n_epochs=1, overfit_batches=2)
    assert first == expected * 3
    resumed = {"resume": tmp_path / "step=2.ckpt", "max_epochs": 3, "overfit_batches": 2}
    assert fit(tmp_path / "again", BalancedBatches(sampler), sampler, **resumed) == expected * 2
    within = {"max_epochs": 3, "overfit_batches": 2}
    fit(tmp_path / "within", BalancedBatches(sampler), sampler, **within)
    rest = fit(tmp_path / "again", BalancedBatches(sampler), sampler, tmp_path / "within" / "step=1.ckpt", **within)
    assert rest == expected[1:] + expected * 2


def test_a_run_resumed_at_the_end_of_an_epoch_trains_a_longer_epoch_whole(tmp_path):
    from commons.datasets import BudgetBatchSampler
    from commons.integrations.lightning import BalancedBatches
    from tests.extras.balanced_lightning import LENGTHS

    def make():
        sampler = BudgetBatchSampler(LENGTHS, budget_per_rank=int(LENGTHS.sum()) // 8, num_ranks=1, rank=0, seed=0)
        return BalancedBatches(sampler), sampler

    counts = [len(list(each)) for each in [make()[1]] * 4]
    assert counts == [10, 9, 10, 11]
    whole = fit(tmp_path / "whole", *make(), max_epochs=4)
    for step in (10, 19, 29):
        assert (
            fit(tmp_path / "resumed", *make(), tmp_path / "whole" / f"step={step}.ckpt", max_epochs=4) == whole[step:]
        )


def test_a_reloaded_loader_with_workers_resumes_at_the_end_of_an_epoch(tmp_path):
    from commons.datasets import BalancedBatchSampler
    from commons.integrations.lightning import BalancedBatches
    from tests.extras.balanced_lightning import LENGTHS

    def train(resume=None):
        sampler = BalancedBatchSampler(LENGTHS, 4, num_ranks=1, rank=0)
        options = {"workers": 1, "reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}
        return fit(tmp_path, BalancedBatches(sampler), sampler, resume, every_n_epochs=1, **options)

    whole = train()
    assert train(tmp_path / "step=10.ckpt") == whole[10:]
