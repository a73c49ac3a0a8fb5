"""What every preprocessor does: check, read the archive, deal the interactions out by user, write the shards.

    source ─► OpenedArchive of the data set ─► UserPartitions ─► write_sequences ─► <output>/<name>.parquet

Memory is bounded by one batch of the archive and one partition of the users, however many rows there are; the
partitions take about 18 bytes per interaction on the disk of the output until the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from commons.datasets.sequence_file import SequenceSchema
from commons.datasets.sequence_writer import SequenceSource, is_preprocessed, write_sequences
from commons.whole_folder import whole_folder

_PARTITIONS = "_partitions"


@dataclass(frozen=True)
class OpenedArchive:
    """An archive whose layout has been checked.

    Attributes:
        schema: of its data set.
        num_bytes: what `read` will report, for the progress bar.
        read: reads it, from where partitions go and what to call with the number of bytes read.

    """

    schema: SequenceSchema
    num_bytes: int
    read: Callable[[Path, Callable[[int], object]], SequenceSource]


@dataclass(frozen=True)
class Preprocessor:
    """Writes the columnar files of one kind of archive.

    Attributes:
        open: from the source and whether to show progress to the archive; raises FileNotFoundError for a source that is
            not there, ValueError for a damaged or foreign one.

    """

    open: Callable[[str | Path, bool], OpenedArchive]

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
        other users the archive has. Interactions of the same time keep the order of the archive.

        Args:
            source: the archive as published, or its unpacked folder.
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
            ValueError: a damaged or foreign archive, a missing column, a malformed line, a fraction outside `[0, 1]` or
                a negative seed.

        """
        check_split(test_fraction, seed)
        archive = self.open(source, show_progress)
        target = _target(archive, output)
        if Path(os.path.realpath(source)).is_relative_to(os.path.realpath(target)):
            raise FileExistsError(
                f"source is {source}, which lies in {target}; that folder is replaced by the data set: give another "
                "output"
            )
        return write_data_set(archive, output, test_fraction=test_fraction, seed=seed, show_progress=show_progress)


def write_data_set(
    archive: OpenedArchive, output: str | Path, *, test_fraction: float, seed: int, show_progress: bool
) -> Path:
    """Write the columnar files of what has been opened; they appear when they are complete.

    Args, Returns, Raises: as `Preprocessor`.

    """
    check_split(test_fraction, seed)
    target = _target(archive, output)
    disable = None if show_progress else True
    with whole_folder(target, may_replace=is_preprocessed, what="preprocessed data set") as folder:
        with tqdm(total=archive.num_bytes, desc="read", unit="B", unit_scale=True, disable=disable) as progress:
            sequences = archive.read(folder / _PARTITIONS, progress.update)
        sequences.interactions.close()
        num_rows = sequences.interactions.num_rows
        with tqdm(total=num_rows, desc="write", unit="row", unit_scale=True, disable=disable) as progress:
            write_sequences(
                folder,
                archive.schema,
                sequences,
                test_fraction=test_fraction,
                seed=seed,
                on_rows=progress.update,
            )
        sequences.interactions.remove()
    return target


def _target(archive: OpenedArchive, output: str | Path) -> Path:
    return Path(output) / f"{archive.schema.dataset_name}.parquet"


def check_split(test_fraction: float, seed: int) -> None:
    """Raise ValueError for a fraction outside `[0, 1]` or a negative seed."""
    if not 0 <= test_fraction <= 1:
        raise ValueError(f"test_fraction is {test_fraction}; it is a part of all users: give a number between 0 and 1")
    if seed < 0:
        raise ValueError(f"seed is {seed}; seeds are not negative: give 0 or more")
