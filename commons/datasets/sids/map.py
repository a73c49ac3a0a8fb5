"""SIDMap: the semantic ID of every item, read from a file and checked.

    parquet   columns `item_id` (integers) and `sid` (lists of codes); `evenrank make-sids` writes it, with the sizes of
              the codebooks in its footer
    npy       integers (num_items, num_hierarchies); an item's id is its row

An error about a map has the number of affected items and the first of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from commons.console import reason_of
from commons.whole_folder import whole_file

# The option with the digest of the items for which a map was made, see `Histories.items_digest`.
ITEMS_DIGEST = "items_digest"
_METADATA_KEY = b"evenrank.sids"
_FORMAT_VERSION = 1
_SHOWN = 3
_PICKLES = (".pt", ".pth", ".pkl", ".pickle")


@dataclass(frozen=True)
class SIDMap:
    """Items and their semantic IDs.

    Raises:
        ValueError: no items, different numbers of codes and codebooks, a repeated item, a code outside its codebook, or
            items with equal SIDs.
    """

    item_ids: np.ndarray  # int64 `(num_items,)`, ascending
    codes: np.ndarray  # int64 `(num_items, num_hierarchies)`, the SID of each item, all different
    codebook_sizes: tuple[int, ...]  # number of codes of each hierarchy: codes lie in `[0, size)`
    options: Mapping[str, Any] = field(default_factory=dict)  # settings with which the map was made

    def __post_init__(self) -> None:
        codes = np.asarray(self.codes, dtype=np.int64)
        item_ids = np.asarray(self.item_ids, dtype=np.int64)
        if codes.ndim != 2 or codes.shape[0] == 0 or codes.shape != (item_ids.size, len(self.codebook_sizes)):
            raise ValueError(
                f"codes have shape {codes.shape} for {item_ids.size} items, codebook_sizes is "
                f"{list(self.codebook_sizes)}; every item has one code per codebook, and there is at least one item: "
                "make codebook_sizes and the map agree"
            )
        order = np.argsort(item_ids, kind="stable")
        object.__setattr__(self, "item_ids", item_ids[order])
        object.__setattr__(self, "codes", np.ascontiguousarray(codes[order]))
        object.__setattr__(self, "codebook_sizes", tuple(self.codebook_sizes))
        repeated = np.unique(self.item_ids[1:][np.diff(self.item_ids) == 0])
        if repeated.size:
            raise ValueError(
                f"{repeated.size} items are listed more than once, the first ones {_first(repeated)}; an item has one "
                "SID: keep one row of each item"
            )
        rows = np.flatnonzero(((self.codes < 0) | (self.codes >= np.asarray(self.codebook_sizes))).any(axis=1))
        if rows.size:
            shown = [f"item {self.item_ids[row]}: {self.codes[row].tolist()}" for row in rows[:_SHOWN]]
            raise ValueError(
                f"{rows.size} of {self.num_items} items have a code outside its codebook, the first ones "
                f"{_first(shown)}; codebook_sizes is {list(self.codebook_sizes)}, and codes lie in [0, size): correct "
                "the codes or codebook_sizes"
            )
        _, sid_of_item, counts = np.unique(self.codes, axis=0, return_inverse=True, return_counts=True)
        sid_of_item = sid_of_item.reshape(-1)  # numpy 2.0 gives it another shape
        sharing = np.flatnonzero(counts[sid_of_item] > 1)
        if sharing.size:
            alike = np.flatnonzero(sid_of_item == sid_of_item[sharing[0]])
            raise ValueError(
                f"{sharing.size} of {self.num_items} items share their SID with another, the first ones "
                f"{_first(self.item_ids[alike])} have {self.codes[alike[0]].tolist()}; a model cannot distinguish "
                "items with equal SIDs: make the map with `evenrank make-sids`, or add a further code"
            )

    @property
    def num_items(self) -> int:
        """Number of items."""
        return len(self.item_ids)

    @property
    def num_hierarchies(self) -> int:
        """Number of codes of an item."""
        return len(self.codebook_sizes)

    @property
    def digest(self) -> str:
        """Digest of items and codes, in hex: a model is trained for one map."""
        content = (np.asarray(self.codebook_sizes), self.item_ids, self.codes)
        return hashlib.blake2b(b"".join(part.tobytes() for part in content), digest_size=8).hexdigest()

    def rows_of(self, item_ids: np.ndarray) -> np.ndarray:
        """The row of `codes` of each item: int64 `(n,)` for int64 `(n,)`. KeyError for an item without a SID."""
        rows = np.searchsorted(self.item_ids, item_ids).clip(max=self.num_items - 1)
        unknown = np.asarray(item_ids)[self.item_ids[rows] != item_ids]
        if unknown.size:
            raise KeyError(f"{unknown.size} items have no SID, the first ones {_first(unknown)}: make the map again")
        return rows

    @classmethod
    def load(cls, path: str | Path, codebook_sizes: Sequence[int]) -> SIDMap:
        """Read a map from a .parquet or .npy file.

        Raises:
            FileNotFoundError: no file.
            ValueError: another kind of file, a damaged file, or one with other `codebook_sizes`; and as SIDMap.
        """
        path = Path(path)
        if path.suffix in _PICKLES:
            raise ValueError(
                f"{path} ends in {path.suffix!r}, a pickle, which can run code when it is read; SID maps are .parquet "
                "or .npy: save the codes with numpy.save('sids.npy', codes.numpy()), one row per item id"
            )
        if path.suffix not in _READERS:
            raise ValueError(f"{path} ends in {path.suffix!r}; SID maps are .parquet or .npy: convert the file")
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder; a SID map is a file of `evenrank make-sids`: give the file")
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist; it maps items to semantic IDs: make it with `evenrank make-sids`, or correct "
                "the path"
            )
        try:
            item_ids, codes, made_with, options = _READERS[path.suffix](path)
            if made_with is not None and tuple(codebook_sizes) != made_with:
                raise ValueError(
                    f"codebook_sizes is {list(codebook_sizes)}, the map was made with {list(made_with)}; a model has "
                    "a class for every code of the map: set codebook_sizes to the map's"
                )
            return cls(item_ids, codes, tuple(codebook_sizes), options)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the map as .parquet; after a failure an earlier file at `path` is unchanged.

        Raises:
            ValueError: another suffix.
        """
        path = Path(path)
        if path.suffix != ".parquet":
            raise ValueError(f"{path} ends in {path.suffix!r}; maps are written as .parquet: rename it")
        footer = {"format_version": _FORMAT_VERSION, "codebook_sizes": self.codebook_sizes, "options": self.options}
        sids = pa.FixedSizeListArray.from_arrays(self.codes.astype(np.int32).ravel(), self.num_hierarchies)
        table = pa.table({"item_id": self.item_ids, "sid": sids}, metadata={_METADATA_KEY: json.dumps(footer).encode()})
        with whole_file(path) as file:
            pq.write_table(table, file, write_page_checksum=True)


def random_sid_map(num_items: int, codebook_sizes: Sequence[int], seed: int = 0) -> SIDMap:
    """A map of items 0 … num_items − 1 to random, different SIDs.

    Raises:
        ValueError: more items than SIDs.

    >>> random_sid_map(4, [2, 2]).num_items
    4
    """
    capacity = math.prod(codebook_sizes)
    if not 1 <= num_items <= capacity:
        raise ValueError(
            f"num_items (sid.num_random_items) is {num_items}, codebooks of {list(codebook_sizes)} codes make "
            f"{capacity} SIDs; items have different SIDs: lower it or enlarge the codebooks"
        )
    rng = np.random.default_rng(seed)
    if 2 * num_items > capacity:
        chosen = rng.permutation(capacity)[:num_items]
        codes = np.stack(np.unravel_index(chosen, tuple(codebook_sizes)), axis=1)
    else:
        codes = np.empty((0, len(codebook_sizes)), np.int64)
        while len(codes) < num_items:
            drawn = rng.integers(0, codebook_sizes, (2 * num_items, len(codebook_sizes)))
            codes = np.unique(np.concatenate([codes, drawn]), axis=0)
        codes = rng.permutation(codes)[:num_items]
    return SIDMap(np.arange(num_items), codes, tuple(codebook_sizes), {"random": True, "seed": seed})


# The content of a file: item ids, codes, sizes of the codebooks (None if the file does not have them) and options.
_Content = tuple[np.ndarray, np.ndarray, tuple[int, ...] | None, Mapping[str, Any]]
# Errors besides ValueError from numpy's parser of a header, which is a Python literal.
_OF_A_HEADER = (SyntaxError, TypeError, OverflowError, tokenize.TokenError)


def _read_npy(path: Path) -> _Content:
    try:
        codes = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError, *_OF_A_HEADER) as error:
        raise ValueError(f"the file is no array of numbers ({reason_of(error)}): save the codes again") from None
    if not isinstance(codes, np.ndarray) or codes.ndim != 2 or not np.issubdtype(codes.dtype, np.integer):
        found = f"{codes.dtype} {codes.shape}" if isinstance(codes, np.ndarray) else type(codes).__name__
        raise ValueError(f"the file has {found}; codes are integers (num_items, num_hierarchies): save such an array")
    return np.arange(len(codes)), codes, None, {}


def _read_parquet(path: Path) -> _Content:
    try:
        table = pq.read_table(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"the file is no parquet file, or damaged ({reason_of(error)}): make it again") from None
    if not {"item_id", "sid"} <= set(table.column_names):
        raise ValueError(f"the columns are {table.column_names}; a map has item_id and sid: rename them")
    item_ids, sids = table["item_id"].combine_chunks(), table["sid"].combine_chunks()
    is_list = pa.types.is_list(sids.type) or pa.types.is_large_list(sids.type) or pa.types.is_fixed_size_list(sids.type)
    if not (pa.types.is_integer(item_ids.type) and is_list and pa.types.is_integer(sids.type.value_type)):
        raise ValueError(
            f"item_id is of type {item_ids.type}, sid of type {sids.type}; item_id has integers and sid lists of "
            "integers: convert them"
        )
    if item_ids.null_count or sids.null_count or sids.flatten().null_count:
        raise ValueError("the file has nulls; every item has an id and a code per hierarchy: remove or fill these rows")
    lengths = np.unique(sids.value_lengths().to_numpy())
    if lengths.size != 1:
        raise ValueError(
            f"sid has lists of {lengths.tolist()} codes; every item has one code per hierarchy: make them equally long"
        )
    raw = (table.schema.metadata or {}).get(_METADATA_KEY)
    sizes, options = (None, {}) if raw is None else _read_footer(raw)
    codes = sids.flatten().to_numpy().reshape(len(sids), int(lengths[0]))
    return item_ids.to_numpy(), codes, sizes, options


def _read_footer(raw: bytes) -> tuple[tuple[int, ...] | None, Mapping[str, Any]]:
    """Sizes of the codebooks, and the settings with which the map was made."""
    try:
        footer = json.loads(raw)
        version, sizes, options = footer["format_version"], footer.get("codebook_sizes"), footer.get("options", {})
        is_read = version != _FORMAT_VERSION or (
            isinstance(options, Mapping) and (sizes is None or all(isinstance(size, int) for size in sizes))
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_read = False
    if not is_read:
        raise ValueError("the footer of the map is damaged: make the map again")
    if version != _FORMAT_VERSION:
        raise ValueError(
            f"the map has format version {version!r}, this version reads {_FORMAT_VERSION}: make it again with "
            "`evenrank make-sids`"
        )
    return None if sizes is None else tuple(sizes), options


_READERS = {".npy": _read_npy, ".parquet": _read_parquet}


def is_sid_map(path: Path) -> bool:
    """Whether a file is a map that `SIDMap.save` wrote."""
    try:
        return _METADATA_KEY in (pq.read_metadata(path).metadata or {})
    except (pa.ArrowException, OSError):
        return False


def _first(values: Iterable[Any]) -> str:
    return ", ".join(map(str, itertools.islice(values, _SHOWN)))
