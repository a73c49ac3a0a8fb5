"""Folders that are whole or not there, whatever happens to their writers; partitions of users; ids."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import stat
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.raw_data.movielens_20m import generate_movielens_20m
from commons import whole_folder as whole_folder_module
from commons.datasets.movielens import preprocess_movielens_20m
from commons.datasets.sequence_file import SequenceFile
from commons.datasets.sequence_metadata import histogram_keys, histogram_of
from commons.datasets.sequence_writer import IdMap, SeenIds, _row_groups
from commons.datasets.user_partitions import UserPartitions, partitions_for
from commons.whole_folder import whole_file, whole_folder

_ANY = {"may_replace": lambda path: True, "what": "thing"}


def write(target, text, may_replace=lambda path: True):
    with whole_folder(target, may_replace=may_replace, what="thing") as folder:
        (folder / "a.txt").write_text(text)
        assert not target.exists() or (target / "a.txt").read_text() != text


class TestWholeFolder:
    def test_appears_at_the_end_and_is_replaced(self, tmp_path):
        for text in ("first", "second"):
            write(tmp_path / "new" / "data", text)
            assert (tmp_path / "new" / "data" / "a.txt").read_text() == text
            assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["data"]

    @pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
    def test_a_failure_leaves_what_was_there(self, tmp_path, error):
        write(tmp_path / "data", "before")
        for target in (tmp_path / "data", tmp_path / "new" / "deep" / "data"):
            with (
                pytest.raises(type(error)),
                whole_folder(target, may_replace=lambda path: True, what="thing") as folder,
            ):
                (folder / "a.txt").write_text("half")
                raise error
        assert [entry.name for entry in tmp_path.iterdir()] == ["data"]
        assert (tmp_path / "data" / "a.txt").read_text() == "before"

    def test_what_is_not_ours_stays(self, tmp_path):
        (tmp_path / "data").write_text("mine")
        with pytest.raises(FileExistsError, match="data exists and is no thing of this kind; it is not overwritten"):
            write(tmp_path / "data", "x", may_replace=lambda path: False)
        assert (tmp_path / "data").read_text() == "mine"

    def test_what_an_ended_process_left_is_cleared(self, tmp_path):
        unfinished = tmp_path / ".data.unfinished" / "deep"
        unfinished.mkdir(parents=True)
        (unfinished / "half").write_text("half")
        write(tmp_path / "data", "whole")
        assert [entry.name for entry in tmp_path.iterdir()] == ["data"]
        assert [entry.name for entry in (tmp_path / "data").iterdir()] == ["a.txt"]

    def test_ended_between_the_renames(self, tmp_path):
        write(tmp_path / "data", "before")
        (tmp_path / "data").rename(tmp_path / ".data.replaced")
        with (
            pytest.raises(OSError, match="disk full"),
            whole_folder(tmp_path / "data", may_replace=lambda path: True, what="thing"),
        ):
            raise OSError("disk full")
        assert (tmp_path / "data" / "a.txt").read_text() == "before"
        assert [entry.name for entry in tmp_path.iterdir()] == ["data"]

    def test_two_writers(self, tmp_path):
        context = multiprocessing.get_context("spawn")
        with whole_folder(tmp_path / "data", may_replace=lambda path: True, what="thing") as folder:
            (folder / "a.txt").write_text("first")
            with context.Pool(1) as pool:
                message = pool.apply(_error_of_second, (tmp_path / "data",))
        assert "another process is writing" in message
        assert (tmp_path / "data" / "a.txt").read_text() == "first"

    def test_a_lock_of_what_was_renamed_meanwhile_is_not_ours(self, tmp_path, monkeypatch):
        flock, first = whole_folder_module.fcntl.flock, whole_folder(tmp_path / "data", **_ANY)
        (first.__enter__() / "a.txt").write_text("first")

        def lock_after_the_first_is_done(file, operation):
            monkeypatch.undo()
            first.__exit__(None, None, None)
            flock(file, operation)  # of the folder that is "data" now

        monkeypatch.setattr(whole_folder_module.fcntl, "flock", lock_after_the_first_is_done)
        with whole_folder(tmp_path / "data", **_ANY) as folder:
            assert folder.is_dir() and (tmp_path / "data" / "a.txt").read_text() == "first"
            (folder / "a.txt").write_text("second")
        assert (tmp_path / "data" / "a.txt").read_text() == "second"
        assert [entry.name for entry in tmp_path.iterdir()] == ["data"]

    def test_the_next_writer_begins_while_the_first_tidies_up(self, tmp_path, monkeypatch):
        write(tmp_path / "data", "before")
        remove, second = whole_folder_module._remove, whole_folder(tmp_path / "data", **_ANY)

        def begin_the_second(path):
            monkeypatch.undo()
            (second.__enter__() / "a.txt").write_text("second")
            remove(path)

        with whole_folder(tmp_path / "data", **_ANY) as folder:
            (folder / "a.txt").write_text("first")
            monkeypatch.setattr(whole_folder_module, "_remove", begin_the_second)
        assert (tmp_path / "data" / "a.txt").read_text() == "first"
        second.__exit__(None, None, None)
        assert (tmp_path / "data" / "a.txt").read_text() == "second"
        assert [entry.name for entry in tmp_path.iterdir()] == ["data"]

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
    def test_no_room(self, tmp_path, number):
        with (
            pytest.raises(
                OSError, match=r"data cannot be written \(.*\); what was there before stays: make room"
            ) as caught,
            whole_folder(tmp_path / "new" / "data", **_ANY),
        ):
            raise OSError(number, "Error writing bytes to file")
        assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []

    def test_no_right_to_write(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        for target in (tmp_path / "file" / "data", tmp_path / "file" / "deep" / "data"):
            with (
                pytest.raises(OSError, match="cannot be made a folder .*: give a path where you may write"),
                whole_folder(target, **_ANY),
            ):
                pass


class TestPlantedLinks:
    """Somebody may have put links at the names that a writer passes through; nothing is written or deleted there."""

    @pytest.fixture
    def foreign(self, tmp_path):
        folder = tmp_path / "foreign"
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "precious").write_text("precious")
        (folder / "contents").write_text("precious")
        yield folder
        assert sorted(path.name for path in folder.rglob("*")) == ["contents", "deep", "precious"]
        assert (folder / "deep" / "precious").read_text() == "precious"

    @pytest.mark.parametrize("place", ["unfinished", "replaced"])
    @pytest.mark.parametrize("is_there", [True, False])
    def test_a_link_where_a_folder_passes_through(self, tmp_path, foreign, place, is_there):
        output = tmp_path / "output"
        if is_there:
            write(output / "data", "before")
        output.mkdir(exist_ok=True)
        (output / f".data.{place}").symlink_to(foreign)
        with pytest.raises(
            FileExistsError, match=f"data.{place} is a symbolic link; .* links are not followed: remove"
        ):
            write(output / "data", "x")
        assert (output / "data").exists() == is_there

    @pytest.mark.parametrize("command", ["ml-20m", "ml-20m.zip"])
    def test_generate_and_preprocess(self, tmp_path, foreign, command):
        output = tmp_path / "output"
        output.mkdir()
        (output / f".{command}.unfinished").symlink_to(foreign)
        (output / ".ml-20m.parquet.unfinished").symlink_to(foreign)
        with pytest.raises(FileExistsError, match="symbolic link"):
            generate_movielens_20m(output / command, num_users=3)
        generate_movielens_20m(tmp_path / "a.zip", num_users=3)
        with pytest.raises(FileExistsError, match="symbolic link"):
            preprocess_movielens_20m(tmp_path / "a.zip", output)

    def test_what_a_link_in_a_left_over_folder_points_to_stays(self, tmp_path, foreign):
        left_over = tmp_path / ".data.unfinished" / "deep"
        left_over.mkdir(parents=True)
        (left_over / "link").symlink_to(foreign)
        (left_over.parent / "link").symlink_to(foreign / "contents")
        write(tmp_path / "data", "whole")
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data", "foreign"]

    def test_a_target_that_is_a_link_is_replaced(self, tmp_path, foreign):
        for target in (foreign, tmp_path / "nowhere"):
            (tmp_path / "data").symlink_to(target)
            with whole_folder(tmp_path / "data", **_ANY) as folder:
                (folder / "a.txt").write_text("whole")
            assert not (tmp_path / "data").is_symlink()
            assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data", "foreign"]
            (tmp_path / "data" / "a.txt").unlink()
            (tmp_path / "data").rmdir()

    def test_a_link_put_in_its_place_while_it_is_written(self, tmp_path, foreign):
        with (
            pytest.raises(OSError, match="data.unfinished was replaced while .* what was there before stays"),
            whole_folder(tmp_path / "data", **_ANY) as folder,
        ):
            folder.rename(tmp_path / "elsewhere")
            folder.symlink_to(foreign)
        assert not (tmp_path / "data").exists()

    def test_a_link_put_in_its_place_between_check_and_opening(self, tmp_path, foreign, monkeypatch):
        opening = os.open

        def plant_first(path, *arguments, **options):
            monkeypatch.undo()
            path.rmdir()
            path.symlink_to(foreign)
            return opening(path, *arguments, **options)

        monkeypatch.setattr(whole_folder_module.os, "open", plant_first)
        with pytest.raises(FileExistsError, match="symbolic link"):
            write(tmp_path / "data", "x")

    def test_a_folder_of_another_user(self, tmp_path, monkeypatch):
        (tmp_path / ".data.unfinished").mkdir()
        monkeypatch.setattr(whole_folder_module.os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(FileExistsError, match="belongs to another user; .*: remove it, or give another path"):
            write(tmp_path / "data", "x")

    def test_a_file_in_the_way(self, tmp_path):
        (tmp_path / ".data.unfinished").write_text("mine")
        with pytest.raises(FileExistsError, match=r"cannot be opened \(Not a directory\); .* remove it"):
            write(tmp_path / "data", "x")
        assert (tmp_path / ".data.unfinished").read_text() == "mine"


class TestWholeFile:
    def test_a_link_is_replaced_and_not_followed(self, tmp_path):
        (tmp_path / "foreign").write_text("precious")
        (tmp_path / "map").symlink_to(tmp_path / "foreign")
        with whole_file(tmp_path / "map") as file:
            file.write(b"whole")
        assert (tmp_path / "map").read_bytes() == b"whole" and not (tmp_path / "map").is_symlink()
        assert (tmp_path / "foreign").read_text() == "precious"

    def test_a_planted_link_is_not_followed(self, tmp_path, monkeypatch):
        (tmp_path / "foreign").write_text("precious")
        monkeypatch.setattr(whole_folder_module.secrets, "token_hex", lambda size: "guessed")
        (tmp_path / ".map.guessed").symlink_to(tmp_path / "foreign")
        with pytest.raises(OSError, match="map cannot be written"), whole_file(tmp_path / "map"):
            pass
        assert (tmp_path / "foreign").read_text() == "precious"

    def test_a_failure_leaves_what_was_there(self, tmp_path):
        (tmp_path / "map").write_text("before")
        for target in (tmp_path / "map", tmp_path / "new" / "map"):
            with pytest.raises(OSError, match="disk full"), whole_file(target) as file:
                file.write(b"half")
                raise OSError("disk full")
        assert [entry.name for entry in tmp_path.iterdir()] == ["map"]
        assert (tmp_path / "map").read_text() == "before"

    def test_others_may_read_it_as_the_umask_says(self, tmp_path):
        before = os.umask(0o022)
        try:
            with whole_file(tmp_path / "map") as file:
                file.write(b"whole")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "map").stat().st_mode) == 0o644


def _error_of_second(target) -> str:
    try:
        write(target, "second")
    except BlockingIOError as error:
        return str(error)
    return "no error"


_STOPS_BEFORE_THE_MANIFEST = """
import sys, time
from commons.datasets import sequence_writer
from commons.datasets.movielens import preprocess_movielens_20m

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


class TestUserPartitions:
    @given(
        rows=st.lists(st.tuples(st.sampled_from([0, 1, 5, 2**31 - 1]), st.integers(0, 2**40), st.integers(0, 9))),
        num_partitions=st.sampled_from([1, 2, 8]),
        batch=st.integers(1, 7),
    )
    def test_equals_a_stable_sort(self, tmp_path_factory, rows, num_partitions, batch):
        partitions = UserPartitions(tmp_path_factory.mktemp("parts"), num_partitions)
        for start in range(0, len(rows), batch):
            users, times, actions = (np.array(column) for column in zip(*rows[start : start + batch]))
            items = np.arange(start, start + len(users), dtype=np.int32)
            partitions.add(users.astype(np.int32), items, actions, times)
        partitions.close()
        found = {}
        for index in range(num_partitions):
            histories = partitions.read(index)
            assert (partitions.partition_of(histories.user_ids) == index).all()
            ends = np.cumsum(histories.lengths)
            for user, end, length in zip(histories.user_ids.tolist(), ends.tolist(), histories.lengths.tolist()):
                own = slice(end - length, end)
                columns = (histories.timestamps[own], histories.item_ids[own], histories.actions[own])
                found[user] = list(zip(*(column.tolist() for column in columns)))
        expected: dict = {}
        for place, (user, moment, action) in enumerate(rows):
            expected.setdefault(user, []).append((moment, place, action))
        assert found == {user: sorted(own, key=lambda row: row[0]) for user, own in expected.items()}
        assert partitions.num_rows == len(rows)

    def test_users_are_spread_evenly(self, tmp_path):
        partitions = UserPartitions(tmp_path, 64)
        partitions.close()
        for step in (1, 64, 1000):
            counts = np.bincount(partitions.partition_of(np.arange(64_000, dtype=np.int32) * step), minlength=64)
            assert counts.max() < 2 * counts.mean()

    def test_their_number_bounds_memory(self):
        assert [partitions_for(rows) for rows in (0, 4e6, 5e6, 20e6, 322e6, 1e12)] == [1, 1, 2, 8, 128, 128]


@given(values=st.sets(st.integers(0, 300), min_size=1), offset=st.sampled_from([0, 2_000_000_000]))
def test_ids_are_ranks(values, offset):
    ordered = np.array(sorted(values), dtype=np.int64) + offset
    ids = IdMap(ordered.astype(np.int32))
    assert ids.ids(ordered.astype(np.int32)).tolist() == list(range(len(values)))
    others = np.setdiff1d(np.arange(320) + offset, ordered).astype(np.int32)
    assert set(ids.ids(others).tolist()) <= {-1}


@given(batches=st.lists(st.lists(st.integers(0, 200_000))))
def test_seen_ids(batches):
    seen = SeenIds()
    for batch in batches:
        seen.add(np.array(batch, dtype=np.int32))
    assert seen.values().tolist() == sorted({value for batch in batches for value in batch})


@given(lengths=st.lists(st.integers(0, 200_000), max_size=50))
def test_row_groups_hold_all_rows_and_few_interactions(lengths):
    groups = _row_groups(np.array(lengths, dtype=np.int64))
    assert sum(groups) == len(lengths)
    start = 0
    for rows in groups:
        assert rows > 0
        assert rows == 1 or sum(lengths[start : start + rows]) <= 65_536
        start += rows


def test_histogram():
    counts = histogram_of(np.array([0, 1, 2, 3, 4, 7, 8, 1023, 1024]))
    assert histogram_keys(counts) == {
        **{"0": 1, "1": 1, "2": 2, "4": 2, "8": 1},
        **{"16": 0, "32": 0, "64": 0, "128": 0, "256": 0, "512": 1, "1024": 1},
    }
    assert histogram_keys(histogram_of(np.array([], dtype=np.int64))) == {"0": 0}
