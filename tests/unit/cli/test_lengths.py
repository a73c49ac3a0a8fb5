"""Lengths for `evenrank simulate`: every kind of file reads alike, and what is no length is said in one line."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commons.cli.lengths import find_lengths
from commons.cli.main import main

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
    (["--lengths", "s3://bucket/a.csv"], "names a file of lengths on this machine: copy it here"),
    (["--lengths", ""], "lengths is ''; it names a file or a distribution"),
    (["--lengths", "uniform"], "distributions are zipf:EXPONENT:LONGEST"),
    (["--lengths", "normal:3:4"], "neither a file nor a known distribution"),
    (["--lengths", "zipf:0.9:4096"], "an exponent above 1"),
    (["--lengths", "zipf:1.2:0.5"], "a whole number of items"),
    (["--lengths", "lognormal:-1:1"], "a median is positive"),
    (["--lengths", "zipf:1.2:9", "--column", "n"], "belong to a file"),
    (["--lengths", "a.csv"], "has the columns user, n; lengths are one of them: name it by --column"),
    (["--lengths", "a.csv", "--column", "m"], "has no column 'm'; it has user, n"),
    (
        ["--lengths", "a.csv", "--column", "user"],
        "column 'user' of a.csv holds text, such as 'a' in row 1",
    ),
    (["--lengths", "empty.csv"], "empty.csv is empty"),
    (["--lengths", "header.csv"], "header.csv has no row"),
    (["--lengths", "broken.jsonl"], "broken.jsonl cannot be read (JSON parse error"),
    (
        ["--lengths", "later.jsonl", "--column", "n"],
        "later.jsonl cannot be read (JSON parse error: Column(/n) changed from number to string in row 2)",
    ),
    (["--lengths", "negative.csv"], "holds -4 in row 2; a length is an integer of at least 0"),
    (["--lengths", "fraction.csv"], "holds 2.5 in row 2"),
    (["--lengths", "nan.npy"], "holds nan in row 1"),
    (["--lengths", "null.parquet"], "has no value in row 2"),
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
    (["--lengths", "zipf:1.2:9", "--value-dim", "0"], "value_dim is 0"),
    (["--lengths", "zipf:1.2:9", "--task", "transformer", "--concat-ux"], "dimensions of HSTU: leave them out"),
    (["--lengths", "zipf:1.2:9", "--task", "tokens", "--max-attn-len", "9"], "dimensions of HSTU: leave them out"),
    (["--lengths", "zipf:1.2:9", "--max-attn-len", "0"], "max_attn_len is 0"),
    (["--lengths", "zipf:1.2:9", "--link-gbps", "-1"], "link_gbps is -1"),
    (["--lengths", "zipf:1.2:9", "--task", "tokens", "--peak-tflops", "9"], "tokens are no operations"),
    (["--lengths", "zipf:1.2:9", "--window", "64", "--steps", "8"], "window is (64,) and steps is 8"),
    (
        ["--lengths", "huge.csv"],
        "can cost more than 2**63 operations, which no plan counts: check the",
    ),
    (["--lengths", "zipf:1.2:9", "--config", "run.toml"], "--config is run.toml and --lengths is zipf:1.2:9; simulate"),
    ([], "simulate needs one of them"),
    (["--config", "run.toml", "--batch-size", "8"], "--batch-size belongs to --lengths"),
]


@pytest.fixture
def wrong(here):
    write(here / "a.csv", "user,n\na,5\n")
    write(here / "a.txt", "5\n")
    for name, text in {"empty.csv": "", "header.csv": "n\n", "broken.jsonl": "{\n"}.items():
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


# A file of a newcomer, by name, and what is said of it.
FILES = [
    ("one.csv", b"n\n3\nabc\n5\n", "column 'n' of one.csv holds text, such as 'abc' in row 2; a length is an integer"),
    ("blank.csv", b"n\n3\n\n\nabc\n", "holds text, such as 'abc' in row 2"),
    ("quoted.csv", b'"a","n"\n"x\ny",3\n"z",-1\n', "holds -1 in row 2", "n"),
    ("bare.csv", b"3\n4\nx\n", "column 'column 1' of bare.csv holds text, such as 'x' in row 3"),
    ("gap.csv", b"n\n3\nNA\n", "has no value in row 2"),
    ("lists.csv", b'n\n"[1, 2]"\n', "holds text, such as '[1, 2]'"),
    ("long.csv", b"n\n" + b"z" * 99 + b"\n", "such as '" + "z" * 40 + "'"),
    ("bare2.csv", b"u1,5\nu2,6\n", "has the columns u1, 5 (its first line: the columns have no names); lengths are"),
    ("three.csv", b"1,2,3\n", "has the columns column 1, column 2, column 3; lengths are one of them"),
    ("ragged.csv", b"a,n\n1,2\n1,2,3\n", "ragged.csv cannot be read", "n"),
    ("huge.csv", b"n\n99999999999999999999\n", "holds 1e+20 in row 1; a length is at most 9007199254740992"),
    ("infinite.csv", b"n\n3\ninf\n", "holds inf in row 2; a length is at most"),
    ("zipped.csv", b"\x1f\x8b\x08\x00", "zipped.csv is compressed: unpack it"),
    ("excel.csv", "n\n3\n".encode("utf-16"), "excel.csv is no text in UTF-8: convert it"),
    ("a.csv.gz", b"", "a.csv.gz is none of .parquet, .csv, .npy, .jsonl and no folder of parquet files: unpack it"),
    ("text.parquet", b"n\n3\n", "text.parquet cannot be read"),
    ("many.csv", b"length,count\n3,9223372036854775807\n4,9\n", "add up to 9223372036854775816; there are fewer"),
    ("minus.csv", b"length,count\n5,-1\n", "holds -1 in row 1; a count is an integer of at least 0"),
    ("more.csv", b"length,count\n3,x\n4,9\n", "column 'count' of more.csv holds text, such as 'x' in row 1"),
    ("words.jsonl", b"hello\n", "words.jsonl begins with 'hello'; a line is a length, or an object"),
    ("half.jsonl", b'{"n": 3}\n\n{"n":\n', "half.jsonl cannot be read (JSON parse error: Invalid value. in row 2)"),
    (
        "list.jsonl",
        b'{"n": [3]}\n{"n": 4}\n',
        "list.jsonl cannot be read (JSON parse error: Column(/n) changed from array to number in row 2)",
    ),
    ("twice.csv", b"n,n\n1,2\n", "twice.csv has 2 columns 'n': give them different names", "n"),
    ("deep.jsonl", b"[" * 100_000 + b"\n", "deep.jsonl begins with '[[[["),
    ("nested.jsonl", b'{"n": 1}\n{"n": ' + b"[" * 100_000 + b"\n", "nested.jsonl cannot be read"),
    ("minus.jsonl", b'\xef\xbb\xbf{"n": 3}\n{"n": -4}\n', "holds -4 in row 2"),
]


@pytest.mark.parametrize(("name", "content", "message", "column"), [(*file, None)[:4] for file in FILES])
def test_files_of_newcomers(here, capsys, name, content, message, column):
    (here / name).write_bytes(content)
    flags = [] if column is None else ["--column", column]
    assert main(["simulate", "--lengths", name, "--ranks", "2", *flags]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.startswith("evenrank: ") and printed.err.count("\n") == 1


def test_columns_of_another_kind(here, capsys):
    day = pa.array([1], pa.date32())
    for name, values, message in (
        ("flags", [True], "holds bool; lengths are integers: choose another"),
        ("days", day, "holds date32[day]"),
        ("text", ["12", "13"], "column 'text' of a.parquet holds text, such as '12' in row 1"),
        (
            "large",
            pa.array([2**63], pa.uint64()),
            "holds 9223372036854775808 in row 1; a length is at most 92",
        ),
    ):
        pq.write_table(pa.table({name: values}), "a.parquet")
        assert main(["simulate", "--lengths", "a.parquet", "--ranks", "2"]) == 2
        assert message in capsys.readouterr().err


def test_a_file_of_a_folder_is_named(here, capsys):
    (here / "shards").mkdir()
    pq.write_table(pa.table({"n": [3, 4]}), "shards/0.parquet")
    for content, message in (
        (b"PAR1 not", "shards/1.parquet cannot be read"),
        (pa.table({"n": [3, -4]}), "column 'n' of shards/1.parquet holds -4 in row 2"),
        (pa.table({"m": [3]}), "shards/1.parquet has lengths in m, shards/0.parquet in n; all files of a folder"),
        (pa.table({"n": [3], "m": [3]}), "shards/1.parquet has the columns n, m"),
    ):
        path = here / "shards" / "1.parquet"
        path.write_bytes(content) if isinstance(content, bytes) else pq.write_table(content, path)
        assert main(["simulate", "--lengths", "shards", "--ranks", "2"]) == 2
        printed = capsys.readouterr().err
        assert message in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("semicolons.csv", "user;n\na;5\nb;0\nc;17\nd;300\n", "n"),
        ("tabs.csv", "user\tn\na\t5\nb\t0\nc\t17\nd\t300\n", "n"),
        ("marked.csv", "\ufeffn\r\n5\r\n0\r\n17\r\n300\r\n", None),
        ("bare.csv", "\ufeff5\n0\n17\n300\n", None),
        ("quotes.csv", '"a, b","n"\n"1","5"\n"1","0"\n"1","17"\n"1","300"', "n"),
        ("marked.jsonl", '\ufeff{"n": 5}\n{"n": 0}\n{"n": 17}\n{"n": 300}\n', None),
    ],
)
def test_files_of_other_programs(here, name, content, column):
    (here / name).write_text(content, encoding="utf-8", newline="")
    assert find_lengths(name, column, in_order=True).take(4, np.random.default_rng(0)).tolist() == VALUES


def test_lengths_that_cost_more_than_a_plan_counts(capsys):
    wide = ["--task", "transformer", "--hidden-size", "4096", "--num-layers", "32", "--steps", "8"]
    assert main(["simulate", "--lengths", "lognormal:100000:0.5", "--ranks", "64", *wide]) == 2
    said = capsys.readouterr().err
    assert "a plan counts to 4.6e+18: lower --num-layers, which changes no ratio" in said and said.count("\n") == 1
    assert main(["simulate", "--lengths", "lognormal:130:9", "--ranks", "2"]) == 2
    assert "check the lengths, or cut rows by --max-length" in capsys.readouterr().err
    # Fewer steps are filled to a budget where all of them could not be added up.
    wide[-1] = "64"
    assert main(["simulate", "--lengths", "lognormal:100000:0.5", "--ranks", "64", "--batch-size", "1", *wide]) == 0


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda value: "" if isinstance(value, str) else None)
def test_mistakes_are_one_line(wrong, capsys, arguments, message):
    ranks = [] if "--ranks" in arguments else ["--ranks", "2"]
    assert main(["simulate", *arguments, *ranks]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("evenrank: ") and printed.err.count("\n") == 1
    assert message in printed.err


# A file, the column, and what is said of numbers that identify something and measure nothing.
IDENTIFIERS = [
    ("only.csv", "ID\n1\n2\n3\n", None, "--group-by ID"),
    ("spaced.csv", "user id,n\n1,5\n", "user id", "--group-by 'user id'"),
    ("user.jsonl", '{"user_id": 3}\n{"user_id": 3}\n', "user_id", "--group-by user_id"),
    ("time.csv", "time\n" + "".join(f"{1_700_000_000 + 37 * i}\n" for i in range(64)), "time", "a value of its own"),
    ("key.csv", "key\n" + "".join(f"{i * 7 % 2003}\n" for i in range(2003)), "key", "a value of its own"),
]


@pytest.mark.parametrize(("name", "text", "column", "remedy"), IDENTIFIERS)
def test_identifiers_are_not_lengths(here, capsys, name, text, column, remedy):
    write(here / name, text)
    flags = [] if column is None else ["--column", column]
    assert main(["simulate", "--lengths", name, "--ranks", "2", "--batch-size", "1", *flags]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and remedy in printed.err and "--group-by" in printed.err


def test_what_is_like_an_identifier_and_is_none(here):
    """Lists of ids count, a few distinct lengths are lengths, and so is a file that is nothing but numbers."""
    pq.write_table(pa.table({"movie_id": [[1] * value for value in VALUES]}), "lists.parquet")
    write(here / "distinct.csv", "n\n" + "".join(f"{100 + 31 * i}\n" for i in range(1, 400)))
    write(here / "documents.csv", "n\n" + "".join(f"{60_000 + 997 * i}\n" for i in range(50)))
    write(here / "few.csv", "n\n2000000\n3000000\n")
    write(here / "bare.csv", "".join(f"{i}\n" for i in range(3000)))
    np.save("array.npy", np.arange(3000))
    for name, first in (
        ("lists.parquet", VALUES[0]),
        ("distinct.csv", 131),
        ("documents.csv", 60_000),
        ("few.csv", 2_000_000),
        ("bare.csv", 0),
        ("array.npy", 0),
    ):
        assert find_lengths(name, None, in_order=True).take(1, np.random.default_rng(0)).tolist() == [first], name


def test_events_of_a_user_are_counted(here, capsys):
    rng = np.random.default_rng(0)
    users = (rng.zipf(1.5, 2000) % 97).tolist()
    counts = list(Counter(users).values())  # users in the order in which they first occur
    rows = {"user_id": users, "item_id": rng.integers(0, 9, 2000).tolist()}
    pq.write_table(pa.table(rows), "events.parquet", row_group_size=300)
    pq.write_table(pa.table({**rows, "user_id": [f"u{user}" for user in users]}), "named.parquet")
    pq.write_table(pa.table({"user_id": pa.array([f"u{user}" for user in users]).dictionary_encode()}), "coded.parquet")
    (here / "shards").mkdir()
    for shard in range(4):  # a user's events lie in several of them
        part = {name: values[500 * shard : 500 * (shard + 1)] for name, values in rows.items()}
        pq.write_table(pa.table(part), here / "shards" / f"{shard}.parquet")
    lines = list(zip(*rows.values()))
    write(here / "events.csv", "user_id,item_id\n" + "".join(f"{user},{item}\n" for user, item in lines))
    write(here / "coded.csv", "user_id;item_id\n" + "".join(f"00{user};{item}\n" for user, item in lines))
    write(here / "events.jsonl", "".join(json.dumps(dict(zip(rows, line))) + "\n" for line in lines))
    for name in (
        "events.parquet",
        "named.parquet",
        "coded.parquet",
        "shards",
        "events.csv",
        "coded.csv",
        "events.jsonl",
    ):
        lengths = find_lengths(name, None, group_by="user_id", in_order=True)
        assert lengths.num_rows == len(counts), name
        assert lengths.take(len(counts), rng).tolist() == counts, name
    # "7" and "007" are two users.
    write(here / "two.csv", "user,item\n7,1\n007,2\n7,3\n")
    assert find_lengths("two.csv", None, group_by="user", in_order=True).take(2, rng).tolist() == [2, 1]
    assert main(["simulate", "--lengths", "events.csv", "--group-by", "user_id", "--ranks", "2", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["lengths"]
    assert summary["rows"] == len(counts) and summary["tokens"]["max"] == max(counts)


@pytest.mark.parametrize(
    ("name", "text", "flags", "message"),
    [
        ("a.csv", "user,n\na,5\n", ["--group-by", "nobody"], "has no column 'nobody'; it has user, n"),
        ("a.csv", "user,n\na,5\n", ["--group-by", "user", "--column", "n"], "--column is n and --group-by is user"),
        ("gap.csv", "user,n\na,5\n,6\n", ["--group-by", "user"], "has no value in row 2; every event has one"),
        ("gap.jsonl", '{"user": 1}\n{"n": 1}\n', ["--group-by", "user"], "has no value in row 2"),
        ("half.jsonl", '{"user": 1.5}\n', ["--group-by", "user"], "holds double; users are integers or text"),
        ("list.jsonl", '{"user": [1]}\n', ["--group-by", "user"], "counts them by --column user"),
        ("a.npy", "", ["--group-by", "user"], "is an array, which has no columns"),
        ("zipf:1.2:9", None, ["--group-by", "user"], "belong to a file"),
    ],
)
def test_mistakes_of_counting_are_one_line(here, capsys, name, text, flags, message):
    if text is not None:
        write(here / name, text)
    assert main(["simulate", "--lengths", name, "--ranks", "2", *flags]) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1
