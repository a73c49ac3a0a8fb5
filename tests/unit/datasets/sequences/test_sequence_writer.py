"""Data sets appear whole or not at all, are the same on every machine, and a full disk is named."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from unittest import mock

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from benchmarks.raw_data.movielens import generate_movielens_20m
from commons.datasets.public.movielens import preprocess_movielens_20m
from commons.datasets.sequences import event_store
from commons.datasets.sequences.event_columns import EventColumns
from commons.datasets.sequences.file import SequenceFile
from commons.datasets.sequences.own_parquet import preprocess_parquet

_STOPS_BEFORE_THE_MANIFEST = """
import sys, time
from commons.datasets.sequences import writer as sequence_writer
from commons.datasets.public.movielens import preprocess_movielens_20m

def wait(*arguments):
    print("shards are written", flush=True)
    time.sleep(60)

sequence_writer._Writer.finish = wait
preprocess_movielens_20m(*sys.argv[1:])
"""


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_preprocessing_that_is_ended_leaves_no_half_data_set_and_starts_again(tmp_path, stop):
    source, output = tmp_path / "ml-20m", tmp_path / "data"
    generate_movielens_20m(source, num_users=60)
    preprocess_movielens_20m(source, output, seed=1)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    process = subprocess.Popen(
        [sys.executable, "-c", _STOPS_BEFORE_THE_MANIFEST, str(source), str(output)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "shards are written\n"
        assert list((output / ".ml-20m.parquet.unfinished").glob("*.parquet"))
        process.send_signal(stop)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    if stop == signal.SIGINT:
        assert [entry.name for entry in output.iterdir()] == ["ml-20m.parquet"]
    assert {path: path.read_bytes() for path in (output / "ml-20m.parquet").rglob("*") if path.is_file()} == before
    preprocess_movielens_20m(source, output, seed=2)
    assert [entry.name for entry in output.iterdir()] == ["ml-20m.parquet"]
    assert SequenceFile(output, "ml-20m", []).metadata.options["seed"] == 2


COLUMNS = EventColumns("uid", "iid", "ts", "s", ("like",), ("age",))


def draw_events(rng, num_events):
    """Events in any order: one huge user, many with one event, equal times, rows that are there twice."""
    users = np.where(rng.random(num_events) < 0.4, 7, rng.integers(-1_000, 1_000, num_events) ** 3)
    table = {
        "uid": users,
        "iid": rng.integers(0, 50, num_events) * 10**6,
        "ts": rng.integers(0, num_events // 4, num_events),
        "like": rng.random(num_events) < 0.5,
        "age": rng.integers(-5, 90, num_events),
    }
    again = np.concatenate([np.arange(num_events), rng.integers(0, num_events, num_events // 10)])
    table = {name: pa.array(values[again]) for name, values in table.items()}
    return table | {"age": pc.if_else(pc.less(table["age"], 0), None, table["age"])}


def test_the_bytes_do_not_depend_on_threads_or_memory(tmp_path):
    events, source, found = pa.table(draw_events(np.random.default_rng(9), 400_000)), tmp_path / "log", []
    source.mkdir()
    for number, first in enumerate((0, 220_000)):
        pq.write_table(events.slice(first, 220_000), source / f"{number}.parquet")
    for threads, memory in ((1, "512MB"), (2, "64MB"), (4, "96MB")):
        with (
            mock.patch.object(os, "cpu_count", return_value=threads),
            mock.patch.object(event_store, "_MEMORY_LIMIT", memory),
        ):
            path = preprocess_parquet(COLUMNS, source, tmp_path / f"out-{threads}")
        found.append({file.name: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()})
    assert found[0] == found[1] == found[2]


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_query(tmp_path):
    """DuckDB itself would go on: this one takes an hour."""
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), event_store.EventStore(tmp_path / "store") as store:
        timer.start()
        store.query("SELECT sum(a.range * b.range) FROM range(1_000_000) a, range(1_000_000) b")


def test_errors_of_the_disk_and_of_files_are_told_apart(tmp_path):
    with event_store.EventStore(tmp_path / "store") as store:
        with pytest.raises(OSError, match="events cannot be sorted in .*: give an output on a disk with room"):
            store.query("FROM read_parquet('none.parquet')")
        with pytest.raises(duckdb.IOException):
            store.add("FROM read_parquet('none.parquet')")
        for error in (duckdb.IOException, duckdb.TransactionException):  # the second when a transaction is committed
            with pytest.raises(OSError, match=re.escape(os.strerror(errno.ENOSPC))) as caught:
                store._run(mock.Mock(side_effect=error(f"write: {os.strerror(errno.ENOSPC)}")), doing="read")
            assert caught.value.errno == errno.ENOSPC


def test_lists_that_exceed_the_memory(tmp_path):
    lists = {name: [list(range(300_000))] * 4 for name in ("iid", "ts")}
    pq.write_table(pa.table({"uid": [1, 2, 3, 4], **lists}), tmp_path / "users.parquet")
    with (
        mock.patch.object(event_store, "_MEMORY_LIMIT", "32MB"),
        pytest.raises(OSError, match=r"exceeds DuckDB.* used\)\); .* must fit into 32MB: write .* per event$"),
    ):
        preprocess_parquet(EventColumns("uid", "iid", "ts"), tmp_path / "users.parquet", tmp_path / "data")


def test_an_output_that_is_the_data_set_itself(tmp_path):
    source = tmp_path / "ml-20m"
    generate_movielens_20m(source, num_users=60)
    path = preprocess_movielens_20m(source, tmp_path / "data")
    with pytest.raises(FileExistsError, match=f"a preprocessed data set; .*: give {tmp_path / 'data'}, or another"):
        preprocess_movielens_20m(source, path)


@pytest.mark.slow  # takes 2 GiB of memory
def test_distinct_texts_of_more_than_two_gibibytes():
    texts = pa.chunked_array([pa.array(["x" * 2**26])] * 33)
    assert len(event_store.plain_array(texts)) == 33
