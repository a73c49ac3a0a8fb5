"""`evenrank make-sids`: makes semantic IDs for the items of a data set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from commons.cli.answer import require_output
from commons.cli.preprocess import DatasetName
from commons.console import print_summary
from commons.datasets.public.registry import PUBLIC_DATASETS
from commons.datasets.sequences.file import SequenceFile
from commons.datasets.sequences.own_parquet import DATASET_NAME, stored_schema
from commons.datasets.sids.assignment import assign_sids
from commons.datasets.sids.histories import (
    DEFAULT_HISTORY_COLUMN,
    Histories,
    ParquetHistories,
    PreprocessedHistories,
    history_chunks,
)
from commons.datasets.sids.map import is_sid_map


@dataclass
class MakeSids:
    """Assign a semantic ID to every item of a data set.

    Items that occur together in histories of training users share leading codes; histories of test users are not used.

    For example:
      evenrank make-sids ml-1m --source data --output data/sids.parquet
      evenrank make-sids parquet --source histories.parquet --output sids.parquet --codebook-sizes 256 256 256
    """

    # A data set of `evenrank preprocess`; parquet for your own, or for a parquet file with lists of item ids.
    dataset_name: tyro.conf.Positional[DatasetName]
    source: Path  # the folder of the preprocessed data set, or a parquet file
    output: Path  # the map to write, a .parquet file
    # Number of codes of each hierarchy, coarsest first; at most 65,536, or the number of items if that is more.
    codebook_sizes: tuple[int, ...] = (500, 500, 500, 500)
    vector_size: int = 64  # width of the item vectors that are quantised, at most 1,024
    window: int = 10  # items of a history co-occur if their positions differ by at most this number
    history_column: str = DEFAULT_HISTORY_COLUMN  # the list column of a parquet file; not used for other data sets
    seed: int = 0  # random seed; equal seeds give equal maps

    def run(self) -> None:
        """Make the map, then print a summary."""
        if self.output.suffix != ".parquet":
            raise ValueError(f"output is {self.output}; a map is a .parquet file: rename it")
        require_output(
            self.output, inputs={"--source": self.source}, may_replace=is_sid_map, what="map of semantic IDs"
        )
        histories, item_ids = self._open()
        with tqdm(total=len(self.codebook_sizes) + 2, unit="stage", leave=False, disable=None) as progress:
            made = assign_sids(
                histories,
                item_ids,
                self.codebook_sizes,
                vector_size=self.vector_size,
                window=self.window,
                seed=self.seed,
                on_stage=lambda stage: (progress.set_description(stage), progress.update()),
            )
        made.save(self.output)
        used = [len(np.unique(made.codes[:, : level + 1], axis=0)) for level in range(made.num_hierarchies)]
        print_summary(
            "semantic IDs",
            {
                "items": f"{made.num_items:,}",
                "codebooks": " × ".join(map(str, made.codebook_sizes)),
                "different codes": ", ".join(f"{number:,}" for number in used) + " (the first 1, 2, … hierarchies)",
                "reassigned": f"{made.options['items_told_apart']:,} items, so that every item has a different ID",
                "file": str(self.output),
            },
        )

    def _open(self) -> tuple[Histories, np.ndarray]:
        """The training users' histories, and the ids of all items."""
        is_own = self.dataset_name == DATASET_NAME
        if is_own and not self.source.is_dir():
            everyone = ParquetHistories(self.source, self.history_column, "test")
            learned = ParquetHistories(self.source, self.history_column, "train")
            return learned, np.union1d(_items_of(everyone), _items_of(learned))
        schema = stored_schema(self.source) if is_own else PUBLIC_DATASETS[self.dataset_name].schema
        sizes = SequenceFile(self.source, self.dataset_name, []).metadata.vocabulary_sizes
        return PreprocessedHistories(self.source, schema, "train"), np.arange(sizes[schema.item_feature_name])


def _items_of(histories: ParquetHistories) -> np.ndarray:
    seen = [np.unique(items) for _, _, items in history_chunks(histories)]
    return np.unique(np.concatenate([np.empty(0, np.int64), *seen]))
