"""The shuffler for any model whose cost is about proportional to its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.checks import require_names
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.options import ShufflerOptions, reject_options_as
from commons.sequence_batch.fields import Path
from commons.sequence_batch.open_batch import row_fields


class TokensBalancedBatchShuffler(BaseTaskBalancedBatchShuffler):
    """Balances the number of tokens.

    Args:
        feature_names: keys whose lengths are added up. None: all keys of all KeyedJaggedTensors and JaggedTensors, at
            any depth, except those of `labels`. The key of a JaggedTensor is its key in a dict, or its field's name.
        options: settings; the defaults balance.
        pg_group: ranks that share a global batch.

    Raises:
        TypeError: an argument of another type, such as options passed by position instead of as `options=`.
        ValueError: no feature name.
    """

    def __init__(
        self,
        feature_names: Sequence[str] | None = None,
        options: ShufflerOptions | None = None,
        pg_group: dist.ProcessGroup | None = None,
    ) -> None:
        reject_options_as(feature_names=feature_names)
        self.feature_names = None if feature_names is None else require_names("feature_names", feature_names)
        if self.feature_names == []:
            raise ValueError(
                "feature_names is []; the tokens of at least one key are counted: name it, or pass None for all keys"
            )
        super().__init__(options, pg_group)
        self.token_feature_names = self.feature_names

    def get_workloads(self, batch: Any) -> torch.Tensor:
        """Tokens of every row, int64 `(batch_size,)`.

        Raises:
            KeyError: a feature name that is no key of the batch.
            ValueError: a batch without a jagged tensor to count.
        """
        counted = [
            (key, lengths)
            for path, value in row_fields(batch)
            if path[0] != "labels" and not isinstance(value, torch.Tensor)
            for key, lengths in _lengths_by_key(path, value)
        ]
        keys = [key for key, _ in counted]
        unknown = [name for name in self.feature_names or [] if name not in keys]
        if unknown:
            raise KeyError(f"features {unknown} are not among the batch's keys {keys}: correct feature_names")
        if not keys:
            raise ValueError(
                f"{type(batch).__name__} has no KeyedJaggedTensor or JaggedTensor to count tokens in; the tokens "
                "shuffler needs one: write a shuffler whose get_workloads suits the batch"
            )
        names = keys if self.feature_names is None else self.feature_names
        return torch.stack([lengths.to(torch.int64) for key, lengths in counted if key in names]).sum(dim=0)


def _lengths_by_key(path: Path, value: Any) -> list[tuple[str, torch.Tensor]]:
    """Lengths `(batch_size,)` of every key of a jagged tensor."""
    if isinstance(value, KeyedJaggedTensor):
        return list(zip(value.keys(), value.lengths().view(len(value.keys()), value.stride())))
    return [(str(path[-1]), value.lengths())]
