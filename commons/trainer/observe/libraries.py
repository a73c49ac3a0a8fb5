"""Sinks for other libraries, each installed by the extra of its name; a resumed run continues the tracker's run."""

from __future__ import annotations

import functools
import json
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from commons.run_log.files import CONFIG_FILE, TENSORBOARD_FOLDER, TRACKERS_FILE, flat, write_whole
from commons.trainer.config.args import TrainerArgs
from commons.trainer.config.sink_options import SinkName
from commons.trainer.observe.sinks import Figure, Sink, figures_of

# Timeouts: for Weights & Biases to start a run, and for an export of OpenTelemetry.
_INIT_SECONDS, _EXPORT_SECONDS = 60, 10
# MLflow's limits: parameters per call, and characters per value.
_MOST_PARAMS, _MOST_CHARACTERS = 100, 6000


def tensorboard(args: TrainerArgs, first_step: int) -> Sink:
    """Scalars for TensorBoard; earlier scalars of steps after `first_step` are hidden."""
    from torch.utils.tensorboard import SummaryWriter

    folder = Path(args.run_dir) / TENSORBOARD_FOLDER
    writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else 0)

    def write(record: Mapping[str, Any]) -> None:
        for figure in figures_of(record):
            writer.add_scalar(figure.path, figure.value, record["step"])

    return Sink(write, writer.close)


def wandb(args: TrainerArgs, first_step: int) -> Sink:
    """A run of Weights & Biases; mode "offline" writes it to `<run_dir>/wandb`, for `wandb sync`."""
    import wandb

    run_dir, options = Path(args.run_dir), args.sink_options.wandb
    name = _known_runs(run_dir, first_step).get("wandb") or secrets.token_hex(8)
    run = wandb.init(
        project=options.project,
        name=run_dir.name,
        id=name,
        resume="allow",
        dir=str(run_dir),
        config=_settings(run_dir),
        mode=options.mode,
        settings=wandb.Settings(init_timeout=_INIT_SECONDS, silent=True, console="off"),
    )
    _remember(run_dir, "wandb", name)

    def write(record: Mapping[str, Any]) -> None:
        run.log({figure.path: figure.value for figure in figures_of(record)}, step=record["step"])

    return Sink(write, run.finish)


def mlflow(args: TrainerArgs, first_step: int) -> Sink:
    """A run of MLflow; its settings become parameters."""
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    run_dir, options = Path(args.run_dir), args.sink_options.mlflow
    client = MlflowClient(tracking_uri=options.uri)
    name = _known_runs(run_dir, first_step).get("mlflow")
    if name is None:
        experiment = client.get_experiment_by_name(options.project)
        number = client.create_experiment(options.project) if experiment is None else experiment.experiment_id
        name = client.create_run(number, run_name=run_dir.name).info.run_id
        params = [Param(_key(path), str(value)[:_MOST_CHARACTERS]) for path, value in flat(_settings(run_dir))]
        for first in range(0, len(params), _MOST_PARAMS):
            client.log_batch(name, params=params[first : first + _MOST_PARAMS])
        _remember(run_dir, "mlflow", name)
    else:
        client.update_run(name, status="RUNNING")

    def write(record: Mapping[str, Any]) -> None:
        now = time.time_ns() // 1_000_000
        metrics = [Metric(_key(each.path), each.value, now, record["step"]) for each in figures_of(record)]
        client.log_batch(name, metrics=metrics)

    return Sink(write, lambda: client.set_terminated(name))


def opentelemetry(args: TrainerArgs, first_step: int) -> Sink:
    """Gauges `evenrank.train.loss`, ... over OTLP/HTTP, one export per record; with attribute `rank` per rank.

    The resource has `evenrank.run_dir`.
    """
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
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
    exporter = Exporter(endpoint=options.endpoint, timeout=_EXPORT_SECONDS)
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

    return Sink(write, provider.shutdown)


def prometheus(args: TrainerArgs, first_step: int) -> Sink:
    """Gauges `evenrank_train_loss`, ... at `http://host:port/metrics`; per-rank gauges have a label `rank`."""
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

    registry, options = CollectorRegistry(), args.sink_options.prometheus
    server, _ = start_http_server(options.port, options.host, registry)

    @functools.cache
    def gauge_of(tag: str, labels: tuple[str, ...]) -> Gauge:
        return Gauge(re.sub(r"\W", "_", f"evenrank_{tag}"), tag, labels, registry=registry)

    def write(record: Mapping[str, Any]) -> None:
        for figure in _with_step(record):
            gauge = gauge_of(figure.tag, ("rank",) if figure.rank else ())
            (gauge.labels(figure.rank) if figure.rank else gauge).set(figure.value)

    def close() -> None:
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


def _settings(run_dir: Path) -> dict[str, Any]:
    path = run_dir / CONFIG_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _known_runs(run_dir: Path, first_step: int) -> dict[str, str]:
    """The run's id in every tracker, if this run continues a run; empty for a new run."""
    path = run_dir / TRACKERS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if first_step and path.is_file() else {}


def _remember(run_dir: Path, tracker: str, name: str) -> None:
    """Save the run's id in a tracker."""
    known = _known_runs(run_dir, first_step=1)
    write_whole(run_dir / TRACKERS_FILE, json.dumps({**known, tracker: name}) + "\n")


def _with_step(record: Mapping[str, Any]) -> list[Figure]:
    return [*figures_of(record), Figure("step", "", record["step"])]


def _key(path: str) -> str:
    """A name with only characters that MLflow allows.

    >>> _key("eval/NDCG@10")
    'eval/NDCG_10'
    """
    return re.sub(r"[^\w./ -]", "_", path)
