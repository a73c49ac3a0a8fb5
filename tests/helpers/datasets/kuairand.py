"""Small KuaiRand archives."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from commons.datasets.public.kuairand import USER_FEATURES, VERSIONS
from tests.helpers.datasets import archives

LOG_HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
)
EARLY = LOG_HEADER + (
    "3,1071,20220408,1600,1649408076860,1,0,0,0,0,0,1,175045,87433,0,0,0,0,1\n"
    "8,20,20220411,1900,1649675512388,0,0,0,0,0,0,0,1385,209900,0,0,0,0,1\n"
    "3,20,20220408,1500,1649408070000,1,1,1,1,1,1,1,1,2,0,0,1,0,14\n"
)
LATE = LOG_HEADER + (
    "3,999,20220501,100,1651338000000,0,0,0,0,0,1,0,0,65400,0,0,0,0,0\n"
    "3,7,20220501,100,1651338000000,1,0,0,0,0,0,0,0,65400,0,0,0,0,0\n"
)
PURE, V27K = VERSIONS["kuairand-pure"], VERSIONS["kuairand-27k"]


def users_csv(*rows: tuple[int, str, str]) -> str:
    """User features: id, active degree and follow range given, all else 0; one empty field."""
    text = io.StringIO()
    names = ["user_id", *USER_FEATURES[:4], "follow_user_num", *USER_FEATURES[4:]]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for user, degree, follows in rows:
        own = {"user_id": user, "user_active_degree": degree, "follow_user_num_range": follows, "onehot_feat4": ""}
        writer.writerow([own.get(name, 0) for name in names])
    return text.getvalue()


USERS = users_csv((8, "full_active", "(0,10]"), (3, "UNKNOWN", "500+"), (5, "full_active", "0"))


def files_of(version=PURE, **changes: str | None) -> dict[str, str]:
    """Contents of an archive by file name; None removes a file."""
    logs = dict.fromkeys(version.event_files, LOG_HEADER)
    logs[version.event_files[0]], logs[version.event_files[-1]] = EARLY, LATE
    random_log = f"log_random_4_22_to_5_08_{version.raw.title.removeprefix('KuaiRand-').lower()}.csv"
    contents = {
        **logs,
        version.listings["user"][0]: USERS,
        random_log: LOG_HEADER + "8,1,20220501,1,1651338000000" + ",0" * 14 + "\n",
    }
    named = {"early": version.event_files[0], "late": version.event_files[-1], "users": version.listings["user"][0]}
    contents.update({named[key]: text for key, text in changes.items()})
    return {name: text for name, text in contents.items() if text is not None}


def write_tar(path: Path, contents: dict[str, str], folder="KuaiRand-Pure/data/") -> Path:
    return archives.write_tar(path, {folder + name: text for name, text in {"load_data.py": "", **contents}.items()})
