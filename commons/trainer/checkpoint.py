"""Checkpoints: all that a run needs to go on as if it had never stopped, on any number of ranks.

    <folder>/step_00000100/     a whole checkpoint: the files of torch.distributed.checkpoint, and state.json
    <folder>/step_00000200.tmp  one that is being written, or was when the run was ended

A checkpoint is written aside and renamed when every file of it is on disk, so that a folder without `.tmp` is whole.
All ranks write, to a folder that all of them share. torch.distributed.checkpoint uses pickle for its metadata: load
only checkpoints that you trust.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from commons.trainer.broadcast import broadcast_text
from commons.trainer.checkpoint_state import load_state, set_random_state, state_to_save
from commons.trainer.loss_scaling import LossScaler

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_STATE_FILE = "state.json"
_PREFIX, _UNFINISHED = "step_", ".tmp"


@dataclass(frozen=True)
class TrainProgress:
    """How far a run has come.

    Attributes:
        step: steps trained.
        epoch: epochs finished.
        rows_in_epoch: rows of the current epoch that have been trained, over all ranks; where ranks ran out of rows at
            different steps, those they would have had count too.
    """

    step: int = 0
    epoch: int = 0
    rows_in_epoch: int = 0


class Checkpointer:
    """Saves and loads the checkpoints of one run; every method is called on all ranks together.

    Args:
        folder: of the checkpoints, made if missing, shared by all ranks.
        keep: checkpoints to keep; older ones are removed after a new one is whole.
        model: on a TorchRec DistributedModelParallel, sharded tables are saved as they lie.
        optimizer: of the dense parameters.
        fingerprint: what must be equal to load a checkpoint, JSON-ready: dimensions of the model, kinds of optimizers.
        device: of this rank.
        loss_scaler: whose scale is saved and, where the checkpoint has one, loaded; None for no scale.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        fingerprint: Mapping[str, Any],
        device: torch.device,
        loss_scaler: LossScaler | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._keep = keep
        self._model, self._optimizer = model, optimizer
        # As it will be read: tuples become lists, keys strings.
        self._fingerprint = json.loads(json.dumps(fingerprint))
        self._device = device
        self._loss_scaler = loss_scaler
        self._random: dict[str, torch.Tensor] = {}

    def save(self, progress: TrainProgress) -> Path | None:
        """Write a checkpoint of the state after `progress.step` steps; no batch may be in flight.

        Returns:
            Its folder; None if it could not be written, which is logged, and leaves the checkpoints before as they are.
        """
        final = self.folder / f"{_PREFIX}{progress.step:08d}"
        unfinished = final.with_name(final.name + _UNFINISHED)
        problem = self._on_rank_0(lambda: _make_empty(unfinished))
        if not problem:
            try:
                dcp.save(state_to_save(self._model, self._optimizer), checkpoint_id=unfinished)
            except CheckpointException as error:  # of any rank, on every rank
                problem = _first_line(error)
        if not problem:
            problem = self._on_rank_0(lambda: self._complete(unfinished, final, progress))
        if problem:
            self._on_rank_0(lambda: shutil.rmtree(unfinished, ignore_errors=True))
            if dist.get_rank() == 0:
                logger.warning(
                    "no checkpoint of step %d: %s; those before stay, and training goes on: make room in %s",
                    progress.step,
                    problem,
                    self.folder,
                )
            return None
        return final

    def load(self, path: str | Path) -> TrainProgress:
        """Load a checkpoint, or the latest whole one of a folder of them.

        Damaged checkpoints of a folder are passed over with a warning. Random states wait for `restore_random_state`.

        Raises:
            FileNotFoundError: no checkpoint there.
            ValueError: the checkpoint is damaged, of another model, or of another version.
        """
        chosen = broadcast_text(json.dumps(self._choose(Path(path))) if dist.get_rank() == 0 else "", self._device)
        answer = json.loads(chosen)
        if "error" in answer:
            raise (FileNotFoundError if answer["kind"] == "FileNotFoundError" else ValueError)(answer["error"])
        state = answer["state"]
        self._random = load_state(Path(answer["path"]), self._model, self._optimizer)
        if self._loss_scaler is not None and state.get("loss_scaler"):
            self._loss_scaler.load_state_dict(state["loss_scaler"])
        return TrainProgress(**state["progress"])

    def restore_random_state(self) -> None:
        """Set this rank's random states to those of the checkpoint, once; for after whatever else a run draws first."""
        set_random_state(self._random)
        self._random = {}

    def _choose(self, path: Path) -> dict[str, Any]:
        """The checkpoint to load and what its state file says; or the error, for all ranks to raise."""
        try:
            chosen = path if (path / _STATE_FILE).is_file() else _latest_whole(path)
            state = read_state(chosen)
            self._require_match(chosen, state)
        except (OSError, ValueError) as error:
            return {"error": str(error), "kind": type(error).__name__}
        return {"path": str(chosen), "state": state}

    def _require_match(self, path: Path, state: dict[str, Any]) -> None:
        differences = list(_differences(state["fingerprint"], self._fingerprint))
        if differences:
            name, written, here = differences[0]
            more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
            raise ValueError(
                f"{path} was written with {name} = {written!r}, here it is {here!r}{more}; a checkpoint fits the model "
                "that wrote it: use that config, or another checkpoint"
            )

    def _complete(self, unfinished: Path, final: Path, progress: TrainProgress) -> None:
        """Write the state file, give the folder its name, remove what is too old."""
        state = {
            "version": FORMAT_VERSION,
            "progress": asdict(progress),
            "world_size": dist.get_world_size(),
            "fingerprint": self._fingerprint,
            "loss_scaler": None if self._loss_scaler is None else self._loss_scaler.state_dict(),
            "files": {file.name: file.stat().st_size for file in sorted(unfinished.iterdir())},
        }
        (unfinished / _STATE_FILE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
        for old in list_checkpoints(self.folder)[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _on_rank_0(self, work: Any) -> str:
        """Do something on rank 0; returns on all ranks what went wrong, or nothing."""
        problem = ""
        if dist.get_rank() == 0:
            try:
                work()
            except OSError as error:
                problem = str(error)
        return broadcast_text(problem, self._device)


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Checkpoints of a folder, oldest first; those that are not finished are left out."""
    found = [path for path in Path(folder).glob(f"{_PREFIX}*") if path.is_dir() and path.suffix != _UNFINISHED]
    return sorted(path for path in found if path.name.removeprefix(_PREFIX).isdigit())


def read_state(path: Path) -> dict[str, Any]:
    """What the state file of a checkpoint says, once all files have the sizes that were written.

    Raises:
        ValueError: damaged, or of another version.
    """
    try:
        state = json.loads((path / _STATE_FILE).read_text(encoding="utf-8"))
        version, files = state["version"], dict(state["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({_STATE_FILE}: {error}): load another checkpoint") from None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has version {version}; this evenrank reads version {FORMAT_VERSION}: load it with the version "
            "that wrote it"
        )
    for name, size in files.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            is_now = "is missing" if found is None else f"has {found} bytes"
            raise ValueError(f"{path} is damaged ({name} {is_now}, {size} were written): load another checkpoint")
    return state


def _latest_whole(folder: Path) -> Path:
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise FileNotFoundError(
            f"{folder} holds no checkpoint; it is a checkpoint or a folder of them: correct the path"
        )
    for path in reversed(checkpoints):
        try:
            read_state(path)
        except ValueError as error:
            logger.warning("%s; going back to the one before", error)
        else:
            return path
    raise ValueError(f"all {len(checkpoints)} checkpoints of {folder} are damaged: start without one")


def _make_empty(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _first_line(error: CheckpointException) -> str:
    rank, failure = next(iter(error.failures.items()))
    cause = failure[0] if isinstance(failure, tuple) else failure
    return f"rank {rank}: {' '.join(str(cause).split()) or type(cause).__name__}"


def _differences(written: Any, here: Any, name: str = "") -> Any:
    """Names and both values of what differs, depth first."""
    if isinstance(written, dict) and isinstance(here, dict):
        for key in sorted(written.keys() | here.keys()):
            yield from _differences(written.get(key), here.get(key), f"{name}.{key}" if name else key)
    elif written != here:
        yield name, written, here
