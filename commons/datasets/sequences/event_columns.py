"""Which columns of a user's own parquet files play which part: the map in a config, and what its actions mean."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

# Names of columns of the preprocessed files that are not the user's.
ACTIONS = "actions"
_RESERVED = (ACTIONS, "timestamp", "split")
# A feature's name is that of its table and of a file.
_FEATURE_NAME = re.compile(r"[^./\\\x00-\x1f]+")
# Each is one bit of an int16.
MOST_ACTIONS = 15
_CONDITION = re.compile(r"(?P<column>.+?)\s*(?P<operator>==|!=|>=|<=|>|<)\s*(?P<value>.+)")


@dataclass(frozen=True)
class EventColumns:
    """Columns of parquet files of one's own, one row per event or one row per user with lists.

    `evenrank preprocess parquet` needs user and item, and the time of events. Training knows them from the files that
    it wrote; what is given there has to agree, and actions and context choose among those of the files.
    """

    user: str | None = None
    """Column of the users: integers or strings."""

    item: str | None = None
    """Column of the items: integers or strings; lists of them where a row is a user."""

    time: str | None = None
    """Column of the times by which a user's events are sorted: timestamps, dates or numbers since 1970. Lists without
    times are in order, oldest first."""

    time_unit: Literal["s", "ms", "us", "ns"] = "s"
    """What numbers in the time column count."""

    actions: tuple[str, ...] | None = None
    """What users did with an item: columns of 0 and 1, or conditions such as "rating >= 4" and "event == buy", which do
    not hold for a null. The model sees all of them in the history; the first dataset.num_tasks are what ranking
    predicts."""

    context: tuple[str, ...] | None = None
    """Columns of what is known of a user, one token each: integers, strings or booleans, of the user's latest event.
    The column of the users may be one of them."""

    @property
    def is_given(self) -> bool:
        """Whether any of them is set."""
        return self != EventColumns()

    def require_complete(self, found: Collection[str], where: str) -> None:
        """Check the map against the columns of files that are to be preprocessed.

        Raises:
            ValueError: user or item not given, a column that the files do not have, a column with two parts, a name
                that cannot be a feature's, or more actions than there can be.

        """
        for part in ("user", "item"):
            if not getattr(self, part):
                raise ValueError(
                    f"columns.{part} is not given; {where} has the columns {', '.join(found)}: name the one of the "
                    f"{part}s with --columns.{part}"
                )
        for part, names in (
            ("user", [self.user]),
            ("item", [self.item]),
            ("time", [self.time] if self.time else []),
            ("actions", [action.column for action in self.parse_actions(found)]),
            ("context", self.context or ()),
        ):
            missing = [name for name in names if name not in found]
            if missing:
                raise ValueError(
                    f"columns.{part} has {', '.join(map(repr, missing))}; {where} has the columns {', '.join(found)}: "
                    "correct the name"
                )
        if self.item in (self.user, *(self.context or ())):
            raise ValueError(
                f"column {self.item!r} is named as the items and as something else; items are the sequence itself: "
                "name another column"
            )
        for name in (self.user, self.item, *(self.context or ())):
            if name in _RESERVED or not _FEATURE_NAME.fullmatch(str(name)):
                raise ValueError(
                    f"column {name!r} cannot name a feature; the names {', '.join(_RESERVED)} are taken, and others "
                    "have no dot, slash or control character: rename the column"
                )

    def parse_actions(self, found: Collection[str] = ()) -> list[Action]:
        """The actions; a name in `found` is a column, whatever it looks like. ValueError for more than 15."""
        texts = self.actions or ()
        if len(texts) > MOST_ACTIONS or len(set(texts)) < len(texts):
            raise ValueError(
                f"columns.actions has {len(texts)} entries, {len(set(texts))} of them different; each is a bit of 15, "
                f"and stands once: give up to {MOST_ACTIONS}"
            )
        return [Action.parse(text, found) for text in texts]

    def chosen_from(self, made_with: EventColumns, where: str) -> EventColumns:
        """What the files were made with, and of actions and context those given; ValueError for others than theirs."""
        for part in ("user", "item", "time"):
            asked, there = getattr(self, part), getattr(made_with, part)
            if asked is not None and asked != there:
                raise ValueError(
                    f"columns.{part} is {asked!r}, {where} was made with {there!r}: correct it, or preprocess the data "
                    "again"
                )
        chosen: dict[str, Any] = {}
        for part in ("actions", "context"):
            asked, there = getattr(self, part), getattr(made_with, part) or ()
            missing = [name for name in asked or () if name not in there]
            if missing:
                raise ValueError(
                    f"columns.{part} has {', '.join(map(repr, missing))}, {where} was made with {list(there)}: choose "
                    "among these, or preprocess the data again"
                )
            chosen[part] = there if asked is None else tuple(dict.fromkeys(asked))
        return dataclasses.replace(made_with, **chosen)

    def as_flags(self) -> str:
        """The flags of `evenrank preprocess parquet` that say the same."""
        flags = []
        for name, value in dataclasses.asdict(self).items():
            if value and value != "s":
                values = value if isinstance(value, (tuple, list)) else [value]
                flags += [f"--columns.{name.replace('_', '-')}", *map(shlex.quote, values)]
        return " ".join(flags)


@dataclass(frozen=True)
class Action:
    """Something that a user did, or did not do, with an item."""

    text: str  # as the config has it
    column: str  # that says whether it was done
    operator: str | None = None  # with which it is compared; None where the column holds 0 and 1
    value: Any = None  # with what, a number where it is one
    value_text: str = ""  # the same as a text

    @classmethod
    def parse(cls, text: str, found: Collection[str]) -> Action:
        """The action that a text means.

        >>> Action.parse("rating >= 4", ["rating"])
        Action(text='rating >= 4', column='rating', operator='>=', value=4, value_text='4')

        """
        condition = None if text in found else _CONDITION.fullmatch(text)
        if condition is None:
            return cls(text, text)
        value = condition["value"]
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        return cls(text, condition["column"], condition["operator"], _number_or_text(value), value)


def _number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
