"""Sinks: outputs for the numbers of a run, with one protocol for `ShuffleStats.to_dict()` and for lines of the log.

A record is a mapping with `step`, numbers by name and, for some names, a list with one number per rank. log.jsonl is
written immediately. Every other sink is opened and written by its own thread, so training never waits for it; the
first failure of each sink is logged.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from commons.distributed.engine.worker import DaemonWorker
from commons.run_log.files import without_nan
from commons.trainer.config.args import TrainerArgs
from commons.trainer.config.sink_options import SinkName
from commons.trainer.observe.meter import AVERAGED, PER_RANK

logger = logging.getLogger(__name__)

# The modules that a sink imports, by its name, which is also the name of the extra that installs them.
OPTIONAL: dict[SinkName, tuple[str, ...]] = {
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "opentelemetry": ("opentelemetry.sdk.metrics", "opentelemetry.exporter.otlp.proto.http"),
    "prometheus": ("prometheus_client",),
}
# With at most this number of ranks, every rank has a figure; with more, only the smallest, mean and largest value.
_MOST_RANKS = 64
# Maximum number of records that wait for a sink; further records are dropped.
_MOST_WAITING = 256
# Seconds that the end of a run waits for all sinks.
_CLOSE_SECONDS = 15.0


class Sink(NamedTuple):
    """The functions of a library that write a record (JSON-ready except NaN) and close; both raise on failure."""

    write: Callable[[Mapping[str, Any]], None]
    close: Callable[[], None]


class Figure(NamedTuple):
    """A number of a record."""

    tag: str  # `train/`, `shuffle/` or `eval/`, and the number's name
    rank: str  # the rank, "3"; with many ranks "smallest", "mean" or "largest"; "" for a number of the run
    value: float  # NaN without a value

    @property
    def path(self) -> str:
        """Tag and rank in one string."""
        return f"{self.tag}/{self.rank}" if self.rank else self.tag


def figures_of(record: Mapping[str, Any]) -> list[Figure]:
    """The numbers of a record, without `step`, text and None.

    >>> [figure.path for figure in figures_of({"step": 3, "loss": 0.5, "eval_auc": 0.7, "rank_speeds": [2.0, None]})]
    ['train/loss', 'eval/auc', 'shuffle/rank_speeds/0']
    """
    figures = []
    for name, value in record.items():
        if name == "step":
            continue
        named = {"": value}
        if isinstance(value, (list, tuple)):
            named = by_rank(value)
        figures += [
            Figure(_tag(name), rank, float(each)) for rank, each in named.items() if isinstance(each, (int, float))
        ]
    return figures


class JsonLines:
    """Writes a line of JSON for every record, with null for NaN; with `append` to the end of an existing file."""

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self._file = path.open("a" if append else "w", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a line and flush it."""
        self._file.write(json.dumps(without_nan(record)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class BackgroundSink:
    """Opens and writes a sink on its own thread, so that a failure of the sink does not end training."""

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        self._name = name
        self._worker = DaemonWorker(f"evenrank-sink-{name}")
        self._room = threading.Semaphore(_MOST_WAITING)
        self._has_warned = False
        self._sink = self._worker.submit(open_sink)

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue a record; returns immediately and raises nothing."""
        if not self._room.acquire(blocking=False):
            self._warn(f"{_MOST_WAITING} records wait for it")
            return
        kept = dict(record)

        def write(sink: Sink) -> None:
            self._room.release()
            sink.write(kept)

        self._submit(write)

    def finish(self) -> None:
        """Queue the close after the waiting records; does not wait."""
        self._submit(lambda sink: sink.close())
        self._worker.finish()

    def wait(self, until: float) -> None:
        """Wait until the thread has ended, at most until `until`, a time of the monotonic clock."""
        if not self._worker.stop(max(0.0, until - time.monotonic())):
            self._warn(f"it has not ended after {_CLOSE_SECONDS:g} s")

    def _submit(self, act: Callable[[Sink], None]) -> None:
        def job() -> None:
            try:
                act(self._sink.result())
            except Exception as error:  # raised by the library, when it opens, writes or closes
                self._warn(f"{type(error).__name__}: {error}")

        self._worker.submit(job)

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            reason = " ".join(why.split())
            logger.warning("sink %s failed: %s; training continues and log.jsonl is complete", self._name, reason)


def require_sinks(names: Iterable[SinkName]) -> None:
    """Raise ImportError for a sink whose library is not installed."""
    for name in names:
        for module in OPTIONAL.get(name, ()):
            try:
                found = importlib.util.find_spec(module) is not None
            except ModuleNotFoundError:  # a package above it
                found = False
            if not found:
                raise ImportError(
                    f"trainer.sinks has {name!r}, and {module} is not installed; it is part of an extra: "
                    f"pip install 'evenrank[{name}]'"
                )


def open_sinks(args: TrainerArgs, first_step: int = 0) -> list[BackgroundSink]:
    """Open the sinks of the settings; called on rank 0.

    `first_step` is the number of steps before a resumed run, which continues the tracker's run.
    """

    def open_sink(name: SinkName) -> Sink:
        from commons.trainer.observe.libraries import OPENERS

        return OPENERS[name](args, first_step)

    return [BackgroundSink(name, functools.partial(open_sink, name)) for name in args.sinks]


def close_sinks(sinks: Sequence[BackgroundSink]) -> None:
    """Close all sinks in parallel; waits at most 15 seconds in total."""
    until = time.monotonic() + _CLOSE_SECONDS
    for sink in sinks:
        sink.finish()
    for sink in sinks:
        sink.wait(until)


def _tag(name: str) -> str:
    """The tag of a number: its name below `eval/`, `shuffle/` or `train/`.

    >>> [_tag(name) for name in ("eval_auc", "imbalance_before", "loss")]
    ['eval/auc', 'shuffle/imbalance_before', 'train/loss']
    """
    if name.startswith("eval_"):
        return f"eval/{name.removeprefix('eval_')}"
    return f"{'shuffle' if name in AVERAGED or name in PER_RANK else 'train'}/{name}"


def by_rank(values: Sequence[float | None]) -> dict[str, float]:
    """The numbers by rank, without None; with more than 64 ranks the smallest, mean and largest number.

    >>> by_rank([3, None, 5]), by_rank(range(100))
    ({'0': 3, '2': 5}, {'smallest': 0, 'mean': 49.5, 'largest': 99})
    """
    known = {str(rank): value for rank, value in enumerate(values) if value is not None}
    if not known or len(values) <= _MOST_RANKS:
        return known
    numbers = known.values()
    return {"smallest": min(numbers), "mean": sum(numbers) / len(numbers), "largest": max(numbers)}
