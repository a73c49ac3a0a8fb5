"""Code embeddings: one TorchRec table with a row for every code of every hierarchy, for histories and candidates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

TABLE = "codes"


class CodeEmbedding(nn.Module):
    """Looks up the ids of both sequences in one table.

    The forward has no control flow and the collection is a TorchRec module, so DistributedModelParallel can shard the
    table and a train pipeline can separate the lookup from the rest of the model.

    Args:
        feature_names: keys of the histories' and the candidates' ids.
        num_codes: number of codes of all hierarchies together.
        embedding_dim: width of an embedding.
        device: device of the table, None for the CPU; with "meta", sharding makes and initialises the shards.
    """

    def __init__(
        self,
        feature_names: Sequence[str],
        num_codes: int,
        embedding_dim: int,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.feature_names = list(feature_names)
        table = EmbeddingConfig(
            name=TABLE, embedding_dim=embedding_dim, num_embeddings=num_codes, feature_names=self.feature_names
        )
        self.collection = EmbeddingCollection(tables=[table], device=device)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Embeddings by feature name.

        Args:
            features: int64 ids of both sequences.

        Returns:
            For each sequence a JaggedTensor with values `(num_ids, embedding_dim)` and lengths `(batch_size,)`.
        """
        return self.collection(features)
