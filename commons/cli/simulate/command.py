"""`evenrank simulate`: what balancing would gain on the user's data, before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import tyro

from commons.checks import require_at_least
from commons.cli.answer import ON_TERMINAL, AnswerOutputs
from commons.cli.simulate.answer import answer_of
from commons.cli.simulate.lengths import LengthReading, Lengths
from commons.cli.simulate.simulation import OF_LAYERS, Source, simulate
from commons.distributed.options import ShufflerOptions
from commons.perf_model.gain import LoadedRows, StepCost
from commons.perf_model.task_estimator import AttentionTask, HSTUAttentionTask, SelfAttentionTask, training_flops

# Steps and windows if none are given; the batches of a config have to be read.
_STEPS, _STEPS_OF_LENGTHS = 50, 128
_WINDOWS_OF_LENGTHS = (2, 4, 8)
# Rows of all steps together, a few arrays of which fit a host; and rows that describe lengths without an end.
_MOST_ROWS, _SOME_ROWS = 1 << 28, 200_000


@dataclass
class RowCost:
    """What a row of a given length costs: a model's dimensions."""

    _remedy: ClassVar[str] = ""  # what else to do about rows that are too long

    task: Literal["hstu", "transformer", "tokens"] = "hstu"
    """What a row costs: operations of HSTU or transformer layers (SID-GR, language models), or tokens."""

    hidden_size: int = 256
    """Width of the model."""

    num_heads: int = 4
    """Attention heads."""

    head_dim: int = 64
    """Width of a head."""

    num_layers: int = 8
    """Layers."""

    value_dim: int | None = None
    """Width of a head of u and v, with --task hstu; None for --head-dim."""

    concat_ux: bool = False
    """The output projection reads [u, x, y], with --task hstu, as in generative-recommenders; y alone otherwise."""

    max_attn_len: int | None = None
    """Largest distance at which a token sees another one, with --task hstu; None for no window."""

    tokens_per_item: int = 1
    """Tokens that the model computes per unit of length; 2 for HSTU with interleaved actions."""

    extra_tokens: int = 0
    """Tokens of every row besides, such as its context."""

    def check(self) -> None:
        """Raise ValueError for a value out of its range."""
        require_at_least("tokens_per_item", self.tokens_per_item, 1)
        require_at_least("extra_tokens", self.extra_tokens, 0)
        if self.task != "hstu" and (self.value_dim, self.concat_ux, self.max_attn_len) != (None, False, None):
            raise ValueError(
                f"task is {self.task!r}; value_dim, concat_ux and max_attn_len are dimensions of HSTU: leave them out, "
                "or give --task hstu"
            )
        self.model()

    def model(self) -> AttentionTask | None:
        """What counts the operations; None where tokens are the cost."""
        if self.task == "tokens":
            return None
        dimensions = self.hidden_size, self.num_heads, self.head_dim, self.num_layers
        if self.task == "hstu":
            return HSTUAttentionTask(
                *dimensions, value_dim=self.value_dim, concat_ux=self.concat_ux, max_attn_len=self.max_attn_len
            )
        return SelfAttentionTask(*dimensions)

    def tokens(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens that the model computes, int64 as the lengths."""
        return lengths * self.tokens_per_item + self.extra_tokens

    def costs(self, tokens: np.ndarray) -> np.ndarray:
        """What rows of so many tokens cost, int64 as the tokens."""
        model = self.model()
        if model is None:
            return tokens
        try:
            return model.get_workloads(tokens)
        except ValueError:
            raise ValueError(
                f"a row of {int(tokens.max()):,} tokens can cost more than 2**63 operations, which no plan counts: "
                f"check the lengths{self._remedy}"
            ) from None


@dataclass
class LengthOptions(RowCost, LengthReading):
    """What belongs to `--lengths`."""

    _remedy: ClassVar[str] = ", or cut rows by --max-length"

    batch_size: int = 32
    """Rows of a rank in a step."""

    max_length: int | None = None
    """Longer rows are cut to it; None for no limit."""

    seed: int = 0
    """Of the random order, and of draws."""

    bytes_per_token: int = 8
    """What a token takes on the wire: 8 for an ID, 16 with an action or a time."""

    peak_tflops: float | None = None
    """Operations per second of a device at most, in 10^12; gives milliseconds."""

    mfu: float = 0.4
    """The part of --peak-tflops that training reaches, above 0 and at most 1."""

    link_gbps: float | None = None
    """What a rank sends per second, in 10^9 bits; gives milliseconds of the exchange."""

    def given(self) -> list[str]:
        """Flags of the options that are not at their default."""
        given = (item.name for item in fields(self) if getattr(self, item.name) != item.default)
        return ["--" + name.replace("_", "-") for name in given]

    def check(self) -> None:
        """Raise ValueError for a value out of its range."""
        super().check()
        for name in ("batch_size", "bytes_per_token"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("seed", self.seed, 0)
        if self.max_length is not None:
            require_at_least("max_length", self.max_length, 1)
        for name in ("peak_tflops", "link_gbps"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                raise ValueError(f"{name} is {value}; rates are positive: correct it")
        if not 0 < self.mfu <= 1:
            raise ValueError(f"mfu is {self.mfu}; it is the part of the peak that is reached, in (0, 1]: correct it")
        if self.task == "tokens" and self.peak_tflops is not None:
            raise ValueError("task is 'tokens' and peak_tflops is given; tokens are no operations: choose another task")

    def tokens(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens that the model computes, int64 as the lengths, which are cut first."""
        return super().tokens(lengths if self.max_length is None else np.minimum(lengths, self.max_length))

    def read(self, source: str) -> Source:
        """The rows of a file or a distribution; ValueError for an option out of its range, and as `find`."""
        self.check()
        return self.deal(self.find(source))

    def deal(self, lengths: Lengths) -> Source:
        """Rows of these lengths, row i of all on rank i modulo the ranks."""

        def load(num_ranks: int, steps: int) -> LoadedRows:
            count = steps * num_ranks * self.batch_size
            if count > _MOST_ROWS:
                raise ValueError(
                    f"{steps} steps of {num_ranks} ranks × {self.batch_size} are {count:,} rows; at most "
                    f"{_MOST_ROWS:,} are looked at: lower --steps"
                )
            tokens = self.tokens(lengths.take(count, np.random.default_rng(self.seed)))
            return LoadedRows.in_turn(self.costs(tokens), tokens, num_ranks, self.batch_size)

        model, cost = self.model(), None
        if self.peak_tflops is not None:
            cost = StepCost(training_flops(1) / (self.peak_tflops * self.mfu * 1e12) * 1e3)
        described = lengths.take(lengths.num_rows or _SOME_ROWS, np.random.default_rng(self.seed))
        tokens = self.tokens(described)
        return Source(
            name=lengths.name,
            load=load,
            num_rows=lengths.num_rows,
            batch_size=self.batch_size,
            tokens=tokens,
            costs=self.costs(tokens),
            model=model,
            remedy="lower --ranks or --batch-size, or give --with-replacement if they are a sample",
            of_what=OF_LAYERS if model is not None else "in tokens of the slowest rank",
            cost=cost,
            bytes_per_token=self.bytes_per_token,
            link_gbps=self.link_gbps,
        )


@dataclass
class Simulate:
    r"""Say what balancing would gain, from the lengths of rows or from a config; nothing is trained.

    With --lengths every way of dealing rows to ranks is compared, and one is advised; with --config the batches of a
    training run are read. With a calibration the gain is that of a whole step; without one it is that of the largest
    load, which fixed costs of a step make smaller.

    Distributions are zipf:EXPONENT:LONGEST, lognormal:MEDIAN:SIGMA and lognormal:MEDIAN:SIGMA:LONGEST.

    For example:
      evenrank simulate --lengths lengths.csv --ranks 8 64 --batch-size 32
      evenrank simulate --lengths lognormal:130:1.4:8192 --ranks 64 256 --html gain.html
      evenrank simulate --lengths lognormal:130:1.4:8192 --ranks 64 --json
      evenrank simulate --lengths data.parquet --column history --max-length 4096
      evenrank simulate --lengths events.parquet --group-by user_id
      evenrank simulate --config hstu/configs/demo.toml
      evenrank simulate --config my.toml --ranks 64 --window 1 2 4 8
      evenrank simulate --config my.toml --ranks 16 64 256 --figure gain.png \
          --shuffler.calibration h200.toml
    """

    config: Path | None = None
    """The TOML or YAML file of a training run: model, data set and batch size."""

    lengths: str | None = None
    """A parquet, csv, npy or jsonl file of lengths or of a histogram (columns length and count), or a distribution."""

    model: str | None = None
    """With --config: package whose module `recipe` names a Recipe, RECIPE. None: hstu, or sid_gr for semantic IDs."""

    ranks: tuple[int, ...] = (8, 16, 64)
    """Numbers of ranks to look at."""

    steps: int | None = None
    """Steps to plan for each of them; fewer where the data are shorter. None: 50, with --lengths 128."""

    window: tuple[int, ...] | None = None
    """Batches of every rank that are planned together, one or several numbers. None: 1, with --lengths 2, 4 and 8."""

    shuffler: ShufflerOptions = field(default_factory=ShufflerOptions)
    """With --config: how batches are balanced."""

    of_lengths: Annotated[LengthOptions, tyro.conf.arg(name="--lengths"), tyro.conf.OmitArgPrefixes] = field(
        default_factory=LengthOptions
    )
    """With --lengths: how they are read, and what a row costs."""

    of_output: Annotated[AnswerOutputs, tyro.conf.arg(name="output"), tyro.conf.OmitArgPrefixes] = ON_TERMINAL
    """Where the answer goes."""

    def run(self) -> None:
        """Read, plan, print, draw."""
        if (self.config is None) == (self.lengths is None):
            raise ValueError(
                f"--config is {self.config} and --lengths is {self.lengths}; simulate needs one of them, which says "
                "what the rows are: --lengths, a file or a distribution, or --config, that of a training run"
            )
        self._refuse_options_of_the_other()
        steps = self.steps if self.steps is not None else _STEPS if self.lengths is None else _STEPS_OF_LENGTHS
        windows = self.window
        if windows is None:
            windows = () if self.lengths is None else tuple(each for each in _WINDOWS_OF_LENGTHS if each <= steps)
        if not self.ranks or min(self.ranks) < 2 or steps < 1:
            raise ValueError(
                f"ranks is {self.ranks} and steps is {steps}; balancing needs 2 ranks and a step: raise them"
            )
        if min(windows, default=1) < 1 or max(windows, default=1) > steps:
            raise ValueError(
                f"window is {windows} and steps is {steps}; a window is planned over 1 step to all of them: "
                f"give --window from 1 to {steps}, or more --steps"
            )
        calibration = None if self.shuffler.calibration is None else Path(self.shuffler.calibration)
        lengths = Path(self.lengths) if self.lengths else None
        inputs = {"--config": self.config, "--lengths": lengths, "--shuffler.calibration": calibration}
        self.of_output.require(inputs)
        self.of_output.give(answer_of(simulate(self._source(steps), self.ranks, windows, steps)))

    def _refuse_options_of_the_other(self) -> None:
        """Raise ValueError for options of --lengths beside --config, and the other way round."""
        given = [("--model", self.model is not None), ("--shuffler", self.shuffler != ShufflerOptions())]
        wrong, theirs, ours = [name for name, is_given in given if is_given], "--config", "--lengths"
        if self.lengths is None:
            wrong, theirs, ours = self.of_lengths.given(), ours, theirs
        if wrong:
            raise ValueError(f"{', '.join(wrong)} belongs to {theirs}, and {ours} is given: leave it out")
        if self.shuffler.mode != "balance":
            raise ValueError(
                f"shuffler.mode is {self.shuffler.mode!r}; a simulation says what balancing would gain: leave it out"
            )

    def _source(self, steps: int) -> Source:
        if self.lengths is not None:
            return self.of_lengths.read(self.lengths)
        # Imported here: it needs TorchRec, and lengths alone do not.
        from commons.cli.recipes import read_config_rows

        assert self.config is not None  # noqa: S101  one of them is given
        return read_config_rows(self.config, self.model, self.shuffler, max(self.ranks) * steps)
