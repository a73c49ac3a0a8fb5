"""The kinds of fault, and beside each what is expected: who says what, and whether all go on."""

from __future__ import annotations

from dataclasses import dataclass

# Where a fault can be put, in the order of a step. The first is on the main thread, before the process groups are made.
CONSTRUCTION, LOADER, WORKLOADS = "construction", "loader", "workloads"
BEFORE_GATHER, BEFORE_PLAN = "before the gather", "between gather and plan"
BEFORE_EXCHANGE, IN_EXCHANGE, AFTER_EXCHANGE = "between plan and exchange", "in the exchange", "after the exchange"
MODEL = "model"
# Where a value is changed, or something of the product's own fails.
OPTIONS, BATCH, PACK, DIGEST, WORKER, CHECKPOINT = "options", "batch", "pack", "digest", "worker", "checkpoint"

PHASES = (BEFORE_GATHER, BEFORE_PLAN, BEFORE_EXCHANGE, IN_EXCHANGE, AFTER_EXCHANGE)
EVERYWHERE = (CONSTRUCTION, LOADER, WORKLOADS, *PHASES, MODEL)
ON_MAIN = (WORKLOADS, BEFORE_EXCHANGE, AFTER_EXCHANGE, MODEL)

SHUFFLE, LOOK_AHEAD, PIPELINE, WINDOWS, TRAINING = "shuffle", "look-ahead", "pipeline", "windows", "training"
PLAIN = (SHUFFLE, LOOK_AHEAD, PIPELINE, WINDOWS)

# What survivors say of a rank that is gone or stalls; {rank} is the faulty one.
MISSING = r"rank {rank} did not take part in the [a-z -]+( of step \d+)? .*"
# The same where the store has gone, or does not answer, so that nobody can ask who is missing.
STORE_LOST = r"store"
# What a rank says that has stalled and comes back when the others have given up.
CAME_LATE = r"(of step \d+|connection) .*"


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: in the table.
        act: the function of tests/faults/acts.py that does it.
        others: what every other rank says, a regular expression; None where all go on and train every row.
        faulty: what the faulty rank says; None where it is gone without a word, or goes on.
        places: where it may happen.
        uses: how the shuffler may be used.
        calls: at which calls of the place.
        stores: who may host the store.
        rank_0: whether it is put into rank 0 always.
        loses_store: whether the store is lost where the faulty rank hosts it, or in any case for a fault of the host.
        store_fault: whether the fault is one of the store's host, beside the ranks.
        stuck_thread: whether a survivor's worker thread may still run: it is inside C++ because of the fault.
    """

    name: str
    act: str
    others: str | None
    faulty: str | None = None
    places: tuple[str, ...] = EVERYWHERE
    uses: tuple[str, ...] = PLAIN
    calls: tuple[int, ...] = (0, 1, 2, 3)
    stores: tuple[str, ...] = ("agent", "rank0")
    rank_0: bool = False
    loses_store: bool = False
    store_fault: bool = False
    stuck_thread: bool = False

    @property
    def all_go_on(self) -> bool:
        return self.others is None


_KINDS = (
    Kind("killed (SIGKILL)", "kill", MISSING, loses_store=True),
    Kind("stopped for longer than the timeout (SIGSTOP)", "stop_long", MISSING, CAME_LATE, loses_store=True),
    Kind("stopped for less than the timeout", "stop_briefly", None),
)
KINDS = {kind.name: kind for kind in _KINDS}
