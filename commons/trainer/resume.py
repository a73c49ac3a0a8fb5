"""The checkpoints of a run: where it goes on, and when it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commons.trainer.args import TrainerArgs
from commons.trainer.checkpoint import Checkpointer, TrainProgress


class RunCheckpoints:
    """When a run saves, and what it goes on from, as its settings say.

    Args:
        args: settings.
        state: further arguments of Checkpointer: what is saved.

    Attributes:
        are_saved: whether the run saves checkpoints.
    """

    def __init__(self, args: TrainerArgs, **state: Any) -> None:
        self._args = args
        self.are_saved = args.ckpt_save_interval > 0
        self._saved_at = -1
        self._checkpointer = None
        if self.are_saved or args.ckpt_load_dir:
            self._checkpointer = Checkpointer(args.ckpt_save_dir, keep=args.ckpt_keep, **state)

    def resume(self) -> tuple[TrainProgress, str]:
        """Load what the settings name, and claim the folder to save to; a collective call.

        Returns:
            How far the run has come, and what to say about that, or "".

        Raises:
            FileNotFoundError, ValueError: as `Checkpointer.load` and `Checkpointer.claim_folder`.
        """
        progress, said = TrainProgress(), ""
        if self._checkpointer is None:
            return progress, said
        if self._args.ckpt_load_dir:
            folder, save_folder = Path(self._args.ckpt_load_dir), Path(self._args.ckpt_save_dir)
            # One command starts a run and, given again, goes on with it.
            is_own = self.are_saved and folder.resolve() == save_folder.resolve()
            loaded = self._checkpointer.load(folder, may_be_empty=is_own)
            if loaded is None:
                said = f"{folder} holds no checkpoint yet: a new run"
            else:
                progress = loaded
                said = f"resumed after step {progress.step}, from {self._checkpointer.loaded_from}"
        if self.are_saved:
            self._checkpointer.claim_folder(progress.step)
            if self._checkpointer.has_loaded_own():
                self._saved_at = progress.step
        return progress, said

    def should_save(self, step: int) -> bool:
        """Whether a checkpoint is due after a step, counted from 1."""
        return self.are_saved and step % self._args.ckpt_save_interval == 0

    def has_saved(self, step: int) -> bool:
        """Whether the state after a step needs no checkpoint (any more)."""
        return not self.are_saved or self._saved_at == step

    def save(self, progress: TrainProgress) -> None:
        """Save a checkpoint; a collective call, with no batch in flight. One that cannot be written is logged.

        Raises:
            ArithmeticError: as `Checkpointer.save`.
        """
        if self._checkpointer is not None and self._checkpointer.save(progress) is not None:
            self._saved_at = progress.step

    def how_to_resume(self, step: int) -> str:
        """What to say after a run that was stopped; "" where nothing was saved."""
        if self._saved_at != step:
            return ""
        return f"; go on with --trainer.ckpt-load-dir {self._args.ckpt_save_dir}"

    def require_saved(self, step: int) -> None:
        """Raise RuntimeError if the last state of a run should have been saved and was not."""
        if not self.has_saved(step):
            raise RuntimeError(
                f"the state after step {step} could not be saved to {self._args.ckpt_save_dir}; its checkpoints of "
                "earlier steps stay: make room there and go on from the last one"
            )
