"""HSTUBatch: the batch of an HSTU model, and random batches for tests and benchmarks.

A row of the item feature is the user's history followed by the candidates to rank; the action feature, if any, has one
action per item. Contextual features describe the user and precede the sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.checks import as_boolean, as_count, kind_of, require_names, take_python_scalars
from commons.datasets.random.distribution import RandomDistribution, draw_device, random_times
from commons.datasets.sequences.metadata import TIMESTAMP
from commons.sequence_batch.batch import BaseBatch

__all__ = ["FeatureConfig", "HSTUBatch", "RandomDistribution"]

_Array = torch.Tensor | np.ndarray


@dataclass(frozen=True)
class FeatureConfig:
    """Random features that share one draw of lengths.

    Raises:
        ValueError: no names, not one maximum per name, a maximum below 1 or a negative length.
        TypeError: `feature_names` is one string, `max_item_ids` is one number, or `seqlen_dist` is no
            RandomDistribution.
    """

    feature_names: list[str]
    max_item_ids: list[int]  # for each name, the number of ids: ids are drawn from `[0, max_item_id)`
    max_sequence_length: int  # maximum length; for the item feature, of history and candidates together
    is_jagged: bool  # False: every row has `max_sequence_length` tokens
    # Distribution of jagged lengths, clipped to `max_sequence_length`; None for uniform on `[0, max_sequence_length]`.
    seqlen_dist: RandomDistribution | None = None

    def __post_init__(self) -> None:
        take_python_scalars(self)
        object.__setattr__(self, "feature_names", require_names("feature_names", self.feature_names))
        if isinstance(self.max_item_ids, int):
            raise TypeError(
                f"max_item_ids is the number {self.max_item_ids}; it is a list with one maximum per name: write "
                f"[{self.max_item_ids}]"
            )
        if self.seqlen_dist is not None and not isinstance(self.seqlen_dist, RandomDistribution):
            raise TypeError(
                f"seqlen_dist is {self.seqlen_dist!r}; lengths are drawn from a RandomDistribution: make one, for "
                'example RandomDistribution("zipf", alpha=1.2), or leave it out'
            )
        if not self.feature_names or len(self.feature_names) != len(self.max_item_ids):
            raise ValueError(
                f"feature_names has {len(self.feature_names)} entries, max_item_ids has {len(self.max_item_ids)}; one "
                "maximum per name is needed, and at least one name: make them equally long"
            )
        for index, number in enumerate(self.max_item_ids):
            as_count(number, f"max_item_ids[{index}]", 1)
        as_count(self.max_sequence_length, "max_sequence_length", 0)

    def draw_lengths(self, num_rows: int, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draw lengths of rows, int64 `(num_rows,)`, on the generator's device."""
        longest = self.max_sequence_length
        if not self.is_jagged:
            return torch.full((num_rows,), longest, device=draw_device(generator))
        distribution = self.seqlen_dist or RandomDistribution("uniform", high=longest)
        return distribution.sample(num_rows, generator=generator).clamp_(max=longest)


@dataclass
class HSTUBatch(BaseBatch):
    """A batch of user sequences for HSTU.

    Labels of random and real batches are a KeyedJaggedTensor of float32 with keys task_0, task_1, …: one label per
    candidate, or one per item without candidates.

    Raises:
        ValueError: as BaseBatch; an item or action feature that is no key, or is contextual; candidates without
            `num_candidates`; on CPU also actions and items of different length, or candidates outside
            `[0, min(max_num_candidates, items)]`.
        TypeError: as BaseBatch; `num_candidates` that is no tensor.
    """

    host_fields: ClassVar[tuple[str, ...]] = ("num_candidates",)

    item_feature_name: str = field(kw_only=True)  # key of the items: history, then candidates
    # Key of the actions, one per item; None for no actions.
    action_feature_name: str | None = field(default=None, kw_only=True)
    # Maximum candidates of a row; 0 for no candidates.
    max_num_candidates: int = field(default=0, kw_only=True)
    # int64 `(batch_size,)`: the last `num_candidates[r]` items of row r are candidates.
    num_candidates: torch.Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_names()
        if as_count(self.max_num_candidates, "max_num_candidates", 0) > 0 and self.num_candidates is None:
            raise ValueError(
                f"max_num_candidates is {self.max_num_candidates} and num_candidates is {self.num_candidates}; with "
                "candidates every row needs its number: give num_candidates, or set max_num_candidates to 0"
            )
        if self.num_candidates is not None and not isinstance(self.num_candidates, torch.Tensor):
            raise TypeError(
                f"num_candidates is {kind_of(self.num_candidates)}; one integer per row is needed: give an int64 "
                f"tensor of shape ({self.batch_size},)"
            )
        if self.num_candidates is not None and (
            self.num_candidates.dim() != 1 or self.num_candidates.dtype not in (torch.int32, torch.int64)
        ):
            raise ValueError(
                f"num_candidates has shape {tuple(self.num_candidates.shape)} and dtype {self.num_candidates.dtype}; "
                f"one integer per row is needed: give an int64 tensor of shape ({self.batch_size},)"
            )
        # On a device these checks would synchronise.
        if self.features.lengths().device.type == "cpu":
            self._check_lengths()

    def _check_names(self) -> None:
        keys = self.features.keys()
        for attribute in ("item_feature_name", "action_feature_name"):
            name = getattr(self, attribute)
            if name is None and attribute == "action_feature_name":
                continue
            if name not in keys:
                raise ValueError(f"{attribute} is {name!r}, the keys are {keys}; it must be a key: correct it")
            if name in self.contextual_feature_names:
                raise ValueError(
                    f"{attribute} {name!r} is among contextual_feature_names {self.contextual_feature_names}; a "
                    "feature is contextual or part of the sequence: remove it from one of them"
                )

    def _check_lengths(self) -> None:
        keys, lengths = self.features.keys(), self._lengths_by_key().to(torch.int64)
        items = lengths[keys.index(self.item_feature_name)]
        if self.action_feature_name is not None:
            actions = lengths[keys.index(self.action_feature_name)]
            if not torch.equal(actions, items):
                row = int((actions != items).nonzero()[0])
                raise ValueError(
                    f"row {row} has {int(items[row])} items ({self.item_feature_name!r}) and {int(actions[row])} "
                    f"actions ({self.action_feature_name!r}); every item has one action: give both the same lengths"
                )
        if self.num_candidates is None or self.num_candidates.device.type != "cpu":
            return
        most = items.clamp(max=self.max_num_candidates)
        wrong = (self.num_candidates < 0) | (self.num_candidates > most)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"num_candidates[{row}] is {int(self.num_candidates[row])}, row {row} has {int(items[row])} items and "
                f"max_num_candidates is {self.max_num_candidates}; candidates are the last items of a row: give a "
                f"number between 0 and {int(most[row])}"
            )

    def _lengths_by_key(self) -> torch.Tensor:
        return self.features.lengths().view(len(self.features.keys()), self.batch_size)

    def sequence_lengths(self, action_interleaved: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens that the model computes per row, on the batch's device; never synchronises.

        Args:
            action_interleaved: whether items and actions are separate tokens; otherwise an action is added to its
                item's token. No effect without an action feature.

        Returns:
            The number of tokens, int64 `(batch_size,)`: context, history and candidates.
            The number of these tokens that belong to candidates, at the end, int64 `(batch_size,)`.
        """
        num_tokens, num_targets = self.token_counts(action_interleaved)
        return num_tokens, torch.zeros_like(num_tokens) if num_targets is None else num_targets

    def token_counts(self, action_interleaved: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `sequence_lengths`, but with None for the candidates of a batch without `num_candidates`."""
        separate = as_boolean(action_interleaved, "action_interleaved")
        tokens_per_item = 2 if separate and self.action_feature_name is not None else 1
        items = self._lengths_by_key()[self.features.keys().index(self.item_feature_name)]
        num_tokens = torch.add(self.contextual_lengths(), items, alpha=tokens_per_item)
        candidates = self.num_candidates
        return num_tokens, None if candidates is None else candidates.to(torch.int64) * tokens_per_item

    def contextual_lengths(self) -> torch.Tensor:
        """Contextual tokens per row, int64 `(batch_size,)`, on the batch's device; never synchronises."""
        lengths = self._lengths_by_key()
        runs = _runs_of_columns(tuple(self.features.keys()), tuple(self.contextual_feature_names))
        sums = [lengths[first:stop].sum(0, dtype=torch.int64) for first, stop in runs]
        return sum(sums[1:], sums[0]) if sums else lengths.new_zeros(self.batch_size, dtype=torch.int64)

    def host_sequence_lengths(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Contextual tokens, items (including candidates) and candidates per row on the host; as `host_lengths`.

        Each int64 `(batch_size,)`; candidates are 0 if `max_num_candidates` is 0.
        """
        items, *contextual = self.host_lengths(self.item_feature_name, *self.contextual_feature_names)
        candidates = self.host_values("num_candidates") if self.max_num_candidates > 0 else np.zeros_like(items)
        return np.sum(contextual, axis=0, dtype=np.int64) + np.zeros_like(items), items, candidates

    @classmethod
    def random(
        cls,
        batch_size: int,
        feature_configs: Sequence[FeatureConfig],
        item_feature_name: str,
        contextual_feature_names: Sequence[str] = (),
        action_feature_name: str | None = None,
        max_num_candidates: int = 0,
        num_tasks: int | None = None,
        actual_batch_size: int | None = None,
        *,
        device: torch.device | str,
        generator: torch.Generator | None = None,
        timestamps: bool = False,
    ) -> HSTUBatch:
        """Make a batch of random ids and labels.

        A row of n items gets between 1 and `max_num_candidates` candidates, but at most n − 1.

        Args:
            batch_size: number of rows, including padding.
            feature_configs: names, ids and lengths of the features; items and actions must share a config.
            item_feature_name: see HSTUBatch.
            contextual_feature_names: see HSTUBatch.
            action_feature_name: see HSTUBatch.
            max_num_candidates: see HSTUBatch.
            num_tasks: number of the labels' keys; None for a batch without labels.
            actual_batch_size: number of real rows; None for all rows.
            device: device of the batch.
            generator: source of randomness; None for torch's global CPU generator. `device` does not change the drawn
                numbers.
            timestamps: whether to add a last feature "timestamp": the time of every item in seconds, rising within a
                row. It does not change the other features.

        Raises:
            ValueError: `batch_size` or `num_tasks` below 1, `actual_batch_size` outside `[0, batch_size]`, a feature
                that is in `feature_configs` twice, or invalid fields of an HSTUBatch.
        """
        contextual_feature_names = require_names("contextual_feature_names", contextual_feature_names)
        num_real = real_rows_of(batch_size, actual_batch_size)
        if num_tasks is not None:
            as_count(num_tasks, "num_tasks", 1)
        drawn_on = draw_device(generator)
        values: dict[str, torch.Tensor] = {}
        lengths: dict[str, torch.Tensor] = {}
        for config in feature_configs:
            config_lengths = config.draw_lengths(num_real, generator)
            for name, num_ids in zip(config.feature_names, config.max_item_ids):
                if name in values:
                    raise ValueError(
                        f"feature_configs have {name!r} twice; a feature is drawn once: rename one, or remove it"
                    )
                num_values = int(config_lengths.sum())
                values[name] = torch.randint(num_ids, (num_values,), generator=generator, device=drawn_on)
                lengths[name] = config_lengths
        if item_feature_name not in lengths:
            raise ValueError(
                f"item_feature_name is {item_feature_name!r}, the feature configs have {list(lengths)}; it must be one "
                "of these: add a FeatureConfig or correct the name"
            )
        targets = lengths[item_feature_name]  # (num_real,)
        num_candidates = None
        if as_count(max_num_candidates, "max_num_candidates", 0) > 0:
            drawn = torch.randint(1, max_num_candidates + 1, (num_real,), generator=generator, device=drawn_on)
            targets = torch.minimum(drawn, (targets - 1).clamp_(min=0))
            num_candidates = torch.nn.functional.pad(targets, (0, batch_size - num_real))
        labels = None
        if num_tasks is not None:
            tasks = [f"task_{task}" for task in range(num_tasks)]
            shape = (int(targets.sum()),)
            drawn_labels = [torch.randint(2, shape, generator=generator, device=drawn_on).float() for _ in tasks]
            labels = padded_kjt(dict(zip(tasks, drawn_labels)), dict.fromkeys(tasks, targets), batch_size)
        longest = {name: config.max_sequence_length for config in feature_configs for name in config.feature_names}
        if timestamps:
            longest[TIMESTAMP] = longest[item_feature_name]
            lengths[TIMESTAMP] = lengths[item_feature_name]
            values[TIMESTAMP] = random_times(lengths[TIMESTAMP], generator)
        batch = cls(
            features=padded_kjt(values, lengths, batch_size),
            batch_size=batch_size,
            feature_to_max_seqlen=longest,
            contextual_feature_names=contextual_feature_names,
            labels=labels,
            actual_batch_size=num_real,
            item_feature_name=item_feature_name,
            action_feature_name=action_feature_name,
            max_num_candidates=max_num_candidates,
            num_candidates=num_candidates,
        )
        return batch.to(torch.device(device))


@functools.lru_cache(maxsize=16)
def _runs_of_columns(keys: tuple[str, ...], names: tuple[str, ...]) -> list[tuple[int, int]]:
    """Slices (first, last + 1) of adjacent columns of some keys; an index list would be copied to the device."""
    runs: list[tuple[int, int]] = []
    for column in sorted(keys.index(name) for name in names):
        if runs and column == runs[-1][1]:
            runs[-1] = runs[-1][0], column + 1
        else:
            runs.append((column, column + 1))
    return runs


def real_rows_of(batch_size: int, actual_batch_size: int | None) -> int:
    """The number of real rows of a random batch; ValueError if a batch cannot have this number."""
    as_count(batch_size, "batch_size", 1)
    num_real = batch_size if actual_batch_size is None else as_count(actual_batch_size, "actual_batch_size", 0)
    if num_real > batch_size:
        raise ValueError(
            f"batch_size is {batch_size}, actual_batch_size is {actual_batch_size}; real rows are some of a batch's "
            "rows: give 0 <= actual_batch_size <= batch_size"
        )
    return num_real


def _as_tensor(values: _Array) -> torch.Tensor:
    """A tensor unchanged; an array as a tensor on the CPU, not on torch's default device."""
    return values if isinstance(values, torch.Tensor) else torch.as_tensor(values, device="cpu")


def padded_kjt(values: Mapping[str, _Array], lengths: Mapping[str, _Array], batch_size: int) -> KeyedJaggedTensor:
    """A KeyedJaggedTensor of `batch_size` rows, with empty rows after the given rows, and with `length_per_key` set.

    By key, `values` have shape `(sum of the key's lengths,)`, all of one dtype, and `lengths` are int64 `(num_rows,)`.
    """
    flat = [_as_tensor(value) for value in values.values()]
    rows = torch.stack([_as_tensor(row) for row in lengths.values()])
    return KeyedJaggedTensor(
        keys=list(values),
        values=torch.cat(flat),
        lengths=torch.nn.functional.pad(rows, (0, batch_size - rows.shape[1])).flatten(),
        stride=batch_size,
        length_per_key=[value.numel() for value in flat],
    )


def length_only_kjt(lengths: Mapping[str, _Array], dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    """A KeyedJaggedTensor of given lengths, by key int64 `(num_rows,)`; all values are 0 and take no memory."""
    rows = torch.cat([_as_tensor(row) for row in lengths.values()])
    per_key = [int(row.sum()) for row in lengths.values()]
    return KeyedJaggedTensor(
        keys=list(lengths),
        values=torch.zeros(1, dtype=dtype, device=rows.device).expand(sum(per_key)),
        lengths=rows,
        length_per_key=per_key,
    )
