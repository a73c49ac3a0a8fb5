"""The pages of `evenrank simulate --html`: from lengths, and from the batches of a config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from commons.cli.page import Page, PageTable, Section
from commons.cli.simulate_answer import WORTH, Advice, Answer, cells_of
from commons.cli.simulate_figure import pictures_of_steps
from commons.cli.simulate_pictures import pictures_of
from commons.perf_model.gain import SLACKS, TRAINED_SLACK, Comparison, DealtRows
from commons.perf_model.simulation import SimulatedSteps

_COLUMNS = (
    ("mean, p99", "over steps, the largest load of a rank ÷ the mean."),
    ("speed-up", "work per time ÷ that of the rows as loaded, of the layers alone."),
    ("possible", "the speed-up ÷ that of ranks that are all equal in every step."),
    ("tokens", "tokens of the fullest rank of any step ÷ the mean: what memory has to hold."),
    (
        "moved %",
        f"tokens that change rank, of all, where a plan may give up {', '.join(f'{slack:.0%}' for slack in SLACKS)} of "
        "the balance to keep rows where they are.",
    ),
    ("kB", f"what the busiest rank sends or receives in a step, with a slack of {TRAINED_SLACK:.0%}."),
    ("plan ms", "processor time of a step's plan on this machine; in training it is hidden behind the steps before."),
    ("step ms", "three times the slowest rank's forward operations ÷ (peak × MFU)."),
    ("exchange ms", "the bytes of the busiest rank ÷ the link's rate; it runs beside the steps."),
)


def page_of(answer: Answer, command: str) -> Page:
    """The answer as a page.

    Args:
        answer: what was simulated.
        command: how, for the page's end.
    """
    advice, largest = answer.advice(), answer.comparisons[-1]
    ways = {way.name: way for way in largest.ways}
    advised = ways[advice.way or "refined"]
    best = max(largest.ways, key=largest.speed_up)
    shown_ways = {way.name: way for way in (ways["refined"], advised, best)}
    rows = "drawn from it" if answer.num_rows is None else f"{answer.num_rows:,} rows"
    tokens = ", ".join(f"{name} {value:,.0f}" for name, value in answer.quantiles().items())
    tables = tuple(_table(answer, result) for result in answer.comparisons)
    shown = set(tables[0].columns)
    on_ranks = f"on {largest.num_ranks} ranks"
    layers = "" if answer.task == "tokens" else " of the layers"
    return Page(
        title="What balancing would gain",
        subtitle=f"{answer.source}: {rows}. Tokens of a row: {tokens}. Cost: {answer.task}.",
        answer=advice.text,
        copy=tuple(line for line in (advice.options, advice.code) if line),
        figures=(
            (f"{largest.ways[0].total:.2f}", f"largest load ÷ mean as loaded, {on_ranks}"),
            *(
                (f"{largest.speed_up(way):.2f}×", f"speed-up{layers}, {_in_words(name)}")
                for name, way in shown_ways.items()
            ),
            (f"{largest.possible:.2f}×", "possible with equal ranks"),
        ),
        sections=(
            *_advice_by_ranks([answer.advice(result) for result in answer.comparisons]),
            Section(
                "Where the load lies, and what lifts it",
                paragraphs=tuple(answer.dominant()),
                pictures=pictures_of(answer),
            ),
            Section("All ways of dealing the rows", paragraphs=answer.notes, tables=tables),
            Section(
                "How to read it",
                paragraphs=(
                    "Every way deals the same rows, as training would. Speed-up is that of the layers: embeddings, the "
                    "optimizer and the all-reduce of gradients take as long before as after, so that a whole step "
                    "gains less. Windows and steps of constant cost change which rows share a step. A line with the "
                    "name of another in brackets is the same as that one (=), or looks the same (≈).",
                ),
                terms=tuple(term for term in _COLUMNS if term[0].split(",")[0] in shown),
            ),
        ),
        command=command,
    )


def _advice_by_ranks(advices: Sequence[Advice]) -> Iterator[Section]:
    """What to do on each number of ranks; nothing where there is one, of which the page's first lines say it."""
    if len(advices) > 1:
        yield Section(
            "What to do, by number of ranks",
            paragraphs=tuple(f"{advice.text} {advice.options}".rstrip() for advice in advices),
        )


def _in_words(way: str) -> str:
    return "each batch balanced" if way == "refined" else way


def _marked(ways: Sequence[DealtRows], place: int) -> str:
    """The name of a way, with that of an earlier one that gives ranks the same loads."""
    name, loads = ways[place].name, np.sort(ways[place].loads, axis=1)
    alike = (way.name for way in ways[:place] if np.array_equal(np.sort(way.loads, axis=1), loads))
    same = next(alike, None)
    return name if same is None else f"{name} (= {same})"


def _table(answer: Answer, result: Comparison) -> PageTable:
    cells = [cells_of(answer, result, way) for way in result.ways]
    names = [way.name for way in result.ways]
    advised = answer.advice(result).way
    return PageTable(
        tuple(cells[0]),
        tuple((_marked(result.ways, place), *list(row.values())[1:]) for place, row in enumerate(cells)),
        f"{result.num_ranks} ranks × {result.rows.batch_size} rows, {result.rows.num_steps} steps",
        marked=names.index(advised) if advised in names else None,
    )


def page_of_steps(results: Sequence[SimulatedSteps], title: str, notes: Sequence[str], command: str) -> Page:
    """What a config's batches would gain, as a page.

    Args:
        results: of every number of ranks and window.
        title: what was looked at.
        notes: what to know of it.
        command: how it was made, for the page's end.
    """
    best = _best(results)
    ranks = sorted({result.num_ranks for result in results})
    advices = [_advice_of_steps(_best([result for result in results if result.num_ranks == each])) for each in ranks]
    has_windows = any(result.window > 1 for result in results)
    cells = [cells_of_steps(result, has_windows=has_windows) for result in results]
    advice = _advice_of_steps(best)
    return Page(
        title="What balancing would gain",
        subtitle=title,
        answer=advice.text,
        copy=(advice.options,) if advice.options else (),
        figures=(
            (f"{best.speed_up:.2f}×", f"speed-up{'' if best.in_ms else ' of the layers'} on {best.num_ranks} ranks"),
            (f"{best.possible_speed_up:.2f}×", "possible: no plan gains more"),
            (f"{best.tokens_moved:.0%}", "of the tokens change rank"),
        ),
        sections=(
            *_advice_by_ranks(advices),
            Section(
                "Ranks and windows",
                paragraphs=tuple(notes),
                pictures=pictures_of_steps(results),
                tables=(
                    PageTable(
                        tuple(cells[0]), tuple(tuple(row.values()) for row in cells), marked=list(results).index(best)
                    ),
                ),
                terms=(
                    (
                        "imbalance",
                        ("of the sums over all steps, " if has_windows else "")
                        + "largest ÷ mean − 1, as loaded → balanced.",
                    ),
                    ("possible", "the speed-up at the planner's lower bound: no plan gains more."),
                    ("moved", "tokens that change rank, of all."),
                ),
            ),
        ),
        command=command,
    )


def _best(results: Sequence[SimulatedSteps]) -> SimulatedSteps:
    """The one with the shortest window within 2 % of the most."""
    most = max(result.speed_up for result in results)
    return next(result for result in sorted(results, key=lambda each: each.window) if WORTH * result.speed_up > most)


def _advice_of_steps(best: SimulatedSteps) -> Advice:
    """What to do on a number of ranks, of which `best` gains most."""
    on_ranks = f"On {best.num_ranks} ranks balancing"
    together = f" in windows of {best.window} batches" if best.window > 1 else ""
    of_what = "of a whole step, by the calibration" if best.in_ms else "in the layers' time; a whole step gains less"
    gain = f"{best.speed_up:.2f}×, of {best.possible_speed_up:.2f}× possible, {of_what}"
    if best.speed_up < WORTH:
        return Advice(f"{on_ranks} gains {gain}: leave it off.")
    window = f" --trainer.shuffle-window {best.window}" if best.window > 1 else ""
    return Advice(f"{on_ranks}{together} gains {gain}.", f"--trainer.enable-balanced-shuffler{window}")


def cells_of_steps(result: SimulatedSteps, *, has_windows: bool) -> dict[str, str]:
    """A row of the table, by column."""
    uneven = result.imbalance_before, result.imbalance_after
    if has_windows:
        uneven = result.total_imbalance_before, result.total_imbalance_after
    cells = {"ranks": str(result.num_ranks)}
    if has_windows:
        cells["window"] = str(result.window)
    cells["imbalance"] = f"{uneven[0]:.1%} → {uneven[1]:.2%}"
    if result.in_ms:
        cells["slowest rank"] = f"{result.cost_before.mean():.1f} → {result.cost_after.mean():.1f} ms"
    return cells | {
        "speed-up": f"{result.speed_up:.2f}×",
        "possible": f"{result.possible_speed_up:.2f}×",
        "moved": f"{result.tokens_moved:.1%}",
    }
