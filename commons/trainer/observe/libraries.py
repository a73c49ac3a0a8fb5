"""Sinks of other libraries, each in the extra of its name; a resumed run goes on in the same run of a tracker."""

from __future__ import annotations

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

# How long Weights & Biases may take to begin a run, and an export of OpenTelemetry.
_INIT_SECONDS, _EXPORT_SECONDS = 60, 10
# What MLflow takes at a time, and of a value.
_MOST_PARAMS, _MOST_CHARACTERS = 100, 6000


class TensorBoard:
    """Scalars for TensorBoard; what an earlier run has written of steps after `first_step` is hidden."""

    def __init__(self, args: TrainerArgs, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(args.run_dir) / TENSORBOARD_FOLDER
        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else 0)

    def write(self, record: Mapping[str, Any]) -> None:
        """As in Sink."""
        for figure in figures_of(record):
            self._writer.add_scalar(figure.path, figure.value, record["step"])

    def close(self) -> None:
        """As in Sink."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; mode "offline" keeps it in `<run_dir>/wandb`, for `wandb sync`."""

    def __init__(self, args: TrainerArgs, first_step: int) -> None:
        import wandb

        run_dir, options = Path(args.run_dir), args.sink_options.wandb
        known = _known_runs(run_dir, first_step)
        name = known.get("wandb") or secrets.token_hex(8)
        self._run = wandb.init(
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

    def write(self, record: Mapping[str, Any]) -> None:
        """As in Sink."""
        self._run.log({figure.path: figure.value for figure in figures_of(record)}, step=record["step"])

    def close(self) -> None:
        """As in Sink."""
        self._run.finish()


class Mlflow:
    """A run of MLflow; its settings become parameters."""

    def __init__(self, args: TrainerArgs, first_step: int) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        run_dir, options = Path(args.run_dir), args.sink_options.mlflow
        self._client = MlflowClient(tracking_uri=options.uri)
        name = _known_runs(run_dir, first_step).get("mlflow")
        if name is None:
            experiment = self._client.get_experiment_by_name(options.project)
            number = self._client.create_experiment(options.project) if experiment is None else experiment.experiment_id
            name = self._client.create_run(number, run_name=run_dir.name).info.run_id
            params = [Param(_key(path), str(value)[:_MOST_CHARACTERS]) for path, value in flat(_settings(run_dir))]
            for first in range(0, len(params), _MOST_PARAMS):
                self._client.log_batch(name, params=params[first : first + _MOST_PARAMS])
            _remember(run_dir, "mlflow", name)
        else:
            self._client.update_run(name, status="RUNNING")
        self._name = name

    def write(self, record: Mapping[str, Any]) -> None:
        """As in Sink."""
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        metrics = [Metric(_key(each.path), each.value, now, record["step"]) for each in figures_of(record)]
        self._client.log_batch(self._name, metrics=metrics)

    def close(self) -> None:
        """As in Sink."""
        self._client.set_terminated(self._name)


class OpenTelemetry:
    """Gauges `evenrank.train.loss`, ...; those of a rank have the attribute `rank`.

    `provider` is an `opentelemetry.sdk.metrics.MeterProvider` with its readers; `exporter.has_failed` says whether the
    last export failed, where that is known.
    """

    def __init__(self, provider: Any, exporter: Any = None) -> None:
        self._provider, self._exporter = provider, exporter
        self._meter = provider.get_meter("evenrank")
        self._gauges: dict[str, Any] = {}

    @classmethod
    def over_http(cls, args: TrainerArgs, first_step: int) -> OpenTelemetry:
        """OTLP over HTTP, one export a record; the resource has `evenrank.run_dir`."""
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
        # Exported with every record, not by the clock.
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=math.inf)
        return cls(MeterProvider([reader], resource=resource, shutdown_on_exit=False), exporter)

    def write(self, record: Mapping[str, Any]) -> None:
        """As in Sink."""
        for figure in _with_step(record):
            name = re.sub(r"[^\w.]", "_", f"evenrank.{figure.tag.replace('/', '.')}")
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(name)
            self._gauges[name].set(figure.value, {"rank": figure.rank} if figure.rank else None)
        self._provider.force_flush()
        if getattr(self._exporter, "has_failed", False):
            raise ConnectionError("the export failed; see the exporter's messages in the log")

    def close(self) -> None:
        """As in Sink."""
        self._provider.shutdown()


class Prometheus:
    """Gauges `evenrank_train_loss`, ... at `http://host:port/metrics`; those of a rank have the label `rank`.

    With port 0 any free one is taken: `port` says which.
    """

    def __init__(self, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        self._gauges: dict[tuple[str, bool], Any] = {}
        self._server, _ = start_http_server(port, host, self._registry)
        self.port = self._server.server_port

    def write(self, record: Mapping[str, Any]) -> None:
        """As in Sink."""
        from prometheus_client import Gauge

        for figure in _with_step(record):
            name, of_rank = re.sub(r"\W", "_", f"evenrank_{figure.tag}"), bool(figure.rank)
            if (name, of_rank) not in self._gauges:
                labels = ["rank"] if of_rank else []
                self._gauges[name, of_rank] = Gauge(name, figure.tag, labels, registry=self._registry)
            gauge = self._gauges[name, of_rank]
            (gauge.labels(figure.rank) if of_rank else gauge).set(figure.value)

    def close(self) -> None:
        """As in Sink."""
        self._server.shutdown()
        self._server.server_close()


# Each makes its sink for a run that has `first_step` steps behind it.
OPENERS: dict[SinkName, Callable[[TrainerArgs, int], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "opentelemetry": OpenTelemetry.over_http,
    "prometheus": lambda args, _: Prometheus(args.sink_options.prometheus.host, args.sink_options.prometheus.port),
}


def _settings(run_dir: Path) -> dict[str, Any]:
    path = run_dir / CONFIG_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _known_runs(run_dir: Path, first_step: int) -> dict[str, str]:
    """The trackers' names for the run that this one goes on with; none for a new run."""
    path = run_dir / TRACKERS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if first_step and path.is_file() else {}


def _remember(run_dir: Path, tracker: str, name: str) -> None:
    """Keep a tracker's name for the run."""
    known = _known_runs(run_dir, first_step=1)
    write_whole(run_dir / TRACKERS_FILE, json.dumps({**known, tracker: name}) + "\n")


def _with_step(record: Mapping[str, Any]) -> list[Figure]:
    return [*figures_of(record), Figure("step", "", record["step"])]


def _key(path: str) -> str:
    """A name that MLflow takes.

    >>> _key("eval/NDCG@10")
    'eval/NDCG_10'
    """
    return re.sub(r"[^\w./ -]", "_", path)
