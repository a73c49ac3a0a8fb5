"""Embeddings of an HSTU model: one table per feature, in TorchRec collections or in plain tables of any dtype."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from hstu.model.config import SequenceModelConfig


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
