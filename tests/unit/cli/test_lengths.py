"""Lengths for `evenrank simulate`: every kind of file reads alike, and what is no length is said in one line."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commons.cli.main import main
from commons.cli.simulate_lengths import find_lengths

VALUES = [5, 0, 17, 300]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, text):
    path.write_text(text)
    return path.name


def test_every_kind_of_file_reads_alike(here):
    pq.write_table(pa.table({"user": list("abcd"), "n": pa.array(VALUES, pa.int32())}), "a.parquet")
    pq.write_table(pa.table({"items": [[1] * value for value in VALUES]}), "lists.parquet")
    (here / "shards" / "_ids").mkdir(parents=True)
    for shard in range(2):
        pq.write_table(pa.table({"n": VALUES[2 * shard : 2 * shard + 2]}), here / "shards" / f"{shard}.parquet")
    pq.write_table(pa.table({"value": ["x"]}), here / "shards" / "_ids" / "user.parquet")
    np.save("a.npy", np.array(VALUES, np.uint16))
    np.save("floats.npy", np.array(VALUES, np.float32))
    write(here / "a.csv", "user,n\na,5\nb,0\nc,17\nd,300\n")
    write(here / "plain.csv", "5\n0\n17\n300\n")
    write(here / "a.jsonl", "".join(f'{{"user": "a", "n": {value}}}\n' for value in VALUES))
    write(here / "plain.jsonl", "5\n0\n17\n300\n")
    write(here / "lists.jsonl", "".join(json.dumps({"n": [7] * value}) + "\n" for value in VALUES))
    for name, column in (
        ("a.parquet", "n"),
        ("lists.parquet", None),
        ("shards", None),
        ("a.npy", None),
        ("floats.npy", None),
        ("a.csv", "n"),
        ("plain.csv", None),
        ("a.jsonl", "n"),
        ("plain.jsonl", None),
        ("lists.jsonl", "n"),
    ):
        lengths = find_lengths(name, column, in_order=True)
        assert lengths.take(4, np.random.default_rng(0)).tolist() == VALUES, name
        shuffled = find_lengths(name, column).take(4, np.random.default_rng(0))
        assert sorted(shuffled.tolist()) == sorted(VALUES) and shuffled.dtype == np.int64


def test_drawn_lengths_follow_what_was_named(here):
    rng = np.random.default_rng(0)
    write(here / "h.csv", "length,count\n3,0\n10,3\n20,1\n")
    drawn = find_lengths("h.csv", None).take(40_000, rng)
    assert set(drawn.tolist()) == {10, 20} and 0.24 < (drawn == 20).mean() < 0.26
    write(here / "unnamed.csv", "10,3\n20,1\n")
    assert set(find_lengths("unnamed.csv", None).take(100, rng).tolist()) == {10, 20}
    np.save("a.npy", np.array([4, 5]))
    assert set(find_lengths("a.npy", None, with_replacement=True).take(100, rng).tolist()) == {4, 5}
    normal = np.log(find_lengths("lognormal:130:1.4", None).take(100_000, rng))
    assert abs(np.median(normal) - np.log(130)) < 0.02 and abs(normal.std() - 1.4) < 0.02
    assert find_lengths("lognormal:130:1.4:512", None).take(1000, rng).max() == 512
    zipf = find_lengths("zipf:1.2:4096", None).take(100_000, rng)
    assert zipf.min() == 1 and zipf.max() == 4096
    assert abs((zipf == 1).mean() - 0.179) < 0.01  # 1 ÷ ζ(1.2)


MISTAKES = [
    (["--lengths", "none.csv"], "none.csv does not exist"),
    (["--lengths", "uniform"], "distributions are zipf:EXPONENT:LONGEST"),
    (["--lengths", "normal:3:4"], "neither a file nor a known distribution"),
    (["--lengths", "zipf:1.2"], "neither a file nor a known distribution"),
    (["--lengths", "zipf:nan:3"], "neither a file nor a known distribution"),
    (["--lengths", "zipf:0.9:4096"], "an exponent above 1"),
    (["--lengths", "zipf:1.2:0.5"], "a whole number of items"),
    (["--lengths", "lognormal:-1:1"], "a median is positive"),
    (["--lengths", "zipf:1.2:9", "--column", "n"], "belong to a file"),
    (["--lengths", "a.csv"], "has the columns user, n; lengths are one of them: name it by --column"),
    (["--lengths", "a.csv", "--column", "m"], "has no column 'm'; it has user, n"),
    (["--lengths", "a.csv", "--column", "user"], "column 'user' of a.csv holds string; lengths are integers"),
    (["--lengths", "empty.csv"], "empty.csv is empty"),
    (["--lengths", "header.csv"], "header.csv has no row"),
    (["--lengths", "empty.jsonl"], "empty.jsonl is empty"),
    (["--lengths", "broken.jsonl"], "does not begin with a line of JSON"),
    (["--lengths", "later.jsonl", "--column", "n"], "later.jsonl cannot be read"),
    (["--lengths", "negative.csv"], "holds -4 in row 1; a length is an integer of at least 0"),
    (["--lengths", "fraction.csv"], "holds 2.5 in row 1"),
    (["--lengths", "nan.npy"], "holds nan in row 0"),
    (["--lengths", "null.parquet"], "has no value in row 1"),
    (["--lengths", "no.parquet"], "no.parquet cannot be read"),
    (["--lengths", "text.npy"], "text.npy cannot be read"),
    (["--lengths", "square.npy"], "has shape (2, 2)"),
    (["--lengths", "nothing"], "nothing is a folder without parquet files"),
    (["--lengths", "a.txt"], "a.txt is none of .parquet, .csv, .npy, .jsonl"),
    (["--lengths", "zeros.csv"], "there is nothing to balance"),
    (["--lengths", "nulls.csv"], "all counts are 0"),
    (["--lengths", "two.csv"], "two.csv has 2 rows, a step of 2 ranks trains 64: lower --ranks"),
    (["--lengths", "two.csv", "--with-replacement", "--in-order"], "exclude each other"),
    (["--lengths", "zipf:1.2:9", "--ranks", "0"], "balancing needs 2 ranks and a step"),
    (["--lengths", "zipf:1.2:9", "--task", "bert"], "--task"),
    (["--lengths", "zipf:1.2:9", "--batch-size", "0"], "batch_size is 0"),
    (["--lengths", "zipf:1.2:9", "--hidden-size", "-1"], "hidden_size is -1"),
    (["--lengths", "zipf:1.2:9", "--mfu", "1.5"], "mfu is 1.5"),
    (["--lengths", "zipf:1.2:9", "--link-gbps", "-1"], "link_gbps is -1"),
    (["--lengths", "zipf:1.2:9", "--task", "tokens", "--peak-tflops", "9"], "tokens are no operations"),
    (["--lengths", "zipf:1.2:9", "--window", "64", "--steps", "8"], "window is (64,) and steps is 8"),
    (["--lengths", "zipf:1.2:9", "--figure", "a.gif"], "choose one of these endings"),
    (["--lengths", "zipf:1.2:9", "--html", "a.pdf"], "a page is an .html file"),
    (["--lengths", "huge.csv"], "operations; workloads are int64"),
    (["--lengths", "zipf:1.2:9", "--config", "run.toml"], "give one of them"),
    ([], "simulate needs --lengths"),
    (["--config", "run.toml", "--batch-size", "8"], "--batch-size belongs to --lengths"),
]


@pytest.fixture
def wrong(here):
    write(here / "a.csv", "user,n\na,5\n")
    write(here / "a.txt", "5\n")
    for name, text in {"empty.csv": "", "header.csv": "n\n", "empty.jsonl": "", "broken.jsonl": "{\n"}.items():
        write(here / name, text)
    write(here / "later.jsonl", '{"n": 1}\n{"n": "x"}\n')
    write(here / "negative.csv", "n\n3\n-4\n")
    write(here / "fraction.csv", "n\n3\n2.5\n")
    write(here / "zeros.csv", "n\n" + "0\n" * 64)
    write(here / "nulls.csv", "length,count\n3,0\n")
    write(here / "two.csv", "n\n3\n4\n")
    write(here / "huge.csv", "n\n" + "1000000000\n" * 64)
    write(here / "no.parquet", "no")
    write(here / "text.npy", "no")
    np.save("nan.npy", np.array([np.nan]))
    np.save("square.npy", np.ones((2, 2), np.int64))
    pq.write_table(pa.table({"n": [1, None]}), "null.parquet")
    (here / "nothing").mkdir()


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda value: "" if isinstance(value, str) else None)
def test_mistakes_are_one_line(wrong, capsys, arguments, message):
    ranks = [] if "--ranks" in arguments else ["--ranks", "2"]
    assert main(["simulate", *arguments, *ranks]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("evenrank: ") and printed.err.count("\n") == 1
    assert message in printed.err
