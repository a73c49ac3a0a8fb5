"""Lightning's Trainer on two ranks with a balanced sampler: every row once per epoch, and exact resume."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.extras.conftest import answers_of_ranks

pytestmark = [pytest.mark.extra("lightning"), pytest.mark.timeout(400)]
NUM_ROWS, EPOCHS = 40, 3


@pytest.fixture(scope="module")
def lightning():
    """What the program of the ranks has, in this process."""
    from tests.extras import balanced_lightning

    return balanced_lightning


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def of_ranks(folder):
    return answers_of_ranks("balanced_lightning", folder)


def steps_of(of_ranks, kind):
    """The rows of each rank at every step."""
    return list(zip(*(rank[kind]["seen"] for rank in of_ranks), strict=True))


def weight_of_one_process(steps):
    """SGD by the mean gradient of a step's rows."""
    weight = 1.0
    for step in steps:
        slopes = [2 * (weight * row / NUM_ROWS - 0.5) * row / NUM_ROWS for rows in step for row in rows]
        weight -= 0.1 * sum(slopes) / len(slopes)
    return weight


@pytest.mark.parametrize("kind", ["balanced", "budget"])
def test_every_row_once_per_epoch(of_ranks, kind):
    steps = steps_of(of_ranks, kind)
    rows = [row for step in steps for batch in step for row in batch]
    epochs = [rows[begin : begin + NUM_ROWS] for begin in range(0, len(rows), NUM_ROWS)]
    assert len(epochs) == EPOCHS and all(Counter(epoch) == Counter(range(NUM_ROWS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    for rank in of_ranks:
        assert rank[kind]["weight"] == pytest.approx(weight_of_one_process(steps), rel=1e-12)


def test_loads_are_even(of_ranks, lightning):
    loads, in_turn = [], []
    for step in steps_of(of_ranks, "balanced"):
        loads.append(max(lightning.LENGTHS[batch].sum() for batch in step))
        rows = sorted(row for batch in step for row in batch)
        in_turn.append(max(lightning.LENGTHS[rows[begin::2]].sum() for begin in range(2)))
    assert sum(loads) < 0.9 * sum(in_turn)


@pytest.mark.parametrize("kind, step", [("balanced", 3), ("balanced", 5), ("balanced", 6), ("budget", 2)])
def test_a_resumed_run_trains_exactly_the_rest(of_ranks, kind, step):
    for rank in of_ranks:
        whole, resumed = rank[kind], rank[f"{kind} from {step}"]
        assert resumed["seen"] == whole["seen"][step:]
        assert resumed["weight"] == pytest.approx(whole["weight"], rel=1e-12)


@pytest.mark.parametrize(
    "kind, step, twice", [("balanced", 3, 8), ("balanced", 4, 0), ("balanced", 5, 0), ("budget", 2, 0)]
)
def test_one_process_resumes_a_run_of_two_ranks(of_ranks, folder, lightning, tmp_path, monkeypatch, kind, step, twice):
    """An unfinished window is trained again, and nothing else; after step 5 an epoch has ended."""
    from commons.integrations.lightning import logger

    said: list[str] = []  # not caplog: AReaL, if other tests have imported it, replaces the root logger
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    sampler = lightning.make_sampler(kind, seed=5)
    resumed = lightning.fit(tmp_path, sampler, folder / kind / f"step={step}.ckpt")
    trained = [*(batch for rank in of_ranks for batch in rank[kind]["seen"][:step]), *resumed]
    counts = Counter(row for batch in trained for row in batch)
    assert sum(times - EPOCHS for times in counts.values()) == twice and min(counts.values()) == EPOCHS
    assert len(said) == (twice > 0) and all(f"and {twice} rows are trained a second" in line for line in said)


@pytest.mark.parametrize("step", [1, 4, 9, 10, 13])
def test_a_run_with_fewer_and_larger_batches_resumes_another(lightning, tmp_path, step):
    whole = lightning.fit(tmp_path, lightning.make_sampler("budget"))
    larger = lightning.make_sampler("budget", budget_per_rank=int(lightning.LENGTHS.sum()) // 4)
    resumed = lightning.fit(tmp_path / "larger", larger, tmp_path / f"step={step}.ckpt")
    counts = Counter(row for batch in (*whole[:step], *resumed) for row in batch)
    assert set(counts.values()) == {EPOCHS} and len(resumed) < len(whole) - step


@pytest.mark.parametrize("interval", [0.5, 3])
def test_an_epoch_that_ended_with_a_validation_has_ended_for_another_plan_too(lightning, tmp_path, interval):
    """Lightning trained a batch of it again, because the other plan's 5 batches do not end with a validation."""

    def fit(parts, resume=None):
        sampler = lightning.make_sampler("budget", budget_per_rank=int(lightning.LENGTHS.sum()) // parts, seed=3)
        options = {"validates": True, "every_n_epochs": 1, "val_check_interval": interval}
        seen = lightning.fit(tmp_path / str(parts), sampler, resume and tmp_path / "5" / resume, **options)
        return [batch for batch in seen if batch != "validated"]

    assert len(fit(5)) == 18 and len(fit(4)) == 15
    for epochs in (1, 2, 3):
        rows = Counter(row for batch in fit(4, f"step={6 * epochs}.ckpt") for row in batch)
        assert rows == Counter(dict.fromkeys(range(NUM_ROWS), EPOCHS - epochs) if epochs < EPOCHS else {})


def test_a_sampler_of_another_rank_or_seed_is_refused_on_all_ranks(of_ranks):
    for answer in of_ranks:
        of_rank, of_seed = answer["refused"]
        assert re.match("ValueError: rank 0: the sampler is for rank 1 of 2, .*; rank 1: the sampler is for", of_rank)
        assert of_seed.startswith("ValueError: seed is 0 on rank 0 and 1 on rank 1 in BalancedBatches; all ranks pass")


def test_tensor_parallel_peers_train_the_same_rows(of_ranks, lightning):
    drawn = lightning.make_sampler("balanced")
    whole = [batch for _ in range(EPOCHS) for batch in drawn]
    for rank, answer in enumerate(of_ranks):
        seen, refused = answer["peers"]
        assert seen == whole and f"is for rank {rank} of 2, this is data-parallel rank 0 of 1; " in refused


def test_a_loader_with_another_sampler_and_another_kind_are_refused(lightning, tmp_path):
    from torch.utils.data import BatchSampler

    sampler = BatchSampler(range(4), 2, False)
    with pytest.raises(TypeError, match="sampler is a BatchSampler; .*: make one of these"):
        lightning.BalancedBatches(sampler)
    callback = lightning.BalancedBatches(lightning.make_sampler("balanced"))
    with pytest.raises(ValueError, match="the training loader has another batch_sampler than this callback"):
        lightning.fit(tmp_path, sampler, callback=callback)


@pytest.mark.parametrize("kind", ["balanced", "budget"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_sampler_of_another_number_of_rows_is_refused(lightning, tmp_path, monkeypatch, kind, change):
    sampler = lightning.make_sampler(kind)
    monkeypatch.setattr(lightning, "NUM_ROWS", NUM_ROWS + change)  # of the data set
    with pytest.raises(ValueError, match=f"workloads has {NUM_ROWS} entries, the data set has {NUM_ROWS + change} "):
        lightning.fit(tmp_path, sampler)


@pytest.mark.parametrize("workers", [0, 1])
def test_epochs_of_different_numbers_of_batches_are_trained_and_resumed_whole(lightning, tmp_path, workers):
    drawn = lightning.make_sampler("budget")
    epochs = [list(drawn) for _ in range(4)]
    assert [len(batches) for batches in epochs] == [10, 9, 10, 11]

    def fit(resume=None, **changes):
        sampler = lightning.make_sampler("budget")
        return lightning.fit(tmp_path, sampler, resume, workers=workers, max_epochs=4, **changes)

    assert fit(validates=True) == [seen for batches in epochs for seen in (*batches, "validated")]
    for done, step in enumerate((10, 19, 29), 1):
        assert fit(f"step={step}.ckpt") == [batch for batches in epochs[done:] for batch in batches]


def test_a_resumed_run_of_limited_epochs_begins_the_next_epoch(lightning, tmp_path):
    def fit(resume=None):
        return lightning.fit(tmp_path, lightning.make_sampler("balanced"), resume, limit_train_batches=3)

    whole, epochs = fit(), lightning.make_sampler("balanced")
    assert whole == [batch for _ in range(EPOCHS) for batch in list(epochs)[:3]]
    assert fit("step=3.ckpt") == whole[3:]


def test_fits_in_a_row_with_one_callback(lightning, tmp_path):
    def fit(name, callback, resume=None, max_epochs=2):
        return lightning.fit(tmp_path / name, callback._sampler, resume, callback=callback, max_epochs=max_epochs)

    one, other = (lightning.BalancedBatches(lightning.make_sampler("balanced")) for _ in range(2))
    whole = fit("first", one)
    assert len(whole) == 20 and fit("second", one) == whole
    assert fit("resumed", one, tmp_path / "second" / "step=3.ckpt", 1) == whole[3:10]
    assert fit("third", one, max_epochs=1) == whole[:10]
    assert fit("fourth", other, tmp_path / "resumed" / "step=5.ckpt") == whole[5:]


def test_overfitted_batches_are_the_same_in_every_epoch(lightning, tmp_path):
    sampler = lightning.make_sampler("balanced")
    expected = list(sampler)[:2]
    for resume, epochs in ((None, 3), ("step=2.ckpt", 2)):
        assert lightning.fit(tmp_path, sampler, resume, every_n_epochs=1, overfit_batches=2) == expected * epochs
    within = tmp_path / "within"
    lightning.fit(within, sampler, overfit_batches=2)
    assert lightning.fit(within, sampler, "step=1.ckpt", overfit_batches=2) == expected[1:] + expected * 2


def test_a_reloaded_loader_with_workers_resumes_at_the_end_of_an_epoch(lightning, tmp_path):
    def fit(resume=None):
        options = {"workers": 1, "reload_dataloaders_every_n_epochs": 1, "every_n_epochs": 1}
        return lightning.fit(tmp_path, lightning.make_sampler("balanced"), resume, **options)

    whole = fit()
    assert fit("step=10.ckpt") == whole[10:]
