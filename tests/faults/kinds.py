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
ALL = (*PLAIN, TRAINING)

# What survivors say of a rank that is gone or stalls, or comes back while they ask for it; {rank} is the faulty one.
MISSING = r"rank {rank} (did not take part in|stood still for \d+ s in|came to) the [a-z -]+( of step \d+)?"
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
        faulty_status: how the faulty rank's process ends.
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
    faulty_status: int = 1

    @property
    def all_go_on(self) -> bool:
        return self.others is None


_STEPS = (1, 2, 3)
_DATA = (PIPELINE, WINDOWS, TRAINING)


def _on_all(text: str) -> dict[str, str]:
    """What the product notices on one rank is raised on all of them, in the same words."""
    return {"others": text, "faulty": text}


_KINDS = (
    # A rank ends, or does not answer.
    Kind("killed (SIGKILL)", "kill", MISSING, loses_store=True, uses=ALL),
    Kind("segmentation fault (SIGSEGV)", "segmentation_fault", MISSING, loses_store=True),
    Kind("aborted (SIGABRT)", "abort", MISSING, loses_store=True),
    Kind(
        "rank 0 killed, which hosts the store",
        "kill",
        MISSING,
        stores=("rank0",),
        rank_0=True,
        loses_store=True,
        uses=ALL,
    ),
    Kind("stopped for longer than the timeout (SIGSTOP)", "stop_long", MISSING, CAME_LATE, loses_store=True, uses=ALL),
    Kind(
        "rank 0 stopped, which hosts the store",
        "stop_long",
        MISSING,
        CAME_LATE,
        stores=("rank0",),
        rank_0=True,
        loses_store=True,
    ),
    Kind("stopped for less than the timeout", "stop_briefly", None, uses=ALL),
    Kind("the interpreter lock held for longer than the timeout", "hold_long", MISSING, CAME_LATE, loses_store=True),
    Kind("the interpreter lock held for less than the timeout", "hold_briefly", None),
    Kind(
        "the worker thread dies",
        "end_thread",
        MISSING,
        "(worker|thread)",
        places=(WORKER,),
        uses=(SHUFFLE, LOOK_AHEAD, PIPELINE),
        loses_store=True,
    ),
    # A rank's program raises.
    Kind("SystemExit", "system_exit", MISSING, "SystemExit: told to end", places=ON_MAIN, loses_store=True),
    Kind(
        "KeyboardInterrupt (SIGINT)",
        "interrupt",
        MISSING,
        "KeyboardInterrupt",
        places=ON_MAIN,
        loses_store=True,
        faulty_status=-2,
    ),
    Kind(
        "an asynchronous exception in the main thread",
        "asynchronous",
        TOLD + "AsynchronousError|" + MISSING,
        "AsynchronousError",
        places=ON_MAIN,
        loses_store=True,
    ),
    Kind(
        "the model raises",
        "model_error",
        MISSING,
        "RuntimeError: the model is broken",
        places=(MODEL,),
        uses=ALL,
        loses_store=True,
    ),
    Kind(
        "the loader raises",
        "loader_error",
        places=(LOADER,),
        uses=_DATA,
        **_on_all(r"rank {rank}: OSError: shard 3 cannot be read"),
    ),
    Kind(
        "the loader blocks for longer than the timeout", "block", MISSING, CAME_LATE, places=(LOADER,), loses_store=True
    ),
    # A rank lacks memory.
    Kind(
        "out of memory while rows are packed",
        "out_of_memory",
        r"rank {rank} failed in the exchange of step \d+: OutOfMemoryError: tried to allocate",
        "OutOfMemoryError: tried to allocate",
        places=(PACK,),
    ),
    Kind("out of memory while planning", "memory_error", places=(DIGEST,), **_on_all(r"rank {rank}: MemoryError")),
    # A rank lies.
    Kind(
        "workloads: NaN",
        "workloads_nan",
        places=(WORKLOADS,),
        **_on_all(r"(ValueError|TypeError): rank {rank}: .*workloads"),
    ),
    Kind(
        "workloads: negative",
        "workloads_negative",
        places=(WORKLOADS,),
        **_on_all(r"ValueError: rank {rank}: workloads\[\d+\] is -"),
    ),
    Kind(
        "workloads: too few",
        "workloads_short",
        places=(WORKLOADS,),
        **_on_all(r"ValueError: rank {rank}: workloads has \d entries, batch_size is \d"),
    ),
    Kind("workloads: sums overflow", "workloads_overflow", places=(WORKLOADS,), **_on_all(r"ValueError: .*workloads")),
    Kind(
        "another schema than the first batch's",
        "other_schema",
        places=(BATCH,),
        calls=_STEPS,
        **_on_all(r"rank {rank}: this batch differs from the first: field 'target'"),
    ),
    Kind(
        "another schema than the other ranks'",
        "other_schema",
        places=(BATCH,),
        calls=(0,),
        **_on_all(r"the batches of ranks \d and \d differ: field 'target'"),
    ),
    Kind(
        "other options",
        "other_options",
        places=(OPTIONS,),
        calls=(0,),
        **_on_all(r"options differ: rank \d has .*, rank \d has "),
    ),
    Kind(
        "another plan (a corrupted digest)",
        "other_digest",
        places=(DIGEST,),
        **_on_all(r"ranks \[\d\] made another plan than the rest"),
    ),
    # Around the ranks.
    Kind("a full disk at a checkpoint", "disk_full", None, places=(CHECKPOINT,), calls=(0, 1), uses=(TRAINING,)),
    Kind(
        "a full disk at the last checkpoint",
        "disk_full",
        places=(CHECKPOINT,),
        calls=(2,),
        uses=(TRAINING,),
        **_on_all("the state after step 8 could not be saved"),
    ),
    Kind("clocks that jump", "jump", None, places=(OPTIONS,), calls=(0,), uses=ALL),
    Kind("the store's host killed", "kill_store", None, stores=("agent",), store_fault=True, places=(*PHASES, MODEL)),
    Kind("the store's host stopped", "stop_store", None, stores=("agent",), store_fault=True, places=(*PHASES, MODEL)),
    Kind(
        "the store's host killed, then a rank",
        "kill_store_and_rank",
        MISSING,
        stores=("agent",),
        loses_store=True,
        places=(*PHASES, MODEL),
    ),
    Kind(
        "the store's host stopped, then a rank killed",
        "stop_store_kill_rank",
        MISSING,
        stores=("agent",),
        loses_store=True,
        places=(*PHASES, MODEL),
    ),
    Kind(
        "the store's host stopped before the groups are made",
        "stop_store",
        STORE_LOST,
        stores=("agent",),
        store_fault=True,
        places=(CONSTRUCTION,),
        calls=(0,),
        loses_store=True,
    ),
)
KINDS = {kind.name: kind for kind in _KINDS}
