"""Generated archives in the raw format of the KuaiRand data sets, at any size.

Lengths follow the counted statistics of KuaiRand-27K (27,285 users, mean 11,812, median 8,594, 100 to 228,000);
KuaiRand-1K is a sample of the same users. KuaiRand-Pure publishes the mean alone, 52.7; its shape here is chosen. The
rates of each kind of feedback are those of KuaiRand-27K's standard logs. The number of videos falls with that of users.
What is watched comes from `histories`. Of the files there are those that are read: the standard logs and the users.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv

from benchmarks.raw_data.archive import GeneratedArchive, write_archive
from benchmarks.raw_data.histories import Rows, draw_histories, lengths_with, spread_evenly
from commons.console import progress_bar
from commons.datasets.public.dataset import PublicDataset
from commons.datasets.public.kuairand import USER_FEATURES

# Midnights of April 8 and 22, 2022, in China, and the last interaction.
_FIRST_MS, _SECOND_PERIOD_MS, _LAST_MS = 1_649_347_200_000, 1_650_556_800_000, 1_652_025_130_589
_QUANTILES_27K = {
    **{0.0: 100, 0.02: 1_000, 0.1: 2_900, 0.25: 5_100, 0.5: 8_594, 0.75: 15_227, 0.9: 24_587},
    **{0.95: 32_591, 0.99: 56_230, 0.999: 114_979, 1 - 0.5 / 27_285: 228_000},
}
_QUANTILES_PURE = {0.0: 1, 0.25: 13, 0.5: 30, 0.75: 66, 0.9: 125, 0.99: 320, 1 - 0.5 / 27_285: 1_200}
# Published users, videos and interactions, and the lengths.
_SIZES = {
    "kuairand-pure": (27_285, 7_551, 1_436_609, _QUANTILES_PURE),
    "kuairand-1k": (1_000, 4_369_953, 11_713_045, _QUANTILES_27K),
    "kuairand-27k": (27_285, 32_038_725, 322_278_385, _QUANTILES_27K),
}
# Shares of the interactions with a click, with a long view, and with what follows a click; of hate, which does not.
_CLICKED, _LONG_VIEW, _HATED = 0.379, 0.260, 0.0005
_AFTER_A_CLICK = {
    **{"is_like": 0.0167, "is_follow": 0.0011, "is_comment": 0.0025},
    **{"is_forward": 0.0009, "is_profile_enter": 0.0179},
}
_TABS, _TAB_SHARES = (1, 0, 4, 2, 6), (0.68, 0.20, 0.075, 0.03, 0.015)
# The columns of a log, in order, from what is drawn of the events.
_LOG = """
    SELECT user_id, video_id, strftime(moment, '%Y%m%d')::INT AS date, hour(moment) * 100 AS hourmin, time_ms,
        is_click::INT, is_like::INT, is_follow::INT, is_comment::INT, is_forward::INT, is_hate::INT, long_view::INT,
        play_time_ms, duration_ms, 0 AS profile_stay_time, 0 AS comment_stay_time,
        is_profile_enter::INT, 0 AS is_rand, tab
    FROM (SELECT *, make_timestamp((time_ms + 8 * 3_600_000) * 1000) AS moment FROM events)
"""
_LOG_HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
)
_USER_VALUES = {
    "user_active_degree": ("full_active", "high_active", "middle_active", "UNKNOWN"),
    "follow_user_num_range": ("0", "(0,10]", "(10,50]", "(50,100]", "(100,150]", "(150,250]", "(250,500]", "500+"),
    "fans_user_num_range": ("0", "[1,10)", "[10,100)", "[100,1k)", "[1k,5k)", "[5k,1w)", "[1w,10w)"),
    "friend_user_num_range": ("0", "[1,5)", "[5,30)", "[30,60)", "[60,120)", "[120,250)", "250+"),
    "register_days_range": ("15-30", "31-60", "61-90", "91-180", "181-365", "366-730", "730+"),
}
# Values of the encrypted features, 0 to size − 1.
_ONEHOT_SIZES = (2, 7, 50, 1471, 15, 34, 3, 118, 454, 7, 5, 5, 2, 2, 2, 2, 2, 2)


def generate_kuairand(
    version: PublicDataset,
    output: str | Path,
    *,
    num_users: int | None = None,
    seed: int = 0,
    show_progress: bool = False,
) -> GeneratedArchive:
    """Write a generated archive of one of the three; see `write_archive`. Interactions are those of standard logs."""
    published_users, published_videos, interactions, quantiles = _SIZES[version.schema.dataset_name]
    num_users = published_users if num_users is None else num_users
    num_videos = max(round(published_videos * min(num_users / published_users, 1)), 1_000)

    def write(folder: Path, rng: np.random.Generator) -> np.ndarray:
        data = folder / "data"
        data.mkdir()
        lengths = rng.permutation(lengths_with(num_users, quantiles, interactions / published_users))
        pcsv.write_csv(
            _users(num_users, rng), data / version.listings["user"][0], pcsv.WriteOptions(quoting_style="needed")
        )
        video_ids, parts = rng.permutation(num_videos), len(version.event_files) // 2
        with (
            contextlib.ExitStack() as stack,
            progress_bar(
                f"generate {version.schema.dataset_name}", int(lengths.sum()), "row", show=show_progress
            ) as progress,
        ):
            files = [stack.enter_context((data / name).open("wb")) for name in version.event_files]
            for file in files:
                file.write(_LOG_HEADER.encode())
            for rows in draw_histories(num_videos, lengths, rng, distinct=False):
                events = _events(rows, video_ids, rng)
                log = duckdb.sql(_LOG).to_arrow_table()
                # To the log of its period, and to its parts in turn.
                late = events["time_ms"].to_numpy() >= _SECOND_PERIOD_MS
                place = late * parts + np.arange(len(late)) % parts
                for index, file in enumerate(files):
                    chosen = log.take(np.flatnonzero(place == index))
                    pcsv.write_csv(chosen, file, pcsv.WriteOptions(include_header=False, quoting_style="none"))
                progress.update(len(rows.users))
        return lengths

    url = "https://kuairand.com/"
    return write_archive(output, version.raw.title, url, "README.txt", write, num_users=num_users, seed=seed)


def _events(rows: Rows, video_ids: np.ndarray, rng: np.random.Generator) -> pa.Table:
    """What the users of a chunk watch, when, and their feedback."""
    user, count = rows.users - rows.users[0], len(rows.users)
    start = (rng.random(int(user[-1]) + 1) ** 4)[user]  # not every user is there from the first day on
    pleased = spread_evenly(count, rng)
    clicked, viewed = pleased < _CLICKED, pleased < _LONG_VIEW  # who views long has clicked
    duration = (5_000 * rng.standard_exponential(count) + 5_000).astype(np.int64) * 3
    return pa.table(
        {
            "user_id": rows.users,
            "video_id": video_ids[rows.items],
            "time_ms": (_FIRST_MS + (start + (1 - start) * rows.progress) * (_LAST_MS - _FIRST_MS)).astype(np.int64),
            "is_click": clicked,
            "long_view": viewed,
            "is_hate": ~clicked & (rng.random(count) < _HATED / (1 - _CLICKED)),
            **{name: clicked & (rng.random(count) < rate / _CLICKED) for name, rate in _AFTER_A_CLICK.items()},
            "play_time_ms": (duration * rng.random(count) * np.where(viewed, 1.5, 0.4)).astype(np.int64),
            "duration_ms": duration,
            "tab": rng.choice(_TABS, count, p=_TAB_SHARES),
        }
    )


def _users(num_users: int, rng: np.random.Generator) -> pa.Table:
    """Users and their features: those that are read, and the four counts that the ranges sum up."""
    columns: dict[str, Any] = {"user_id": np.arange(num_users)}
    for name in USER_FEATURES:
        if name in _USER_VALUES:
            columns[name] = rng.choice(_USER_VALUES[name], num_users).tolist()
        elif name.startswith("onehot_feat"):
            index = int(name.removeprefix("onehot_feat"))
            columns[name] = rng.integers(_ONEHOT_SIZES[index], size=num_users)
            if index == 4 or index >= 12:  # some users lack these, which makes the column one of decimals
                decimals = [f"{value}.0" for value in columns[name]]
                columns[name] = pa.array(decimals, mask=rng.random(num_users) < 0.03)
        else:
            columns[name] = (rng.random(num_users) < 0.2).astype(int)
    for name in ("follow_user_num", "fans_user_num", "friend_user_num", "register_days"):
        columns[name] = rng.geometric(0.01, num_users)
    return pa.table(columns)
