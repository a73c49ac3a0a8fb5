"""The pages lead somewhere, in the repository and as a site, and what they name is there.

Named are settings of tables, messages that are quoted, and numbers of the stats.
"""

import ast
import importlib.util
import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

import evenrank
from commons.distributed.options import ShufflerOptions
from commons.distributed.stats import ShuffleStats
from commons.trainer.config.args import TrainerArgs
from tests.helpers.documents.documented import PAGES, ROOT, blocks_of, documented_blocks

DOCS = ROOT / "docs"
PATHS = sorted({page.relative_to(ROOT).as_posix() for pattern in PAGES for page in ROOT.glob(pattern)})
MOST_LINES_OF_README = 120


def tokens_of(page: Path) -> list[Token]:
    """The page as the repository shows it: CommonMark, with tables."""
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def links_of(page: Path) -> list[str]:
    parts = [part for token in tokens_of(page) for part in token.children or ()]
    addresses = [str(part.attrs.get("href") or part.attrs.get("src") or "x:") for part in parts]
    return [address for address in addresses if not re.match(r"[a-z]+:", address)]


@cache
def anchors_of(page: Path) -> set[str]:
    """Of the headings, by the rule of code forges: lower case, spaces to hyphens, and no punctuation."""
    tokens, anchors = tokens_of(page), set()
    for opening, heading in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(part.content for part in heading.children or () if part.type in ("text", "code_inline"))
            anchors.add(re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-"))
    return anchors


@pytest.mark.parametrize("path", PATHS)
def test_links_lead_to_files_and_headings(path):
    page = ROOT / path
    for link in links_of(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists() and target.is_relative_to(ROOT), f"{path}: {link}"
        assert not anchor or anchor in anchors_of(target), f"{path}: {link} has no such heading"


def test_a_block_without_an_end_is_found():
    page = "# A page\n\n```python\nx = 1\n```\n\n- a list\n\n  ```bash\n  ls\n  ```\n"
    assert [(block.line, block.language, block.text) for block in blocks_of("page.md", page)] == [
        (4, "python", "x = 1"),
        (10, "bash", "ls"),
    ]
    for end, line in (("x = 1\n```", 4), ("  ls\n  ```", 10)):
        with pytest.raises(ValueError, match=rf"^page\.md:{line}: a block without an end$"):
            list(blocks_of("page.md", page.replace(end, end.rstrip("` "))))


@pytest.mark.parametrize("path", PATHS)
def test_a_list_begins_behind_an_empty_line_or_a_heading(path):
    """The site's Markdown takes it for text otherwise."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    for token in tokens_of(ROOT / path):
        if token.type in ("bullet_list_open", "ordered_list_open") and token.map and token.map[0]:
            before = lines[token.map[0] - 1].strip()
            assert not before or before.startswith("#"), f"{path}:{token.map[0] + 1}"


def test_every_public_name_has_its_place_in_the_api():
    shown = [
        name
        for page in sorted((DOCS / "api").glob("*.md"))
        for name in re.findall(r"^::: evenrank\.(\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert sorted(shown) == sorted(set(evenrank.__all__) - {"__version__"})


def test_tables_of_the_api_are_markdown():
    """The site runs the lines of other tables together."""
    for value in (getattr(evenrank, name) for name in evenrank.__all__):
        for each in (value, *getattr(value, "__dict__", {}).values()):
            assert "=====" not in (inspect.getdoc(each) or ""), value


def test_named_files_and_promises_are_there():
    promises = (ROOT / "tests/test_promises.py").read_text(encoding="utf-8")
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"`(tests/[\w/]+\.py)`", text):
            assert (ROOT / path).is_file(), f"{page.name} names {path}"
        for name in re.findall(r"`(?:\w+/)*(test_\w+\.py)`", text):
            assert name in there, f"{page.name} names {name}"
        for number in re.findall(r"`(test_\d\d)…`", text):
            assert f"def {number}_" in promises, f"{page.name} names {number}"


EXAMPLES_OF_HELP = ["hstu/train.py", "sid_gr/train.py", "commons/trainer/torchrun.py"]
EXAMPLES_OF_HELP += ["commons/cli/calibrate.py", "commons/cli/simulate/command.py"]


@pytest.mark.parametrize("path", EXAMPLES_OF_HELP)
def test_the_first_example_of_a_help_needs_no_data(path):
    first = re.findall(r"--config (\w+/configs/\w+\.toml)", (ROOT / path).read_text(encoding="utf-8"))[0]
    assert "dataset_path" not in (ROOT / first).read_text(encoding="utf-8"), f"{path}: {first}"


def test_the_tree_has_every_package_of_commons():
    tree = (DOCS / "architecture.md").read_text(encoding="utf-8").split("## The tree")[1].split("\n## ")[0]
    packages = {file.parent.name for file in (ROOT / "commons").glob("*/__init__.py")}
    assert set(re.findall(r"^  (\w+)/", tree, re.MULTILINE)) == packages


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_README


@pytest.fixture(scope="module")
def hook():
    pytest.importorskip("mkdocs", reason="make docs installs what builds the site")
    spec = importlib.util.spec_from_file_location("docs_hook", ROOT / "ci/docs_hook.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page_of_site(path):
    """A page and the config of a site."""
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File
    from mkdocs.structure.pages import Page

    config = MkDocsConfig()
    return Page(None, File(path, str(DOCS), str(ROOT / "site"), use_directory_urls=False), config), config


@pytest.mark.parametrize(
    ("tag", "stops"),
    [
        ('<script src="https://unpkg.com/x"></script>', True),
        ('<link rel="stylesheet" href="//fonts.googleapis.com/css">', True),
        ('<img alt="" src=http://example.org/x.png>', True),
        ('<script src="assets/x.js"></script>', False),
        ('<a href="https://example.org">x</a> <svg xmlns="http://www.w3.org/2000/svg">', False),
        ('<link rel="canonical" href="https://example.org/x.html">', False),
    ],
)
def test_a_page_that_loads_from_the_network_stops_the_build(hook, tag, stops):
    from mkdocs.exceptions import PluginError

    page, config = page_of_site("llm.md")
    if not stops:
        assert hook.on_post_page(tag, page, config) == tag
        return
    with pytest.raises(PluginError, match=r"llm\.md loads .*; the site needs no network"):
        hook.on_post_page(tag, page, config)


FIELDS = """
class Plan:
    loads: list = None  # type: ignore[assignment]  # of each rank
    # The rank of each row;
    # -1 for padding.
    ranks: list = field(
        default_factory=list
    )
    name: str = "#1"

    speeds: list
    '''Of each rank.'''
"""


def test_comments_at_fields_are_their_descriptions_on_the_site():
    griffe = pytest.importorskip("griffe", reason="make docs installs what builds the site")
    extensions = griffe.load_extensions(str(ROOT / "ci/docs_fields.py"))
    with griffe.temporary_visited_module(FIELDS, extensions=extensions) as module:
        found = {name: field.docstring and field.docstring.value for name, field in module["Plan"].members.items()}
    ranks = "The rank of each row; -1 for padding."
    assert found == {"loads": "of each rank", "ranks": ranks, "name": None, "speeds": "Of each rank."}


OPTIONS = (ROOT / "docs/options.md").read_text(encoding="utf-8")
# Rows of three columns: what one sees or wants, what to set, what it costs.
DECISIONS = [row for row in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", OPTIONS, re.MULTILINE) if "`" in row[1]]
SETTINGS = sorted({setting for _, sets, _ in DECISIONS for setting in re.findall(r"`([a-z_.]+=[^`]+)`", sets)})


def test_every_setting_of_a_shuffler_is_in_both_parts():
    decisions, _, reference = OPTIONS.partition("## ShufflerOptions")
    for field in fields(ShufflerOptions):
        assert re.search(rf"`{field.name}\b", decisions), f"no row decides on {field.name}"
        (default,) = re.findall(rf"^\| `{field.name}` \| (\S+) \|", reference, re.MULTILINE)
        assert ast.literal_eval(default) == field.default


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_a_row_sets_is_taken(setting):
    name, value = setting.split("=", 1)
    value = ast.literal_eval(value)
    if name.startswith("trainer."):
        name = name.removeprefix("trainer.")
        needs = {
            "shuffle_window": {"enable_balanced_shuffler": True},
            "budget_per_rank": {"balance_sampler": True, "shuffler": ShufflerOptions(equal_size=False)},
        }
        assert getattr(TrainerArgs(8, 8, **{name: value}, **needs.get(name, {})), name) == value
        return
    assert getattr(ShufflerOptions(**{name: value}), name) == value


def test_what_rows_name_is_there():
    known = {field.name for field in (*fields(ShufflerOptions), *fields(TrainerArgs), *fields(ShuffleStats))}
    known |= {"windowed_iter", "global_mean_loss", "pg_group"}
    named = {name for row in DECISIONS for text in row for name in re.findall(r"`(?:trainer\.)?([a-z_]+)\b", text)}
    assert len(SETTINGS) > 10 and named - known <= {"evenrank", "optimization"}


SECTIONS = "trainer|dataset|model|optimizer|sid"


def _settings_of(config_class: type, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(config_class)
    for field in fields(config_class):
        yield prefix + field.name
        for kind in (hints[field.name], *get_args(hints[field.name])):
            if is_dataclass(kind):
                yield from _settings_of(kind, f"{prefix}{field.name}.")


def test_settings_of_the_trainers_are_there():
    from hstu.train_config import TrainConfig  # takes seconds, in every worker of the suite
    from sid_gr.train_config import TrainConfig as SIDTrainConfig

    known, named = {*_settings_of(TrainConfig), *_settings_of(SIDTrainConfig)}, set()
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        flags = re.findall(rf"--((?:{SECTIONS})\.[\w.-]*\w)", text)
        named |= {flag.replace("-", "_").replace(".no_", ".") for flag in flags}
        named |= set(re.findall(rf"`((?:{SECTIONS})\.[a-z_.]+)`", text))
    assert len(named) > 40 and named <= known, named - known


MESSAGE_PAGES = tuple(f"docs/{name}.md" for name in ("troubleshooting", "dlrm", "observe", "where_you_train"))
SOURCES = ("commons", "hstu", "sid_gr", "evenrank")
# What a program puts in front of a message.
PREFIX = re.compile(r"^(error: |ValueError: |rank \d+: )*")
# A value in a message; %-style of logging, whose template is one literal.
VALUE = r".+?"
FORMATTED = re.compile(r"%(?:\.\d+)?[sdgf]")
# Of a quoted message so much has to be fixed text of the source, and so much may be in no string of it: values, or a
# command that was put in. Strings with less fixed text are no messages.
LEAST_FIXED, MOST_LEFT, LEAST_CHARACTERS = 0.3, 0.3, 12


def _pattern(node: ast.expr) -> tuple[str, int]:
    """A string of the source as a regular expression, and how many of its characters are fixed."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    pattern, fixed = "", 0
    for part in parts:
        if not (isinstance(part, ast.Constant) and isinstance(part.value, str)):
            pattern += VALUE
            continue
        pieces = FORMATTED.split(part.value)
        fixed += sum(map(len, pieces))
        pattern += VALUE.join(map(re.escape, pieces))
    return pattern, fixed


@pytest.fixture(scope="module")
def patterns() -> list[tuple[re.Pattern[str], int]]:
    files = (path for source in SOURCES for path in sorted((ROOT / source).rglob("*.py")))
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    found = {_pattern(node) for node in nodes if isinstance(node, (ast.JoinedStr, ast.Constant))}
    longest_first = sorted(found, key=lambda each: (-each[1], each[0]))
    return [(re.compile(pattern), fixed) for pattern, fixed in longest_first if fixed >= LEAST_CHARACTERS]


def _quoted() -> list[str]:
    found = documented_blocks().items()
    blocks = [block for (page, *_), block in found if page in MESSAGE_PAGES and block.language == "text"]
    lines = [line for block in blocks for line in block.text.splitlines()]
    return [PREFIX.sub("", line) for line in lines if not line.startswith("loss ")]


@pytest.mark.parametrize("message", _quoted(), ids=lambda message: message[:40])
def test_a_quoted_message_is_in_the_source(patterns, message):
    rest, fixed = message, 0
    for pattern, length in patterns:  # a message may be put together of a few strings
        if len(rest) >= length and (match := pattern.search(rest)):
            fixed += length
            rest = rest[: match.start()] + rest[match.end() :]
    assert fixed >= LEAST_FIXED * len(message) and len(rest) <= MOST_LEFT * len(message), f"not in the source: {rest!r}"


def test_the_numbers_that_explain_a_symptom_are_there():
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    numbers = {
        name for name in named if re.search(r"_(ms|before|after|gap|fraction|saving|moved)$|^(moved|gated)$", name)
    }
    fields = set(ShuffleStats.__dataclass_fields__) | {
        name for name in dir(ShuffleStats) if isinstance(getattr(ShuffleStats, name), property)
    }
    assert len(numbers) >= 10 and numbers <= fields, numbers - fields


@pytest.mark.parametrize(
    ("word", "other"), [("exceeds it by", "exceeds that by"), ("give a", "give an"), ("ended meanwhile", "ended in")]
)
def test_another_message_is_not_in_the_source(patterns, word, other):
    changed = [message.replace(word, other) for message in _quoted() if word in message]
    assert changed and len(_quoted()) >= 15
    for message in changed:
        with pytest.raises(AssertionError, match="not in the source"):
            test_a_quoted_message_is_in_the_source(patterns, message)
