"""The kinds of fault, and beside each what is expected: who says what, and whether all go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Where a fault can be put, in the order of a step. The first is on the main thread, before the process groups are made.
CONSTRUCTION, LOADER, WORKLOADS = "construction", "loader", "workloads"
BEFORE_GATHER, BEFORE_PLAN = "before the gather", "between gather and plan"
BEFORE_EXCHANGE, IN_EXCHANGE, AFTER_EXCHANGE = "between plan and exchange", "in the exchange", "after the exchange"
MODEL = "model"
# Where a value is changed, or something of the product's own fails.
OPTIONS, BATCH, PLAN, DIGEST, PACK = "options", "batch", "plan", "digest", "pack"
WORKER, CHECKPOINT = "worker", "checkpoint"

PHASES = (BEFORE_GATHER, BEFORE_PLAN, BEFORE_EXCHANGE, IN_EXCHANGE, AFTER_EXCHANGE)
EVERYWHERE = (CONSTRUCTION, LOADER, WORKLOADS, *PHASES, MODEL)
ON_MAIN = (WORKLOADS, BEFORE_EXCHANGE, AFTER_EXCHANGE, MODEL)

SHUFFLE, LOOK_AHEAD, PIPELINE, WINDOWS, TRAINING = "shuffle", "look-ahead", "pipeline", "windows", "training"
PLAIN = (SHUFFLE, LOOK_AHEAD, PIPELINE, WINDOWS)
ALL = (*PLAIN, TRAINING)

# What survivors say of a rank that is gone or stalls, or comes back while they ask for it; {rank} is the faulty one.
MISSING = r"rank {rank} (did not take part in|stalled for \d+ s in|reached|waited in) the [a-z -]+( of step \d+)?"
# Of one that could still tell them.
TOLD = r"rank {rank}(: | failed in the [a-z -]+ of step \d+: )"
# The same where the store has gone, or does not answer, so that nobody can ask who is missing.
STORE_LOST = r"store"
# What a rank says that has stalled and comes back when the others have given up.
CAME_LATE = r"(of step \d+|connection) .*|" + MISSING
# What the others say where they meet in a collective of the training's own, which names nobody.
UNNAMED = r"Connection closed by peer|Timed out|timed out"


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str  # in the table
    act: str  # the function of tests/faults/acts.py that does it
    others: str | None  # what every other rank says, a regular expression; None where all go on and train every row
    faulty: str | None = None  # what the faulty rank says; None where it is gone without a word, or goes on
    places: tuple[str, ...] = EVERYWHERE  # where it may happen
    uses: tuple[str, ...] = PLAIN  # how the shuffler may be used
    calls: tuple[int, ...] = (0, 1, 2, 3)  # at which calls of the place
    stores: tuple[str, ...] = ("agent", "rank0")  # who may host the store
    rank_0: bool = False  # whether it is put into rank 0 always
    # Whether the store is lost where the faulty rank hosts it, or in any case for a fault of the host.
    loses_store: bool = False
    store_fault: bool = False  # whether the fault is one of the store's host, beside the ranks

    @property
    def all_go_on(self) -> bool:
        return self.others is None


def _gone(name: str, act: str, faulty: str | None = None, others: str = MISSING, **changes: Any) -> Kind:
    """A rank does not answer: the others miss it, and where it hosts the store, that too."""
    return Kind(name, act, others, faulty, **{"loses_store": True} | changes)


def _told(name: str, act: str, place: str, text: str, **changes: Any) -> Kind:
    """What the product notices on one rank is raised on all of them, in the same words."""
    return Kind(name, act, text, text, places=(place,), **changes)


_DATA = (PIPELINE, WINDOWS, TRAINING)
_OF_RANK_0: dict[str, Any] = {"stores": ("rank0",), "rank_0": True}
_OF_HOST: dict[str, Any] = {"stores": ("agent",), "places": (*PHASES, MODEL)}
_KINDS = (
    # A rank ends, or does not answer.
    _gone("killed (SIGKILL)", "kill", uses=ALL),
    _gone("segmentation fault (SIGSEGV)", "segmentation_fault"),
    _gone("aborted (SIGABRT)", "abort"),
    _gone("rank 0 killed, which hosts the store", "kill", uses=ALL, **_OF_RANK_0),
    _gone("stopped for longer than the timeout (SIGSTOP)", "stop_long", CAME_LATE, uses=ALL),
    _gone("rank 0 stopped, which hosts the store", "stop_long", CAME_LATE, **_OF_RANK_0),
    Kind("stopped for less than the timeout", "stop_briefly", None, uses=ALL),
    _gone("the interpreter lock held for longer than the timeout", "hold_long", CAME_LATE),
    Kind("the interpreter lock held for less than the timeout", "hold_briefly", None),
    _gone(
        "the worker thread dies",
        "end_thread",
        "(worker|thread)",
        places=(WORKER,),
        uses=(SHUFFLE, LOOK_AHEAD, PIPELINE),
    ),
    # A rank's program raises.
    _gone("SystemExit", "system_exit", "SystemExit: exit on purpose", places=ON_MAIN),
    _gone("KeyboardInterrupt (SIGINT)", "interrupt", "KeyboardInterrupt", places=ON_MAIN),
    _gone(
        "an asynchronous exception in the main thread",
        "asynchronous",
        "AsynchronousError",
        f"{TOLD}AsynchronousError|{MISSING}",
        places=ON_MAIN,
    ),
    _gone(
        "the model raises",
        "model_error",
        "RuntimeError: the model is broken",
        f"{TOLD}RuntimeError: the model is broken|{MISSING}",  # the trainer posts the error before it ends
        places=(MODEL,),
        uses=ALL,
    ),
    _told("the loader raises", "loader_error", LOADER, r"rank {rank}: OSError: shard 3 cannot be read", uses=_DATA),
    _gone("the loader blocks for longer than the timeout", "block", CAME_LATE, places=(LOADER,)),
    # A rank lacks memory.
    Kind(
        "out of memory while rows are packed",
        "out_of_memory",
        r"rank {rank} failed in the exchange of step \d+: OutOfMemoryError: tried to allocate",
        "OutOfMemoryError: tried to allocate",
        places=(PACK,),
    ),
    _told("out of memory while planning", "memory_error", PLAN, r"rank {rank}: MemoryError"),
    # A rank lies.
    _told("workloads: NaN", "workloads_nan", WORKLOADS, r"(ValueError|TypeError): rank {rank}: .*workloads"),
    _told("workloads: negative", "workloads_negative", WORKLOADS, r"ValueError: rank {rank}: workloads\[\d+\] is -"),
    _told(
        "workloads: too few",
        "workloads_short",
        WORKLOADS,
        r"ValueError: rank {rank}: workloads has \d entries, batch_size is \d",
    ),
    _told("workloads: sums overflow", "workloads_overflow", WORKLOADS, r"ValueError: .*workloads"),
    _told(
        "another schema than the first batch's",
        "other_schema",
        BATCH,
        r"rank {rank}: this batch differs from the first: field 'target'",
        calls=(1, 2, 3),
    ),
    _told(
        "another schema than the other ranks'",
        "other_schema",
        BATCH,
        r"the batches of ranks \d and \d differ: field 'target'",
        calls=(0,),
    ),
    _told("other options", "other_options", OPTIONS, r"options are .* on ranks? \d.* and .* on ranks? \d", calls=(0,)),
    _told("another plan (a corrupted digest)", "other_digest", DIGEST, r"ranks \[\d\] made another plan than the rest"),
    # Around the ranks.
    Kind("a full disk at a checkpoint", "disk_full", None, places=(CHECKPOINT,), calls=(0, 1), uses=(TRAINING,)),
    _told(
        "a full disk at the last checkpoint",
        "disk_full",
        CHECKPOINT,
        "the state after step 8 could not be saved",
        calls=(2,),
        uses=(TRAINING,),
    ),
    Kind("clocks that jump", "jump", None, places=(OPTIONS,), calls=(0,), uses=ALL),
    Kind("the store's host killed", "kill_store", None, store_fault=True, **_OF_HOST),
    Kind("the store's host stopped", "stop_store", None, store_fault=True, **_OF_HOST),
    _gone("the store's host killed, then a rank", "kill_store_and_rank", **_OF_HOST),
    _gone("the store's host stopped, then a rank killed", "stop_store_kill_rank", **_OF_HOST),
    _gone(
        "the store's host stopped before the groups are made",
        "stop_store",
        others=STORE_LOST,
        stores=("agent",),
        store_fault=True,
        places=(CONSTRUCTION,),
        calls=(0,),
    ),
)
KINDS = {kind.name: kind for kind in _KINDS}
