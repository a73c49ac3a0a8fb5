"""Data sets by name, and the one function that makes a loader for any of them.

To add a data set of sequences: add it to `PUBLIC_DATASETS`; one of another kind: add its function to `_BUILDERS`. A
builder takes the keyword arguments of `get_data_loader` that concern it and returns a data set whose items are batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from commons.checks import as_count
from commons.datasets.loader.resumable import ResumableLoader
from commons.datasets.public.registry import PUBLIC_DATASETS
from commons.datasets.random.dataset import RandomBatches, RandomHSTUDataset, user_like_dataset
from commons.datasets.random.distribution import RANDOM_DATASETS, LengthDistribution
from commons.datasets.samplers.epoch import EpochSampler, RankShare
from commons.datasets.sequences.dataset import SequenceDataset
from commons.datasets.sequences.event_columns import EventColumns
from commons.datasets.sequences.file import SequenceFile, SequenceSchema
from commons.datasets.sequences.metadata import MANIFEST
from commons.datasets.sequences.own_parquet import DATASET_NAME as OWN_DATASET
from commons.datasets.sequences.own_parquet import columns_of, schema_of
from commons.datasets.sequences.writer import SPLITS
from commons.datasets.sids.dataset import SIDDataset
from commons.datasets.sids.histories import DEFAULT_HISTORY_COLUMN, Histories, ParquetHistories, PreprocessedHistories
from commons.datasets.sids.map import SIDMap
from commons.datasets.sids.random import RandomSIDDataset

BatchDataset = SequenceDataset | RandomHSTUDataset | SIDDataset | RandomSIDDataset
_Path = str | Path | None


def _build_random(*, split: str, share: RankShare, dataset_path: _Path, **options: Any) -> RandomHSTUDataset:
    return user_like_dataset(**share.random_stream(split), **options)


def _build_sequences(
    schema: SequenceSchema,
    *,
    share: RankShare,
    dataset_path: _Path,
    contextual_feature_names: Sequence[str] | None = None,
    **options: Any,
) -> SequenceDataset:
    path = _require_path(dataset_path, schema.dataset_name)
    if contextual_feature_names is not None:
        # A name given twice would be two tokens of one feature.
        names = tuple(dict.fromkeys(contextual_feature_names))
        schema = dataclasses.replace(schema, contextual_feature_names=names)
    return SequenceDataset(path, schema, **options)


def _build_own(*, dataset_path: _Path, columns: EventColumns | None = None, **options: Any) -> SequenceDataset:
    given = columns or EventColumns()
    path = _require_path(dataset_path, OWN_DATASET)
    _require_preprocessed(path, given)
    file = SequenceFile(path, OWN_DATASET, [])
    made_with, timestamps_per_second = columns_of(file.metadata)
    schema = schema_of(given.chosen_from(made_with, str(file.path)), made_with, timestamps_per_second)
    return _build_sequences(schema, dataset_path=dataset_path, **options)


def _require_path(path: _Path, name: str) -> Path:
    if path is None:
        raise ValueError(
            f"dataset_path is not set; {name!r} is read from files: set dataset_path to the output folder of `evenrank "
            f"preprocess {name}`"
        )
    return Path(path)


def _require_preprocessed(folder: Path, columns: EventColumns) -> None:
    """Raise ValueError for raw parquet files, with the command that makes a data set of them."""
    is_made = any((own / MANIFEST).is_file() for own in (folder, folder / f"{OWN_DATASET}.parquet"))
    if not is_made and (folder.is_file() or any(folder.rglob("*.parquet"))):
        raise ValueError(
            f"dataset_path {folder} holds parquet files as they are; tables need dense ids, which are made once: run "
            f"`evenrank preprocess parquet --source {folder} --output FOLDER {columns.as_flags()}".rstrip()
            + "` and give FOLDER as dataset_path"
        )


def _build_random_sids(
    *,
    split: str,
    share: RankShare,
    dataset_path: _Path,
    max_history_seqlen: int,
    max_num_candidates: int,
    num_tasks: int,
    sid_map: SIDMap | None = None,
    num_batches: int = 100,
    length_distribution: LengthDistribution | None = None,
    **options: Any,
) -> RandomSIDDataset:
    return RandomSIDDataset(
        _require_map(sid_map, num_tasks),
        num_batches=num_batches,
        max_history_length=max_history_seqlen,
        max_candidate_length=_candidates(split, max_num_candidates),
        history_dist=(length_distribution or LengthDistribution()).within(max_history_seqlen),
        **share.random_stream(split),
        **options,
    )


def _build_sids(
    schema: SequenceSchema | None,
    *,
    split: str,
    share: RankShare,
    dataset_path: _Path,
    batch_size: int,
    max_history_seqlen: int,
    max_num_candidates: int,
    num_tasks: int,
    sid_map: SIDMap | None = None,
    history_column: str = DEFAULT_HISTORY_COLUMN,
) -> SIDDataset:
    """Histories of a preprocessed data set or, without a schema, of any parquet file."""
    known = _require_map(sid_map, num_tasks)
    if dataset_path is None:
        made_by = "holds a list column of item ids" if schema is None else "is written by `evenrank preprocess`"
        raise ValueError(f"dataset_path is not set; histories are read from a parquet file that {made_by}: set it")
    histories: Histories = (
        ParquetHistories(dataset_path, history_column, split)
        if schema is None
        else PreprocessedHistories(dataset_path, schema, split)
    )
    return SIDDataset(
        histories,
        known,
        batch_size=batch_size,
        max_history_length=max_history_seqlen,
        max_candidate_length=_candidates(split, max_num_candidates),
    )


def _candidates(split: str, max_num_candidates: int) -> int | None:
    """Of semantic IDs: None for all items; in evaluation the last item alone, so that a user is predicted once."""
    return (max_num_candidates or None) if split == "train" else 1


def _require_map(sid_map: SIDMap | None, num_tasks: int) -> SIDMap:
    if sid_map is None:
        raise ValueError(
            "sid_map is not given; batches of semantic IDs need to know every item's SID: load one with SIDMap.load"
        )
    if num_tasks != 1:
        raise ValueError(f"num_tasks is {num_tasks}; the next item is the one task of semantic IDs: leave it at 1")
    return sid_map


_BUILDERS: dict[str, Callable[..., BatchDataset]] = {
    "random": _build_random,
    OWN_DATASET: _build_own,
    **{name: partial(_build_sequences, dataset.schema) for name, dataset in PUBLIC_DATASETS.items()},
    # Semantic IDs: random items, any parquet file of item-id histories, and preprocessed data sets.
    "sid-random": _build_random_sids,
    "sid": partial(_build_sids, None),
    **{f"sid-{name}": partial(_build_sids, dataset.schema) for name, dataset in PUBLIC_DATASETS.items()},
}
# By the kind of their batches: HSTUBatch and GPTSIDBatch.
HSTU_DATASETS = ("random", *PUBLIC_DATASETS, OWN_DATASET)
SID_DATASETS = tuple(name for name in _BUILDERS if name not in HSTU_DATASETS)


def list_datasets() -> list[str]:
    """Names that `get_data_loader` knows."""
    return sorted(_BUILDERS)


def get_data_loader(
    dataset_name: str,
    split: str = "train",
    *,
    batch_size: int,
    max_history_seqlen: int,
    dataset_path: str | Path | None = None,
    max_num_candidates: int = 0,
    num_tasks: int = 1,
    rank: int = 0,
    world_size: int = 1,
    shuffle: bool = False,
    drop_last: bool = False,
    seed: int = 1234,
    num_workers: int = 0,
    pin_memory: bool = False,
    **options: Any,
) -> ResumableLoader:
    """A loader of one rank's batches.

    `loader.dataset` tells vocabulary sizes and the longest sequence. Iterating again draws the next epoch;
    `loader.sampler.set_epoch(epoch)` chooses one, `loader.sampler.start_at(row)` a place in it. `loader.state_dict()`
    is the place behind the last batch that was given, however many worker processes have read ahead. Ranks may have
    different numbers of batches.

    Args:
        dataset_name: one of `list_datasets()`.
        split: "train" or "test".
        batch_size: rows per batch and rank; an incomplete last batch is padded.
        max_history_seqlen: the most items of a history.
        dataset_path: the file of the data set, or its folder; not needed for random data.
        max_num_candidates: the most candidates per row.
        num_tasks: labels per candidate, or per item without candidates.
        rank: this rank among those that share the data.
        world_size: number of these ranks.
        shuffle: a new order in every epoch.
        drop_last: leave out an incomplete last batch.
        seed: of the order and of random data; the same on every rank.
        num_workers: processes that assemble batches; 0 for none.
        pin_memory: put batches in pinned host memory.
        options: further arguments of the data set, such as `num_batches` and `length_distribution` of random
            data, `contextual_feature_names` and `table_sizes` of public data, `columns` of own parquet files,
            `timestamps` of all three, or the `sid_map` of semantic IDs.

    Raises:
        KeyError: an unknown data set.
        FileNotFoundError: no file at `dataset_path`.
        ValueError: an argument out of range, or a damaged or foreign file.

    >>> loader = get_data_loader("random", batch_size=4, max_history_seqlen=20, num_batches=3)
    >>> [batch.actual_batch_size for batch in loader]
    [4, 4, 4]

    """
    if dataset_name not in _BUILDERS:
        raise KeyError(
            f"dataset_name is {dataset_name!r}; known data sets are {', '.join(list_datasets())}: choose one of them"
        )
    if dataset_name in RANDOM_DATASETS and split not in SPLITS:
        raise ValueError(f"split is {split!r}, random data have {', '.join(SPLITS)}: choose one of them")
    as_count(batch_size, "batch_size", 1)
    as_count(max_history_seqlen, "max_history_seqlen", 1)
    as_count(max_num_candidates, "max_num_candidates", 0)
    as_count(seed, "seed", 0)
    as_count(num_workers, "num_workers", 0)
    share = RankShare(rank=rank, world_size=world_size, shuffle=shuffle, drop_last=drop_last, seed=seed)
    dataset = _BUILDERS[dataset_name](
        split=split,
        batch_size=batch_size,
        max_history_seqlen=max_history_seqlen,
        dataset_path=dataset_path,
        max_num_candidates=max_num_candidates,
        num_tasks=num_tasks,
        share=share,
        **options,
    )
    sampler: EpochSampler[Any] = (
        share.of_random(len(dataset), batch_size)
        if isinstance(dataset, RandomBatches)
        else share.of_rows(len(dataset), batch_size)
    )
    return ResumableLoader(dataset, sampler, num_workers=num_workers, pin_memory=pin_memory)
