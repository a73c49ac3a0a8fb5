"""The pins hold on every Python that evenrank names, as far as that can be seen without a network; and the page of what
evenrank works with names them.

CI installs them on each of these Pythons.
"""

import re
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from commons.releases import DEFAULT_TORCH, NEWEST_TORCH, OLDEST_TORCH, RELEASES, minor
from commons.trainer.config.files import tomllib

ROOT = Path(__file__).parents[2]
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
# torchrec's metadata asks for the CUDA build of fbgemm on a machine without CUDA too.
# torchx runs with the urllib3 that requests takes; its own range ends before what has known vulnerabilities.
KNOWN = {("torchrec", "fbgemm-gpu"), ("torchx", "urllib3")}
# In extras.txt; others are in dev.txt.
HEAVY_EXTRAS = ["ray", "torchx", "wandb", "mlflow", "accelerate", "transformers", "trl", "lightning", "playwright"]


def environment(python, extra=""):
    return {"python_version": python, "python_full_version": f"{python}.0", "extra": extra}


def applies(requirement, python, extra=""):
    return requirement.marker is None or requirement.marker.evaluate(environment(python, extra))


@cache
def pins(file, python):
    """Version by name of what pip takes from a file of requirements."""
    found = {}
    for line in (ROOT / "requirements" / file).read_text().splitlines():
        if line.startswith("-r "):
            found |= pins(line.removeprefix("-r "), python)
        elif line and not line.startswith("#"):
            pin = Requirement(line)
            version = re.fullmatch(r"==([\w.]+)", str(pin.specifier))
            assert version, f"{line} is not pinned"
            if applies(pin, python):
                assert canonicalize_name(pin.name) not in found, f"{pin.name} is pinned twice on {python}"
                found[canonicalize_name(pin.name)] = version[1]
    return found


@cache
def installed(name):
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def requirements_of(name, python):
    needs = [Requirement(line) for line in installed(name).requires or ()]
    extra = {"ray": "train", "torchx": "kubernetes"}.get(name, "")
    return [need for need in needs if applies(need, python, extra)]


@cache
def with_torch(python):
    """What comes with torch, which is installed with its own dependencies."""
    names, open_names = set(), ["torch"]
    while open_names:
        names.add(name := canonicalize_name(open_names.pop()))
        if installed(name) is not None:
            open_names += [
                need.name for need in requirements_of(name, python) if canonicalize_name(need.name) not in names
            ]
    return names


def keep_to_ranges(pinned, wanted, python):
    """Whether pins are in the ranges of what is wanted on a Python."""
    for need in map(Requirement, wanted):
        if applies(need, python) and need.name != "pre-commit":  # a tool of the developer's own
            assert pinned[canonicalize_name(need.name)] in need.specifier, need


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_keep_to_the_ranges_that_users_get(python):
    extras, dev, others = PROJECT["optional-dependencies"], pins("dev.txt", python), ("opentelemetry", "prometheus")
    for device in ("cpu", "cuda"):
        wanted = [line for name in (device, "megatron", "dev", *others) for line in extras[name]]
        wanted += PROJECT["dependencies"] + PYPROJECT["build-system"]["requires"]  # make builds without isolation
        keep_to_ranges(pins(f"{device}.txt", python) | dev, wanted, python)
    for file, names in (("extras.txt", HEAVY_EXTRAS), ("docs.txt", ["docs"])):
        pinned = pins(file, python)
        assert not (pins("cpu.txt", python) | dev).keys() & pinned.keys()
        keep_to_ranges(pinned, [line for name in names for line in extras[name]], python)
    of_extras, of_docs = pins("extras.txt", python), pins("docs.txt", python)
    assert {name: of_extras[name] for name in of_extras.keys() & of_docs.keys()}.items() <= of_docs.items()


@pytest.mark.parametrize("stack", ["oldest", "cpu", "cuda", "newest"])
def test_the_pins_of_every_stack_fit_one_another_and_the_ranges_of_users(stack):
    pinned = pins(f"{stack}.txt", "3.11") | pins("dev.txt", "3.11")
    keep_to_ranges(pinned, PROJECT["dependencies"], "3.11")
    torch, fbgemm = minor(pinned["torch"]), pinned.get("fbgemm-gpu") or pinned["fbgemm-gpu-cpu"]
    assert RELEASES[torch] == minor(pinned["torchrec"]) == minor(fbgemm)
    assert torch == {"oldest": OLDEST_TORCH, "newest": NEWEST_TORCH}.get(stack, DEFAULT_TORCH)


def test_the_releases_of_torch_are_those_that_pip_takes():
    (torch,) = [need for need in map(Requirement, PROJECT["dependencies"]) if need.name == "torch"]
    (first,) = [each.version for each in torch.specifier if each.operator == ">="]
    numbers = [f"2.{number}" for number in range(30)]
    assert first == OLDEST_TORCH and [each for each in numbers if f"{each}.1" in torch.specifier] == [*RELEASES]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("files", [[], ["extras.txt"], ["docs.txt"]], ids=["without extras", "with extras", "docs"])
def test_pins_hold_what_pinned_packages_need(python, files):
    if files == ["extras.txt"] and installed("ray") is None:
        pytest.skip("needs the extras: make test-extras")
    if files == ["docs.txt"] and installed("mkdocs") is None:
        pytest.skip("needs what builds the documentation: make docs")
    pinned = {name: version for file in ["cpu.txt", "dev.txt", *files] for name, version in pins(file, python).items()}
    provided = with_torch(python)
    # A package whose version differs on another Python says nothing about that one.
    same = [
        name
        for name, version in pinned.items()
        if (found := installed(name)) and found.version.split("+")[0] == version
    ]
    assert len(same) > 40
    for name in same:
        pythons = installed(name).metadata.get_all("Requires-Python") or ()
        assert python in SpecifierSet("".join(pythons)), f"{name} on {python}"
        for need in requirements_of(name, python):
            needed = canonicalize_name(need.name)
            if (name, needed) in KNOWN or (needed in provided and needed not in pinned):
                continue
            assert needed in pinned, f"{name} needs {need}, which is not pinned for Python {python}"
            assert pinned[needed] in need.specifier, f"{name} needs {need}, and {pinned[needed]} is pinned"


def test_the_same_pythons_and_releases_are_named_everywhere():
    named = [
        line.rsplit(" ")[-1]
        for line in PROJECT["classifiers"]
        if line.startswith("Programming Language :: Python :: 3.")
    ]
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    matrix = workflow["jobs"]["cpu"]["strategy"]["matrix"]
    assert named == matrix["python"] == PYTHONS
    for stack in [*matrix["stack"], *(each["stack"] for each in matrix["include"])]:
        assert (ROOT / "requirements" / f"{stack}.txt").exists()
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    torchrec = f"torchrec=={pins('cpu.txt', '3.11')['torchrec']}"
    for file in ("README.md", "docs/quickstart.md", "pyproject.toml", "ci/test_wheel.sh"):
        assert set(re.findall(r"torchrec==[\d.]+", (ROOT / file).read_text())) == {torchrec}, file


def test_the_quick_start_lists_every_extra():
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/quickstart.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(PROJECT["optional-dependencies"])


def test_no_class_is_a_named_tuple_and_generic():
    """Python 3.10 refuses such a class where it is imported, and the linters do not know."""
    sources = [path for name in ("commons", "hstu", "sid_gr", "evenrank") for path in (ROOT / name).rglob("*.py")]
    both = re.compile(r"^ *class \w+\((?=[^)]*\bNamedTuple\b)(?=[^)]*\bGeneric\b)", re.MULTILINE)
    assert both.search("class A(NamedTuple, Generic[T]):")
    assert [str(path) for path in sources if both.search(path.read_text())] == []


# --------------------------------------------------------------------------------------------------- docs/works_with.md

PAGE = (ROOT / "docs" / "works_with.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## In the test suite")[1].split("\n## ")[0]
# The package of a row, and its version.
NAMED = dict(re.findall(r"^\|[^|]*?(?:\(`)?([\w-]+)(?:`\))? \| (\d[\w.]*(?:, \w+ [\w.]+)*) \|", SECTION, re.MULTILINE))


def test_every_row_with_a_version_is_looked_at():
    rows = [line for line in SECTION.splitlines() if re.match(r"\|[^|]+\| \d", line)]
    assert len(NAMED) == len(rows) >= 10


@pytest.mark.parametrize("name", NAMED)
def test_versions_are_those_that_are_pinned(name):
    default, *others = NAMED[name].split(", ")
    pinned = {key: pin for file in ("rl", "extras", "dev", "cpu") for key, pin in pins(f"{file}.txt", "3.12").items()}
    assert pinned[name.lower()] == default
    for stack, version in (other.split() for other in others):
        assert pins(f"{stack}.txt", "3.12")[name.lower()] == version
