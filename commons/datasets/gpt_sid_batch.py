"""GPTSIDBatch: the batch of a semantic-ID decoder, and random batches for tests and benchmarks.

An item is identified by its semantic ID (SID): one code per hierarchy, coarse to fine. A row has two sequences, the
items that a user has seen (history) and the items that follow (candidates). A sequence is the codes of its items:

    history   item 1: c₀ c₁ c₂ c₃, item 2: c₀ c₁ c₂ c₃, …        candidates   item n+1: c₀ c₁ c₂ c₃, …

Each sequence is one key of `features`, so the codes have the decoder's order and a row has two lengths, whatever the
number of hierarchies. Equal codes of different hierarchies are unrelated, so the values are *ids*, `id = code +
codebook_offsets(codebook_sizes)[hierarchy]`: both keys use one embedding table, with a row for every code of every
codebook. Labels are codes, because a head scores one codebook.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from commons.checks import as_count
from commons.datasets.hstu_batch import padded_kjt, real_rows_of
from commons.datasets.random.distribution import RandomDistribution, draw_device
from commons.sequence_batch.batch import BaseBatch
from commons.sequence_batch.open_batch import real_rows
from commons.sequence_batch.schema import register_batch_type

__all__ = ["LABEL_NAME", "GPTSIDBatch", "RandomDistribution", "codebook_offsets"]

LABEL_NAME = "code"


def codebook_offsets(codebook_sizes: Sequence[int]) -> list[int]:
    """The id of code 0 of every hierarchy, coarse to fine: the number of codes of all hierarchies before it.

    >>> codebook_offsets([500, 500, 20])
    [0, 500, 1000]
    """
    return [0, *itertools.accumulate(codebook_sizes[:-1])]


@register_batch_type
@dataclass
class GPTSIDBatch(BaseBatch):
    """A batch of histories and candidates as semantic IDs.

    `feature_to_max_seqlen` counts ids. Labels of random and real batches are a KeyedJaggedTensor of int64 with the key
    "code": the codes of the candidates, one per id.

    Raises:
        ValueError: as BaseBatch; a feature name that is no key, equal names for history and candidates,
            `num_hierarchies` below 1 or unequal to the number of codebooks, a codebook without codes; on CPU also a
            sequence with an incomplete item, or an id outside the codebook of its hierarchy.
    """

    history_feature_name: str = field(kw_only=True)  # key of the histories' ids, `num_hierarchies` per item
    # Key of the candidates' ids: the items that follow the history, in order.
    candidate_feature_name: str = field(kw_only=True)
    num_hierarchies: int = field(default=4, kw_only=True)  # codes of an item
    # Number of codes of each hierarchy; None leaves the ids unchecked.
    codebook_sizes: list[int] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_names()
        if self.codebook_sizes is not None:
            self.codebook_sizes = list(self.codebook_sizes)  # ranks compare it, and a tuple is not equal to a list
        _require_codebooks(self.codebook_sizes, self.num_hierarchies)
        # On a device these checks would synchronise.
        if self.features.lengths().device.type == "cpu":
            for name in (self.history_feature_name, self.candidate_feature_name):
                self._check_items(name)

    def _check_names(self) -> None:
        keys = self.features.keys()
        for attribute in ("history_feature_name", "candidate_feature_name"):
            if getattr(self, attribute) not in keys:
                raise ValueError(
                    f"{attribute} is {getattr(self, attribute)!r}, the keys are {keys}; it must be one of the keys: "
                    "correct it"
                )
            if getattr(self, attribute) not in self.feature_to_max_seqlen:
                raise ValueError(
                    f"feature_to_max_seqlen has {list(self.feature_to_max_seqlen)} and not the {attribute} "
                    f"{getattr(self, attribute)!r}; the decoder needs the maximum lengths of both: add it"
                )
        if self.history_feature_name == self.candidate_feature_name:
            raise ValueError(
                f"history_feature_name and candidate_feature_name are both {self.history_feature_name!r}; histories "
                "and candidates are different keys: name two"
            )

    def _check_items(self, name: str) -> None:
        lengths = self.code_lengths(name)
        broken = lengths % self.num_hierarchies != 0
        if bool(broken.any()):
            row = int(broken.nonzero()[0])
            raise ValueError(
                f"row {row} of {name!r} has {int(lengths[row])} ids, num_hierarchies is {self.num_hierarchies}; every "
                "item has one id per hierarchy: give whole items"
            )
        ids = self.features[name].values()
        if self.codebook_sizes is None or ids.device.type != "cpu":
            return
        sizes = torch.tensor(self.codebook_sizes, device="cpu")
        codes = ids.view(-1, self.num_hierarchies) - torch.tensor(codebook_offsets(self.codebook_sizes), device="cpu")
        outside = (codes < 0) | (codes >= sizes)
        if bool(outside.any()):
            item, hierarchy = (int(index) for index in outside.nonzero()[0])
            size = self.codebook_sizes[hierarchy]
            raise ValueError(
                f"item {item} of {name!r} has code {int(codes[item, hierarchy])} in hierarchy {hierarchy}, whose "
                f"codebook has {size} codes; ids are code + offset of the hierarchy, with codes in [0, {size}): "
                "correct the ids or codebook_sizes"
            )

    def code_lengths(self, feature_name: str) -> torch.Tensor:
        """The number of ids per row of one key, int64 `(batch_size,)`, on the batch's device."""
        lengths = self.features.lengths().view(len(self.features.keys()), self.batch_size)
        return lengths[self.features.keys().index(feature_name)].to(torch.int64)

    @property
    def max_history_length(self) -> int:
        """Maximum number of items in a history."""
        return self.feature_to_max_seqlen[self.history_feature_name] // self.num_hierarchies

    @property
    def max_candidate_length(self) -> int:
        """Maximum number of candidates per row."""
        return self.feature_to_max_seqlen[self.candidate_feature_name] // self.num_hierarchies

    def sequence_lengths(self) -> torch.Tensor:
        """Tokens that the decoder computes per row, int64 `(batch_size,)`, on the batch's device; never synchronises.

        The tokens are BOS and all codes, except the last code of a row with candidates, which predicts nothing. Padding
        rows have no tokens.
        """
        candidates = self.code_lengths(self.candidate_feature_name)
        tokens = 1 + self.code_lengths(self.history_feature_name) + candidates - (candidates > 0).to(torch.int64)
        return tokens * (torch.arange(self.batch_size, device=tokens.device) < real_rows(self))

    @classmethod
    def random(
        cls,
        batch_size: int,
        codebook_sizes: Sequence[int],
        max_history_length: int,
        max_candidate_length: int = 1,
        history_feature_name: str = "history",
        candidate_feature_name: str = "candidate",
        actual_batch_size: int | None = None,
        *,
        history_dist: RandomDistribution | None = None,
        candidate_dist: RandomDistribution | None = None,
        sids: torch.Tensor | None = None,
        with_labels: bool = True,
        device: torch.device | str,
        generator: torch.Generator | None = None,
    ) -> GPTSIDBatch:
        """Make a batch of random items.

        Args:
            batch_size: number of rows, including padding.
            codebook_sizes: number of codes of each hierarchy.
            max_history_length: maximum items of a history.
            max_candidate_length: maximum candidates of a row.
            history_feature_name: see GPTSIDBatch.
            candidate_feature_name: see GPTSIDBatch.
            actual_batch_size: number of real rows; None for all rows.
            history_dist: distribution of items per history, clipped to `max_history_length`; None for uniform on
                `[0, max_history_length]`.
            candidate_dist: distribution of candidates per row, clipped to `max_candidate_length`; None for uniform on
                `[1, max_candidate_length]`.
            sids: int64 `(num_items, num_hierarchies)` on the CPU, the items to draw from, all equally likely; None to
                draw every code independently.
            with_labels: whether the batch has labels.
            device: device of the batch.
            generator: source of randomness; None for torch's global CPU generator. `device` does not change the drawn
                numbers.

        Raises:
            ValueError: `batch_size` below 1, `actual_batch_size` outside `[0, batch_size]`, a negative maximum, `sids`
                of another shape, or invalid fields of a GPTSIDBatch.
        """
        num_real, num_hierarchies = real_rows_of(batch_size, actual_batch_size), len(codebook_sizes)
        for name, most in (("max_history_length", max_history_length), ("max_candidate_length", max_candidate_length)):
            as_count(most, name, 0)
        if sids is not None and (sids.dim() != 2 or sids.shape[0] < 1 or sids.shape[1] != num_hierarchies):
            raise ValueError(
                f"sids have shape {tuple(sids.shape)}, there are {num_hierarchies} codebooks; items are drawn from "
                f"the rows of sids, one code per codebook: give a tensor of shape (num_items, {num_hierarchies})"
            )
        longest = (max_history_length, max_candidate_length)
        distributions = (
            history_dist or RandomDistribution("uniform", high=max_history_length),
            candidate_dist
            or RandomDistribution("uniform", low=min(1, max_candidate_length), high=max_candidate_length),
        )
        history, candidates = (
            distribution.sample(num_real, generator=generator).clamp_(max=most)
            for distribution, most in zip(distributions, longest)
        )
        batch = cls.random_of_lengths(
            history,
            candidates,
            codebook_sizes,
            history_feature_name,
            candidate_feature_name,
            batch_size,
            sids=sids,
            with_labels=with_labels,
            generator=generator,
        )
        batch.feature_to_max_seqlen = {
            name: most * num_hierarchies for name, most in zip((history_feature_name, candidate_feature_name), longest)
        }
        return batch.to(torch.device(device))

    @classmethod
    def random_of_lengths(
        cls,
        history: torch.Tensor,
        candidates: torch.Tensor,
        codebook_sizes: Sequence[int],
        history_feature_name: str = "history",
        candidate_feature_name: str = "candidate",
        batch_size: int | None = None,
        *,
        sids: torch.Tensor | None = None,
        with_labels: bool = True,
        generator: torch.Generator | None = None,
    ) -> GPTSIDBatch:
        """Make a batch of random items with given lengths, on the generator's device.

        `history` and `candidates` are the numbers of items per row, int64 `(num_real_rows,)`; with `batch_size` None
        the batch has no padding. Other arguments and errors as for `random`.
        """
        num_hierarchies = len(codebook_sizes)
        _require_codebooks(codebook_sizes, num_hierarchies)
        batch_size = history.numel() if batch_size is None else batch_size
        items = {history_feature_name: history, candidate_feature_name: candidates}
        codes = {name: _draw_codes(int(count.sum()), codebook_sizes, sids, generator) for name, count in items.items()}
        lengths = {name: count * num_hierarchies for name, count in items.items()}
        labels = None
        if with_labels:
            targets = codes[candidate_feature_name].flatten()
            labels = padded_kjt({LABEL_NAME: targets}, {LABEL_NAME: lengths[candidate_feature_name]}, batch_size)
        offsets = torch.tensor(codebook_offsets(codebook_sizes), device=codes[history_feature_name].device)
        ids = {name: (code + offsets).flatten() for name, code in codes.items()}
        return cls(
            features=padded_kjt(ids, lengths, batch_size),
            batch_size=batch_size,
            feature_to_max_seqlen={name: max(length.tolist(), default=0) for name, length in lengths.items()},
            labels=labels,
            actual_batch_size=history.numel(),
            history_feature_name=history_feature_name,
            candidate_feature_name=candidate_feature_name,
            num_hierarchies=num_hierarchies,
            codebook_sizes=list(codebook_sizes),
        )


def _require_codebooks(codebook_sizes: Sequence[int] | None, num_hierarchies: int) -> None:
    """Raise ValueError unless there is one codebook with codes for every hierarchy, and a hierarchy."""
    as_count(num_hierarchies, "num_hierarchies", 1)
    if codebook_sizes is not None and (len(codebook_sizes) != num_hierarchies or min(codebook_sizes) < 1):
        raise ValueError(
            f"codebook_sizes is {list(codebook_sizes)}, num_hierarchies is {num_hierarchies}; every hierarchy has one "
            "codebook of at least one code: make them agree"
        )


def _draw_codes(
    num_items: int, codebook_sizes: Sequence[int], sids: torch.Tensor | None, generator: torch.Generator | None
) -> torch.Tensor:
    """Draw codes, int64 `(num_items, num_hierarchies)`."""
    device = draw_device(generator)
    if sids is not None:
        return sids.to(device)[torch.randint(sids.shape[0], (num_items,), generator=generator, device=device)]
    drawn = [torch.randint(size, (num_items,), generator=generator, device=device) for size in codebook_sizes]
    return torch.stack(drawn, dim=1)
