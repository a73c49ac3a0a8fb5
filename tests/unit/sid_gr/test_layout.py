"""Tokens of a batch, and attention over packed rows: against one row at a time."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sid_gr.megatron_core import get_gpt_layer_local_spec
from sid_gr.model import decoder, token_layout
from sid_gr.model.attention import CausalRows, PatternAttention
from sid_gr.model.decoding_cache import BeamStep, DecodingCache
from sid_gr.model.token_layout import lay_out_batch

CPU = torch.device("cpu")


@st.composite
def batches(draw, most_items=8, least_rows=0):
    """Hierarchies, items of histories and candidates, and how many rows of padding follow."""
    hierarchies = draw(st.integers(1, 4))
    rows = draw(st.lists(st.tuples(st.integers(0, most_items), st.integers(0, 3)), min_size=least_rows, max_size=7))
    padding = draw(st.integers(0, 2))
    return hierarchies, rows, padding


def lay_out(hierarchies, rows, padding=0, num_heads=2):
    items = np.array([*rows, *[(0, 0)] * padding], dtype=np.int64).reshape(-1, 2)
    return lay_out_batch(
        items[:, 0] * hierarchies,
        items[:, 1] * hierarchies,
        num_rows=len(rows),
        num_hierarchies=hierarchies,
        num_heads=num_heads,
        device=CPU,
    )


def row_lengths(layout):
    """Tokens of every sorted row, read from the blocks."""
    lengths = []
    for block in layout.blocks:
        if block.slots is None:
            lengths += [block.length] * block.num_rows
        else:
            lengths += torch.bincount(block.slots // block.length, minlength=block.num_rows).tolist()
    return lengths


@given(batches())
def test_tokens_are_bos_and_the_codes_in_order(given_batch):
    hierarchies, rows, padding = given_batch
    layout = lay_out(hierarchies, rows, padding)
    total = sum(history for history, _ in rows) * hierarchies
    ids = iter(range(1, 10_000))
    histories = [[next(ids) for _ in range(history * hierarchies)] for history, _ in rows]
    candidates = [[next(ids) for _ in range(count * hierarchies)] for _, count in rows]
    expected = [[0, *history, *candidate[:-1]] for history, candidate in zip(histories, candidates)]
    assert total == sum(map(len, histories))
    lengths = row_lengths(layout)
    assert lengths == sorted((len(row) for row in expected), reverse=True)
    tokens = [part.tolist() for part in layout.source.split(lengths)]
    positions = [part.tolist() for part in layout.positions.split(lengths)]
    starts = np.cumsum([0, *lengths])
    assert sorted(layout.order.tolist()) == list(range(len(rows)))
    predicting = iter(layout.predicting.tolist())
    predicted_by = {row: [next(predicting) for _ in candidates[row]] for row in range(len(rows))}
    for place, row in enumerate(layout.order.tolist()):
        assert tokens[place] == expected[row]
        assert positions[place] == [-(-p // hierarchies) for p in range(len(expected[row]))]
        history = len(histories[row])
        assert layout.prefix_lengths[place] == 1 + history
        assert layout.last_history[place] == starts[place] + history
        # The code behind the history is predicted by the history's last token, and so on.
        assert predicted_by[row] == [starts[place] + history + code for code in range(len(candidates[row]))]


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    num_heads=st.integers(1, 8),
    dispatch=st.sampled_from([0, 100, 2**13, 2**20]),
)
def test_blocks_pad_no_more_than_a_dispatch_is_worth(lengths, num_heads, dispatch):
    with mock.patch.dict(token_layout._DISPATCH_PAIRS, cpu=dispatch):
        layout = lay_out(1, [(length - 1, 0) for length in lengths], num_heads=num_heads)
    assert sum(block.num_rows for block in layout.blocks) == len(lengths)
    assert sum(block.num_tokens for block in layout.blocks) == sum(lengths)
    ordered = iter(row_lengths(layout))
    for block in layout.blocks:
        own = [next(ordered) for _ in range(block.num_rows)]
        assert max(own) == block.length and (block.slots is None) == (len(set(own)) == 1)
        wasted = sum(block.length * (block.length + 1) - length * (length + 1) for length in own) // 2
        assert wasted * num_heads <= dispatch
    if dispatch == 0:
        assert len(layout.blocks) == len(set(lengths))  # equal rows share a block, others do not


def one_row_at_a_time(query, key, value):
    """Causal attention of one row, `(length, num_heads, head_dim)`, by the formula."""
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[2] ** 0.5
    ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(2), value)


@given(batches(least_rows=1), st.integers(1, 3), st.integers(0, 99))
def test_rows_attend_within_themselves(given_batch, num_heads, seed):
    hierarchies, rows, padding = given_batch
    layout = lay_out(hierarchies, rows, padding, num_heads)
    lengths = row_lengths(layout)
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(lengths), num_heads, 4)
    parts = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    attended = CausalRows(layout=layout).attend(1, *parts)
    assert attended.shape == shape
    grads = torch.autograd.grad(attended, parts, grad)
    expected = [one_row_at_a_time(*row) for row in zip(*(part.split(lengths) for part in parts))]
    expected = torch.cat(expected)
    torch.testing.assert_close(attended, expected)
    for found, wanted in zip(grads, torch.autograd.grad(expected, parts, grad)):
        torch.testing.assert_close(found, wanted)


@given(batches(most_items=5, least_rows=1), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_beams_attend_to_their_history_and_to_themselves(given_batch, num_beams, num_codes, seed):
    hierarchies, rows, _ = given_batch
    layout = lay_out(hierarchies, rows)
    lengths = row_lengths(layout)
    generator = torch.Generator().manual_seed(seed)

    def draw(count):
        return [torch.randn(count, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3)]

    cache = DecodingCache(layout)
    prefix = draw(sum(lengths))
    CausalRows(layout=layout, cache=cache).attend(1, *prefix)
    histories = [
        [part[: int(count)] for part in row]
        for row, count in zip(zip(*(part.split(lengths) for part in prefix)), layout.prefix_lengths)
    ]
    # By row and beam: queries, keys and values of all tokens so far; every beam continues a random other.
    beams = [[[part[:0] for part in prefix]] for _ in rows]
    for _ in range(num_codes):
        parents = torch.randint(len(beams[0]), (len(rows), num_beams), generator=generator)
        cache.choose_beams(parents)
        new = draw(len(rows) * num_beams)
        found = BeamStep(cache=cache, num_beams=num_beams).attend(1, *new)
        assert found.shape == (len(rows) * num_beams, 2, 4)
        tokens = iter(zip(*(part.split(1) for part in new)))
        beams = [
            [[torch.cat(pair) for pair in zip(beams[row][parent], next(tokens))] for parent in row_parents]
            for row, row_parents in enumerate(parents.tolist())
        ]
        expected = [
            one_row_at_a_time(*(torch.cat(pair) for pair in zip(history, beam)))[-1]
            for history, row_beams in zip(histories, beams)
            for beam in row_beams
        ]
        torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("has_transformer_engine", [False, True])
def test_layers_are_transformer_engines_where_it_is_installed(has_transformer_engine):
    local, other = get_gpt_layer_local_spec(), get_gpt_layer_local_spec()
    with mock.patch.multiple(
        decoder,
        HAVE_TE=has_transformer_engine,
        get_gpt_layer_local_spec=lambda: local,
        get_gpt_layer_with_transformer_engine_spec=lambda: other,
    ):
        chosen = decoder.layer_spec()
    assert chosen is (other if has_transformer_engine else local)
    assert chosen.submodules.self_attention.submodules.core_attention.module is PatternAttention
