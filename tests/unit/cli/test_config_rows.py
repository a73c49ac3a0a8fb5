"""`evenrank simulate` and `evenrank calibrate` on a config of HSTU, and on a model of the user's own."""

import itertools
import re
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from commons.cli import recipes
from commons.cli.recipes import load_recipe, read_config_rows
from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.random.dataset import user_like_dataset
from commons.distributed.options import ShufflerOptions
from commons.perf_model import measurement
from commons.perf_model.calibration import load_calibration
from commons.perf_model.task_estimator import SelfAttentionTask
from commons.trainer.recipe import Recipe
from commons.user_package import import_user_module
from tests.helpers.datasets.movielens import write_zip
from tests.helpers.documents.pages import read_page
from tests.helpers.jobs.training_configs import CONFIG
from tests.helpers.models.calibrations import make_calibration

# Lengths of rows come from lengths.txt: a line is a batch.
RECIPE = """
from pathlib import Path

import torch

from commons.perf_model.measurement import RowTokens
from commons.perf_model.task_estimator import SelfAttentionTask
from commons.trainer import DatasetArgs, TrainerArgs
from commons.trainer.recipe import Recipe
from hstu.train_config import TrainConfig
from mine.settings import BATCH_SIZE


class Mine(Recipe):
    task, draws_per_rank = SelfAttentionTask(8, 1, 8), False

    def build_model(self):
        raise NotImplementedError

    def make_batch(self, lengths):
        return torch.tensor(lengths)

    def train_step(self, batch):
        pass

    def row_tokens(self, batch):
        return RowTokens(batch)

    def host_batches(self):
        lines = Path("lengths.txt").read_text().splitlines()
        return (torch.tensor([int(length) for length in line.split()]) for line in lines)

    @classmethod
    def load(cls, path, device):
        config = TrainConfig(TrainerArgs(BATCH_SIZE, 4), DatasetArgs("random", 256), shuffler_type="identity")
        return cls(config, device)


RECIPE = Mine
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A working directory with a config, data and the package `mine`, which is nowhere else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "settings.py").write_text("BATCH_SIZE = 4\n")
    (tmp_path / "mine" / "recipe.py").write_text(RECIPE)
    (tmp_path / "run.toml").write_text("[dataset]\n")
    (tmp_path / "lengths.txt").write_text("10 20 30 40\n" * 3 + "50 60 70 80\n" * 3 + "90\n")
    before = list(sys.path)
    yield ["--model", "mine", "--config", "run.toml"]
    assert sys.path == before
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


@pytest.fixture
def config(tmp_path):
    """The config of an HSTU run."""
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(candidates=3))
    return str(path)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def clock(monkeypatch):
    """Steps are run, but take what a function of rows, tokens and pairs says."""
    cost = {"ms": lambda rows, tokens, pairs: 1 + rows + 0.01 * tokens + 1e-4 * pairs}

    def time_step(target, batch):
        target.train_step(batch)
        return cost["ms"](*measurement.batch_size_of(target, batch))

    monkeypatch.setattr(measurement, "time_step", time_step)
    return cost


def test_data_that_are_too_short_are_not_repeated(mine, asked, mistake):
    answer = asked("simulate", *mine, "--ranks", "2", "4", "8", "--steps", "3")
    notes = " ".join(answer["notes"])
    assert [(each["ranks"], each["steps"]) for each in answer["ranks"]] == [(2, 3), (4, 1)]
    assert "4 ranks: 1 of 3 steps. There are 25 rows, 3 steps train 48; no row is used twice" in notes
    assert "8 ranks: 0 of 3 steps. There are 25 rows, 3 steps train 96" in notes and "2 ranks: " not in notes
    error = mistake("simulate", *mine, "--ranks", "16", "8", "--figure", "gain.png")
    assert "run.toml has 25 rows, a step of 8 ranks needs 32: lower --ranks" in error
    assert not Path("gain.png").exists()


def test_windows_are_beside_one_another(mine, tmp_path, asked, mistake):
    (tmp_path / "lengths.txt").write_text("900 20 10 10\n10 10 10 10\n" * 4)
    flags = ["--ranks", "2", "4", "--steps", "4", "--window", "2", "4", "--figure", "g.png", "--html", "g.html"]
    answer, (_, words) = asked("simulate", *mine, *flags), read_page(tmp_path / "g.html")
    of_two, of_four = answer["ranks"]
    assert of_two["advice"]["text"] in words and of_four["advice"]["text"] in words
    for way in (*of_two["ways"][1:], *of_four["ways"][1:]):
        assert way["possible_speed_up"] >= way["speed_up"] >= 1 and f"{way['speed_up']:.2f}×" in words
    gains = {way["way"]: way["speed_up"] for way in of_two["ways"]}
    assert list(gains) == ["as loaded", "each batch", "window of 2", "window of 4"]
    assert gains["each batch"] < gains["window of 2"] <= gains["window of 4"]
    # Of four ranks there are two steps, too few for a window of four.
    assert [way["window"] for way in of_four["ways"]] == [1, 1, 2]
    notes = " ".join(answer["notes"])
    assert "4 ranks: 2 of 4 steps." in notes and "2 ranks: in 4 of 4 steps one sample" in notes
    assert Path("g.png").stat().st_size > 10_000
    for window in ("0", "5"):
        error = mistake("simulate", *mine, "--ranks", "2", "--steps", "4", "--window", window)
        assert f"window is ({window},) and steps is 4" in error


@pytest.fixture
def of_twelve(tmp_path):
    """The config of a run whose ranks share batches of 12 rows; without ranks, a batch has 8."""
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(candidates=0).replace("[dataset]", "global_batch_size = 12\n[dataset]", 1))
    return str(path)


def test_a_global_batch_is_shared_by_the_ranks(of_twelve, asked, mistake):
    simulate = ["simulate", "--config", of_twelve, "--steps", "3", "--ranks"]
    (of_ranks,) = asked(*simulate, "4")["ranks"]
    assert (of_ranks["batch_size"], of_ranks["steps"]) == (3, 3)
    assert "global_batch_size is 12 and --ranks is 2 4; " in mistake(*simulate, "2", "4")
    assert "global_batch_size is 12, and 5 ranks share the data; " in mistake(*simulate, "5")


def test_calibrate_measures_a_rank_s_part_of_a_global_batch(tmp_path, monkeypatch, of_twelve, told, mistake, clock):
    measured = []
    clock["ms"] = lambda rows, tokens, pairs: measured.append(rows) or 1 + rows + 0.01 * tokens + 1e-4 * pairs
    monkeypatch.setattr(Recipe, "train_step", lambda self, batch: None)
    command = ["calibrate", "--config", of_twelve, "--output", str(tmp_path / "c.toml"), "--repeats", "1"]
    told(*command, "--ranks", "12")
    assert set(measured) == {1, 2}  # up to twice the one row of a rank
    assert "global_batch_size is 12 and --ranks is not given; " in mistake(*command)
    assert "global_batch_size is 12, and 5 ranks share the data; " in mistake(*command, "--ranks", "5")
    assert "ranks is 0; it must be an integer of at least 1" in mistake(*command, "--ranks", "0")


def test_advice_names_the_options_that_were_simulated(mine, tmp_path, asked):
    (tmp_path / "lengths.txt").write_text("900 20 10 10\n10 10 10 10\n" * 4)
    flags = ["--shuffler.no-equal-size", "--shuffler.slack", "0.0", "--ranks", "2", "--steps", "4"]
    advice = asked("simulate", *mine, *flags, "--window", "2")["advice"]
    own = "--shuffler-type hstu --trainer.shuffler.no-equal-size --trainer.shuffler.slack 0.0"
    assert advice["options"] == f"--trainer.enable-balanced-shuffler --trainer.shuffle-window 2 {own}"
    code = "windowed_iter(iter(dataloader), shuffler, window=2)"
    assert advice["code"] == f"{code}  # ShufflerOptions(equal_size=False, slack=0.0)"
    assert "× batch by batch); which rows" in advice["text"]


def test_nothing_of_the_working_directory_hides_what_is_installed(mine, tmp_path, monkeypatch):
    (tmp_path / "colorsys.py").write_text("raise RuntimeError\n")
    (tmp_path / "lonely_module_of_mine.py").write_text("import colorsys\n")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert import_user_module("lonely_module_of_mine").colorsys.rgb_to_hls
    with pytest.raises(ModuleNotFoundError, match="no_module_anywhere"):
        import_user_module("no_module_anywhere")
    del sys.modules["lonely_module_of_mine"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("settings.py", "import nowhere_to_be_found\n", "cannot be imported (No module named 'nowhere_to_be_found')"),
        ("settings.py", "def broken(:\n", "cannot be imported (invalid syntax (settings.py, line 1))"),
        ("settings.py", "", "cannot be imported (cannot import name 'BATCH_SIZE'"),
        ("recipe.py", "", "module mine.recipe has no RECIPE, the model's class derived from Recipe: add it"),
        ("recipe.py", None, "there is no module mine.recipe, neither installed nor in"),
    ],
)
def test_a_package_with_mistakes_is_one_line(mine, tmp_path, mistake, name, text, message):
    path = tmp_path / "mine" / name
    path.unlink() if text is None else path.write_text(text)
    assert message in mistake("simulate", *mine)


@pytest.fixture
def calibrate(told, mine):
    """What `evenrank calibrate` prints, with single spaces."""
    flags = ["--output", "c.toml", "--num-mixes", "40"]
    return lambda: " ".join(told("calibrate", *mine, *flags).split())


def test_calibrate_ends_with_a_verdict(calibrate, clock):
    assert "Use it: its error is more than 100 times smaller than that of predictions from operations" in calibrate()
    jitter = itertools.cycle([0.99, 1.02, 0.97, 1.01, 1.03, 0.98, 1.04])
    exact = clock["ms"]
    clock["ms"] = lambda *size: exact(*size) * next(jitter)
    assert re.search(r"Use it: its error is \d+\.\d times smaller .* on held-out batches", calibrate())
    flops = SelfAttentionTask(8, 1, 8).forward_flops
    clock["ms"] = lambda rows, tokens, pairs: 1 + flops(tokens, pairs) * 1e-5
    assert "It is not better than predictions from operations: 0.0% instead of 0.0%" in calibrate()
    noise = np.random.default_rng(0)
    clock["ms"] = lambda rows, tokens, pairs: (1 + flops(tokens, pairs) * 1e-5) * noise.uniform(0.8, 1.2)
    asked = re.search(r"It may not be better than .*: .* --num-mixes (\d+) to decide \((\d+) more\)", calibrate())
    assert asked and int(asked[1]) == 40 + int(asked[2])


def test_calibrate_then_simulate(tmp_path, told, asked, config, clock):
    output, figure = tmp_path / "out" / "c.toml", tmp_path / "out" / "gain.png"
    flags = ["--config", config, "--output", str(output), "--num-mixes", "24", "--repeats", "1"]
    assert "held-out error" in told("calibrate", *flags)
    calibration = load_calibration(output)
    assert calibration.model["hidden_size"] == 32 and calibration.device.threads == 1
    assert calibration.quality.num_measurements == 24
    assert calibration.coefficients == pytest.approx((1.0, 1.0, 0.01, 1e-4))
    flags = ["simulate", "--config", config, "--ranks", "2", "--steps", "3"]
    (of_ranks,) = asked(*flags, "--shuffler.calibration", str(output), "--figure", str(figure))["ranks"]
    target = load_recipe(None, Path(config), torch.device("cpu"))
    sizes = [measurement.batch_size_of(target, batch) for batch in itertools.islice(target.host_batches(), 6)]
    ms = np.array([clock["ms"](*size) for size in sizes]).reshape(3, 2)  # steps, ranks
    assert of_ranks["ways"][0]["step_ms"] == pytest.approx(ms.max(axis=1).mean(), rel=1e-4)
    assert re.search("of a whole step, by the calibration(?!.* gains less)", of_ranks["advice"]["text"])
    assert figure.stat().st_size > 5000
    plain = asked(*flags)
    assert plain["ranks"][0]["ways"][0]["step_ms"] is plain["lengths"]["rows"] is None  # random data have no end


NO_GPU = [] if torch.cuda.is_available() else [("calibrate", ["--device", "cuda"], "no GPU that torch can use")]


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("calibrate", ["--output", "c.json"], "let it end in .toml"),
        ("calibrate", ["--model", "no_such_package"], "there is no module no_such_package.recipe"),
        ("calibrate", ["--model", "commons"], "there is no module commons.recipe"),
        ("calibrate", ["--config", "none.toml"], "none.toml does not exist"),
        ("calibrate", ["--config", "hstu"], "hstu is a folder; --config names the TOML or YAML file"),
        ("calibrate", ["--num-mixes", "15"], "num_mixes is 15; a fit needs at least 16: raise --num-mixes"),
        ("calibrate", ["--repeats", "0"], "repeats is 0"),
        ("calibrate", ["--threads", "0"], "threads is 0"),
        ("calibrate", ["--seed", "-1"], "seed is -1"),
        ("calibrate", ["--model", "../x"], "it names an importable package"),
        ("calibrate", ["--output", "/dev/null/c.toml"], "/dev/null"),
        ("simulate", ["--shuffler.calibration", "none.toml"], "none.toml does not exist"),
        ("simulate", ["--shuffler.calibration", "hstu"], "hstu is a folder; `evenrank calibrate` writes"),
        ("simulate", ["--shuffler.mode", "observe"], "shuffler.mode is 'observe'"),
        *NO_GPU,
    ],
)
def test_mistakes_are_one_line(tmp_path, mistake, config, command, flags, message):
    needed = {"calibrate": ["--output", str(tmp_path / "c.toml")], "simulate": ["--ranks", "2", "--steps", "1"]}
    assert message in mistake(command, "--config", config, *needed[command], *flags)


def test_simulate_and_calibrate_know_the_model_by_the_data_set(tmp_path, monkeypatch):
    asked = []
    fake = types.SimpleNamespace(RECIPE=Recipe)
    monkeypatch.setattr(Recipe, "load", lambda config, device: None)
    monkeypatch.setattr(recipes, "import_user_module", lambda name: asked.append(name) or fake)
    config = tmp_path / "run.toml"
    for name in ("sid-ml-1m", "sid", "sid-random", "ml-1m", "random"):
        config.write_text(f'[dataset]\ndataset_name = "{name}"\n')
        load_recipe(None, config, torch.device("cpu"))
    config.write_text('dataset = "sid"\n')
    load_recipe(None, config, torch.device("cpu"))
    load_recipe("sid_gr", config, torch.device("cpu"))
    assert asked == ["sid_gr.recipe"] * 3 + ["hstu.recipe"] * 3 + ["sid_gr.recipe"]


def test_random_data_are_those_of_training_and_have_no_end(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(candidates=3))  # five batches
    target = load_recipe("hstu", config, torch.device("cpu"))
    read = [batch.features.values().tolist() for batch in itertools.islice(target.host_batches(), 12)]
    share = {"max_history_seqlen": 64, "max_num_candidates": 3, "batch_size": 8, "world_size": 4, "seed": 2 * 1234}
    ranks = [user_like_dataset(num_batches=3, rank=rank, **share) for rank in range(4)]
    assert read == [ranks[rank][step].features.values().tolist() for step in range(3) for rank in range(4)]


def test_files_are_dealt_to_ranks_as_their_loaders_deal_them(tmp_path, generated):
    """The loads of the simulated ranks are those of the batches that the ranks' own loaders give."""
    for shuffle in ("false", "true"):
        config = tmp_path / "run.toml"
        own = f'dataset_name = "ml-1m"\ndataset_path = "{generated}"\nshuffle = {shuffle}'
        text = CONFIG.format(candidates=0).replace("num_batches = 5\n", "").replace("= 64", "= 3000")
        config.write_text(text.replace('dataset_name = "random"', own))
        target = load_recipe("hstu", config, torch.device("cpu"))
        for num_ranks in (2, 3):
            source = read_config_rows(config, "hstu", ShufflerOptions(), (num_ranks,), 150)
            steps = len(target.single_loader.dataset) // (8 * num_ranks)
            largest = [0] * steps
            for rank in range(num_ranks):
                loader = get_data_loader(
                    "ml-1m",
                    dataset_path=generated,
                    batch_size=8,
                    max_history_seqlen=3000,
                    rank=rank,
                    world_size=num_ranks,
                    shuffle=shuffle == "true",
                    **target.data_options(),
                )
                for step, batch in enumerate(itertools.islice(loader, steps)):
                    load = int(target.task.get_workloads(*target.row_tokens(batch)).sum())
                    largest[step] = max(largest[step], load)
            loads = source.load(num_ranks, steps).as_loaded.loads
            assert loads.max(axis=1).tolist() == largest, (shuffle, num_ranks)


def test_no_command_overwrites_what_it_reads(here, monkeypatch, mistake):
    monkeypatch.setattr("commons.cli.calibrate.load_recipe", None)  # no work is done
    config, histories, measured = here / "run.toml", here / "h.parquet", here / "c.svg"
    config.write_text(CONFIG.format(candidates=0))
    pq.write_table(pa.table({"item_id": [[1, 2], [2, 3]]}), histories)
    make_calibration().save(measured)
    run = ["--config", str(config)]
    for source, command, option in (
        (config, ["calibrate", *run, "--output"], "--config"),
        (histories, ["make-sids", "parquet", "--source", str(histories), "--output"], "--source"),
        (measured, ["simulate", *run, "--shuffler.calibration", str(measured), "--figure"], "--shuffler.calibration"),
    ):
        before, (soft, hard) = source.read_bytes(), (here / f"{kind}{source.suffix}" for kind in ("soft", "hard"))
        soft.symlink_to(source)
        hard.hardlink_to(source)
        for output in (source, here / ".." / here.name / source.name, soft, hard):
            error = mistake(*command, str(output))
            assert f"{command[-1]} is {output}, which {option} names too; no command overwrites its input" in error
            assert source.read_bytes() == before and output.samefile(source)


def test_nothing_else_is_overwritten(mine, tmp_path, mistake, clock):
    other = tmp_path / "other.toml"
    other.write_text("[trainer]\n")
    assert "exists and is not a calibration of this kind" in mistake("calibrate", *mine, "--output", "other.toml")
    assert other.read_text() == "[trainer]\n"
    other.unlink()
    other.mkdir()
    assert "is a folder" in mistake("calibrate", *mine, "--output", "other.toml") and other.is_dir()
    pq.write_table(pa.table({"item_id": [[1, 2], [2, 3]]}), "a.parquet")
    pq.write_table(pa.table({"mine": [1]}), "b.parquet")
    error = mistake("make-sids", "parquet", "--source", "a.parquet", "--output", "b.parquet")
    assert "b.parquet exists and is not a map of semantic IDs of this kind" in error


def test_a_failed_calibration_leaves_what_was_there(mine, tmp_path, mistake, calibrate, clock):
    (tmp_path / "c.toml").touch()  # an empty file may be replaced
    calibrate()
    written = (tmp_path / "c.toml").read_bytes()
    clock["ms"] = lambda *size: 5.0
    for output in ("c.toml", "new/c.toml"):
        assert "explain 0% of the variation" in mistake("calibrate", *mine, "--output", output, "--num-mixes", "40")
    assert (tmp_path / "c.toml").read_bytes() == written and not (tmp_path / "new").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_preprocess_does_not_replace_the_folder_that_holds_its_source(here, told, mistake):
    source, inside = write_zip(here / "ml-1m.zip"), here / "ml-1m.parquet" / "ml-1m.zip"
    told("preprocess", "ml-1m", "--source", str(source), "--output", str(here))
    source.rename(inside)
    source.symlink_to(inside)
    for path in (inside, source):
        error = mistake("preprocess", "ml-1m", "--source", str(path), "--output", str(here))
        assert "the data set would replace this folder: give another output" in error
    assert inside.stat().st_size > 100
