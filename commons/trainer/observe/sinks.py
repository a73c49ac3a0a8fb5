"""Sinks: outputs for the numbers of a run, with one protocol for `ShuffleStats.to_dict()` and for lines of the log.

A record is a mapping with `step`, numbers by name and, for some names, a list with one number per rank. log.jsonl is
written immediately. Every other sink writes to a library that the extra of its name installs. It is opened and written
by its own thread, so training never waits for it; the first failure of each sink is logged.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import math
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from commons.distributed.engine.worker import DaemonWorker
from commons.run_log.files import CONFIG_FILE, TENSORBOARD_FOLDER, TRACKERS_FILE, finite_only, flat, write_whole
from commons.trainer.config.args import TrainerArgs
from commons.trainer.config.sink_options import SinkName
from commons.trainer.observe.meter import AVERAGED, PER_RANK
from commons.trainer.ranks.stop import sigterm_calls

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
# Timeouts: for Weights & Biases to start a run, and for an export of OpenTelemetry.
_INIT_SECONDS, _EXPORT_SECONDS = 60, 10
# MLflow's limits: parameters per call, and characters per value.
_MOST_PARAMS, _MOST_CHARACTERS = 100, 6000
# Held while the file of the trackers' ids is changed: every tracker is opened by its own thread.
_TRACKERS_LOCK = threading.Lock()


class Sink(NamedTuple):
    """The functions of a library that write a record (JSON-ready except NaN) and close; both raise on failure.

    `close` is called with True if the run has failed.
    """

    write: Callable[[Mapping[str, Any]], None]
    close: Callable[[bool], object]


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
        kind = "shuffle" if name in AVERAGED or name in PER_RANK else "train"
        tag = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"{kind}/{name}"
        named = by_rank(value) if isinstance(value, (list, tuple)) else {"": value}
        figures += [Figure(tag, rank, float(each)) for rank, each in named.items() if isinstance(each, (int, float))]
    return figures


class JsonLines:
    """Writes a line of JSON per record, null for NaN and infinity; with `append` to the end of an existing file."""

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self._file = path.open("ab", buffering=0)  # also after another program has truncated it
        if not append and path.is_file():  # unlike a pipe
            self._file.truncate(0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a whole line; after an OSError, such as a full disk, the file has no part of it."""
        left = memoryview((json.dumps(finite_only(record)) + "\n").encode())
        end = os.fstat(self._file.fileno()).st_size
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):  # of a pipe, which has no end
                self._file.truncate(end)
            raise

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

        def write(sink: Sink) -> None:
            self._room.release()
            sink.write(record)

        self._submit(write)

    def finish(self, *, failed: bool = False) -> None:
        """Queue the close after the waiting records; does not wait."""

        def close(sink: Sink) -> None:
            sink.close(failed)

        self._submit(close)
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
    return [BackgroundSink(name, functools.partial(OPENERS[name], args, first_step)) for name in args.sinks]


def close_sinks(sinks: Sequence[BackgroundSink], *, failed: bool = False) -> None:
    """Close all sinks in parallel, those of a failed run with `failed`; waits at most 15 seconds in total."""
    until = time.monotonic() + _CLOSE_SECONDS
    # torchrun sends SIGTERM if a rank fails.
    with sigterm_calls(signal.SIG_IGN) if failed else contextlib.nullcontext():
        for sink in sinks:
            sink.finish(failed=failed)
        for sink in sinks:
            sink.wait(until)


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


def tensorboard(args: TrainerArgs, first_step: int) -> Sink:
    """Scalars for TensorBoard; earlier scalars of steps after `first_step` are hidden."""
    from torch.utils.tensorboard import SummaryWriter

    folder = Path(args.run_dir) / TENSORBOARD_FOLDER
    writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else 0)

    def write(record: Mapping[str, Any]) -> None:
        for figure in figures_of(record):
            writer.add_scalar(figure.path, figure.value, record["step"])

    return Sink(write, lambda failed: writer.close())


def wandb(args: TrainerArgs, first_step: int) -> Sink:
    """A run of Weights & Biases; mode "offline" writes it to `<run_dir>/wandb`, for `wandb sync`."""
    import wandb

    run_dir, options = Path(args.run_dir), args.sink_options.wandb
    name = _known_run(run_dir, "wandb", first_step) or secrets.token_hex(8)
    run = wandb.init(
        project=options.project,
        name=run_dir.name,
        id=name,
        resume="allow",
        dir=str(run_dir),
        config=_read(run_dir / CONFIG_FILE),
        mode=options.mode,
        settings=wandb.Settings(init_timeout=_INIT_SECONDS, silent=True, console="off"),
    )
    _remember(run_dir, "wandb", name)

    def write(record: Mapping[str, Any]) -> None:
        run.log({figure.path: figure.value for figure in figures_of(record)}, step=record["step"])

    return Sink(write, lambda failed: run.finish(exit_code=int(failed)))


def mlflow(args: TrainerArgs, first_step: int) -> Sink:
    """A run of MLflow; its settings become parameters."""
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    run_dir, options = Path(args.run_dir), args.sink_options.mlflow
    client = MlflowClient(tracking_uri=options.uri)
    name = _known_run(run_dir, "mlflow", first_step)
    if name is None:
        experiment = client.get_experiment_by_name(options.project)
        number = client.create_experiment(options.project) if experiment is None else experiment.experiment_id
        name = client.create_run(number, run_name=run_dir.name).info.run_id
        params = [
            Param(_key(path), str(value)[:_MOST_CHARACTERS]) for path, value in flat(_read(run_dir / CONFIG_FILE))
        ]
        for first in range(0, len(params), _MOST_PARAMS):
            client.log_batch(name, params=params[first : first + _MOST_PARAMS])
        _remember(run_dir, "mlflow", name)
    else:
        client.update_run(name, status="RUNNING")

    def write(record: Mapping[str, Any]) -> None:
        now = time.time_ns() // 1_000_000
        metrics = [Metric(_key(each.path), each.value, now, record["step"]) for each in figures_of(record)]
        client.log_batch(name, metrics=metrics)

    return Sink(write, lambda failed: client.set_terminated(name, "FAILED" if failed else "FINISHED"))


def opentelemetry(args: TrainerArgs, first_step: int) -> Sink:
    """Gauges `evenrank.train.loss`, ... over OTLP/HTTP, one export per record; with attribute `rank` per rank.

    The resource has `evenrank.run_dir`.
    """
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider, _Gauge
    from opentelemetry.sdk.metrics.export import AggregationTemporality as Temporality
    from opentelemetry.sdk.metrics.export import MetricExportResult, PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    class Exporter(OTLPMetricExporter):
        has_failed = False

        def export(self, *args: Any, **kwargs: Any) -> Any:
            self.has_failed = True
            result = super().export(*args, **kwargs)
            self.has_failed = result is not MetricExportResult.SUCCESS
            return result

    options = args.sink_options.opentelemetry
    # With "delta" an export has only its record's numbers, without those of earlier records.
    temporality: dict[type, Temporality] = {_Gauge: Temporality.DELTA}
    exporter = Exporter(endpoint=options.endpoint, timeout=_EXPORT_SECONDS, preferred_temporality=temporality)
    resource = Resource.create({"service.name": options.service, "evenrank.run_dir": args.run_dir})
    # Exported with every record, not periodically.
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=math.inf)
    provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    create = functools.cache(provider.get_meter("evenrank").create_gauge)

    def write(record: Mapping[str, Any]) -> None:
        for figure in _with_step(record):
            gauge = create(re.sub(r"[^\w.]", "_", f"evenrank.{figure.tag.replace('/', '.')}"))
            gauge.set(figure.value, {"rank": figure.rank} if figure.rank else None)
        provider.force_flush()
        if exporter.has_failed:
            raise ConnectionError("the export failed; see the exporter's messages in the log")

    return Sink(write, lambda failed: provider.shutdown())


def prometheus(args: TrainerArgs, first_step: int) -> Sink:
    """Gauges `evenrank_train_loss`, ... at `http://host:port/metrics`; per-rank gauges have a label `rank`.

    They are those of the last line of steps and of the last evaluation: a number that these lack has no gauge.
    """
    from prometheus_client import CollectorRegistry, Metric, start_http_server
    from prometheus_client.registry import Collector

    registry, options, latest = CollectorRegistry(), args.sink_options.prometheus, list[Figure]()

    class Latest(Collector):
        def collect(self) -> Iterable[Metric]:
            gauges: dict[str, Metric] = {}
            for tag, rank, value in latest:
                name = re.sub(r"\W", "_", f"evenrank_{tag}")
                gauge = gauges.setdefault(name, Metric(name, tag, "gauge"))
                gauge.add_sample(name, {"rank": rank} if rank else {}, value)
            return gauges.values()

    registry.register(Latest())
    server, _ = start_http_server(options.port, options.host, registry)

    def write(record: Mapping[str, Any]) -> None:
        nonlocal latest
        kinds = {each.tag.startswith("eval/") for each in figures_of(record)}
        others = [each for each in latest if each.tag.startswith("eval/") not in kinds and each.tag != "step"]
        latest = others + _with_step(record)

    def close(failed: bool) -> None:
        server.shutdown()
        server.server_close()

    return Sink(write, close)


# Functions that open a sink, by its name; `first_step` is the number of steps before a resumed run.
OPENERS: dict[SinkName, Callable[[TrainerArgs, int], Sink]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
    "opentelemetry": opentelemetry,
    "prometheus": prometheus,
}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _known_run(run_dir: Path, tracker: str, first_step: int) -> str | None:
    """The run's id in a tracker, if this run continues a run; None for a new run."""
    return _read(run_dir / TRACKERS_FILE).get(tracker) if first_step else None


def _remember(run_dir: Path, tracker: str, name: str) -> None:
    """Save the run's id in a tracker."""
    path = run_dir / TRACKERS_FILE
    with _TRACKERS_LOCK:
        write_whole(path, json.dumps({**_read(path), tracker: name}) + "\n")


def _with_step(record: Mapping[str, Any]) -> list[Figure]:
    return [*figures_of(record), Figure("step", "", record["step"])]


def _key(path: str) -> str:
    """A name with only characters that MLflow allows.

    >>> _key("eval/NDCG@10")
    'eval/NDCG_10'
    """
    return re.sub(r"[^\w./ -]", "_", path)
