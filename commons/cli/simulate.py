"""`evenrank simulate`: what balancing would gain on the user's data, before anything is trained."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from commons.cli.outputs import as_command, require_answer_outputs, write_answer_outputs
from commons.cli.simulate_answer import print_answer
from commons.cli.simulate_gain import LengthOptions, simulate_lengths
from commons.distributed.options import ShufflerOptions

if TYPE_CHECKING:
    from commons.cli.page import Page
    from commons.cli.pictures import Picture

# Steps and windows, unless told; those of a config have to be read.
_STEPS, _STEPS_OF_LENGTHS = 50, 128
_WINDOWS_OF_LENGTHS = (2, 4, 8)


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

    html: Path | None = None
    """Where to write the answer as a page with pictures, one .html file that needs no network; None for none."""

    figure: Path | None = None
    """Where to draw the gain, as .png, .svg or .pdf."""

    json: bool = False
    """Print JSON instead of a table."""

    shuffler: ShufflerOptions = field(default_factory=ShufflerOptions)
    """With --config: how batches are balanced."""

    of_lengths: Annotated[LengthOptions, tyro.conf.arg(name="--lengths"), tyro.conf.OmitArgPrefixes] = field(
        default_factory=LengthOptions
    )
    """With --lengths: how they are read, and what a row costs."""

    def run(self) -> None:
        """Read, plan, print, draw."""
        if self.config is not None and self.lengths is not None:
            raise ValueError(
                f"--config is {self.config} and --lengths is {self.lengths}; each says what the rows are: give one "
                "of them"
            )
        if self.config is None and self.lengths is None:
            raise ValueError(
                "simulate needs --lengths, a file or a distribution, or --config, that of a training run: give one "
                "of them"
            )
        steps, windows = self.steps, self.window
        if steps is None:
            steps = _STEPS if self.lengths is None else _STEPS_OF_LENGTHS
        if windows is None:
            windows = (1,) if self.lengths is None else tuple(each for each in _WINDOWS_OF_LENGTHS if each <= steps)
        if not self.ranks or min(self.ranks) < 2 or steps < 1:
            raise ValueError(
                f"ranks is {self.ranks} and steps is {steps}; balancing needs 2 ranks and a step: raise them"
            )
        if (not windows and self.lengths is None) or min(windows, default=1) < 1 or max(windows, default=1) > steps:
            raise ValueError(
                f"window is {windows} and steps is {steps}; a window is planned over 1 step to all of them: "
                f"give --window from 1 to {steps}, or more --steps"
            )
        if self.config is not None:
            self._of_config(self.config, steps, windows)
        elif self.lengths is not None:
            self._of_lengths(self.lengths, steps, windows)

    def _of_lengths(self, lengths: str, steps: int, windows: tuple[int, ...]) -> None:
        """From lengths alone."""
        for flag, given in (
            ("--model", self.model is not None),
            ("--shuffler", self.shuffler != ShufflerOptions()),
        ):
            if given:
                raise ValueError(f"{flag} belongs to --config, and --lengths is given: leave it out")
        require_answer_outputs(self.html, self.figure, {"--lengths": Path(lengths)})
        answer = simulate_lengths(lengths, self.of_lengths, self.ranks, windows, steps)
        if self.json:
            _print_json(answer.to_dict())
        else:
            print_answer(answer)
        if self.html is not None or self.figure is not None:
            # Imported here: what draws takes a second, and a table needs none of it.
            from commons.cli.simulate_page import page_of
            from commons.cli.simulate_pictures import pictures_of

            self._write(lambda: page_of(answer, self._command()), lambda: pictures_of(answer))

    def _of_config(self, config: Path, steps: int, windows: tuple[int, ...]) -> None:
        """From the batches of a training run."""
        given = self.of_lengths.given()
        if given:
            raise ValueError(f"{', '.join(given)} belongs to --lengths, and --config is given: leave it out")
        if self.shuffler.mode != "balance":
            raise ValueError(
                f"shuffler.mode is {self.shuffler.mode!r}; a simulation says what balancing would gain: leave it out"
            )
        measured = None if self.shuffler.calibration is None else Path(self.shuffler.calibration)
        require_answer_outputs(self.html, self.figure, {"--config": config, "--shuffler.calibration": measured})
        # Imported here: it needs TorchRec, and lengths alone do not.
        from commons.cli.simulate_config import print_config_answer, simulate_config
        from commons.cli.simulate_figure import pictures_of_steps
        from commons.cli.simulate_page import page_of_steps

        answer = simulate_config(config, self.model, self.shuffler, self.ranks, windows, steps)
        if self.json:
            _print_json(answer.to_dict())
        else:
            print_config_answer(answer)
        self._write(
            lambda: page_of_steps(answer.results, answer.title, answer.notes, self._command()),
            lambda: pictures_of_steps(answer.results),
        )

    def _write(self, page: Callable[[], Page], pictures: Callable[[], Sequence[Picture]]) -> None:
        write_answer_outputs(self.html, self.figure, page, pictures, quiet=self.json)

    def _command(self) -> str:
        return as_command("evenrank simulate", self)


def _print_json(content: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(content, indent=2) + "\n")
