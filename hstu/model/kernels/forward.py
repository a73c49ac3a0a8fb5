"""The attention of a block of queries."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl

from hstu.model.kernels.parts import (
    PLAIN,
    UNALIGNED,
    block_of,
    halved,
    key_ranges,
    load_bias,
    load_own,
    load_times,
    load_visited,
    num_blocks,
    place_of,
    places,
    program_tile,
    sees,
    silu,
    store,
    time_bucket,
)


@triton.jit(do_not_specialize=PLAIN, do_not_specialize_on_alignment=UNALIGNED)
def forward(
    Q, K, V, POSITION, TIME, TIMES, OUT, ROWS, TILES,
    num_heads, token_stride, head_stride, before, after, window, origin, width, num_buckets,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The output of a block of queries. `before · after` is 1/N: the factors before the sum and after it."""
    head, first, length, history, context, start = program_tile(ROWS, TILES, num_heads, BLOCK_M)
    if start >= length:
        return
    if POSITION is not None:
        POSITION += head * width + origin
    if TIME is not None:
        TIME += head * num_buckets
    q = halved(load_own(Q, first, start, length, head, token_stride, head_stride, HEAD_DIM, BLOCK_M, BLOCK_DIM))
    i = tl.minimum(start + tl.arange(0, BLOCK_M), length - 1)
    i_place = place_of(i, history, GROUP, CAUSAL)
    i_high, i_low = load_times(TIMES, first, i, FAST)
    column, place = tl.arange(0, BLOCK_N), places(BLOCK_N, FAST)
    sums = tl.zeros((BLOCK_M, BLOCK_DIM), tl.float32)
    for masked in tl.static_range(2):
        begin, end, begin2, end2, begin3, end3 = key_ranges(
            masked, start, length, history, context, window, GROUP, BLOCK_M, BLOCK_N, CAUSAL
        )
        for step in range(0, num_blocks(begin, end, begin2, end2, begin3, end3, BLOCK_N)):
            if masked:
                n, limit = block_of(step, begin, end, begin2, end2, begin3, end3, BLOCK_N)
            else:
                n, limit = begin + step * BLOCK_N, length
            k = load_visited(
                K, first, n, limit, head, token_stride, head_stride, masked, HEAD_DIM, BLOCK_N, BLOCK_DIM, TMA
            )
            v = load_visited(
                V, first, n, limit, head, token_stride, head_stride, masked, HEAD_DIM, BLOCK_N, BLOCK_DIM, TMA
            )
            h = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            j = n + place
            if masked:
                j = tl.minimum(j, limit - 1)
                j_place = place_of(j, history, GROUP, CAUSAL)
            if POSITION is not None:
                if masked:
                    h += load_bias((POSITION + i_place)[:, None] - j_place[None, :], FAST)
                else:
                    h += load_bias((POSITION + i_place)[:, None] - n - column[None, :], FAST)
            if TIME is not None:
                j_high, j_low = load_times(TIMES, first, j, FAST)
                bucket = time_bucket(i_high[:, None] - j_high[None, :], i_low[:, None] - j_low[None, :], FAST)
                h += load_bias(TIME + bucket, FAST)
            weights = silu(h, FAST)
            if v.dtype == tl.float16:
                weights *= before
            if masked:
                seen = sees(i[:, None], j[None, :], i_place[:, None], j_place[None, :], history, context, window,
                            GROUP, CAUSAL)  # fmt: skip
                weights = tl.where(seen & (n + place < limit)[None, :], weights, 0.0)
            sums = tl.dot(weights.to(v.dtype), v, sums, input_precision=PRECISION)
    store(OUT, sums * after, first, start, length, head, num_heads, HEAD_DIM, BLOCK_M, BLOCK_DIM)
