"""Checkpoints: when a run saves them, where it goes on, and all that it needs for that, on any number of ranks.

All ranks write, to a folder that all of them share; `commons.trainer.checkpoint.folder` describes it.
torch.distributed.checkpoint uses pickle for its metadata: load only checkpoints that you trust.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from commons.trainer.checkpoint.folder import (
    DIGEST_BYTES,
    STATE_FILE,
    checkpoint_path,
    claim,
    complete_checkpoint,
    digest_of,
    discard,
    holds_checkpoint,
    latest_whole,
    list_checkpoints,
    make_empty,
    read_state,
    unfinished_path,
    warn_of_damage,
)
from commons.trainer.checkpoint.random_state import set_random_state
from commons.trainer.checkpoint.state import (
    describe_failure,
    first_not_finite,
    load_state,
    read_entries,
    state_to_save,
)
from commons.trainer.config.args import TrainerArgs
from commons.trainer.optimize.loss_scaling import LossScaler
from commons.trainer.ranks.collectives import all_reduce, broadcast_text

__all__ = ["Checkpointer", "TrainProgress", "list_checkpoints"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainProgress:
    """How far a run has come."""

    step: int = 0  # steps trained
    epoch: int = 0  # epochs finished
    # Rows of the current epoch that have been trained, over all ranks; within a window, those before it.
    rows_in_epoch: int = 0
    window_steps: int = 0  # steps trained of that window
    window_rows: int = 0  # rows trained in these steps, over all ranks
    # What the window was planned for, JSON-ready: `window_steps` tells a place in this plan alone.
    window_of: Mapping[str, Any] = field(default_factory=dict)
    rows: int | None = 0  # rows trained since the run began; None in checkpoints of earlier versions


class Checkpointer:
    """Saves and loads the checkpoints of one run; `resume` and `save` are called on all ranks together.

    Args:
        args: when to save and to which folder, which all ranks share; what to go on from.
        model: on a TorchRec DistributedModelParallel, sharded tables are saved as they lie.
        optimizer: of the dense parameters.
        fingerprint: what must be equal to load a checkpoint, JSON-ready: dimensions of the model, kinds of optimizers.
        device: of this rank.
        order: what decides the order of the data, JSON-ready; another one than a checkpoint's is warned of.
        loss_scaler: whose scale is saved and, where the checkpoint has one, loaded; None for no scale.
    """

    def __init__(
        self,
        args: TrainerArgs,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        fingerprint: Mapping[str, Any],
        device: torch.device,
        order: Mapping[str, Any] | None = None,
        loss_scaler: LossScaler | None = None,
    ) -> None:
        self.folder = Path(args.ckpt_save_dir)  # to save to
        self.saves = args.ckpt_save_interval > 0  # whether the run saves
        self._args = args
        self._saved_at = -1
        self._model, self._optimizer = model, optimizer
        # As it will be read: tuples become lists, keys strings.
        self._fingerprint = json.loads(json.dumps(fingerprint))
        self._device = device
        self._order = dict(order or {})
        self._loss_scaler = loss_scaler
        self._loaded_from: Path | None = None
        # Found to be damaged when this run wanted to load them; rank 0 keeps them.
        self._damaged: list[Path] = []

    def resume(self) -> tuple[TrainProgress, str]:
        """Load what the settings name, and claim the folder to save to.

        Returns how far the run has come, and a line about that, or "".

        Raises:
            FileNotFoundError: no checkpoint where the settings say.
            ValueError: the checkpoint is damaged, of another model, or of another version; or the folder to save to
                cannot be made or written, or holds checkpoints of later steps.
        """
        progress, said = TrainProgress(), ""
        if self._args.ckpt_load_dir:
            folder = Path(self._args.ckpt_load_dir)
            # One command starts a run and, given again, goes on with it.
            loaded = self._load(folder, may_be_empty=self.saves and folder.resolve() == self.folder.resolve())
            if loaded is None:
                said = f"{folder} holds no checkpoint yet: a new run"
            else:
                progress, said = loaded, f"resumed after step {loaded.step}, from {self._loaded_from}"
        if self.saves:
            if problem := self._on_rank_0(lambda: claim(self.folder, progress.step, self._damaged)):
                raise ValueError(problem)
            if self._loaded_from is not None and self._loaded_from.resolve().parent == self.folder.resolve():
                self._saved_at = progress.step
        return progress, said

    def has_saved(self, step: int) -> bool:
        """Whether the state after a step needs no checkpoint (any more)."""
        return not self.saves or self._saved_at == step

    def how_to_resume(self, step: int) -> str:
        """How to go on after a run was stopped, for its last line; "" where nothing was saved."""
        return f"; go on with --trainer.ckpt-load-dir {self._args.ckpt_save_dir}" if self._saved_at == step else ""

    def require_saved(self, step: int) -> None:
        """Raise RuntimeError if the last state of a run should have been saved and was not."""
        if not self.has_saved(step):
            raise RuntimeError(
                f"the state after step {step} could not be saved to {self._args.ckpt_save_dir}; its checkpoints of "
                "earlier steps stay: make room there and go on from the last one"
            )

    def save(self, progress: TrainProgress) -> None:
        """Write a checkpoint of the state after `progress.step` steps; no batch may be in flight.

        One that cannot be written is logged, and leaves the checkpoints before as they are.

        Raises:
            ArithmeticError: a weight is not finite, so that nobody could go on from this state.
        """
        state = state_to_save(self._model, self._optimizer)
        rank, name = self._first_text(first_not_finite(state, self._model))
        if name:
            raise ArithmeticError(
                f"{name} of rank {rank} is not finite after step {progress.step}; no checkpoint is made of that, those "
                "before stay: go on from one of them with a lower learning rate or max_grad_norm"
            )
        final = checkpoint_path(self.folder, progress.step)
        unfinished = unfinished_path(final)
        digests: dict[str, str] = {}
        problem = self._on_rank_0(lambda: make_empty(unfinished))
        if not problem:
            try:
                dcp.save(state, checkpoint_id=unfinished)
            except CheckpointException as error:  # of any rank, on every rank
                problem = describe_failure(error)
        if not problem:
            digests, problem = self._digests_of(unfinished)
        if not problem:
            problem = self._on_rank_0(
                lambda: complete_checkpoint(unfinished, final, self._state_of(progress), self._args.ckpt_keep, digests)
            )
        if problem:
            self._on_rank_0(lambda: discard(unfinished))
            if dist.get_rank() == 0:
                logger.warning(
                    "no checkpoint of step %d: %s; those before stay, and the run goes on: make room in %s",
                    progress.step,
                    problem,
                    self.folder,
                )
        else:
            self._saved_at = progress.step

    def _load(self, path: Path, *, may_be_empty: bool) -> TrainProgress | None:
        """Load a checkpoint, or the latest whole one of a folder of them, and this rank's random states.

        Every file is read once more before, to compare its digest. Damaged checkpoints of a folder are passed over with
        a warning. None for a folder that may be empty and is.
        """
        while True:
            mine = json.dumps(self._choose(path, may_be_empty)) if dist.get_rank() == 0 else ""
            answer = json.loads(broadcast_text(mine, self._device))
            if "error" in answer:
                raise (FileNotFoundError if answer["kind"] == "FileNotFoundError" else ValueError)(answer["error"])
            if answer["path"] is None:
                return None
            chosen, state = Path(answer["path"]), answer["state"]
            problem = self._load_from(chosen, state["digests"])
            if not problem:
                break
            if chosen == path:
                raise ValueError(problem)
            if dist.get_rank() == 0:
                self._damaged.append(chosen)
                warn_of_damage(problem)
        self._loaded_from = chosen
        if self._loss_scaler is not None and state.get("loss_scaler"):
            self._loss_scaler.load_state_dict(state["loss_scaler"])
        return TrainProgress(**{"rows": None} | state["progress"])

    def _load_from(self, path: Path, digests: Mapping[str, str]) -> str:
        """Load a checkpoint; returns on all ranks why that could not be done, or ""."""
        saved: dict[str, Any] = {}
        random: dict[str, torch.Tensor] = {}

        def read() -> None:
            for name in self._own_files(digests):
                if digest_of(path / name).hex() != digests[name]:
                    raise ValueError(f"{path} is damaged ({name} is not as it was written): load another checkpoint")
            saved.update(read_entries(path))

        problem = self._on_all_ranks(read) or self._on_all_ranks(
            lambda: random.update(load_state(path, saved, self._model, self._optimizer))
        )
        if not problem:
            set_random_state(random)
        return problem

    def _digests_of(self, folder: Path) -> tuple[dict[str, str], str]:
        """Digests of a folder's files by name, and on all ranks what went wrong, or ""."""
        found: list[str] = []
        if problem := self._on_rank_0(lambda: found.extend(sorted(file.name for file in folder.iterdir()))):
            return {}, problem
        names = json.loads(broadcast_text(json.dumps(found), self._device))
        table = torch.zeros(len(names), DIGEST_BYTES, dtype=torch.uint8)

        def fill() -> None:
            for name in self._own_files(names):
                table[names.index(name)] = torch.frombuffer(bytearray(digest_of(folder / name)), dtype=torch.uint8)

        problem = self._on_all_ranks(fill)
        table = table.to(self._device)
        all_reduce(table, "digests of a checkpoint")  # every row is one rank's
        return {name: bytes(row).hex() for name, row in zip(names, table.tolist())}, problem

    def _own_files(self, names: Iterable[str]) -> list[str]:
        """The files that this rank reads to compute digests: those it wrote, where they are written now."""
        ranks = dist.get_world_size()
        written_by = [re.match(r"__(\d+)_", name) for name in names]
        readers = [index if match is None else int(match[1]) for index, match in enumerate(written_by)]
        return [name for name, reader in zip(names, readers) if reader % ranks == dist.get_rank()]

    def _choose(self, path: Path, may_be_empty: bool) -> dict[str, Any]:
        """The checkpoint to load and what its state file says; or the error, for all ranks to raise."""
        if may_be_empty and not (path.is_file() or holds_checkpoint(path)):
            return {"path": None}
        try:
            chosen = path if (path / STATE_FILE).is_file() else latest_whole(path, self._damaged)
            state = read_state(chosen)
            differences = list(_differences(state["fingerprint"], self._fingerprint))
            if differences:
                name, written, here = differences[0]
                more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
                raise ValueError(
                    f"{chosen} was written with {name} = {written!r}, here it is {here!r}{more}; a checkpoint fits the "
                    "model that wrote it: use that config, or another checkpoint"
                )
            self._warn_of_other_order(chosen, state)
        except (OSError, ValueError, TypeError, AttributeError) as error:  # the latter of a state file of odd types
            return {"error": str(error), "kind": type(error).__name__}
        return {"path": str(chosen), "state": state}

    def _warn_of_other_order(self, path: Path, state: dict[str, Any]) -> None:
        differences = list(_differences(state.get("order", self._order), self._order))
        progress = state["progress"]
        if differences and (progress["rows_in_epoch"] or progress.get("window_steps")):
            name, written, here = differences[0]
            logger.warning(
                "%s is within an epoch that was read with %s = %r, here it is %r; in what is left of that epoch some "
                "rows come a second time and others not at all",
                path,
                name,
                written,
                here,
            )

    def _state_of(self, progress: TrainProgress) -> dict[str, Any]:
        return {
            "progress": asdict(progress),
            "world_size": dist.get_world_size(),
            "fingerprint": self._fingerprint,
            "order": self._order,
            "loss_scaler": None if self._loss_scaler is None else self._loss_scaler.state_dict(),
        }

    def _on_rank_0(self, work: Any) -> str:
        """Do something on rank 0; returns on all ranks what went wrong, or ""."""
        problem = ""
        if dist.get_rank() == 0:
            try:
                work()
            except (OSError, ValueError) as error:
                problem = str(error)
        return broadcast_text(problem, self._device)

    def _on_all_ranks(self, work: Callable[[], None]) -> str:
        """Do something on every rank; returns on all ranks what went wrong on the first that failed, or ""."""
        problem = ""
        try:
            work()
        except Exception as error:  # a damaged file may end in any
            problem = str(error) or type(error).__name__
        return self._first_text(problem)[1]

    def _first_text(self, mine: str) -> tuple[int, str]:
        """The first rank whose text is not empty, and that text; called on all ranks together."""
        found = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=self._device)
        found[dist.get_rank()] = int(bool(mine))
        all_reduce(found, "outcome of a checkpoint")
        ranks = found.nonzero().flatten().tolist()
        return (ranks[0], broadcast_text(mine, self._device, src=ranks[0])) if ranks else (-1, "")


def _differences(written: Any, here: Any, name: str = "") -> Any:
    """Names and both values of what differs, depth first."""
    if isinstance(written, dict) and isinstance(here, dict):
        # What a field itself says before what others follow from it.
        for key in sorted(written.keys() | here.keys(), key=lambda key: (isinstance(here.get(key), dict), key)):
            yield from _differences(written.get(key), here.get(key), f"{name}.{key}" if name else key)
    elif written != here:
        yield name, written, here
