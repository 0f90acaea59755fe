"""Paged attention in Triton: encodings are rows of numbers, and one launch takes any mixture of them.

A program computes one work item. An item has some queries of a sequence, all query heads of one key head, and a range
of keys. The program goes through the bands of the sequence's row and keeps one online softmax over all (FlashAttention,
arXiv:2205.14135). Items that split the keys of a query store their parts, and ``merge`` joins them (Flash-Decoding).
Compiled only where Triton is installed; ``patches.attention.paged.triton.launch`` imports it there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

INTERPRETED = triton.knobs.runtime.interpret
"""True under TRITON_INTERPRET=1: tensors are on the CPU, ``libdevice`` is missing, and products of bfloat16 are wrong
(triton issue 11584)."""


@triton.jit
def _placed(position, maps, pairs, columns, WIDTH: tl.constexpr):
    """float32 [n, columns]: int32 positions [n] under one map of ``MapRow``."""
    period, cap, divisor = tl.load(maps).to(tl.int32), tl.load(maps + 1), tl.load(maps + 2)
    groups = tl.load(pairs + columns).to(tl.int32)
    shifts = tl.load(pairs + WIDTH + columns)
    grouped = ((position % period)[:, None] // groups[None, :]).to(tl.float32)
    return tl.div_rn(tl.minimum(grouped + shifts[None, :], cap), divisor)


@triton.jit
def _turned(first, second, by, high, low, FAST: tl.constexpr):
    """Both halves [n, pairs] of rotary pairs, turned by positions [n, 1 or pairs].

    Frequencies are turns per position in two parts. Whole turns go before the angle is rounded, so far positions keep
    their angles.
    """
    # The compiler joins products with sums as it likes, so one product may be rounded here and exact there. Only
    # ``whole`` may depend on it: any whole number near the turns will do.
    whole = tl.floor(by * high[None, :] + 0.5)
    angle = (tl.fma(by, high[None, :], -whole) + by * low[None, :]) * 6.283185307179586
    if FAST:
        cos, sin = libdevice.fast_cosf(angle), libdevice.fast_sinf(angle)
    else:
        cos, sin = tl.cos(angle), tl.sin(angle)
    x, y = first.to(tl.float32), second.to(tl.float32)
    return (x * cos - y * sin).to(first.dtype), (y * cos + x * sin).to(second.dtype)


@triton.jit
def _rounded(x):
    """float32 rounded to bfloat16, to even. In bits, because Triton's interpreter truncates."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 32767 + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _bias(kind, a, b, table, length, q_idx, kv_idx, LINEAR: tl.constexpr):
    """float32 [queries, keys] of ``BiasRow``, in units of ln 2.

    ``a`` and ``b`` are [queries], ``table`` points to their heads' parts. Positions are exact in float32, and a card
    subtracts those faster. Keys behind a query have any number: no band covers them.
    """
    a, b = a[:, None], b[:, None]
    d = q_idx.to(tl.float32)[:, None] - kv_idx.to(tl.float32)[None, :]
    bias = (-1.4426950408889634 * a) * d
    if not LINEAR:
        if kind == 2:
            bias = 1.4426950408889634 * b * _rounded(a * _rounded(kv_idx[None, :].to(tl.float32)))
        elif kind == 3:
            bias = -1.4426950408889634 * a * tl.log(1.0 + b * tl.maximum(d, 0.0))
        elif kind == 4:
            power = tl.exp2(b * tl.log2(tl.maximum(d, 1.0)))
            bias = -1.4426950408889634 * a * tl.where(d > 0.0, power, 0.0)
        elif kind == 5:
            distance = tl.minimum(tl.maximum(q_idx[:, None] - kv_idx[None, :], 0), length - 1)
            bias = 1.4426950408889634 * tl.load(table[:, None] + distance)
    return bias


@triton.jit
def _with_sink(acc, top, total, sink):
    """An online softmax that also attends to nothing, with the logit ``sink``."""
    sink *= 1.4426950408889634
    new = tl.maximum(top, sink)
    shrink = tl.exp2(top - new)
    return acc * shrink[:, None], new, total * shrink + tl.exp2(sink - new)


@triton.jit
def _block(
    acc, top, total, query, start, k_high, mask, cache, columns, turn, bias, softcap,
    NUM_PAIRS: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, LINEAR: tl.constexpr, TURNS_KEYS: tl.constexpr,
    FAST: tl.constexpr, UPCAST: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The online softmax (``acc``, ``top``, ``total``) behind the keys from ``start`` on, of one band.

    Scores are in units of ln 2, because the card has an exponential of base 2.
    """
    q_first, q_second, q_plain, factor, q_idx = query
    chunk, low, high, own_chunk, own_high, whole_start, whole_stop = mask
    keys, k_page, k_token, values, v_page, v_token, pages, first_pages, evicted = cache
    one, two, plain, wide, in_pair, in_plain, in_value = columns
    kv_idx = start + tl.arange(0, BLOCK_N)
    inside = kv_idx < k_high
    page = kv_idx // PAGE
    entry = tl.maximum(page - tl.where(page >= first_pages, evicted, 0), 0)
    physical = tl.load(pages + entry, mask=inside, other=0).to(tl.int64)
    at_key = keys + (physical * k_page + (kv_idx % PAGE) * k_token)[:, None]
    scores = tl.zeros([q_plain.shape[0], BLOCK_N], dtype=tl.float32)
    if NUM_PAIRS > 0:
        k_one = tl.load(at_key + one[None, :], mask=inside[:, None] & in_pair[None, :], other=0.0)
        k_two = tl.load(at_key + two[None, :], mask=inside[:, None] & in_pair[None, :], other=0.0)
        if UPCAST:
            k_one, k_two = k_one.to(tl.float32), k_two.to(tl.float32)
        if TURNS_KEYS:
            key_map, key_pairs, base_map, base_pairs, place, turn_high, turn_low = turn
            by = _placed(kv_idx, key_map, key_pairs, place, WIDTH)
            by -= _placed(kv_idx, base_map, base_pairs, place, WIDTH)
            k_one, k_two = _turned(k_one, k_two, by, turn_high, turn_low, FAST)
        scores = tl.dot(q_first, tl.trans(k_one), scores, input_precision="ieee")
        scores = tl.dot(q_second, tl.trans(k_two), scores, input_precision="ieee")
    if HEAD_DIM > 2 * NUM_PAIRS:
        k_plain = tl.load(at_key + plain[None, :], mask=inside[:, None] & in_plain[None, :], other=0.0)
        if UPCAST:
            k_plain = k_plain.to(tl.float32)
        scores = tl.dot(q_plain, tl.trans(k_plain), scores, input_precision="ieee")
    scores = scores * factor[:, None]
    if SOFTCAP:
        small = tl.exp(-2.0 * tl.abs(scores) / softcap)  # tanh without overflow
        limited = softcap * (1.0 - small) / (1.0 + small)
        scores = 1.4426950408889634 * tl.where(scores < 0, -limited, limited)
    if BIAS:
        kind, a, b, table, distances = bias
        scores += _bias(kind, a, b, table, distances, q_idx, kv_idx, LINEAR)
    if (start < whole_start) | (start + BLOCK_N > whole_stop):
        apart = q_idx[:, None] // chunk - (kv_idx // chunk)[None, :]
        own = q_idx[:, None] // own_chunk - (kv_idx // own_chunk)[None, :]
        covered = (apart >= low) & (apart < high) & (own < own_high)
        covered = covered & (kv_idx[None, :] <= q_idx[:, None]) & inside[None, :]
        scores = tl.where(covered, scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    finite = tl.where(new == float("-inf"), 0.0, new)
    weights, shrink = tl.exp2(scores - finite[:, None]), tl.exp2(top - finite)
    at_value = values + (physical * v_page + (kv_idx % PAGE) * v_token)[:, None]
    value = tl.load(at_value + wide[None, :], mask=inside[:, None] & in_value[None, :], other=0.0)
    if UPCAST:
        value = value.to(tl.float32)
    acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    return acc, new, total * shrink + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["table_width"])  # a width of another kind would compile it anew in a served step
def attention(
    Q, K, V, OUT, PART, PART_TOP, PART_TOTAL, FACTOR, SINKS,
    ITEMS, CODES, SEQUENCES, BLOCK_TABLE, SLOTS, BANDS, MAPS, PAIRS, FREQUENCIES, BIASES, DISTANCES,
    own_chunk, own_high, softcap, table_width,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, out_token, out_head,
    NUM_PAIRS: tl.constexpr, WIDTH: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEAD_DIM: tl.constexpr, REST_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_WIDTH: tl.constexpr, MOST_BANDS: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, BIAS: tl.constexpr, LINEAR: tl.constexpr,
    TURNS: tl.constexpr, BY_PAIR: tl.constexpr, CODE: tl.constexpr, TURNS_KEYS: tl.constexpr,
    SPLIT: tl.constexpr, FAST: tl.constexpr, UPCAST: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (work item, key head), for items with the code ``CODE``."""
    item, kv_head = tl.program_id(0), tl.program_id(1)
    if tl.load(CODES + item) != CODE:
        return  # another launch computes it, or it is padding of a captured graph
    sequence = tl.load(ITEMS + item * 4)
    first_query = tl.load(ITEMS + item * 4 + 1)
    split_low, split_high = tl.load(ITEMS + item * 4 + 2), tl.load(ITEMS + item * 4 + 3)
    about = SEQUENCES + sequence * 6
    slot, q_start, edge = tl.load(about), tl.load(about + 1), tl.load(about + 2)
    queries, first_pages, evicted = tl.load(about + 3), tl.load(about + 4), tl.load(about + 5)
    q_low = q_start + first_query
    q_high = q_start + tl.minimum(first_query + BLOCK_M // GROUP_WIDTH, queries) - 1
    own_first = tl.maximum(q_low // own_chunk - own_high + 1, 0) * own_chunk
    split_low = tl.maximum(split_low, own_first)
    numbers = BANDS + slot * MOST_BANDS * 6

    # A row of the block is one query under one of the heads that share the key head.
    rows = tl.arange(0, BLOCK_M)
    column, member = first_query + rows // GROUP_WIDTH, rows % GROUP_WIDTH
    live = (column < queries) & (member < GROUP)
    head, token, q_idx = kv_head * GROUP + member, (edge + column).to(tl.int64), q_start + column

    # Columns of a head: the two halves of rotary pairs, and the rest.
    pair = tl.arange(0, WIDTH)
    in_pair = pair < NUM_PAIRS
    one = OFFSET + (2 * pair if INTERLEAVED else pair)
    two = one + (1 if INTERLEAVED else NUM_PAIRS)
    place = tl.arange(0, WIDTH if BY_PAIR else 1)
    plain = tl.arange(0, REST_WIDTH)
    in_plain = plain < HEAD_DIM - 2 * NUM_PAIRS
    plain = tl.where(plain < OFFSET, plain, plain + 2 * NUM_PAIRS)
    wide = tl.arange(0, VALUE_WIDTH)
    in_value = wide < VALUE_DIM

    at = Q + token[:, None] * q_token + head[:, None] * q_head
    q_one = tl.load(at + one[None, :], mask=live[:, None] & in_pair[None, :], other=0.0)
    q_two = tl.load(at + two[None, :], mask=live[:, None] & in_pair[None, :], other=0.0)
    q_plain = tl.load(at + plain[None, :], mask=live[:, None] & in_plain[None, :], other=0.0)
    if UPCAST:
        q_one, q_two, q_plain = q_one.to(tl.float32), q_two.to(tl.float32), q_plain.to(tl.float32)
    factor = tl.load(FACTOR + token, mask=live, other=0.0)
    if not SOFTCAP:
        factor *= 1.4426950408889634
    turn_high = tl.load(FREQUENCIES + slot * 2 * WIDTH + pair)
    turn_low = tl.load(FREQUENCIES + (slot * 2 + 1) * WIDTH + pair)
    if BIAS:
        kind, distances = tl.load(SLOTS + slot * 5 + 1), tl.load(SLOTS + slot * 5 + 3)
        table = DISTANCES + tl.load(SLOTS + slot * 5 + 2) + tl.where(live, head, 0) * distances
        a = tl.load(BIASES + slot * 2 * KV_HEADS * GROUP + head, mask=live, other=0.0)
        b = tl.load(BIASES + (slot * 2 + 1) * KV_HEADS * GROUP + head, mask=live, other=0.0)
        bias = kind, a, b, table, distances
    else:
        bias = (0,)

    acc = tl.zeros([BLOCK_M, VALUE_WIDTH], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    base_map = MAPS + slot * (1 + 2 * MOST_BANDS) * 3
    base_pairs = PAIRS + slot * (1 + 2 * MOST_BANDS) * 2 * WIDTH
    wide_head = kv_head.to(tl.int64)  # heads of an ordinary cache are far apart
    cache = (
        K + wide_head * k_head, k_page, k_token, V + wide_head * v_head, v_page, v_token,
        BLOCK_TABLE + sequence * table_width, first_pages, evicted,
    )  # fmt: skip
    columns = one, two, plain, wide, in_pair, in_plain, in_value

    for band in range(tl.load(SLOTS + slot * 5)):
        about = numbers + band * 6
        chunk, low, high, first = tl.load(about), tl.load(about + 1), tl.load(about + 2), tl.load(about + 3)
        turns_queries, turns_keys = tl.load(about + 4), tl.load(about + 5)
        # Keys that some query of the block reaches.
        k_low = tl.maximum(tl.maximum(q_low // chunk - high + 1, 0) * chunk, split_low)
        k_high = tl.minimum(tl.minimum(q_high + 1, tl.maximum(q_high // chunk - low + 1, 0) * chunk), first)
        k_high = tl.minimum(k_high, split_high)
        # All queries of the block reach these keys. A block of such keys needs no mask.
        whole_start = tl.maximum(q_high // chunk - high + 1, 0) * chunk
        whole_start = tl.maximum(whole_start, tl.maximum(q_high // own_chunk - own_high + 1, 0) * own_chunk)
        whole_stop = tl.minimum(tl.minimum(k_high, q_low + 1), tl.maximum(q_low // chunk - low + 1, 0) * chunk)
        mask = chunk, low, high, own_chunk, own_high, whole_start, whole_stop
        query_map, query_pairs = base_map + (1 + 2 * band) * 3, base_pairs + (1 + 2 * band) * 2 * WIDTH
        key_map, key_pairs = query_map + 3, query_pairs + 2 * WIDTH
        q_first, q_second = q_one, q_two
        if TURNS:
            if (turns_queries > 0) & (k_low < k_high):
                by = _placed(q_idx, query_map, query_pairs, place, WIDTH)
                by -= _placed(q_idx, base_map, base_pairs, place, WIDTH)
                q_first, q_second = _turned(q_one, q_two, by, turn_high, turn_low, FAST)
        query = q_first, q_second, q_plain, factor, q_idx
        turn = key_map, key_pairs, base_map, base_pairs, place, turn_high, turn_low
        # Keys that turn go through registers. The other loop feeds the matrix unit from shared memory.
        if TURNS_KEYS:
            if turns_keys > 0:
                for start in range(k_low, k_high, BLOCK_N):
                    acc, top, total = _block(
                        acc, top, total, query, start, k_high, mask, cache, columns, turn, bias, softcap,
                        NUM_PAIRS, WIDTH, HEAD_DIM, SOFTCAP, BIAS, LINEAR, True, FAST, UPCAST, PAGE, BLOCK_N,
                    )  # fmt: skip
                k_high = k_low
        for start in range(k_low, k_high, BLOCK_N):
            acc, top, total = _block(
                acc, top, total, query, start, k_high, mask, cache, columns, turn, bias, softcap,
                NUM_PAIRS, WIDTH, HEAD_DIM, SOFTCAP, BIAS, LINEAR, False, FAST, UPCAST, PAGE, BLOCK_N,
            )  # fmt: skip

    if SPLIT:
        at_row = (item * KV_HEADS + kv_head) * GROUP + member
        tl.store(PART_TOP + at_row, top, mask=live)
        tl.store(PART_TOTAL + at_row, total, mask=live)
        at = PART + at_row.to(tl.int64)[:, None] * VALUE_DIM + wide[None, :]  # many long requests have 2^31 numbers
        tl.store(at, acc, mask=live[:, None] & in_value[None, :])
    else:
        if HAS_SINKS:
            sink = tl.load(SINKS + head, mask=live, other=0.0)
            acc, top, total = _with_sink(acc, top, total, sink.to(tl.float32))
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        at = OUT + token[:, None] * out_token + head[:, None] * out_head + wide[None, :]
        tl.store(at, out.to(OUT.dtype.element_ty), mask=live[:, None] & in_value[None, :])


@triton.jit
def merge(
    OUT, PART, PART_TOP, PART_TOTAL, SINKS, ITEMS, EDGES, SEQUENCES, out_token, out_head,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (sequence of one query, query head): joins the parts of its items, ``PARTS`` of them at once."""
    index, head = tl.program_id(0), tl.program_id(1)
    item, stop = tl.load(EDGES + index), tl.load(EDGES + index + 1)
    wide = tl.arange(0, VALUE_WIDTH)
    in_value = wide < VALUE_DIM
    if item == stop:
        return  # padding of a captured graph
    token = tl.load(SEQUENCES + tl.load(ITEMS + item * 4) * 6 + 2).to(tl.int64)
    acc = tl.zeros([1, VALUE_WIDTH], dtype=tl.float32)
    top = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    for first in range(item, stop, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = part < stop
        at_row = (part * KV_HEADS + head // GROUP) * GROUP + head % GROUP
        part_top = tl.load(PART_TOP + at_row, mask=inside, other=float("-inf"))
        new = tl.maximum(top, tl.max(part_top, 0))
        finite = tl.where(new == float("-inf"), 0.0, new)
        shrink, weight = tl.exp2(top - finite), tl.exp2(part_top - finite)
        at = PART + at_row.to(tl.int64)[:, None] * VALUE_DIM + wide[None, :]
        added = tl.load(at, mask=inside[:, None] & in_value[None, :], other=0.0)
        acc = acc * shrink[:, None] + tl.sum(added * weight[:, None], 0)[None, :]
        total = total * shrink + tl.sum(tl.load(PART_TOTAL + at_row, mask=inside, other=0.0) * weight, 0)
        top = new
    if HAS_SINKS:
        sink = tl.load(SINKS + head + tl.zeros([1], dtype=tl.int32))
        acc, top, total = _with_sink(acc, top, total, sink.to(tl.float32))
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    at = OUT + token * out_token + head * out_head + wide[None, :]
    tl.store(at, out.to(OUT.dtype.element_ty), mask=in_value[None, :])


@triton.jit
def write(
    KEY, VALUE, KEY_PAGES, VALUE_PAGES, PAGE, PLACE,
    key_token, key_head, value_token, value_head,
    k_page, k_token, k_head, v_page, v_token, v_head,
    HEAD_DIM: tl.constexpr, HEAD_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (token, key head): puts a new key and its value into the pages."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    page, place = tl.load(PAGE + token), tl.load(PLACE + token)
    column = tl.arange(0, HEAD_WIDTH)
    key = tl.load(KEY + token * key_token + head * key_head + column, mask=column < HEAD_DIM)
    tl.store(KEY_PAGES + page * k_page + place * k_token + head * k_head + column, key, mask=column < HEAD_DIM)
    column = tl.arange(0, VALUE_WIDTH)
    value = tl.load(VALUE + token * value_token + head * value_head + column, mask=column < VALUE_DIM)
    tl.store(VALUE_PAGES + page * v_page + place * v_token + head * v_head + column, value, mask=column < VALUE_DIM)
