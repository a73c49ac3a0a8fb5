"""Lengths for `evenrank simulate`: every kind of file reads alike, and what is no length is named in one line."""

import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commons.cli.simulate.lengths import LengthReading

VALUES = [5, 0, 17, 300]


def write(path, content):
    if isinstance(content, pa.Table):
        pq.write_table(content, path)
    elif isinstance(content, np.ndarray):
        np.save(path, content)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def read(name, column=None, **options):
    """All lengths, in the order of the file."""
    lengths = LengthReading(column, in_order=True, **options).find(name)
    return lengths.take(lengths.num_rows, np.random.default_rng(0)).tolist()


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
    write(here / "plain.csv", "5\n0\n17\n300\n\n")
    write(here / "a.jsonl", "".join(f'{{"user": "a", "n": {value}}}\n' for value in VALUES))
    write(here / "plain.jsonl", "5\n0\n17\n300\n")
    write(here / "lists.jsonl", "".join(json.dumps({"n": [7] * value}) + "\n" for value in VALUES))
    named = ("a.parquet", "a.csv", "a.jsonl", "lists.jsonl")
    for name in (*named, "lists.parquet", "shards", "a.npy", "floats.npy", "plain.csv", "plain.jsonl"):
        column = "n" if name in named else None
        assert read(name, column) == VALUES, name
        shuffled = LengthReading(column).find(name).take(4, np.random.default_rng(0))
        assert sorted(shuffled.tolist()) == sorted(VALUES) != shuffled.tolist() != VALUES
        assert shuffled.dtype == np.int64


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("semicolons.csv", "user;n\na;5\nb;0\nc;17\nd;300\n", "n"),
        ("tabs.csv", "user\tn\na\t5\nb\t0\nc\t17\nd\t300\n", "n"),
        ("marked.csv", "\ufeffn\r\n5\r\n0\r\n17\r\n300\r\n", None),
        ("bare.csv", "\ufeff5\n0\n17\n300\n", None),
        ("pandas.csv", ",n\n0,5\n1,0\n2,17\n3,300\n", "n"),
        ("pandas_tabs.csv", "\tn\n0\t5\n1\t0\n2\t17\n3\t300\n", "n"),
        ("CAPITALS.CSV", "n\n5\n\n0\n17\n300\n", None),
        ("quotes.csv", '"a, b","n"\n"1","5"\n"1","0"\n"1","17"\n"1","300"', "n"),
        ("comma.csv", '"a, ""b""";n\n"1, 2";5\n1;0\n1;17\n1;300\n', "n"),
        ("sentence.csv", '"n, of a user"\n5\n0\n17\n300\n', "n, of a user"),
    ],
)
def test_files_of_other_programs(here, name, content, column):
    (here / name).write_text(content, encoding="utf-8", newline="")
    assert read(name, column) == VALUES


def test_a_name_is_no_pattern_and_a_folder_no_column(here):
    (here / "day=3").mkdir()
    for name in ("n[1]", "n1", "day=3/n", "n:1"):  # also no distribution
        write(here / f"{name}.csv", "n\n5\n" if name != "n1" else "n\n7\n")
        write(here / f"{name}.jsonl", '{"n": 5}\n' if name != "n1" else '{"n": 7}\n')
        pq.write_table(pa.table({"n": [5 if name != "n1" else 7]}), here / f"{name}.parquet")
    for name in ("n[1]", "day=3/n", "n:1"):
        assert [read(f"{name}.{kind}") for kind in ("csv", "jsonl", "parquet")] == [[5]] * 3


def test_a_folder_whose_files_have_numbers_of_several_types(here, refused):
    (here / "log").mkdir()
    pq.write_table(pa.table({"n": pa.array([5], pa.int8())}), "log/0.parquet")
    pq.write_table(pa.table({"n": pa.array([300], pa.int64())}), "log/1.parquet")
    assert read("log") == [5, 300] and read("log", group_by="n") == [1, 1]
    pq.write_table(pa.table({"n": [7.0, 8.5]}), "log/1.parquet")
    assert "log/1.parquet holds 8.5 in row 2, counted from 1" in refused("--lengths", "log")


def test_a_file_with_several_names_is_read_once(here):
    (here / "days").mkdir()
    for day, lengths in (("1", [3, 1]), ("2", [2])):
        pq.write_table(pa.table({"n": lengths}), here / "days" / f"{day}.parquet")
    (here / "days" / "latest.parquet").symlink_to("2.parquet")
    (here / "days" / "_hidden").mkdir()
    pq.write_table(pa.table({"n": [4]}), here / "days" / "_hidden" / "3.parquet")
    (here / "days" / "shown.parquet").symlink_to("_hidden/3.parquet")
    (here / "days" / "again").symlink_to(".", target_is_directory=True)
    assert read("days") == [3, 1, 2, 4]


def test_drawn_lengths_follow_what_was_named(here):
    rng = np.random.default_rng(0)
    write(here / "h.csv", "length,count\n3,0\n10,3\n20,1\n")
    drawn = LengthReading().find("h.csv").take(40_000, rng)
    assert set(drawn.tolist()) == {10, 20} and 0.24 < (drawn == 20).mean() < 0.26
    write(here / "unnamed.csv", "10,3\n20,1\n")
    assert set(LengthReading().find("unnamed.csv").take(100, rng).tolist()) == {10, 20}
    np.save("a.npy", np.array([4, 5]))
    assert set(LengthReading(with_replacement=True).find("a.npy").take(100, rng).tolist()) == {4, 5}
    normal = np.log(LengthReading().find("lognormal:130:1.4").take(100_000, rng))
    assert abs(np.median(normal) - np.log(130)) < 0.02 and abs(normal.std() - 1.4) < 0.02
    assert LengthReading().find("lognormal:130:1.4:512").take(1000, rng).max() == 512
    zipf, other = (LengthReading().find("zipf:1.2:4096").take(100_000, rng) for _ in range(2))
    assert (zipf != other).any()
    assert zipf.min() == 1 and zipf.max() == 4096
    assert abs((zipf == 1).mean() - 0.179) < 0.01  # 1 ÷ ζ(1.2)


# The file, what it holds, options, and the message.
FILES = [
    ("none.csv", None, [], "none.csv does not exist"),
    ("s3://bucket/a.csv", None, [], "names a file of lengths: copy it to this machine"),
    ("", None, [], "lengths is ''; it names a file or a distribution"),
    ("uniform", None, [], "correct the path, or give zipf:EXPONENT:LONGEST"),
    *(
        (name, None, [], f"lengths is {name!r}, neither a file nor a known distribution: give zipf")
        for name in (
            "normal:3:4",
            "zipf:0.9:4096",
            "zipf:1e300:7",
            "zipf:1.2:0.5",
            "zipf:1:9",
            "zipf:1.2:9.5",
            "zipf:1.2:1e10",
            "lognormal:inf:1",
            "lognormal:-1:1",
            "zipf:x:9",
            "lognormal:1:99",
        )
    ),
    *(
        ("zipf:1.2:9", None, flags, "belong to a file")
        for flags in (["--column", "n"], ["--group-by", "n"], ["--in-order"], ["--with-replacement"])
    ),
    ("a.csv", b"user,n\na,5\n", [], "lengths are in one column: name it by --column, or in a file of events"),
    ("a.csv", b"user,n\na,5\n", ["--column", "m"], "has no column 'm'; it has user, n"),
    ("a.csv", b"user,n\na,5\n", ["--group-by", "user", "--column", "n"], "--column is n and --group-by is user"),
    ("bare.csv", b"u1,5\nu2,6\n", [], "the columns u1, 5 (its first line: the columns have no names); lengths are"),
    ("three.csv", b"1,2,3\n", [], "has the columns column 1, column 2, column 3; lengths are in one column"),
    ("empty.csv", b"", [], "empty.csv cannot be read (it is empty, or begins with an empty line)"),
    ("header.csv", b"n\n", [], "header.csv has no row"),
    ("zeros.csv", b"n\n" + b"0\n" * 64, [], "there is nothing to balance"),
    ("one.csv", b"n\n3\nabc\n5\n", [], "column 'n' of one.csv holds 'abc' in row 2, counted from 1; a length is an "),
    ("gap.csv", b"user,n\na,3\nb,\n", ["--column", "n"], "holds no value in row 2"),
    ("quoted.csv", b'"a","n"\n"x\ny",3\n"z",-1\n', ["--column", "n"], "holds '-1' in row 2"),
    ("fraction.csv", b"n\n3\n2.5\n", [], "holds '2.5' in row 2"),
    ("huge.csv", b"n\n3\n1e20\n", [], "in row 2, counted from 1; a length is an integer from 0 to 9,007"),
    ("long.csv", b"n\n" + b"z" * 99 + b"\n", [], "holds '" + "z" * 41 + " in row 1"),
    ("ragged.csv", b"a,n\n1,2\n1,2,3\n", ["--column", "n"], "ragged.csv cannot be read (CSV Error on Line: 3): check"),
    ("twice.csv", b"n,n\n1,2\n", [], "twice.csv cannot be read"),
    ("zipped.csv", b"\x1f\x8b\x08\x00", [], "zipped.csv is compressed: unpack it"),
    ("excel.csv", "n\n3\n".encode("utf-16"), [], "excel.csv is not UTF-8 text: convert it"),
    ("a.csv.gz", b"", [], "a.csv.gz is neither a .parquet, .csv, .npy, .jsonl file nor a folder of parquet files:"),
    ("b.csv.gz", b"", [], "parquet files: unpack it"),
    ("a.txt", b"5\n", [], ".jsonl file nor a folder of parquet files: convert it"),
    ("nulls.csv", b"length,count\n3,0\n", [], "all counts are 0"),
    ("many.csv", b"length,count\n" + b"3,9007199254740992\n" * 1024, [], "add up to 9223372036854775808; there are"),
    ("minus.csv", b"length,count\n5,-1\n", [], "of minus.csv holds '-1' in row 1, counted from 1; a count is an"),
    *(
        ("drawn.csv", b"length,count\n5,1\n", [flag], "drawn.csv is a histogram, from which rows are drawn")
        for flag in ("--in-order", "--with-replacement")
    ),
    ("two.csv", b"n\n3\n4\n", [], "two.csv has 2 rows, a step of 2 ranks needs 64: lower --ranks"),
    ("two.csv", b"n\n3\n4\n", ["--with-replacement", "--in-order"], "exclude each other"),
    ("half.jsonl", b'{"n": 3}\n\n{"n":\n', [], "half.jsonl cannot be read (line 3 is not JSON): check the file"),
    ("last.jsonl", b'{"n": 3}\n{"n":', [], "last.jsonl cannot be read (line 2 is not JSON): check the file"),
    ("null.jsonl", b'{"n": [3]}\n\n{"n": null}\n', [], "column 'n' of null.jsonl holds no value in row 2"),
    ("mixed.jsonl", b'{"n": [3]}\n{"n": 4}\n', [], "column 'n' of mixed.jsonl holds '[3]' in row 1"),
    ("deep.jsonl", b"[" * 100_000 + b"\n", [], "deep.jsonl cannot be read"),
    ("text.parquet", b"n\n3\n", [], "text.parquet cannot be read"),
    ("text.npy", b"no", [], "text.npy cannot be read"),
    ("a.npy", np.array([np.nan]), [], "holds nan in row 1"),
    ("a.npy", np.ones((2, 2), np.int64), [], "a.npy cannot be read"),
    ("a.npy", np.zeros(3, [("n", np.int64)]), [], "a.npy cannot be read"),
    ("a.npy", np.array([-3]), [], "column 'lengths' of a.npy holds -3 in row 1"),
    ("a.parquet", pa.table({"flags": [True]}), [], "holds True in row 1"),
    ("a.parquet", pa.table({"d": pa.array([1], pa.date32())}), [], "holds datetime.date(1970, 1, 2) in row 1"),
    ("a.parquet", pa.table({"nulls": [1, None]}), [], "holds no value in row 2"),
    ("a.parquet", pa.table({"n": pa.array([2**63], pa.uint64())}), [], "holds 9223372036854775808 in row 1"),
    ("only.csv", b"ID\n1\n2\n3\n", [], "ends in 'id', like an identifier and not a length: count the events"),
    ("spaced.csv", b"user id,n\n1,5\n", ["--column", "user id"], "--group-by 'user id'"),
    ("a.csv", b"user,n\na,5\n", ["--group-by", "nobody"], "has no column 'nobody'; it has user, n"),
    ("gap.csv", b"user,n\na,5\n,6\n", ["--group-by", "user"], "has no value in row 2, counted from 1; every"),
    ("missing.csv", b'user\na\n\n""\nb\n', ["--group-by", "user"], "has no value in row 2, counted from 1; every"),
    ("missing.csv", b'n\n3\n""\n', [], "in row 2"),
    ("list.jsonl", b'{"user": [1]}\n', ["--group-by", "user"], "give --column user"),
]


@pytest.fixture
def refused(mistake):
    """Why `simulate` refuses some options, on two ranks where these do not say."""
    return lambda *flags: mistake("simulate", *([] if "--ranks" in flags else ["--ranks", "2"]), *flags)


@pytest.mark.parametrize(("name", "content", "flags", "message"), FILES)
def test_files_with_mistakes(here, refused, name, content, flags, message):
    if content is not None:
        write(here / name, content)
    assert message in refused("--lengths", name, *flags)


def test_a_file_of_a_folder(here, refused):
    (here / "shards").mkdir()
    assert "shards is a folder without parquet files" in refused("--lengths", "shards")
    pq.write_table(pa.table({"n": [3, 4]}), "shards/0.parquet")
    for content, message in (
        (b"PAR1 not", "shards/1.parquet"),
        (pa.table({"n": [3, -4]}), "column 'n' of shards/1.parquet holds -4 in row 2"),
        (pa.table({"m": [3]}), "shards has the columns n, m; lengths are in one column"),
    ):
        write(here / "shards" / "1.parquet", content)
        assert message in refused("--lengths", "shards")


ZIPF = ["--lengths", "zipf:1.2:9"]
OPTIONS = [
    ([*ZIPF, "--ranks", "0"], "balancing needs 2 ranks and a step"),
    ([*ZIPF, "--task", "bert"], "--task"),
    ([*ZIPF, "--steps", "0"], "balancing needs 2 ranks and a step"),
    *(
        ([*ZIPF, "--" + name.replace("_", "-"), value], f"{name} is {value}")
        for name, value in (
            ("batch_size", "0"),
            ("bytes_per_token", "0"),
            ("tokens_per_item", "0"),
            ("extra_tokens", "-1"),
            ("max_length", "0"),
            ("seed", "-1"),
            ("hidden_size", "-1"),
            ("max_attn_len", "0"),
            ("link_gbps", "-1"),
            ("mfu", "1.5"),
            ("mfu", "0.0"),
        )
    ),
    ([*ZIPF, "--task", "transformer", "--concat-ux"], "dimensions of HSTU: leave them out"),
    ([*ZIPF, "--task", "tokens", "--max-attn-len", "9"], "dimensions of HSTU: leave them out"),
    ([*ZIPF, "--peak-tflops", "9.89e14"], "below 1e9, and in 10^12 operations per second"),
    ([*ZIPF, "--task", "tokens", "--peak-tflops", "9"], "the peak is in operations and not in tokens"),
    ([*ZIPF, "--window", "64", "--steps", "8"], "window is (64,) and steps is 8"),
    ([*ZIPF, "--config", "run.toml"], "--config is run.toml and --lengths is zipf:1.2:9; simulate"),
    ([*ZIPF, "--steps", "1000000000"], "lower --steps"),
    ([], "simulate needs exactly one of them"),
    (["--config", "run.toml", "--batch-size", "8"], "--batch-size belongs to --lengths"),
    ([*ZIPF, "--model", "hstu", "--shuffler.slack", "0.1"], "--model, --shuffler belongs to --config"),
]


@pytest.mark.parametrize(("arguments", "message"), OPTIONS)
def test_options_with_mistakes(refused, arguments, message):
    assert message in refused(*arguments)


def test_lengths_that_cost_more_than_a_plan_counts(here, told, refused):
    wide = ["--task", "transformer", "--hidden-size", "4096", "--num-layers", "32", "--steps", "8"]
    said = refused("--lengths", "lognormal:100000:0.5", "--ranks", "64", *wide)
    assert "the maximum of a plan is 4.6e+18: lower --num-layers, which changes no ratio" in said
    assert "check the lengths, or cut rows by --max-length" in refused("--lengths", "lognormal:130:9")
    write(here / "huge.csv", "n\n" + "1000000000\n" * 64)
    assert "can cost more than 2**63 operations, the maximum of a plan" in refused("--lengths", "huge.csv")
    # Fewer steps are filled to a budget where all of them could not be added up.
    wide[-1] = "64"
    told("simulate", "--lengths", "lognormal:100000:0.5", "--ranks", "64", "--batch-size", "1", *wide)


def test_what_is_like_an_identifier_and_is_none(here):
    """Lists of ids have lengths, and so has a file that is nothing but numbers."""
    pq.write_table(pa.table({"movie_id": [[1] * value for value in VALUES]}), "lists.parquet")
    assert read("lists.parquet") == VALUES
    write(here / "bare.csv", "".join(f"{number}\n" for number in range(3000)))
    assert read("bare.csv") == list(range(3000))


def test_events_of_a_user_are_counted(here, asked):
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
    for name in ("events.parquet", "named.parquet", "coded.parquet", "shards", "events.csv", "coded.csv"):
        assert read(name, group_by="user_id") == counts, name
    assert read("events.jsonl", group_by="user_id") == counts
    # "7" and "007" are two users.
    write(here / "two.csv", "user,item\n7,1\n007,2\n7,3\n")
    assert read("two.csv", group_by="user") == [2, 1]
    summary = asked("simulate", "--lengths", "events.csv", "--group-by", "user_id", "--ranks", "2")["lengths"]
    assert summary["rows"] == len(counts) and summary["tokens"]["max"] == max(counts)
