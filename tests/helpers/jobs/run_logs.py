"""Folders of runs that have not been trained: steps whose times follow from their loads, and the log of them."""

import copy
import json
import statistics

import numpy as np

from commons.distributed.stats import stats_of_plan
from commons.perf_model.shuffle_plan import GatheredRows, plan_shuffle
from commons.run_log.reading import RunLog
from commons.run_log.report import RunReport

MS_PER_LOAD, FIXED_MS, EXCHANGE_MS, WAIT_MS = 2e-6, 30.0, 4.0, 0.5
LISTS = ("loads_before", "loads_after", "lookups_before", "lookups_after", "rank_speeds", "speeds", "own_ms")
CONFIG = {
    "trainer": {
        "train_batch_size": 8,
        "enable_balanced_shuffler": True,
        "run_dir": "x",
        "seed": 1,
        "shuffler": {"mode": "balance", "slack": 0.01},
        "balance_sampler": False,
        "log_interval": 5,
    },
    "model": {"hidden_size": 64},
}


def make_steps(count=60, ranks=4, rows=8, balances=True, speeds=None, sigma=1.2, exchanges=True):
    """One dictionary per step: the stats of a plan for random rows, and how long the step took."""
    rng, sizes, steps = np.random.default_rng(0), np.full(ranks, rows), []
    for number in range(1, count + 1):
        tokens = np.exp(rng.normal(4, sigma, (ranks, rows))).astype(np.int64) + 1
        plan = plan_shuffle(GatheredRows(sizes, sizes, (tokens * 20_000 + tokens**2 * 40).ravel(), tokens.ravel()))
        lookups = np.stack([tokens.sum(axis=1)] * 2, axis=1)
        (stats,) = stats_of_plan(plan, number, gather_ms=1.5, plan_ms=0.5, bytes_sent=2000, lookups=lookups)
        known = stats.carried_out(WAIT_MS, EXCHANGE_MS).to_dict()
        step = {name: value for name, value in known.items() if value not in (None, ())}
        step |= {name: list(step[name]) for name in LISTS if name in step}
        if not balances:
            step["loads_after"] = step["loads_before"]
        if not (balances and exchanges):
            step |= dict.fromkeys(("moved", "tokens_moved", "token_fraction_moved", "bytes_sent"), 0.0)
            step |= {"wait_ms": 0.0, "exchange_ms": 0.0}
        overhead = step["wait_ms"] + step["exchange_ms"]
        step |= {"loss": 0.7 - number * 1e-3, "step_ms": FIXED_MS + overhead + MS_PER_LOAD * max(step["loads_after"])}
        steps.append(step | ({} if speeds is None else {"rank_speeds": list(speeds)}))
    return steps


def line_of(steps):
    """The line of the log that some steps make."""
    last, total_ms = steps[-1], sum(step["step_ms"] for step in steps)
    line = {
        name: statistics.fmean(step[name] for step in steps) for name in last if name not in ("step", "step_ms", *LISTS)
    }
    return {
        "schema": 1,
        "step": last["step"],
        "tokens_per_s": sum(step["num_tokens"] for step in steps) / total_ms * 1e3,
        "rows_per_s": sum(step["num_rows"] for step in steps) / total_ms * 1e3,
        "step_ms": statistics.median(step["step_ms"] for step in steps),
        "tflops_per_rank": 0.01,
        **line,
        "ranks": len(last["loads_before"]),
        "steps": len(steps),
        "total_ms": total_ms,
        "ms_per_load": MS_PER_LOAD,
        **{name: last[name] for name in LISTS if name in last},
    }


def lines_of(steps, sizes=()):
    """Lines of so many steps each, and one of the rest."""
    ends = [end for end in np.cumsum(sizes, dtype=int).tolist() if end < len(steps)]
    return [line_of(steps[first:last]) for first, last in zip([0, *ends], [*ends, len(steps)])]


def config_of(**trainer):
    config = copy.deepcopy(CONFIG)
    config["trainer"] |= trainer
    return config


def write_run(folder, lines, config=CONFIG, summary=True):
    """The folder of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if summary:
        (folder / "summary.json").write_text('{"steps": 60}\n')
    return folder


def write_unlooked(folder, steps, sizes, *more, config=None):
    """A run without a shuffler: its log has the imbalance alone, and what else is given."""
    known = ("schema", "step", "loss", "tokens_per_s", "rows_per_s", "tflops_per_rank", "step_ms", "imbalance_before")
    lines = [{name: line[name] for name in (*known, "ranks", "steps", "total_ms")} for line in lines_of(steps, sizes)]
    return write_run(folder, [*lines, *more], config or config_of(enable_balanced_shuffler=False))


BALANCED, AS_LOADED = make_steps(), make_steps(balances=False)
SIZES, BY_STEP = [7, 3, 10, 1, 9, 12, 8], [1] * 60  # steps of each line


def report_of(folder, steps=BALANCED, sizes=SIZES, config=None, **changes):
    """The report of a run of these steps; `changes` are numbers of all lines."""
    lines = [line | changes for line in lines_of(steps, sizes)]
    return RunReport(RunLog(write_run(folder, lines, config_of() if config is None else config)))
