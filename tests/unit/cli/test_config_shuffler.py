"""`evenrank simulate --config` plans with the shuffler of the config, and advises what changes the run."""

import itertools

import pytest
import torch

from commons.cli.recipes import load_recipe, read_config_rows
from commons.distributed.options import ShufflerOptions
from commons.distributed.tokens_shuffler import TokensBalancedBatchShuffler
from commons.trainer.config.load import load_config
from hstu.recipe import HSTURecipe
from hstu.train_config import TrainConfig
from tests.helpers.jobs.training_configs import CONFIG


def test_rows_cost_what_a_shuffler_of_ones_own_says(tmp_path, asked, monkeypatch):
    config = tmp_path / "run.toml"
    config.write_text('shuffler_type = "tokens"\n' + CONFIG.format(candidates=3))
    target = load_recipe(None, config, torch.device("cpu"))
    lengths = [batch.features.lengths().view(-1, 8).sum(0) for batch in itertools.islice(target.host_batches(), 4)]
    expected = torch.stack(lengths).view(2, 2, 8).sum(2)  # steps, ranks
    answer = asked("simulate", "--config", str(config), "--ranks", "2", "--steps", "2")
    (of_ranks,) = answer["ranks"]
    as_loaded, balanced = of_ranks["ways"]
    assert as_loaded["imbalance"] == pytest.approx((expected.amax(1) / expected.double().mean(1)).mean().item() - 1)
    assert balanced["imbalance"] < as_loaded["imbalance"]
    assert answer["task"] == "workloads of shuffler 'tokens'"
    said = "in the workloads of shuffler 'tokens'"
    assert answer["advice"]["text"].endswith(f"{said}.")
    # Rows are planned separately here.
    monkeypatch.setattr(TokensBalancedBatchShuffler, "get_groups", TokensBalancedBatchShuffler.get_workloads)
    grouped = asked("simulate", "--config", str(config), "--ranks", "2", "--steps", "2")
    assert grouped["advice"] == answer["advice"]
    (note,) = set(grouped["notes"]) - set(answer["notes"])
    assert "without the shuffler's groups (get_groups)" in note
    (note,) = read_config_rows(config, None, ShufflerOptions(speeds="measured"), (2,), 1).notes[1:]
    assert 'equally fast ranks: with speeds="measured"' in note
    # A shuffler that moves no row has no costs of its own.
    config.write_text('shuffler_type = "identity"\n' + CONFIG.format(candidates=3))
    assert read_config_rows(config, None, ShufflerOptions(), (2,), 1).task.startswith("hstu, hidden 32")


def test_the_cap_counts_the_tokens_that_a_shuffler_of_ones_own_names(tmp_path, monkeypatch):
    config = tmp_path / "run.toml"
    config.write_text('shuffler_type = "tokens"\n' + CONFIG.format(candidates=3))
    monkeypatch.setattr(HSTURecipe, "shuffler_arguments", lambda self: {"tokens": {"feature_names": ["item_id"]}})
    rows = read_config_rows(config, None, ShufflerOptions(), (2,), 1).load(2, 1)
    assert rows.tokens.tolist() == rows.workloads.tolist()  # not the model's, with its actions and context


def test_a_cap_that_no_plan_keeps_is_noted(tmp_path, asked):
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(candidates=3))
    tokens = int(read_config_rows(config, None, ShufflerOptions(), (2,), 1).load(2, 1).tokens.sum())
    simulate = "simulate", "--config", str(config), "--ranks", "2", "--steps", "1", "--shuffler.max-tokens-per-rank"
    assert not asked(*simulate, str(tokens))["notes"]
    (note,) = asked(*simulate, str(tokens // 2 - 5))["notes"]
    assert f"each batch: 1 of 1 steps have a rank above max_tokens_per_rank ({tokens // 2 - 5}), by up to " in note


def test_the_config_s_options_of_the_shuffler_are_the_defaults(tmp_path, asked, mistake):
    config = tmp_path / "run.toml"
    own = '[trainer.shuffler]\nequal_size = false\nslack = 0.2\nmode = "observe"\n'
    config.write_text(CONFIG.format(candidates=3) + own)

    def simulated(*flags):
        answer = asked("simulate", "--config", str(config), "--ranks", "2", "--steps", "3", *flags)
        return *answer["ranks"][0]["ways"][1]["tokens_moved"], answer["advice"]["options"]

    on = "--trainer.enable-balanced-shuffler"
    assert simulated() == ("0.2", f"{on} --trainer.shuffler.mode balance")
    changed = f"{on} --trainer.shuffler.mode balance --trainer.shuffler.equal-size --trainer.shuffler.slack 0.01"
    assert simulated("--shuffler.equal-size", "--shuffler.slack", "0.01") == ("0.01", changed)
    in_windows = CONFIG.format(candidates=3).replace(
        "[dataset]", "enable_balanced_shuffler = true\nshuffle_window = 2\n[dataset]", 1
    )
    config.write_text(in_windows + own)
    (of_ranks,) = asked("simulate", "--config", str(config), "--ranks", "2", "--steps", "4")["ranks"]
    assert [way["window"] for way in of_ranks["ways"]] == [1, 1, 2]
    other = tmp_path / "other.toml"
    other.write_text(CONFIG.format(candidates=3))
    assert simulated("--config", str(other)) == ("0.01", on)  # the last one, as for every option
    config.write_text(CONFIG.format(candidates=3) + own.replace("slack", "slak"))
    said = mistake("simulate", "--config", str(config))
    assert f"{config} [trainer.shuffler]: this field does not exist: slak (write slack)" in said


def test_options_that_gain_nothing_are_named_where_others_gain(tmp_path, asked):
    """Not that no way to distribute the rows gains: the advice was to leave balancing off."""
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(candidates=3) + "[trainer.shuffler]\nmin_gain = 0.9\n")
    simulate = "simulate", "--config", str(config), "--ranks", "2", "--steps", "3"
    answer = asked(*simulate)
    possible = answer["ranks"][0]["ways"][1]["possible_speed_up"]
    text = f"On 2 ranks no plan with these options of the shuffler gains 2 %, of {possible:.2f}× possible: try others"
    assert answer["advice"]["text"].startswith(text) and possible > 1.02 and not answer["advice"]["options"]
    assert "balance each batch" in asked(*simulate, "--shuffler.min-gain", "0")["advice"]["text"]


def test_advice_for_a_config_whose_shuffler_moves_no_row_changes_the_shuffler(tmp_path, asked):
    config = tmp_path / "run.toml"
    config.write_text('shuffler_type = "identity"\n' + CONFIG.format(candidates=3))
    advice = asked("simulate", "--config", str(config), "--ranks", "2", "--steps", "3")["advice"]
    assert advice["options"] == "--trainer.enable-balanced-shuffler --shuffler-type hstu"


@pytest.mark.parametrize(
    "settings",
    [
        "enable_balanced_shuffler = true\nshuffle_window = 4",
        "single_rank_load = true\nbalance_batch = true",
        "balance_sampler = true\nshuffle_window = 4",
        "balance_sampler = true\nbudget_per_rank = 4.0\nshuffler = { equal_size = false }",
    ],
)
def test_advice_replaces_the_config_s_own_way_to_balance(tmp_path, asked, settings):
    """The trainer refused the advised shuffler beside another balancer, and a config's window stayed."""
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(candidates=3).replace("[dataset]", f"{settings}\n[dataset]", 1))
    flags = ["--config", str(config), "--model.prediction-head-arch", "8", "1"]
    answer = asked("simulate", *flags[:2], "--ranks", "2", "--steps", "4")
    assert answer["advice"]["way"] == "each batch"
    assert load_config(TrainConfig, flags + answer["advice"]["options"].split()).trainer.balancing == "batches"
    of_window = read_config_rows(config, None, ShufflerOptions(), (2,), 1).flags(2)
    on = "--trainer.enable-balanced-shuffler --trainer.shuffle-window 2"
    trainer = load_config(TrainConfig, [*flags, *on.split(), *of_window.split()]).trainer
    assert (trainer.balancing, trainer.shuffle_window) == ("windows", 2)


def test_a_config_of_ones_own_model_needs_its_package(tmp_path, mistake):
    (tmp_path / "mine.toml").write_text("hidden_size = 8")
    said = mistake("simulate", "--config", str(tmp_path / "mine.toml"), "--ranks", "2")
    assert "hidden_size (write model.hidden_size); without --model, this is a config of hstu: name your own" in said


def test_a_row_of_semantic_ids_costs_what_the_shuffler_of_the_run_says(tmp_path):
    """Layers and heads, which are most of the work here."""
    config = tmp_path / "run.toml"
    text = CONFIG.format(candidates=3).replace('"random"', '"sid-random"')
    config.write_text(f"{text}[sid]\ncodebook_sizes = [2000, 2000]\n")
    target = load_recipe(None, config, torch.device("cpu"))
    shuffler = target.build_shuffler(balances=True)
    expected = [shuffler.get_workloads(batch) for batch in itertools.islice(target.host_batches(), 6)]
    costs = read_config_rows(config, None, ShufflerOptions(), (2,), 3).costs
    assert costs.tolist() == torch.cat(expected).tolist()
    shuffler.close()
