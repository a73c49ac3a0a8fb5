"""Every fenced block of the documentation does what the text around it says.

`BLOCKS` lists them by page, heading and number, but for pictures, which nobody types; a block that is not listed fails.
Python blocks run as printed on two ranks, after the names that the text has introduced, and an effect is looked at.
Shell blocks run as printed in a folder that looks like a checkout, but for what is stated with its reason.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser

from commons.cli.main import main as evenrank_main
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.perf_model import measurement
from commons.trainer.config.load import load_config
from tests.helpers.documents import documented_names as given
from tests.helpers.documents import documented_pages as pages
from tests.helpers.documents.documented import ROOT, Block, commands_in, documented_blocks, is_excerpt
from tests.helpers.jobs.programs import run_program


@dataclass(frozen=True)
class Python:
    """Runs on two ranks after what `run()` yields, which then looks at what it did. It may be an excerpt, too."""

    run: Callable[[], given.Run]
    excerpt_of: str = ""


@dataclass(frozen=True)
class Shell:
    """Runs in a folder like a checkout."""

    prepare: tuple[str, ...] = ()  # commands that the text has named before
    files: tuple[str, ...] = ()  # what exists afterwards
    more: Mapping[str, str] = field(default_factory=dict)  # flags for commands that have this part
    instead: Mapping[str, str] = field(default_factory=dict)  # patterns in commands, and what stands there instead
    shows: str = ""  # a pattern that the output has
    quick: bool = False  # for `make test`: a figure, a run and its page, data, and what takes no time


FEW_STEPS = "--trainer.max-train-iters 2 --trainer.max-eval-iters 1"  # more take minutes
FEWER_STEPS = {"evenrank simulate": "--steps 8"}  # 128 steps take ten seconds
BRIEFLY = "--trainer.max-train-iters 4 --trainer.log-interval 2 --trainer.max-eval-iters 1"
# Steps of 32 rows take a second.
SMALLER = "--trainer.train-batch-size 4 --trainer.eval-batch-size 4 --trainer.max-eval-iters 1 --model.num-layers 1"
TRAIN = "torchrun --standalone --nproc_per_node=2 -m hstu.train --config hstu/configs/random.toml"
BALANCED = "--trainer.enable-balanced-shuffler --trainer.run-dir runs/balanced"
ML_1M = "python -m benchmarks.raw_data ml-1m --output ml-1m.zip --num-users"  # in the place of the published archive
# Downloads for minutes; ci/test_wheel.sh installs so in a clean environment.
NO_DOWNLOAD = {"pip install": "pip install --quiet --no-index --no-deps --no-build-isolation --dry-run"}
OF_STACK = NO_DOWNLOAD | {"torchrec==1.8.0": f"torchrec=={version('torchrec')}"}  # STACK=oldest and newest have another
CALIBRATE = {"evenrank calibrate": "--num-mixes 24 --repeats 1"}  # measures for half a minute

# Files of which blocks may be excerpts that are not listed: test_examples.py and tests/extras run them on two ranks.
EXAMPLE = "examples/torchrec_dlrm.py"
EXCERPTS_OF = (
    EXAMPLE,
    *(f"tests/extras/{name}.py" for name in ("accelerated_rows", "balanced_trainer", "balanced_lightning")),
)

BLOCKS: dict[tuple[str, str, int], Python | Shell] = {
    ("README.md", "Install", 0): Shell(instead=OF_STACK, shows="torchrec"),
    ("README.md", "Use it in your TorchRec script", 0): Python(given.all_rows_were_trained),
    ("README.md", "A shuffler for your own model", 0): Python(given.costs_are_those_of_a_transformer),
    ("README.md", "What it gains", 0): Shell(
        quick=True, more=FEWER_STEPS, files=("gain.html",), shows=r"64 ranks × 32 rows[\s\S]*constant cost"
    ),
    ("docs/quickstart.md", "Try it", 0): Shell(
        quick=True,
        instead={"make": "make -n"},  # trains for two minutes, which test_recipe.py does in parts; runs this suite
        shows=r"ci/demo\.sh [\s\S]*-m pytest",
    ),
    ("docs/quickstart.md", "Install", 0): Shell(instead=NO_DOWNLOAD),
    ("docs/quickstart.md", "Install", 1): Shell(instead=OF_STACK),
    ("docs/quickstart.md", "A first run", 0): Shell(
        quick=True,
        more={"hstu.train": FEW_STEPS},
        files=("runs/as-loaded/summary.json", "runs/balanced/log.jsonl"),
        shows=r"runs/as-loaded +runs/balanced",
    ),
    ("docs/torchrec_model.md", "The pipeline", 0): Python(given.all_rows_were_trained, excerpt_of=EXAMPLE),
    ("docs/torchrec_model.md", "The batch", 0): Python(pages.clicks_went_with_their_labels),
    ("docs/torchrec_model.md", "A batch of dicts", 0): Python(pages.groups_went_with_their_rows),
    ("docs/torchrec_model.md", "Evaluation and checkpoints", 0): Python(given.segments_were_evaluated),
    ("docs/torchrec_model.md", "Other pipelines", 0): Python(given.pipeline_trains),
    ("docs/pipelines.md", "StagedTrainPipeline", 0): Python(given.staged_batches_hold_every_row),
    ("docs/own_shuffler.md", "A shuffler for your own model", 0): Python(given.mine_is_registered),
    ("docs/own_shuffler.md", "Rows that stay together", 0): Python(given.users_are_together),
    ("docs/own_shuffler.md", "Cost from the model's dimensions", 0): Python(given.mine_is_registered),
    ("docs/options.md", "Look first", 0): Shell(more={"hstu.train": BRIEFLY}, shows="would make the slowest rank"),
    ("docs/options.md", "ShufflerOptions", 0): Python(given.options_are_those_of_the_shuffler),
    ("docs/cost_model.md", "From a training config", 0): Shell(
        more=CALIBRATE | {"--ranks 8 16": "--steps 2", "--figure": "--steps 2", "--window": "--steps 8"},
        files=("my-gpu.toml", "gain.png"),
        shows=r"speed-up[\s\S]*held-out error[\s\S]*ms",
    ),
    ("docs/command_line.md", "The command line", 0): Shell(
        prepare=(f"{ML_1M} 80", f"{TRAIN} {BRIEFLY} --trainer.run-dir runs/as-loaded", f"{TRAIN} {BRIEFLY} {BALANCED}"),
        more=CALIBRATE | FEWER_STEPS,
        files=("my-gpu.toml", "data/sids.parquet"),
        shows=r"torchrec +ok[\s\S]*On 64 ranks[\s\S]*different codes[\s\S]*as-loaded",
    ),
    ("docs/command_line.md", "Completion", 0): Shell(),
    ("docs/beyond_one_batch.md", "A window", 0): Python(given.windows_hold_every_row),
    ("docs/beyond_one_batch.md", "Lengths known beforehand", 0): Python(given.every_row_is_read_once),
    ("docs/llm.md", "Chunks of a batch", 0): Python(pages.predictions_in_order),
    ("docs/llm.md", "Between ranks", 0): Python(pages.results_came_home),
    ("docs/llm.md", "Balance per module", 0): Python(pages.gradients_are_those_of_rows_that_stay),
    ("docs/llm.md", "Micro-batches under a token budget", 0): Python(pages.whole_gradient),
    ("docs/llm.md", "Padded micro-batches", 0): Python(pages.padded_groups_hold_every_row),
    ("docs/llm.md", "One plan for ranks and micro-batches", 0): Python(pages.even_by_index),
    ("docs/data.md", "The public data sets", 0): Shell(
        prepare=(f"{ML_1M} 80",),
        more={"hstu.train": FEW_STEPS},
        files=("data/ml-1m.parquet/_manifest.json", "runs/train/log.jsonl"),
    ),
    ("docs/data.md", "Parquet files of your own", 0): Shell(
        quick=True, more={"hstu.train": FEW_STEPS}, files=("data/parquet.parquet/_manifest.json",)
    ),
    ("docs/data.md", "Semantic IDs, for SID-GR", 0): Shell(
        prepare=(f"{ML_1M} 80",),
        more={"sid_gr.train": FEW_STEPS},
        files=("data/sids.parquet", "runs/sid-train/log.jsonl"),
    ),
    ("docs/data.md", "The trained weights", 0): Python(given.weights_are_those_of_the_checkpoint),
    ("docs/dlrm.md", "Does it pay?", 0): Shell(files=("fixed.csv",), shows=r"which gains at\s+most 1\.00×: leave"),
    ("docs/dlrm.md", "Does it pay?", 1): Shell(
        shows=r"windows of 2 batches: 2\.00×[^(]*\(1\.82×\s+batch\s+by batch[\s\S]*balance each batch: 1\.10×"
    ),
    # test_examples.py runs it.
    ("docs/dlrm.md", "The script", 0): Shell(instead={r"torchrun --\S+ --\S+": "ls"}),
    ("docs/dlrm.md", "What a row costs", 0): Python(pages.lookups_are_balanced),
    ("docs/dlrm.md", "What it cannot state", 1): Python(pages.padding_is_stated),
    ("docs/from_recsys_examples.md", "In Python", 0): Python(pages.rows_with_their_workloads),
    ("docs/from_verl.md", "The batch of a step", 0): Python(pages.partitions_are_even),
    ("docs/from_verl.md", "The batch of a step", 1): Python(pages.mini_batches_are_even),
    ("docs/from_verl.md", "Micro-batches under a token budget", 0): Python(pages.the_budget_is_kept),
    ("docs/from_areal.md", "Allocators", 0): Python(pages.groups_are_as_printed),
    ("docs/from_areal.md", "Micro-batches", 0): Python(pages.pairs_stayed_together),
    ("docs/from_areal.md", "Rollouts of all ranks", 0): Python(pages.rewards_came_home),
    ("docs/launch.md", "torchrun", 0): Shell(more={"hstu.train": FEW_STEPS}, files=("runs/random/summary.json",)),
    # These two need several machines: the flags are parsed.
    ("docs/launch.md", "torchrun", 1): Shell(quick=True),
    ("docs/launch.md", "Restart", 1): Shell(quick=True),  # trainer/test_restart.py loses one of two agents
    # These two need Slurm and a cluster; test_examples.py runs what they name.
    ("docs/launch.md", "Slurm", 0): Shell(quick=True, instead={"sbatch": "bash -n"}),
    ("docs/launch.md", "Kubernetes", 0): Shell(quick=True, instead={"kubectl apply -f": "ls"}),
    ("docs/launch.md", "TorchX", 0): Shell(instead={".+": "true"}),  # extras/test_torchx.py runs what is printed
    # extras/test_ray.py runs it.
    ("docs/launch.md", "Ray Train", 0): Shell(more={"ray_train.py": "--help"}, instead=OF_STACK, shows="--num-workers"),
    ("docs/launch.md", "From a script or a notebook", 0): Python(given.one_rank_trained),
    ("docs/launch.md", "Restart", 0): Shell(
        more={"hstu.train": FEW_STEPS}, files=("runs/restarted/checkpoints/step_00000002/state.json",)
    ),
    # Takes a minute; test_ci_scripts.py runs it.
    ("docs/launch.md", "Try two hosts on one machine", 0): Shell(
        instead={"hosts.sh .*": "hosts.sh --help"}, shows="name"
    ),
    ("docs/observe.md", "Traces", 0): Shell(
        more={"hstu.train": SMALLER}, files=("runs/traced/trace-rank0.json", "runs/traced/trace-rank1.json")
    ),
    ("docs/observe.md", "Sinks", 0): Shell(more={"hstu.train": SMALLER}, files=("runs/scraped/log.jsonl",)),
    ("docs/observe.md", "Sinks", 1): Python(given.its_stats_are_in_the_file),
    ("docs/observe.md", "A slow rank", 0): Python(given.speeds_are_known),
    ("docs/speeds.md", "Less work for a slow rank", 0): Python(given.speeds_are_measured),
    ("docs/speeds.md", "Less work for a slow rank", 1): Python(given.speeds_are_known),
    ("docs/simulate.md", "What balancing would gain, from lengths alone", 0): Shell(
        more=FEWER_STEPS, shows=r"64 ranks × 32 rows[\s\S]*constant cost[\s\S]*--trainer\.shuffle-window"
    ),
    ("docs/simulate.md", "What balancing would gain, from lengths alone", 1): Shell(
        prepare=("seq 1 7 60000 > lengths.csv",),  # the user's
        more={"evenrank simulate": "--steps 8 --window 2"},
        instead=NO_DOWNLOAD,
        files=("gain.html",),
        shows="written: gain.html",
    ),
    ("docs/simulate.md", "The published case", 0): Shell(shows=r"refined +1\.00\d +\S+ +1\.61×"),
    ("docs/simulate.md", "Against a measured run", 0): Shell(
        # In the place of the demo's data, which take a minute.
        prepare=(f"{ML_1M} 200", "evenrank preprocess ml-1m --source ml-1m.zip --output runs/demo/data"),
        shows=r'"way": "refined"[^{]*"speed_up_median": 1\.',
    ),
    ("docs/report.md", "What balancing gained, from a run's log", 0): Shell(
        prepare=tuple(f"{TRAIN} {FEW_STEPS} {flags}" for flags in ("--trainer.run-dir runs/as-loaded", BALANCED)),
        files=("report.html",),
        shows=r"each batch[\s\S]*possible[\s\S]*beside the first[\s\S]*written: report\.html",
    ),
    ("docs/troubleshooting.md", "Troubleshooting", 0): Shell(shows="fbgemm"),
    ("docs/troubleshooting.md", "It hangs", 1): Shell(
        more={"hstu.train": FEW_STEPS}, files=("runs/short-timeout/summary.json",)
    ),
    ("docs/troubleshooting.md", "Nothing is gained", 0): Shell(
        quick=True, shows="one sample alone is more than an even share"
    ),
    # `pytest` would run this suite.
    ("CONTRIBUTING.md", "Run", 0): Shell(instead=OF_STACK | {"pytest .*": "pytest --version"}),
    ("docs/reliability.md", "Restart within the process", 0): Python(given.abort_ends_a_wait),
    ("CONTRIBUTING.md", "Test", 0): Python(given.ranks_add_up),
    ("CONTRIBUTING.md", "Add a model", 0): Python(given.recipe_trains),
}


@pytest.fixture(scope="module")
def blocks():
    return documented_blocks()


def test_every_block_is_listed_for_what_it_is_or_an_excerpt(blocks):
    files = {path: (ROOT / path).read_text(encoding="utf-8") for path in EXCERPTS_OF}
    typed = {key: block for key, block in blocks.items() if block.language not in ("", "text")}
    rest = [block for key, block in typed.items() if key not in BLOCKS]
    unlisted = [block for block in rest if not any(is_excerpt(block.text, file) for file in files.values())]
    assert not unlisted, f"say in BLOCKS what the reader of {unlisted} types, and what comes of it"
    assert not BLOCKS.keys() - typed.keys(), "there is no such block any more"
    for key, listed in BLOCKS.items():
        block, kind = blocks[key], {"python": Python, "bash": Shell}.get(blocks[key].language, object)
        assert isinstance(listed, kind), f"{block} is {block.language!r}"
        path = listed.excerpt_of if isinstance(listed, Python) else ""
        assert not path or is_excerpt(block.text, files[path]), block


def test_python_blocks_run_as_printed(two_ranks, blocks):
    keys = [key for key, listed in BLOCKS.items() if isinstance(listed, Python)]
    assert two_ranks.run(_run_python, [blocks[key] for key in keys]) == [len(keys)] * 2


def _run_python(blocks: list[Block]) -> int:
    for block in blocks:
        listed, printed = BLOCKS[block.key], io.StringIO()
        run = listed.run()
        names = {"__name__": "__main__"} | next(run)
        # Empty lines in front, so that a traceback shows the line of the page.
        code = compile("\n" * (block.line - 1) + block.text, block.key[0], "exec", dont_inherit=True)
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, names)
            with contextlib.suppress(StopIteration):
                run.send(names | {"printed": printed.getvalue()})
        except Exception as error:
            raise AssertionError(f"{block}: {type(error).__name__}: {error}") from error
        finally:
            for value in names.values():
                if isinstance(value, BaseTaskBalancedBatchShuffler):
                    value.close()
    return len(blocks)


SHELL_BLOCKS = [
    pytest.param(key, id=f"{key[1]} {key[2]}", marks=[pytest.mark.slow] * (not listed.quick))
    for key, listed in BLOCKS.items()
    if isinstance(listed, Shell)
]


@pytest.mark.parametrize("key", SHELL_BLOCKS)
def test_shell_blocks_run_as_printed(two_ranks, blocks, key, tmp_path, monkeypatch):
    listed, text = BLOCKS[key], blocks[key].text
    printed = commands_in(text)
    for part in (*map(re.escape, listed.more), *listed.instead):
        assert any(re.search(part, command) for command in printed), f"{blocks[key]} has no {part}"
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name not in ("data", "runs", "build", "dist"):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measurement, "time_step", _time_by_size)
    shown = ""
    for command in (*listed.prepare, *printed):
        if command in printed:
            for pattern, other in listed.instead.items():
                command = re.sub(pattern, other, command, count=1, flags=re.DOTALL)
            command = " ".join([command, *(flags for part, flags in listed.more.items() if part in command)])
        shown += _run_command(command, two_ranks)
    assert re.search(listed.shows, shown), shown
    assert not [name for name in listed.files if not (tmp_path / name).is_file()], shown


def _time_by_size(target: measurement.CostTarget, batch: Any) -> float:
    """A step is run, but takes the time that its size says: a busy machine must not decide a test."""
    target.train_step(batch)
    rows, tokens, pairs = measurement.batch_size_of(target, batch)
    return 1.0 + 0.1 * rows + 0.01 * tokens + 1e-4 * pairs


def _run_command(command: str, two_ranks: Any) -> str:
    """Run one command in the working directory and return what it shows; AssertionError if it fails.

    `evenrank` and a training under torchrun run in processes that have TorchRec already, which takes seconds to
    import: by what the command's script calls, with what torchrun would hand on. hstu/test_train.py launches them. For
    torchrun on several hosts the flags are parsed, and the config is made.
    """
    program, *arguments = command.split("<<")[:1] if "<<" in command else shlex.split(command)
    name = Path(program).name
    if name == "evenrank":
        output, threads = io.StringIO(), torch.get_num_threads()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = evenrank_main(arguments)
        torch.set_num_threads(threads)
        assert status == 0, f"{command}: {output.getvalue()}"
        return output.getvalue()
    if name == "torchrun":
        launch = get_args_parser().parse_args(arguments)
        script, flags = launch.training_script, launch.training_script_args
        assert launch.module and (launch.standalone, launch.nproc_per_node) in ((True, "2"), (False, "8"))
        if launch.standalone:
            two_ranks.run(given.train_in, str(Path.cwd()), script, flags)
        else:
            assert load_config(importlib.import_module(script).TrainConfig, flags).trainer.run_dir
        return ""
    env = {"PATH": f"{Path.cwd() / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"}
    done = run_program("bash", "-euo", "pipefail", "-c", command, cwd=Path.cwd(), env=env, timeout=400)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def test_an_excerpt_is_literal_but_for_its_indentation():
    source = "import a\n\n\ndef f():\n    x = 1\n\n    if x:\n        y()\n"
    assert is_excerpt("x = 1\n\nif x:\n    y()\n", source) and is_excerpt("import a", source)
    assert not is_excerpt("x = 1\nif x:\n    y()\n", source)  # a line is missing
    assert not is_excerpt("if x:\n  y()\n", source) and not is_excerpt("x = 2", source) and not is_excerpt("", source)
