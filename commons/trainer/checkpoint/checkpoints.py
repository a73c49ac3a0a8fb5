"""Checkpoints of a run: saving and resuming, on any number of ranks.

All ranks write to one folder that they share; `commons.trainer.checkpoint.folder` describes it.
torch.distributed.checkpoint uses pickle for its metadata: load only checkpoints that you trust.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import operator
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.trainer.checkpoint.folder import (
    STATE_FILE,
    checkpoint_path,
    claim,
    complete_checkpoint,
    digests_of,
    discard,
    holds_checkpoint,
    latest_whole,
    make_empty,
    read_state,
    require_marker,
    require_none_after,
    require_visible,
    unfinished_path,
    warn_of_damage,
)
from commons.trainer.checkpoint.random_state import set_random_state
from commons.trainer.checkpoint.state import (
    first_not_finite,
    load_state,
    misfit_of,
    read_entries,
    state_to_save,
    unread_of,
    write_state,
)
from commons.trainer.config.args import TrainerArgs
from commons.trainer.ranks.collectives import first_text, gather_values, on_all_ranks, on_rank_0
from commons.trainer.recipe import Recipe

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainProgress:
    """The progress of a run."""

    step: int = 0  # steps trained
    epoch: int = 0  # epochs finished
    # Trained rows of the current epoch, over all ranks; within a window, only the rows before the window.
    rows_in_epoch: int = 0
    window_steps: int = 0  # trained steps of the current window
    window_rows: int = 0  # rows trained in these steps, over all ranks
    # Settings that determined the window's plan, JSON-ready; `window_steps` is valid only with the same plan.
    window_of: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 0  # rows trained since the run began
    evaluates: bool = False  # an evaluation follows the checkpoint


class Checkpointer:
    """Saves and loads the checkpoints of one run; `resume` and `save` are called on all ranks together.

    A checkpoint must have the fingerprint of the run's recipe. Sharded tables of a DistributedModelParallel are saved
    shard by shard; the loss scale and the shuffler's state are saved too. `order` has the settings that determine the
    order of the data, JSON-ready; a warning is logged if a checkpoint's differ.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        shuffler: BaseTaskBalancedBatchShuffler,
        order: Mapping[str, Any],
    ) -> None:
        self._args: TrainerArgs = recipe.config.trainer
        self.folder = Path(self._args.ckpt_save_dir)  # folder for new checkpoints
        self.saves = self._args.ckpt_save_interval > 0  # whether the run saves checkpoints
        self._saved_at = -1
        self._latest = 0  # no checkpoint of this run in the folder is after this step
        self._model, self._optimizer, self._device = model, optimizer, recipe.device
        # As JSON returns it: tuples become lists, keys become strings.
        self._fingerprint = json.loads(json.dumps(recipe.fingerprint()))
        self._order = order
        self._loss_scaler, self._shuffler = recipe.loss_scaler, shuffler
        self._loaded_from: Path | None = None
        # Checkpoints that were damaged when this run tried to load them; filled on rank 0 only.
        self._damaged: list[Path] = []
        self._digests_of = functools.partial(digests_of, rank=dist.get_rank(), ranks=dist.get_world_size())

    def resume(self) -> tuple[TrainProgress, str]:
        """Load the checkpoint of the settings, if any, and claim the folder for new checkpoints.

        Returns:
            The progress of the run, and a line about it, or "".

        Raises:
            ValueError: the settings' path has no checkpoint, or it is damaged, of another model, or of another version;
                or the folder for new checkpoints cannot be created or written, is not the same on all ranks, or
                contains checkpoints of later steps.
        """
        progress, line = TrainProgress(), ""
        if self._args.ckpt_load_dir:
            folder = Path(self._args.ckpt_load_dir)
            # With equal folders the same command starts a run and, repeated, continues it.
            loaded = self._load(folder, may_be_empty=self.saves and folder.resolve() == self.folder.resolve())
            if loaded is None:
                line = f"{folder} has no checkpoint yet: a new run"
            else:
                progress, line = loaded, f"resumed after step {loaded.step}, from {self._loaded_from}"
        if self.saves:
            self._claim_folder(progress.step)
            self._latest = progress.step
            if self._loaded_from is not None and self._loaded_from.resolve().parent == self.folder.resolve():
                self._saved_at = progress.step
        return progress, line

    def _claim_folder(self, step: int) -> None:
        """Create the folder; ValueError on all ranks if a rank would save to another: no checkpoint would be whole."""
        marker = on_rank_0(lambda: claim(self.folder, step, self._damaged), self._device)
        try:
            on_all_ranks(lambda: require_marker(self.folder, marker), self._device)
        finally:
            on_rank_0((self.folder / marker).unlink, self._device)

    def has_saved(self, step: int) -> bool:
        """Whether the state after a step is saved, or need not be saved."""
        return not self.saves or self._saved_at == step

    def how_to_resume(self, step: int) -> str:
        """The flag that continues a stopped run, for the run's last line; "" if nothing was saved."""
        return f"; continue with --trainer.ckpt-load-dir {self._args.ckpt_save_dir}" if self._saved_at == step else ""

    def require_saved(self, step: int) -> None:
        """Raise RuntimeError if the run saves checkpoints and has no checkpoint of its last step."""
        if not self.has_saved(step):
            raise RuntimeError(
                f"the state after step {step} could not be saved to {self._args.ckpt_save_dir}; checkpoints of earlier "
                "steps are kept: make room there and continue from the last one"
            )

    def save(self, progress: TrainProgress) -> None:
        """Write a checkpoint of the state after `progress.step` steps; no batch may be in flight.

        If it cannot be written, a warning is logged and earlier checkpoints are kept.

        Raises:
            ArithmeticError: a weight is not finite, so no run could continue from this state.
            ValueError: another run has saved to the folder meanwhile.
        """
        state = state_to_save(self._model, self._optimizer)
        rank, name = first_text(first_not_finite(state, self._model), self._device)
        if name:
            raise ArithmeticError(
                f"{name} of rank {rank} is not finite after step {progress.step}; this state is not saved, earlier "
                "checkpoints are kept: continue from one of them with a lower learning rate or max_grad_norm"
            )
        final, device = checkpoint_path(self.folder, progress.step), self._device
        unfinished = unfinished_path(final)
        on_rank_0(self._require_own_folder, device)
        self._latest = progress.step
        try:
            on_rank_0(lambda: make_empty(unfinished), device)
            on_all_ranks(lambda: write_state(unfinished, state), device)
            own = on_all_ranks(lambda: self._digests_of(unfinished), device)
            digests = functools.reduce(operator.or_, gather_values(own, device))
            content = {
                "progress": asdict(progress),
                "world_size": dist.get_world_size(),
                "fingerprint": self._fingerprint,
                "order": self._order,
                "loss_scaler": None if self._loss_scaler is None else self._loss_scaler.state_dict(),
                "shuffler": self._shuffler.state_dict(),
                "digests": digests,
            }
            keep = self._args.ckpt_keep
            on_rank_0(lambda: complete_checkpoint(unfinished, final, content, keep, self._damaged), device)
        except ValueError as problem:
            on_rank_0(lambda: discard(unfinished), device)
            if dist.get_rank() == 0:
                logger.warning(
                    "no checkpoint of step %d: %s; earlier checkpoints are kept and the run continues: make room in %s",
                    progress.step,
                    problem,
                    self.folder,
                )
        else:
            self._saved_at = progress.step

    def _require_own_folder(self) -> None:
        """Raise ValueError if another run has saved to the folder since this run last did."""
        with contextlib.suppress(OSError):  # saving finds out itself
            what = f"has saved none after step {self._latest}"
            require_none_after(self.folder, self._latest, self._damaged, what)

    def _load(self, path: Path, *, may_be_empty: bool) -> TrainProgress | None:
        """Load a checkpoint, or the latest complete one of a folder, and this rank's random states.

        Before loading, every file is read once to compare its digest. Damaged checkpoints of a folder are skipped with
        a warning. Returns None for an empty folder with `may_be_empty`.
        """
        while True:
            found = on_rank_0(lambda: self._choose(path, may_be_empty), self._device)
            if found is None:
                return None
            chosen, state = Path(found["path"]), found["state"]
            on_all_ranks(functools.partial(require_visible, chosen, state["digest"]), self._device)
            try:
                misfit = self._load_from(chosen, state["digests"])
                break
            except ValueError as problem:
                if chosen == path:
                    raise
                if dist.get_rank() == 0:
                    self._damaged.append(chosen)
                    warn_of_damage(problem)
        if misfit:  # the checkpoints before it would not fit either
            raise ValueError(misfit)
        self._loaded_from = chosen
        if self._loss_scaler is not None and state["loss_scaler"]:
            self._loss_scaler.load_state_dict(state["loss_scaler"])
        self._shuffler.load_state_dict(state["shuffler"])
        return TrainProgress(**state["progress"])

    def _load_from(self, path: Path, digests: Mapping[str, str]) -> str:
        """Load a checkpoint, or return why it does not fit the model; ValueError if it is damaged or cannot be read.

        Result and error are equal on all ranks.
        """

        def read() -> dict[str, Any]:
            for name, digest in self._digests_of(path, digests).items():
                if digest != digests[name]:
                    raise ValueError(f"{path} is damaged ({name} has another digest): load another checkpoint")
            return read_entries(path)

        def misfit() -> str:
            return misfit_of(path, saved, self._model)

        saved = on_all_ranks(read, self._device)
        if found := first_text(on_all_ranks(misfit, self._device), self._device)[1]:
            return found
        if found := unread_of(path, saved, self._model, self._optimizer, self._device):
            return found
        set_random_state(on_all_ranks(lambda: load_state(path, saved, self._model, self._optimizer), self._device))
        return ""

    def _choose(self, path: Path, may_be_empty: bool) -> dict[str, Any] | None:
        """The checkpoint to load and the content of its state file; None for an empty folder with `may_be_empty`."""
        if may_be_empty and not (path.is_file() or holds_checkpoint(path)):
            return None
        chosen = path if (path / STATE_FILE).is_file() else latest_whole(path, self._damaged)
        state = read_state(chosen)
        differences = list(_differences(state["fingerprint"], self._fingerprint))
        if differences:
            name, written, here = differences[0]
            more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
            raise ValueError(
                f"{chosen} was written with {name} = {written!r}, this run has {here!r}{more}; a checkpoint fits only "
                "the model that wrote it, and data with the same ids: use that config and data, or another checkpoint"
            )
        other_order = next(_differences(state["order"], self._order), None)
        rows, window_steps = state["progress"]["rows_in_epoch"], state["progress"]["window_steps"]
        if other_order and rows == state["order"].get("num_rows"):  # its epoch has ended, also if users were added
            state["progress"] |= {"epoch": state["progress"]["epoch"] + 1, "rows_in_epoch": 0}
        elif other_order and (rows or window_steps):
            logger.warning(
                "%s is within an epoch that was read with %s = %r, this run has %r; in the rest of that epoch some "
                "rows are trained a second time and others not at all",
                chosen,
                *other_order,
            )
        return {"path": str(chosen), "state": state}


def _differences(written: Any, here: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The name and both values of every difference, depth first.

    >>> list(_differences({"a": {"b": 1}, "d": 2}, {"a": {"b": 1, "c": 3}, "d": {"e": 4}}))
    [('a.c', None, 3), ('d', 2, {'e': 4})]
    """
    if isinstance(written, dict) and isinstance(here, dict):
        # Plain values before nested ones: nested differences often follow from a plain one.
        for key in sorted(written.keys() | here.keys(), key=lambda key: (isinstance(here.get(key), dict), key)):
            yield from _differences(written.get(key), here.get(key), f"{name}.{key}" if name else key)
    elif written != here:
        yield name, written, here
