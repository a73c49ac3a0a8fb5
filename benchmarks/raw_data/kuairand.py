"""Generated archives in the raw format of the KuaiRand data sets, at any size.

Lengths follow the counted statistics of KuaiRand-27K (27,285 users, mean 11,812, median 8,594, 100 to 228,000);
KuaiRand-1K is a sample of the same users. KuaiRand-Pure publishes the mean alone, 52.7; its shape here is chosen. The
rates of each kind of feedback are those of KuaiRand-27K's standard logs. The number of videos falls with that of users.
What is watched and how it pleases comes from `histories`. The statistics of videos are left out.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
from tqdm import tqdm

from benchmarks.raw_data.archive import ArchiveForm, GeneratedArchive, check_request, generated_archive
from benchmarks.raw_data.histories import Items, Rows, draw_histories, lengths_with
from commons.datasets.kuairand import KuaiRandVersion
from commons.datasets.raw_archive import GENERATED_MARK

# Midnights of April 8 and 22, 2022, in China, and the last interaction.
_FIRST_MS, _SECOND_PERIOD_MS, _LAST_MS = 1_649_347_200_000, 1_650_556_800_000, 1_652_025_130_589
_CHINA_MS = 8 * 3_600_000
_QUANTILES_27K = {
    **{0.0: 100, 0.02: 1_000, 0.1: 2_900, 0.25: 5_100, 0.5: 8_594, 0.75: 15_227, 0.9: 24_587},
    **{0.95: 32_591, 0.99: 56_230, 0.999: 114_979, 1 - 0.5 / 27_285: 228_000},
}
_QUANTILES_PURE = {0.0: 1, 0.25: 13, 0.5: 30, 0.75: 66, 0.9: 125, 0.99: 320, 1 - 0.5 / 27_285: 1_200}
# Shares of the interactions with each kind of feedback.
_FEEDBACK_RATES = {
    **{"is_click": 0.379, "is_like": 0.0167, "is_follow": 0.0011, "is_comment": 0.0025},
    **{"is_forward": 0.0009, "is_hate": 0.0005, "long_view": 0.260, "is_profile_enter": 0.0179},
}
_RANDOM_SHARE = 0.0037
_NUM_RANDOM_VIDEOS = 7_583
_TABS, _TAB_SHARES = (1, 0, 4, 2, 6), (0.68, 0.20, 0.075, 0.03, 0.015)
_USER_VALUES: dict[str, tuple[str, ...]] = {
    "user_active_degree": ("full_active", "high_active", "middle_active", "UNKNOWN"),
    "follow_user_num_range": ("0", "(0,10]", "(10,50]", "(50,100]", "(100,150]", "(150,250]", "(250,500]", "500+"),
    "fans_user_num_range": ("0", "[1,10)", "[10,100)", "[100,1k)", "[1k,5k)", "[5k,1w)", "[1w,10w)"),
    "friend_user_num_range": ("0", "[1,5)", "[5,30)", "[30,60)", "[60,120)", "[120,250)", "250+"),
    "register_days_range": ("15-30", "31-60", "61-90", "91-180", "181-365", "366-730", "730+"),
}
# Values of the encrypted features, 0 to size − 1.
_ONEHOT_SIZES = (2, 7, 50, 1471, 15, 34, 3, 118, 454, 7, 5, 5, 2, 2, 2, 2, 2, 2)
_BYTES_PER_USER = 700  # memory: their lengths and features
_ROWS_PER_WRITE = 1_000_000
_LOG_HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
)
_VIDEO_HEADER = (
    "video_id,author_id,video_type,upload_dt,upload_type,visible_status,video_duration,server_width,server_height,"
    "music_id,music_type,tag\n"
)
_README = f"""{GENERATED_MARK}: this is not {{folder}}.

The files have the format of {{folder}} (https://kuairand.com/), and the lengths its statistics. Users, videos and
interactions were drawn at random; none of them is real.

users: {{num_users}}
interactions: {{num_rows}}
seed: {{seed}}
"""


@dataclass(frozen=True)
class _Size:
    """Published size of a data set, and its lengths."""

    num_users: int
    num_videos: int
    num_interactions: int
    quantiles: Mapping[float, int]


_SIZES = {
    "kuairand-pure": _Size(27_285, 7_551, 1_436_609, _QUANTILES_PURE),
    "kuairand-1k": _Size(1_000, 4_369_953, 11_713_045, _QUANTILES_27K),
    "kuairand-27k": _Size(27_285, 32_038_725, 322_278_385, _QUANTILES_27K),
}
NUM_USERS = {name: size.num_users for name, size in _SIZES.items()}


def generate_kuairand(
    version: KuaiRandVersion,
    output: str | Path,
    *,
    num_users: int | None = None,
    seed: int = 0,
    show_progress: bool = False,
) -> GeneratedArchive:
    """Write a generated archive.

    Args:
        version: which of the three.
        output: a path that ends in `.tar.gz` or `.zip` becomes such a file, any other a folder. It appears when it is
            complete.
        num_users: users; the published number if not given.
        seed: the same seed gives the same archive.
        show_progress: show a progress bar on stderr, if that is a terminal.

    Returns:
        Where it is and what it holds; the interactions are those of the standard logs.

    Raises:
        FileExistsError: something at `output` that is not an earlier archive of the same kind.
        ValueError: `num_users` below 1 or more than there is memory for, or a negative seed.

    """
    output, size, form = Path(output), _SIZES[version.name], _form_of(version)
    num_users = size.num_users if num_users is None else num_users
    check_request(output, form, num_users=num_users, seed=seed, bytes_per_user=_BYTES_PER_USER)
    rng = np.random.default_rng(seed)
    lengths = lengths_with(num_users, size.quantiles, size.num_interactions / size.num_users)
    num_rows, longest = int(lengths.sum()), int(lengths.max())
    num_videos = max(round(size.num_videos * min(num_users / size.num_users, 1)), 1_000)
    with generated_archive(output, form) as folder:
        (folder / form.readme).write_text(
            _README.format(folder=version.folder, num_users=num_users, num_rows=num_rows, seed=seed)
        )
        _write_users(folder / "data" / version.user_file, num_users, rng)
        _write_videos(folder / "data" / f"video_features_basic_{version.suffix}.csv", num_videos, rng)
        items, video_ids = Items.draw(num_videos, rng), rng.permutation(num_videos).astype(np.int32)
        with (
            _Logs(folder / "data", version) as logs,
            tqdm(
                total=num_rows,
                desc=f"generate {version.name}",
                unit="row",
                unit_scale=True,
                disable=None if show_progress else True,
            ) as progress,
        ):
            thresholds: np.ndarray | None = None
            for rows in draw_histories(items, rng.permutation(lengths), rng, distinct=False):
                if thresholds is None:  # the first million rows stand for all
                    rates = np.array([_FEEDBACK_RATES["is_click"], _FEEDBACK_RATES["long_view"]])
                    thresholds = np.quantile(rows.utility, 1 - rates)
                logs.write(rows, video_ids, thresholds, rng)
                progress.update(len(rows.users))
    return GeneratedArchive(output, num_users, num_rows, longest)


def _form_of(version: KuaiRandVersion) -> ArchiveForm:
    names = [*version.log_names, _random_log(version), version.user_file, f"video_features_basic_{version.suffix}.csv"]
    return ArchiveForm(version.folder, "README.txt", tuple(f"data/{name}" for name in names))


def _random_log(version: KuaiRandVersion) -> str:
    return f"log_random_4_22_to_5_08_{version.suffix}.csv"


class _Logs:
    """The open log files of an archive: rows go to the log of their period, and to its parts in turn."""

    def __init__(self, folder: Path, version: KuaiRandVersion) -> None:
        self._stack = contextlib.ExitStack()
        self._parts = version.log_parts
        self._files = [self._open(folder / name) for name in version.log_names]
        self._random = self._open(folder / _random_log(version))

    def _open(self, path: Path) -> IO[bytes]:
        file = self._stack.enter_context(path.open("wb"))
        file.write(_LOG_HEADER.encode())
        return file

    def __enter__(self) -> _Logs:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def write(self, rows: Rows, video_ids: np.ndarray, thresholds: np.ndarray, rng: np.random.Generator) -> None:
        """Write the rows of some users, and a few at random."""
        num_rows = len(rows.users)
        # Not every user is there from the first day on.
        start = rng.random(int(rows.users[-1] - rows.users[0]) + 1) ** 4
        own = start[rows.users - rows.users[0]]
        time_ms = (_FIRST_MS + (own + (1 - own) * rows.progress) * (_LAST_MS - _FIRST_MS)).astype(np.int64)
        columns = _log_columns(rows, video_ids[rows.items], time_ms, thresholds, rng)
        file = np.where(time_ms >= _SECOND_PERIOD_MS, self._parts, 0) + np.arange(num_rows) % self._parts
        for index, target in enumerate(self._files):
            _write_rows(target, columns, np.flatnonzero(file == index))
        shown = np.flatnonzero((rng.random(num_rows) < _RANDOM_SHARE) & (time_ms >= _SECOND_PERIOD_MS))
        columns["video_id"] = rng.integers(min(_NUM_RANDOM_VIDEOS, len(video_ids)), size=num_rows)
        columns["is_rand"] = np.ones(num_rows, np.int8)
        _write_rows(self._random, columns, shown)


def _log_columns(
    rows: Rows, videos: np.ndarray, time_ms: np.ndarray, thresholds: np.ndarray, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """The 19 columns of a log, in order."""
    num_rows = len(videos)
    in_china = (time_ms + _CHINA_MS).astype("datetime64[ms]")
    day = in_china.astype("datetime64[D]")
    year, month = day.astype("datetime64[Y]"), day.astype("datetime64[M]")
    date = (year.astype(int) + 1970) * 10_000 + (month.astype(int) % 12 + 1) * 100 + (day - month).astype(int) + 1
    clicked, viewed = rows.utility > thresholds[0], rows.utility > thresholds[1]
    # Who does not click does not like, follow, comment, forward or enter; who hates has not clicked.
    click_rate = _FEEDBACK_RATES["is_click"]
    feedback = {
        name: (clicked if name != "is_hate" else ~clicked)
        & (rng.random(num_rows, dtype=np.float32) < rate / (click_rate if name != "is_hate" else 1 - click_rate))
        for name, rate in _FEEDBACK_RATES.items()
    }
    feedback["is_click"], feedback["long_view"] = clicked, viewed
    duration = (5_000 * rng.standard_exponential(num_rows, dtype=np.float32) + 5_000).astype(np.int64) * 3
    watched = (duration * rng.random(num_rows, dtype=np.float32) * np.where(viewed, 1.5, 0.4)).astype(np.int64)
    zeros = np.zeros(num_rows, np.int8)
    flags = {name: flag.astype(np.int8) for name, flag in feedback.items()}
    return {
        "user_id": rows.users,
        "video_id": videos,
        "date": date,
        "hourmin": (in_china - day).astype("timedelta64[h]").astype(int) * 100,
        "time_ms": time_ms,
        **{name: flags[name] for name in ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate")},
        "long_view": flags["long_view"],
        "play_time_ms": watched,
        "duration_ms": duration,
        "profile_stay_time": zeros,
        "comment_stay_time": zeros,
        "is_profile_enter": flags["is_profile_enter"],
        "is_rand": zeros,
        "tab": rng.choice(_TABS, num_rows, p=_TAB_SHARES),
    }


def _write_rows(file: IO[bytes], columns: dict[str, np.ndarray], chosen: np.ndarray) -> None:
    table = pa.table({name: values[chosen] for name, values in columns.items()})
    pcsv.write_csv(table, file, pcsv.WriteOptions(include_header=False, quoting_style="none"))


def _write_users(path: Path, num_users: int, rng: np.random.Generator) -> None:
    columns: dict[str, list[object]] = {"user_id": list(range(num_users))}

    def choose(name: str) -> list[object]:
        return [_USER_VALUES[name][index] for index in rng.integers(len(_USER_VALUES[name]), size=num_users)]

    columns["user_active_degree"] = choose("user_active_degree")
    for name in ("is_lowactive_period", "is_live_streamer", "is_video_author"):
        columns[name] = (rng.random(num_users) < 0.2).astype(int).tolist()
    for name in ("follow_user_num", "fans_user_num", "friend_user_num", "register_days"):
        columns[name] = rng.geometric(0.01, num_users).tolist()
        columns[f"{name}_range"] = choose(f"{name}_range")
    for index, size in enumerate(_ONEHOT_SIZES):
        name, values = f"onehot_feat{index}", rng.integers(size, size=num_users).tolist()
        columns[name] = values
        if index == 4 or index >= 12:
            # Some users lack these, which makes the column one of decimals.
            missing = rng.random(num_users) < 0.03
            columns[name] = ["" if lacks else float(value) for value, lacks in zip(values, missing)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values()))


def _write_videos(path: Path, num_videos: int, rng: np.random.Generator) -> None:
    with path.open("wb") as file:
        file.write(_VIDEO_HEADER.encode())
        for first in range(0, num_videos, _ROWS_PER_WRITE):
            count = min(_ROWS_PER_WRITE, num_videos - first)
            days = pa.array(np.datetime64("2022-04-01") - rng.integers(60, size=count))
            table = pa.table(
                {
                    "video_id": np.arange(first, first + count),
                    "author_id": rng.integers(max(num_videos // 4, 1), size=count),
                    "video_type": pa.array(["NORMAL", "AD"]).take(pa.array((rng.random(count) < 0.01).astype(int))),
                    "upload_dt": days,
                    "upload_type": pa.array(["ShortImport", "LongImport", "Web"]).take(
                        pa.array(rng.integers(3, size=count))
                    ),
                    "visible_status": np.ones(count, np.int8),
                    "video_duration": rng.integers(5_000, 120_000, size=count),
                    "server_width": np.full(count, 720),
                    "server_height": np.full(count, 1280),
                    "music_id": rng.integers(max(num_videos, 1), size=count),
                    "music_type": rng.integers(1, 12, size=count),
                    "tag": rng.integers(1, 68, size=count),
                }
            )
            pcsv.write_csv(table, file, pcsv.WriteOptions(include_header=False, quoting_style="none"))
