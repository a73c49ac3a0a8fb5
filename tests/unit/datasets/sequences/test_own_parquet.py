"""Parquet files of one's own: event logs and tables of users to the columnar files, and every way to be wrong."""

import datetime
import shlex
import sys
import uuid
from collections import defaultdict
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.sequences import event_store
from commons.datasets.sequences import writer as sequence_writer
from commons.datasets.sequences.event_columns import EventColumns
from commons.datasets.sequences.file import SequenceFile
from commons.datasets.sequences.own_parquet import preprocess_parquet
from commons.trainer.config.load import load_config_file
from hstu.train_config import TrainConfig
from tests.helpers.datasets.own_events import COLUMNS, EVENTS, write
from tests.helpers.datasets.stored_users import users_of, vocabularies_of
from tests.helpers.jobs.programs import run_program


def rows_of(path):
    """By raw user: items, actions and times, and the raw context."""
    columns = SequenceFile(path, "parquet", []).metadata.options["columns"]
    rows = {}
    for user, row in users_of(path, "parquet", columns["user"]).items():
        del row["split"]
        rows[user] = (list(zip(*(row.pop(name) for name in (columns["item"], "actions", "timestamp")))), row)
    return rows


def stored(folder, columns=COLUMNS, table=None, **changes):
    """The data set of a file of events, some of whose columns are changed, or of other columns."""
    return preprocess_parquet(columns, write(folder / "log.parquet", table, **changes), folder / "data")


class TestPreprocess:
    def test_events(self, tmp_path):
        path = stored(tmp_path)
        assert path == tmp_path / "data" / "parquet.parquet"
        assert rows_of(path) == {
            "a": ([(10**12, 2, 5)], {"gender": None}),
            "b": ([(5, 0, 10), (-7, 1, 20), (-7, 3, 30)], {"gender": "f"}),  # of the latest event
            "c": ([(5, 1, 1)], {"gender": "f"}),
        }
        metadata = SequenceFile(path, "parquet", []).metadata
        assert metadata.vocabulary_sizes == {"uid": 3, "gender": 3, "iid": 3, "actions": 4}
        assert (metadata.num_users, metadata.num_interactions, metadata.generated) == (3, 5, False)

    def test_columns_named_as_those_of_the_query(self, tmp_path):
        context = ("user", "action", "__file", "__row")
        names = {name: [1, 2, 1, 2, 1] for name in ("is_empty", "filename", "file_row_number", *context)}
        columns = EventColumns("is_empty", "filename", "file_row_number", context=context)
        path = stored(tmp_path, columns, names)
        events = {1: [(1, 0, 1)] * 3, 2: [(2, 0, 2)] * 2}
        assert rows_of(path) == {user: (own, dict.fromkeys(context, user)) for user, own in events.items()}

    def test_users_with_lists(self, tmp_path):
        table = {
            "uid": [3, 1, 3, 2],
            "iid": [["x", "y"], ["y"], ["z"], []],
            "ts": [[5, 7], [1], [6], []],
            "click": [[1, 0], [1], [1], []],
            "stars": [[4, None], [None], [1], []],
            "gender": ["f", "m", "g", "m"],
        }
        assert rows_of(stored(tmp_path, table=table)) == {
            1: ([("y", 1, 1)], {"gender": "m"}),
            2: ([], {"gender": "m"}),  # a real user without events
            3: ([("x", 3, 5), ("z", 1, 6), ("y", 0, 7)], {"gender": "f"}),
        }
        # Without times lists are in order, and rows of a user follow one another.
        rows = rows_of(stored(tmp_path, EventColumns("uid", "iid"), table))
        assert rows[3] == ([("x", 0, 0), ("y", 0, 0), ("z", 0, 0)], {})

    def test_context_that_is_named_twice(self, tmp_path):
        path = stored(tmp_path, EventColumns("uid", "iid", "ts", context=("gender", "uid", "gender")))
        batch = next(iter(get_data_loader("parquet", batch_size=3, dataset_path=path, max_history_seqlen=9)))
        assert batch.contextual_feature_names == ["gender", "uid"]
        assert batch.contextual_lengths().tolist()[: batch.actual_batch_size] == [2] * batch.actual_batch_size

    def test_numbers_that_are_all_equal_or_nan(self, tmp_path):
        """The file's statistics, from which DuckDB simplifies conditions, leave NaN out."""
        conditions = ("stars != 3", "stars == 3", "stars >= 3", "stars < 4")
        table = {"uid": [1] * 3, "iid": [1, 2, 3], "ts": [1, 2, 3], "stars": [3.0, float("nan"), None]}
        path = stored(tmp_path, EventColumns("uid", "iid", "ts", actions=conditions), table)
        assert [action for _, action, _ in rows_of(path)[1][0]] == [0b1110, 0b0001, 0]

    def test_conditions_on_texts_and_booleans(self, tmp_path):
        conditions = ("event == 'buy'", "event == aha", "liked == true", "liked != TRUE")
        values = {"event": ["buy", "aha", None], "liked": [True, False, None]}
        table = {"uid": [1] * 3, "iid": [1, 2, 3], "ts": [1, 2, 3], **values}
        path = stored(tmp_path, EventColumns("uid", "iid", "ts", actions=conditions), table)
        assert [action for _, action, _ in rows_of(path)[1][0]] == [0b0101, 0b1010, 0]

    @pytest.mark.parametrize("kinds", [["halffloat"], ["float"], ["double"], ["float", "double"], ["double", "float"]])
    def test_a_condition_has_the_precision_of_its_column(self, tmp_path, kinds):
        """A float32 of one file is read as the float64 of another one, which is not the number in the condition."""
        (tmp_path / "log").mkdir()
        for file, kind in enumerate(kinds):
            stars = pa.array([4.0, 4.1, 4.2, 4.1 + 1e-9]).cast(kind)
            table = {"uid": [file] * 4, "iid": [1, 2, 3, 4], "ts": [1, 2, 3, 4], "stars": stars}
            write(tmp_path / "log" / f"{file}.parquet", table)
        columns = EventColumns("uid", "iid", "ts", actions=("stars >= 4.1", "stars == 4.1"))
        path = preprocess_parquet(columns, tmp_path / "log", tmp_path / "data", test_fraction=0)
        users = rows_of(path)
        expected = [0, 3, 1, 1 if kinds == ["double"] else 3]
        assert [[action for _, action, _ in users[file][0]] for file in range(len(kinds))] == [expected] * len(kinds)

    @given(
        rows=st.lists(
            st.tuples(
                st.sampled_from([-(2**63), -1, 0, 7, 2**40]),
                st.sampled_from(["", "x", "yy", "ü", "z" * 50]),
                st.integers(-5, 5),
                st.booleans(),
                st.sampled_from(["m", "f", None]),
            ),
            min_size=1,
            max_size=40,
        ),
        files=st.integers(1, 3),
        rows_per_shard=st.sampled_from([1, 2, 4_000_000]),
        rows_per_read=st.sampled_from([3, 65_536]),
        as_lists=st.booleans(),
        swap=st.booleans(),
    )
    @settings(max_examples=12)
    def test_equals_a_slow_sort(self, tmp_path_factory, rows, files, rows_per_shard, rows_per_read, as_lists, swap):
        folder = tmp_path_factory.mktemp("own")
        source = folder / "source" / "gender=n"  # a name, not a value
        source.mkdir(parents=True)
        columns = EventColumns("uid", "iid", "ts", "s", ("click",), ("gender",))
        if swap:  # users are strings, items integers
            rows = [(item, user, *rest) for user, item, *rest in rows]
        names = ("uid", "iid", "ts", "click", "gender")
        for number, part in enumerate(np.array_split(np.arange(len(rows)), files)):
            own = [rows[row] for row in part]
            table = {name: [row[place] for row in own] for place, name in enumerate(names)}
            if as_lists:
                table |= {name: [[value] for value in table[name]] for name in ("iid", "ts", "click")}
            text, number_type = pa.string(), pa.int64()
            kinds = dict(zip(names, (text, number_type) if swap else (number_type, text)))
            kinds |= {"ts": pa.int32(), "click": pa.bool_(), "gender": pa.string()}
            kinds = {
                name: pa.list_(kind) if as_lists and name in ("iid", "ts", "click") else kind
                for name, kind in kinds.items()
            }
            pq.write_table(pa.table(table, schema=pa.schema(list(kinds.items()))), source / f"{number}.parquet")
        with (
            mock.patch.object(sequence_writer, "_INTERACTIONS_PER_SHARD", rows_per_shard),
            mock.patch.object(event_store, "_BATCH", rows_per_read),
        ):
            found = rows_of(preprocess_parquet(columns, folder / "source", folder / "output"))
        expected: dict = defaultdict(list)
        for user, item, time, click, gender in rows:
            expected[user].append((item, int(click), time, gender))
        for user, events in expected.items():
            ordered = sorted(events, key=lambda event: event[2])  # stable
            assert found[user] == ([event[:3] for event in ordered], {"gender": ordered[-1][3]})
        assert found.keys() == expected.keys()

    @pytest.mark.parametrize(
        ("times", "unit", "expected"),
        [
            (pa.array([30, 5, 10, 20, 1], pa.timestamp("ms", "Europe/Berlin")), "s", (1_000, [1, 5, 10, 20, 30])),
            (pa.array([30_000, 5_000, 9_000], pa.timestamp("ns", "UTC")), "s", (10**9, [5_000, 9_000, 30_000])),
            (pa.array([30, 5, 10, 20, 1], pa.int32()), "ms", (1_000, [1, 5, 10, 20, 30])),
            (pa.array([30.5, 5.25, -10, 20, 1]), "s", (10**6, [-(10**7), 10**6, 5_250_000, 2 * 10**7, 30_500_000])),
            (
                pa.array([1.6e9 + ms / 1e3 for ms in (4, 3, 2, 1, 0)]),
                "s",
                (10**6, [1_600_000_000_000_000, 1_600_000_000_001_000]),
            ),
            (pa.array([1.6e9] * 5, pa.float32()), "s", (10**6, [1_600_000_000_000_000] * 5)),
            (pa.array([30.25, 5.25, 10, 20, 1]), "us", (1_000_000, [1, 5, 10, 20, 30])),
            (pa.array([datetime.date(1970, 1, day) for day in (5, 2, 3, 4, 1)]), "s", (1, [0, 86_400, 172_800])),
        ],
    )
    def test_times(self, tmp_path, times, unit, expected):
        columns = EventColumns("uid", "iid", "ts", unit)
        table = {"uid": ["a"] * len(times), "iid": list(range(len(times))), "ts": times}
        source = write(tmp_path / "events.parquet", table)
        path = preprocess_parquet(columns, source, tmp_path, test_fraction=0)
        per_second, wanted = expected
        ((events, _),) = rows_of(path).values()
        assert [time for *_, time in events][: len(wanted)] == wanted
        assert SequenceFile(path, "parquet", []).metadata.options["timestamps_per_second"] == per_second
        loader = get_data_loader("parquet", dataset_path=tmp_path, batch_size=1, max_history_seqlen=9, timestamps=True)
        (batch,) = loader
        assert batch.features["timestamp"].values().tolist()[: len(wanted)] == [t // per_second for t in wanted]

    @pytest.mark.parametrize("units", [("s", "ns"), ("us", "ms"), ("ms", "us", "ns")])
    def test_timestamps_of_other_units_in_other_files(self, tmp_path, units):
        (tmp_path / "log").mkdir()
        nanoseconds = np.array([7, 1_003, 1_002, 3_000_000, 5]) * 1_000
        expected = []
        for number, unit in enumerate(units):
            times = nanoseconds // {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[unit]
            items = np.arange(5) + 5 * number
            table = {"uid": [1] * 5, "iid": items, "ts": pa.array(times, pa.timestamp(unit))}
            write(tmp_path / "log" / f"{number}.parquet", table)
            expected += zip(
                pa.array(times, pa.timestamp(unit)).cast(pa.timestamp("ns")).cast(pa.int64()).to_pylist(), items
            )
        path = preprocess_parquet(EventColumns("uid", "iid", "ts"), tmp_path / "log", tmp_path / "data")
        ordered = sorted(expected, key=lambda event: event[0])  # stable
        assert [item for item, *_ in rows_of(path)[1][0]] == [item for _, item in ordered]

    @pytest.mark.parametrize("as_lists", [False, True])
    def test_columns_without_values_in_some_files(self, tmp_path, as_lists):
        """pandas writes the type null for them, also in a file without rows."""
        (tmp_path / "log").mkdir()
        values = {name: [[value] for value in EVENTS[name]] for name in ("iid", "ts", "click", "stars")}
        whole = EVENTS | values if as_lists else EVENTS
        write(tmp_path / "log" / "0.parquet", {name: pa.nulls(0) for name in EVENTS})
        write(tmp_path / "log" / "1.parquet", whole, gender=pa.nulls(5))
        write(tmp_path / "log" / "2.parquet", whole)
        found = rows_of(preprocess_parquet(COLUMNS, tmp_path / "log", tmp_path / "data"))
        write(tmp_path / "log" / "1.parquet", whole, gender=pa.nulls(5, pa.string()))
        (tmp_path / "log" / "0.parquet").unlink()
        assert found == rows_of(preprocess_parquet(COLUMNS, tmp_path / "log", tmp_path / "data"))
        assert len(found["b"][0]) == 6

    def test_a_file_that_has_several_links_counts_once(self, tmp_path):
        (tmp_path / "log" / "2024").mkdir(parents=True)
        write(tmp_path / "log" / "2024" / "events.parquet")
        (tmp_path / "log" / "latest").symlink_to("2024")
        (tmp_path / "log" / "2024" / "loop").symlink_to(".")
        found = rows_of(preprocess_parquet(COLUMNS, tmp_path / "log", tmp_path / "a"))
        assert found == rows_of(
            preprocess_parquet(COLUMNS, tmp_path / "log" / "2024" / "events.parquet", tmp_path / "b")
        )

    def test_types_of_ids(self, tmp_path):
        expected = rows_of(stored(tmp_path))
        coded = {name: pa.array(EVENTS[name]).dictionary_encode() for name in ("uid", "gender")}
        for changes in (
            coded,
            *({"uid": pa.array(EVENTS["uid"], kind)} for kind in (pa.large_string(), pa.string_view())),
        ):
            assert rows_of(stored(tmp_path, **changes)) == expected
        uuids = pa.array([name.encode() * 16 for name in EVENTS["uid"]], pa.binary(16))
        found = rows_of(stored(tmp_path, uid=uuids, iid=pa.array([9, 8, 7, 9, 7], pa.uint8())))
        assert sorted(found) == [b"a" * 16, b"b" * 16, b"c" * 16]
        found = rows_of(stored(tmp_path, uid=uuids.cast(pa.uuid())))
        assert sorted(found) == [str(uuid.UUID(bytes=name * 16)) for name in (b"a", b"b", b"c")]

    def test_times_without_a_zone_beside_others_are_not_local_times(self, tmp_path):
        (tmp_path / "log").mkdir()
        for number, zone in enumerate((None, "UTC", "Asia/Tokyo")):
            time = pa.array([3_600_000 + number], pa.int64()).cast(pa.timestamp("ms", zone))
            write(tmp_path / "log" / f"{number}.parquet", {"uid": [1], "iid": [number], "ts": time})
        flags = ("--columns.user", "uid", "--columns.item", "iid", "--columns.time", "ts")
        command = ("-m", "commons.cli.main", "preprocess", "parquet", "--source", tmp_path / "log")
        environment = {"TZ": "America/New_York"}
        done = run_program(sys.executable, *command, "--output", tmp_path / "data", *flags, env=environment)
        assert done.returncode == 0, done.stderr
        times = [3_600_000, 3_600_001, 3_600_002]
        assert rows_of(tmp_path / "data" / "parquet.parquet") == {1: (list(zip(range(3), [0] * 3, times)), {})}

    def test_the_split_of_a_user_does_not_depend_on_others(self, tmp_path):
        def users_of(uids, split):
            count = len(uids)
            table = {"uid": uids, "iid": [1] * count, "ts": [1] * count}
            source = write(tmp_path / "a.parquet", table)
            path = preprocess_parquet(EventColumns("uid", "iid", "ts"), source, tmp_path / "o", test_fraction=0.5)
            file = SequenceFile(path, "parquet", ["uid"])
            raw = vocabularies_of(path, "parquet")["uid"]
            return {raw[user] for user in file.select(np.array(file.split_rows(split))).values("uid")}

        for uids in (list(range(200)), [f"user {number}" for number in range(200)]):
            few, many = users_of(uids[::2], "test"), users_of(uids, "test")
            assert few == many & set(uids[::2]) and 20 < len(few) < 80

    @pytest.mark.slow
    def test_memory_does_not_grow_with_files_or_row_groups(self, tmp_path):
        rows = 6_000_000
        rng = np.random.default_rng(0)
        table = pa.table(
            {"uid": rng.integers(0, 1_000, rows), "iid": rng.integers(0, 1_000, rows), "ts": np.arange(rows)}
        )
        pq.write_table(table, tmp_path / "events.parquet", row_group_size=rows, use_dictionary=False)
        program = """
import sys
from commons.datasets.sequences import event_store, own_parquet
from commons.datasets.sequences.event_columns import EventColumns
from pathlib import Path
def memory(kind):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) >> 10
event_store._MEMORY_LIMIT = "64MB"
source, before = Path(sys.argv[1]), memory("VmRSS")
with event_store.EventStore(source.parent / "store") as store:
    own_parquet.EventFiles(source, EventColumns("uid", "iid", "ts")).add_to(store)
    print(store.num_rows, memory("VmHWM") - before)
"""
        done = run_program(sys.executable, "-c", program, tmp_path / "events.parquet")
        found, grown = map(int, done.stdout.split())
        assert found == rows and grown < 110  # the rows alone are 137 MiB


class TestTraining:
    def loader(self, folder, columns=None, **options):
        return get_data_loader(
            "parquet", dataset_path=folder, batch_size=4, max_history_seqlen=5, columns=columns, **options
        )

    def test_batches(self, tmp_path):
        path = preprocess_parquet(COLUMNS, write(tmp_path / "events.parquet"), tmp_path, test_fraction=0)
        for folder in (tmp_path, path):
            loader = self.loader(folder, num_tasks=2)
            (batch,) = loader
            assert batch.features.keys() == ["gender", "uid", "iid", "actions"]
            assert batch.features["actions"].values().tolist() == [2, 0, 1, 3, 1]
            assert batch.labels["task_0"].values().tolist() == [0, 0, 1, 1, 1]
            assert batch.labels["task_1"].values().tolist() == [1, 0, 0, 1, 0]
            assert loader.dataset.vocabulary_sizes == {"gender": 3, "uid": 3, "iid": 3, "actions": 4}
        # Of actions and context some can be chosen; the history keeps all actions.
        (batch,) = self.loader(tmp_path, EventColumns(actions=("stars >= 4",), context=()))
        assert batch.features.keys() == ["iid", "actions"]
        assert batch.features["actions"].values().tolist() == [2, 0, 1, 3, 1]
        assert batch.labels["task_0"].values().tolist() == [1, 0, 0, 1, 0]
        (batch,) = self.loader(tmp_path, EventColumns(actions=()), max_num_candidates=2)
        assert batch.labels is None and batch.action_feature_name is None
        assert batch.num_candidates.tolist() == [0, 2, 0, 0]

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            (EventColumns(item="other"), "columns.item is 'other', .*parquet.parquet was made with 'iid': correct it"),
            (EventColumns(actions=("like",)), r"actions has 'like', .* made with \['click', 'stars >= 4'\]: choose"),
            (EventColumns(context=("age",)), r"context has 'age', .* was made with \['gender', 'uid'\]: choose from"),
        ],
    )
    def test_columns_that_do_not_agree(self, tmp_path, columns, message):
        with pytest.raises(ValueError, match=message):
            self.loader(stored(tmp_path), columns)

    def test_raw_files_are_answered_with_the_command(self, tmp_path, told):
        (tmp_path / "my log").mkdir()
        write(tmp_path / "my log" / "events.parquet")
        for source in (tmp_path / "my log", tmp_path / "my log" / "events.parquet"):
            with pytest.raises(ValueError, match="assigns: run `evenrank preprocess parquet --source") as caught:
                self.loader(source, COLUMNS)
        command = str(caught.value).split("`")[1].replace("FOLDER", str(tmp_path / "data"))
        assert "3 (train" in told(*shlex.split(command)[1:])
        assert len(self.loader(tmp_path / "data", COLUMNS).dataset) > 0
        # A column may have the name of the default unit.
        assert EventColumns("s", "iid", "t").as_flags() == "--columns.user s --columns.item iid --columns.time t"

    def test_no_times(self, tmp_path):
        table = {"uid": [1, 2], "iid": [[1, 2], [3]]}
        preprocess_parquet(EventColumns("uid", "iid"), write(tmp_path / "a.parquet", table), tmp_path, test_fraction=0)
        (batch,) = self.loader(tmp_path)
        assert batch.features.keys() == ["iid"] and batch.labels is None
        with pytest.raises(ValueError, match="timestamps is True, and 'parquet' was preprocessed without times: set"):
            self.loader(tmp_path, timestamps=True)


class TestConfig:
    def test_the_example_config_preprocesses_too(self, tmp_path, told, mistake):
        config = "hstu/configs/parquet.toml"
        columns = load_config_file(TrainConfig, config).dataset.columns
        assert columns == EventColumns("uid", "iid", "ts", "s", ("click", "like"), ("gender",))
        write(tmp_path / "events.parquet", like=[0, 1, 0, 1, 0])
        arguments = ["--source", str(tmp_path / "events.parquet"), "--output", str(tmp_path / "data")]
        parquet = ["preprocess", "parquet", *arguments]
        told(*parquet, "--config", config)
        assert rows_of(tmp_path / "data")["b"] == ([(5, 0, 10), (-7, 3, 20), (-7, 1, 30)], {"gender": "f"})
        said = mistake(*parquet, "--config", config, "--columns.user", "uid")
        assert "columns are given by flags and by config" in said
        said = mistake("preprocess", "ml-1m", *arguments, "--columns.user", "uid")
        assert "columns or a config are given for ml-1m, whose columns are known" in said
        for text, message in (
            ("", "own.toml has no [dataset]"),
            ("[dataset]\ndataset_name = 'parquet'\n", "own.toml [dataset]: max_history_seqlen is missing; it has no"),
        ):
            (tmp_path / "own.toml").write_text(text)
            assert message in mistake(*parquet, "--config", str(tmp_path / "own.toml"))

    def test_columns_are_for_parquet_alone(self, tmp_path):
        (tmp_path / "a.toml").write_text(
            "[trainer]\ntrain_batch_size = 1\neval_batch_size = 1\n[dataset]\ndataset_name = 'ml-1m'\n"
            "max_history_seqlen = 5\n[dataset.columns]\nuser = 'uid'\n"
        )
        with pytest.raises(ValueError, match="columns are given and dataset_name is 'ml-1m'; columns are only for"):
            load_config_file(TrainConfig, tmp_path / "a.toml")
