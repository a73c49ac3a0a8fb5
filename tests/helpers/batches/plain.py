"""Batches as plain values, to be compared."""

from __future__ import annotations

from hypothesis import strategies as st

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=8,
)
