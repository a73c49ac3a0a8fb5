"""Sinks against the real libraries: figures arrive under their names, failures are said once, missing ones refused."""

import contextlib
import http.server
import json
import os
import queue
import resource
import signal
import socket
import sys
import threading
import urllib.request
from unittest import mock

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from commons.trainer import TrainerArgs
from commons.trainer.config.sink_options import OpenTelemetryOptions, PrometheusOptions, SinkOptions
from commons.trainer.observe import sinks as sinks_module
from commons.trainer.observe.sinks import (
    OPENERS,
    BackgroundSink,
    JsonLines,
    Sink,
    close_sinks,
    figures_of,
    open_sinks,
    require_sinks,
)
from tests.helpers.jobs.programs import run_program

NUMBERS = {"step": 7, "loss": 0.5, "eval_NDCG@10": 0.25, "moved": True}
RECORD = NUMBERS | {"loads_after": (3, 5), "rank_speeds": [2.0, None]}


def test_figures_have_a_place_each():
    found = {figure.path: figure.value for figure in figures_of({**RECORD, "note": "text", "mfu": None})}
    assert found == {
        "train/loss": 0.5,
        "eval/NDCG@10": 0.25,
        "shuffle/moved": 1.0,
        "shuffle/loads_after/0": 3.0,
        "shuffle/loads_after/1": 5.0,
        "shuffle/rank_speeds/0": 2.0,
    }
    assert len(figures_of({"step": 1, "rank_speeds": [1.0] * 64})) == 64
    many = {figure.rank: figure.value for figure in figures_of({"step": 1, "rank_speeds": [None, *range(64)]})}
    assert many == {"smallest": 0.0, "mean": 31.5, "largest": 63.0}


def test_lines_of_json(tmp_path):
    for append in (False, True):
        sink = JsonLines(tmp_path / "log.jsonl", append=append)
        numbers = {"eval_auc": float("nan"), "eval_perplexity": float("inf")}
        sink.write({"step": 1, **numbers, "rank_speeds": [1.0, float("inf")]})
        sink.close()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "eval_auc": None, "eval_perplexity": None, "rank_speeds": [1.0, None]}] * 2


def test_a_log_that_is_truncated_continues_at_its_beginning(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("of the run before\n")
    sink = JsonLines(path)
    for step in range(3):
        sink.write({"step": step})
        if step == 1:
            os.truncate(path, 0)  # as logrotate does with copytruncate
    sink.close()
    assert path.read_text() == '{"step": 2}\n'


def test_trackers_that_are_opened_at_once_are_all_remembered(tmp_path, monkeypatch):
    """Each by its own thread, which reads the file of their ids and writes it anew."""
    read, meeting = sinks_module._read, threading.Barrier(2)

    def read_together(path):
        content = read(path)
        with contextlib.suppress(threading.BrokenBarrierError):  # nobody else comes
            meeting.wait(0.5)
        return content

    monkeypatch.setattr(sinks_module, "_read", read_together)
    names = ("wandb", "mlflow")
    threads = [threading.Thread(target=sinks_module._remember, args=(tmp_path, name, "id")) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads((tmp_path / "trackers.json").read_text()) == dict.fromkeys(names, "id")


@pytest.mark.parametrize("append", [False, True])
def test_a_line_that_a_full_disk_cuts_is_left_out(tmp_path, append):
    path, line = tmp_path / "log.jsonl", {"step": 1, "loads_after": list(range(10_000, 14_000))}
    sink, (soft, hard) = JsonLines(path, append=append), resource.getrlimit(resource.RLIMIT_FSIZE)
    sink.write(line)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9000, hard))
        for _ in range(3):
            with pytest.raises(OSError, match="File too large"):
                sink.write(line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sink.write(line)
    sink.close()
    assert path.read_text() == (json.dumps(line) + "\n") * 2


def test_prometheus_scrapes_the_latest_numbers(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    args = args_for(tmp_path, "prometheus", prometheus=PrometheusOptions(port=port))
    sink = OPENERS["prometheus"](args, 0)
    try:
        sink.write(RECORD | {"rank_speeds": [2.0, 3.0], "measured_saving_ms": 9.0})
        steps = {name: value for name, value in RECORD.items() if not name.startswith("eval_")}
        sink.write(steps | {"step": 8, "loss": 0.25})  # the evaluation before is shown, numbers that are gone are not
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        sink.close(False)
    OPENERS["prometheus"](args, 0).close(False)  # the port is free again
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert {name: float(found[name]) for name in found} == {
        "evenrank_step": 8.0,
        "evenrank_train_loss": 0.25,
        "evenrank_eval_NDCG_10": 0.25,
        "evenrank_shuffle_moved": 1.0,
        'evenrank_shuffle_loads_after{rank="0"}': 3.0,
        'evenrank_shuffle_loads_after{rank="1"}': 5.0,
        'evenrank_shuffle_rank_speeds{rank="0"}': 2.0,
    }


class Collector(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append(ExportMetricsServiceRequest.FromString(body))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def collector():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.received, server.status = [], 200
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def args_for(tmp_path, *sinks, **options):
    return TrainerArgs(4, 4, run_dir=str(tmp_path), sinks=sinks, sink_options=SinkOptions(**options))


def write_to(collector, tmp_path, *records):
    options = OpenTelemetryOptions("mine", f"http://127.0.0.1:{collector.server_port}/v1/metrics")
    (sink,) = open_sinks(args_for(tmp_path, "opentelemetry", opentelemetry=options))
    for record in records:
        sink.write(record)
    close_sinks([sink])


def test_opentelemetry_is_sent_over_http(collector, tmp_path, caplog):
    write_to(collector, tmp_path, RECORD, {"step": 8, "rank_speeds": [None, 3.0]})
    first, second = (each.resource_metrics[0] for each in collector.received)
    named = {each.key: each.value.string_value for each in first.resource.attributes}
    assert named["service.name"] == "mine" and named["evenrank.run_dir"] == str(tmp_path)
    points, later = points_in(first), points_in(second)
    assert points["evenrank.train.loss",] == 0.5 and points["evenrank.eval.ndcg_10",] == 0.25
    assert points["evenrank.shuffle.loads_after", "1"] == 5.0 and points["evenrank.step",] == 7 and not caplog.records
    assert later == {("evenrank.shuffle.rank_speeds", "1"): 3.0, ("evenrank.step",): 8}


def points_in(metrics):
    return {
        (metric.name, *(each.value.string_value for each in point.attributes)): point.as_double or point.as_int
        for metric in metrics.scope_metrics[0].metrics
        for point in metric.gauge.data_points
    }


@pytest.mark.parametrize("raises", [False, True])
def test_a_collector_that_refuses_is_said_once(collector, tmp_path, caplog, monkeypatch, raises):
    collector.status = 400
    if raises:
        monkeypatch.setattr(OTLPMetricExporter, "export", mock.Mock(side_effect=OverflowError))
    write_to(collector, tmp_path, *[RECORD] * 3)
    said = [record.getMessage() for record in caplog.records if record.name == "commons.trainer.observe.sinks"]
    assert len(said) == 1 and said[0].startswith("sink opentelemetry failed: ConnectionError: the export")


def test_a_port_that_is_taken_ends_no_training(collector, tmp_path, caplog):
    (sink,) = open_sinks(args_for(tmp_path, "prometheus", prometheus=PrometheusOptions(port=collector.server_port)))
    for step in range(3):
        sink.write(RECORD | {"step": step})
    close_sinks([sink])
    (said,) = [record.getMessage() for record in caplog.records]
    assert "sink prometheus failed: OSError" in said and "training continues and log.jsonl is complete" in said


def test_a_sink_that_hangs_is_not_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(sinks_module, "_CLOSE_SECONDS", 0.1)
    until, taken = threading.Event(), []
    stuck = Sink(lambda record: until.wait(30), lambda failed: None)
    other = BackgroundSink("other", lambda: stuck)
    sink = BackgroundSink("mine", lambda: stuck._replace(write=lambda record: taken.append(record) or until.wait(30)))
    for step in range(1000):
        sink.write({"step": step})
    assert len(taken) <= 1
    other.write(RECORD)
    close_sinks([sink, other])
    until.set()
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("sink mine failed: 256 records wait for it")
    assert second.startswith("sink other failed: it has not ended after 0.1 s")


def test_sinks_write_every_record_in_time_and_are_closed_side_by_side(monkeypatch, caplog):
    monkeypatch.setattr(sinks_module, "_MOST_WAITING", 1)
    written, closed, all_close = queue.SimpleQueue(), [], threading.Barrier(4)
    sink = Sink(lambda record: written.put(record["step"]), lambda failed: closed.append(all_close.wait(30)))
    opened = [BackgroundSink(f"sink {index}", lambda: sink) for index in range(4)]
    for each in opened:
        for step in range(3):
            each.write({"step": step})
            assert written.get(timeout=30) == step
    close_sinks(opened)
    assert sorted(closed) == [0, 1, 2, 3] and not caplog.records


def test_closing_sinks_leaves_the_signal_handled_as_before(monkeypatch):
    """After a KeyboardInterrupt too; Python has no name of a handler that C has set, and cannot set it again."""
    monkeypatch.setattr(BackgroundSink, "wait", mock.Mock(side_effect=KeyboardInterrupt))
    before, sink = (
        signal.getsignal(signal.SIGTERM),
        BackgroundSink("mine", lambda: Sink(lambda record: None, lambda failed: None)),
    )
    with contextlib.suppress(KeyboardInterrupt):
        close_sinks([sink], failed=True)
    assert signal.getsignal(signal.SIGTERM) == before
    with mock.patch.object(signal, "signal", return_value=None) as handle:
        close_sinks([], failed=True)
    assert handle.call_args.args == (signal.SIGTERM, signal.SIG_DFL)


def test_torchrun_does_not_end_a_failed_run_before_its_sinks():
    ended, ends = [], Sink(lambda record: None, lambda failed: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    try:
        close_sinks([BackgroundSink("mine", lambda: ends)], failed=True)
        assert ended == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("failed", [False, True])
def test_trackers_show_a_failed_run_as_failed(tmp_path, monkeypatch, failed):
    libraries = {name: mock.MagicMock() for name in ("wandb", "mlflow", "mlflow.entities", "mlflow.tracking")}
    for name, library in libraries.items():
        monkeypatch.setitem(sys.modules, name, library)
    client, run = libraries["mlflow.tracking"].MlflowClient.return_value, libraries["wandb"].init.return_value
    client.create_run.side_effect = [mock.Mock(**{"info.run_id": name}) for name in ("first", "mine")]
    (tmp_path / "config.json").write_text(json.dumps(dict.fromkeys(range(101), "x" * 6001)))
    for first_step in (0, 0, 3):  # a run, another one in its folder, and the same resumed
        close_sinks(open_sinks(args_for(tmp_path, "mlflow", "wandb"), first_step), failed=failed)
    status = "FAILED" if failed else "FINISHED"
    assert client.set_terminated.call_args_list == [mock.call(name, status) for name in ("first", "mine", "mine")]
    client.update_run.assert_called_once_with("mine", status="RUNNING")
    first, second, resumed = (call.kwargs["id"] for call in libraries["wandb"].init.call_args_list)
    assert first != second == resumed and run.finish.call_args_list == [mock.call(exit_code=int(failed))] * 3
    # What MLflow accepts: parameters in a call, and characters of each.
    assert [len(call.kwargs["params"]) for call in client.log_batch.call_args_list] == [100, 1] * 2
    assert {call.args for call in libraries["mlflow.entities"].Param.call_args_list} >= {("0", "x" * 6000)}


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    for name, module in (("wandb", "no_such_module"), ("prometheus", "no_such_package.module")):
        monkeypatch.setitem(sinks_module.OPTIONAL, name, (module,))
        with pytest.raises(ImportError, match=rf"not installed.*pip install 'evenrank\[{name}\]'"):
            require_sinks(["opentelemetry", name])


@pytest.mark.slow
def test_sinks_are_imported_where_they_are_asked_for():
    code = (
        "import sys, evenrank, commons.trainer.observe.train_log; "
        "print([name for name in ('wandb', 'mlflow', 'opentelemetry', 'prometheus_client') if name in sys.modules])"
    )
    assert run_program(sys.executable, "-c", code).stdout == "[]\n"


def test_a_port_above_the_highest_is_refused():
    with pytest.raises(ValueError, match="port is 70000; the highest port is 65535"):
        PrometheusOptions(port=70000)
