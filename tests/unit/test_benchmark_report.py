"""What benchmark programs share: rounds that alternate, intervals, targets of a page, and the model of links."""

import re

import numpy as np
import pytest

from benchmarks.shared import report
from benchmarks.shared.link_model import LinkModel, connections


def test_variants_take_turns_are_timed_to_the_barrier_and_warm_up_first():
    now, order = [0.0], []

    def take(name, seconds):
        order.append(name)
        now[0] += seconds

    variants = {"a": lambda: take("a", 1.0), "b": lambda: take("b", 2.0)}
    options = {"warmup": 1, "clock": lambda: now[0], "barrier": lambda: take("|", 10.0), "show": False}
    assert report.interleaved_seconds(variants, 2, **options) == {"a": [11.0, 11.0], "b": [12.0, 12.0]}
    assert "".join(order) == "|a||b||b||a||a||b|"


def test_the_slowest_rank_counts_in_every_round():
    measured = [{"ms": {"a": np.array([1.0, 5.0])}}, {"ms": {"a": np.array([3.0, 2.0])}}]
    assert report.slowest_ms(measured)["a"].tolist() == [3.0, 5.0]


def test_the_interval_of_a_mean_is_that_of_its_normal_distribution():
    drawn = np.random.default_rng(1).normal(5.0, 2.0, 400)
    value, text = report.with_interval(lambda chosen: drawn[chosen].mean(axis=-1), len(drawn))
    half = 1.96 * drawn.std() / np.sqrt(len(drawn))
    found = [float(number) for number in re.findall(r"[\d.]+", text)]
    assert found == pytest.approx([drawn.mean(), drawn.mean() - half, drawn.mean() + half], abs=0.15 * half)
    assert value == drawn.mean()


@pytest.mark.parametrize("quick", [True, False])
def test_a_page_has_the_verdict_on_each_target_and_a_quick_look_writes_none(tmp_path, monkeypatch, capsys, quick):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    page = report.Page("Title", "About.")
    for what, cases in {"met": [0.5, 1.0], "missed": [0.5, 1.5], "alone": [1.0], "unknown": []}.items():
        page.at_most(what, 1.0, cases, " s")
    rows = [{"name": "a", "ms": 1.0}, {"name": "b", "ms": 0.0}, {"name": "b", "ms": None}]
    assert report.values(rows, "ms", "name = 'b'") == [0.0]
    page.section("Section", "Text.", rows)
    page.finish(quick=quick)
    shown = capsys.readouterr().out
    for line in (
        "| met | ≤ 1 s | mean 0.75000, worst 1.00000, 2 of 2 cases | yes |",
        "| missed | ≤ 1 s | mean 1.00000, worst 1.50000, 1 of 2 cases | **no** |",
        "| alone | ≤ 1 s | 1 s | yes |",
        "| unknown | ≤ 1 s | not measured | – |",
        "| b | – |",
    ):
        assert line in shown.splitlines()
    assert [file.read_text() for file in tmp_path.iterdir()] == ([] if quick else [shown])


def test_a_ring_takes_its_hops_or_its_slowest_link():
    """16 ranks on two hosts: a message crosses twice to the other host, and stays on one in 13 hops."""
    link = LinkModel()
    assert link.ring_ms(1, 1e9) == 0.0
    assert link.ring_ms(16, 0) == pytest.approx(0.1 + 13 * 0.02 + 2 * 0.04)
    large = 1e6 / (10e9 / 8) * 1e3  # milliseconds between hosts; 15 messages follow each other
    assert link.ring_ms(16, 1e6) == pytest.approx(0.1 + 15 * large)
    # In rings of 4, then of 4: the second sends what the first has gathered, and its neighbours are 4 ranks apart.
    assert link.gather_ms(1000, (4, 4)) == pytest.approx(link.ring_ms(4, 1000) + link.ring_ms(4, 4000, 4))
    assert connections((16,)) == 15 and connections((4, 4)) == 6
