"""Names of metrics that look at the first K items of a ranking, such as "NDCG@10"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_NAME = re.compile(r"([A-Za-z]+)@([1-9][0-9]*)")


class TopKMetric(NamedTuple):
    """A metric and the number of items that it looks at."""

    kind: str
    top_k: int


def parse_top_k_metric(name: str, kinds: Sequence[str], purpose: str) -> TopKMetric:
    """Read a name such as "NDCG@10".

    Args:
        name: of the metric; "HitRate" is another name of "HR".
        kinds: metrics that there are.
        purpose: what they judge, for the error.

    Raises:
        ValueError: another form, or another kind.

    >>> parse_top_k_metric("HitRate@10", ["HR", "NDCG"], "retrieval")
    TopKMetric(kind='HR', top_k=10)
    """
    match = _NAME.fullmatch(name)
    kind = "" if match is None else match[1].replace("HitRate", "HR")
    if match is None or kind not in kinds:
        known = ", ".join(f"{known}@K" for known in kinds)
        raise ValueError(
            f"eval_metrics has {name!r}; metrics of {purpose} are {known} with K of at least 1, and HitRate is another "
            "name of HR: correct it"
        )
    return TopKMetric(kind, int(match[2]))
