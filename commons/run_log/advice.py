"""Advice on a run in one sentence: its gain, or the reason for no gain, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from commons.run_log.comparison import RunComparison
from commons.run_log.reading import setting
from commons.run_log.report import RunReport

# Smallest speed-up that is worth balancing.
_WORTH = 1.02
# Relative difference between two runs' rates and the gain in the run's own steps, above which it is mentioned.
_APART = 0.1
# Gain of the slowest rank below which a gate is advised, if balancing costs more than it saves.
_GATED = 0.05
# Remaining imbalance above which it is mentioned.
_MUCH_LEFT = 0.05

_TURN_ON = "--trainer.enable-balanced-shuffler"
_OBSERVE = "--trainer.shuffler.mode observe"


def advice_of(report: RunReport, comparison: RunComparison | None = None) -> str:
    """Advice on a run in one sentence; `comparison` is with an unbalanced run."""
    measured = ""
    if comparison is not None and comparison.compares and (comparison.rows_per_s or 0) > 1:
        measured = f"it trains {comparison.rows_per_s:.2f}× the rows per second of {comparison.base}"
    if report.balancing == "off" and not report.by_work:
        return _of_unbalanced(report)
    if report.balancing == "balanced":
        return _of_balanced(report, measured)
    if not report.by_work:
        return _of_observed(report)
    # The log does not have the loads of the same rows assigned to ranks in turn, so the gain is unknown.
    left = "" if report.gain.imbalance_before is None else f": the imbalance is {report.gain.imbalance_before:.1%}"
    gains = f", and {measured}." if measured else ". To measure the gain, train a run without it and report both."
    return f"The rows are assigned to ranks by their work{left}{gains}"


def warning_of(report: RunReport) -> str:
    """A warning that time does not follow the loads, with the remedy; "" if it does or if that is unknown."""
    fit = report.time_fit
    if fit is None or fit.follows:
        return ""
    of_ranks = fit.of == "ranks"
    of = "of ranks and steps" if of_ranks else "of lines of the log"
    more = "" if of_ranks else ", or most of a step does not depend on the loads"
    return (
        f"Time does not follow the loads (R² {fit.r_squared:.2f}, {fit.points} points {of}), so balancing gains less "
        f"than the loads predict. Possible causes: the model pads to its longest row, other work ran on the machine"
        f"{more}. If the model pads, pack the rows, or compute the rows of a rank in groups of similar length: "
        "docs/own_shuffler.md, A model that pads."
    )


def verdict_on(comparison: RunComparison, base: RunReport, report: RunReport) -> str:
    """The speed-up of a run over the first run, and whether its own steps show another gain; "" if unknown."""
    if comparison.rows_per_s is None:
        return ""
    speed = f"{comparison.run} trains {comparison.rows_per_s:.2f}× the rows per second of {comparison.base}"
    if comparison.differences:
        more = f" and {len(comparison.differences) - 1} more" if len(comparison.differences) > 1 else ""
        return f"{speed}; besides balancing, they differ in {comparison.differences[0]}{more}."
    is_alike = comparison.equal_steps and report.balancing == "balanced" and base.is_as_loaded
    own = report.gain.step if is_alike else None
    if not own or abs(comparison.rows_per_s / own - 1) < _APART:
        return f"{speed}."
    return (
        f"{speed}, but its own steps show a speed-up of {own:.2f}×: the machines of the two runs were not "
        "equally fast, or other work ran on one of them."
    )


def headline_of(comparisons: Sequence[RunComparison]) -> str:
    """All runs compared in one sentence, the fastest first, in the order of `best_first`."""
    compared = [each for each in comparisons if each.compares]
    if not compared:
        return "No runs can be compared: they differ in more than balancing, or their speed is unknown."
    (best, *others), apart = compared, [each.run for each in comparisons if not each.compares]
    speeds = [f"{best.run} trains {best.rows_per_s:.2f}× the rows per second of {best.base}"]
    speeds += [f"{each.run} {each.rows_per_s:.2f}×" for each in others]
    return ", ".join(speeds) + (f"; {', '.join(apart)} cannot be compared with it." if apart else ".")


def _of_unbalanced(report: RunReport) -> str:
    uneven = report.gain.uneven_before
    if report.ranks == 1:
        return "There is only one rank: nothing can be balanced."
    if uneven is None:
        return f"The log has no loads of the ranks: {_TURN_ON} {_OBSERVE} logs them, and moves no rows."
    if 1 + uneven < _WORTH:
        return f"The ranks have even loads without balancing, which can gain about {1 + uneven:.2f}×: leave it off."
    # "About": within a line of the log, steps with more work may be more uneven. "At most": a row is not divided.
    return (
        f"The slowest rank has {1 + uneven:.2f} times the mean load, so balancing can make it at most about "
        f"{1 + uneven:.2f}× faster: {_start(report)}; with {_OBSERVE} it reports the gain, and moves no rows."
    )


def _start(report: RunReport) -> str:
    """How to turn balancing on in a run that logged no loads."""
    config = report.log.config
    if setting(config, "trainer.enable_balanced_shuffler") is not True:
        return f"turn on {_TURN_ON}"
    if setting(config, "trainer.shuffler.mode") == "off":
        return "leave --trainer.shuffler.mode off out"
    return "choose the shuffler of the model (--shuffler-type)"


def _of_observed(report: RunReport) -> str:
    gain = report.gain
    if gain.work is None or gain.work < _WORTH:
        return f"Nothing to gain: {_why_not(report, leave_off=True)}."
    steps = "" if gain.step is None else f" and a step {gain.step:.2f}× without the time of the exchange"
    return f"Balancing would make the slowest rank {gain.work:.2f}× faster{steps}: leave {_OBSERVE} out."


def _of_balanced(report: RunReport, measured: str) -> str:
    gain, time = report.gain, report.step_time
    what = "Reading the rows by their work" if report.by_work else "Balancing"
    if gain.work is None or gain.work < _WORTH:
        if measured:
            return f"The loads show no gain: {_why_not(report)}; yet {measured}."
        return f"{what} gains nothing: {_why_not(report, leave_off=True)}."
    # With a sampler, the shuffler's time in a step is only for the log.
    is_dear = gain.step is not None and gain.step < 1 and not report.by_work and not measured
    if is_dear and time is not None and time.saved is not None:
        gate = "leave steps with a small gain unbalanced (--trainer.shuffler.min-gain 0.05), or "
        # No effect if a usual step gains more than the gate, or if the run had such a gate.
        is_gate_new = max(1 - 1 / gain.work, setting(report.log.config, "trainer.shuffler.min_gain") or 0.0) < _GATED
        return (
            f"Balancing costs more than it saves: {time.overhead:.1f} ms of a step to save {time.saved:.1f} ms; "
            f"{gate if is_gate_new else ''}leave it off."
        )
    possible = "" if gain.possible is None else f", of {gain.possible:.2f}× possible"
    steps = "" if gain.step is None else f", and a step {gain.step:.2f}×"
    has_budget = setting(report.log.config, "trainer.budget_per_rank") is not None
    than = " than the same steps with rows in turn" if has_budget else ""
    gained = f"{what} makes the slowest rank {gain.work:.2f}× faster{than}{possible}{steps}"
    left = gain.uneven_after or 0.0
    if left < _MUCH_LEFT or report.window > 1:
        return f"{gained}."
    # Rows that no plan can split, unless settings kept the plans from being better.
    if (gain.gap or 0.0) < (min(left / 2, _MUCH_LEFT) if _too_tight(report) else left / 2):
        why = f"the remaining imbalance of {left:.0%} comes from rows that no plan can split"
        return f"{gained}; {why}: {_longer(report)}."
    if report.by_work:
        return f"{gained}; the remaining imbalance is {left:.0%}: {_longer(report)}."
    return f"{gained}; the remaining imbalance is {left:.0%}: {_looser(report)} may reduce it."


def _looser(report: RunReport) -> str:
    """How to change the settings so that plans are better."""
    equal_size = setting(report.log.config, "trainer.shuffler.equal_size") is not False
    other = "free row counts (--trainer.shuffler.no-equal-size)" if equal_size else "more rows per step"
    return " or ".join(_too_tight(report)) or other


def _too_tight(report: RunReport) -> list[str]:
    """The settings that kept the run's plans from being better, and how to change them."""
    shuffler, half_gap = setting(report.log.config, "trainer.shuffler") or {}, (report.gain.gap or 0.0) / 2
    is_gated = report.gain.gated and shuffler.get("min_gain", 0.0) >= half_gap
    found = ["a smaller --trainer.shuffler.min-gain"] if is_gated else []
    if shuffler.get("partitioner", "refined") != "refined":
        found.append("--trainer.shuffler.partitioner refined")
    if shuffler.get("max_tokens_per_rank") is not None:
        found.append("a larger --trainer.shuffler.max-tokens-per-rank")
    if shuffler.get("slack", 0.0) >= half_gap:
        found.append("a smaller --trainer.shuffler.slack")
    return found


def _longer(report: RunReport) -> str:
    """How to plan more rows together, with the settings of the run."""
    config = report.log.config
    if setting(config, "trainer.budget_per_rank") is not None:
        rows = "train" if setting(config, "trainer.global_batch_size") is None else "global"
        return f"use a larger --trainer.budget-per-rank, and --trainer.{rows}-batch-size, its most rows"
    window = f"a window (--trainer.shuffle-window {2 * report.window}) or "
    return f"use {'' if setting(config, 'trainer.single_rank_load') is True else window}more rows per step"


def _why_not(report: RunReport, *, leave_off: bool = False) -> str:
    """Why the slowest rank's load did not fall; with `leave_off`, also the advice to leave balancing off."""
    gain = report.gain
    is_even = gain.uneven_before is not None and 1 + gain.uneven_before < _WORTH
    remedy = ", leave it off" if leave_off and is_even else ""
    if report.ranks == 1:
        return "there is only one rank"
    if gain.uneven_before is None:
        return "every row has workload 0, so there is nothing to balance: check get_workloads"
    if (gain.gated or 0.0) >= 0.5 and not report.by_work:
        return f"in {gain.gated:.0%} of the steps the gain was below --trainer.shuffler.min-gain{remedy}"
    if is_even:
        assigned = "with rows assigned to ranks in turn" if report.by_work else "without balancing"
        return f"the ranks have even loads {assigned}{remedy}"
    if gain.possible is not None and gain.possible < _WORTH:
        return f"the largest load is one row, or a few rows, that no plan can split: {_longer(report)}"
    better = _longer(report) if report.by_work else f"{_looser(report)} allows better plans"
    return f"no plan within the settings is better: {better}"
