"""Parquet files of one's own: every way to be wrong, in one line that says what to do."""

import shlex
import subprocess
import sys
import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commons.cli.simulate.lengths import LengthReading
from commons.datasets.sequences.event_columns import EventColumns
from commons.datasets.sequences.own_parquet import preprocess_parquet
from commons.datasets.sids.histories import ParquetHistories
from tests.helpers.datasets.own_events import COLUMNS, EVENTS, write


def error_of(source, columns=COLUMNS, kind=ValueError):
    output = source.parent / "output"
    with pytest.raises(kind) as caught:
        preprocess_parquet(columns, source, output)
    assert "\n" not in str(caught.value) and not output.exists()
    return str(caught.value)


def test_an_action_that_no_event_has_is_logged(tmp_path, caplog):
    source = write(tmp_path / "events.parquet")
    actions = ("stars >= 1", "gender == male", "stars > 100")
    preprocess_parquet(EventColumns("uid", "iid", "ts", actions=actions), source, tmp_path / "output")
    assert [each.getMessage().split("; ")[0] for each in caplog.records] == [
        f"no event of {source} has the action 'gender == male' or 'stars > 100'"
    ]


LISTS = {"uid": [1, 2], "iid": [[1, 2], [2, 3]], "ts": [[1, 2], [2, 3]], "stars": [[4, 5], None]}


@pytest.mark.parametrize(
    ("columns", "changes", "message"),
    [
        (EventColumns(), {}, "columns.user is not given; "),
        (EventColumns("uid"), {}, "columns.item is not given; "),
        (EventColumns("uid", "iid"), {}, "columns.time is not given, and a row of"),
        (EventColumns("uid", "iid", "time"), {}, "write the column into the files if only their folders have it, as n"),
        (EventColumns("uid", "iid", "ts", actions=("clik",)), {}, "has the columns uid, iid, ts, click, stars, gender"),
        (EventColumns("uid", "iid", "ts", actions=("star > 1",)), {}, "columns.actions has 'star'; "),
        (
            EventColumns("uid", "iid", "ts", actions=("stars = 4",)),
            {},
            'gender: write a condition like "event == buy"',
        ),
        (EventColumns("uid", "iid", "ts", actions=("click",) * 2), {}, "has 2 entries, 1 of them different"),
        (EventColumns("uid", "iid", "ts", actions=tuple(map(str, range(16)))), {}, "16 entries"),
        (EventColumns("uid", "iid", "ts", actions=("iid",)), {}, "column 'iid' of"),
        (EventColumns("uid", "iid", "ts", actions=("gender",)), {}, "is of type string; an action is 0 or 1, or a"),
        (EventColumns("uid", "iid", "ts", actions=("stars",)), {}, "has a null in row 3, counted from 1;"),
        (EventColumns("uid", "iid", "ts", actions=("stars >= many",)), {}, "cannot be compared as in 'stars >= many'"),
        *(
            (
                EventColumns("uid", "iid", "ts", actions=(action,)),
                {"stars": pa.array([1, 2, 3, 4, 5], pa.decimal128(3, 1))},
                "is of type decimal128(3, 1); actions are numbers, booleans or texts: convert the column",
            )
            for action in ("stars", "stars >= 4")  # a decimal cannot be compared
        ),
        (
            EventColumns("uid", "iid", "ts", actions=("gender >= 3",)),
            {},
            "is of type string, 'gender >= 3' compares with a number; texts are ordered alphabetically",
        ),
        (EventColumns("uid", "iid", "ts", context=("stars",)), {}, "is of type double; it must have integers, str"),
        (EventColumns("uid", "iid", "ts", context=("iid",)), {}, "is columns.item and also columns.user"),
        (EventColumns("uid", "uid", "ts"), {}, "is columns.item and also columns.user or columns.context"),
        *(
            (EventColumns("uid", "iid", "ts", context=(name,)), {name: [1] * 5}, f"column {name!r} cannot name a")
            for name in ("a/b", "a.b", "actions", "timestamp", "split")
        ),
        (COLUMNS, {"uid": ["b", "a", None, "b", "c"]}, "events.parquet has a null in row 3, counted from 1;"),
        (COLUMNS, {"iid": [1, None, 3, 4, 5]}, "column 'iid' of"),
        (COLUMNS, {"ts": [1, 2, 3, None, 5]}, "has a null in row 4, counted from 1"),
        (COLUMNS, {"ts": [1.0, float("nan"), 3, 4, 5]}, "has the time nan in row 2, counted from 1;"),
        (COLUMNS, {"ts": [1.0, float("nan"), 1.0, 1.0, 1.0]}, "has the time nan in row 2, counted from 1;"),
        *(
            (
                COLUMNS,
                {"ts": pa.array([1, time, 3, 4, 5], pa.timestamp(unit))},
                "events.parquet has the time infinity or NaT in row 2, counted from 1; a time is finite",
            )
            # With has_nulls=False, fastparquet writes NaT as a number.
            for time, unit in ((2**63 - 1, "us"), (-(2**63), "us"), (-(2**63), "ns"))
        ),
        (COLUMNS, {"ts": pa.array([2**62] * 5, pa.timestamp("ms"))}, "has values out of range"),
        (COLUMNS, {"ts": [1.7e12] * 5}, "has the time 1700000000000.0 in row 1, counted from 1;"),
        (COLUMNS, {"ts": [1_700_000_000_000] * 5}, "year 3000 in 's': set columns.time_unit to 'ms', 'us' or 'ns'"),
        (COLUMNS, {"ts": [-(2**62)] * 5}, "long before 1970"),
        # Nanoseconds that a stored time cannot represent.
        *(
            (EventColumns("uid", "iid", "ts", "ns"), {"ts": pa.array([1, time, 3, 4, 5], kind)}, message)
            for time, kind, message in (
                (2**63, pa.uint64(), "in row 2, counted from 1; it is no number or lies beyond the year 2262 in 'ns'"),
                (float(2**63), pa.float64(), "row 2, counted from 1; it is no number or lies beyond the year 2262"),
                (-1e19, pa.float64(), "has the time -1e+19 in row 2, counted from 1; it is long before 1970"),
                (-(2**63), pa.int64(), "has the time -9223372036854775808 in row 2, counted from 1; it is long before"),
            )
        ),
        (COLUMNS, {"ts": ["now"] * 5}, "is of type string; times are timestamps, dates or numbers since 1970"),
        (COLUMNS, {"iid": [1.5] * 5}, "is of type double; it must have integers, strings or booleans"),
        (
            COLUMNS,
            {"iid": pa.array([2**63] * 5, pa.uint64())},
            "has the integer 9223372036854775808 in row 1, counted from 1;",
        ),
        (COLUMNS, {"click": [2, 0, 0, 1, 1]}, "events.parquet has 2 in row 1, counted from 1;"),
        (COLUMNS, {"gender": [["m"]] * 5}, "is a list, and 'iid' is not"),
        (COLUMNS, {name: [] for name in EVENTS} | {"uid": pa.array([], pa.string())}, "is of type null"),
        (COLUMNS, {name: pa.array(values).slice(0, 0) for name, values in EVENTS.items()}, "has no users in any row"),
    ],
)
def test_columns_and_values_of_events(tmp_path, columns, changes, message):
    assert message in error_of(write(tmp_path / "events.parquet", **changes), columns)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ts": [[1], [2, 3]]}, "column 'ts' of"),
        ({"ts": [1, 2]}, "is of type int64; it must be a list, like items"),
        ({"iid": [[1, 2], None]}, "has a list of another length than the items in row 2, counted from 1"),
        ({"stars": [[4, 5], [4]]}, "column 'stars' of"),  # a condition is false for a null, not for a missing entry
        ({"stars": [[4, 5], []]}, "has a list of another length than the items in row 2, counted from 1"),
        ({"iid": [[1, 2], []], "ts": [[1, 2], []], "stars": [[4, 5], [4]]}, "another length than the items in row 2"),
        ({"ts": [[1, 2], None]}, "has a null in row 2, counted from 1"),
        ({"iid": [[1, None], [2, 3]]}, "has a null in row 1, counted from 1"),
        ({"uid": [[1], [2]]}, "is a list, and one row per user with lists"),
        (
            {name: pa.array([[], []], pa.list_(pa.int64())) for name in ("iid", "ts", "stars")},
            "no items in",
        ),
    ],
)
def test_lists_of_users(tmp_path, changes, message):
    source = write(tmp_path / "users.parquet", LISTS, **changes)
    assert message in error_of(source, EventColumns("uid", "iid", "ts", actions=("stars >= 4",)))


def test_files(tmp_path):
    assert "does not exist" in error_of(tmp_path / "none", kind=FileNotFoundError)
    (tmp_path / "log").mkdir()
    assert "has no parquet file" in error_of(tmp_path / "log", kind=FileNotFoundError)
    (tmp_path / "log" / "_SUCCESS").touch()
    write(tmp_path / "log" / "0.parquet")
    write(tmp_path / "log" / "1.parquet", uid=[1, 2, 3, 4, 5])
    first, second = (tmp_path / "log" / f"{number}.parquet" for number in range(2))
    assert f"column 'uid' is of type string in {first} and int64 in {second}; a column" in error_of(tmp_path / "log")
    write(tmp_path / "log" / "1.parquet", {"uid": ["a"]})
    assert "1.parquet has no column 'iid', which other files of" in error_of(tmp_path / "log")
    (tmp_path / "log" / "1.parquet").write_text("text")
    assert "1.parquet is no parquet file, or damaged" in error_of(tmp_path / "log")
    whole = write(tmp_path / "log" / "1.parquet").read_bytes()
    (tmp_path / "log" / "1.parquet").write_bytes(whole[:60] + b"\xff" * 40 + whole[100:])
    assert "is damaged" in error_of(tmp_path / "log")


@pytest.mark.parametrize(
    ("name", "log"),
    [("Delta", "_delta_log/0.json"), ("Iceberg", "metadata/v1.metadata.json"), ("Hudi", ".hoodie/hoodie.properties")],
)
def test_files_of_a_table_are_not_its_rows(tmp_path, name, log):
    """Rows that the table has removed or rewritten are still in its files, and would count twice."""
    table = tmp_path / "lake" / "events"
    for part in ("data/day=1", Path(log).parent):
        (table / part).mkdir(parents=True)
    (table / log).touch()
    file = write(table / "data" / "day=1" / "0.parquet")
    (tmp_path / "link").symlink_to(table / "data")
    for source in (file, table / "data", table, table.parent, tmp_path / "link"):
        assert f"{table} is a table of {name}, and its files also have rows" in error_of(source)
    with pytest.raises(ValueError, match=f"is a table of {name}"):
        ParquetHistories(file, "iid", "train")
    for source in (file, table):
        with pytest.raises(ValueError, match=f"is a table of {name}"):
            LengthReading(group_by="uid").find(str(source))
    (table / log).rename(tmp_path / "log")
    (table / log).parent.rmdir()
    preprocess_parquet(COLUMNS, table, tmp_path / "data")


def test_an_integer_that_only_a_later_file_s_type_has(tmp_path):
    (tmp_path / "log").mkdir()
    write(tmp_path / "log" / "0.parquet", uid=[1] * 5)
    write(tmp_path / "log" / "1.parquet", uid=pa.array([1, 2**63, 3, 4, 5], pa.uint64()))
    message = error_of(tmp_path / "log")
    assert "1.parquet has the integer 9223372036854775808 in row 2, counted from 1; ids are below 2^63" in message


def test_other_files_in_the_folder(tmp_path):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "README.md").write_text("The log")
    write(tmp_path / "log" / "events.parquet")
    message = error_of(tmp_path / "log")
    assert "README.md is no parquet file, or damaged" in message and message.endswith("or move it elsewhere")
    (tmp_path / "log" / "README.md").rename(tmp_path / "log" / "a.csv")
    message = error_of(tmp_path / "log")
    assert "a.csv is no parquet file; a source has only such files: convert it with DuckDB" in message


def test_the_command_that_converts_a_file_keeps_ids_apart(tmp_path):
    """DuckDB takes types from the first 20,480 rows, unless told otherwise."""
    csv = tmp_path / "a user's log.2024.CSV"
    csv.write_text("uid,iid,ts\n" + "7,1,1\n" * 21_000 + "007,1,1\n")
    command = error_of(csv).partition(": python ")[2]
    subprocess.run([sys.executable, *shlex.split(command)], check=True)
    assert pq.read_table(f"{csv}.parquet")["uid"].unique().to_pylist() == ["7", "007"]
    lines = tmp_path / "log.jsonl"  # DuckDB recognises UUIDs there
    lines.write_text("".join(f'{{"uid": "{uuid.UUID(int=row)}", "iid": {row}, "ts": 1}}\n' for row in range(3)))
    command = error_of(lines).partition(": python ")[2]
    subprocess.run([sys.executable, *shlex.split(command)], check=True)
    columns = EventColumns("uid", "iid", "ts", context=("uid",))
    assert preprocess_parquet(columns, Path(f"{lines}.parquet"), tmp_path / "data").is_dir()


def test_an_output_within_the_source(tmp_path):
    write(tmp_path / "events.parquet")
    for source, output in ((tmp_path, tmp_path), (tmp_path, tmp_path / "data")):
        with pytest.raises(ValueError, match="is within source .*: give another output"):
            preprocess_parquet(COLUMNS, source, output)
    assert [entry.name for entry in tmp_path.iterdir()] == ["events.parquet"]


def test_columns_that_differ_only_in_case(tmp_path):
    """SQL would read one of them for both."""
    columns = EventColumns("ID", "id", "ts")
    (tmp_path / "log").mkdir()
    write(tmp_path / "log" / "0.parquet", {"ID": [1, 1, 2], "id": [10, 20, 10], "ts": [3, 2, 1]})
    assert "0.parquet have one name in SQL, which ignores case, and 'ID' is read" in error_of(tmp_path / "log", columns)
    write(tmp_path / "log" / "0.parquet", {"ID": [1], "iid": [10], "ts": [3]})
    write(tmp_path / "log" / "1.parquet", {"id": [7], "ID": [1], "iid": [10], "ts": [3]})
    assert "columns 'id', 'ID' of" in error_of(tmp_path / "log", EventColumns("ID", "iid", "ts"))
    write(tmp_path / "log" / "1.parquet", {"ID": [1], "iid": [7], "IID": [8], "iid_1": [9], "ts": [3]})
    (tmp_path / "log" / "0.parquet").unlink()
    assert "'iid', 'IID', 'iid_1' of" in error_of(tmp_path / "log", EventColumns("ID", "iid_1", "ts"))


def test_columns_named_as_duckdb_s_counters(tmp_path):
    """A column "filename" is no file's name in a message, and one "file_row_number" no row's number."""
    source = write(tmp_path / "events.parquet", filename=list("abcde"), file_row_number=list("abcde"), click=[2] * 5)
    assert f"column 'click' of {source} has 2; an action is 0 or 1" in error_of(source)
