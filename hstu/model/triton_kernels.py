"""HSTU attention of a jagged batch as three Triton kernels: one forward, two backward.

    y_i = 1/N · Σ_j mask(i, j) · SiLU(q_i · k_j + bias(i − j) + time_bias(t_i − t_j)) · v_j        per head

Nothing is padded in memory: a program takes one tile of a row's tokens and one head, and visits the tiles on the other
side that the mask leaves. What `hstu.model.attention` defines is the truth; this computes the same.

    forward          a tile of queries visits keys       y
    backward_query   a tile of queries visits keys       the gradients of q and of both biases
    backward_key     a tile of keys visits queries       the gradients of k and v

Rows `(batch_size, 4)` hold first token, length, history and context of every row; tiles `(num_tiles, 2)` hold a row
and a place in it, the most work first, and span TILE_SPAN tokens, from which programs cut their blocks. A target sees
all of the history and its own group, so its tile visits no other target's; a tile before the diagonal needs no mask
at all, for what is loaded beyond a limit is zero, and a zero key, value or gradient adds nothing.
"""

# Kernels are read by Triton, not by mypy: their arguments have no annotations but `tl.constexpr`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import triton
import triton.language as tl

from hstu.model import triton_launch

TILE_SPAN = tl.constexpr(triton_launch.TILE_SPAN)
# Triton would compile again for other alignments of these parts of larger tensors,
_UNALIGNED = ["ROWS", "TILES", "TIMES"]
# and for a 1 or a multiple of 16 among these numbers.
_PLAIN = ["num_heads", "zero", "width", "num_buckets"]
# ln(1.351): the width of a time bucket, as in `hstu.model.attention`.
_LOG_TIME_STEP = tl.constexpr(0.301)


@triton.jit
def _program_tile(ROWS, TILES, num_heads, BLOCK: tl.constexpr):
    """This program's head, and of its row the first token (int64), length, history, context and the block's start."""
    program = tl.program_id(0)
    blocks_per_tile: tl.constexpr = TILE_SPAN // BLOCK
    block = program // num_heads
    tile = TILES + 2 * (block // blocks_per_tile)
    row = ROWS + 4 * tl.load(tile)
    start = tl.load(tile + 1) + block % blocks_per_tile * BLOCK
    return program % num_heads, tl.load(row).to(tl.int64), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), start


@triton.jit
def _pointers(TENSOR, first, start, head, token_stride, head_stride, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Pointers `(BLOCK, BLOCK_DIM)` to the tokens of a row from `start` on; int64, for a batch may exceed 2³¹."""
    corner = TENSOR + (first + start) * token_stride + head * head_stride
    return corner + tl.arange(0, BLOCK)[:, None] * token_stride + tl.arange(0, BLOCK_DIM)[None, :]


@triton.jit
def _there(start, limit, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Mask `(BLOCK, BLOCK_DIM or 1)`: tokens before `limit`, channels that the head has."""
    mask = (start + tl.arange(0, BLOCK) < limit)[:, None]
    if HEAD_DIM != BLOCK_DIM:
        mask = mask & (tl.arange(0, BLOCK_DIM) < HEAD_DIM)[None, :]
    return mask


@triton.jit
def _load(
    TENSOR, first, start, limit, head, token_stride, head_stride,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Tokens `[start, start + BLOCK)` of a row and head: `(BLOCK, BLOCK_DIM)`, zeros from `limit` on."""
    pointers = _pointers(TENSOR, first, start, head, token_stride, head_stride, BLOCK, BLOCK_DIM)
    return tl.load(pointers, mask=_there(start, limit, HEAD_DIM, BLOCK, BLOCK_DIM), other=0.0)


@triton.jit
def _store(
    TENSOR, values, first, start, length, head, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Write a block into a contiguous tensor `(num_tokens, num_heads, HEAD_DIM)`."""
    pointers = _pointers(TENSOR, first, start, head, num_heads * HEAD_DIM, HEAD_DIM, BLOCK, BLOCK_DIM)
    mask = _there(start, length, HEAD_DIM, BLOCK, BLOCK_DIM)
    tl.store(pointers, values.to(TENSOR.dtype.element_ty), mask=mask)


@triton.jit
def _sees(i, j, history, context, GROUP: tl.constexpr):
    """Mask of queries i and keys j of a row, whose shapes broadcast."""
    before = j <= i
    same_group = (i - history) // GROUP == (j - history) // GROUP
    return tl.where(j < history, before | (i < context), before & same_group)


@triton.jit
def _bias_place(token, history, GROUP: tl.constexpr, CAUSAL: tl.constexpr):
    """Where the position bias sees a token: each group of targets stands directly behind the history."""
    if CAUSAL:
        return tl.where(token < history, token, history + (token - history) % GROUP)
    else:
        return token


@triton.jit
def _time_bucket(asked, known, num_buckets):
    """Buckets of the times between queries and keys, as `hstu.model.attention.time_buckets` has them."""
    apart = tl.maximum(tl.abs(asked - known), 1).to(tl.float32)
    return tl.minimum((tl.log(apart) / _LOG_TIME_STEP).to(tl.int32), num_buckets - 1)


@triton.jit
def _sigmoid(scores, FAST: tl.constexpr):
    """σ(s); FAST takes one instruction of the special function unit, exp and a division take two.

    Its error, 2⁻¹² at most, is below what inputs of 16 bits make of the scores.
    """
    if FAST:
        half = 0.5 * scores
        tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=tl.float32, is_pure=True, pack=1
        )
        return 0.5 + 0.5 * tanh
    else:
        return tl.sigmoid(scores)


@triton.jit
def _key_ranges(
    masked: tl.constexpr, start, length, history, context,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Two ranges of keys that a block of queries visits: begin, end, begin, end.

    Without a mask those that all of its queries see: the history before the block. With it the rest of the history
    that some of them see, and the targets that some of them see, which are those of their own groups.
    """
    if not CAUSAL:
        return 0, length, 0, 0
    seen_by_all = tl.minimum(start // BLOCK_N * BLOCK_N, history)
    if not masked:
        return 0, seen_by_all, 0, 0
    end = tl.minimum(start + BLOCK_M, length)
    seen_by_some = tl.minimum(tl.where(start < context, history, end), history)
    first_group = history + tl.maximum(start - history, 0) // GROUP * GROUP
    return seen_by_all, tl.maximum(seen_by_some, seen_by_all), first_group, tl.maximum(end, first_group)


@triton.jit
def _query_ranges(
    masked: tl.constexpr, start, length, history, context,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Two ranges of queries that visit a block of keys: begin, end, begin, end.

    Without a mask those that see all of it: what follows a block of the history. With it the contextual queries before
    the block, and from its start on those that see a part of it.
    """
    if not CAUSAL:
        return 0, length, 0, 0
    of_history = start + BLOCK_N <= history
    end = tl.minimum(start + BLOCK_N, length)
    if not masked:
        return tl.where(of_history, end, length), length, 0, 0
    contextual = tl.where(start < history, tl.minimum(context, start), 0)
    last_group = history + (tl.maximum(end - 1 - history, 0) // GROUP + 1) * GROUP
    seeing = tl.where(start < history, length, tl.minimum(last_group, length))
    return 0, contextual, start, tl.where(of_history, end, seeing)


@triton.jit
def _block_of(step, begin, end, begin2, end2, BLOCK: tl.constexpr):
    """Where the block of a step starts, and its limit: blocks of the first range, then those of the other."""
    num_first = tl.cdiv(end - begin, BLOCK)
    of_first = step < num_first
    start = tl.where(of_first, begin + step * BLOCK, begin2 + (step - num_first) * BLOCK)
    return start, tl.where(of_first, end, end2)


@triton.jit
def _add_diagonals(
    GRADIENT, grad_scores, place, start, zero, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CONSECUTIVE: tl.constexpr,
):  # fmt: skip
    """Add the gradients of scores `(BLOCK_M, BLOCK_N)` to that of the bias by distance `place − key`.

    Every row is rotated so that a column holds distances that are equal modulo BLOCK_N, and gives one atomic addition
    for each of them. CONSECUTIVE: places follow one another, from a multiple of BLOCK_N away from the first key.
    """
    column = tl.arange(0, BLOCK_N)
    ahead = place[:, None] - start - column[None, :]
    rotation = ahead & (BLOCK_N - 1)  # the key that comes to this column; BLOCK_N is a power of two
    rotated = tl.gather(grad_scores, rotation, 1)
    distance = ahead - rotation + column[None, :]
    lowest = tl.min(place) - start - (BLOCK_N - 1)
    if CONSECUTIVE:
        for step in tl.static_range(BLOCK_M // BLOCK_N + 1):
            _add_columns(GRADIENT, rotated, distance, _floor(lowest, BLOCK_N) + step * BLOCK_N, zero, width, BLOCK_N)
    else:
        for first in range(_floor(lowest, BLOCK_N), tl.max(place) - start + 1, BLOCK_N):
            _add_columns(GRADIENT, rotated, distance, first, zero, width, BLOCK_N)


@triton.jit
def _floor(number, MULTIPLE: tl.constexpr):
    """The largest multiple, of a power of two, that is not above a number of either sign."""
    return number - (number & (MULTIPLE - 1))


@triton.jit
def _add_columns(GRADIENT, rotated, distance, first, zero, width, BLOCK_N: tl.constexpr):
    """Add what has distances `[first, first + BLOCK_N)`, each in a column of its own, to the gradient of the bias."""
    wanted = first + tl.arange(0, BLOCK_N)
    sums = tl.sum(tl.where(distance == wanted[None, :], rotated, 0.0), 0)
    inside = (wanted >= -zero) & (wanted < width - zero)
    tl.atomic_add(GRADIENT + wanted, sums, mask=inside & (sums != 0.0), sem="relaxed")


@triton.jit
def _add_buckets(GRADIENT, grad_scores, bucket):
    """Add the gradients of scores to that of the bias by time.

    Times of a tile mostly lie in one or two buckets, so every bucket's sum over the tile is one atomic addition.
    """
    for b in range(tl.min(bucket), tl.max(bucket) + 1):
        tl.atomic_add(GRADIENT + b, tl.sum(tl.where(bucket == b, grad_scores, 0.0)), sem="relaxed")


@triton.jit
def _biases(scores, seen, i_place, j_place, i_time, j_time, POSITION, TIME, num_buckets):
    """Scores with their biases, and the buckets of the times; places and times broadcast to the shape of the scores."""
    bucket = 0
    if POSITION is not None:
        scores += tl.load(POSITION + (i_place - j_place), mask=seen)
    if TIME is not None:
        bucket = _time_bucket(i_time, j_time, num_buckets)
        scores += tl.load(TIME + bucket)
    return scores, bucket


@triton.jit
def _times(TIMES, first, tokens):
    """When tokens of a row happened; nothing where there is no bias by time."""
    return tokens if TIMES is None else tl.load(TIMES + first + tokens)


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_UNALIGNED)
def forward(
    Q, K, V, POSITION, TIME, TIMES, OUT, ROWS, TILES,
    num_heads, token_stride, head_stride, before, after, zero, width, num_buckets,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The output of a block of queries. `before · after` is 1/N: what is multiplied before the sum, and after it."""
    head, first, length, history, context, start = _program_tile(ROWS, TILES, num_heads, BLOCK_M)
    if start >= length:
        return
    if POSITION is not None:
        POSITION += head * width + zero
    if TIME is not None:
        TIME += head * num_buckets
    q = _load(Q, first, start, length, head, token_stride, head_stride, HEAD_DIM, BLOCK_M, BLOCK_DIM)
    i = tl.minimum(start + tl.arange(0, BLOCK_M), length - 1)
    i_place = _bias_place(i, history, GROUP, CAUSAL)
    i_time = _times(TIMES, first, i)
    sums = tl.zeros((BLOCK_M, BLOCK_DIM), tl.float32)
    for masked in tl.static_range(2 if CAUSAL else 1):
        begin, end, begin2, end2 = _key_ranges(masked, start, length, history, context, GROUP, BLOCK_M, BLOCK_N, CAUSAL)
        for step in range(0, tl.cdiv(end - begin, BLOCK_N) + tl.cdiv(end2 - begin2, BLOCK_N)):
            n, limit = _block_of(step, begin, end, begin2, end2, BLOCK_N)
            k = _load(K, first, n, limit, head, token_stride, head_stride, HEAD_DIM, BLOCK_N, BLOCK_DIM)
            v = _load(V, first, n, limit, head, token_stride, head_stride, HEAD_DIM, BLOCK_N, BLOCK_DIM)
            j = tl.minimum(n + tl.arange(0, BLOCK_N), limit - 1)
            seen = _sees(i[:, None], j[None, :], history, context, GROUP) if masked else None
            j_place = _bias_place(j, history, GROUP, CAUSAL)
            j_time = _times(TIMES, first, j)
            scores, _ = _biases(
                tl.dot(q, tl.trans(k), input_precision=PRECISION), seen, i_place[:, None], j_place[None, :],
                i_time[:, None], j_time[None, :], POSITION, TIME, num_buckets,
            )  # fmt: skip
            weights = scores * _sigmoid(scores, FAST) * before
            if masked:
                weights = tl.where(seen, weights, 0.0)
            sums = tl.dot(weights.to(v.dtype), v, sums, input_precision=PRECISION)
    _store(OUT, sums * after, first, start, length, head, num_heads, HEAD_DIM, BLOCK_M, BLOCK_DIM)


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_UNALIGNED)
def backward_query(
    Q, K, V, POSITION, TIME, TIMES, GRAD_OUT, GRAD_Q, GRAD_POSITION, GRAD_TIME, ROWS, TILES,
    num_heads, token_stride, head_stride, before, after, zero, width, num_buckets,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries, and what the block adds to those of the biases. `before · after` is 1/N."""
    head, first, length, history, context, start = _program_tile(ROWS, TILES, num_heads, BLOCK_M)
    if start >= length:
        return
    if POSITION is not None:
        POSITION += head * width + zero
        GRAD_POSITION += head * width + zero
    if TIME is not None:
        TIME += head * num_buckets
        GRAD_TIME += head * num_buckets
    q = _load(Q, first, start, length, head, token_stride, head_stride, HEAD_DIM, BLOCK_M, BLOCK_DIM)
    grad_out = _load(GRAD_OUT, first, start, length, head, num_heads * HEAD_DIM, HEAD_DIM, HEAD_DIM, BLOCK_M, BLOCK_DIM)
    i = tl.minimum(start + tl.arange(0, BLOCK_M), length - 1)
    i_place = _bias_place(i, history, GROUP, CAUSAL)
    i_time = _times(TIMES, first, i)
    sums = tl.zeros((BLOCK_M, BLOCK_DIM), tl.float32)
    for masked in tl.static_range(2 if CAUSAL else 1):
        begin, end, begin2, end2 = _key_ranges(masked, start, length, history, context, GROUP, BLOCK_M, BLOCK_N, CAUSAL)
        if CAUSAL and POSITION is not None:
            # In blocks without targets places follow one another; blocks with them are left to the masked loop.
            has_targets = (start + BLOCK_M > history) & (history < length)
            if masked:
                begin = tl.where(has_targets, 0, begin)
            else:
                end = tl.where(has_targets, 0, end)
        for step in range(0, tl.cdiv(end - begin, BLOCK_N) + tl.cdiv(end2 - begin2, BLOCK_N)):
            n, limit = _block_of(step, begin, end, begin2, end2, BLOCK_N)
            k = _load(K, first, n, limit, head, token_stride, head_stride, HEAD_DIM, BLOCK_N, BLOCK_DIM)
            v = _load(V, first, n, limit, head, token_stride, head_stride, HEAD_DIM, BLOCK_N, BLOCK_DIM)
            j = tl.minimum(n + tl.arange(0, BLOCK_N), limit - 1)
            seen = _sees(i[:, None], j[None, :], history, context, GROUP) if masked else None
            j_place = _bias_place(j, history, GROUP, CAUSAL)
            j_time = _times(TIMES, first, j)
            scores, bucket = _biases(
                tl.dot(q, tl.trans(k), input_precision=PRECISION), seen, i_place[:, None], j_place[None, :],
                i_time[:, None], j_time[None, :], POSITION, TIME, num_buckets,
            )  # fmt: skip
            sigmoid = _sigmoid(scores, FAST)
            # SiLU'(s) = σ(s) · (1 + s · (1 − σ(s)))
            slope = sigmoid * (1.0 + scores * (1.0 - sigmoid))
            grad_scores = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION) * (before * after) * slope
            if masked:
                grad_scores = tl.where(seen, grad_scores, 0.0)
            sums = tl.dot(grad_scores.to(k.dtype), k, sums, input_precision=PRECISION)
            if POSITION is not None:
                # Distances within a group are those of the tokens, wherever the group stands.
                place = start + tl.arange(0, BLOCK_M)
                if masked:
                    place = tl.where(n < history, i_place, place)
                _add_diagonals(GRAD_POSITION, grad_scores, place, n, zero, width, BLOCK_M, BLOCK_N, not masked)
            if TIME is not None:
                _add_buckets(GRAD_TIME, grad_scores, bucket)
    _store(GRAD_Q, sums, first, start, length, head, num_heads, HEAD_DIM, BLOCK_M, BLOCK_DIM)


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_UNALIGNED)
def backward_key(
    Q, K, V, POSITION, TIME, TIMES, GRAD_OUT, GRAD_K, GRAD_V, ROWS, TILES,
    num_heads, token_stride, head_stride, before, after, zero, width, num_buckets,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and its values.

    Scores are transposed, `(BLOCK_N, BLOCK_M)`: products then have them on the left, in registers.
    """
    head, first, length, history, context, start = _program_tile(ROWS, TILES, num_heads, BLOCK_N)
    if start >= length:
        return
    if POSITION is not None:
        POSITION += head * width + zero
    if TIME is not None:
        TIME += head * num_buckets
    k = _load(K, first, start, length, head, token_stride, head_stride, HEAD_DIM, BLOCK_N, BLOCK_DIM)
    v = _load(V, first, start, length, head, token_stride, head_stride, HEAD_DIM, BLOCK_N, BLOCK_DIM)
    j = tl.minimum(start + tl.arange(0, BLOCK_N), length - 1)
    j_place = _bias_place(j, history, GROUP, CAUSAL)
    j_time = _times(TIMES, first, j)
    key_sums = tl.zeros((BLOCK_N, BLOCK_DIM), tl.float32)
    value_sums = tl.zeros((BLOCK_N, BLOCK_DIM), tl.float32)
    for masked in tl.static_range(2 if CAUSAL else 1):
        begin, end, begin2, end2 = _query_ranges(masked, start, length, history, context, GROUP, BLOCK_N, CAUSAL)
        for step in range(0, tl.cdiv(end - begin, BLOCK_M) + tl.cdiv(end2 - begin2, BLOCK_M)):
            m, limit = _block_of(step, begin, end, begin2, end2, BLOCK_M)
            q = _load(Q, first, m, limit, head, token_stride, head_stride, HEAD_DIM, BLOCK_M, BLOCK_DIM)
            grad = _load(GRAD_OUT, first, m, limit, head, num_heads * HEAD_DIM, HEAD_DIM, HEAD_DIM, BLOCK_M, BLOCK_DIM)
            i = tl.minimum(m + tl.arange(0, BLOCK_M), limit - 1)
            seen = _sees(i[None, :], j[:, None], history, context, GROUP) if masked else None
            i_place = _bias_place(i, history, GROUP, CAUSAL)
            i_time = _times(TIMES, first, i)
            scores, _ = _biases(
                tl.dot(k, tl.trans(q), input_precision=PRECISION), seen, i_place[None, :], j_place[:, None],
                i_time[None, :], j_time[:, None], POSITION, TIME, num_buckets,
            )  # fmt: skip
            sigmoid = _sigmoid(scores, FAST)
            weights = scores * sigmoid * before
            slope = sigmoid * (1.0 + scores * (1.0 - sigmoid))
            grad_scores = tl.dot(v, tl.trans(grad), input_precision=PRECISION) * (before * after) * slope
            if masked:
                weights = tl.where(seen, weights, 0.0)
                grad_scores = tl.where(seen, grad_scores, 0.0)
            value_sums = tl.dot(weights.to(grad.dtype), grad, value_sums, input_precision=PRECISION)
            key_sums = tl.dot(grad_scores.to(q.dtype), q, key_sums, input_precision=PRECISION)
    _store(GRAD_K, key_sums, first, start, length, head, num_heads, HEAD_DIM, BLOCK_N, BLOCK_DIM)
    _store(GRAD_V, value_sums * after, first, start, length, head, num_heads, HEAD_DIM, BLOCK_N, BLOCK_DIM)
