"""Random episodes: a few dozen steps of one way to train, with options, switches, evaluations, resets and resumes.

An episode is drawn from its number alone, so that all ranks draw the same one and `python -m tests.soak` can run it
again by itself. What it trains is compared with what its ranks brought, step by step or, in windows, window by window.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.train_pipeline.train_pipelines import EvalPipelineSparseDist

from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.samplers.epoch import EPOCH_START, Place
from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.distributed.options import ShufflerOptions
from commons.pipeline import balanced, balanced_iter, windowed_iter
from tests.helpers.batches.square_shuffler import SquareShuffler
from tests.helpers.models import torchrec_model as models
from tests.helpers.pipelines.shuffled_pipelines import (
    PIPELINES,
    lacking,
    shuffled_ahead,
    staged_pipeline,
    steps_of,
)
from tests.soak.accounts import Steps, most_steps, require_equal
from tests.soak.streams import KINDS, Stream

CPU = torch.device("cpu")
# Without those in which TorchRec frees what a digest would read, and those that the installed TorchRec lacks.
SHARDED = [name for name, made_of in PIPELINES.items() if "free early" not in name and lacking(*made_of) is None]
UNSHARDED = ["base", "base in place"]
AFTER_LEG = ("switch", "reset", "resume", "evaluate", "end")
_EVENTS = {"switch": "iterators switched", "reset": "resets", "resume": "resumes"}


@dataclass(frozen=True)
class Episode:
    """What is run."""

    number: int
    way: str  # "handles", "pipeline", "staged", "windows", "loader"
    kind: str  # of the batches
    pipeline: str  # a name of PIPELINES
    options: dict[str, Any]  # of the shuffler
    identity: bool  # a shuffler that only agrees on the end of data
    window: int  # batches that are planned together, where windows are
    lengths: tuple[int, ...]  # batches of every rank
    legs: tuple[tuple[int, str], ...]  # how many steps, and then what; the last goes to the end
    dtype: int  # see Stream
    seed: int = 0

    @classmethod
    def drawn(cls, seed: int, number: int, ranks: int) -> Episode:
        """The episode of that number."""
        draw = np.random.default_rng([seed, number])
        way = str(draw.choice(["handles", *["pipeline"] * 3, "staged", *["windows"] * 2, "loader"]))
        kind = str(draw.choice(KINDS if way in ("handles", "pipeline") else KINDS[:-1]))
        if way == "pipeline" and draw.random() < 0.6:
            kind = "sample"
        sharded = way in ("pipeline", "windows") and kind == "sample"
        names = SHARDED if sharded else UNSHARDED[:1] if kind == "torchrec" else UNSHARDED
        most = int(draw.integers(10, 160))
        lengths = [most - int(draw.integers(0, 1 + min(most, 9))) for _ in range(ranks)]
        if draw.random() < 0.2:
            lengths[int(draw.integers(ranks))] = 0
        if kind == "torchrec":  # which cannot state padding: all ranks bring rows to every step
            lengths = [most] * ranks
        options = {
            "mode": str(draw.choice(["balance"] * 6 + ["observe", "off"])),
            "partitioner": str(draw.choice(["refined", "refined", "karmarkar_karp", "lpt", "snake"])),
            "transport": str(draw.choice(["auto", "all_to_all", "all_gather"])),
            "equal_size": kind == "torchrec" or bool(draw.random() < 0.6),
            "slack": float(draw.choice([0.0, 0.01, 0.2])),
            "ranks_per_node": [None, 2][int(draw.integers(2))],
            "max_tokens_per_rank": [None, None, 30, 300][int(draw.integers(4))],
            "min_gain": float(draw.choice([0.0, 0.0, 0.05])),
            "verify": bool(draw.random() < 0.3),
            "timeout": 120.0,
        }
        if options["partitioner"] != "refined":
            options["max_tokens_per_rank"] = None
        legs = [(int(draw.integers(1, 12)), str(draw.choice(AFTER_LEG))) for _ in range(int(draw.integers(0, 5)))]
        return cls(
            number=number,
            way=way,
            kind=kind,
            pipeline=str(draw.choice(names)),
            options=options,
            identity=bool(draw.random() < 0.1),
            window=int(draw.integers(1, 9)),
            lengths=tuple(lengths),
            legs=tuple(legs),
            dtype=int(draw.integers(100)),
            seed=seed,
        )

    def __str__(self) -> str:
        return f"episode {self.number}: {self.way}, {self.kind}, {self.pipeline}, window {self.window}, {self.options}"

    def shuffler(self) -> Any:
        """A new one."""
        options = ShufflerOptions(**self.options)
        return IdentityBalancedBatchShuffler(options) if self.identity else SquareShuffler(options)

    def stream(self, part: int = 0) -> Stream:
        """This rank's batches; each part has others."""
        rank = dist.get_rank()
        seed = (self.seed * 1_000_003 + self.number) * 100 + part
        return Stream(self.kind, seed, rank, self.lengths[(rank + part) % len(self.lengths)], self.dtype)


@dataclass
class Totals:
    """What the episodes of a rank add up to; all but the last are the same on every rank."""

    steps: int = 0  # trained, evaluations included
    rows: int = 0  # trained by all ranks, each compared
    episodes: Counter[str] = field(default_factory=Counter)  # of each way
    # Iterator switches, resets, evaluations, resumes, windows that were left half way.
    events: Counter[str] = field(default_factory=Counter)
    moved: int = 0  # steps in which rows changed rank


class Soak:
    """One rank's part: the models, which stay, and the totals."""

    def __init__(self, seed: int) -> None:
        self.totals = Totals()
        self._seed = seed
        self._sharded = models.build_sharded()
        any_batch = models.AnyBatch(lambda batch: self._trained.add(batch))
        self._any = any_batch, torch.optim.SGD(any_batch.parameters(), lr=0.1)
        self._trained = Steps()
        models.head_of(self._sharded[0]).register_forward_pre_hook(lambda _, args: self._trained.add(args[1]))

    def run(self, number: int) -> None:
        """Run one episode; a collective call.

        Raises:
            AssertionError: a row was lost, doubled or changed.
        """
        episode = Episode.drawn(self._seed, number, dist.get_world_size())
        torch.manual_seed(number)
        before = self.totals.steps
        try:
            getattr(self, f"_{episode.way}")(episode)
        except AssertionError:
            raise
        except Exception as error:
            raise RuntimeError(f"{episode}: {type(error).__name__}: {error}") from error
        self.totals.episodes[episode.way] += 1
        assert self.totals.steps > before or not any(episode.lengths)

    def _compare(self, episode: Episode, brought: list[Steps], trained: Steps, keep: int | None = None) -> None:
        """Compare one section: what was read of one source after the other, of which `keep` steps were trained."""
        lengths = [most_steps(each) for each in brought]
        sums = np.concatenate([each.over_ranks(length) for each, length in zip(brought, lengths)])[:keep]
        self._count(require_equal(sums, trained.over_ranks(most_steps(trained)), str(episode)), len(sums))

    def _note_moves(self, stats: Any) -> None:
        self.totals.moved += stats is not None and stats.moved

    def _count(self, rows: int, steps: int) -> None:
        self.totals.rows += rows
        self.totals.steps += steps

    def _handles(self, episode: Episode) -> None:
        """start_shuffle and finish_shuffle by hand, up to three shuffles in flight."""
        brought, trained = Steps(), Steps()
        with contextlib.closing(episode.shuffler()) as shuffler:
            source = brought.noted(episode.stream().batches())
            self._train_ahead(shuffler, source, 1 + episode.window % 3, trained)
        self._compare(episode, [brought], trained)

    def _train_ahead(
        self, shuffler: Any, source: Iterator[Any], ahead: int, trained: Steps, most: int | None = None
    ) -> None:
        """Train with so many shuffles in flight, to the end of the data or at most so many steps."""
        for batch, stats in itertools.islice(shuffled_ahead(shuffler, source, ahead), most):
            trained.add(batch)
            self._note_moves(stats)

    def _model(self, episode: Episode) -> tuple[nn.Module, torch.optim.Optimizer]:
        return self._sharded if episode.kind == "sample" else self._any

    def _pipeline(self, episode: Episode) -> None:
        """A balanced pipeline over several iterators, with resets and resumes, after which training goes on behind."""
        model, optimizer = self._model(episode)
        pipeline_class, options = PIPELINES[episode.pipeline]
        self._trained = trained = Steps()
        part, rest = 0, episode.stream().batches()
        brought, taken = [Steps()], [list[Any]()]  # of this section: sums, and the batches by the leg they were read in
        source = brought[-1].noted(rest, taken[-1])
        with contextlib.ExitStack() as stack:

            def begin() -> Any:
                shuffler = stack.enter_context(contextlib.closing(episode.shuffler()))
                made = balanced(pipeline_class)(model.train(), optimizer, CPU, batch_shuffler=shuffler, **options)
                stack.callback(_end, made)
                return made

            pipeline = begin()
            for steps, then in (*episode.legs, (None, "end")):
                ended = self._progress(pipeline, source, steps)
                if then == "evaluate":
                    self._evaluate(episode, pipeline, model, optimizer, part)
                    self._trained = trained
                if then not in ("switch", "reset", "resume"):
                    continue
                if then == "switch":
                    part += 1
                    rest = episode.stream(part).batches()
                else:
                    pipeline.reset()
                    keep = len(trained.sums)
                    self._compare(episode, brought, trained, keep)
                    # What was read and not trained is read again: from the place that a checkpoint here would have.
                    rest = itertools.chain(_not_trained(taken, brought, keep), () if ended else rest)
                    brought, taken = [], []
                    self._trained = trained = Steps()
                    if then == "resume":
                        stack.close()
                        pipeline = begin()
                self.totals.events[_EVENTS[then]] += 1
                brought.append(Steps())
                taken.append([])
                source = brought[-1].noted(rest, taken[-1])
            self._progress(pipeline, source, None)
            self._compare(episode, brought, trained)
        models.head_of(self._sharded[0]).trained.clear()

    def _progress(self, pipeline: Any, source: Iterator[Any], steps: int | None) -> bool:
        """Train so many steps, or to the end; says whether it is reached."""
        trained = 0
        for _ in steps_of(pipeline, source, steps):
            trained += 1
            self._note_moves(pipeline.last_stats)
        return trained != steps

    def _evaluate(self, episode: Episode, training: Any, model: nn.Module, optimizer: Any, part: int) -> None:
        """An evaluation between two steps, in a pipeline of its own, shuffled or not."""
        _detach(training)
        stream = episode.stream(50 + part)
        brought = Steps()
        self._trained = evaluated = Steps()
        sharded = episode.kind == "sample" and episode.pipeline not in UNSHARDED
        pipeline_class = EvalPipelineSparseDist if sharded else PIPELINES["base"][0]
        # Without padding data would end for all ranks where the first one has none.
        batches = 2 if episode.kind == "torchrec" else 1 + stream.rank
        with contextlib.closing(SquareShuffler() if episode.dtype % 2 else IdentityBalancedBatchShuffler()) as shuffler:
            evaluator = balanced(pipeline_class)(model.eval(), optimizer, CPU, batch_shuffler=shuffler)
            self._progress(evaluator, brought.noted(itertools.islice(stream.batches(), batches)), None)
            _end(evaluator)
        model.train()
        self._compare(episode, [brought], evaluated)
        self.totals.events["evaluations"] += 1
        if hasattr(training, "attach"):
            training.attach(model)

    def _staged(self, episode: Episode) -> None:
        """TorchRec's StagedTrainPipeline, a new one for each iterator."""
        brought, trained = [], Steps()
        with contextlib.closing(episode.shuffler()) as shuffler:
            for part in range(1 + len(episode.legs) // 2):
                pipeline = staged_pipeline(shuffler)
                brought.append(Steps())
                source = balanced_iter(brought[-1].noted(episode.stream(part).batches()), shuffler)
                while (batch := pipeline.progress(source)) is not None:
                    trained.add(batch)
                    self._note_moves(shuffler.last_stats)
        self._compare(episode, brought, trained)

    def _windows(self, episode: Episode) -> None:
        """Windows in front of a plain loop or a stock pipeline, left half way and resumed in the middle of a window."""
        stream = episode.stream()
        steps = max(episode.lengths)
        first = episode.legs[0][0] if episode.legs else steps
        trained, window = Steps(), episode.window
        self._window_steps(episode, stream.batches(), 0, first, trained)
        if len(trained.sums) < steps:  # resumed: the unfinished window is read and exchanged again
            begin, done = first - first % window, first % window
            self._window_steps(episode, stream.batches(begin), done, steps, trained)
            self.totals.events["windows left and resumed"] += 1
        brought = Steps()
        deque(brought.noted(stream.batches()), maxlen=0)
        sums = [each.over_ranks(steps, window) for each in (brought, trained)]
        assert len(trained.sums) == steps, f"{episode}: {steps} steps were brought and {len(trained.sums)} trained"
        self._count(require_equal(sums[0], sums[1], str(episode)), steps)

    def _window_steps(self, episode: Episode, batches: Iterator[Any], done: int, most: int, trained: Steps) -> None:
        """Train at most so many steps of windows, without the first `done`."""
        with (
            contextlib.closing(episode.shuffler()) as shuffler,
            contextlib.closing(windowed_iter(batches, shuffler, episode.window)) as windows,
        ):
            for _ in range(done):
                next(windows)
                windows.take_stats()
            rest = itertools.islice(windows, most)
            if episode.number % 2:  # a loop of the user's own
                for batch in rest:
                    trained.add(batch)
                    self._note_moves(windows.take_stats())
                return
            # TorchRec's own pipeline, which trains batches that need no further shuffle
            model, optimizer = self._model(episode)
            self._trained = trained
            pipeline_class, options = PIPELINES[episode.pipeline]
            pipeline = pipeline_class(model.train(), optimizer, CPU, **options)
            deque(steps_of(pipeline, rest), maxlen=0)
            _detach(pipeline)
        models.head_of(self._sharded[0]).trained.clear()

    def _loader(self, episode: Episode) -> None:
        """A loader of the package, resumed at the place behind what was trained, batch by batch."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        num_batches = max(1, max(episode.lengths))

        def make() -> Any:
            return get_data_loader(
                "random",
                batch_size=4,
                max_history_seqlen=20,
                num_batches=num_batches,
                rank=rank,
                world_size=ranks,
                seed=episode.number,
                shuffle=True,
            )

        brought, trained = Steps(), Steps()
        deque(brought.noted(make()), maxlen=0)
        place: Place = EPOCH_START
        stops = np.cumsum([steps for steps, _ in episode.legs]).tolist()
        for stop in [*(stop for stop in stops if stop < num_batches), num_batches]:
            loader = make()
            loader.sampler.set_epoch(0)
            loader.sampler.start_at(*place)
            with contextlib.closing(episode.shuffler()) as shuffler:
                self._train_ahead(shuffler, iter(loader), 2, trained, stop - len(trained.sums))
            place = loader.sampler.place_after(len(trained.sums), 0, EPOCH_START)
            self.totals.events["loaders resumed"] += 1
        self._compare(episode, [brought], trained)


def _detach(pipeline: Any) -> None:
    """Give the model its own forward pass back, as pipelines of sharded models can."""
    if hasattr(pipeline, "detach"):
        pipeline.detach()


def _end(pipeline: Any) -> None:
    """Drop what a pipeline has read, and give the model its own forward pass back."""
    pipeline.reset()
    _detach(pipeline)


def _not_trained(taken: list[list[Any]], brought: list[Steps], keep: int) -> list[Any]:
    """This rank's batches behind the first `keep` steps of all ranks; a collective call."""
    left = []
    for batches, steps in zip(taken, brought):
        length = most_steps(steps)
        left += batches[max(0, keep) :]
        keep -= length
    return left
