"""`evenrank simulate`: predicts what balancing would gain on the user's data, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import tyro

from commons.checks import Count, Natural, require_field_types
from commons.cli.answer import ON_TERMINAL, AnswerOutputs
from commons.cli.simulate.answer import answer_of
from commons.cli.simulate.lengths import LengthReading, Lengths
from commons.cli.simulate.simulation import OF_LAYERS, Source, describe_task, simulate
from commons.distributed.options import ShufflerOptions
from commons.perf_model.gain import LoadedRows, StepCost
from commons.perf_model.task_estimator import AttentionTask, HSTUAttentionTask, SelfAttentionTask, training_flops

# Default numbers of steps, with a config (fewer, because batches have to be read) and with lengths; default windows.
_STEPS, _STEPS_OF_LENGTHS = 50, 128
_WINDOWS_OF_LENGTHS = (2, 4, 8)
# Most rows of all steps, so that a few arrays fit into memory; and rows that are drawn to describe a distribution.
_MOST_ROWS, _SOME_ROWS = 1 << 28, 200_000


@dataclass
class RowCost:
    """The cost of a row by its length, from a model's dimensions."""

    _remedy: ClassVar[str] = ""  # another remedy for rows that are too long

    # The cost of a row: operations of HSTU or transformer layers (SID-GR, language models), or tokens.
    task: Literal["hstu", "transformer", "tokens"] = "hstu"
    hidden_size: int = 256  # width of the model
    num_heads: int = 4  # number of attention heads
    head_dim: int = 64  # width of a head
    num_layers: int = 8  # number of layers
    value_dim: int | None = None  # with --task hstu: width of a head of u and v; None for --head-dim
    # With --task hstu: the output projection reads [u, x, y], as in generative-recommenders, instead of only y.
    concat_ux: bool = False
    # With --task hstu: largest distance over which tokens attend to each other; None for no window.
    max_attn_len: int | None = None
    tokens_per_item: Count = 1  # tokens that the model computes per unit of length; 2 for HSTU with interleaved actions
    extra_tokens: Natural = 0  # additional tokens of every row, such as its context

    def check(self) -> None:
        """Raise ValueError for an option out of its range."""
        require_field_types(self)
        if self.task != "hstu" and (self.value_dim, self.concat_ux, self.max_attn_len) != (None, False, None):
            raise ValueError(
                f"task is {self.task!r}; value_dim, concat_ux and max_attn_len are dimensions of HSTU: leave them out, "
                "or give --task hstu"
            )
        self.model()

    def model(self) -> AttentionTask | None:
        """The model whose operations are counted; None if the cost is the number of tokens."""
        if self.task == "tokens":
            return None
        dimensions = self.hidden_size, self.num_heads, self.head_dim, self.num_layers
        if self.task == "hstu":
            return HSTUAttentionTask(
                *dimensions, value_dim=self.value_dim, concat_ux=self.concat_ux, max_attn_len=self.max_attn_len
            )
        return SelfAttentionTask(*dimensions)

    def tokens(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens that the model computes for rows of these lengths, int64."""
        return lengths * self.tokens_per_item + self.extra_tokens

    def costs(self, tokens: np.ndarray) -> np.ndarray:
        """Costs of rows with these numbers of tokens, int64."""
        model = self.model()
        if model is None:
            return tokens
        try:
            return model.get_workloads(tokens)
        except ValueError:
            raise ValueError(
                f"a row of {int(tokens.max()):,} tokens can cost more than 2**63 operations, the maximum of a plan: "
                f"check the lengths{self._remedy}"
            ) from None


@dataclass
class LengthOptions(RowCost, LengthReading):
    """The options of `--lengths`."""

    _remedy: ClassVar[str] = ", or cut rows by --max-length"

    batch_size: Count = 32  # rows per rank in a step
    max_length: Count | None = None  # rows are cut to this length; None for no limit
    seed: Natural = 0  # seed of the random order and of draws from a distribution
    bytes_per_token: Count = 8  # bytes that are sent per token: 8 for an ID, 16 with an action or a time
    # Peak rate of a device, in 10^12 operations per second; adds milliseconds to the table.
    peak_tflops: float | None = None
    mfu: float = 0.4  # the fraction of --peak-tflops that training reaches, above 0 and at most 1
    # The rate at which a rank sends, in 10^9 bits per second; adds the milliseconds of the exchange to the table.
    link_gbps: float | None = None

    def given(self) -> list[str]:
        """Flags of the options that differ from their defaults."""
        given = (item.name for item in fields(self) if getattr(self, item.name) != item.default)
        return ["--" + name.replace("_", "-") for name in given]

    def check(self) -> None:
        """Raise ValueError for an option out of its range."""
        super().check()
        for name, unit in (("peak_tflops", "10^12 operations"), ("link_gbps", "10^9 bits")):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                raise ValueError(f"{name} is {value}; it is above 0, below 1e9, and in {unit} per second: correct it")
        if not 0 < self.mfu <= 1:
            raise ValueError(f"mfu is {self.mfu}; it is the reached fraction of the peak, in (0, 1]: correct it")
        if self.task == "tokens" and self.peak_tflops is not None:
            raise ValueError(
                "task is 'tokens' and peak_tflops is given; the peak is in operations and not in tokens: choose "
                "another task"
            )

    def tokens(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens that the model computes for rows of these lengths, cut to `max_length`, int64."""
        return super().tokens(lengths if self.max_length is None else np.minimum(lengths, self.max_length))

    def read(self, source: str) -> Source:
        """The rows of a file or a distribution; ValueError for an option out of its range, and errors as for `find`."""
        self.check()
        return self.deal(self.find(source))

    def deal(self, lengths: Lengths) -> Source:
        """Rows of these lengths, row i on rank i modulo the number of ranks."""

        def load(num_ranks: int, steps: int) -> LoadedRows:
            count = steps * num_ranks * self.batch_size
            if count > _MOST_ROWS:
                raise ValueError(
                    f"{steps} steps of {num_ranks} ranks × {self.batch_size} are {count:,} rows; at most "
                    f"{_MOST_ROWS:,} are simulated: lower --steps, or --ranks"
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
            task=describe_task(model),
            remedy="lower --ranks or --batch-size, or give --with-replacement if the rows are a sample",
            of_what=OF_LAYERS if model is not None else "in tokens of the slowest rank",
            cost=cost,
            bytes_per_token=self.bytes_per_token,
            link_gbps=self.link_gbps,
        )


@dataclass
class Simulate:
    r"""Predict what balancing would gain, from the lengths of rows or from a config, without training.

    With --lengths, all ways to distribute rows to ranks are compared, and one is advised. With --config, the batches of
    a training run are read. With a calibration, the gain is that of a whole step. Without a calibration, it is that of
    the largest load; a whole step gains less, because of its fixed costs.

    Distributions are zipf:EXPONENT:LONGEST, lognormal:MEDIAN:SIGMA and lognormal:MEDIAN:SIGMA:LONGEST.

    For example:
      evenrank simulate --lengths lengths.csv --ranks 8 64 --batch-size 32
      evenrank simulate --lengths lognormal:130:1.4:8192 --ranks 64 256 --html gain.html
      evenrank simulate --lengths lognormal:130:1.4:8192 --ranks 64 --json
      evenrank simulate --lengths data.parquet --column history --max-length 4096
      evenrank simulate --lengths events.parquet --group-by user_id
      evenrank simulate --config hstu/configs/random.toml
      evenrank simulate --config my.toml --ranks 64 --window 1 2 4 8
      evenrank simulate --config my.toml --ranks 16 64 256 --figure gain.png \
          --shuffler.calibration h200.toml
    """

    config: Path | None = None  # the TOML or YAML file of a training run: model, data set and batch size
    # A parquet, csv, npy or jsonl file of lengths or of a histogram (columns length and count), or a distribution.
    lengths: str | None = None
    # With --config: package whose module `recipe` defines RECIPE, a Recipe. None: hstu, or sid_gr for semantic IDs.
    model: str | None = None
    ranks: tuple[int, ...] = (8, 16, 64)  # numbers of ranks to simulate
    # Number of steps to plan; fewer if the data have fewer rows. None: 50, with --lengths 128.
    steps: int | None = None
    # Numbers of batches of every rank that are planned together. None: the config's; with --lengths 2, 4 and 8.
    window: tuple[int, ...] | None = None
    # With --config: how batches are balanced, by default as the config's [trainer.shuffler] says.
    shuffler: ShufflerOptions = field(default_factory=ShufflerOptions)
    # With --lengths: how lengths are read, and the cost of a row.
    of_lengths: Annotated[LengthOptions, tyro.conf.arg(name="--lengths"), tyro.conf.OmitArgPrefixes] = field(
        default_factory=LengthOptions
    )
    # Where the results are printed or written.
    of_output: Annotated[AnswerOutputs, tyro.conf.arg(name="output"), tyro.conf.OmitArgPrefixes] = ON_TERMINAL

    @classmethod
    def defaults(cls, argv: Sequence[str]) -> Simulate:
        """The defaults of all options; `shuffler` and `window` are those of the config in the arguments, if any.

        ValueError for options of the shuffler that the config cannot have.
        """
        # Imported here, because lengths do not need it.
        from commons.trainer.config.files import find_config, read_config_file
        from commons.trainer.config.load import make_config, parse_known

        configs, _ = parse_known(argv, "--config", nargs="?", const="", action="append")
        config = find_config(configs[-1] if configs else "")
        trainer = read_config_file(config).get("trainer") if config.is_file() else None
        if not isinstance(trainer, Mapping):
            return cls()
        shuffler, window = ShufflerOptions(), trainer.get("shuffle_window", 1)
        if isinstance(options := trainer.get("shuffler"), Mapping):
            shuffler = make_config(ShufflerOptions, options, where=f"{config} [trainer.shuffler]")
        is_longer = isinstance(window, int) and window > 1
        return cls(shuffler=replace(shuffler, mode="balance"), window=(window,) if is_longer else None)

    def run(self) -> None:
        """Read, plan, print, draw."""
        if (self.config is None) == (self.lengths is None):
            raise ValueError(
                f"--config is {self.config} and --lengths is {self.lengths}; simulate needs exactly one of them: give "
                "--lengths with a file or a distribution, or --config with the config of a training run"
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
                f"window is {windows} and steps is {steps}; a window has at least 1 step and at most all steps: "
                f"give --window from 1 to {steps}, or more --steps"
            )
        calibration = None if self.shuffler.calibration is None else Path(self.shuffler.calibration)
        lengths = Path(self.lengths) if self.lengths else None
        inputs = {"--config": self.config, "--lengths": lengths, "--shuffler.calibration": calibration}
        self.of_output.require(inputs)
        self.of_output.give(answer_of(simulate(self._source(steps), self.ranks, windows, steps)))

    def _refuse_options_of_the_other(self) -> None:
        """Raise ValueError for options of --lengths with --config, and for options of --config with --lengths."""
        given = [("--model", self.model is not None), ("--shuffler", self.shuffler != ShufflerOptions())]
        wrong, needed, used = [name for name, is_given in given if is_given], "--config", "--lengths"
        if self.lengths is None:
            wrong, needed, used = self.of_lengths.given(), used, needed
        if wrong:
            raise ValueError(f"{', '.join(wrong)} belongs to {needed}, and {used} is given: leave it out")
        if self.shuffler.mode != "balance":
            raise ValueError(f"shuffler.mode is {self.shuffler.mode!r}; a simulation always balances: leave it out")

    def _source(self, steps: int) -> Source:
        if self.lengths is not None:
            return self.of_lengths.read(self.lengths)
        # Imported here, because it imports TorchRec, which lengths do not need.
        from commons.cli.recipes import read_config_rows

        assert self.config is not None  # noqa: S101  run() requires a config or lengths
        return read_config_rows(self.config, self.model, self.shuffler, self.ranks, steps)
