"""Runs in Weights & Biases (offline) and MLflow (a store of its own): figures, settings, and resumed runs."""

from __future__ import annotations

import json
import struct

import pytest

from commons.trainer import TrainerArgs
from commons.trainer.config.sink_options import MlflowOptions, SinkOptions, WandbOptions
from commons.trainer.observe import sinks
from commons.trainer.observe.sinks import close_sinks, open_sinks

RECORDS = [{"step": 7, "loss": 0.5, "rank_speeds": [2.0, None]}, {"step": 7, "eval_NDCG@10": 0.25}]


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A busy machine takes longer to begin a run than its end waits for it."""
    monkeypatch.setattr(sinks, "_CLOSE_SECONDS", 120.0)


def keep(tmp_path, sink, first_step=0, failed=False, **options):
    (tmp_path / "run" / "config.json").parent.mkdir(exist_ok=True)
    (tmp_path / "run" / "config.json").write_text(json.dumps({"seed": 3, "trainer": {"shuffler": {"mode": "off"}}}))
    args = TrainerArgs(4, 4, run_dir=str(tmp_path / "run"), sinks=(sink,), sink_options=SinkOptions(**options))
    (opened,) = open_sinks(args, first_step)
    for record in RECORDS:
        opened.write(record | {"step": record["step"] + first_step})
    close_sinks([opened], failed=failed)
    return json.loads((tmp_path / "run" / "trackers.json").read_text())[sink]


def records_in(content):
    """Of a small file in the format of LevelDB's log: checksum, size and kind in front of each record."""
    at = 7
    while at + 7 < min(len(content), 32768):
        size, kind = struct.unpack_from("<HB", content, at + 4)
        if kind == 1:  # whole
            yield content[at + 7 : at + 7 + size]
        at += 7 + size


@pytest.mark.extra("mlflow")
def test_mlflow(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the store in files needs no database, and its leave
    from mlflow.tracking import MlflowClient

    uri = f"file:{tmp_path / 'store'}"
    name = keep(tmp_path, "mlflow", mlflow=MlflowOptions("mine", uri))
    assert keep(tmp_path, "mlflow", first_step=10, mlflow=MlflowOptions("mine", uri)) == name  # resumed
    assert [record.getMessage() for record in caplog.records if record.name.startswith("commons")] == []
    client = MlflowClient(tracking_uri=uri)
    run = client.get_run(name)
    assert client.get_experiment(run.info.experiment_id).name == "mine"
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.metrics == {"train/loss": 0.5, "shuffle/rank_speeds/0": 2.0, "eval/NDCG_10": 0.25}
    assert run.data.params == {"seed": "3", "trainer.shuffler.mode": "off"}
    assert [each.step for each in client.get_metric_history(name, "train/loss")] == [7, 17]
    keep(tmp_path, "mlflow", first_step=10, failed=True, mlflow=MlflowOptions("mine", uri))
    assert client.get_run(name).info.status == "FAILED"


@pytest.mark.extra("wandb")
def test_wandb_offline(tmp_path, caplog):
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    name = keep(tmp_path, "wandb", wandb=WandbOptions("mine", "offline"))
    # A finished run is written by wandb's own process, which may not have begun: this waits until it has ended.
    wandb.teardown()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("commons")] == []
    (path,) = (tmp_path / "run" / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb")
    found, run = {}, None
    for data in records_in(path.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            found |= {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
        elif kind == "run":
            run = record.run
    assert run.project == "mine" and run.display_name == "run" and run.run_id == name
    assert found["train/loss"] == 0.5 and found["eval/NDCG@10"] == 0.25 and found["shuffle/rank_speeds/0"] == 2.0
    assert found["_step"] == 7
