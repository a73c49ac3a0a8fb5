"""Tab in a shell: what bash completes after the line that `evenrank --help` names."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commons.cli.main import main

# What bash does for Tab, with the words of its arguments; a line for each completion.
PRESS_TAB = """
source completion.bash
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function=$(complete -p evenrank | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function evenrank "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""

COMMANDS = {"calibrate", "doctor", "make-sids", "preprocess", "report", "simulate"}


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
    python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", PRESS_TAB, "bash", "evenrank", *words],
        cwd=completion,
        env={**os.environ, "PATH": python},
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = set(done.stdout.split("\n")) - {""}
    assert (done.returncode, done.stderr) == (0, "")
    assert completions <= found if words == [""] else completions == found


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(capsys, shell):
    assert main(["--tyro-print-completion", shell]) == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in COMMANDS) and "\x1b" not in printed


@pytest.mark.parametrize("arguments", [[], ["tcsh"], ["bash", "zsh"]])
def test_a_shell_without_completion(capsys, arguments):
    assert main(["--tyro-print-completion", *arguments]) == 2
    printed = capsys.readouterr()
    assert "it names a shell, bash, zsh, fish: give one" in printed.err and printed.err.count("\n") == 1
