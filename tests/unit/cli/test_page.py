"""Pages and pictures: what `--html` and `--figure` write."""

import itertools
import re
import shlex

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from commons.cli.answer import Answer, AnswerTable, Section
from commons.cli.pictures import COLORS, THEMES, Picture, svg_of, write_page
from commons.cli.simulate.command import LengthOptions
from commons.cli.simulate.pictures import band_edges, pictures_of
from commons.cli.simulate.simulation import Simulation, simulate
from tests.helpers.documents.pages import read_page

LENGTHS = ["simulate", "--lengths", "lognormal:130:1.4:8192", "--ranks", "4", "8", "--steps", "8", "--batch-size", "4"]


def test_a_page_of_lengths_is_one_file_with_all_of_the_answer(here, told, asked):
    printed = " ".join(told(*LENGTHS, "--html", "gain.html", "--figure", "gain.png").split())
    assert "written: gain.html" in printed
    assert (here / "gain.png").stat().st_size > 20_000
    text, words = read_page(here / "gain.html")
    answer = asked(*LENGTHS)
    assert answer["advice"]["text"] in words and answer["advice"]["options"].split()[0] in words
    for of_ranks in answer["ranks"]:
        assert all(f"{way['speed_up']:.2f}×" in words for way in of_ranks["ways"])
        advice = of_ranks["advice"]
        assert advice["text"].startswith(f"On {of_ranks['ranks']} ranks")
        assert advice["text"] in words and advice["text"] in printed
        # The row of a table that is marked is what is advised for its ranks.
        table = text[text.index(f"<caption>{of_ranks['ranks']} ranks") :]
        marked = re.search(r'<tr class="marked"><th scope="row">([^<]*)', table)
        assert marked and marked[1].split(" (=")[0] == advice["way"]
    # The headline says what its number is a ratio of.
    headline = re.search(r'<div class="answer">\s*<p>(.*?)</p>', text, re.DOTALL)
    assert headline and "in the layers&#39; time" in headline[1] and "a whole step gains less" in headline[1]
    assert "speed-up of the layers, each batch balanced" in words
    assert text.count("<svg") == 4
    assert f"evenrank {shlex.join(LENGTHS)} --html gain.html --figure gain.png" in words


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--html", "lengths.npy"], "a page is an .html file"),
        (["--html", "folder.html"], "is a folder"),
        (["--figure", "lengths.npy"], "choose one of these endings"),
        (["--html", "missing\0.html"], "null"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_any_work(here, mistake, flags, message):
    np.save("lengths.npy", np.arange(1, 65))
    (here / "folder.html").mkdir()
    assert message in mistake("simulate", "--lengths", "lengths.npy", "--ranks", "2", *flags)


def drawn(axes):
    axes.plot([0, 1], [1, 2], color=COLORS["after"], label="a < b & c")
    axes.legend()


def test_text_is_escaped_and_nothing_has_a_name_twice(tmp_path):
    evil = '<script>alert("x")</script> --flag 4 & </p>'
    picture = Picture(evil, evil, drawn)
    table = AnswerTable((evil, "b"), ((evil, "1"), ("x", evil)), evil, marked=1)
    section = Section(evil, (evil,), lambda: (picture, picture), (table,), ((evil, evil),), (evil,))
    answer = Answer(evil, evil, (section,), {}, evil, (evil,), ((evil, evil),))
    write_page(answer, tmp_path / "p.html", evil)
    text, words = read_page(tmp_path / "p.html")
    assert text.count("<svg") == 2 and '<script>alert("x")</script>' in words and "a < b & c" in words
    assert "<code>--flag 4</code>" in text


def test_pictures_take_their_colours_from_the_page():
    svg = svg_of(Picture("t", "t", drawn), "p0")
    assert not re.search(r"#[0-9a-f]{6}", svg) and "var(--after)" in svg and "var(--ink)" in svg
    assert svg == svg_of(Picture("t", "t", drawn), "p0")


def contrast(one, other):
    """Of two colours, by WCAG 2.2."""

    def luminance(color):
        parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_text_and_marks_stand_out(theme):
    colors = THEMES[theme]
    assert colors.keys() == COLORS.keys() and len(set(colors.values())) == len(colors)
    for surface, name in itertools.product(
        ("surface", "raised"), ("ink", "muted", "before", "after", "third", "fourth")
    ):
        assert contrast(colors[surface], colors[name]) >= 4.5, (surface, name)


def axes_of(simulation):
    axes = [Figure().subplots() for _ in range(4)]
    for picture, each in zip(pictures_of(simulation), axes, strict=True):
        picture.draw(each)
    return axes


def test_pictures_of_a_simulation_draw_its_numbers():
    source = LengthOptions(batch_size=4).read("lognormal:130:1.4:8192")
    simulation = simulate(source, (4, 8), (2,), 8)
    fewer, largest = simulation.comparisons
    loads, bands, gain, steps = axes_of(simulation)
    ratios = largest.ways[0].loads / largest.ways[0].loads.mean(axis=1, keepdims=True)
    assert loads.lines[0].get_ydata()[:-1] == pytest.approx(np.sort(ratios, axis=1)[:, ::-1].mean(axis=0))
    assert steps.lines[0].get_ydata() == pytest.approx(ratios.max(axis=1))
    of_rows, of_cost = np.array([bar.get_height() for bar in bands.patches]).reshape(2, -1)
    is_longest = source.tokens >= band_edges(source.tokens)[-2]
    assert of_rows[-1] == pytest.approx(is_longest.mean()) and of_rows.sum() == pytest.approx(1)
    assert of_cost[-1] == pytest.approx(source.costs[is_longest].sum() / source.costs.sum())
    lines = {line.get_label().split(" (≈")[0]: line.get_ydata() for line in gain.lines}
    balanced = zip(fewer.ways[1:], largest.ways[1:])
    speed_ups = {way.name: (fewer.speed_up(other), largest.speed_up(way)) for other, way in balanced}
    expected = speed_ups | {"equal ranks": (fewer.equal, largest.equal)}
    assert {name: tuple(values) for name, values in lines.items()} == expected
    alone = axes_of(Simulation(source, (largest,)))[2]
    names = [label.get_text() for label in alone.get_yticklabels()]
    widths = [bar.get_width() for bar in alone.patches]
    named = {f"{name}: {values[1]:.2f}×": values[1] for name, values in speed_ups.items()}
    assert dict(zip(names, widths, strict=True)) == named
    assert len(alone.texts) == 1  # of equal ranks: a text in a bar would not fit into a short one


def test_pictures_of_few_ranks_and_of_equal_lengths_are_readable(tmp_path):
    np.save(tmp_path / "even.npy", np.full(64, 7))
    source = LengthOptions(batch_size=4).read(str(tmp_path / "even.npy"))
    loads, bands, _, _ = axes_of(simulate(source, (2,), (), 8))
    assert [tick % 1 for tick in loads.get_xticks()] == [0.0] * 3  # ranks are counted
    bands.figure.draw_without_rendering()
    legend = bands.get_legend().get_window_extent()
    assert not any(legend.overlaps(bar.get_window_extent()) for bar in bands.patches)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=50))
def test_bands_hold_every_length_once(tokens):
    tokens = np.array(tokens)
    edges = band_edges(tokens)
    assert (np.diff(edges) > 0).all() and 2 <= len(edges) <= 15
    assert edges[0] == tokens.min() and edges[-1] == tokens.max() + 1


def test_lines_that_hide_others_are_marked(here, told):
    """Even lengths: every way gives the same, and only the last line drawn could be seen."""
    np.save("even.npy", np.full(256, 7))
    flags = ["--lengths", "even.npy", "--batch-size", "4", "--steps", "8", "--window", "2"]
    told("simulate", *flags, "--ranks", "2", "4", "--html", "e.html")
    text, _ = read_page(here / "e.html")
    pictures = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    for name in ("refined (≈ Karmarkar-Karp)", "window of 2 (≈ Karmarkar-Karp)", "refined (≈ as loaded)"):
        assert name in pictures
    assert text.count("(= as loaded)</th>") == 2 * 4  # two tables, in which four ways deal rows as loaded
