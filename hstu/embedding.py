"""Embeddings of an HSTU model: one table per feature, in TorchRec collections or in plain tables of any dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class HSTUEmbedding(nn.Module):
    """Looks up every feature in its own table.

    The forward has no control flow and the collections are TorchRec modules, so DistributedModelParallel can shard the
    tables and a train pipeline can separate the lookups from the rest of the model.
    """

    def __init__(
        self,
        tables: Mapping[str, int],
        widths: Mapping[str, int],
        *,
        second_features: Mapping[str, str] | None = None,
        device: torch.device | None = None,
        plain: bool = False,
    ) -> None:
        """Make the tables.

        Args:
            tables: number of rows by feature name; a table has the name of its feature.
            widths: width of each table, by feature name; there is one collection for each width.
            second_features: for some tables, by name, another feature that is looked up in it; None for no such
                features.
            device: device of the tables, None for the CPU; with "meta", sharding makes and initialises the shards.
            plain: whether to use `nn.Embedding` instead of TorchRec, for one process and for other dtypes than float32,
                the only dtype of the output of TorchRec's collection. Parameter names are the same.
        """
        super().__init__()
        self.collections = nn.ModuleDict()
        features = {
            name: [name, *([second_features[name]] if second_features and name in second_features else [])]
            for name in tables
        }
        for width in sorted(set(widths.values())):
            rows = {name: num_rows for name, num_rows in tables.items() if widths[name] == width}
            if plain:
                self.collections[str(width)] = PlainEmbeddingCollection(rows, width, features, device=device)
                continue
            configs = [
                EmbeddingConfig(name=name, embedding_dim=width, num_embeddings=num_rows, feature_names=features[name])
                for name, num_rows in rows.items()
            ]
            self.collections[str(width)] = EmbeddingCollection(tables=configs, device=device)

    @property
    def is_plain(self) -> bool:
        """Whether the tables are `nn.Embedding` instead of TorchRec's."""
        return any(isinstance(module, PlainEmbeddingCollection) for module in self.collections.values())

    def forward(self, features: KeyedJaggedTensor) -> list[dict[str, JaggedTensor]]:
        """Embeddings by feature name, one dictionary for every width.

        `features` are integer ids; features without a table are ignored. The embeddings of a feature are a JaggedTensor
        with values `(num_ids, width)` and lengths `(batch_size,)`, in the dictionary of its width.
        """
        return [collection(features) for collection in self.collections.values()]


class PlainEmbeddingCollection(nn.Module):
    """Tables as `nn.Embedding`; the output is that of TorchRec's collection, in the dtype of the tables."""

    def __init__(
        self,
        tables: Mapping[str, int],
        width: int,
        features: Mapping[str, list[str]],
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict()
        self._table_of = {feature: name for name in tables for feature in features[name]}
        for name, num_rows in tables.items():
            table = nn.Embedding(num_rows, width, device=device)
            bound = num_rows**-0.5  # as TorchRec initialises its tables
            nn.init.uniform_(table.weight, -bound, bound)
            self.embeddings[name] = table

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """As `HSTUEmbedding.forward`, for one width."""
        ids = features.to_dict()
        return {
            feature: JaggedTensor(values=self.embeddings[table](ids[feature].values()), lengths=ids[feature].lengths())
            for feature, table in self._table_of.items()
        }
