"""What CI may do and what it trusts; and what it says of the packages that are pinned."""

import re
import sys
from email.message import Message
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest
import yaml

from ci import licences
from tests.helpers.jobs.programs import ROOT, run_program

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.y*ml"))


def wrong_in(text):
    """What a workflow does that it should not."""
    workflow = yaml.safe_load(text)
    wrong = []
    if workflow.get("permissions") != {"contents": "read"}:
        wrong.append("its token may do more than read the repository")
    for name, job in workflow["jobs"].items():
        if "permissions" in job:
            wrong.append(f"{name} has permissions of its own")
        for step in job["steps"]:
            action, _, version = step.get("uses", "").partition("@")
            if action and not re.fullmatch(r"[0-9a-f]{40}", version):
                wrong.append(f"{name} uses {action} at {version or 'no version'}, which can be moved")
            if action == "actions/checkout" and step.get("with", {}).get("persist-credentials") is not False:
                wrong.append(f"{name} leaves its token in the checkout")
            if "secrets." in str(step):
                wrong.append(f"{name} reads a secret")
    # A digest alone says nothing to who reads it.
    return wrong + [line for line in re.findall(r"uses: .*", text) if not re.search(r"  # v\d+\.\d+\.\d+$", line)]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_actions_are_pinned_and_tokens_read_only(file):
    assert wrong_in(file.read_text()) == []


def test_scripts_that_ci_runs_are_there():
    text = "".join(file.read_text() for file in WORKFLOWS)
    scripts = set(re.findall(r"bash (\S+)", text))
    assert "ci/audit.sh" in scripts and [name for name in scripts if not (ROOT / name).exists()] == []


def package(files=("a/__init__.py", "a-1.0.dist-info/METADATA"), **fields):
    metadata = Message()
    for name, values in fields.items():
        for value in values if isinstance(values, list) else [values]:
            metadata[name.replace("_", "-")] = value
    return SimpleNamespace(metadata=metadata, files=None if files is None else [PurePosixPath(file) for file in files])


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({"License_Expression": "MIT AND 0BSD", "License": "x"}, "MIT AND 0BSD"),
        ({"License": "MIT", "Classifier": ["Topic :: X", "License :: OSI Approved :: MIT License"]}, "MIT License"),
        ({"License": "=====\nThe licence\n====="}, "The licence"),
        ({"Classifier": ["License :: DFSG approved"], "License": "MIT"}, "MIT"),
        ({"Classifier": [f"License :: OSI Approved :: {each}" for each in "AB"]}, "A OR B"),
        ({"License": "UNKNOWN"}, ""),
        ({}, ""),
        ({"files": None}, ""),
        ({"files": ["a-1.0.dist-info/METADATA"]}, "none: nothing but the names of other packages"),
    ],
)
def test_the_licence_of_a_package(fields, licence):
    assert licences.licence_of(package(**fields)) == licence


@pytest.mark.parametrize(
    ("licence", "problem"),
    [
        ("Apache-2.0 WITH LLVM-exception", None),
        ("LGPL-2.1-or-later", None),
        ("GNU Lesser General Public License v3 (LGPLv3)", None),
        ("GPL-3.0-only OR MIT", None),
        ("GPL-3.0-only", "whose terms reach"),
        ("AGPL-3.0-or-later", "whose terms reach"),
        ("GNU General Public License v2 (GPLv2)", "whose terms reach"),
        ("GNU Affero General Public License v3", "whose terms reach"),
        ("", "names no licence"),
    ],
)
def test_licences_that_may_not_be_used(licence, problem):
    problems = licences.problems_of([("a", licence)])
    assert len(problems) == (problem is not None) and all(problem in line for line in problems)


class TestAudit:
    def run(self, *arguments):
        return run_program("bash", "ci/audit.sh", *arguments)

    @pytest.mark.skipif(not Path(sys.executable).is_relative_to(ROOT / ".venv"), reason="audits .venv")
    def test_without_a_network(self):
        audit = self.run("--database", "http://127.0.0.1:9/")  # the port of "discard", where nobody answers
        assert audit.returncode == 0 and re.search(r"^torchrec +[\d.]+ +BSD", audit.stdout, re.MULTILINE), audit.stderr
        last = audit.stdout.splitlines()[-1]
        assert last.startswith("no network: not checked (http://127.0.0.1:9/: ") and audit.stderr == ""

    def test_its_help_and_a_mistake(self):
        shown, wrong = self.run("--help"), self.run("--database")
        assert shown.returncode == 0 and "--database URL" in shown.stdout and "--ignore-vuln" in shown.stdout
        assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "--database needs a URL" in wrong.stderr


@pytest.mark.parametrize(
    ("pattern", "replacement", "found"),
    [
        (r"(setup-python)@\S+", r"\1@v5", "uses actions/setup-python at v5"),
        (r"(actions/checkout)@\S+", r"\1@main", "uses actions/checkout at main"),
        (r"contents: read", "contents: write", "more than read"),
        (r"permissions:\n  contents: read", "", "more than read"),
        (r"(runs-on: ubuntu-latest)", r"\1\n    permissions: {id-token: write}", "permissions of its own"),
        (r"persist-credentials: false", "fetch-depth: 0", "leaves its token"),
        (r"  # v[\d.]+", "", "uses: actions/checkout@"),
        (r"(run: make install)", r"\1 TOKEN=${{ secrets.TOKEN }}", "reads a secret"),
    ],
)
def test_a_workflow_that_does_is_found(pattern, replacement, found):
    text, count = re.subn(pattern, replacement, (ROOT / ".github/workflows/ci.yml").read_text())
    assert count and any(found in line for line in wrong_in(text))
