"""The base of the ranking and retrieval models: embeddings ─► tokens ─► HSTU layers."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.datasets.hstu_batch import HSTUBatch
from commons.trainer.optimize.loss_scaling import unscaled_gradients
from hstu.model.config import COMPUTE_DTYPES, SequenceModelConfig
from hstu.model.layer import HSTUEncoder
from hstu.model.tokens import TokenSequence, interleave_tokens

# By feature name, one mapping for every width of a table; values `(num_ids, width)`.
Embeddings = Sequence[Mapping[str, JaggedTensor]]


class HSTUEmbedding(nn.Module):
    """Looks up every feature in its table.

    The forward has no control flow and the collections are TorchRec modules, so DistributedModelParallel can shard the
    tables and a train pipeline can separate the lookups from the rest of the model.

    Args:
        config: the tables, their widths and their features; there is one collection for each width.
        device: device of the tables, None for the CPU; with "meta", sharding makes and initialises the shards.
        plain: whether to use collections that are not sharded, for one process and for other dtypes than float32.
            Parameter names are the same.
    """

    def __init__(self, config: SequenceModelConfig, *, device: torch.device | None = None, plain: bool = False) -> None:
        super().__init__()
        self.is_plain = plain
        self.collections = nn.ModuleDict()
        collection = _PlainCollection if plain else EmbeddingCollection
        widths, features = config.table_widths, config.features_of_tables
        for width in sorted(set(widths.values())):
            tables = [
                EmbeddingConfig(name=name, embedding_dim=width, num_embeddings=num_rows, feature_names=features[name])
                for name, num_rows in config.embedding_tables.items()
                if widths[name] == width
            ]
            self.collections[str(width)] = collection(tables=tables, device=device)

    def forward(self, features: KeyedJaggedTensor) -> list[dict[str, JaggedTensor]]:
        """Embeddings by feature name, one dictionary for every width.

        `features` are integer ids; features without a table are ignored. The embeddings of a feature are a JaggedTensor
        with values `(num_ids, width)` and lengths `(batch_size,)`, in the dictionary of its width.
        """
        return [collection(features) for collection in self.collections.values()]


class _PlainCollection(EmbeddingCollection):
    """TorchRec's collection, whose output has the dtype of the tables instead of float32."""

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        ids = features.to_dict()
        return {
            name: JaggedTensor(values=self.embeddings[table.name](ids[name].values()), lengths=ids[name].lengths())
            for table in self.embedding_configs()
            for name in table.feature_names
        }


class SequenceTower(nn.Module):
    """The dense part of a model: projections, layers, head and loss."""

    def __init__(self, config: SequenceModelConfig, pg_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.config = config
        self.encoder = HSTUEncoder(config.hstu)
        hidden_size = config.hstu.hidden_size
        self.projections = nn.ModuleDict(
            {name: nn.Linear(width, hidden_size) for name, width in config.table_widths.items() if width != hidden_size}
        )
        self._pg_group = pg_group
        self._loss_scaler: torch.amp.GradScaler | None = None
        self._scaled_features: frozenset[str] = frozenset()

    def forward(self, embeddings: Embeddings, batch: HSTUBatch) -> tuple[torch.Tensor, Any]:
        """The loss of a batch to call `backward` on, and the other results of the step.

        The loss is W × local sum ÷ global count, times the scale if losses are scaled.

        Raises:
            ValueError: the batch does not fit the model, for example a row is too long, or labels or timestamps for
                the time bias are missing.
            TypeError: labels are no KeyedJaggedTensor.
            KeyError: a feature without a table, or without values in the batch.
        """
        self._check(batch)
        scale = None
        if self._loss_scaler is not None:
            embeddings, scale = self._with_unscaled_gradients(by_feature(embeddings), self._loss_scaler)
        loss, output = self._compute(embeddings, batch)
        return loss if scale is None else loss * scale, output

    @abstractmethod
    def _check(self, batch: HSTUBatch) -> None:
        """Raise ValueError for a batch that this model cannot train on."""

    @abstractmethod
    def _compute(self, embeddings: Embeddings, batch: HSTUBatch) -> tuple[torch.Tensor, Any]:
        """The loss, not scaled, and the output of a batch."""

    def encode(self, embeddings: Embeddings, batch: HSTUBatch) -> TokenSequence:
        """Run the layers over a batch; the values of the result are the output of the layers.

        The attention plan is made from the host's lengths, see `HSTUBatch.host_lengths`, without waiting for the
        device.

        Raises:
            ValueError: a row is too long, or timestamps for the time bias are missing.
            KeyError: a feature without a table.
        """
        action = batch.action_feature_name
        names = [*batch.contextual_feature_names, batch.item_feature_name, *([action] if action else [])]
        tables = list(self.config.embedding_tables)
        if missing := [name for name in names if name not in tables]:
            raise KeyError(
                f"features {missing} have no table, the model has {tables}; each feature of the sequence needs a "
                "table: add them to embedding_tables"
            )
        found = by_feature(embeddings)
        sequence = interleave_tokens(
            [self._project(name, found[name]) for name in batch.contextual_feature_names],
            self._project(batch.item_feature_name, found[batch.item_feature_name]),
            None if action is None else self._project(action, found[action]),
        )
        num_contextual, num_items, num_candidates = batch.host_sequence_lengths()
        step = sequence.tokens_per_item
        lengths = (num_contextual + step * num_items, step * num_candidates, num_contextual)
        output = self.encoder(
            # TorchRec's embeddings are float32 for any dtype of the layers.
            sequence.values.to(self.encoder.norm.weight.dtype),
            *map(torch.from_numpy, lengths),
            self._times(sequence, batch),
        )
        return replace(sequence, values=output)

    def scale_loss(self, scaler: torch.amp.GradScaler, scaled_features: Collection[str] = ()) -> None:
        """Scale losses from now on; gradients of embeddings are unscaled, except for `scaled_features`."""
        self._loss_scaler, self._scaled_features = scaler, frozenset(scaled_features)

    def _with_unscaled_gradients(
        self, embeddings: dict[str, JaggedTensor], scaler: torch.amp.GradScaler
    ) -> tuple[Embeddings, torch.Tensor]:
        """Embeddings whose gradients are unscaled, and the factor of the loss."""
        device = next(iter(embeddings.values())).values().device
        scale = scaler.scale(torch.ones((), device=device))  # nothing is read from the device
        names = [name for name in embeddings if name not in self._scaled_features]
        values = unscaled_gradients([embeddings[name].values() for name in names], scale)
        unscaled = {
            name: JaggedTensor(values=each, lengths=embeddings[name].lengths()) for name, each in zip(names, values)
        }
        return [embeddings | unscaled], scale

    def autocast(self, device: torch.device) -> Any:
        """The context in which layers and head run."""
        dtype = COMPUTE_DTYPES[self.encoder.config.execution.compute_dtype]
        # No autocast for "fp32": the layers may be float64, which autocast would change.
        return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)

    def _project(self, name: str, feature: JaggedTensor) -> JaggedTensor:
        """A feature's embeddings in the width of the layers."""
        if name not in self.projections:
            return feature
        layer = self.projections[name]
        values = feature.values().to(layer.weight.dtype)
        # Under autocast too, all tokens of a sequence need one dtype.
        return JaggedTensor(values=layer(values).to(values.dtype), lengths=feature.lengths())

    def _times(self, sequence: TokenSequence, batch: HSTUBatch) -> torch.Tensor | None:
        name = self.encoder.config.timestamp_feature_name
        if not self.encoder.config.time_bias or name not in batch.features.keys():  # the encoder names missing times
            return None
        times = batch.features[name].values()
        if times.numel() != sequence.item_tokens.numel():
            raise ValueError(
                f"{name!r} has {times.numel()} values, there are {sequence.item_tokens.numel()} items; every item has "
                "one timestamp: give both features the same lengths"
            )
        return sequence.token_times(times)


def by_feature(embeddings: Embeddings) -> dict[str, JaggedTensor]:
    """Embeddings of all widths by feature name."""
    return {name: jagged for part in embeddings for name, jagged in part.items()}


class SequenceModel(nn.Module):
    """Tables, in `embedding`, and a tower of all other layers, in `dense`.

    DistributedModelParallel shards `embedding` and copies `dense` to every rank.
    """

    _tower_class: ClassVar[type[SequenceTower]]

    def __init__(
        self,
        config: SequenceModelConfig,
        *,
        pg_group: dist.ProcessGroup | None = None,
        embedding_device: torch.device | None = None,
        plain_embeddings: bool = False,
    ) -> None:
        """Make the model.

        Args:
            config: dimensions of the model.
            pg_group: ranks that share the global batch; None for the shuffler's default group.
            embedding_device: device of the tables, None for the CPU; "meta" if they are too large for one process.
            plain_embeddings: whether to use tables without TorchRec, for one process or for training in float64
                (`model.double()`); DistributedModelParallel does not shard them.
        """
        super().__init__()
        self.config = config
        self.embedding = HSTUEmbedding(config, device=embedding_device, plain=plain_embeddings)
        self.dense = self._tower_class(config, pg_group)

    def scale_loss(self, scaler: torch.amp.GradScaler, data_parallel_tables: Collection[str] = ()) -> None:
        """Return scaled losses from now on, for training in float16.

        Tables whose optimizer runs in the backward pass get unscaled gradients. All other parameters, also plain tables
        and `data_parallel_tables` (the sharded tables that your optimizer steps), get scaled gradients, so `scaler`
        must unscale and step their optimizer.
        """
        looked_up, plain = self.config.features_of_tables.items(), self.embedding.is_plain
        scaled = [name for table, features in looked_up if plain or table in data_parallel_tables for name in features]
        self.dense.scale_loss(scaler, scaled)

    def forward(self, batch: HSTUBatch) -> tuple[torch.Tensor, Any]:
        """The loss of a batch, and the other results of the step; see the tower's forward."""
        return self.dense(self.embedding(batch.features), batch)
