"""The settings of each sink, by the sink's name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from commons.checks import require_at_least

# Every sink except tensorboard needs the extra of the same name.
SinkName = Literal["tensorboard", "wandb", "mlflow", "opentelemetry", "prometheus"]
_LAST_PORT = 65535


@dataclass
class WandbOptions:
    """Settings of Weights & Biases."""

    project: str = "evenrank"  # project of the run
    mode: Literal["online", "offline"] = "online"  # send the numbers, or only write them to run_dir/wandb


@dataclass
class MlflowOptions:
    """Settings of MLflow."""

    project: str = "evenrank"  # experiment of the run
    # Tracking server, such as http://localhost:5000, or, with the package mlflow instead of the extra's mlflow-skinny,
    # a database such as sqlite:///mlflow.db; None for MLflow's default.
    uri: str | None = None


@dataclass
class OpenTelemetryOptions:
    """Settings of OpenTelemetry."""

    service: str = "evenrank"  # `service.name` of the metrics
    # URL of the collector, such as http://localhost:4318/v1/metrics; None for the SDK's default.
    endpoint: str | None = None


@dataclass
class PrometheusOptions:
    """Settings of Prometheus."""

    host: str = "127.0.0.1"  # address of the endpoint; with 0.0.0.0 other machines can scrape it
    port: int = 9464  # port of the endpoint

    def __post_init__(self) -> None:
        require_at_least("port", self.port, 1)
        if self.port > _LAST_PORT:
            raise ValueError(f"port is {self.port}; the highest port is {_LAST_PORT}: give another")


@dataclass
class SinkOptions:
    """Settings of the sinks, one table per sink; the settings of a sink outside trainer.sinks have no effect."""

    wandb: WandbOptions = field(default_factory=WandbOptions)  # Weights & Biases
    mlflow: MlflowOptions = field(default_factory=MlflowOptions)  # MLflow
    opentelemetry: OpenTelemetryOptions = field(default_factory=OpenTelemetryOptions)  # OpenTelemetry over OTLP/HTTP
    prometheus: PrometheusOptions = field(default_factory=PrometheusOptions)  # Prometheus
