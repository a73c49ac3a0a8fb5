"""Embeddings of an HSTU model: one table per feature, in a TorchRec collection or, in any dtype, in plain tables."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class HSTUEmbedding(nn.Module):
    """Looks up every feature in its own table.

    Its forward has no control flow and its collection is a TorchRec module, so that DistributedModelParallel can shard
    the tables and a train pipeline can take the lookup apart.
    """

    def __init__(
        self,
        tables: Mapping[str, int],
        embedding_dim: int,
        *,
        device: torch.device | None = None,
        plain: bool = False,
    ) -> None:
        """Make the tables.

        Args:
            tables: rows by feature name; a feature's table has its name.
            embedding_dim: width of all tables.
            device: where the tables are made; "meta" leaves that to sharding, which then initialises the shards.
            plain: use tables that know nothing of TorchRec, for one process and for other dtypes than float32, in which
                TorchRec's collection always answers. Parameter names are the same.

        """
        super().__init__()
        self.collection: nn.Module
        if plain:
            self.collection = PlainEmbeddingCollection(tables, embedding_dim, device=device)
        else:
            configs = [
                EmbeddingConfig(name=name, embedding_dim=embedding_dim, num_embeddings=num_rows, feature_names=[name])
                for name, num_rows in tables.items()
            ]
            self.collection = EmbeddingCollection(tables=configs, device=device)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Embeddings by feature name.

        Args:
            features: integer ids; all features that have a table, others are left out.

        Returns:
            For every feature a JaggedTensor with values `(num_ids, embedding_dim)` and lengths `(batch_size,)`.

        """
        return self.collection(features)


class PlainEmbeddingCollection(nn.Module):
    """Tables as `nn.Embedding`: the answer of TorchRec's collection, in the dtype of the tables."""

    def __init__(self, tables: Mapping[str, int], embedding_dim: int, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict()
        for name, num_rows in tables.items():
            table = nn.Embedding(num_rows, embedding_dim, device=device)
            bound = num_rows**-0.5  # as TorchRec initialises its tables
            nn.init.uniform_(table.weight, -bound, bound)
            self.embeddings[name] = table

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """As `HSTUEmbedding.forward`."""
        ids = features.to_dict()
        return {
            name: JaggedTensor(values=table(ids[name].values()), lengths=ids[name].lengths())
            for name, table in self.embeddings.items()
        }
