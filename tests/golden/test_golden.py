"""Plans, routes and tables are those of digests.txt: a change that is not meant to alter them has not."""

import pytest

from tests.golden.cases import GROUPS, compute, expected


@pytest.mark.parametrize("group", list(GROUPS))
def test_golden_answers_have_not_changed(group):
    known, now = expected()[group], compute(group)
    assert len(known) == len(now)
    differ = [number for number, (old, new) in enumerate(zip(known, now)) if old != new]
    assert not differ, (
        f"{len(differ)} of {len(now)} answers of {group!r} differ, first {differ[:5]}: if that is meant, run "
        "`python -m tests.golden.cases` and say why in the commit"
    )


def test_digests_tell_cases_apart():
    for group, digests in expected().items():
        most_alike = max(digests.count(each) for each in set(digests))
        # Trivial cases, such as one row on one partition, may be alike.
        assert most_alike < max(2, len(digests) // 10), group
