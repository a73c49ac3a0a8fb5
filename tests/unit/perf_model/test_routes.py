"""The routes of a plan: what is no plan is refused. Tests of the exchange and golden cases say what routes are."""

from __future__ import annotations

import numpy as np
import pytest

from commons.perf_model.partitioner import core
from commons.perf_model.row_table import RowTable


def test_what_is_no_plan_is_refused():
    rows, parts = np.array([2, 1]), np.array([[0, 2, 1]])
    table = RowTable.of(np.array([[1, 2], [3, 4], [5, 6]]), rows)
    good = {"rows": rows, "real_rows": rows, "destination": np.array([0, 1, 1]), "table": table, "parts": parts}
    good |= {"steps": 1, "rank": 0, "all_gather": False, "pads": True}
    core.route_rows(**good)
    for name, mistake in (
        ("rows", rows[:1]),
        ("real_rows", rows + 1),
        ("destination", np.array([0, 1, 2])),
        ("destination", np.array([0, 1])),
        ("parts", np.array([[1, 2, 1]])),
        ("parts", np.array([[0, -5, 1]])),
        ("parts", np.array([[2**62, 2**62, 1]])),
        ("steps", 3),
        ("rank", 2),
    ):
        with pytest.raises(ValueError, match="route_rows takes a plan"):
            core.route_rows(**(good | {name: mistake}))
    for changes in ({"words": np.zeros_like(table.words)}, {"first": table.first + 9}, {"first": table.first[:1]}):
        with pytest.raises(ValueError, match="a gathered table|its table is not one of these rows"):
            core.route_rows(**(good | {"table": RowTable(**{**vars(table), **changes})}))
    with pytest.raises(TypeError, match="int32 array of shape .*; it reads contiguous int64 arrays"):
        core.route_rows(**(good | {"rows": rows.astype(np.int32)}))
