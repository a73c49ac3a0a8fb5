"""evenrank's public names under one roof.

The first use of a name imports its module: `import evenrank` imports no other module, and the names for batches of any
kind (planner, micro-batches, dispatch) need no TorchRec.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commons.version import __version__ as __version__

if TYPE_CHECKING:  # the same names as below, for type checkers and editors
    from commons.datasets.gpt_sid_batch import GPTSIDBatch as GPTSIDBatch
    from commons.datasets.hstu_batch import FeatureConfig as FeatureConfig
    from commons.datasets.hstu_batch import HSTUBatch as HSTUBatch
    from commons.datasets.hstu_batch import RandomDistribution as RandomDistribution
    from commons.datasets.samplers.balanced import BalancedBatchSampler as BalancedBatchSampler
    from commons.datasets.samplers.budget import BudgetBatchSampler as BudgetBatchSampler
    from commons.dispatch import BalancedChunks as BalancedChunks
    from commons.dispatch import BalancedShare as BalancedShare
    from commons.dispatch import RedistributedRows as RedistributedRows
    from commons.dispatch import SingleRankLoader as SingleRankLoader
    from commons.dispatch import Trim as Trim
    from commons.dispatch import redistribute_balanced as redistribute_balanced
    from commons.dispatch import scatter_balanced as scatter_balanced
    from commons.dispatch import split_balanced as split_balanced
    from commons.dispatch import trim_batch as trim_batch
    from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler as BaseTaskBalancedBatchShuffler
    from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler as IdentityBalancedBatchShuffler
    from commons.distributed.batch_shuffler import ShuffleHandle as ShuffleHandle
    from commons.distributed.batch_shuffler_factory import BatchShufflerFactory as BatchShufflerFactory
    from commons.distributed.batch_shuffler_factory import register_batch_shuffler as register_batch_shuffler
    from commons.distributed.channel.absence import RankMissingError as RankMissingError
    from commons.distributed.channel.absence import ShufflerAbortedError as ShufflerAbortedError
    from commons.distributed.loss import global_mean_loss as global_mean_loss
    from commons.distributed.loss import mean_over_ranks as mean_over_ranks
    from commons.distributed.options import ShufflerOptions as ShufflerOptions
    from commons.distributed.stats import ShuffleStats as ShuffleStats
    from commons.distributed.tokens_shuffler import TokensBalancedBatchShuffler as TokensBalancedBatchShuffler
    from commons.micro_batching import MicroBatches as MicroBatches
    from commons.micro_batching import MicroBatchSpec as MicroBatchSpec
    from commons.micro_batching import PackedRows as PackedRows
    from commons.micro_batching import count_loss_tokens as count_loss_tokens
    from commons.micro_batching import ffd_allocate as ffd_allocate
    from commons.micro_batching import get_allocate_fn as get_allocate_fn
    from commons.micro_batching import kk_allocate as kk_allocate
    from commons.micro_batching import pack_micro_batches as pack_micro_batches
    from commons.micro_batching import pack_rows as pack_rows
    from commons.micro_batching import packing_metrics as packing_metrics
    from commons.micro_batching import padded_allocate as padded_allocate
    from commons.micro_batching import refined_allocate as refined_allocate
    from commons.perf_model.partitioner import Grid as Grid
    from commons.perf_model.partitioner import Partition as Partition
    from commons.perf_model.partitioner import karmarkar_karp as karmarkar_karp
    from commons.perf_model.partitioner import lower_bound as lower_bound
    from commons.perf_model.partitioner import partition as partition
    from commons.perf_model.partitioner import partition_grid as partition_grid
    from commons.perf_model.task_estimator import HSTUAttentionTask as HSTUAttentionTask
    from commons.perf_model.task_estimator import SelfAttentionTask as SelfAttentionTask
    from commons.pipeline import TrainPipelineFactory as TrainPipelineFactory
    from commons.pipeline import balanced as balanced
    from commons.pipeline import balanced_iter as balanced_iter
    from commons.pipeline import shuffle_stage as shuffle_stage
    from commons.pipeline import windowed_iter as windowed_iter
    from commons.sequence_batch.batch import BaseBatch as BaseBatch
    from commons.sequence_batch.schema import register_batch_type as register_batch_type
    from commons.trainer import DatasetArgs as DatasetArgs
    from commons.trainer import TrainerArgs as TrainerArgs
    from hstu.batch_shuffler import HSTUBalancedBatchShuffler as HSTUBalancedBatchShuffler
    from sid_gr.batch_shuffler import SIDGRBalancedBatchShuffler as SIDGRBalancedBatchShuffler

_NAMES = {
    "commons.datasets.gpt_sid_batch": ("GPTSIDBatch",),
    "commons.datasets.hstu_batch": ("FeatureConfig", "HSTUBatch", "RandomDistribution"),
    "commons.datasets.samplers.balanced": ("BalancedBatchSampler",),
    "commons.datasets.samplers.budget": ("BudgetBatchSampler",),
    "commons.dispatch": (
        "BalancedChunks",
        "BalancedShare",
        "RedistributedRows",
        "SingleRankLoader",
        "Trim",
        "redistribute_balanced",
        "scatter_balanced",
        "split_balanced",
        "trim_batch",
    ),
    "commons.distributed.batch_shuffler": (
        "BaseTaskBalancedBatchShuffler",
        "IdentityBalancedBatchShuffler",
        "ShuffleHandle",
    ),
    "commons.distributed.batch_shuffler_factory": ("BatchShufflerFactory", "register_batch_shuffler"),
    "commons.distributed.channel.absence": ("RankMissingError", "ShufflerAbortedError"),
    "commons.distributed.loss": ("global_mean_loss", "mean_over_ranks"),
    "commons.distributed.options": ("ShufflerOptions",),
    "commons.distributed.stats": ("ShuffleStats",),
    "commons.distributed.tokens_shuffler": ("TokensBalancedBatchShuffler",),
    "commons.micro_batching": (
        "MicroBatchSpec",
        "MicroBatches",
        "PackedRows",
        "count_loss_tokens",
        "ffd_allocate",
        "get_allocate_fn",
        "kk_allocate",
        "pack_micro_batches",
        "pack_rows",
        "packing_metrics",
        "padded_allocate",
        "refined_allocate",
    ),
    "commons.perf_model.partitioner": (
        "Grid",
        "Partition",
        "karmarkar_karp",
        "lower_bound",
        "partition",
        "partition_grid",
    ),
    "commons.perf_model.task_estimator": ("HSTUAttentionTask", "SelfAttentionTask"),
    "commons.pipeline": ("TrainPipelineFactory", "balanced", "balanced_iter", "shuffle_stage", "windowed_iter"),
    "commons.sequence_batch.batch": ("BaseBatch",),
    "commons.sequence_batch.schema": ("register_batch_type",),
    "commons.trainer": ("DatasetArgs", "TrainerArgs"),
    "hstu.batch_shuffler": ("HSTUBalancedBatchShuffler",),
    "sid_gr.batch_shuffler": ("SIDGRBalancedBatchShuffler",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = ["__version__", *_MODULE_OF]


if not TYPE_CHECKING:  # or type checkers would take every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(_MODULE_OF[name]), name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{__name__}.{name} needs {error.name}, which is not installed: install the extra 'cuda', or 'cpu' and "
                "then torchrec with --no-deps, as README says",
                name=error.name,
            ) from error
        globals()[name] = value  # the next use does not call __getattr__
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
