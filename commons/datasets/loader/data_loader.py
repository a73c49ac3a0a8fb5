"""Data sets by name, and the function that makes a loader for any of them.

To add a data set of sequences, add it to `PUBLIC_DATASETS`; for another kind, add a branch to `get_data_loader`.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commons.checks import require_names
from commons.datasets.loader.resumable import ResumableLoader
from commons.datasets.public.registry import PUBLIC_DATASETS
from commons.datasets.random.dataset import RandomBatches, RandomHSTUDataset, RandomSIDDataset, user_like_dataset
from commons.datasets.random.distribution import RANDOM_DATASETS, LengthDistribution
from commons.datasets.samplers.epoch import BatchOrderSampler, EpochSampler, ShardedBatchSampler
from commons.datasets.sequences.dataset import SequenceDataset
from commons.datasets.sequences.event_columns import EventColumns
from commons.datasets.sequences.file import SequenceSchema
from commons.datasets.sequences.metadata import MANIFEST
from commons.datasets.sequences.own_parquet import DATASET_NAME as OWN_DATASET
from commons.datasets.sequences.own_parquet import stored_schema
from commons.datasets.sids.dataset import SIDDataset
from commons.datasets.sids.histories import DEFAULT_HISTORY_COLUMN, Histories, ParquetHistories, PreprocessedHistories
from commons.datasets.sids.map import SIDMap

BatchDataset = SequenceDataset | RandomHSTUDataset | SIDDataset | RandomSIDDataset
# Data sets with HSTUBatch, and those with GPTSIDBatch: random items, any parquet file of item-id histories ("sid"), and
# preprocessed data sets.
HSTU_DATASETS = ("random", *PUBLIC_DATASETS, OWN_DATASET)
SID_DATASETS = ("sid-random", "sid", *(f"sid-{name}" for name in (*PUBLIC_DATASETS, OWN_DATASET)))


def _make_sequences(
    name: str,
    split: str,
    path: str | Path | None,
    *,
    contextual_feature_names: Sequence[str] | None = None,
    columns: EventColumns | None = None,
    **options: Any,
) -> SequenceDataset:
    if path is None:
        raise ValueError(
            f"dataset_path is not set; {name!r} is read from files: set dataset_path to the output folder of `evenrank "
            f"preprocess {name}`"
        )
    schema = _schema(name, Path(path), columns)
    if contextual_feature_names is not None:
        # Without repeats: a repeated name would add two tokens for one feature.
        names = tuple(dict.fromkeys(require_names("contextual_feature_names", contextual_feature_names)))
        schema = dataclasses.replace(schema, contextual_feature_names=names)
    return SequenceDataset(path, schema, split=split, **options)


def _schema(name: str, path: Path, given: EventColumns | None = None) -> SequenceSchema:
    """The schema of a data set; ValueError for a user's raw parquet files, with the command to preprocess them."""
    if name != OWN_DATASET:
        return PUBLIC_DATASETS[name].schema
    given = given or EventColumns()
    is_made = any((own / MANIFEST).is_file() for own in (path, path / f"{OWN_DATASET}.parquet"))
    if not is_made and (path.is_file() or any(path.rglob("*.parquet"))):
        raise ValueError(
            f"dataset_path {path} has raw parquet files; tables need dense ids, which preprocessing assigns: run "
            f"`evenrank preprocess parquet --source {shlex.quote(str(path))} --output FOLDER"
            + f" {given.as_flags()}".rstrip()
            + "` and give FOLDER as dataset_path"
        )
    return stored_schema(path, given)


def _make_sids(
    name: str,
    split: str,
    path: str | Path | None,
    stream: dict[str, Any],
    *,
    batch_size: int,
    max_history_seqlen: int,
    max_num_candidates: int = 0,
    num_tasks: int = 1,
    sid_map: SIDMap | None = None,
    history_column: str = DEFAULT_HISTORY_COLUMN,
    num_batches: int = 100,
    length_distribution: LengthDistribution | None = None,
    **options: Any,
) -> SIDDataset | RandomSIDDataset:
    if sid_map is None:
        raise ValueError(
            "sid_map is not given; batches of semantic IDs need every item's SID: load a map with SIDMap.load"
        )
    if name != "sid" and history_column != DEFAULT_HISTORY_COLUMN:
        raise ValueError(
            f"history_column is {history_column!r}, dataset_name is {name!r}, whose items are known; the column is of "
            "data set 'sid', a parquet file of your own: leave it out, or correct dataset_name"
        )
    if num_tasks != 1:
        raise ValueError(f"num_tasks is {num_tasks}; semantic IDs have one task, the next item: leave it at 1")
    # In evaluation only the last item is a candidate, so that every user is predicted once.
    longest = (max_history_seqlen, max_num_candidates if split == "train" else 1)
    if longest[1] == 0:  # all items are candidates, also the one behind a full history, which evaluation predicts
        longest = (0, max_history_seqlen + 1)
    sizes = {"batch_size": batch_size, "max_history_length": longest[0], "max_candidate_length": longest[1]}
    if name in RANDOM_DATASETS:
        lengths = (length_distribution or LengthDistribution()).within(max_history_seqlen)
        return RandomSIDDataset(sid_map, num_batches=num_batches, history_dist=lengths, **sizes, **stream, **options)
    if path is None:
        made_by = "has a list column of item ids" if name == "sid" else "`evenrank preprocess` has written"
        raise ValueError(f"dataset_path is not set; histories are read from a parquet file that {made_by}: set it")
    histories: Histories
    if name == "sid":
        histories = ParquetHistories(path, history_column, split)
    else:
        histories = PreprocessedHistories(path, _schema(name.removeprefix("sid-"), Path(path)), split)
    return SIDDataset(histories, sid_map, **sizes, **options)


def list_datasets() -> list[str]:
    """All names for `get_data_loader`."""
    return sorted((*HSTU_DATASETS, *SID_DATASETS))


def get_data_loader(
    dataset_name: str,
    split: str = "train",
    *,
    batch_size: int,
    dataset_path: str | Path | None = None,
    rank: int = 0,
    world_size: int = 1,
    shuffle: bool = False,
    drop_last: bool = False,
    seed: int = 1234,
    num_workers: int = 0,
    pin_memory: bool = False,
    **options: Any,
) -> ResumableLoader:
    """Make a loader of one rank's batches; values must have passed the checks of DatasetArgs and TrainerArgs.

    `split` is "train" or "test". `batch_size` is the number of rows per rank; the last batch may be padded. `rank` is
    the rank among the `world_size` ranks that share the data; all have the same seed. Other arguments are those of
    DatasetArgs, or of the data set: `num_batches` and `length_distribution` of random data, `contextual_feature_names`
    and `table_sizes` of public data, `columns` of your own parquet files, `timestamps` of all three, `sid_map` of
    semantic IDs.

    `loader.dataset` has the vocabulary sizes and the longest sequence. Iterating again draws the next epoch;
    `loader.sampler.set_epoch(epoch)` sets the epoch, `loader.sampler.start_at(row)` a place in it.
    `loader.state_dict()` is the place after the last returned batch, whatever number of batches worker processes have
    prefetched. Ranks may have different numbers of batches.

    Raises:
        KeyError: an unknown data set.
        FileNotFoundError: no file at `dataset_path`.
        ValueError: an argument that does not fit the data set, a damaged file, or one that evenrank did not write.

    >>> loader = get_data_loader("random", batch_size=4, max_history_seqlen=20, num_batches=3)
    >>> [batch.actual_batch_size for batch in loader]
    [4, 4, 4]
    """
    if dataset_name not in list_datasets():
        raise KeyError(
            f"dataset_name is {dataset_name!r}; known data sets are {', '.join(list_datasets())}: choose one of them"
        )
    # Every split and rank has its own stream of random data.
    stream: dict[str, Any] = {"seed": seed * 2 + (split != "train"), "rank": rank, "world_size": world_size}
    options |= {"batch_size": batch_size}
    dataset: BatchDataset
    if dataset_name == "random":
        dataset = user_like_dataset(**stream, **options)
    elif dataset_name in SID_DATASETS:
        dataset = _make_sids(dataset_name, split, dataset_path, stream, **options)
    else:
        dataset = _make_sequences(dataset_name, split, dataset_path, **options)
    sampler: EpochSampler[Any]
    order: dict[str, Any] = {"shuffle": shuffle, "seed": seed}
    if isinstance(dataset, RandomBatches):  # its items are the batches of this rank
        sampler = BatchOrderSampler(len(dataset), rows_per_step=batch_size * world_size, **order)
    else:
        order |= {"rank": rank, "world_size": world_size, "drop_last": drop_last}
        sampler = ShardedBatchSampler(len(dataset), batch_size, **order)
    return ResumableLoader(dataset, sampler, num_workers=num_workers, pin_memory=pin_memory)
