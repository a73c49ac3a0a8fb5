"""Imports go one way, in the order of the flow; those inside functions and for type checkers too."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# By folder, the modules that no file in it imports; `commons` as a whole knows no model.
KEPT_OUT = {
    "commons/perf_model": ("torch.distributed", "commons.distributed", "commons.pipeline", "commons.trainer"),
    "commons/distributed": ("commons.pipeline", "commons.trainer"),
    "commons/pipeline": ("commons.trainer",),
    "commons": ("hstu", "sid_gr"),
}
# Only they themselves, and evenrank's public names for them, import these.
ENDS = {"commons.cli": ("commons/cli", "evenrank/observe.py"), "commons.integrations": ("commons/integrations",)}
PUBLIC_ENDS = "evenrank/integrations"


def _imported(path: Path) -> Iterator[str]:
    """The names that a file imports, in full, and the attributes of torch that it uses."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield f"torch.{node.attr}"


def _imports_of(folder: str, module: str) -> list[str]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in _imported(file)
        if f"{name}.".startswith(f"{module}.")
    ]


@pytest.mark.parametrize(("folder", "module"), [(folder, each) for folder, out in KEPT_OUT.items() for each in out])
def test_a_room_knows_nothing_of_the_rooms_behind_it(folder, module):
    assert _imports_of(folder, module) == []


@pytest.mark.parametrize("module", ENDS)
def test_nothing_imports_from_the_ends(module):
    found = [text for folder in ("commons", "hstu", "sid_gr", "evenrank") for text in _imports_of(folder, module)]
    assert [text for text in found if not text.startswith((*ENDS[module], PUBLIC_ENDS))] == []
    assert found


def test_imports_of_every_kind_are_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "commons" / "perf_model" / "gain.py"
    file.parent.mkdir(parents=True)
    for text in (
        "import torch.distributed as dist",
        "from torch import distributed",
        "import torch\ndef f():\n    return torch.distributed.get_rank()",
        "if TYPE_CHECKING:\n    from torch.distributed import ProcessGroup",
        "def f():\n    from torch.distributed.tensor import DTensor",
    ):
        file.write_text(text)
        assert _imports_of("commons/perf_model", "torch.distributed"), text
    for text in ("from ..distributed import loss", "from .. import distributed", "import commons.distributed.loss"):
        file.write_text(text)
        assert _imports_of("commons/perf_model", "commons.distributed"), text
    file.write_text("import commons.distributed_things")
    assert not _imports_of("commons/perf_model", "commons.distributed")
