"""Training, resets, evaluations, checkpoints and resumes in any order, on two ranks: each step trains its own rows."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torchrec.distributed.train_pipeline.train_pipelines import EvalPipelineSparseDist

from commons.datasets.loader.data_loader import get_data_loader
from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.distributed.options import ShufflerOptions
from commons.pipeline import balanced, windowed_iter
from commons.trainer.checkpoint.state import load_state, read_entries, state_to_save
from tests.helpers import models
from tests.helpers.fuzzing import fuzzed
from tests.helpers.pipelines import PIPELINES
from tests.helpers.rank_pool import RankPool
from tests.helpers.square_shuffler import SquareShuffler
from tests.soak.accounts import row_digests
from tests.soak.episodes import AnyBatch
from tests.soak.streams import Stream

CPU = torch.device("cpu")
# Sharded tables take batches of one type.
SHARDED = ("sparse", "sparse in place", "lite", "fused")
WAYS = ("base", "base in place", "windows", *SHARDED)


@dataclass(frozen=True)
class Setup:
    """What is trained."""

    way: str  # a name of PIPELINES, or windows in front of a plain loop
    seed: int  # of the data
    lengths: tuple[int, int]  # batches of either rank in an epoch; a loader's are as many on both
    from_loader: bool  # whether a ResumableLoader reads them; else a stream that can begin anywhere
    window: int  # batches that are planned together, where windows are


class Training:
    """One rank's part: model, shuffler, pipeline, and the place in the data."""

    def __init__(self) -> None:
        plain = AnyBatch()
        self._models = {
            True: models.build_sharded(),
            False: (plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)),
        }
        self._rows: list[list[int]] = []  # of each batch that a model has seen
        models.head_of(self._models[True][0]).register_forward_pre_hook(lambda _, args: self._note(args[1]))
        plain.register_forward_pre_hook(lambda _, args: self._note(args[0]))
        self._shuffler: Any = None
        self._pipeline: Any = None
        self._windows: Any = None

    def begin(self, setup: Setup, epoch: int = 0, done: int = 0) -> None:
        """A new shuffler and pipeline, at a place in the data."""
        self._setup, self._epoch, self._done = setup, epoch, done
        self._model, self._optimizer = self._models[setup.way in SHARDED]
        self._shuffler = SquareShuffler(ShufflerOptions(timeout=30))
        if setup.way != "windows":
            kind, options = PIPELINES[setup.way]
            self._pipeline = balanced(kind)(
                self._model.train(), self._optimizer, CPU, batch_shuffler=self._shuffler, **options
            )
        self._open_source()

    def rows_of_epoch(self) -> list[list[int]]:
        """This rank's rows in each step of the epoch, by a reader of its own."""
        return [row_digests(batch).tolist() for batch in self._batches(0)]

    def train(self) -> list[int] | None:
        """One step; the rows that this rank trained in it, or None at the end of an epoch."""
        if self._setup.way == "windows":
            batch = next(self._source, None)
            if batch is not None:
                loss, _ = self._model(batch)
                loss.backward()
                self._optimizer.step()
        else:
            try:
                self._pipeline.progress(self._source)
            except StopIteration:
                pass
        if not self._rows:
            self._epoch, self._done = self._epoch + 1, 0
            self._open_source()
            return None
        self._done += 1
        return self._rows.pop()

    def reset(self) -> None:
        """Drop what is read and not trained, and read it again."""
        if self._pipeline is not None:
            self._pipeline.reset()
        self._open_source()

    def evaluate(self, seed: int, lengths: tuple[int, int]) -> tuple[list[int], list[int]]:
        """An evaluation between two steps; the rows that this rank brought, and those that it evaluated."""
        sharded = self._setup.way in SHARDED
        stream = Stream("sample" if sharded else "rich", seed, dist.get_rank(), lengths[dist.get_rank()])
        shuffler = SquareShuffler() if seed % 2 else IdentityBalancedBatchShuffler()
        if hasattr(self._pipeline, "detach"):
            self._pipeline.detach()
        kind = EvalPipelineSparseDist if sharded else PIPELINES["base"][0]
        evaluator = balanced(kind)(self._model.eval(), self._optimizer, CPU, batch_shuffler=shuffler)
        source = stream.batches()
        try:
            for _ in itertools.count():
                evaluator.progress(source)
        except StopIteration:
            pass
        finally:
            evaluator.reset()
            if hasattr(evaluator, "detach"):
                evaluator.detach()
            shuffler.close()
            self._model.train()
        if hasattr(self._pipeline, "attach"):
            self._pipeline.attach(self._model)
        brought = [digest for batch in stream.batches() for digest in row_digests(batch).tolist()]
        evaluated, self._rows = list(itertools.chain(*self._rows)), []
        return brought, evaluated

    def checkpoint(self, folder: Path) -> int:
        """Save the model and the place in the data; a checksum of this rank's state."""
        dcp.save(state_to_save(self._model, self._optimizer), checkpoint_id=folder)
        place = self._loader_state(self._done) if self._setup.from_loader else {}
        own = {"epoch": self._epoch, "done": self._done, "loader": place}
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(own))
        return self._checksum()

    def resume(self, setup: Setup, folder: Path) -> int:
        """Go on from a checkpoint, with a new shuffler and pipeline; the checksum of what was loaded."""
        self.close()
        place = json.loads((folder / f"rank{dist.get_rank()}.json").read_text())
        self.begin(setup, place["epoch"], place["done"])
        load_state(folder, read_entries(folder), self._model, self._optimizer)
        if setup.from_loader:
            assert place["loader"] == self._loader_state(self._done)
        return self._checksum()

    def close(self) -> None:
        """End the shuffler; what is in flight is dropped."""
        if self._windows is not None:
            self._windows.close()
        if self._pipeline is not None:
            self._pipeline.reset()
            if hasattr(self._pipeline, "detach"):
                self._pipeline.detach()
        if self._shuffler is not None:
            self._shuffler.close()
        self._windows = self._pipeline = self._shuffler = None
        models.head_of(self._models[True][0]).trained.clear()

    def _open_source(self) -> None:
        if self._windows is not None:
            self._windows.close()
            self._windows = None
        self._source: Iterator[Any] = self._batches(self._done)
        if self._setup.way == "windows":
            within = self._done % self._setup.window  # the unfinished window is read and exchanged again
            batches = self._batches(self._done - within)
            self._windows = self._source = windowed_iter(batches, self._shuffler, self._setup.window)
            for _ in range(within):
                next(self._source)

    def _batches(self, done: int) -> Iterator[Any]:
        """This rank's batches of the epoch behind so many steps."""
        if not self._setup.from_loader:
            setup, rank = self._setup, dist.get_rank()
            kind = "sample" if setup.way in SHARDED else "rich"
            return Stream(kind, setup.seed + self._epoch, rank, setup.lengths[rank]).batches(done)
        loader = self._loader()
        loader.load_state_dict(json.loads(json.dumps(self._loader_state(done))))
        return iter(loader)

    def _loader(self) -> Any:
        return get_data_loader(
            "random",
            batch_size=4,
            max_history_seqlen=20,
            num_batches=max(1, *self._setup.lengths),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            seed=self._setup.seed,
            shuffle=True,
        )

    def _loader_state(self, done: int) -> dict[str, Any]:
        """What the loader's state_dict() says behind so many steps, however many batches were read ahead."""
        loader = self._loader()
        loader.load_state_dict({"epoch": self._epoch, "row": 0, "steps": 0, "sampler": loader.sampler.identity()})
        batches = iter(loader)
        for _ in range(done):
            next(batches)
        return loader.state_dict()

    def _note(self, batch: Any) -> None:
        self._rows.append(row_digests(batch).tolist())

    def _checksum(self) -> int:
        weights = models.weights_of(self._model)
        slots = [self._optimizer.state[each].get("momentum_buffer") for each in self._optimizer.state]
        tensors = [*weights.values(), *(slot for slot in slots if slot is not None)]
        return zlib.crc32(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors))


# A rank's own, as long as the rank is.
_OF_RANK: dict[str, Training] = {}


def _called(name: str, *arguments: Any) -> Any:
    return getattr(_OF_RANK.setdefault("training", Training()), name)(*arguments)


@dataclass
class Place:
    """Where training is."""

    setup: Setup  # what is trained
    epoch: int = 0  # since the setup has begun
    done: int = 0  # steps trained in it
    rows: list[list[int]] = field(default_factory=list)  # of each step of the epoch, on both ranks
    open: list[int] = field(default_factory=list)  # rows trained of a window that is not done


class Trainings(RuleBasedStateMachine):
    """What both ranks are told to do, and the rows that each step has to train."""

    pool: RankPool
    folder: Path
    checkpoints = itertools.count()

    def say(self, name: str, *arguments: Any) -> list[Any]:
        """Call it on both ranks."""
        return self.pool.run(_called, name, *arguments, timeout=50)

    @initialize(
        way=st.sampled_from(WAYS),
        seed=st.integers(0, 10**6),
        lengths=st.tuples(st.integers(0, 5), st.integers(0, 5)),
        from_loader=st.booleans(),
        window=st.integers(1, 3),
    )
    def begin(self, way: str, seed: int, lengths: tuple[int, int], from_loader: bool, window: int) -> None:
        self.place = Place(Setup(way, seed, lengths, from_loader and way not in SHARDED, window))
        self.closed = False
        self.saved: list[tuple[Place, Path, list[int]]] = []
        self.say("begin", self.place.setup)
        self._learn_rows()

    def _learn_rows(self) -> None:
        steps = itertools.zip_longest(*self.say("rows_of_epoch"), fillvalue=[])
        self.place.rows = [sorted(itertools.chain(*of_ranks)) for of_ranks in steps]

    @precondition(lambda self: not self.closed)
    @rule(steps=st.integers(1, 4))
    def train(self, steps: int) -> None:
        place = self.place
        for _ in range(steps):
            got = self.say("train")
            if place.done == len(place.rows):
                assert got == [None, None]
                place.epoch, place.done = place.epoch + 1, 0
                self._learn_rows()
                return
            assert None not in got, f"data ended after {place.done} of {len(place.rows)} steps on a rank: {got}"
            place.done += 1
            place.open += got[0] + got[1]
            together = place.setup.window if place.setup.way == "windows" else 1
            if place.done % together == 0 or place.done == len(place.rows):
                first = (place.done - 1) // together * together
                assert sorted(place.open) == sorted(itertools.chain(*place.rows[first : place.done]))
                place.open = []

    @precondition(lambda self: not self.closed)
    @rule()
    def reset(self) -> None:
        self.say("reset")

    @precondition(lambda self: not self.closed)
    @rule(seed=st.integers(0, 10**6), lengths=st.tuples(st.integers(0, 3), st.integers(0, 3)))
    def evaluate(self, seed: int, lengths: tuple[int, int]) -> None:
        brought, evaluated = zip(*self.say("evaluate", seed, lengths))
        assert sorted(itertools.chain(*brought)) == sorted(itertools.chain(*evaluated))

    @precondition(lambda self: not self.closed and len(self.saved) < 3)
    @rule()
    def checkpoint(self) -> None:
        folder = self.folder / f"checkpoint{next(self.checkpoints)}"
        folder.mkdir()
        copy = replace(self.place, open=list(self.place.open))
        self.saved.append((copy, folder, self.say("checkpoint", folder)))

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 2))
    def resume(self, which: int) -> None:
        place, folder, checksums = self.saved[which % len(self.saved)]
        assert self.say("resume", place.setup, folder) == checksums
        self.place = replace(place, open=list(place.open))
        self.closed = False

    @precondition(lambda self: not self.closed)
    @rule()
    def close(self) -> None:
        self.say("close")
        self.closed = True

    @precondition(lambda self: self.closed)
    @rule()
    def go_on(self) -> None:
        """A new shuffler and pipeline where the closed ones were, without a checkpoint."""
        self.say("begin", self.place.setup, self.place.epoch, self.place.done)
        self.closed = False

    def teardown(self) -> None:
        """Both ranks close what they have."""
        if hasattr(self, "place"):
            self.say("close")


@pytest.fixture
def machine(tmp_path):
    """The machine, with ranks of this test alone, which keep their models between calls."""
    pool = RankPool(2, most_groups=10_000)
    yield type("TrainingsOnRanks", (Trainings,), {"pool": pool, "folder": tmp_path})
    pool.stop()


@pytest.mark.slow
def test_training_in_any_order(machine):
    for way in ("base", "windows", "sparse"):  # every rule, whatever is drawn
        calls = machine()
        calls.begin(way, 1, (4, 5), True, 2)
        calls.train(3)
        calls.checkpoint()
        calls.train(1)
        calls.evaluate(3, (2, 1))
        calls.reset()
        calls.train(3)
        calls.close()
        calls.resume(0)
        assert calls.place.done == 3
        calls.train(4)
        calls.teardown()
    run_state_machine_as_test(machine, settings=settings(fuzzed(3, many=200), stateful_step_count=12))
