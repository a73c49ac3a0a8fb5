"""Where the numbers of a run go: one protocol for what `ShuffleStats.to_dict()` gives, and for a line of the log.

A record is a mapping with `step`, numbers by name, and under some names a list with a number of every rank. log.jsonl
is written at once. Every other sink is opened and written by a thread of its own, so that training never waits for it;
the first failure of each is logged.
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

# By sink, which is also the name of the extra that installs its library: what is imported.
OPTIONAL: dict[SinkName, tuple[str, ...]] = {
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "opentelemetry": ("opentelemetry.sdk.metrics", "opentelemetry.exporter.otlp.proto.http"),
    "prometheus": ("prometheus_client",),
}
# Ranks that are shown one by one; of more, what they lie between.
_MOST_RANKS = 64
# Records that wait for a sink; later ones are dropped.
_MOST_WAITING = 256
# How long the end of a run waits for what sinks have not written yet.
_CLOSE_SECONDS = 15.0


class Sink(NamedTuple):
    """What a library does with a record, JSON-ready but for NaN, and at the end; what it cannot do, it raises."""

    write: Callable[[Mapping[str, Any]], None]
    close: Callable[[], None]


class Figure(NamedTuple):
    """A number of a record."""

    tag: str  # where it is shown: `train/`, `shuffle/` or `eval/`, and its name
    rank: str  # of which rank, "3"; of many ranks "smallest", "mean" or "largest"; "" for a number of the run
    value: float  # NaN where it has none

    @property
    def path(self) -> str:
        """Tag and rank in one."""
        return f"{self.tag}/{self.rank}" if self.rank else self.tag


def figures_of(record: Mapping[str, Any]) -> list[Figure]:
    """The numbers of a record, without `step`, text, and what is not known.

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
    """A line of JSON for every record, with null for NaN; `append` goes on with an existing file."""

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self._file = path.open("a" if append else "w", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a line, at once."""
        self._file.write(json.dumps(without_nan(record)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing comes afterwards."""
        self._file.close()


class BackgroundSink:
    """A sink that is opened and written on a thread of its own: its failures do not reach the training."""

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        self._name = name
        self._worker = DaemonWorker(f"evenrank-sink-{name}")
        self._room = threading.Semaphore(_MOST_WAITING)
        self._has_warned = False
        self._sink = self._worker.submit(open_sink)

    def write(self, record: Mapping[str, Any]) -> None:
        """Take a record; returns at once, and raises nothing."""
        if not self._room.acquire(blocking=False):
            self._warn(f"{_MOST_WAITING} records wait for it")
            return
        kept = dict(record)

        def write(sink: Sink) -> None:
            self._room.release()
            sink.write(kept)

        self._submit(write)

    def finish(self) -> None:
        """Let it write what is not written yet, and end; does not wait."""
        self._submit(lambda sink: sink.close())
        self._worker.finish()

    def wait(self, until: float) -> None:
        """Wait for the end until a moment of the monotonic clock."""
        if not self._worker.stop(max(0.0, until - time.monotonic())):
            self._warn(f"it has not ended after {_CLOSE_SECONDS:g} s")

    def _submit(self, act: Callable[[Sink], None]) -> None:
        def job() -> None:
            try:
                act(self._sink.result())
            except Exception as error:  # of the library, or of a sink that could not be opened
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
                    f"trainer.sinks has {name!r}, and {module} is not installed; it comes with an extra: "
                    f"pip install 'evenrank[{name}]'"
                )


def open_sinks(args: TrainerArgs, first_step: int = 0) -> list[BackgroundSink]:
    """The sinks that the settings name; called on rank 0.

    A resumed run has `first_step` steps behind it, and goes on in the same run of a tracker.
    """

    def open_sink(name: SinkName) -> Sink:
        from commons.trainer.observe.libraries import OPENERS

        return OPENERS[name](args, first_step)

    return [BackgroundSink(name, functools.partial(open_sink, name)) for name in args.sinks]


def close_sinks(sinks: Sequence[BackgroundSink]) -> None:
    """Close sinks side by side; waits a quarter of a minute at most for all of them together."""
    until = time.monotonic() + _CLOSE_SECONDS
    for sink in sinks:
        sink.finish()
    for sink in sinks:
        sink.wait(until)


def _tag(name: str) -> str:
    """Where a number is shown: evaluations, the shuffler and the rest apart.

    >>> [_tag(name) for name in ("eval_auc", "imbalance_before", "loss")]
    ['eval/auc', 'shuffle/imbalance_before', 'train/loss']
    """
    if name.startswith("eval_"):
        return f"eval/{name.removeprefix('eval_')}"
    return f"{'shuffle' if name in AVERAGED or name in PER_RANK else 'train'}/{name}"


def by_rank(values: Sequence[float | None]) -> dict[str, float]:
    """The numbers of single ranks that have one or, of more than 64 ranks, what they lie between.

    >>> by_rank([3, None, 5]), by_rank(range(100))
    ({'0': 3, '2': 5}, {'smallest': 0, 'mean': 49.5, 'largest': 99})
    """
    known = {str(rank): value for rank, value in enumerate(values) if value is not None}
    if not known or len(values) <= _MOST_RANKS:
        return known
    numbers = known.values()
    return {"smallest": min(numbers), "mean": sum(numbers) / len(numbers), "largest": max(numbers)}
