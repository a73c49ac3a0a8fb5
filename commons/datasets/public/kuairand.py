"""KuaiRand-Pure, KuaiRand-1K and KuaiRand-27K (Gao et al., CIKM 2022): from the raw archives to the columnar files.

One row per user of `user_features_*.csv`, with or without interactions: the user's features, `video_id` (list of ids),
`action_weights` (list), `timestamp` (list, milliseconds), oldest first, and `split`. Interactions come from the
standard logs; the log of randomly exposed videos (0.4 % of the interactions) is not read. The items are the videos of
the interactions.

An action weight, 0 to 255, is the sum of `FEEDBACK_WEIGHTS` over the kinds of feedback that a user gave. Every kind is
a task, in the same order: the first is a click.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from commons.datasets.public.dataset import PublicDataset, TextLayout
from commons.datasets.public.raw_files import RawKind
from commons.datasets.sequences.file import SequenceSchema

FEEDBACK_WEIGHTS = {
    "is_click": 1,
    "is_like": 2,
    "is_follow": 4,
    "is_comment": 8,
    "is_forward": 16,
    "is_hate": 32,
    "long_view": 64,
    "is_profile_enter": 128,
}
# Columns of user_features_*.csv with few values; the other columns are counts, which the *_range columns bin.
USER_FEATURES = (
    *("user_active_degree", "is_lowactive_period", "is_live_streamer", "is_video_author"),
    *("follow_user_num_range", "fans_user_num_range", "friend_user_num_range", "register_days_range"),
    *(f"onehot_feat{index}" for index in range(18)),
)
# Default contextual features: each is one token before the history.
_CONTEXTUAL = ("user_id", "user_active_degree", *USER_FEATURES[4:8])
_LOG = TextLayout(
    "a KuaiRand log",
    {"user_id": "INTEGER", "video_id": "INTEGER", "time_ms": "BIGINT", **dict.fromkeys(FEEDBACK_WEIGHTS, "BOOLEAN")},
    may_be_empty=True,  # a log of only a few users may have no line
)
_USERS = TextLayout("KuaiRand's user features", {"user_id": "INTEGER", **dict.fromkeys(USER_FEATURES, "VARCHAR")})
_ACTION = " + ".join(f"{weight} * {name}::SMALLINT" for name, weight in FEEDBACK_WEIGHTS.items())
_EVENT = {"user": "user_id", "item": "video_id", "action": f"({_ACTION})::SMALLINT", "time": "time_ms"}


def _version(title: str, log_parts: int = 1) -> PublicDataset:
    """One of the three data sets; each of the two periods has a log, which is split into parts if it is large."""
    suffix = title.removeprefix("KuaiRand-").lower()
    parts = [f"_part{part}" for part in range(1, log_parts + 1)] if log_parts > 1 else [""]
    return PublicDataset(
        schema=SequenceSchema(
            dataset_name=title.lower(),
            contextual_feature_names=_CONTEXTUAL,
            item_feature_name="video_id",
            action_feature_name="action_weights",
            tasks=tuple(partial(np.bitwise_and, weight) for weight in FEEDBACK_WEIGHTS.values()),
            timestamps_per_second=1_000,
        ),
        raw=RawKind(title, f"{title}.tar.gz", f"{title}/data"),
        event_files=tuple(
            f"log_standard_{period}_{suffix}{part}.csv" for period in ("4_08_to_4_21", "4_22_to_5_08") for part in parts
        ),
        layout=_LOG,
        event=_EVENT,
        action_vocabulary_size=2 * max(FEEDBACK_WEIGHTS.values()),
        listings={"user": (f"user_features_{suffix}.csv", _USERS)},
    )


VERSIONS = {
    version.schema.dataset_name: version
    for version in (_version("KuaiRand-Pure"), _version("KuaiRand-1K"), _version("KuaiRand-27K", log_parts=2))
}
