"""Rows of three parts, drawn by Hypothesis: contextual tokens, a history, and targets at the end."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def rows_of_parts(draw, longest: int, most_rows: int, least_rows: int = 0) -> tuple[list[int], list[int], list[int]]:
    """Tokens, targets and contextual tokens of each row; the latter two are among the tokens."""
    lengths = draw(st.lists(st.integers(0, longest), min_size=least_rows, max_size=most_rows))
    targets = [draw(st.integers(0, length)) for length in lengths]
    return lengths, targets, [draw(st.integers(0, length - count)) for length, count in zip(lengths, targets)]
