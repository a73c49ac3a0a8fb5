"""The settings of each sink, under its name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from commons.checks import require_at_least

# All but tensorboard need an extra, which has the same name.
SinkName = Literal["tensorboard", "wandb", "mlflow", "opentelemetry", "prometheus"]
_LAST_PORT = 65535


@dataclass
class WandbOptions:
    """Settings of Weights & Biases."""

    project: str = "evenrank"  # project of the run
    mode: Literal["online", "offline"] = "online"  # whether it is sent, or kept in run_dir/wandb


@dataclass
class MlflowOptions:
    """Settings of MLflow."""

    project: str = "evenrank"  # experiment of the run
    uri: str | None = None  # tracking server or store, such as sqlite:///mlflow.db; None for MLflow's own default


@dataclass
class OpenTelemetryOptions:
    """Settings of OpenTelemetry."""

    service: str = "evenrank"  # `service.name` of the metrics
    # Where they are sent, such as http://localhost:4318/v1/metrics; None for the SDK's default.
    endpoint: str | None = None


@dataclass
class PrometheusOptions:
    """Settings of Prometheus."""

    host: str = "127.0.0.1"  # address that is scraped; 0.0.0.0 lets other machines do so
    port: int = 9464  # its port

    def __post_init__(self) -> None:
        require_at_least("port", self.port, 1)
        if self.port > _LAST_PORT:
            raise ValueError(f"port is {self.port}; ports end at {_LAST_PORT}: give another")


@dataclass
class SinkOptions:
    """Settings of the sinks, a table each; those of a sink that trainer.sinks does not name have no effect."""

    wandb: WandbOptions = field(default_factory=WandbOptions)  # Weights & Biases
    mlflow: MlflowOptions = field(default_factory=MlflowOptions)  # MLflow
    opentelemetry: OpenTelemetryOptions = field(default_factory=OpenTelemetryOptions)  # OpenTelemetry over OTLP/HTTP
    prometheus: PrometheusOptions = field(default_factory=PrometheusOptions)  # Prometheus
