"""Generated archives in the raw format of the KuaiRand data sets, at any size.

Lengths follow the counted statistics of KuaiRand-27K (27,285 users, mean 11,812, median 8,594, 100 to 228,000);
KuaiRand-1K is a sample of the same users. KuaiRand-Pure publishes the mean alone, 52.7; its shape here is chosen. The
rates of each kind of feedback are those of KuaiRand-27K's standard logs. The number of videos falls with that of users.
Of the files there are those that are read: the standard logs and the users. Every feature of a user has seven values.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.raw_data.archive import GeneratedArchive, connect, lengths_with, write_archive, write_csv
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
# Shares of the interactions with a click, and with a long view, which has a click; of what follows a click; of hate.
_CLICKED, _LONG_VIEW, _HATED = 0.379, 0.260, 0.0005
_AFTER_A_CLICK = {
    "is_like": 0.0167,
    "is_follow": 0.0011,
    "is_comment": 0.0025,
    "is_forward": 0.0009,
    "is_profile_enter": 0.0179,
}
# Of every event who watches what, when, and how pleased; not every user is there from the first day on. The product
# with a prime mixes the videos' ranks.
_EVENTS = f"""
    CREATE MACRO events(videos) AS TABLE
    SELECT number, place, uniform('pleased', number, place) AS pleased,
        popular(uniform('video', number, place), videos) * 2_654_435_761 % videos AS video_id,
        {_LAST_MS} - floor({_LAST_MS - _FIRST_MS} * (1 - uniform('start', number) ** 4) * (1 - place / length))::BIGINT
            AS time_ms,
        make_timestamp((time_ms + 8 * 3_600_000) * 1000) AS moment,
        floor(15_000 * (1 - ln(1 - uniform('duration', number, place))))::BIGINT AS duration_ms
    FROM (SELECT *, unnest(range(length)) AS place FROM users)
"""
_FOLLOWS = ", ".join(
    f"(pleased < {_CLICKED} AND uniform('{name}', number, place) < {share / _CLICKED})::INT AS {name}"
    for name, share in _AFTER_A_CLICK.items()
)
# The columns of a log.
_LOG = f"""
    SELECT number AS user_id, video_id, strftime(moment, '%Y%m%d') AS date, hour(moment) * 100 AS hourmin, time_ms,
        (pleased < {_CLICKED})::INT AS is_click, {_FOLLOWS}, (pleased > {1 - _HATED})::INT AS is_hate,
        (pleased < {_LONG_VIEW})::INT AS long_view,
        (duration_ms * uniform('played', number, place))::BIGINT AS play_time_ms, duration_ms,
        0 AS profile_stay_time, 0 AS comment_stay_time, 0 AS is_rand, 1 AS tab
"""
_USERS = f"""
    SELECT number AS user_id, {", ".join(f"below('{name}', 7, number) AS {name}" for name in USER_FEATURES)}
    FROM users ORDER BY number
"""


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

    def write(folder: Path) -> np.ndarray:
        data, parts = folder / "data", len(version.event_files) // 2
        data.mkdir()
        lengths = lengths_with(num_users, quantiles, interactions / published_users)
        with connect(seed, lengths, show_progress=show_progress) as database:
            database.execute(_EVENTS)
            write_csv(database, data / version.listings["user"][0], _USERS)
            for index, name in enumerate(version.event_files):  # the parts of the first period, then the second's
                period, part = divmod(index, parts)
                chosen = f"(time_ms >= {_SECOND_PERIOD_MS})::INT = {period} AND place % {parts} = {part}"
                write_csv(database, data / name, f"{_LOG} FROM events({num_videos}) WHERE {chosen}")
        return lengths

    return write_archive(output, version.raw.title, "https://kuairand.com/", "README.txt", write, seed)
