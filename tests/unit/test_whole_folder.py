"""Folders that are whole or not there, whatever happens to their writers."""

import errno
import multiprocessing
import os
import shutil
import stat
from pathlib import Path

import pytest

from commons import whole_folder as whole_folder_module
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

    def test_a_url_is_no_folder(self, tmp_path, monkeypatch):
        """A folder named `s3:` was made for it."""
        monkeypatch.chdir(tmp_path)
        for writer in (whole_folder(Path("s3://bucket/data"), **_ANY), whole_file(Path("gs://bucket/map.parquet"))):
            with (
                pytest.raises(ValueError, match="the output is '[sg][3s]:/bucket/.*; files are written to mounted"),
                writer,
            ):
                raise AssertionError("it was opened")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
    def test_a_failure_leaves_what_was_there(self, tmp_path, error):
        write(tmp_path / "data", "before")
        for target in (tmp_path / "data", tmp_path / "new" / "deep" / "data"):
            with pytest.raises(type(error)), whole_folder(target, **_ANY) as folder:
                (folder / "a.txt").write_text("half")
                raise error
        assert [entry.name for entry in tmp_path.iterdir()] == ["data"]
        assert (tmp_path / "data" / "a.txt").read_text() == "before"

    def test_what_is_not_ours_stays(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        (tmp_path / "link").symlink_to("nowhere")
        for name in ("file", "link"):
            with pytest.raises(FileExistsError, match=f"{name} exists and is not a thing of this kind; it is not over"):
                write(tmp_path / name, "x", may_replace=lambda path: False)
        assert (tmp_path / "file").read_text() == "mine" and (tmp_path / "link").is_symlink()

    def test_ended_between_the_renames(self, tmp_path):
        write(tmp_path / "data", "before")
        (tmp_path / "data").rename(tmp_path / ".data.replaced")
        with pytest.raises(OSError, match="disk full"), whole_folder(tmp_path / "data", **_ANY):
            raise OSError("disk full")
        assert (tmp_path / "data" / "a.txt").read_text() == "before"
        assert [entry.name for entry in tmp_path.iterdir()] == ["data"]

    def test_ended_before_the_earlier_one_was_removed(self, tmp_path):
        for leave in (lambda path: write(path, "before"), lambda path: path.symlink_to("nowhere")):
            write(tmp_path / "data", "first")
            leave(tmp_path / ".data.replaced")
            write(tmp_path / "data", "second")
            assert (tmp_path / "data" / "a.txt").read_text() == "second"
            assert [entry.name for entry in tmp_path.iterdir()] == ["data"]

    def test_two_writers(self, tmp_path):
        context = multiprocessing.get_context("spawn")
        with whole_folder(tmp_path / "data", **_ANY) as folder:
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

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
    def test_no_room(self, tmp_path, number):
        with (
            pytest.raises(OSError, match=r"data cannot be written \(.*\); an earlier version is kept: free") as caught,
            whole_folder(tmp_path / "new" / "data", **_ANY),
        ):
            raise OSError(number, "Error writing bytes to file")
        assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []

    def test_no_right_to_write(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        for target in (tmp_path / "file" / "data", tmp_path / "file" / "deep" / "data"):
            with (
                pytest.raises(OSError, match="folder .* cannot be made .*: give a path where you may write"),
                whole_folder(target, **_ANY),
            ):
                pass


class TestLinks:
    """What symbolic links point to is neither written nor removed."""

    @pytest.fixture
    def foreign(self, tmp_path):
        folder = tmp_path / "foreign"
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "precious").write_text("precious")
        yield folder
        assert (folder / "deep" / "precious").read_text() == "precious"
        assert sorted(path.name for path in folder.rglob("*")) == ["deep", "precious"]

    def test_in_what_a_killed_process_left(self, tmp_path, foreign):
        left_over = tmp_path / ".data.unfinished" / "deep"
        left_over.mkdir(parents=True)
        (left_over / "link").symlink_to(foreign)
        (left_over.parent / "link").symlink_to(foreign / "deep" / "precious")
        (left_over / "half").write_text("half")
        write(tmp_path / "data", "whole")
        assert [entry.name for entry in (tmp_path / "data").iterdir()] == ["a.txt"]
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data", "foreign"]

    def test_a_target_that_is_a_link_is_replaced(self, tmp_path, foreign):
        for target in (foreign, tmp_path / "nowhere"):
            (tmp_path / "data").symlink_to(target)
            with whole_folder(tmp_path / "data", **_ANY) as folder:
                (folder / "a.txt").write_text("whole")
            assert not (tmp_path / "data").is_symlink()
            assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data", "foreign"]
            shutil.rmtree(tmp_path / "data")

    def test_a_link_or_a_file_in_the_way(self, tmp_path, foreign):
        for make in (Path.touch, lambda path: path.symlink_to(foreign)):
            make(tmp_path / ".data.unfinished")
            with pytest.raises(OSError, match=r"unfinished cannot be written \(.*\); .* remove what is in the way"):
                write(tmp_path / "data", "x")
            (tmp_path / ".data.unfinished").unlink()


class TestWholeFile:
    def test_a_link_is_replaced_and_not_followed(self, tmp_path):
        (tmp_path / "foreign").write_text("precious")
        (tmp_path / "map").symlink_to(tmp_path / "foreign")
        with whole_file(tmp_path / "map") as file:
            file.write(b"whole")
        assert (tmp_path / "map").read_bytes() == b"whole" and not (tmp_path / "map").is_symlink()
        assert (tmp_path / "foreign").read_text() == "precious"

    def test_a_failure_leaves_what_was_there(self, tmp_path):
        (tmp_path / "map").write_text("before")
        for target in (tmp_path / "map", tmp_path / "new" / "map"):
            with pytest.raises(OSError, match="disk full"), whole_file(target) as file:
                file.write(b"half")
                raise OSError("disk full")
        assert [entry.name for entry in tmp_path.iterdir()] == ["map"]
        assert (tmp_path / "map").read_text() == "before"

    def test_a_name_that_is_too_long(self, tmp_path):
        said = "cannot be written .File name too long.; output is first written under another name"
        with pytest.raises(OSError, match=said), whole_file(tmp_path / ("x" * 250)):
            pass

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
