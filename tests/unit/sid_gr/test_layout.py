"""Blocks of rows for the attention, and the layers that compute it."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sid_gr.megatron_core import get_gpt_layer_local_spec
from sid_gr.model import decoder, token_layout
from sid_gr.model.attention import PatternAttention


def row_lengths(layout):
    """Tokens of every sorted row, read from the blocks."""
    lengths = []
    for block in layout.blocks:
        if block.slots is None:
            lengths += [block.length] * block.num_rows
        else:
            lengths += torch.bincount(block.slots // block.length, minlength=block.num_rows).tolist()
    return lengths


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    num_heads=st.integers(1, 8),
    dispatch=st.sampled_from([0, 100, 2**13, 2**20]),
)
def test_blocks_pad_no_more_than_a_dispatch_is_worth(lengths, num_heads, dispatch):
    histories, candidates = np.array(lengths) - 1, np.zeros(len(lengths), np.int64)
    sizes = {"num_rows": len(lengths), "num_hierarchies": 1, "num_heads": num_heads}
    with mock.patch.dict(token_layout._DISPATCH_PAIRS, cpu=dispatch):
        layout = token_layout.lay_out_batch(histories, candidates, **sizes, device=torch.device("cpu"))
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
