"""One sentence on what a run has gained, or why not, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from commons.run_log.comparison import RunComparison
from commons.run_log.report import RunReport

# Balancing is worth it from this speed-up on.
_WORTH = 1.02
# Rates that differ by more than this part from what a run's own steps say are worth a word.
_APART = 0.1
# What the slowest rank gains, below which a gate is advised for a step whose balancing costs more than it saves.
_GATED = 0.05
# Unevenness that is left, above which it is worth a word.
_MUCH_LEFT = 0.05

_TURN_ON = "--trainer.enable-balanced-shuffler"
_OBSERVE = "--trainer.shuffler.mode observe"
_LONGER = "a window (--trainer.shuffle-window 2) or more rows per step lift that"


def advice_of(report: RunReport, beside: RunComparison | None = None) -> str:
    """Advice on a run in one sentence; `beside` compares it with an unbalanced run."""
    measured = ""
    if beside is not None and beside.compares and beside.rows_per_s is not None and beside.rows_per_s > 1:
        measured = f"it trains {beside.rows_per_s:.2f}× the rows per second of {beside.base}"
    if report.balancing == "off":
        return _of_unbalanced(report)
    if report.balancing == "balanced":
        return _of_balanced(report, measured)
    if not report.by_work:
        return _of_observed(report)
    # Rows that are even as they are dealt; the log does not say what they would cost dealt in turn.
    left = "" if report.gain.imbalance_before is None else f": {report.gain.imbalance_before:.1%} of imbalance is left"
    gains = f", and {measured}." if measured else ". What that gains, a run without it says: give both to report."
    return f"The rows are dealt by their work{left}{gains}"


def warning_of(report: RunReport) -> str:
    """A warning that time does not follow the loads, with the remedy; "" where it does, or that is not known."""
    fit = report.time_fit
    if fit is None or fit.follows:
        return ""
    of_ranks = fit.of == "ranks"
    of = "of ranks and steps" if of_ranks else "of lines of the log"
    other = f", did other work run beside it{'' if of_ranks else ', or is most of a step something else'}"
    return (
        f"Time does not follow the loads (R² {fit.r_squared:.2f}, {fit.points} points {of}), so less is gained than "
        f"they say: does the model pad to its longest row{other}? If it pads, pack the rows, or let every rank compute "
        "its rows in groups of like length: docs/own_shuffler.md, A model that pads."
    )


def verdict_on(beside: RunComparison, base: RunReport, report: RunReport) -> str:
    """How much faster a run is than the first one, and where that is not what its own steps say; "" if not known."""
    if beside.rows_per_s is None:
        return ""
    speed = f"{beside.run} trains {beside.rows_per_s:.2f}× the rows per second of {beside.base}"
    if beside.differences:
        more = f" and {len(beside.differences) - 1} more" if len(beside.differences) > 1 else ""
        return f"{speed}; not balancing alone tells them apart, they differ in {beside.differences[0]}{more}."
    own = report.gain.step if report.balancing == "balanced" and base.is_as_loaded else None
    if not own or abs(beside.rows_per_s / own - 1) < _APART:
        return f"{speed}."
    return (
        f"{speed}, while its own steps say that balancing gains {own:.2f}×: the two runs did not have equally fast "
        "machines, or other work ran beside one of them."
    )


def headline_of(beside: Sequence[RunComparison]) -> str:
    """All runs compared in one sentence, the fastest first, as `best_first` gives them."""
    compared = [each for each in beside if each.compares]
    if not compared:
        return "The runs differ in more than balancing, or do not know their speed: none is compared with another."
    (best, *others), apart = compared, [each.run for each in beside if not each.compares]
    speeds = [f"{best.run} trains {best.rows_per_s:.2f}× the rows per second of {best.base}"]
    speeds += [f"{each.run} {each.rows_per_s:.2f}×" for each in others]
    return ", ".join(speeds) + (f"; {', '.join(apart)} cannot be compared with it." if apart else ".")


def _of_unbalanced(report: RunReport) -> str:
    uneven = report.gain.imbalance_before
    if report.ranks == 1:
        return "A single rank waits for nobody: there is nothing to balance."
    if uneven is None:
        return f"The log does not say how even the ranks are: {_TURN_ON} {_OBSERVE} does, and moves nothing."
    if 1 + uneven < _WORTH:
        return f"The ranks are even as they load their rows: balancing gains {1 + uneven:.2f}× at most, leave it off."
    return (
        f"The slowest rank has {1 + uneven:.2f} times the mean load, and can become so much faster at most: turn on "
        f"{_TURN_ON}; with {_OBSERVE} it says what that gains, and moves nothing."
    )


def _of_observed(report: RunReport) -> str:
    gain = report.gain
    if gain.work is None or gain.work < _WORTH:
        return f"Nothing to gain: {_why_not(report, leave_off=True)}."
    steps = "" if gain.step is None else f" and a step {gain.step:.2f}×, the exchange not counted"
    return f"Balancing would make the slowest rank {gain.work:.2f}× faster{steps}: leave {_OBSERVE} out."


def _of_balanced(report: RunReport, measured: str) -> str:
    gain, time = report.gain, report.step_time
    what = "Reading the rows by their work" if report.by_work else "Balancing"
    if gain.work is None or gain.work < _WORTH:
        if measured:
            return f"The loads do not show a gain: {_why_not(report)}; yet {measured}."
        return f"{what} gains nothing: {_why_not(report, leave_off=True)}."
    # A sampler costs a step nothing: what the shuffler takes there is for the log.
    is_dear = gain.step is not None and gain.step < 1 and not report.by_work and not measured
    if is_dear and time is not None and time.saved is not None:
        # Where a usual step gains more than that, the gate would let none pass.
        passes = "let steps that gain little pass, with --trainer.shuffler.min-gain 0.05, or "
        return (
            f"Balancing costs more than it saves: {time.overhead:.1f} ms of a step for {time.saved:.1f} ms; "
            f"{passes if 1 - 1 / gain.work < _GATED else ''}leave it off."
        )
    possible = "" if gain.possible is None else f", of {gain.possible:.2f}× possible"
    steps = "" if gain.step is None else f", and a step {gain.step:.2f}×"
    gained = f"{what} makes the slowest rank {gain.work:.2f}× faster{possible}{steps}"
    left = gain.imbalance_after or 0.0
    if left < _MUCH_LEFT or report.window > 1:
        return f"{gained}."
    if (gain.gap or 0.0) < left / 2:
        return f"{gained}; the {left:.0%} that are left are rows that no plan can split: {_LONGER}."
    if report.by_work:
        return f"{gained}; {left:.0%} are left: {_LONGER}."
    return (
        f"{gained}; {left:.0%} are left: a smaller --trainer.shuffler.slack, a larger max_tokens_per_rank or free row "
        "counts (--trainer.shuffler.no-equal-size) may take more of it."
    )


def _why_not(report: RunReport, *, leave_off: bool = False) -> str:
    """Why the slowest rank has as much to do as before; and to leave balancing off, where ranks are even anyway."""
    gain = report.gain
    is_even = gain.imbalance_before is not None and 1 + gain.imbalance_before < _WORTH
    remedy = ", leave it off" if leave_off and is_even else ""
    if report.ranks == 1:
        return "a single rank waits for nobody"
    if (gain.gated or 0.0) >= 0.5:
        return f"in {gain.gated:.0%} of the steps the gain was below --trainer.shuffler.min-gain{remedy}"
    if is_even:
        dealt = "are dealt their rows in turn" if report.by_work else "load their rows"
        return f"the ranks are even as they {dealt}{remedy}"
    if gain.possible is not None and gain.possible < _WORTH:
        return f"the largest load is one row, or few, that no plan can split: {_LONGER}"
    return "no plan that keeps the settings is better: a larger max_tokens_per_rank or free row counts allow more"
