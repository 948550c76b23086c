"""The Hopper attention kernels on the CPU, stage by stage: every number that they form between inputs and output.

For tests: small shapes, no speed. Sources: cuda_kernels/fwd_sm90.cuh (order of work), softmax.cuh (exponents, sinks).
What rows see is in visible.py; softcap, additive masks and what Q's mean adds are in logits.py.
Bit for bit: images, scales, int32 scores, reference exponents m, and everything that follows from given P and T.
Within a band: 2^x, which the hardware approximates to EX2_ULPS; a P whose band straddles a rounding boundary may be one
code off, and `p_low` and `p_high` say which. Softcap widens the band and gives m one as well: Logits.error. The tensor
core's sums follow accumulator.py. 1 / l, log2 l and a sink's weight are correctly rounded here and may be some units of
the last place off there.

Which tiles a row's warpgroup skips changes no number: a tile that a row does not see leaves m as it is, its factor is
2^0 = 1 and it adds zeros. (A NaN in V is the exception: it reaches the rows that walk its tile.)

Shapes: keys are padded to whole tiles, n = 128 * tiles; dim is the padded head dimension. Keys are counted among those
that exist for an item (visible.present).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_patch.reference.emulator import exponent
from sage_patch.reference.emulator import tile_image as ti
from sage_patch.reference.emulator.accumulator import FP16, product
from sage_patch.reference.emulator.float32 import e4m3_code, e4m3_value, exp2, exp2_band, fma, to_half
from sage_patch.reference.emulator.logits import HIDDEN, LOG2E, Logits, logits
from sage_patch.reference.emulator.prepare import (
    Prepared,
    Queries,
    corrections,
    of_rows,
    padded_dim,
    prepare,
    quantize_queries,
    query_means,
)
from sage_patch.reference.emulator.visible import pattern, present

FP8_OFFSET = 8.807  # log2(448): the largest P of a row becomes E4M3's largest number
FP16_OFFSET = 9.0
FP16_SLACK = 4.0  # FP16: m stays until a maximum outgrows it by this
NO_KEYS = -1e30  # m of a row that has seen no key
MAX_STEP = 16.0  # bound of one integer step in log2 units
MAX_STEP_INT4 = 4096.0
SINK_ROOM = 60.0  # log2: m moves up if a sink exceeds it by more


@dataclass
class Stages:
    """Everything between inputs and output. Entries of tiles that a row does not walk are zero (scores: HIDDEN)."""

    images: Prepared
    queries: Queries
    walked: Tensor  # bool [batch, heads or 1, q_len, tiles]: the row's warpgroup walks the tile, from the last on
    visible: Tensor  # bool [batch, heads or 1, q_len, n]: the row sees the key
    scores: Tensor  # int32 [batch, heads, q_len, n]
    steps: Tensor  # float32 [batch, heads, q_len, n]: log2 units of one integer
    logits: Logits | None  # where softcap, an additive mask, INT4 or Q's mean take the place of scores * steps
    by_bits: Tensor  # bool [batch, heads, q_len, tiles]: P of the tile is formed by exponent.py
    m: Tensor  # float32 [batch, heads, q_len, tiles]: reference exponent after each tile, P = 2^(x - m)
    p: Tensor  # uint8 E4M3 codes or float16 [batch, heads, q_len, n]
    p_low: Tensor  # the same from the lower end of the exponential's band
    p_high: Tensor
    t: Tensor  # float32 [.., q_len, tiles, dim + 1]; fp8: each tile's P V and its row sum; fp16: O and l after the tile
    out_float: Tensor  # float32 [batch, heads, q_len, head_dim], before its last rounding
    out: Tensor  # the same in the inputs' dtype
    lse: Tensor  # float32 [batch, heads, q_len]


def emulate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    recipe: str = "qk_int8_pv_fp8",
    scale: float,
    is_causal: bool = False,
    top_left: bool = False,
    kv_lens: Sequence[int] | None = None,
    smooth_k: bool = True,
    smooth_v: bool = True,
    smooth_q: bool | None = None,
    rotated: bool = False,
    exp: str = "exact",
    attn_mask: Tensor | None = None,
    key_padding: Tensor | None = None,
    kv_starts: Sequence[int] | None = None,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Stages:
    """query [batch, heads, q_len, head_dim], key and value [batch, kv_heads, kv_len, head_dim], float16 or bfloat16,
    head_dim <= 256 (INT4, smooth_q: 128); recipe: a name, with smooth_q, rotated and exp to change it; the other
    arguments as in Args. Sequences laid end to end: `sequences`."""
    query, key, value = query.cpu(), key.cpu(), value.cpu()
    batch, heads, q_len, d = query.shape
    kv_heads, kv_len = key.shape[1:3]
    dim, fp16, int4 = padded_dim(d), recipe.endswith("fp16"), recipe.startswith("qk_int4")
    smooth_q = int4 if smooth_q is None else smooth_q
    key, value, keys = present(key, value, kv_lens, kv_starts, key_padding)
    seen = pattern(
        q_len, kv_len, keys, is_causal=is_causal, top_left=top_left, kv_starts=kv_starts,
        left=left, right=right, attn_mask=attn_mask,
    )  # fmt: skip
    images = prepare(
        key, value, keys.tolist(), dim, fp16, smooth_v, seen.seen, smooth_k=smooth_k, int4=int4, rotated=rotated
    )
    k_mean = images.k_mean.view(batch, kv_heads, dim)
    q_mean = query_means(query, dim) if smooth_q else None
    queries = quantize_queries(query, k_mean, scale, q_mean=q_mean, int4=int4, rotated=rotated)
    correction = None if q_mean is None else of_rows(corrections(q_mean, key, keys, k_mean, scale), q_len)
    tiles = seen.walked.shape[-1]

    def per_head(x: Tensor) -> Tensor:  # [batch * kv_heads, ...] -> [batch, heads, ...]
        return x.view(batch, kv_heads, *x.shape[1:]).repeat_interleave(heads // kv_heads, dim=1)

    k = per_head(images.k).flatten(2, 3)
    scores = torch.matmul(queries.q.double(), k.double().transpose(-1, -2)).to(torch.int32)
    scores = torch.where(seen.visible, scores, HIDDEN)
    steps = steps_of(per_head(images.k_scale), queries.scale, MAX_STEP_INT4 if int4 else MAX_STEP)
    changed = logits(
        scores, steps, queries.dot, softcap, seen.bias, seen.biased, correction, every_tile=int4 or smooth_q
    )
    v = per_head(images.v)  # [batch, heads, tiles, 128, dim]

    m = reference_exponents(scores, steps, changed, fp16)
    factors = factors_of(m)
    exponents, low, high = exponents_of(scores, steps, changed, m)
    p, p_low, p_high = (
        probabilities(x, scores, fp16) for x in (exp2(exponents), exp2_band(low)[0], exp2_band(high)[1])
    )
    by_bits = torch.zeros(m.shape, dtype=torch.bool)
    if exp != "exact" and not fp16 and tiles:
        reach = exponent.reaches(queries.q, queries.scale)
        by_bits = seen.whole & exponent.near_tiles(scores, steps, m, reach, per_head(images.k_scale))
        by_bits = by_bits if changed is None else by_bits & ~changed.used
        p, p_low, p_high = (replace_by_bits(x, by_bits, scores, steps, m, exp) for x in (p, p_low, p_high))
    if fp16:
        unrounded = torch.where(scores == HIDDEN, 0.0, exp2(exponents))
        t = accumulate_fp16(p, unrounded, v, factors)
        total = t[..., 0, :] if tiles else torch.zeros(batch, heads, q_len, dim + 1)
    else:
        t = partial_sums_fp8(p, v)
        total = fold_fp8(t, factors)
    t = torch.where(seen.walked[..., None], t, 0.0)
    vectors = (per_head(images.v_scale), per_head(images.v_mean))
    out, lse = finish(total, m, *vectors, queries.dot, sinks, softcap)
    out = out[..., :d]
    return Stages(
        images, queries, seen.walked, seen.visible, scores, steps, changed, by_bits, m, p, p_low, p_high, t,
        out, to_half(out, query.dtype), lse,
    )  # fmt: skip


def sequences(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Sequence[int], cu_seqlens_k: Sequence[int]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Sequences laid end to end in tensors of batch 1, one by one: the kernel forms the same numbers for each as for a
    call on it alone."""
    parts = []
    for q0, q1, k0, k1 in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:], strict=False):
        parts.append((query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1]))
    return parts


def steps_of(k_scale: Tensor, q_scale: Tensor, most: float) -> Tensor:
    """k_scale [batch, heads, tiles, 4], q_scale [batch, heads, q_len] -> log2 units of one integer, at most `most`,
    [batch, heads, q_len, n]."""
    of_key = k_scale[..., ti.k_group(torch.arange(ti.TILE_TOKENS))].flatten(2)
    steps = of_key[:, :, None] * q_scale[..., None]
    return torch.where(steps > most, most, steps)  # a NaN stays


def reference_exponents(scores: Tensor, steps: Tensor, changed: Logits | None, fp16: bool) -> Tensor:
    """m after each tile, float32 [batch, heads, q_len, tiles]; scores, steps [batch, heads, q_len, n]: tile_maximum,
    softmax_fp8 and softmax_fp16. A thread takes its maximum over its own columns, all of one scale."""
    rows, tiles = scores.shape[:3], scores.shape[-1] // ti.TILE_TOKENS
    offset = torch.tensor(FP16_OFFSET if fp16 else FP8_OFFSET)
    m = torch.full((*rows, tiles), NO_KEYS)
    current = torch.full(rows, NO_KEYS)
    group = ti.k_group(torch.arange(ti.TILE_TOKENS))
    for tile in reversed(range(tiles)):
        part = slice(tile * ti.TILE_TOKENS, (tile + 1) * ti.TILE_TOKENS)
        s, step = scores[..., part], steps[..., part]
        top = torch.full(rows, NO_KEYS)
        for c in range(ti.SCALE_GROUPS):
            largest = s[..., group == c].amax(-1)
            f = fma(largest.float(), step[..., group == c][..., 0], -offset)
            top = torch.fmax(top, torch.where(largest == HIDDEN, NO_KEYS, f))  # fmaxf drops a NaN
        if changed is not None:
            x = changed.x[..., part]
            floats = torch.where(x.isnan(), -torch.inf, x).amax(-1) - offset
            top = torch.where(changed.used[..., tile], floats, top)
        if fp16:
            new = torch.where(top > current + FP16_SLACK, top, current)
        else:
            new = torch.fmax(top, current)
        m[..., tile] = current = new
    return m


def factors_of(m: Tensor) -> Tensor:
    """2^(m before - m after) of each tile: what the sums so far are multiplied by. [batch, heads, q_len, tiles]."""
    before = torch.cat([m[..., 1:], torch.full_like(m[..., :1], NO_KEYS)], dim=-1)
    return exp2(before - m)


def exponents_of(scores: Tensor, steps: Tensor, changed: Logits | None, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x - m [batch, heads, q_len, n], and the least and the greatest that the hardware may form."""
    reference = m.repeat_interleave(ti.TILE_TOKENS, -1)
    exponents = fma(scores.float(), steps, -reference)
    if changed is None:
        return exponents, exponents, exponents
    used = changed.used.repeat_interleave(ti.TILE_TOKENS, -1)
    middle, low, high = (
        torch.where(used, x - reference, exponents)
        for x in (changed.x, changed.x - changed.error, changed.x + changed.error)
    )
    return middle, low, high


def probabilities(p: Tensor, scores: Tensor, fp16: bool) -> Tensor:
    """float32 2^(x - m) -> the operand of the second product, hidden keys zero."""
    p = torch.where(scores == HIDDEN, 0.0, p)
    return to_half(p, torch.float16) if fp16 else e4m3_code(p)


def replace_by_bits(p: Tensor, by_bits: Tensor, scores: Tensor, steps: Tensor, m: Tensor, exp: str) -> Tensor:
    """P with the tiles that are formed by exponent.py."""
    return torch.where(by_bits.repeat_interleave(ti.TILE_TOKENS, -1), exponent.codes(scores, steps, m, exp), p)


def partial_sums_fp8(p: Tensor, v: Tensor) -> Tensor:
    """Each tile's P V and, as one more channel, its row sum: [batch, heads, q_len, tiles, dim + 1].

    p uint8 codes [batch, heads, q_len, n], v uint8 codes [batch, heads, tiles, 128, dim]. The sum runs in the tensor
    core over four steps of 32 keys; T starts from nothing in every tile. Inside a step the order does not matter.
    """
    values = torch.nn.functional.pad(e4m3_value(v), (0, 1), value=1.0)  # the rows of ones under V^T
    weights = e4m3_value(p).unflatten(-1, (-1, ti.TILE_TOKENS)).transpose(2, 3)  # [.., tiles, q_len, 128]
    out = weights.new_zeros(*weights.shape[:-1], values.shape[-1])
    for tile in range(values.shape[2]):  # one at a time: all products of a tile are held at once
        out[:, :, tile] = product(weights[:, :, tile], values[:, :, tile])
    return out.transpose(2, 3)


def fold_fp8(t: Tensor, factors: Tensor) -> Tensor:
    """O and l from the tiles' sums, last tile first, in float32: O = fma(O, a, T). [batch, heads, q_len, dim + 1]."""
    total = torch.zeros(*t.shape[:3], t.shape[-1])
    for tile in reversed(range(t.shape[3])):
        total = fma(total, factors[..., tile, None], t[..., tile, :])
    return total


def accumulate_fp16(p: Tensor, unrounded: Tensor, v: Tensor, factors: Tensor) -> Tensor:
    """O after each tile and, as one more channel, the row sum of P before its rounding: [.., tiles, dim + 1].

    p float16 and unrounded float32 [batch, heads, q_len, n], v float16 [batch, heads, tiles, 128, dim]. The tensor core
    adds to O directly, which is rescaled in between. A lane sums its columns of each parity in order.
    """
    batch, heads, q_len, _ = p.shape
    tiles, dim = v.shape[2], v.shape[-1]
    out = torch.zeros(batch, heads, q_len, tiles, dim + 1)
    total = torch.zeros(batch, heads, q_len, dim)
    lanes = torch.zeros(batch, heads, q_len, 4)
    columns = unrounded.unflatten(-1, (tiles, 16, 4, 2))  # tile, 8-key block, lane of the quad, parity
    for tile in reversed(range(tiles)):
        total = total * factors[..., tile, None]
        keys = slice(tile * ti.TILE_TOKENS, (tile + 1) * ti.TILE_TOKENS)
        total = product(p[..., keys], v[:, :, tile], total, FP16)
        sums = torch.zeros(batch, heads, q_len, 4, 2)
        for i in range(16):
            sums = sums + columns[:, :, :, tile, i]
        lanes = fma(lanes, factors[..., tile, None], sums[..., 0] + sums[..., 1])
        out[..., tile, :-1] = total
        out[..., tile, -1] = (lanes[..., 0] + lanes[..., 1]) + (lanes[..., 2] + lanes[..., 3])
    return out


def finish(
    total: Tensor,
    m: Tensor,
    v_scale: Tensor,
    v_mean: Tensor,
    dot: Tensor,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The epilogue: (out float32 [batch, heads, q_len, dim], lse). total [.., dim + 1] is O and l; v_scale, v_mean
    [batch, heads, dim]; dot: scale * q . k_mean; sinks float32 [heads]. A row without keys is 0 and -inf."""
    weight = total[..., -1]
    none = weight == 0
    last = m[..., 0] if m.shape[-1] else torch.full(dot.shape, NO_KEYS)
    lacks = torch.zeros_like(dot) if softcap else dot  # what smoothing took from the logits; softcap has put it back
    shrink, kept = torch.ones_like(weight), torch.ones_like(weight)
    if sinks is not None:
        sink = fma(-lacks, LOG2E, (sinks.cpu().float() * LOG2E)[None, :, None])
        last, weight, shrink, kept = add_sink(sink, last, weight)
    inverse = torch.where(none, 0.0, shrink / weight)[..., None]
    mean = torch.where(none[..., None], 0.0, v_mean[:, :, None] * kept[..., None])
    out = fma(total[..., :-1] * inverse, v_scale[:, :, None], mean)
    log = torch.log2(weight.double()).float()
    lse = fma(last + log, torch.tensor(0.6931471806), lacks)
    return out, torch.where(none, -torch.inf, lse)


def add_sink(sink: Tensor, m: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A key of weight 2^sink without value: (m, l with it, what outputs are multiplied by as well, the keys' share)."""
    shift = torch.clamp_min(sink - m - SINK_ROOM, 0.0)
    shrink = exp2(-shift)
    keys, m = weight * shrink, m + shift
    weight = keys + exp2(sink - m)
    return m, weight, shrink, keys / weight
