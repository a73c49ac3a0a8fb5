"""One sentence on what a run has gained, or why not, and what to do about it."""

from __future__ import annotations

from commons.run_log.comparison import Against
from commons.run_log.reading import setting
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


def advice_of(report: RunReport) -> str:
    """What to make of it, in one sentence."""
    if report.balancing == "off":
        return _of_unbalanced(report)
    return _of_observed(report) if report.balancing == "observed" else _of_balanced(report)


def verdict_on(against: Against, base: RunReport, report: RunReport) -> str:
    """How much faster a run is than the first one, and where that is not what its own steps say; "" if not known.

    Args:
        against: the run beside the first.
        base: the first.
        report: the run.
    """
    if against.rows_per_s is None:
        return ""
    said = f"{against.run} trains {against.rows_per_s:.2f}× the rows per second of {against.base}"
    if against.differences:
        more = f" and {len(against.differences) - 1} more" if len(against.differences) > 1 else ""
        return f"{said}; not balancing alone tells them apart, they differ in {against.differences[0]}{more}."
    own = report.gain.step if report.balancing == "balanced" and _as_loaded(base) else None
    if own is None or abs(against.rows_per_s / own - 1) < _APART:
        return f"{said}."
    return (
        f"{said}, while its own steps say that balancing gains {own:.2f}×: the two runs did not have equally fast "
        "machines, or other work ran beside one of them."
    )


def _as_loaded(report: RunReport) -> bool:
    """Whether nobody has made its ranks even: what balancing gains is what it gains over such a run."""
    by_sampler = any(setting(report.log.config, f"trainer.{name}") for name in ("balance_sampler", "balance_batch"))
    return report.balancing != "balanced" and not by_sampler


def _of_unbalanced(report: RunReport) -> str:
    uneven = report.gain.imbalance_before
    if report.ranks == 1:
        return "A single rank waits for nobody: there is nothing to balance."
    if uneven is None:
        return f"The log does not say how even the ranks are: {_TURN_ON} {_OBSERVE} tells, and moves nothing."
    if 1 + uneven < _WORTH:
        return f"The ranks are even as they load their rows: balancing gains {1 + uneven:.2f}× at most, leave it off."
    return (
        f"The slowest rank has {1 + uneven:.2f} times the mean load, and can become so much faster at most: turn on "
        f"{_TURN_ON}; with {_OBSERVE} it says what that gains, and moves nothing."
    )


def _of_observed(report: RunReport) -> str:
    gain = report.gain
    if gain.work is None or gain.work < _WORTH:
        return f"Nothing to gain: {_why_not(report)}."
    steps = "" if gain.step is None else f" and a step {gain.step:.2f}×, the exchange not counted"
    is_observing = setting(report.log.config, "trainer.shuffler.mode") == "observe"
    remedy = f"leave {_OBSERVE} out" if is_observing else "read or dealt out by their work, rows are even but for that"
    return f"Balancing would make the slowest rank {gain.work:.2f}× faster{steps}: {remedy}."


def _of_balanced(report: RunReport) -> str:
    gain, time = report.gain, report.step_time
    if gain.work is None or gain.work < _WORTH:
        return f"Balancing gains nothing: {_why_not(report)}."
    if gain.step is not None and gain.step < 1 and time is not None and time.saved is not None:
        # Where a usual step gains more than that, the gate would let none pass.
        gate = (
            ""
            if 1 - 1 / gain.work >= _GATED
            else "let steps that gain little pass, with --trainer.shuffler.min-gain 0.05, or "
        )
        return (
            f"Balancing costs more than it saves: {time.overhead:.1f} ms of a step for {time.saved:.1f} ms; "
            f"{gate}leave it off."
        )
    possible = "" if gain.possible is None else f", of {gain.possible:.2f}× possible"
    steps = "" if gain.step is None else f", and a step {gain.step:.2f}×"
    said = f"Balancing makes the slowest rank {gain.work:.2f}× faster{possible}{steps}"
    left = gain.imbalance_after or 0.0
    if left < _MUCH_LEFT or report.window > 1:
        return f"{said}."
    if (gain.gap or 0.0) < left / 2:
        return f"{said}; the {left:.0%} that are left are rows that no plan can split: {_LONGER}."
    return (
        f"{said}; {left:.0%} are left: a smaller --trainer.shuffler.slack, a larger max_tokens_per_rank or free row "
        "counts (--trainer.shuffler.no-equal-size) may take more of it."
    )


def _why_not(report: RunReport) -> str:
    """Why the slowest rank has as much to do as before."""
    gain = report.gain
    if report.ranks == 1:
        return "a single rank waits for nobody"
    if (gain.gated or 0.0) >= 0.5:
        return f"in {gain.gated:.0%} of the steps the gain was below --trainer.shuffler.min-gain, or min-gain-ms"
    if gain.imbalance_before is not None and 1 + gain.imbalance_before < _WORTH:
        return "the ranks are even as they load their rows, leave it off"
    if gain.possible is not None and gain.possible < _WORTH:
        return f"the largest load is one row, or few, that no plan can split: {_LONGER}"
    return "no plan that keeps the settings is better: a larger max_tokens_per_rank or free row counts allow more"
