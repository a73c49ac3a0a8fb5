"""Generated archives in the raw format of the KuaiRand data sets, at any size.

Lengths follow the counted statistics of KuaiRand-27K (27,285 users, mean 11,812, median 8,594, 100 to 228,000);
KuaiRand-1K is a sample of the same users. KuaiRand-Pure publishes the mean alone, 52.7; its shape here is chosen. The
rates of each kind of feedback are those of KuaiRand-27K's standard logs. The number of videos falls with that of users.
What is watched comes from `histories`. Of the files there are those that are read: the standard logs
and the users.
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

from benchmarks.raw_data.archive import GeneratedArchive, generated_archive, readme
from benchmarks.raw_data.histories import Rows, draw_histories, lengths_with, spread_evenly
from commons.console import progress_bar
from commons.datasets.public.kuairand import KuaiRandVersion

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
_LOG_HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
)


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
    """Write a generated archive; errors as those of `generate_movielens`.

    Args:
        version: which of the three.
        output: a path that ends in `.tar.gz` or `.zip` becomes such a file, any other a folder. It appears when it is
            complete.
        num_users: users; the published number if not given.
        seed: the same seed gives the same archive.
        show_progress: show a progress bar on stderr, if that is a terminal.

    Returns:
        Where it is and what it holds; the interactions are those of the standard logs.
    """
    size = _SIZES[version.name]
    num_users = size.num_users if num_users is None else num_users
    with generated_archive(Path(output), version.folder, num_users=num_users, seed=seed) as folder:
        rng, data = np.random.default_rng(seed), folder / "data"
        data.mkdir()
        lengths = lengths_with(num_users, size.quantiles, size.num_interactions / size.num_users)
        num_rows = int(lengths.sum())
        num_videos = max(round(size.num_videos * min(num_users / size.num_users, 1)), 1_000)
        _write_users(data / version.user_file, num_users, rng)
        video_ids = rng.permutation(num_videos).astype(np.int32)
        with (
            contextlib.ExitStack() as stack,
            progress_bar(f"generate {version.name}", num_rows, "row", show=show_progress) as progress,
        ):
            files: list[IO[bytes]] = [stack.enter_context((data / name).open("wb")) for name in version.log_names]
            for file in files:
                file.write(_LOG_HEADER.encode())
            for rows in draw_histories(num_videos, rng.permutation(lengths), rng, distinct=False):
                _write_log(files, rows, video_ids, rng)
                progress.update(len(rows.users))
        (folder / "README.txt").write_text(readme(version.folder, "https://kuairand.com/", num_users, num_rows, seed))
    return GeneratedArchive(Path(output), num_users, num_rows, int(lengths.max()))


def _write_log(files: list[IO[bytes]], rows: Rows, video_ids: np.ndarray, rng: np.random.Generator) -> None:
    """Write the rows of some users: to the log of their period, and to its parts in turn."""
    # Not every user is there from the first day on.
    start = rng.random(int(rows.users[-1] - rows.users[0]) + 1) ** 4
    own = start[rows.users - rows.users[0]]
    time_ms = (_FIRST_MS + (own + (1 - own) * rows.progress) * (_LAST_MS - _FIRST_MS)).astype(np.int64)
    table = pa.table(_log_columns(rows.users, video_ids[rows.items], time_ms, rng))
    parts = len(files) // 2
    place = np.where(time_ms >= _SECOND_PERIOD_MS, parts, 0) + np.arange(len(time_ms)) % parts
    for index, file in enumerate(files):
        chosen = table.take(pa.array(np.flatnonzero(place == index)))
        pcsv.write_csv(chosen, file, pcsv.WriteOptions(include_header=False, quoting_style="none"))


def _log_columns(
    users: np.ndarray, videos: np.ndarray, time_ms: np.ndarray, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """The 19 columns of a log, in order."""
    num_rows = len(videos)
    in_china = (time_ms + _CHINA_MS).astype("datetime64[ms]")
    day = in_china.astype("datetime64[D]")
    year, month = day.astype("datetime64[Y]"), day.astype("datetime64[M]")
    date = (year.astype(int) + 1970) * 10_000 + (month.astype(int) % 12 + 1) * 100 + (day - month).astype(int) + 1
    # Who views long has clicked.
    pleased = spread_evenly(num_rows, rng)
    clicked, viewed = pleased < _FEEDBACK_RATES["is_click"], pleased < _FEEDBACK_RATES["long_view"]
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
        "user_id": users,
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
