"""Runs one trial: starts its processes, watches how they end, and compares that with what is expected."""

from __future__ import annotations

import json
import re
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import kinds
from tests.faults.rank import be_agent, be_rank, session_members, signal_session, start_process
from tests.faults.trials import Trial, own_ids

# How much later than the timeout a survivor's program may end.
GRACE_SECONDS = 10.0
# How long Python itself may take to end afterwards, which is long on a busy machine: 0.7 s of a core for all that a
# rank imports, and a dozen ranks may end at a time.
_FINALIZATION_SECONDS = 60.0
# How long a trial may take to come to its fault, and one in which all go on to come to its end.
_LIMIT_SECONDS = 90.0
_POLL_SECONDS = 0.02
_DEV_SHM = Path("/dev/shm")


@dataclass
class RankEnd:
    """How a rank ended."""

    rank: int
    faulty: bool  # whether the fault was put into it
    status: int | None  # exit status; negative, the signal that ended it; None, it hung
    text: str  # type and text of the exception that it raised, or ""
    # From the fault, or for a rank that was stopped from when it went on, to the end of its program: the last function
    # of atexit, or the end of the process where a signal ends it.
    seconds: float
    threads: list[str]  # the shuffler's threads that still ran after its close()


@dataclass
class Result:
    """A trial, and what came of it."""

    trial: Trial
    problems: list[str]  # what was not as expected; nothing if all was
    ranks: list[RankEnd]
    logs: str = ""  # the folder of what the ranks printed; kept where there are problems

    @property
    def worst_seconds(self) -> float:
        """The longest that the program of a rank that raised took to end after the fault; 0.0 where all go on."""
        if self.trial.of_kind.all_go_on:
            return 0.0
        return max((end.seconds for end in self.ranks if end.text), default=0.0)


@dataclass
class _Watched:
    """A rank's process, and what it has said so far."""

    process: Any  # of multiprocessing
    said_in: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    ended_at: float | None = None  # `time.monotonic()`, when its end was noticed

    @property
    def said(self) -> dict[str, dict[str, Any]]:
        """The last event of each name."""
        return {event["event"]: event for event in self.events}

    def listen(self) -> list[dict[str, Any]]:
        """What is new; the last line may be half written."""
        text = self.said_in.read_bytes() if self.said_in.exists() else b""
        known, self.events = len(self.events), [json.loads(line) for line in text.split(b"\n")[:-1]]
        return self.events[known:]


def run_trial(trial: Trial, keep: bool = False) -> Result:
    """Run a trial to its end; no process of it is left afterwards, and no file unless it has problems or `keep`."""
    folder = Path(tempfile.mkdtemp(prefix=f"evenrank-fault-{trial.number}-"))
    (folder / "tmp").mkdir()
    run = _Run(trial, folder)
    try:
        run.start()
        run.watch()
        result = run.judge()
    finally:
        run.clean_up()
    if result.problems or keep:
        result.logs = str(folder)
    else:
        shutil.rmtree(folder)
    return result


class _Run:
    def __init__(self, trial: Trial, folder: Path) -> None:
        self._trial, self._folder = trial, folder
        self._store: Any = None
        self._ranks: list[_Watched] = []
        self._signals: list[tuple[float, int, int]] = []
        self._fault_at: float | None = None
        self._hung: set[int] = set()
        # A killed process of any program may have left a file here, with a number that a rank has got since.
        self._shared_before = _shared_memory()

    def start(self) -> None:
        store_pid = 0
        if self._trial.store == "agent":
            self._store = start_process(self._folder, "store", be_agent, self._folder)
            store_pid = self._store.pid
        for rank in range(self._trial.world_size):
            args = (self._trial, rank, self._folder, store_pid)
            process = start_process(self._folder, f"rank{rank}", be_rank, *args)
            self._ranks.append(_Watched(process, self._folder / f"rank{rank}.jsonl"))

    def watch(self) -> None:
        """Until all ranks have ended, or one has taken too long."""
        started = time.monotonic()
        while any(rank.ended_at is None for rank in self._ranks):
            time.sleep(_POLL_SECONDS)
            self._listen()
            now = time.monotonic()
            for due, number, pid in list(self._signals):
                if now >= due:
                    self._signals.remove((due, number, pid))
                    signal_session(pid, number)
            late = [
                index
                for index, rank in enumerate(self._ranks)
                if rank.ended_at is None and now > self._deadline(rank, started)
            ]
            if late:
                self._hung.update(late)
                self._ask_where()
                break
        self._listen()

    def _deadline(self, rank: _Watched, started: float) -> float:
        if self._fault_at is None or self._trial.of_kind.all_go_on:
            return started + _LIMIT_SECONDS
        if self._signals:  # the fault is still going on
            return started + 2 * _LIMIT_SECONDS
        if "left" in rank.said:
            return rank.said["left"]["at"] + _FINALIZATION_SECONDS
        since = max([self._fault_at, *(event["at"] for event in (rank.said.get("resumed"),) if event)])
        return since + self._trial.timeout + GRACE_SECONDS

    def _listen(self) -> None:
        for rank in self._ranks:
            if rank.ended_at is None and rank.process.exitcode is not None:
                rank.ended_at = time.monotonic()
            for event in rank.listen():
                if event["event"] == "fault":
                    self._fault_at = event["at"]
                self._signals += [(event["at"] + after, number, pid) for after, number, pid in event.get("later", [])]

    def _ask_where(self) -> None:
        """Let those that hang print their threads."""
        for index in self._hung:
            signal_session(self._ranks[index].process.pid, signal.SIGCONT)
            signal_session(self._ranks[index].process.pid, signal.SIGUSR1)
        time.sleep(0.5)

    def judge(self) -> Result:
        trial, kind = self._trial, self._trial.of_kind
        problems = [] if self._fault_at is not None else ["the fault did not happen"]
        ends = [self._end_of(index) for index in range(trial.world_size)]
        for end in ends:
            problems += self._problems_of(end)
        if kind.all_go_on and not problems:
            problems += self._lost_rows()
        for rank in self._ranks:
            if rank.ended_at is not None and session_members(rank.process.pid):
                problems.append(f"{rank.process.name} has left processes behind")
        problems += [f"{path.name} is left" for path in sorted((self._folder / "tmp").iterdir())]
        pids = [rank.process.pid for rank in self._ranks]
        for path in _shared_memory() - self._shared_before:
            if any(re.search(rf"(?<!\d){pid}(?!\d)", path.name) for pid in pids):
                problems.append(f"{path} is left")
        return Result(trial, problems, ends)

    def _end_of(self, index: int) -> RankEnd:
        rank = self._ranks[index]
        ended = rank.ended_at is not None and index not in self._hung
        since = rank.said.get("resumed", {}).get("at", self._fault_at)
        at = rank.said.get("left", {}).get("at", rank.ended_at) if ended else time.monotonic()
        return RankEnd(
            rank=index,
            faulty=index == self._trial.rank and not self._trial.of_kind.store_fault,
            status=rank.process.exitcode if ended else None,
            text=rank.said.get("raised", {}).get("text", ""),
            seconds=0.0 if since is None else round(at - since, 2),
            threads=rank.said.get("closed", {}).get("threads", []),
        )

    def _problems_of(self, end: RankEnd) -> list[str]:
        kind, name = self._trial.of_kind, f"rank {end.rank}"
        expected = kind.faulty if end.faulty else kind.others
        if end.status is None:
            return [f"{name} hung" + (f", after it had said: {end.text}" if end.text else "")]
        if end.faulty and expected is None and not kind.all_go_on:  # it is gone without a word
            return [] if end.status < 0 else [f"{name} ended with status {end.status} instead of by a signal"]
        problems = [f"{name} has left the thread {each}" for each in end.threads]
        if expected is None:
            if end.status or end.text:
                problems.append(f"{name} ended with status {end.status} instead of going on: {end.text}")
            return problems
        if end.status != 1:
            problems.append(f"{name} ended with status {end.status} instead of 1, by its exception")
        patterns = [expected.format(rank=self._trial.rank)]
        if kind.loses_store and (self._trial.hosts_store or (self._trial.store == "agent" and "store" in kind.act)):
            patterns.append(kinds.STORE_LOST)
        if self._trial.use == kinds.TRAINING and not end.faulty:
            patterns.append(kinds.UNNAMED)
        if not any(re.search(pattern, end.text, re.DOTALL) for pattern in patterns):
            problems.append(f"{name} said '{end.text}', expected /{'|'.join(patterns)}/")
        return problems

    def _lost_rows(self) -> list[str]:
        trained = sorted(row for rank in self._ranks for row in rank.said["trained"]["rows"])
        loaded = sorted(row for rank in range(self._trial.world_size) for ids in own_ids(rank) for row in ids)
        return [] if trained == loaded else ["the rows that were trained are not those that were loaded"]

    def clean_up(self) -> None:
        for process in filter(None, [self._store, *(rank.process for rank in self._ranks)]):
            signal_session(process.pid, signal.SIGKILL)
            process.kill()  # also where it has no session yet
            process.join(10)


def _shared_memory() -> set[Path]:
    """The files of shared memory of all processes."""
    return set(_DEV_SHM.iterdir()) if _DEV_SHM.exists() else set()
