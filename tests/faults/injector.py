"""Puts the fault of a trial into this rank, at its place."""

from __future__ import annotations

import functools
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.engine.shuffle_session import ShuffleSession
from commons.distributed.exchange.row_exchange import RowExchange
from commons.perf_model.shuffle_plan import ShufflePlan, ShufflePlanner
from tests.faults import acts, kinds
from tests.faults.trials import Trial


class Injector:
    """Watches the places of a rank and acts once, if the rank is the faulty one.

    `store_pid` hosts the store, and the file `said` tells the supervisor what happens here.
    """

    def __init__(self, trial: Trial, rank: int, store_pid: int, said: Path) -> None:
        self.trial, self.rank, self.store_pid = trial, rank, store_pid
        self._said = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._calls: Counter[str] = Counter()

    def say(self, event: str, **details: Any) -> None:
        """Tell the supervisor; the line is there even if the process ends in the next moment."""
        line = json.dumps({"event": event, "at": time.monotonic()} | details) + "\n"
        os.write(self._said, line.encode(errors="backslashreplace"))

    def at(self, place: str, value: Any = None) -> Any:
        """The rank is at a place, where it has a value; returns the value to go on with."""
        call = self._calls[place]
        self._calls[place] += 1
        trial = self.trial
        if (self.rank, place, call) != (trial.rank, trial.place, trial.call):
            return value
        self.say("fault")
        return getattr(acts, trial.of_kind.act)(self, value)

    def install(self) -> None:
        """Put itself around the phases of a shuffle."""
        self._around(ShuffleSession, "_gather", before=kinds.BEFORE_GATHER)
        self._around(ShuffleSession, "_try_plan", before=kinds.BEFORE_PLAN)
        self._around(ShuffleSession, "exchange_rows", before=kinds.BEFORE_EXCHANGE, after=kinds.AFTER_EXCHANGE)
        self._around(RowExchange, "send_rows", after=kinds.IN_EXCHANGE)
        self._around(RowExchange, "pack", before=kinds.PACK)
        self._around(ShufflePlanner, "plan_messages", after=kinds.PLAN)
        self._around(ShufflePlan, "digest", after=kinds.DIGEST)
        self._around(FileSystemWriter, "write_data", before=kinds.CHECKPOINT)

    def watch_worker(self, shuffler: BaseTaskBalancedBatchShuffler) -> None:
        """Make the worker thread's turn for a job a place, outside of the job."""
        worker = shuffler.engine._worker
        worker._jobs = _WatchedQueue(worker._jobs, self)  # type: ignore[assignment]

    def _around(self, owner: type, name: str, before: str | None = None, after: str | None = None) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                self.at(before)
            result = original(*args, **kwargs)
            return result if after is None else self.at(after, result)

        setattr(owner, name, watched)


class _WatchedQueue:
    """A worker's queue, whose `get` is a place."""

    def __init__(self, jobs: Any, injector: Injector) -> None:
        self._jobs, self._injector = jobs, injector
        self.put = jobs.put

    def get(self, *args: Any, **kwargs: Any) -> Any:
        return self._injector.at(kinds.WORKER, self._jobs.get(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jobs, name)
