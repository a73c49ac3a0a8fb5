"""The config of a generative run: what `sid_gr/configs/*.toml` hold and what the flags of `sid_gr.train` set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from commons.checks import require_at_least
from commons.datasets.random.distribution import RANDOM_DATASETS
from commons.datasets.sids.histories import DEFAULT_HISTORY_COLUMN
from commons.datasets.sids.map import SIDMap, random_sid_map
from commons.trainer import DatasetArgs, TrainerArgs
from commons.trainer.config.load import require_shuffler, same_fields
from commons.trainer.optimize.optimizers import OptimizerArgs
from sid_gr.metrics import parse_metric
from sid_gr.model.config import HeadKind, SIDGRConfig


@dataclass
class SIDArgs:
    """Semantic IDs of the items."""

    map_path: str | None = None  # the map from items to SIDs, .parquet or .npy; random data need none
    # Codes of each hierarchy, the first one coarsest; those of the map.
    codebook_sizes: tuple[int, ...] = (500, 500, 500, 500)
    # List column of item ids in a parquet file of your own, data set "sid".
    history_column: str = DEFAULT_HISTORY_COLUMN
    num_random_items: int = 10_000  # items of random data without a map

    def __post_init__(self) -> None:
        require_at_least("num_random_items", self.num_random_items, 1)

    def load_map(self, dataset_name: str, seed: int) -> SIDMap:
        """The map of a data set.

        Raises:
            FileNotFoundError: no file at map_path.
            ValueError: no map_path, or a file that is no such map.
        """
        if self.map_path is not None:
            return SIDMap.load(self.map_path, self.codebook_sizes)
        if dataset_name in RANDOM_DATASETS:
            return random_sid_map(self.num_random_items, self.codebook_sizes, seed)
        raise ValueError(
            f"sid.map_path is not set; {dataset_name!r} has items whose SIDs must be known: make them with "
            "`evenrank make-sids` and name its output"
        )


@dataclass
class ModelArgs:
    """Dimensions of the model; the codebooks and the longest row follow from the data."""

    hidden_size: int = 64  # width of a token between layers, and of every embedding
    num_layers: int = 4  # transformer layers
    num_attention_heads: int = 4  # attention heads per layer
    kv_channels: int | None = None  # width of a head; hidden_size ÷ num_attention_heads if not given
    ffn_hidden_size: int | None = None  # width of the feed-forward block; 4 · hidden_size if not given
    heads: HeadKind = "separate"  # a matrix for every hierarchy, or one for all
    dropout: float = 0.0  # probability with which an element of a block's output is dropped in training
    init_method_std: float = 0.02  # standard deviation of initial weights
    # Ranks that share one decoder; a divisor of the ranks and of the attention heads.
    tensor_model_parallel_size: int = 1

    def decoder_config(self, *, codebook_sizes: tuple[int, ...], max_items: int) -> SIDGRConfig:
        """The model's own config.

        Raises:
            ValueError: a number outside its range.
        """
        return SIDGRConfig(**same_fields(SIDGRConfig, self), codebook_sizes=codebook_sizes, max_items=max_items)


@dataclass
class TrainConfig:
    """A training run of a semantic-ID decoder.

    The last `dataset.max_num_candidates` items of a user are predicted in training, or all items where it is 0; in
    evaluation the last item is.
    """

    trainer: TrainerArgs  # how the model is trained
    dataset: DatasetArgs  # what it is trained on
    sid: SIDArgs = field(default_factory=SIDArgs)  # semantic IDs of its items
    model: ModelArgs = field(default_factory=ModelArgs)  # the model
    optimizer: OptimizerArgs = field(default_factory=OptimizerArgs)  # what trains it
    # Name of a batch shuffler, used with trainer.enable_balanced_shuffler; one of your own is registered by `imports`
    # or by the entry point of an installed package.
    shuffler_type: str = "sid_gr"
    # Modules to import first on every rank, installed or in the working directory, such as one with a shuffler.
    imports: Annotated[tuple[str, ...], tyro.conf.arg(name="import")] = ()

    def __post_init__(self) -> None:
        require_shuffler(self.shuffler_type, self.imports)
        for name in self.trainer.eval_metrics:
            parse_metric(name, self.trainer.top_k_for_generation)
        self.model.decoder_config(codebook_sizes=self.sid.codebook_sizes, max_items=1)  # raises what is wrong with it
        clips = self.trainer.optimization.max_grad_norm is not None
        if clips and self.model.tensor_model_parallel_size > 1:
            raise ValueError(
                f"max_grad_norm is {self.trainer.optimization.max_grad_norm}, tensor_model_parallel_size is "
                f"{self.model.tensor_model_parallel_size}; every rank knows the norm of its own part alone: leave "
                "max_grad_norm out"
            )
