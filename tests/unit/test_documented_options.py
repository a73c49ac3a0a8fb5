"""The decision tables of docs/options.md: every setting of a shuffler is in them, and what they name can be set."""

from __future__ import annotations

import ast
import re
from dataclasses import fields

import pytest

from commons.distributed.options import ShufflerOptions
from commons.distributed.stats import ShuffleStats
from commons.trainer.config.args import TrainerArgs
from tests.helpers.documented import ROOT

PAGE = (ROOT / "docs/options.md").read_text(encoding="utf-8")
# Rows of three columns: what one sees or wants, what to set, what it costs.
DECISIONS = [row for row in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE) if "`" in row[1]]
SETTINGS = sorted({setting for _, sets, _ in DECISIONS for setting in re.findall(r"`([a-z_.]+=[^`]+)`", sets)})


def test_every_setting_of_a_shuffler_is_in_both_parts():
    decisions, _, reference = PAGE.partition("## ShufflerOptions")
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
