"""Archives that were made to do harm: they are answered with one line, in memory that does not grow with them."""

import contextlib
import gzip
import io
import json
import os
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from commons.datasets.public import dataset, raw_files
from commons.datasets.public.kuairand import VERSIONS
from commons.datasets.public.movielens import preprocess_movielens_20m
from commons.datasets.public.registry import PUBLIC_DATASETS
from tests.helpers.datasets.archives import error_of, write_tar, write_zip
from tests.helpers.datasets.movielens import MOVIES, MOVIES_20M, RATINGS, RATINGS_20M, USERS

PURE = VERSIONS["kuairand-pure"]
LOGS = [f"KuaiRand-Pure/data/{name}" for name in PURE.event_files]
BOMB = bytes(192 << 20)


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("ml-1m", {"ml-1m/ratings.dat": bytes(8 << 20), "ml-1m/users.dat": USERS, "ml-1m/movies.dat": MOVIES}),
        (
            "kuairand-pure",
            {LOGS[0]: "a", LOGS[1]: "a", f"KuaiRand-Pure/data/{PURE.listings['user'][0]}": bytes(8 << 20)},
        ),
    ],
)
@pytest.mark.parametrize("write", [write_zip, write_tar])
def test_a_bomb(tmp_path, monkeypatch, name, members, write):
    monkeypatch.setattr(raw_files, "_ALWAYS_ALLOWED", 1 << 20)
    source = write(tmp_path / ("a.zip" if write is write_zip else "a.tar.gz"), members)
    message = error_of(PUBLIC_DATASETS[name].preprocess, source)
    assert re.search(r"a\.[a-z.]* has [\d,]+ bytes and expands to [\d,]+ or more; an archive may expand", message)
    assert "may expand to 100 times its size, or to 1,048,576 bytes: download it" in message


def memory(kind):
    """Of this process, in MiB; what getrusage says includes the parent of an exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) >> 10


@pytest.mark.slow
def test_memory_does_not_grow_with_them(tmp_path):
    ml_1m = {"users.dat": USERS, "movies.dat": MOVIES}
    ml_20m = {"ratings.csv": RATINGS_20M, "movies.csv": MOVIES_20M}
    write_zip(tmp_path / "bomb.zip", ml_1m | {"ratings.dat": BOMB})
    write_zip(tmp_path / "readme.zip", ml_20m | {"README.txt": BOMB})
    write_tar(tmp_path / "bomb.tar.gz", ml_20m | {"ratings.csv": BOMB})
    (tmp_path / "line").mkdir()
    (tmp_path / "line" / "movies.csv").write_text(MOVIES_20M)
    (tmp_path / "line" / "ratings.csv").write_text(RATINGS_20M)
    with (tmp_path / "line" / "ratings.csv").open("r+b") as file:
        file.truncate(2 << 30)  # takes no room on the disk
    for name, source, message in (
        ("ml-1m", "bomb.zip", "expands to"),
        ("ml-20m", "bomb.tar.gz", "expands to"),
        ("ml-20m", "line", "ratings.csv has NUL bytes, as after a broken download"),
        ("ml-20m", "readme.zip", "expands to"),
    ):
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory("VmHWM")
        assert message in error_of(PUBLIC_DATASETS[name].preprocess, tmp_path / source)
        assert memory("VmHWM") - before < 256, source


def test_a_listing_is_read_into_memory_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "_MOST_IN_MEMORY", 10)
    source = write_zip(tmp_path / "a.zip", {"ratings.dat": RATINGS, "users.dat": USERS, "movies.dat": MOVIES})
    assert "it is read into memory and may have at most 10: give" in error_of(
        PUBLIC_DATASETS["ml-1m"].preprocess, source
    )


WHOLE = {"ratings.csv": RATINGS_20M, "movies.csv": MOVIES_20M}


def zip_that_says(place, value):
    """A zip file whose directory says something else of the first member."""

    def write(path):
        data = bytearray(write_zip(path, WHOLE).read_bytes())
        start = data.index(b"PK\x01\x02") + place
        data[start : start + len(value)] = value
        path.write_bytes(data)

    return write


def zip_before_its_start(path):
    """The place of the directory is counted back from the end, and zipfile seeks there."""
    data = bytearray(write_zip(path, WHOLE).read_bytes())
    end = data.rfind(b"PK\x05\x06")
    data[end + 16 : end + 20] = bytes(4)
    path.write_bytes(data[end - 30 :])


def zip_damaged(compression):
    """A zip file of another compression than the published ones, with a damaged member."""

    def write(path):
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("ratings.csv", os.urandom(1000))
        data = bytearray(path.read_bytes())
        data[60:100] = bytes(40)
        path.write_bytes(data)

    return write


def zip_with_a_name_that_is_no_text(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ü.csv", "")
    path.write_bytes(path.read_bytes().replace("ü".encode(), b"\xff\xff"))


def zip_with_a_link(path):
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("ratings.csv")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
        archive.writestr("movies.csv", MOVIES_20M)


def tar_of_a_header(name, kind, size):
    """A tar file of one member that is nothing but its header."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return lambda path: path.write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)))


def tar_with(kind):
    """A tar file with a link, a device or a pipe."""

    def write(path):
        with tarfile.open(path, "w:gz") as archive:
            info = tarfile.TarInfo("ratings.csv")
            info.type, info.linkname, info.devmajor, info.devminor = kind, "/etc/passwd", 1, 5
            archive.addfile(info)
            info = tarfile.TarInfo("movies.csv")
            info.size = len(MOVIES_20M)
            archive.addfile(info, io.BytesIO(MOVIES_20M.encode()))

    return write


def within(write, folder):
    return lambda path: write(path, {f"{folder}/{name}": text for name, text in WHOLE.items()})


REFUSED = {
    "an encrypted zip": (zip_that_says(8, b"\1"), "is no complete zip file .*encrypted, password required"),
    "a zip that holds more than it says": (zip_that_says(24, b"\n\0\0\0"), r"a\.zip is no complete zip file"),
    "a damaged zip of kind bzip2": (zip_damaged(zipfile.ZIP_BZIP2), "is no complete zip file"),
    "a damaged zip of kind lzma": (zip_damaged(zipfile.ZIP_LZMA), "is no complete zip file"),
    "a zip with a name that is no text": (zip_with_a_name_that_is_no_text, "is no complete zip file"),
    "a zip before its start": (zip_before_its_start, "is no complete zip file"),
    "a link in a zip, which is its text": (zip_with_a_link, r"ratings\.csv.*/etc/passwd"),
    "a folder above in a tar": (within(write_tar, "../../x"), r" contains \.\., not MovieLens-20M: "),
    "another drive in a zip": (within(write_zip, "C:/x"), " contains C:, not MovieLens-20M: "),
    "a tar of holes": (tar_of_a_header("ratings.csv", tarfile.GNUTYPE_SPARSE, 0), r"has no ratings\.csv"),
    **{
        f"a huge header of kind {kind!r} in a tar": (
            tar_of_a_header("x", kind, 1 << 40),
            r"is no complete tar file|has no ratings\.csv",
        )
        for kind in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE)
    },
    **{
        f"a member of kind {kind!r} in a tar": (tar_with(kind), r"has no ratings\.csv; .*found: movies\.csv: ")
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)
    },
    "a text, no tar": (
        lambda path: path.write_text(RATINGS_20M),
        "is neither a zip file nor a tar file; the source is",
    ),
    "a pipe, no zip": (os.mkfifo, "is neither a file nor a folder; the source is ml-20m.zip as published"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where an archive and `output` are all that is new afterwards, around the working directory too."""
    inner = tmp_path / "here" / "and" / "there"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    yield tmp_path
    assert {path.name for path in tmp_path.iterdir()} <= {"a.zip", "a.tar.gz", "output", "here"}
    assert {path.name for path in (tmp_path / "here").rglob("*")} == {"and", "there"}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(folder, kind):
    write, message = REFUSED[kind]
    source = folder / ("a.tar.gz" if "tar" in kind.split() else "a.zip")
    write(source)
    assert re.search(message, error_of(preprocess_movielens_20m, source))


def zip_with_names_twice(path):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**WHOLE, "other/ratings.csv": "no ratings"}.items():
            archive.writestr(name, text)
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("ratings.csv", "neither")


READ = {
    "a name from the root in a zip": within(write_zip, "/etc"),
    "names twice in a zip": zip_with_names_twice,
    "names twice in a tar": lambda path: write_tar(path, {**WHOLE, "other/ratings.csv": "no ratings"}),
}


@pytest.mark.parametrize("kind", READ)
def test_names_lead_nowhere_and_the_first_of_two_counts(folder, kind):
    source = folder / ("a.tar.gz" if "tar" in kind.split() else "a.zip")
    READ[kind](source)
    path = preprocess_movielens_20m(source, folder / "output")
    assert json.loads((path / "_manifest.json").read_text())["num_interactions"] == RATINGS_20M.count("\n") - 1
