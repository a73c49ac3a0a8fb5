"""Archives that were made to do harm: they are answered with one line, in memory that does not grow with them."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest

from commons.datasets.public import raw_files
from commons.datasets.public.kuairand import VERSIONS
from commons.datasets.public.movielens import preprocess_movielens, preprocess_movielens_20m
from commons.datasets.public.registry import PUBLIC_DATASETS
from tests.helpers.datasets.movielens import MOVIES, RATINGS, USERS
from tests.helpers.datasets.movielens_20m import MOVIES as MOVIES_20M
from tests.helpers.datasets.movielens_20m import RATINGS as RATINGS_20M

PURE = VERSIONS["kuairand-pure"]
LOGS = [f"KuaiRand-Pure/data/{name}" for name in PURE.log_names]
BOMB = 192 << 20
# Peak of the process's own memory in MiB, reset before each; what getrusage says includes the parent of an exec.
PREPROCESS = """
import contextlib, io, json, sys
from commons.cli.main import main

def memory(kind):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) >> 10

def measure(function, *arguments):
    with contextlib.suppress(OSError):
        open("/proc/self/clear_refs", "w").write("5")
    before = memory("VmRSS")
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        status = function(*arguments)
    return status, memory("VmHWM") - before, errors.getvalue()

cases, output = json.loads(sys.argv[1])
print(json.dumps([
    *(measure(main, ["preprocess", name, "--source", source, "--output", output]) for name, source in cases),
]))
"""


def write_zip(path, members, method=zipfile.ZIP_DEFLATED):
    """A zip file of members: contents, or the number of bytes of one line."""
    with zipfile.ZipFile(path, "w", method, compresslevel=1) as archive:
        for name, content in members.items():
            with archive.open(name, "w", force_zip64=True) as member:
                write_content(member, content)
    return path


def write_content(member, content):
    if isinstance(content, str):
        member.write(content.encode("latin-1"))
        return
    zeros = bytes(1 << 20)
    for _ in range(content >> 20):
        member.write(zeros)


def write_tar(path, members):
    with gzip.open(path, "wb", compresslevel=1) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = content if isinstance(content, int) else len(content)
            source = _Zeros(content) if isinstance(content, int) else io.BytesIO(content.encode())
            archive.addfile(info, source)
    return path


class _Zeros(io.RawIOBase):
    def __init__(self, size):
        self._left = size

    def read(self, size=-1):
        size = min(size, self._left)
        self._left -= size
        return bytes(size)


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("ml-1m", {"ml-1m/ratings.dat": 1, "ml-1m/users.dat": USERS, "ml-1m/movies.dat": MOVIES}),
        ("kuairand-pure", {LOGS[0]: "a", LOGS[1]: "a", f"KuaiRand-Pure/data/{PURE.user_file}": 1}),
    ],
)
@pytest.mark.parametrize("write", [write_zip, write_tar])
def test_a_bomb(tmp_path, monkeypatch, name, members, write):
    monkeypatch.setattr(raw_files, "_ALWAYS_ALLOWED", 1 << 20)
    members = {member: 8 << 20 if content == 1 else content for member, content in members.items()}
    source = write(tmp_path / ("a.zip" if write is write_zip else "a.tar.gz"), members)
    with pytest.raises(ValueError, match=r"a\.[a-z.]* has [\d,]+ bytes and expands to [\d,]+ or more;") as caught:
        PUBLIC_DATASETS[name].preprocess(source, tmp_path / "output")
    assert "; an archive may expand to 100 times its size, and always to 1,048,576: download it" in str(caught.value)
    assert "\n" not in str(caught.value) and not (tmp_path / "output").exists()


def write_folder(folder, contents, endless):
    """Files of a data set; one ends with a line of 2 GiB, which takes no room on the disk."""
    folder.mkdir()
    for name, text in contents.items():
        (folder / name).write_text(text, encoding="latin-1")
    with (folder / endless).open("r+b") as file:
        file.truncate(2 << 30)


@pytest.mark.slow
def test_memory_does_not_grow_with_them(tmp_path):
    ml_1m = {"ratings.dat": RATINGS, "users.dat": USERS, "movies.dat": MOVIES}
    ml_20m = {"ratings.csv": RATINGS_20M, "movies.csv": MOVIES_20M}
    write_zip(tmp_path / "bomb.zip", ml_1m | {"ratings.dat": BOMB})
    write_zip(tmp_path / "readme.zip", ml_20m | {"README.txt": BOMB})
    write_tar(tmp_path / "bomb.tar.gz", ml_20m | {"ratings.csv": BOMB})
    write_folder(tmp_path / "line", ml_20m, "ratings.csv")
    write_folder(tmp_path / "first_line", ml_20m | {"ratings.csv": ""}, "ratings.csv")
    write_folder(tmp_path / "ratings", ml_1m, "ratings.dat")
    write_folder(tmp_path / "users", ml_1m, "users.dat")
    expected = [
        ("ml-1m", "bomb.zip", "expands to"),
        ("ml-20m", "bomb.tar.gz", "expands to"),
        ("ml-20m", "line", "ratings.csv line 7 has more than 1,048,576 bytes, which is the most"),
        ("ml-20m", "first_line", "ratings.csv line 1 has more than 1,048,576 bytes"),
        ("ml-1m", "ratings", "ratings.dat line 6 has more than 1,048,576 bytes"),
        ("ml-1m", "users", "users.dat has 2,147,483,648 bytes; it is held in memory, and may have 268,435,456"),
        ("ml-20m", "readme.zip", "expands to"),
    ]
    cases = [(name, str(tmp_path / source)) for name, source, _ in expected]
    arguments = json.dumps([cases, str(tmp_path / "output")])
    result = subprocess.run(
        [sys.executable, "-c", PREPROCESS, arguments], capture_output=True, text=True, timeout=300, check=True
    )
    for (_, source, message), (status, grown, error) in zip(expected, json.loads(result.stdout)):
        assert (status, error.count("\n")) == ((2, 1) if message else (0, 0)), error
        assert message in error
        assert grown < 256, (source, grown)


def test_an_encrypted_zip_file(tmp_path):
    data = bytearray(write_zip(tmp_path / "a.zip", {"ratings.csv": RATINGS_20M}).read_bytes())
    entry = data.index(b"PK\x01\x02")
    data[entry + 8] |= 1
    (tmp_path / "a.zip").write_bytes(bytes(data))
    with pytest.raises(ValueError, match="is no complete zip file .*encrypted, password required"):
        preprocess_movielens_20m(tmp_path / "a.zip", tmp_path / "output")


def tar_of(path, name, kind, size):
    """A tar file of one member that is nothing but its header."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    path.write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)))
    return path


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE])
def test_a_header_that_says_it_is_huge(tmp_path, kind):
    with pytest.raises(ValueError, match=r"is no complete tar file|has no ratings.csv") as caught:
        preprocess_movielens_20m(tar_of(tmp_path / "a.tar.gz", "x", kind, 1 << 40), tmp_path / "output")
    assert "\n" not in str(caught.value)


def test_a_file_with_holes_is_passed_over(tmp_path):
    with pytest.raises(ValueError, match=r"has no ratings.csv"):
        preprocess_movielens_20m(tar_of(tmp_path / "a.tar.gz", "ratings.csv", tarfile.GNUTYPE_SPARSE, 0), tmp_path)


class TestNamesAndKinds:
    """Members go by their last name, which is unpacked if it is one of ours: no name leads anywhere."""

    @pytest.fixture(autouse=True)
    def nothing_else_is_written(self, tmp_path, monkeypatch):
        """Whatever the archive says, the data set's folder is all that is new, around the working directory too."""
        inner = tmp_path / "here" / "and" / "there"
        inner.mkdir(parents=True)
        monkeypatch.chdir(inner)
        yield
        kept = {"a.zip", "a.tar.gz", "folder", "output", "here"}
        assert {path.name for path in tmp_path.iterdir()} <= kept
        assert {path.name for path in (tmp_path / "here").rglob("*")} == {"and", "there"}

    def num_rows(self, source, tmp_path):
        path = preprocess_movielens_20m(source, tmp_path / "output")
        return sum(json.loads((path / "_manifest.json").read_text())["splits"].values())

    def expected(self, tmp_path):
        (tmp_path / "folder").mkdir()
        for name, text in (("ratings.csv", RATINGS_20M), ("movies.csv", MOVIES_20M)):
            (tmp_path / "folder" / name).write_text(text)
        return self.num_rows(tmp_path / "folder", tmp_path)

    @pytest.mark.parametrize(
        ("write", "place", "folder"),
        [(write_zip, "/etc", None), (write_tar, "../../x", ".."), (write_zip, "C:/x", "C:")],
    )
    def test_names_that_lead_elsewhere(self, tmp_path, write, place, folder):
        members = {f"{place}/ratings.csv": RATINGS_20M, f"{place}/movies.csv": MOVIES_20M}
        source = write(tmp_path / ("a.zip" if write is write_zip else "a.tar.gz"), members)
        if folder is None:
            assert self.num_rows(source, tmp_path) == self.expected(tmp_path) > 0
            return
        with pytest.raises(ValueError, match=re.escape(f" holds {folder}, not MovieLens-20M: ")):
            self.num_rows(source, tmp_path)

    @pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
    def test_links_devices_and_pipes_are_no_members_of_a_tar_file(self, tmp_path, kind):
        path = tmp_path / "a.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            info = tarfile.TarInfo("ratings.csv")
            info.type, info.linkname, info.devmajor, info.devminor = kind, "/etc/passwd", 1, 5
            archive.addfile(info)
            info = tarfile.TarInfo("movies.csv")
            info.size = len(MOVIES_20M)
            archive.addfile(info, io.BytesIO(MOVIES_20M.encode()))
        with pytest.raises(ValueError, match=r"has no ratings.csv; .*found: movies.csv: "):
            self.num_rows(path, tmp_path)

    def test_a_link_in_a_zip_file_is_its_text(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            info = zipfile.ZipInfo("ratings.csv")
            info.external_attr = 0o120777 << 16
            archive.writestr(info, "/etc/passwd")
            archive.writestr("movies.csv", MOVIES_20M)
        with pytest.raises(ValueError, match=r"ratings.csv.* line 1 .*'/etc/passwd'|ratings.csv.*/etc/passwd"):
            self.num_rows(tmp_path / "a.zip", tmp_path)

    @pytest.mark.parametrize("write", ["zip", "tar"])
    def test_of_two_members_with_one_name_the_first_counts(self, tmp_path, write):
        members = [("ratings.csv", RATINGS_20M), ("movies.csv", MOVIES_20M), ("other/ratings.csv", "no ratings")]
        if write == "zip":
            with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
                for name, text in members:
                    archive.writestr(name, text)
                with pytest.warns(UserWarning, match="Duplicate name"):
                    archive.writestr("ratings.csv", "neither")
        else:
            write_tar(tmp_path / "a.tar.gz", dict(members))
        source = tmp_path / ("a.zip" if write == "zip" else "a.tar.gz")
        assert self.num_rows(source, tmp_path) == self.expected(tmp_path)


def test_a_zip_file_that_holds_more_than_it_says(tmp_path):
    data = bytearray(write_zip(tmp_path / "a.zip", {"ratings.csv": RATINGS_20M, "movies.csv": MOVIES_20M}).read_bytes())
    entry = data.index(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = (10).to_bytes(4, "little")
    (tmp_path / "a.zip").write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"a\.zip is no complete zip file") as caught:
        preprocess_movielens_20m(tmp_path / "a.zip", tmp_path / "output")
    assert "\n" not in str(caught.value) and not list(tmp_path.glob("output/*"))


def test_what_is_neither_a_file_nor_a_folder(tmp_path):
    os.mkfifo(tmp_path / "ml-1m.zip")
    with pytest.raises(ValueError, match="is neither a file nor a folder; the source is ml-1m.zip as published"):
        preprocess_movielens(tmp_path / "ml-1m.zip", tmp_path / "output")
