"""The builders of semantic-ID data sets for `get_data_loader`.

They take `sid_map` beside its arguments. In training `max_num_candidates` of a user's last items are candidates, or all
items where it is 0; in evaluation the last item alone is, so that a user is asked for once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from commons.datasets.random.distribution import LengthDistribution
from commons.datasets.samplers.epoch import EpochSampler, RankShare
from commons.datasets.sequences.file import SequenceSchema
from commons.datasets.sids.dataset import SIDDataset
from commons.datasets.sids.histories import Histories, ParquetHistories, PreprocessedHistories
from commons.datasets.sids.map import SIDMap
from commons.datasets.sids.random import RandomSIDDataset

DEFAULT_HISTORY_COLUMN = "item_id"


def build_random_sids(
    *,
    split: str,
    batch_size: int,
    max_history_seqlen: int,
    max_num_candidates: int,
    num_tasks: int,
    share: RankShare,
    dataset_path: str | Path | None,
    sid_map: SIDMap | None = None,
    num_batches: int = 100,
    length_distribution: LengthDistribution | None = None,
    **options: Any,
) -> tuple[RandomSIDDataset, EpochSampler[int]]:
    """Random items of a map; all batches are full, and there is no file."""
    dataset = RandomSIDDataset(
        _require_map(sid_map, num_tasks),
        batch_size=batch_size,
        num_batches=num_batches,
        max_history_length=max_history_seqlen,
        max_candidate_length=_candidates(split, max_num_candidates),
        history_dist=(length_distribution or LengthDistribution()).within(max_history_seqlen),
        **share.random_stream(split),
        **options,
    )
    return dataset, share.of_random(len(dataset), batch_size)


def sid_builder(schema: SequenceSchema | None) -> Callable[..., tuple[SIDDataset, EpochSampler[list[int]]]]:
    """The builder for histories of a preprocessed data set or, without a schema, of any parquet file."""

    def open_histories(path: str | Path | None, split: str, column: str) -> Histories:
        if path is None:
            made_by = "holds a list column of item ids" if schema is None else "is written by `evenrank preprocess`"
            raise ValueError(f"dataset_path is not set; histories are read from a parquet file that {made_by}: set it")
        if schema is None:
            return ParquetHistories(path, column, split)
        return PreprocessedHistories(path, schema, split)

    def build(
        *,
        split: str,
        batch_size: int,
        max_history_seqlen: int,
        max_num_candidates: int,
        num_tasks: int,
        share: RankShare,
        dataset_path: str | Path | None,
        sid_map: SIDMap | None = None,
        history_column: str = DEFAULT_HISTORY_COLUMN,
    ) -> tuple[SIDDataset, EpochSampler[list[int]]]:
        known = _require_map(sid_map, num_tasks)
        dataset = SIDDataset(
            open_histories(dataset_path, split, history_column),
            known,
            batch_size=batch_size,
            max_history_length=max_history_seqlen,
            max_candidate_length=_candidates(split, max_num_candidates),
        )
        return dataset, share.of_rows(len(dataset), batch_size)

    return build


def _candidates(split: str, max_num_candidates: int) -> int | None:
    return (max_num_candidates or None) if split == "train" else 1


def _require_map(sid_map: SIDMap | None, num_tasks: int) -> SIDMap:
    if sid_map is None:
        raise ValueError(
            "sid_map is not given; batches of semantic IDs need to know every item's SID: load one with SIDMap.load"
        )
    if num_tasks != 1:
        raise ValueError(f"num_tasks is {num_tasks}; the next item is the one task of semantic IDs: leave it at 1")
    return sid_map
