"""Sinks that show the latest numbers: OpenTelemetry metrics, and an address that Prometheus scrapes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from commons.trainer.config.sink_options import OpenTelemetryOptions
from commons.trainer.observe.sinks import Figure, figures_of

# How long an export may take.
_EXPORT_SECONDS = 10


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
    def over_http(cls, options: OpenTelemetryOptions, run_dir: str) -> OpenTelemetry:
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

        exporter = Exporter(endpoint=options.endpoint, timeout=_EXPORT_SECONDS)
        resource = Resource.create({"service.name": options.service, "evenrank.run_dir": run_dir})
        # Exported with every record, not by the clock.
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=math.inf)
        return cls(MeterProvider([reader], resource=resource, shutdown_on_exit=False), exporter)

    def write(self, record: Mapping[str, Any]) -> None:
        """As in Sink."""
        for figure in [*figures_of(record), Figure("step", "", record["step"])]:
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

        for figure in [*figures_of(record), Figure("step", "", record["step"])]:
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
