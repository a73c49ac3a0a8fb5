"""A user's own shuffler, found by name: from a module in the working directory, or from an installed package."""

import json
import sys

import pytest

from commons.distributed.batch_shuffler_factory import BatchShufflerFactory
from commons.pipeline import TrainPipelineFactory
from commons.trainer.config.load import load_config, load_config_file
from commons.user_package import import_user_modules
from hstu.train_config import TrainConfig

MODULE = """
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.batch_shuffler_factory import register_batch_shuffler
{decorator}
class Mine(BaseTaskBalancedBatchShuffler):
    def get_workloads(self, batch):
        return batch.features.lengths()
"""
RUN = {
    "trainer": {"train_batch_size": 1, "eval_batch_size": 1},
    "dataset": {"dataset_name": "random", "max_history_seqlen": 5},
}
FLAGS = [f"--{section}.{name}={value}" for section in RUN for name, value in RUN[section].items()]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory that is on no path, as for a console script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    before = BatchShufflerFactory.list_available().keys(), set(sys.modules)
    yield tmp_path
    for name in BatchShufflerFactory.list_available().keys() - before[0]:
        BatchShufflerFactory.unregister(name)
    for name in set(sys.modules) - before[1]:
        if name.startswith(("our_", "their_")):
            del sys.modules[name]


def write_module(folder, name, registered=None):
    decorator = "" if registered is None else f"@register_batch_shuffler({registered!r})"
    (folder / f"{name}.py").write_text(MODULE.format(decorator=decorator))


def test_a_file_may_name_what_a_flag_imports(here):
    for number, import_flag in enumerate(("--import our_module1 json", "--import=our_module2")):
        write_module(here, f"our_module{number + 1}", f"ours{number}")
        (here / "run.json").write_text(json.dumps(RUN | {"shuffler_type": f"ours{number}"}))
        config = load_config(TrainConfig, ["--config", "run.json", *import_flag.split(), "--trainer.seed", "3"])
        assert config.shuffler_type == f"ours{number}" and f"our_module{number + 1}" in config.imports
        assert BatchShufflerFactory.list_available()[f"ours{number}"].__module__ == f"our_module{number + 1}"
    write_module(here, "our_module3", "ours3")
    (here / "run.json").write_text(json.dumps(RUN | {"shuffler_type": "ours3", "imports": ["our_module3"]}))
    assert load_config_file(TrainConfig, "run.json").imports == ("our_module3",)


def test_a_module_is_imported_before_its_pipeline_is_looked_up(here, monkeypatch):
    """Named by the file itself, as in a run's config.json, or by flags alone."""
    monkeypatch.setattr(TrainPipelineFactory, "_makers", TrainPipelineFactory._makers.copy())
    for name in ("our_first", "our_second"):
        text = f"from commons.pipeline import TrainPipelineFactory\nTrainPipelineFactory.register({name!r}, print)\n"
        (here / f"{name}.py").write_text(text)
    trainer = RUN["trainer"] | {"pipeline_type": "our_first"}
    (here / "run.json").write_text(json.dumps(RUN | {"trainer": trainer, "imports": ["our_first"]}))
    assert load_config(TrainConfig, ["--config", "run.json"]).trainer.pipeline_type == "our_first"
    flags = [*FLAGS, "--trainer.pipeline-type", "our_second", "--import", "our_second"]
    assert load_config(TrainConfig, flags).trainer.pipeline_type == "our_second"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("our_nothing", None, "import names 'our_nothing', which is neither installed nor in .*: correct the name"),
        ("our-shuffler", None, "import names 'our-shuffler'; it takes importable modules"),
        ("our_broken", "import not_there_at_all", r"'our_broken', which cannot be imported \(ModuleNotFoundError:"),
        ("our_typo", "def f(:", r"'our_typo', which cannot be imported \(SyntaxError: "),
        ("our_failure", "1 / 0", r"'our_failure', which cannot be imported \(ZeroDivisionError: "),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(here, name, text, message):
    if text is not None:
        (here / f"{name}.py").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        import_user_modules([name])
    assert "\n" not in str(caught.value)


def install(folder, monkeypatch, entry_points):
    info = folder / "site" / "their_package-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[evenrank.shufflers]", *lines]))
    monkeypatch.syspath_prepend(folder / "site")
    return folder / "site"


def test_an_installed_package_brings_its_shufflers(here, monkeypatch):
    points = {"theirs": "their_class:Mine", "theirs2": "their_module", "torn": "their_torn"}
    points["other"] = "their_class:MODULE"
    site = install(here, monkeypatch, points)
    write_module(site, "their_class")
    write_module(site, "their_module", "theirs2")
    (site / "their_torn.py").write_text("import not_there_at_all")
    assert "theirs" not in BatchShufflerFactory.list_available() and "their_class" not in sys.modules
    shuffler = BatchShufflerFactory.create("theirs")
    assert type(shuffler).__module__ == "their_class"
    shuffler.close()
    assert load_config(TrainConfig, [*FLAGS, "--shuffler-type", "theirs2"]).shuffler_type == "theirs2"
    assert {"theirs", "theirs2"} <= BatchShufflerFactory.list_available().keys()
    for name in ("torn", "other"):
        with pytest.raises(ImportError, match=f"batch shuffler '{name}' is their_.* cannot be imported .*: repair or"):
            BatchShufflerFactory.create(name)
    with pytest.raises(KeyError, match="batch shuffler 'nobody' is not registered"):
        BatchShufflerFactory.create("nobody")
