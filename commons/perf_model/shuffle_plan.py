"""PLAN: the gathered rows, and the plan of which rank trains which row; one native call from messages to exchange.

Each rank packs its rows into a message, and every rank gets the messages of all ranks. A plan is a pure function of
them, so it is the same on every rank. The native core (partitioner/native/gathered_shuffle.hpp) reads the messages,
plans, and makes the exchange of one rank. This module does not use process groups.

A *place* is a rank and a step: rank · steps + step. For the plan of one batch, steps is 1 and a place is a rank; for a
window of batches, every rank has one place per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from commons.perf_model.partitioner import core
from commons.perf_model.partitioner.inputs import as_int64_workloads

# A message begins with the step and the number of batches; then, for each batch, its rows, its real rows and the number
# of its words. The words follow, see `GatheredRows.words`.
MESSAGE_NUMBERS, BATCH_NUMBERS = 2, 3
# The columns of packed rows: workload and tokens, then the lengths of every key, then host values.
_LENGTHS_FROM = 2


def _nothing(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.int64)


@dataclass(eq=False)  # not frozen, because a frozen one takes several times as long to make, and one is made per batch
class GatheredRows:
    """The rows of a global batch, or of a window of them, as every rank gathers them; `N` rows without padding.

    The words of a batch are a block of bytes, empty without rows: a code of one byte for every column, then the columns
    (`core.encode_rows`, native/row_table.hpp). A code is the width of the column's numbers, 1, 2, 4 or 8 bytes,
    unsigned except for the last, plus 16 if all rows have the same number, which is then written once.
    """

    rows: np.ndarray  # int64 (num_places,), batch_size of each batch, padding included; 0 without a batch
    real_rows: np.ndarray  # int64 (num_places,), rows without padding
    workloads: np.ndarray  # int64 (N,), place by place
    tokens: np.ndarray  # int64 (N,), the weight of rows for the token cap, and the cost of moving them
    steps: int = 1  # batches of a rank that are planned together
    # int64 (num_ranks, n): packed rows, then unused words
    words: np.ndarray = field(default_factory=lambda: _nothing(0, 0))
    first: np.ndarray = field(default_factory=lambda: _nothing(0))  # int64 (num_places,), where each block begins
    num_keys: int = 0  # columns of lengths
    num_kept: int = 0  # columns of host values, see `BaseBatch`, and of groups

    @property
    def num_places(self) -> int:
        """Ranks times steps."""
        return len(self.rows)

    @property
    def num_ranks(self) -> int:
        """Ranks in the group."""
        return self.num_places // self.steps

    @property
    def num_columns(self) -> int:
        """Columns of packed rows."""
        return _LENGTHS_FROM + self.num_keys + self.num_kept

    @cached_property
    def home(self) -> np.ndarray:
        """int64 `(N,)`, the place of each real row before the exchange."""
        return np.repeat(np.arange(self.num_places, dtype=np.int64), self.real_rows)

    def rank_of(self, place: np.ndarray) -> np.ndarray:
        """The ranks that places belong to."""
        return place if self.steps == 1 else place // self.steps

    @cached_property
    def global_id(self) -> np.ndarray:
        """int64 `(N,)`, ascending: number of rows at earlier places, padding included, plus the row in its batch."""
        padding = self.rows - self.real_rows
        return np.arange(len(self.workloads), dtype=np.int64) + (np.cumsum(padding) - padding)[self.home]

    def lengths_of_keys(self, keys: Sequence[int]) -> np.ndarray:
        """The lengths of some keys of all rows, int64 `(len(keys), N)`; ValueError for damaged words."""
        return core.read_columns(self, [_LENGTHS_FROM + key for key in keys])


class ShufflePlan:
    """The place that trains each real row of a global batch, or of a window of them.

    Arrays are views of the core's answer, made at their first use; the worker thread uses none.

    Attributes:
        lower_bound: no plan can have a smaller largest load; in a window, a smaller sum of largest loads over its
            steps. With speeds it is of times, see `partition`.
        gated: whether a better plan was found, but its gain was below `min_gain`.
        excess_tokens: by how many tokens the fullest place exceeds the token cap; 0 if none does, or without a cap.
        changes: whether any row changes its rank, or its step of a window.
        speeds: int64 `(num_ranks,)`, or None for equal speeds.
    """

    # int64 (N,), the best plan found; differs from `destination` if it is not carried out, in mode "observe" or because
    # its gain is below `min_gain`.
    planned = cached_property(lambda plan: plan._of_rows(2))
    # int64 (N,), the place that trains each row; equal to `gathered.home` if no row moves.
    destination = cached_property(lambda plan: plan._of_rows(3))
    loads_before = cached_property(lambda plan: plan._of_places(3))  # int64 (num_places,), before the exchange
    loads_planned = cached_property(lambda plan: plan._of_places(4))  # the same under `planned`
    loads_after = cached_property(lambda plan: plan._of_places(5))  # the same under `destination`
    result_real_rows = cached_property(lambda plan: plan._of_places(6))  # int64 (num_places,), after the exchange

    def __init__(self, head: Mapping[str, int], answer: np.ndarray, num_ranks: int, speeds: np.ndarray | None) -> None:
        self.lower_bound, self.excess_tokens = head["bound"], head["excess_tokens"]
        self.gated, self.changes, self.speeds = bool(head["gated"]), bool(head["changes"]), speeds
        self._head, self._answer, self._num_places = head, answer, num_ranks * head["steps"]
        self._packed: tuple[np.ndarray, int, int] | None = None  # words, keys and kept columns

    @cached_property
    def gathered(self) -> GatheredRows:
        """The rows that the plan is of: those given to `ShufflePlanner.plan`, or read from the answer."""
        assert self._packed is not None  # noqa: S101  the rows are those of messages
        words, keys, kept = self._packed
        rows, real_rows, first = map(self._of_places, range(3))
        of_rows = self._of_rows(0), self._of_rows(1)
        return GatheredRows(rows, real_rows, *of_rows, self._head["steps"], words, first, keys, kept)

    @cached_property
    def moved(self) -> np.ndarray:
        """Rows and tokens by the step that trains them, int64 `(6, steps)`.

        Rows and tokens of all, of those that change rank, and of those that leave their node.
        """
        first = len(core.SHUFFLE_HEAD) + 7 * self._num_places
        return self._answer[first : first + 6 * self._head["steps"]].reshape(6, -1)

    def _of_places(self, number: int) -> np.ndarray:
        first = len(core.SHUFFLE_HEAD) + number * self._num_places
        return self._answer[first : first + self._num_places]

    def _of_rows(self, number: int) -> np.ndarray:
        first = self._head["room"] + (number - 4) * self._head["num_rows"]
        return self._answer[first : first + self._head["num_rows"]]

    @cached_property
    def moves(self) -> np.ndarray:
        """Bool `(N,)`, rows that change rank."""
        return self.gathered.rank_of(self.destination) != self.gathered.rank_of(self.gathered.home)

    @property
    def num_moved(self) -> int:
        """Number of rows that change rank."""
        return int(self.moved[2].sum())

    def rows_for(self, place: int) -> np.ndarray:
        """Positions among the N real rows of those that are trained at `place`, in ascending global id."""
        return np.flatnonzero(self.destination == place)

    def digest(self) -> int:
        """A 63-bit digest of the plan and the gathered rows, which ranks compare."""
        return self._head["digest"]

    @staticmethod
    def of(gathered: GatheredRows, destination: np.ndarray, lower_bound: int = 0) -> ShufflePlan:
        """A ShufflePlan with given destinations, from another planner.

        Raises:
            ValueError: a destination that is not a place.
        """
        plan = ShufflePlanner(gathered.num_ranks, gathered.steps).plan(gathered, destination)
        plan.lower_bound = lower_bound
        return plan


@dataclass(eq=False)
class ShufflePlanner:
    """Plans one batch or window after another, each in one native call.

    If no assignment lowers the largest load (in a window, the sum of largest loads over its steps), or the gain is
    below `min_gain`, no row moves, even if counts are unequal. Only three reasons can move rows at the price of a
    larger load: the rows as they are exceed the token cap, a group is on several ranks, or a rank without rows cannot
    be padded.

    With speeds, a rank takes the time load ÷ speed, and times replace loads in the objective, the gain, `min_gain`, the
    slack and the bound. They need the method "refined" or "lpt". The loads in a plan remain loads.

    The steps of a window are put in an order that depends only on its workloads: the same on every rank and for every
    repetition, and not with heavy steps always first.

    Attributes:
        head: the first numbers of the last answer, see `core.SHUFFLE_HEAD`.
        exchange: the numbers of the last plan's exchange: regions (3), words to every rank and from every rank; by own
            batch the words of every part and of the aligning segment; by result whether it changes, its rows, its real
            rows, the words of every part and the entries of every key.
        indices: the index array of the last plan, from `allocate`.
    """

    num_ranks: int  # ranks of the group
    steps: int = 1  # batches of a rank that are planned together; for messages, the most
    _: KW_ONLY
    method: str = "refined"  # name of the partitioning algorithm
    equal_size: bool = True  # whether ranks get row counts that differ by at most one
    slack: float = 0.0  # fraction by which the largest load may exceed the best one found, to keep more rows at home
    ranks_per_node: int | None = None  # ranks that share a node; rows that leave a node count more
    max_tokens: int | None = None  # cap on a rank's tokens; if no plan keeps it, the one that exceeds it least is used
    min_gain: float = 0.0  # no row moves if the largest load would fall by less than this fraction; 0 switches this off
    carry_out: bool = True  # False to plan without moving rows
    pads: bool = True  # whether results may be padded
    has_plan: bool = True  # False to read only the numbers of batches from messages
    # int64 `(num_parts, 3)`, for the exchange: of every part of the payload its first column in the lengths, its
    # segments per row, and the words of an entry; of a dense part -1, 1, and the words of a row.
    parts: np.ndarray | None = None
    rank: int = 0  # whose exchange is made
    all_gather: bool = False  # whether every rank receives all rows that any rank sends, padded to the largest sender
    # Makes the index array of the exchange with a number of int64 values; returns it and its address.
    allocate: Callable[[int], tuple[Any, int]] | None = None
    num_keys: int = 0  # as in `GatheredRows`, for messages
    num_kept: int = 0  # the same
    has_groups: bool = False  # whether the last kept column has the group of each row; its rows end at one place

    def __post_init__(self) -> None:
        self.head, self.exchange = dict[str, int](), list[int]()
        self.indices: Any = None
        self._speeds: np.ndarray | None = None
        # Sizes of the answer and the index array, which grow with the batches.
        self._room, self._index_room = 1 << 10, 1 << 10
        given = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "allocate"}
        given |= {
            "method": core.METHODS.index(self.method),
            "ranks_per_node": min(self.ranks_per_node or self.num_ranks, self.num_ranks),
            "has_cap": self.max_tokens is not None,
            "max_tokens": self.max_tokens or 0,
            "parts": None if self.parts is None else core.address(self.parts),
            "num_parts": 0 if self.parts is None else len(self.parts),
        }
        self._arguments = core.ShuffleArguments(**given)

    def plan(
        self, gathered: GatheredRows, destination: np.ndarray | None = None, speeds: np.ndarray | None = None
    ) -> ShufflePlan:
        """Plan gathered rows; or, with `destination`, make the ShufflePlan of given places.

        Raises:
            ValueError: workloads or tokens that are negative or sum up to 2^62 or more, a destination that is not a
                place, groups of different sizes with `equal_size`, or speeds as for `plan_messages`.
        """
        given = self._arguments
        self._take_speeds(speeds)
        given.messages = given.first = given.destination = None  # may be set from an earlier call
        arrays = {name: getattr(gathered, name) for name in ("rows", "real_rows", "workloads", "tokens")}
        if len(gathered.first):
            arrays["first"] = gathered.first
        if destination is not None:
            arrays["destination"] = destination
        for name, array in arrays.items():
            setattr(given, name, core.address(array))
        of_rows = {len(arrays[name]) for name in ("workloads", "tokens", "destination") if name in arrays}
        places = {self.num_ranks * given.steps, len(gathered.rows), len(gathered.real_rows)}
        if len(of_rows) > 1 or len(places) > 1:
            raise ValueError("a plan of rows: sizes do not match")
        given.words, given.stride, given.num_words = None, 0, 0
        if len(gathered.words) == given.num_ranks:
            given.words, given.stride, given.num_words = core.rows_of_words(gathered.words)
        given.num_keys, given.num_kept = gathered.num_keys, gathered.num_kept
        plan = self._read(self._answer(gathered))
        plan.gathered = gathered
        return plan

    def plan_messages(
        self, messages: np.ndarray, capacity: int, speeds: np.ndarray | None = None
    ) -> ShufflePlan | None:
        """Plan the rows in the messages of all ranks.

        Args:
            messages: int64 `(num_ranks, n)`, the message of every rank.
            capacity: most words of a message.
            speeds: int64 `(num_ranks,)`, positive and below 2^31; equal speeds change nothing.

        Returns:
            The plan; None if `has_plan` is False, or `head` shows that ranks are at different steps, no rank has a
            batch, or words were cut off.

        Raises:
            ValueError: damaged messages, workloads whose sum is 2^62 or more, groups of different sizes with
                `equal_size`, or speeds of the wrong number, out of range, or for a method that ignores them.
        """
        given = self._arguments
        self._take_speeds(speeds)
        given.destination, given.capacity = None, capacity
        given.messages, given.stride, given.num_words = core.rows_of_words(messages)
        answer = self._answer(None)
        head = self.head
        if not given.has_plan or not head["steps"] or head["other_steps"] or head["most_words"] > capacity:
            return None
        plan = self._read(answer)
        plan._packed = messages[:, MESSAGE_NUMBERS + BATCH_NUMBERS * given.steps :], given.num_keys, given.num_kept
        return plan

    def _take_speeds(self, speeds: np.ndarray | None) -> None:
        if speeds is not None and len(speeds) != self.num_ranks:
            raise ValueError(
                f"speeds has {len(speeds)} entries, there are {self.num_ranks} ranks; each has one: match them"
            )
        self._speeds, self._arguments.speeds = speeds, None if speeds is None else core.address(speeds)

    def _answer(self, gathered: GatheredRows | None) -> np.ndarray:
        """Call the core; a second time with larger arrays if the answer or the index array was too small."""
        while True:
            answer = np.empty(self._room, np.int64)
            index_room, address = 0, None
            if self.allocate is not None:
                index_room = self._index_room
                self.indices, address = self.allocate(index_room)
            try:
                self.head = core.shuffle(self._arguments, answer, address, index_room)
            except ValueError:
                if gathered is not None:  # these checks have better messages
                    as_int64_workloads(gathered.workloads)
                    as_int64_workloads(gathered.tokens, "tokens")
                raise
            room, needed = self.head["room"], self.head["index_room"]
            if room <= self._room and needed <= index_room:
                return answer
            self._room = max(self._room, room + room // 4)
            self._index_room = max(self._index_room, needed + needed // 4)

    def _read(self, answer: np.ndarray) -> ShufflePlan:
        """The plan in an answer; also sets `exchange`, whose numbers are between those of places and those of rows."""
        given, head = self._arguments, self.head
        if self.parts is not None:
            first = len(core.SHUFFLE_HEAD) + (7 * given.num_ranks + 6) * head["steps"]
            self.exchange = answer[first : head["room"] - 4 * head["num_rows"]].tolist()
        return ShufflePlan(head, answer, given.num_ranks, self._speeds)


def plan_shuffle(gathered: GatheredRows, *, speeds: np.ndarray | None = None, **options: Any) -> ShufflePlan:
    """Plan one global batch, or a window of them; never worse than leaving every row where it is.

    Args:
        gathered: the rows of all ranks.
        speeds: int64 `(num_ranks,)`, positive; see `ShufflePlanner`.
        **options: of `ShufflePlanner`: method, equal_size, slack, ranks_per_node, max_tokens, min_gain, carry_out
            and pads.

    Raises:
        ValueError: workloads or tokens that are negative or sum up to 2^62 or more, or invalid speeds.
    """
    return ShufflePlanner(gathered.num_ranks, gathered.steps, **options).plan(gathered, speeds=speeds)
