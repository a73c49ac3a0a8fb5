"""KuaiRand: the raw archives to the columnar files, and the generated ones."""

import hashlib
import tarfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from benchmarks.raw_data.kuairand import generate_kuairand
from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.public.kuairand import FEEDBACK_WEIGHTS, VERSIONS
from commons.datasets.sequences import writer as sequence_writer
from commons.datasets.sequences.file import SequenceFile
from tests.helpers.datasets.kuairand import PURE, V27K, files_of, write_tar
from tests.helpers.datasets.stored_users import users_of

COLUMNS = ("user_active_degree", "follow_user_num_range", "video_id", "action_weights", "timestamp")


def rows_of(path: Path, name: str) -> dict[int, dict]:
    return {user: {column: row[column] for column in COLUMNS} for user, row in users_of(path, name).items()}


class TestPreprocess:
    def test_sequences(self, tmp_path):
        source = write_tar(tmp_path / "KuaiRand-Pure.tar.gz", files_of())
        path = PURE.preprocess(source, tmp_path / "data")
        assert path == tmp_path / "data" / "kuairand-pure.parquet"
        assert PURE.event_files == ("log_standard_4_08_to_4_21_pure.csv", "log_standard_4_22_to_5_08_pure.csv")
        assert V27K.event_files == tuple(
            f"log_standard_{days}_27k_part{part}.csv" for days in ("4_08_to_4_21", "4_22_to_5_08") for part in (1, 2)
        )
        times = [1649408070000, 1649408076860, 1651338000000, 1651338000000]
        assert {user: [*row.values()] for user, row in rows_of(path, "kuairand-pure").items()} == {
            3: ["UNKNOWN", "500+", [20, 1071, 999, 7], [255, 65, 32, 1], times],
            5: ["full_active", "0", [], [], []],  # a user without interactions is a user
            8: ["full_active", "(0,10]", [20], [0], [1649675512388]],
        }
        metadata = SequenceFile(path, "kuairand-pure", []).metadata
        sizes = metadata.vocabulary_sizes
        assert (sizes["user_id"], sizes["video_id"], sizes["action_weights"], sizes["onehot_feat4"]) == (3, 4, 256, 1)
        assert (metadata.num_interactions, metadata.min_length, metadata.max_length) == (5, 0, 4)
        assert metadata.source_sha256 == hashlib.sha256(source.read_bytes()).hexdigest()
        assert metadata.columns["action_weights"] == "list<element: int16>"

    def test_tar_and_folders_and_partitions_make_no_difference(self, tmp_path):
        source = write_tar(tmp_path / "a.tar.gz", files_of(V27K), "KuaiRand-27K/data/")
        expected = rows_of(V27K.preprocess(source, tmp_path / "a"), "kuairand-27k")
        assert expected[3]["video_id"] == [20, 1071, 999, 7]
        with tarfile.open(source) as archive:
            archive.extractall(tmp_path / "unpacked", filter="data")
        with tarfile.open(tmp_path / "plain.tar", "w") as archive:
            archive.add(tmp_path / "unpacked" / "KuaiRand-27K", "KuaiRand-27K")
        unpacked = tmp_path / "unpacked"
        sources = [unpacked, unpacked / "KuaiRand-27K", unpacked / "KuaiRand-27K" / "data", tmp_path / "plain.tar"]
        for other, rows_per_partition in zip(sources, (1, 1000, 1, 1000)):
            with mock.patch.object(sequence_writer, "_INTERACTIONS_PER_SHARD", rows_per_partition):
                path = V27K.preprocess(other, tmp_path / "b")
            assert rows_of(path, "kuairand-27k") == expected, other

    def test_batches(self, tmp_path):
        source = write_tar(tmp_path / "a.tar.gz", files_of())
        PURE.preprocess(source, tmp_path, test_fraction=0)
        options = {"dataset_path": tmp_path, "batch_size": 4, "max_history_seqlen": 3}
        (batch,) = get_data_loader("kuairand-pure", num_tasks=8, timestamps=True, **options)
        assert batch.features.keys() == [
            *("user_id", "user_active_degree", "follow_user_num_range", "fans_user_num_range", "friend_user_num_range"),
            *("register_days_range", "video_id", "action_weights", "timestamp"),
        ]
        assert batch.features["timestamp"].values().tolist() == [1649408076, 1651338000, 1651338000, 1649675512]
        assert batch.features["video_id"].lengths().tolist() == [3, 0, 1, 0]  # users 3, 5 and 8, and padding
        weights = batch.features["action_weights"].values().tolist()
        assert weights == [65, 32, 1, 0]
        for task, weight in enumerate(FEEDBACK_WEIGHTS.values()):
            assert batch.labels[f"task_{task}"].values().tolist() == [float(bool(w & weight)) for w in weights]
        (batch,) = get_data_loader("kuairand-pure", contextual_feature_names=["user_id", "onehot_feat3"], **options)
        assert batch.features.keys() == ["user_id", "onehot_feat3", "video_id", "action_weights"]


class TestGenerator:
    @pytest.mark.parametrize(
        ("name", "num_users", "mean"),
        [
            ("kuairand-pure", 400, 52.65),
            pytest.param("kuairand-1k", 12, 11_713, marks=pytest.mark.slow),
            pytest.param("kuairand-27k", 12, 11_812, marks=pytest.mark.slow),
        ],
    )
    def test_archive_has_the_published_format(self, tmp_path, name, num_users, mean):
        version = VERSIONS[name]
        written = generate_kuairand(version, tmp_path / version.raw.title, num_users=num_users, seed=1)
        assert written.mean_length == pytest.approx(mean, rel=0.01)
        path = version.preprocess(tmp_path / version.raw.title, tmp_path)
        metadata = SequenceFile(path, name, []).metadata
        assert (metadata.num_users, metadata.num_interactions) == (num_users, written.num_interactions)
        weights = np.concatenate([row["action_weights"] for row in rows_of(path, name).values()])
        shares = {feedback: float(np.mean(weights & weight != 0)) for feedback, weight in FEEDBACK_WEIGHTS.items()}
        assert shares["is_click"] == pytest.approx(0.379, abs=0.01)
        assert shares["long_view"] == pytest.approx(0.26, abs=0.01)
        assert shares["is_like"] == pytest.approx(0.0167, abs=0.003)
