"""The `evenrank` command: results on stdout, mistakes in one line on stderr with exit status 2, and its completion."""

import contextlib
import io
import os
import re
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest

from benchmarks.raw_data.movielens import generate_movielens
from commons.cli.main import _parse, main
from commons.cli.preprocess import Preprocess
from commons.datasets.sequences.file import SequenceFile
from commons.version import __version__
from tests.helpers.datasets.movielens import RATINGS, write_zip
from tests.helpers.jobs.programs import run_program
from tests.helpers.jobs.run_logs import lines_of, make_steps, write_run, write_unlooked

COMMANDS = {"calibrate", "doctor", "make-sids", "preprocess", "report", "simulate"}


def test_preprocess(tmp_path, told):
    source, output = tmp_path / "ml-1m.zip", tmp_path / "data"
    generate_movielens(source, num_users=40, seed=3)
    arguments = ["--source", str(source), "--output", str(output), "--test-fraction", "0.5", "--seed", "1"]
    printed = told("preprocess", "ml-1m", *arguments)
    metadata = SequenceFile(output, "ml-1m", []).metadata
    assert metadata.num_users == 40
    assert metadata.options == {"test_fraction": 0.5, "seed": 1}
    assert "ml-1m (generated)" in printed
    for shown in ("40 (train ", f"{metadata.num_interactions:,}", "mean 165.", f"max {metadata.max_length}"):
        assert shown in printed
    source = write_zip(tmp_path / "published.zip")
    assert "generated" not in told("preprocess", "ml-1m", "--source", str(source), "--output", str(tmp_path))


def test_help_lists_the_commands(monkeypatch, told):
    monkeypatch.setattr("importlib.import_module", None)  # the list needs none of their libraries
    printed = told("--help")
    for command in COMMANDS:
        assert f"• {command} " in printed
    assert "For example" not in printed  # one sentence each


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_fits_a_terminal(monkeypatch, told, command):
    """Descriptions are wrapped between words, examples have a line each."""
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in ([command, "--help"], ["--help"]):
        printed = told(*arguments)
        examples = [line for line in printed.splitlines() if line.startswith("  evenrank")]
        assert all(len(line) <= 80 for line in printed.splitlines() if line not in examples)
        assert len(examples) == len(set(examples)) and (examples or arguments == ["--help"])
    assert "of-lengths" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "lengths.csv"], "lengths.csv; a value follows its option: see --help"),
        (["simulate", "--in-order=1"], "--in-order is '1'; a boolean flag takes True, False or no value"),
        ([], "Expected one of"),
        (["simulate", "--shuffler.equal-sizee"], "--shuffler.equal-sizee; perhaps you meant --shuffler.equal-size\n"),
        (["train"], "train"),
        (["preprocess", "ml-20m", "--source", "a", "--output", "b"], "ml-20m"),
        (["preprocess", "ml-1m"], "evenrank preprocess requires --source, --output: see evenrank preprocess --help\n"),
        (["simulate", "--ranks", "8,16"], "arguments: ['8,16']; it takes [INT [INT ...]]\n"),
        (["preprocess", "ml-1m", "--source", "a", "--output", "b", "--bogus", "1"], "--bogus"),
        (["preprocess", "ml-1m", "--source", "fine.zip", "--output", "b", "--seed", "many"], "--seed"),
        (["preprocess", "ml-1m", "--source", "fine.zip", "--output", "b", "--seed", "-1"], "seed is -1"),
        (
            ["preprocess", "ml-1m", "--source", "bad_line.zip", "--output", "b"],
            "CSV Error on Line: 2 Original Line: 1::2",
        ),
        (["preprocess", "ml-1m", "--source", "fine.zip", "--output", "bad.zip/sub"], "bad.zip/sub cannot be made"),
    ],
)
def test_mistakes(here, mistake, arguments, message):
    (here / "bad.zip").write_text("not a zip file")
    write_zip(here / "bad_line.zip", ratings="7::50::5::200\n1::2\n")
    write_zip(here / "fine.zip")
    before = sorted(here.iterdir())
    assert message in mistake(*arguments)
    assert sorted(here.iterdir()) == before


def test_a_full_disk_leaves_nothing(here, mistake):
    write_zip(here / "fine.zip", ratings=RATINGS * 5_000)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))  # no file may grow beyond, as on a full disk
        said = mistake("preprocess", "ml-1m", "--source", "fine.zip", "--output", "new/deep/out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert "cannot be written (File too large); an earlier version is kept: free space" in said
    assert [entry.name for entry in here.iterdir()] == ["fine.zip"]


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(Preprocess, "run", lambda self: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["preprocess", "ml-1m", "--source", "a.zip", "--output", "b"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "evenrank: interrupted\n"


# Ctrl-C as a module is imported, by code that takes it for an error of its own, or behind the command.
INTERRUPTED = """
import importlib, os, signal, sys
program, interrupted = sys.argv[1:3]
class Interrupts:
    def find_spec(self, name, *rest):
        if name == interrupted:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError("half a module")
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[1:], sys.meta_path[:0] = sys.argv[3:], [Interrupts()]
importlib.import_module(f"commons.cli.{program}").main()
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize(
    ("program", "interrupted", "command", "printed"),
    [
        ("main", "torch", "doctor", ""),
        ("main", "commons.cli.preprocess", "preprocess", ""),
        ("start", "commons.cli.main", "--version", ""),  # the console script
        ("start", "nothing", "--version", f"evenrank {__version__}\n"),
    ],
)
def test_ctrl_c_outside_of_a_subcommand_s_work_prints_no_traceback(program, interrupted, command, printed):
    done = run_program(sys.executable, "-c", INTERRUPTED, program, interrupted, command)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, printed, "")


def test_boolean_options_may_have_a_value(told):
    command = _parse(
        ["simulate", "--lengths", "x.csv", "--json", "False", "--in-order", "true", "--shuffler.equal-size=False"]
    )
    assert (
        command.of_output.json is False and command.of_lengths.in_order is True and command.shuffler.equal_size is False
    )
    assert told("simulate", "--lengths", "zipf:1.2:64", "--ranks", "2", "--json", "True", "--steps", "2")[0] == "{"
    command = _parse(["report", "--json", "True", "runs/a"])
    assert command.of_output.json is True and [str(run) for run in command.runs] == ["runs/a"]


SIMULATE = ["simulate", "--lengths", "zipf:1.2:99", "--ranks", "2", "--steps", "2"]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], [*SIMULATE, "--html", "gain.html"], [*SIMULATE, "--json"]]
)
def test_a_closed_pipe_is_no_error(here, monkeypatch, capsys, arguments):
    """The reader has gone before anything is written, as `| head` has after its lines; a page is written anyway."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        try:
            status = main(arguments)
        except SystemExit as stop:  # rich ends the program itself
            status = stop.code
        assert status == 1
    assert capsys.readouterr().err == ""
    assert (here / "gain.html").exists() == ("--html" in arguments)


def test_no_color(monkeypatch, told):
    """Colours are for terminals that want them."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in told(*SIMULATE)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for arguments in (SIMULATE, ["preprocess", "--help"]):
        assert not re.search(r"\x1b\[[\d;]*3\d", told(*arguments))


ANSWERS = {
    "simulate": ["simulate", "--lengths", "zipf:1.2:64", "--ranks", "4", "--steps", "4", "--batch-size", "4"],
    "simulate --config": ["simulate", "--config", "hstu/configs/random.toml", "--ranks", "2", "--steps", "2"],
    "report": ["report", "runs/a", "runs/b"],
    "doctor": ["doctor"],
}


@pytest.fixture
def two_runs(here):
    write_unlooked(here / "runs" / "a", make_steps(balances=False), [10] * 5)
    evaluation = {"schema": 1, "step": 60, "eval_auc": 0.75, "eval_auc_se": 0.03}
    write_run(here / "runs" / "b", [*lines_of(make_steps(), [10] * 5), evaluation])


@pytest.mark.parametrize(
    ("encoding", "arguments"), [*(("ascii", each) for each in ANSWERS.values()), ("latin-1", ANSWERS["report"])]
)
def test_what_is_printed_needs_no_letters_of_unicode(two_runs, monkeypatch, arguments, encoding):
    written = io.BytesIO()
    errors = "surrogateescape" if encoding == "ascii" else "strict"  # Python's choice in the C locale, and in others
    with io.TextIOWrapper(written, encoding, errors) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(arguments) in (0, 1)
        stdout.flush()
        printed = written.getvalue().decode(encoding)
    monkeypatch.undo()
    assert "?" not in printed
    if arguments[0] != "doctor":
        sign = "x" if encoding == "ascii" else "×"
        assert re.search(rf"\d\.\d\d{sign}", printed)


@pytest.mark.parametrize(
    ("columns", "arguments"), [*((64, each) for each in ANSWERS.values()), (150, ANSWERS["simulate"])]
)
def test_what_is_printed_is_as_wide_as_columns_says(two_runs, monkeypatch, capsys, arguments, columns):
    """To a file as wide as 120 characters without it."""

    def printed(widest):
        assert main(arguments) in (0, 1)
        lines = capsys.readouterr().out.splitlines()
        # A command to copy stays in one line.
        assert max(len(line) for line in lines if "pip install" not in line) <= widest
        return " ".join(" ".join(lines).split())

    monkeypatch.setenv("COLUMNS", str(columns))
    text = printed(columns)
    monkeypatch.delenv("COLUMNS")
    wide = printed(120)
    if arguments[0] == "simulate" and columns == 64 and "--lengths" in arguments:
        assert "Lines are too short for kB, plan ms" in text and "too short" not in wide


PROGRAM = """
import sys
from commons.cli.main import main
status = main(sys.argv[2:])
assert not {*sys.argv[1].split()} & set(sys.modules)
sys.exit(status)
"""
PREPARE = ["preprocess", "ml-1m", "--output", ".", "--source"]


@pytest.mark.parametrize(
    ("unneeded", "arguments", "status"),
    [
        ("torch", [*PREPARE, "ml-1m.zip"], 0),
        ("torch", [*PREPARE, "none.zip"], 2),
        ("torch scipy matplotlib jinja2 pandas", ANSWERS["report"], 0),
        pytest.param("torchrec fbgemm_gpu megatron", [*SIMULATE, "--html", "g.html"], 0, marks=pytest.mark.slow),
    ],
)
def test_a_command_waits_for_no_library_that_it_does_not_need(here, two_runs, unneeded, arguments, status):
    write_zip(here / "ml-1m.zip")
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = run_program(sys.executable, "-c", PROGRAM, unneeded, *arguments, cwd=here, env=path)
    assert done.returncode == status, done.stderr


# What bash does for Tab, with the words of its arguments; a line for each completion.
PRESS_TAB = """
source completion.bash
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function=$(complete -p evenrank | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function evenrank "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def completion(tmp_path_factory):
    """A folder with the completion for bash."""
    folder = tmp_path_factory.mktemp("completion")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["--tyro-print-completion", "bash"]) == 0
    (folder / "completion.bash").write_text(printed.getvalue(), encoding="utf-8")
    return folder


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ([""], COMMANDS | {"-h", "--help"}),
        (["simulate", "--len"], {"--lengths"}),
        (["simulate", "--task", ""], {"hstu", "transformer", "tokens"}),
        (["calibrate", "--mod"], {"--model"}),  # its description has two lines
        (["doctor", "--"], {"--help"}),
    ],
)
def test_bash(completion, words, completions):
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = run_program("bash", "--norc", "-c", PRESS_TAB, "bash", "evenrank", *words, cwd=completion, env=path)
    found = set(done.stdout.split("\n")) - {""}
    assert (done.returncode, done.stderr) == (0, "")
    assert completions <= found if words == [""] else completions == found


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(told, shell):
    printed = told("--tyro-print-completion", shell)
    assert all(command in printed for command in COMMANDS) and "\x1b" not in printed


@pytest.mark.parametrize("arguments", [[], ["tcsh"], ["bash", "zsh"]])
def test_a_shell_without_completion(mistake, arguments):
    assert "it takes one shell, bash, zsh, fish: give one" in mistake("--tyro-print-completion", *arguments)
