"""What the attention kernels share: where tiles lie, what a query sees, biases, and the two functions of a score.

With h = s/2 and a = 1 + tanh(h), which is 2σ(s):

    SiLU(s) = h · a            2 · SiLU'(s) = a + h · a · (2 − a)

so keys or queries are halved when they are loaded, biases when their tables are made, and one instruction of the
special function unit per score is left.
"""

# Kernels are read by Triton, not by mypy: their arguments have no annotations but `tl.constexpr`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl

from hstu.model import triton_blocks

TILE_SPAN = tl.constexpr(triton_blocks.TILE_SPAN)
# Triton would compile again for other alignments of these parts of larger tensors,
UNALIGNED = ["ROWS", "TILES", "TIMES"]
# and for a 1 or a multiple of 16 among these numbers.
PLAIN = ["num_heads", "window", "origin", "width", "num_buckets"]
# ln(1.351): the width of a time bucket, as in `hstu.model.attention`.
_LOG_TIME_STEP = tl.constexpr(0.301)
# Bits of 2²³ in float32: an integer below that, added to it, is in the last bits.
_BITS_OF_2_23 = tl.constexpr(0x4B000000)


# ------------------------------------------------------------------------------------------------------------- tiles


@triton.jit
def program_tile(ROWS, TILES, num_heads, BLOCK: tl.constexpr):
    """This program's head, and of its row the first token (int64), length, history, context and the block's start."""
    program = tl.program_id(0)
    blocks_per_tile: tl.constexpr = TILE_SPAN // BLOCK
    block = program // num_heads
    tile = TILES + 2 * (block // blocks_per_tile)
    row = ROWS + 4 * tl.load(tile)
    start = tl.load(tile + 1) + block % blocks_per_tile * BLOCK
    return program % num_heads, tl.load(row).to(tl.int64), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), start


@triton.jit
def pointers_to(TENSOR, first, start, head, token_stride, head_stride, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Pointers `(BLOCK, BLOCK_DIM)` to the tokens of a row from `start` on; int64, for a batch may exceed 2³¹."""
    corner = TENSOR + (first + start) * token_stride + head * head_stride
    return corner + tl.arange(0, BLOCK)[:, None] * token_stride + tl.arange(0, BLOCK_DIM)[None, :]


@triton.jit
def places(BLOCK: tl.constexpr, FAST: tl.constexpr):
    """0 to BLOCK − 1, for masks.

    Numbers from inline assembly, of which LLVM does not know that they are those of `tl.arange`: it would compute masks
    and addresses of biases together, as vectors, and the latter would be no immediate offsets any more.
    """
    numbers = tl.arange(0, BLOCK)
    if FAST:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [numbers], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return numbers


@triton.jit
def mask_of(start, limit, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Mask `(BLOCK, BLOCK_DIM or 1)`: tokens before `limit`, channels that the head has."""
    mask = (start + tl.arange(0, BLOCK) < limit)[:, None]
    if HEAD_DIM != BLOCK_DIM:
        mask = mask & (tl.arange(0, BLOCK_DIM) < HEAD_DIM)[None, :]
    return mask


@triton.jit
def load_own(
    TENSOR, first, start, length, head, token_stride, head_stride,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """The program's own tokens `(BLOCK, BLOCK_DIM)`, zeros from the row's end on."""
    pointers = pointers_to(TENSOR, first, start, head, token_stride, head_stride, BLOCK, BLOCK_DIM)
    return tl.load(pointers, mask=mask_of(start, length, HEAD_DIM, BLOCK, BLOCK_DIM), other=0.0)


@triton.jit
def halved(values):
    """Half of the values; exact but for the smallest numbers of float16."""
    return (0.5 * values.to(tl.float32)).to(values.dtype)


@triton.jit
def load_visited(
    TENSOR, first, start, length, head, token_stride, head_stride, masked: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Tokens that the program visits `(BLOCK, BLOCK_DIM)`, all of them in the row where the loop is not masked.

    TMA: TENSOR is a descriptor of `(num_tokens, num_heads · HEAD_DIM)`, and what is behind the row are other rows'.
    """
    if TMA:
        return TENSOR.load([(first + start).to(tl.int32), head * HEAD_DIM])
    elif masked or HEAD_DIM != BLOCK_DIM:
        return load_own(TENSOR, first, start, length, head, token_stride, head_stride, HEAD_DIM, BLOCK, BLOCK_DIM)
    else:
        return tl.load(pointers_to(TENSOR, first, start, head, token_stride, head_stride, BLOCK, BLOCK_DIM))


@triton.jit
def store(
    TENSOR, values, first, start, length, head, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Write a block into a contiguous tensor `(num_tokens, num_heads, HEAD_DIM)`."""
    pointers = pointers_to(TENSOR, first, start, head, num_heads * HEAD_DIM, HEAD_DIM, BLOCK, BLOCK_DIM)
    mask = mask_of(start, length, HEAD_DIM, BLOCK, BLOCK_DIM)
    tl.store(pointers, values.to(TENSOR.dtype.element_ty), mask=mask)


# -------------------------------------------------------------------------------------------------------------- mask


@triton.jit
def place_of(token, history, GROUP: tl.constexpr, CAUSAL: tl.constexpr):
    """Where biases and window see a token: each group of targets stands directly behind the history."""
    if CAUSAL:
        return tl.where(token < history, token, history + (token - history) % GROUP)
    else:
        return token


@triton.jit
def sees(i, j, i_place, j_place, history, context, window, GROUP: tl.constexpr, CAUSAL: tl.constexpr):
    """Mask of queries i and keys j of a row, whose shapes broadcast."""
    if CAUSAL:
        before = (j <= i) & (i_place - j_place <= window)
        same_group = (i - history) // GROUP == (j - history) // GROUP
        return tl.where(j < history, before | (i < context), before & same_group)
    else:
        return tl.abs(i - j) <= window


@triton.jit
def key_ranges(
    masked: tl.constexpr, start, length, history, context, window,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Three ranges of keys that a block of queries visits: begin, end, begin, end, begin, end.

    Without a mask whole blocks that all of its queries see. With it what is left before and behind those, and the
    targets that some of the queries see, which are those of their own groups.
    """
    end = tl.minimum(start + BLOCK_M, length)
    if CAUSAL:
        seen_by_all = tl.minimum(start, history)
        last = tl.minimum(end - 1, history + GROUP - 1)  # the block's last place
        begin = tl.where(start < context, 0, tl.maximum(seen_by_all - window, 0))
        seen_by_some = tl.minimum(tl.where(start < context, history, end), history)
        targets = history + tl.maximum(start - history, 0) // GROUP * GROUP
        targets_end = tl.maximum(end, targets)
    else:
        last, targets, targets_end = end - 1, 0, 0
        begin = tl.maximum(start - window, 0)
        seen_by_all = tl.minimum(start + window + 1, length)
        seen_by_some = tl.minimum(end + window, length)
    whole = tl.minimum(tl.maximum(last - window, begin), seen_by_all)
    whole_end = whole + (seen_by_all - whole) // BLOCK_N * BLOCK_N
    if masked:
        return begin, whole, whole_end, tl.maximum(seen_by_some, whole_end), targets, targets_end
    else:
        return whole, whole_end, 0, 0, 0, 0


@triton.jit
def query_ranges(
    masked: tl.constexpr, start, length, history, context, window,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Three ranges of queries that visit a block of keys: begin, end, begin, end, begin, end.

    Without a mask whole blocks of the history that see all of the keys. With it the contextual queries before the
    keys, from the keys on those that see a part of them, and what is left, targets among it.
    """
    end = tl.minimum(start + BLOCK_N, length)
    if CAUSAL:
        of_history = start + BLOCK_N <= history
        contextual = tl.where(start < history, tl.minimum(context, start), 0)
        last_group = history + (tl.maximum(end - 1 - history, 0) // GROUP + 1) * GROUP
        seeing = tl.where(start < history, length, tl.minimum(last_group, length))
        whole = tl.where(of_history, end, seeing)
        seeing_all = tl.where(of_history, tl.maximum(tl.minimum(start + window + 1, history), end), whole)
        seeing_some = tl.minimum(tl.maximum(end + window, context), history)
        seeing_some = tl.where(end + window > history, length, seeing_some)
        whole_end = whole + (seeing_all - whole) // BLOCK_M * BLOCK_M
        rest_end = tl.where(of_history, tl.maximum(seeing_some, whole_end), whole_end)
        if masked:
            return 0, contextual, start, whole, whole_end, rest_end
        else:
            return whole, whole_end, 0, 0, 0, 0
    else:  # as many see a block as a block sees
        return key_ranges(masked, start, length, history, context, window, GROUP, BLOCK_N, BLOCK_M, CAUSAL)


@triton.jit
def num_blocks(begin, end, begin2, end2, begin3, end3, BLOCK: tl.constexpr):
    """How many blocks three ranges have."""
    return tl.cdiv(end - begin, BLOCK) + tl.cdiv(end2 - begin2, BLOCK) + tl.cdiv(end3 - begin3, BLOCK)


@triton.jit
def block_of(step, begin, end, begin2, end2, begin3, end3, BLOCK: tl.constexpr):
    """Where the block of a step starts, and its limit: blocks of the first range, then those of the others."""
    first, both = tl.cdiv(end - begin, BLOCK), tl.cdiv(end - begin, BLOCK) + tl.cdiv(end2 - begin2, BLOCK)
    start = tl.where(step < both, begin2 + (step - first) * BLOCK, begin3 + (step - both) * BLOCK)
    limit = tl.where(step < both, end2, end3)
    return tl.where(step < first, begin + step * BLOCK, start), tl.where(step < first, end, limit)


# ------------------------------------------------------------------------------------------------------------ scores


@triton.jit
def tanh(h, FAST: tl.constexpr):
    """Hyperbolic tangent; FAST takes one instruction of the special function unit, exp and a division take two.

    Its error, 2⁻¹¹ at most, is below what inputs of 16 bits make of the scores.
    """
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [h], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 2.0 * tl.sigmoid(2.0 * h) - 1.0


@triton.jit
def silu(h, FAST: tl.constexpr):
    """SiLU(2h)."""
    if FAST:
        return h + h * tanh(h, FAST)
    else:
        return 2.0 * h * tl.sigmoid(2.0 * h)


@triton.jit
def twice_sigmoid(h, FAST: tl.constexpr):
    """2σ(2h)."""
    if FAST:
        return 1.0 + tanh(h, FAST)
    else:
        return 2.0 * tl.sigmoid(2.0 * h)


@triton.jit
def load_bias(pointers, FAST: tl.constexpr):
    """Numbers of a table, in the layout of the scores.

    Triton gives its own loads a layout and converts through shared memory; inline assembly has none.
    """
    if FAST:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [pointers], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.load(pointers)


@triton.jit
def load_times(TIMES, first, tokens, FAST: tl.constexpr):
    """When tokens of a row happened, as two numbers of float32: high · 2²⁴ + low."""
    if TIMES is None:
        return 0.0, 0.0
    elif FAST:
        return tl.inline_asm_elementwise(
            "ld.global.nc.v2.f32 {$0, $1}, [$2];", "=f,=f,l", [TIMES + 2 * (first + tokens)],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        pointers = TIMES + 2 * (first + tokens)
        return tl.load(pointers), tl.load(pointers + 1)


@triton.jit
def time_bucket(high, low, FAST: tl.constexpr):
    """Buckets of the times `high · 2²⁴ + low` between queries and keys; no last bucket, that the table has."""
    apart = tl.maximum(tl.abs(high * 16777216.0 + low), 1.0)
    if FAST:  # ⌊log₂(apart) · ln(2) ÷ 0.301⌋, rounded down by adding 2²³
        bits = tl.inline_asm_elementwise(
            "{ .reg .f32 t; lg2.approx.f32 t, $1; fma.rm.f32 t, t, 0f40136150, 0f4B000000; mov.b32 $0, t; }",
            "=r,f", [apart], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        return bits - _BITS_OF_2_23
    else:
        return (tl.log(apart) / _LOG_TIME_STEP).to(tl.int32)
