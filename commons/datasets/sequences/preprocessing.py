"""What every preprocessor does: read the raw files into an event store, then write the shards.

    source ─► EventStore (DuckDB, beside the output) ─► write_sequences ─► <output>/<name>.parquet

Memory is bounded, however many events there are; the store takes about 10 to 20 bytes per event on the disk of the
output until the end, sorting as much again, and files unpacked from an archive their own size.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from commons.datasets.sequences.event_store import EventStore
from commons.datasets.sequences.writer import SequenceSource, is_preprocessed, write_sequences
from commons.whole_folder import whole_folder

_SCRATCH = "_scratch"


@dataclass(frozen=True)
class Preprocessor:
    """Writes the columnar files of one data set."""

    dataset_name: str
    # From the source and an empty store to all that is known of the data set, whose events are then in the store.
    # Raises FileNotFoundError for a source that is not there, ValueError for one that is damaged or foreign, or has a
    # malformed line.
    read: Callable[[Path, EventStore], SequenceSource]

    def __call__(
        self,
        source: str | Path,
        output: str | Path,
        *,
        test_fraction: float = 0.1,
        seed: int = 0,
        show_progress: bool = False,
    ) -> Path:
        """Write the files; they appear when they are complete.

        A user belongs to the test split if a hash of `seed` and the raw user id lies below `test_fraction`, whatever
        other users there are. Events of the same time keep the order of the files.

        Args:
            source: the archive as published, or its unpacked folder; own files.
            output: folder for `<name>.parquet`, made if missing.
            test_fraction: expected part of the users in the test split, in `[0, 1]`.
            seed: of the split.
            show_progress: show progress bars on stderr, if that is a terminal.

        Returns:
            The folder of the data set.

        Raises:
            FileNotFoundError: nothing at `source`.
            FileExistsError: something in the data set's place that no preprocessor wrote, or the source itself.
            BlockingIOError: another process is preprocessing to the same place.
            OSError: no right to write, or no room.
            ValueError: as `read` does, a fraction outside `[0, 1]` or a negative seed.

        """
        target = Path(output) / f"{self.dataset_name}.parquet"
        if Path(os.path.realpath(source)).is_relative_to(os.path.realpath(target)):
            raise FileExistsError(
                f"source is {source}, which lies in {target}; that folder is replaced by the data set: give another "
                "output"
            )
        if not 0 <= test_fraction <= 1:
            raise ValueError(
                f"test_fraction is {test_fraction}; it is a part of all users: give a number between 0 and 1"
            )
        if seed < 0:
            raise ValueError(f"seed is {seed}; seeds are not negative: give 0 or more")
        with whole_folder(target, may_replace=is_preprocessed, what="preprocessed data set") as folder:
            with EventStore(folder / _SCRATCH, show_progress=show_progress) as store:
                sequences = self.read(Path(source), store)
                write_sequences(folder, sequences, store, test_fraction=test_fraction, seed=seed)
            shutil.rmtree(folder / _SCRATCH)
        return target
