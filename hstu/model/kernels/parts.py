"""Functions that the attention kernels share: tiles, masks, biases, SiLU and its derivative.

With h = s/2 and a = 1 + tanh(h), which is 2σ(s):

    SiLU(s) = h · a            2 · SiLU'(s) = a + h · a · (2 − a)

So keys or queries are halved when they are loaded, and biases when their tables are made; a score then needs only one
instruction of the special function unit.
"""

# Triton compiles the kernels: their arguments have no annotations for mypy except `tl.constexpr`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl

from hstu.model import triton_blocks

TILE_SPAN = tl.constexpr(triton_blocks.TILE_SPAN)
# Arguments whose alignment varies, since they are parts of larger tensors; Triton would compile a kernel per alignment.
UNALIGNED = ["ROWS", "TILES", "TIMES"]
# Numbers for which Triton would compile further kernels: for the value 1, and for multiples of 16.
PLAIN = ["num_heads", "window", "origin", "width", "num_buckets"]
# ln(1.351): the width of a time bucket, as in `hstu.model.attention`.
_LOG_TIME_STEP = tl.constexpr(0.301)
# The bits of 2²³ in float32: after the addition of a smaller integer, the last bits are this integer.
_BITS_OF_2_23 = tl.constexpr(0x4B000000)


# ------------------------------------------------------------------------------------------------------------- tiles


@triton.jit
def program_tile(ROWS, TILES, num_heads, BLOCK: tl.constexpr):
    """This program's head; its row's first token (int64), length, history and context; and its block's start."""
    program = tl.program_id(0)
    blocks_per_tile: tl.constexpr = TILE_SPAN // BLOCK
    block = program // num_heads
    tile = TILES + 2 * (block // blocks_per_tile)
    row = ROWS + 4 * tl.load(tile)
    start = tl.load(tile + 1) + block % blocks_per_tile * BLOCK
    return program % num_heads, tl.load(row).to(tl.int64), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), start


@triton.jit
def pointers_to(TENSOR, first, start, head, token_stride, head_stride, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Pointers `(BLOCK, BLOCK_DIM)` to the tokens of a row from `start`; int64, as a batch may exceed 2³¹ numbers."""
    corner = TENSOR + (first + start) * token_stride + head * head_stride
    return corner + tl.arange(0, BLOCK)[:, None] * token_stride + tl.arange(0, BLOCK_DIM)[None, :]


@triton.jit
def places(BLOCK: tl.constexpr, FAST: tl.constexpr):
    """0 to BLOCK − 1, for masks.

    Inline assembly hides from LLVM that the numbers equal `tl.arange`. Otherwise LLVM would vectorise masks together
    with addresses of biases, and the addresses could no longer be immediate offsets.
    """
    numbers = tl.arange(0, BLOCK)
    if FAST:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [numbers], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return numbers


@triton.jit
def mask_of(start, limit, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Mask `(BLOCK, BLOCK_DIM or 1)` of tokens before `limit` and of channels below HEAD_DIM."""
    mask = (start + tl.arange(0, BLOCK) < limit)[:, None]
    if HEAD_DIM != BLOCK_DIM:
        mask = mask & (tl.arange(0, BLOCK_DIM) < HEAD_DIM)[None, :]
    return mask


@triton.jit
def load_own(
    TENSOR, first, start, length, head, token_stride, head_stride,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """The program's own tokens `(BLOCK, BLOCK_DIM)`, with zeros after the end of the row."""
    pointers = pointers_to(TENSOR, first, start, head, token_stride, head_stride, BLOCK, BLOCK_DIM)
    return tl.load(pointers, mask=mask_of(start, length, HEAD_DIM, BLOCK, BLOCK_DIM), other=0.0)


@triton.jit
def halved(values):
    """Half of the values; exact except for the smallest numbers of float16."""
    return (0.5 * values.to(tl.float32)).to(values.dtype)


@triton.jit
def load_visited(
    TENSOR, first, start, length, head, token_stride, head_stride, masked: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A block of visited tokens `(BLOCK, BLOCK_DIM)`; in a loop without a mask all of them are in the row.

    With TMA, TENSOR is a descriptor of `(num_tokens, num_heads · HEAD_DIM)`, and after the row come tokens of other
    rows instead of zeros.
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
    """The place of a token for biases and window: every group of targets is directly after the history."""
    if CAUSAL:
        return tl.where(token < history, token, history + (token - history) % GROUP)
    else:
        return token


@triton.jit
def sees(i, j, i_place, j_place, history, context, window, GROUP: tl.constexpr, CAUSAL: tl.constexpr):
    """Whether queries i see keys j of a row; the shapes of i and j broadcast."""
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

    Not `masked`: the whole blocks of keys that all queries see. `masked`: the remaining keys before and after these
    blocks, and the targets in the queries' own groups.
    """
    end = tl.minimum(start + BLOCK_M, length)
    if CAUSAL:
        seen_by_all = tl.minimum(start, history)
        last = tl.minimum(end - 1, history + GROUP - 1)  # the last place of the block
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
    """Three ranges of queries that a block of keys visits: begin, end, begin, end, begin, end.

    Not `masked`: the whole blocks of queries in the history that see all of the keys. `masked`: the contextual queries
    before the keys, the queries from the first key up to these blocks, and the remaining queries, targets included.
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
    else:  # without a causal mask attention is symmetric
        return key_ranges(masked, start, length, history, context, window, GROUP, BLOCK_N, BLOCK_M, CAUSAL)


@triton.jit
def num_blocks(begin, end, begin2, end2, begin3, end3, BLOCK: tl.constexpr):
    """Number of blocks in three ranges."""
    return tl.cdiv(end - begin, BLOCK) + tl.cdiv(end2 - begin2, BLOCK) + tl.cdiv(end3 - begin3, BLOCK)


@triton.jit
def block_of(step, begin, end, begin2, end2, begin3, end3, BLOCK: tl.constexpr):
    """The start of the block of a step, and the end of its range; the steps go through the ranges in order."""
    first, both = tl.cdiv(end - begin, BLOCK), tl.cdiv(end - begin, BLOCK) + tl.cdiv(end2 - begin2, BLOCK)
    start = tl.where(step < both, begin2 + (step - first) * BLOCK, begin3 + (step - both) * BLOCK)
    limit = tl.where(step < both, end2, end3)
    return tl.where(step < first, begin + step * BLOCK, start), tl.where(step < first, end, limit)


# ------------------------------------------------------------------------------------------------------------ scores


@triton.jit
def tanh(h, FAST: tl.constexpr):
    """Hyperbolic tangent. FAST takes one instruction of the special function unit, instead of two for exp and division.

    The error of FAST, at most 2⁻¹¹, is below the error of the scores from inputs of 16 bits.
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
    """Load numbers of a table, in the layout of the scores.

    FAST uses inline assembly, which keeps the layout of the pointers; `tl.load` would convert layouts through shared
    memory.
    """
    if FAST:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [pointers], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.load(pointers)


@triton.jit
def load_times(TIMES, first, tokens, FAST: tl.constexpr):
    """The timestamps of tokens of a row, as two float32 numbers: high · 2²⁴ + low."""
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
    """Buckets of the time differences `high · 2²⁴ + low`; not clamped, because the table repeats its last bucket."""
    apart = tl.maximum(tl.abs(high * 16777216.0 + low), 1.0)
    if FAST:  # ⌊log₂(apart) · ln(2) ÷ 0.301⌋, rounded down by adding 2²³
        bits = tl.inline_asm_elementwise(
            "{ .reg .f32 t; lg2.approx.f32 t, $1; fma.rm.f32 t, t, 0f40136150, 0f4B000000; mov.b32 $0, t; }",
            "=r,f", [apart], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        return bits - _BITS_OF_2_23
    else:
        return (tl.log(apart) / _LOG_TIME_STEP).to(tl.int32)
