"""Embeddings of an HSTU model: one table per feature, in TorchRec collections or, in any dtype, in plain tables."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class HSTUEmbedding(nn.Module):
    """Looks up every feature in its own table.

    Its forward has no control flow and its collections are TorchRec modules, so that DistributedModelParallel can shard
    the tables and a train pipeline can take the lookups apart.
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
            tables: rows by feature name; a feature's table has its name.
            widths: of the tables, by feature name; there is one collection for each width.
            second_features: by table, another feature that is looked up in it.
            device: where the tables are made; "meta" leaves that to sharding, which then initialises the shards.
            plain: use tables that know nothing of TorchRec, for one process and for other dtypes than float32, in which
                TorchRec's collection always answers. Parameter names are the same.
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
        """Whether the tables know nothing of TorchRec."""
        return any(isinstance(module, PlainEmbeddingCollection) for module in self.collections.values())

    def forward(self, features: KeyedJaggedTensor) -> list[dict[str, JaggedTensor]]:
        """Embeddings by feature name, one dictionary for every width.

        `features` are integer ids; those without a table are left out. Every feature is, in one of the dictionaries, a
        JaggedTensor with values `(num_ids, width)` and lengths `(batch_size,)`.
        """
        return [collection(features) for collection in self.collections.values()]


class PlainEmbeddingCollection(nn.Module):
    """Tables as `nn.Embedding`: the answer of TorchRec's collection, in the dtype of the tables."""

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
