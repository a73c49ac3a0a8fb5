"""The config of a SID-GR run: the fields of `sid_gr/configs/*.toml` and the flags of `sid_gr.train`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from commons.checks import Count, require_field_types
from commons.datasets.loader.data_loader import HSTU_DATASETS, SID_DATASETS
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

    map_path: str | None = None  # file with the map from items to SIDs, .parquet or .npy; optional for random data
    # Number of codes of each hierarchy, the coarsest first; equal to the map's.
    codebook_sizes: tuple[int, ...] = (500, 500, 500, 500)
    # For data set "sid", your own parquet file: its list column of item ids.
    history_column: str = DEFAULT_HISTORY_COLUMN
    num_random_items: Count = 10_000  # number of items of random data without a map

    def __post_init__(self) -> None:
        require_field_types(self)

    def load_map(self, dataset_name: str, seed: int) -> SIDMap:
        """The map of a data set.

        Raises:
            FileNotFoundError: no file at map_path.
            ValueError: map_path is not set, or its file is no map with these codebook sizes.
        """
        if self.map_path is not None:
            return SIDMap.load(self.map_path, self.codebook_sizes)
        if dataset_name in RANDOM_DATASETS:
            return random_sid_map(self.num_random_items, self.codebook_sizes, seed)
        raise ValueError(
            f"sid.map_path is not set; {dataset_name!r} needs the SIDs of its items: make them with `evenrank "
            "make-sids` and set map_path to its output"
        )


@dataclass
class ModelArgs:
    """Dimensions of the model; the data determine the codebooks and the longest row."""

    hidden_size: int = 64  # width of a token between layers, and of every embedding
    num_layers: int = 4  # number of transformer layers
    num_attention_heads: int = 4  # attention heads per layer
    kv_channels: int | None = None  # width of a head; None for hidden_size ÷ num_attention_heads
    ffn_hidden_size: int | None = None  # width of the feed-forward block; None for 4 · hidden_size
    heads: HeadKind = "separate"  # output matrices: "separate" for one per hierarchy, "shared" for one for all
    dropout: float = 0.0  # probability that an element of a block's output is dropped in training
    init_method_std: float = 0.02  # standard deviation of initial weights
    # Number of ranks that share one decoder; a divisor of the numbers of ranks and of attention heads.
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

    In training the model predicts the last `dataset.max_num_candidates` items of a user, or all items if it is 0; in
    evaluation the last item.
    """

    trainer: TrainerArgs  # how the model is trained
    dataset: DatasetArgs  # the data set and how it is read
    sid: SIDArgs = field(default_factory=SIDArgs)  # semantic IDs of the items
    model: ModelArgs = field(default_factory=ModelArgs)  # the model
    optimizer: OptimizerArgs = field(default_factory=OptimizerArgs)  # the optimizers and the sharding
    # Name of the batch shuffler for trainer.enable_balanced_shuffler. A module in `imports`, or the entry point of an
    # installed package, registers your own shuffler.
    shuffler_type: str = "sid_gr"
    # Modules to import first on every rank, installed or in the working directory, such as a module with a shuffler.
    imports: Annotated[tuple[str, ...], tyro.conf.arg(name="import")] = ()

    def __post_init__(self) -> None:
        require_shuffler(self.shuffler_type, self.imports)
        if (dataset := self.dataset.dataset_name) in HSTU_DATASETS:
            raise ValueError(
                f"dataset_name is {dataset!r}, whose items are no semantic IDs; SID-GR trains on "
                f"{', '.join(SID_DATASETS)}: write 'sid-{dataset}', or train hstu"
            )
        for name in self.trainer.eval_metrics:
            parse_metric(name, self.trainer.top_k_for_generation)
        self.model.decoder_config(codebook_sizes=self.sid.codebook_sizes, max_items=1)  # checks the model's numbers
        clips = self.trainer.optimization.max_grad_norm is not None
        if clips and self.model.tensor_model_parallel_size > 1:
            raise ValueError(
                f"max_grad_norm is {self.trainer.optimization.max_grad_norm}, tensor_model_parallel_size is "
                f"{self.model.tensor_model_parallel_size}; a rank computes only the norm of its own part: leave "
                "max_grad_norm out"
            )
