"""From raw values to dense ids: integers, strings or bytes, collected first, sorted, then looked up.

Memory is that of the different values. Looking up strings builds a table of all of them: ask for many at once.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# Values that are collected before they are merged with those that are known.
_PENDING = 1 << 20


def plain_values(array: pa.Array | pa.ChunkedArray, what: str) -> pa.Array:
    """An array as int64, large_string or large_binary, dictionaries resolved.

    Raises:
        ValueError: values of another type.

    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_boolean(kind):
        return array.cast(pa.int8()).cast(pa.int64())
    if pa.types.is_integer(kind):
        try:
            return array.cast(pa.int64())
        except pa.ArrowInvalid:
            raise ValueError(f"{what} has integers of 2^63 and more; ids are below that: convert it") from None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return array.cast(pa.large_string())
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return array.cast(pa.large_binary())
    raise ValueError(f"{what} is of type {kind}; such a column holds integers, strings or booleans: convert it")


class Vocabulary:
    """The different values of a column, sorted; a null is a value of its own, behind all others.

    Args:
        what: the column, for errors.

    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._known: pa.Array | None = None
        self._pending: list[pa.Array] = []
        self._num_pending = 0
        self._has_null = False
        self._integers: np.ndarray | None = None

    def add(self, values: pa.Array) -> None:
        """Collect values, as `plain_values` gives them.

        Raises:
            ValueError: another type than before.

        """
        first = self._pending[0] if self._pending else self._known
        if first is not None and first.type != values.type:
            raise ValueError(
                f"{self._what} is of type {first.type} in one file and {values.type} in another; its values are of one "
                "type: convert one"
            )
        self._has_null |= values.null_count > 0
        self._pending.append(values.unique().drop_null())
        self._num_pending += len(self._pending[-1])
        # Merging what is known with as many new ones keeps the cost of all merges linear.
        if self._num_pending > max(_PENDING, 0 if self._known is None else len(self._known)):
            self._merge()

    def _merge(self) -> None:
        parts = self._pending if self._known is None else [self._known, *self._pending]
        self._known = pa.chunked_array(parts).unique()
        self._pending, self._num_pending = [], 0

    def finish(self) -> None:
        """End collecting; ids can be asked for."""
        if self._pending:
            self._merge()
        if self._known is None:
            self._known = pa.array([], pa.int64())
        self._known = self._known.take(pc.sort_indices(self._known))
        if pa.types.is_integer(self._known.type):
            self._integers = self._known.to_numpy()

    def __len__(self) -> int:
        return len(self._sorted) + self._has_null

    @property
    def _sorted(self) -> pa.Array:
        if self._known is None:
            raise RuntimeError("finish() comes before ids are asked for")
        return self._known

    @property
    def is_text(self) -> bool:
        """Whether looking up is better done with many values at once."""
        return self._integers is None

    @property
    def values(self) -> pa.Array:
        """The raw value of each id."""
        if not self._has_null:
            return self._sorted
        return pa.concat_arrays([self._sorted, pa.nulls(1, self._sorted.type)])

    def ids(self, values: pa.Array) -> np.ndarray:
        """int32 `(n,)`: the id of each value; all have been collected."""
        if self._integers is None:
            return pc.index_in(values, value_set=self.values).to_numpy().astype(np.int32, copy=False)
        if not values.null_count:
            return np.searchsorted(self._integers, values.to_numpy()).astype(np.int32)
        found = np.searchsorted(self._integers, values.fill_null(0).to_numpy())
        found[values.is_null().to_numpy(zero_copy_only=False)] = len(self._integers)
        return found.astype(np.int32)

    def split_keys(self) -> np.ndarray:
        """A number for each value that depends on it alone: integers themselves, 64 bits of BLAKE2b of others.

        Returns:
            uint64 `(num_values,)`, in the order of the ids.

        """
        if self._integers is not None:
            return self._integers.astype(np.uint64)
        digests = (_digest(value) for value in self._sorted)
        return np.fromiter(digests, np.uint64, len(self._sorted))


def _digest(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(value.as_buffer(), digest_size=8).digest(), "little")
