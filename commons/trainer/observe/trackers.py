"""Sinks that keep runs: Weights & Biases and MLflow. A resumed run goes on in the same run there."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commons.run_log.files import TRACKERS_FILE, flat, write_whole
from commons.trainer.config.sink_options import MlflowOptions, WandbOptions
from commons.trainer.observe.sinks import figures_of

# How long Weights & Biases may take to begin a run.
_INIT_SECONDS = 60
# What MLflow takes at a time, and of a value.
_MOST_PARAMS, _MOST_CHARACTERS = 100, 6000


@dataclass(frozen=True)
class Run:
    """A run, as trackers know it."""

    run_dir: Path  # its folder, whose name is the run's
    config: Mapping[str, Any]  # its settings
    goes_on: bool = False  # whether it was resumed

    def known_as(self, tracker: str) -> str | None:
        """The tracker's name for the run that this one goes on with; None for a new run."""
        path = self.run_dir / TRACKERS_FILE
        return json.loads(path.read_text(encoding="utf-8")).get(tracker) if self.goes_on and path.is_file() else None

    def remember(self, tracker: str, name: str) -> None:
        """Keep the tracker's name for the run."""
        path = self.run_dir / TRACKERS_FILE
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        write_whole(path, json.dumps({**known, tracker: name}) + "\n")


class Wandb:
    """A run of Weights & Biases; mode "offline" keeps it in `<run_dir>/wandb`, for `wandb sync`."""

    def __init__(self, run: Run, options: WandbOptions) -> None:
        import wandb

        name = run.known_as("wandb") or secrets.token_hex(8)
        self._run = wandb.init(
            project=options.project,
            name=run.run_dir.name,
            id=name,
            resume="allow",
            dir=str(run.run_dir),
            config=dict(run.config),
            mode=options.mode,
            settings=wandb.Settings(init_timeout=_INIT_SECONDS, silent=True, console="off"),
        )
        run.remember("wandb", name)

    def write(self, record: Mapping[str, Any]) -> None:
        """As in Sink."""
        self._run.log({figure.path: figure.value for figure in figures_of(record)}, step=record["step"])

    def close(self) -> None:
        """As in Sink."""
        self._run.finish()


class Mlflow:
    """A run of MLflow; its settings become parameters."""

    def __init__(self, run: Run, options: MlflowOptions) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=options.uri)
        name = run.known_as("mlflow")
        if name is None:
            experiment = self._client.get_experiment_by_name(options.project)
            number = self._client.create_experiment(options.project) if experiment is None else experiment.experiment_id
            name = self._client.create_run(number, run_name=run.run_dir.name).info.run_id
            params = [Param(_key(path), str(value)[:_MOST_CHARACTERS]) for path, value in flat(run.config)]
            for first in range(0, len(params), _MOST_PARAMS):
                self._client.log_batch(name, params=params[first : first + _MOST_PARAMS])
            run.remember("mlflow", name)
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


def _key(path: str) -> str:
    """A name that MLflow takes.

    >>> _key("eval/NDCG@10")
    'eval/NDCG_10'
    """
    return re.sub(r"[^\w./ -]", "_", path)
