"""The columns of a user's own parquet files: their names in a config, and the parser of actions."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from commons.checks import require_field_types, require_names

# Names of columns that preprocessing adds.
ACTIONS = "actions"
_RESERVED = (ACTIONS, "timestamp", "split")
# A feature's name is also the name of its embedding table and of a file.
_FEATURE_NAME = re.compile(r"[^./\\\x00-\x1f]+")
# Every action is one bit of an int16.
MOST_ACTIONS = 15
_CONDITION = re.compile(r"(?P<column>.+?)\s*(?P<operator>==|!=|>=|<=|>|<)\s*(?P<value>.+)")


@dataclass(frozen=True)
class EventColumns:
    """Names of the columns of your own parquet files, which have one row per event, or one row per user with lists.

    `evenrank preprocess parquet` requires user and item and, for rows of events, time. The preprocessed files contain
    the names, so training does not need them: a name that is given again must be equal, and actions and context select
    from the files' own. TypeError for one string as actions or context, ValueError for an unknown unit.
    """

    user: str | None = None  # column of users: integers or strings
    item: str | None = None  # column of items: integers or strings; lists of them if a row is a user
    # Column of times by which a user's events are sorted: timestamps, dates or numbers since 1970. Lists without times
    # must be sorted, oldest first.
    time: str | None = None
    time_unit: Literal["s", "ms", "us", "ns"] = "s"  # unit of numbers in the time column
    # What users did with an item: columns of 0 and 1, or conditions such as "rating >= 4" and "event == buy", which are
    # false for a null. The history has all actions; ranking predicts the first dataset.num_tasks actions.
    actions: tuple[str, ...] | None = None
    # Columns of contextual features, one token each: integers, strings or booleans; the value of a user's latest event
    # counts. The column of users may be one of them; evaluation is of other users, whose embeddings are not trained.
    context: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        require_field_types(self)
        for part in ("actions", "context"):
            if getattr(self, part) is not None:
                object.__setattr__(self, part, tuple(require_names(f"columns.{part}", getattr(self, part))))

    @property
    def is_given(self) -> bool:
        """Whether any field is set."""
        return self != EventColumns()

    def require_complete(self, found: Collection[str], where: str) -> None:
        """Check the names against the columns of files to preprocess.

        Raises:
            ValueError: user or item is not set, the files do not have a column, the item column is used twice, a name
                cannot be a feature's name, or there are more than 15 actions.
        """
        for part in ("user", "item"):
            if not getattr(self, part):
                raise ValueError(
                    f"columns.{part} is not given; {where} has the columns {', '.join(found)}: give the column of "
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
                is_condition = part == "actions" and any(set("=<>") & set(str(name)) for name in missing)
                remedy = "correct the name, or write the column into the files if only their folders have it, as name=…"
                if is_condition:
                    remedy = 'write a condition like "event == buy"'
                raise ValueError(
                    f"columns.{part} has {', '.join(map(repr, missing))}; {where} has the columns {', '.join(found)}: "
                    f"{remedy}"
                )
        if self.item in (self.user, *(self.context or ())):
            raise ValueError(
                f"column {self.item!r} is columns.item and also columns.user or columns.context; items are the "
                "sequence: name another column"
            )
        for name in (self.user, self.item, *(self.context or ())):
            if name in _RESERVED or not _FEATURE_NAME.fullmatch(str(name)):
                raise ValueError(
                    f"column {name!r} cannot name a feature; the names {', '.join(_RESERVED)} are reserved, and a name "
                    "has no dot, slash or control character: rename the column"
                )

    def parse_actions(self, found: Collection[str] = ()) -> list[Action]:
        """The parsed actions; a text in `found` is always a column. ValueError for repeats, or more than 15 actions."""
        texts = self.actions or ()
        if len(texts) > MOST_ACTIONS or len(set(texts)) < len(texts):
            raise ValueError(
                f"columns.actions has {len(texts)} entries, {len(set(texts))} of them different; an action is one of "
                f"15 bits: give up to {MOST_ACTIONS} different actions"
            )
        return [Action.parse(text, found) for text in texts]

    def chosen_from(self, made_with: EventColumns, where: str) -> EventColumns:
        """The files' columns, with only the actions and context given here; ValueError if the files have others."""
        for part in ("user", "item", "time"):
            given, there = getattr(self, part), getattr(made_with, part)
            if given is not None and given != there:
                raise ValueError(
                    f"columns.{part} is {given!r}, {where} was made with {there!r}: correct it, or preprocess the data "
                    "again"
                )
        chosen: dict[str, Any] = {}
        for part in ("actions", "context"):
            given, there = getattr(self, part), getattr(made_with, part) or ()
            missing = [name for name in given or () if name not in there]
            if missing:
                raise ValueError(
                    f"columns.{part} has {', '.join(map(repr, missing))}, {where} was made with {list(there)}: choose "
                    "from these, or preprocess the data again"
                )
            chosen[part] = there if given is None else tuple(dict.fromkeys(given))
        return dataclasses.replace(made_with, **chosen)

    def as_flags(self) -> str:
        """The same columns as flags of `evenrank preprocess parquet`."""
        flags = []
        for name, value in dataclasses.asdict(self).items():
            if value and value != getattr(EventColumns(), name):
                values = value if isinstance(value, (tuple, list)) else [value]
                flags += [f"--columns.{name.replace('_', '-')}", *map(shlex.quote, values)]
        return " ".join(flags)


@dataclass(frozen=True)
class Action:
    """A kind of action on an item: a column of 0 and 1, or a condition on a column."""

    text: str  # text in the config
    column: str  # column of the files
    operator: str | None = None  # operator of the condition; None for a column of 0 and 1
    value: Any = None  # right-hand side of the condition, as a number if possible
    value_text: str = ""  # right-hand side as a text

    @classmethod
    def parse(cls, text: str, found: Collection[str]) -> Action:
        """Parse a text of the config; a text in `found` is a column.

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
