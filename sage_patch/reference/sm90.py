"""The Hopper attention kernel on the CPU, stage by stage: every number that it forms between its inputs and its output.

For tests: small shapes, no speed. Sources: cuda_kernels/fwd_sm90.cu (order of work), softmax.cuh (exponents), mask.cuh.
Bit for bit: images, scales, int32 scores, reference exponents m, and everything that follows from given P and T.
Within a band: 2^x, which the hardware approximates to EX2_ULPS; a P whose band straddles a rounding boundary may be one
code off, and `p_low` and `p_high` say which. The tensor core's sums follow accumulator.py. 1 / l and log2 l are
correctly rounded here and may be some units of the last place off there.

Shapes: keys are padded to whole tiles, n = 128 * tiles; dim is the padded head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_patch.reference import tile_image as ti
from sage_patch.reference.accumulator import FP16, product
from sage_patch.reference.float32 import e4m3_code, e4m3_value, exp2, exp2_band, fma, to_half
from sage_patch.reference.sm90_prepare import Prepared, Queries, padded_dim, prepare, quantize_queries

FP8_OFFSET = 8.807  # log2(448): the largest P of a row becomes E4M3's largest number
FP16_OFFSET = 9.0
FP16_SLACK = 4.0  # FP16: m stays until a maximum outgrows it by this
NO_KEYS = -1e30  # m of a row that has seen no key
MAX_STEP = 16.0  # bound of one integer step in log2 units
GROUP_ROWS = 64  # query rows of a consumer warpgroup, which walk the same tiles
HIDDEN = -(2**31)  # a score that a row does not see


@dataclass
class Stages:
    """Everything between inputs and output. Entries of tiles that a row does not walk are zero (scores: HIDDEN)."""

    images: Prepared
    queries: Queries
    walked: Tensor  # bool [batch, q_len, tiles]: the row's warpgroup walks the tile, from the last to the first
    visible: Tensor  # bool [batch, q_len, n]: the row sees the key
    scores: Tensor  # int32 [batch, heads, q_len, n]
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
    smooth_v: bool = True,
) -> Stages:
    """query [batch, heads, q_len, head_dim], key and value [batch, kv_heads, kv_len, head_dim], float16 or bfloat16,
    head_dim <= 128; recipe "qk_int8_pv_fp8" or "qk_int8_pv_fp16"; the other arguments as library.forward's."""
    query, key, value = query.cpu(), key.cpu(), value.cpu()
    batch, heads, q_len, d = query.shape
    kv_heads, kv_len = key.shape[1:3]
    dim, fp16 = padded_dim(d), recipe == "qk_int8_pv_fp16"
    keys = torch.tensor([kv_len] * batch if kv_lens is None else [min(max(n, 0), kv_len) for n in kv_lens])
    images = prepare(key, value, keys.tolist(), dim, fp16, smooth_v)
    queries = quantize_queries(query, images.k_mean.view(batch, kv_heads, dim), scale)
    walked, visible = _pattern(q_len, kv_len, keys, is_causal, top_left)
    tiles = walked.shape[-1]

    def per_head(x: Tensor) -> Tensor:  # [batch * kv_heads, ...] -> [batch, heads, ...]
        return x.view(batch, kv_heads, *x.shape[1:]).repeat_interleave(heads // kv_heads, dim=1)

    k = per_head(images.k).flatten(2, 3)
    scores = torch.matmul(queries.q.double(), k.double().transpose(-1, -2)).to(torch.int32)
    scores = torch.where(visible[:, None] & walked.repeat_interleave(ti.TILE_TOKENS, -1)[:, None], scores, HIDDEN)
    k_scale = per_head(images.k_scale)[..., ti.k_group(torch.arange(ti.TILE_TOKENS))]  # [batch, heads, tiles, 128]
    v = per_head(images.v)  # [batch, heads, tiles, 128, dim]

    m, factors, exponents = exponents_of(scores, k_scale, queries.scale, fp16)
    p, p_low, p_high = (_probabilities(x, scores, fp16) for x in (exp2(exponents), *exp2_band(exponents)))
    if fp16:
        unrounded = torch.where(scores == HIDDEN, 0.0, exp2(exponents))
        t = accumulate_fp16(p, unrounded, v, factors)
        total = t[..., 0, :] if tiles else torch.zeros(batch, heads, q_len, dim + 1)
    else:
        t = partial_sums_fp8(p, v)
        total = fold_fp8(t, factors)
    t = torch.where(walked[:, None, :, :, None], t, 0.0)
    out, lse = finish(total, m, per_head(images.v_scale), per_head(images.v_mean), queries.dot)
    out = out[..., :d]
    return Stages(images, queries, walked, visible, scores, m, p, p_low, p_high, t, out, to_half(out, query.dtype), lse)


def _pattern(q_len: int, kv_len: int, keys: Tensor, is_causal: bool, top_left: bool) -> tuple[Tensor, Tensor]:
    """(walked [batch, q_len, tiles], visible [batch, q_len, n]) as mask.cuh's visible_keys and tile_span say."""
    tiles = (kv_len + ti.TILE_TOKENS - 1) // ti.TILE_TOKENS
    rows = torch.arange(q_len)
    offset = torch.zeros_like(keys) if top_left else keys - q_len

    def limit(row: Tensor) -> Tensor:
        seen = keys[:, None].expand(-1, q_len)
        return torch.minimum(seen, row + offset[:, None] + 1) if is_causal else seen

    last = (rows // GROUP_ROWS * GROUP_ROWS + GROUP_ROWS - 1).clamp_max(q_len - 1)
    # a group of rows walks the tiles that its last row, the one that sees most, sees in part
    walked = torch.arange(tiles) * ti.TILE_TOKENS < limit(last)[..., None]
    return walked, torch.arange(tiles * ti.TILE_TOKENS) < limit(rows)[..., None]


def exponents_of(scores: Tensor, k_scale: Tensor, q_scale: Tensor, fp16: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(m [.., tiles], a [.., tiles], x - m [.., n]), .. = batch, heads, q_len: softmax_fp8 and softmax_fp16 up to the
    exponential.

    m after each tile, a = 2^(m before - m after): what the sums so far are multiplied by. k_scale [batch, heads, tiles,
    128], q_scale [batch, heads, q_len]. A thread takes its maximum over its own columns, all of one scale.
    """
    tiles = k_scale.shape[2]
    offset = torch.tensor(FP16_OFFSET if fp16 else FP8_OFFSET)
    m = torch.full((*q_scale.shape, tiles), NO_KEYS)
    factors = torch.ones(*q_scale.shape, tiles)
    exponents = torch.zeros(scores.shape)
    current = torch.full(q_scale.shape, NO_KEYS)
    group = ti.k_group(torch.arange(ti.TILE_TOKENS))
    for tile in reversed(range(tiles)):
        part = slice(tile * ti.TILE_TOKENS, (tile + 1) * ti.TILE_TOKENS)
        s = scores[..., part]
        step = k_scale[:, :, tile, None] * q_scale[..., None]
        step = torch.where(step > MAX_STEP, MAX_STEP, step)  # a NaN stays
        top = torch.full(q_scale.shape, NO_KEYS)
        for c in range(ti.SCALE_GROUPS):
            largest = s[..., group == c].amax(-1)
            f = fma(largest.float(), step[..., group == c][..., 0], -offset)
            top = torch.fmax(top, torch.where(largest == HIDDEN, NO_KEYS, f))  # fmaxf drops a NaN
        if fp16:
            new = torch.where(top > current + FP16_SLACK, top, current)
        else:
            new = torch.fmax(top, current)
        factors[..., tile] = exp2(current - new)
        m[..., tile] = current = new
        exponents[..., part] = fma(s.float(), step, -new[..., None])
    return m, factors, exponents


def _probabilities(p: Tensor, scores: Tensor, fp16: bool) -> Tensor:
    """float32 2^(x - m) -> the operand of the second product, hidden keys zero."""
    p = torch.where(scores == HIDDEN, 0.0, p)
    return to_half(p, torch.float16) if fp16 else e4m3_code(p)


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


def finish(total: Tensor, m: Tensor, v_scale: Tensor, v_mean: Tensor, dot: Tensor) -> tuple[Tensor, Tensor]:
    """The epilogue: (out float32 [batch, heads, q_len, dim], lse). total [.., dim + 1] is O and l; v_scale, v_mean
    [batch, heads, dim]; dot: scale * q . k_mean. A row without keys is 0 and -inf."""
    weight = total[..., -1:]
    none = weight == 0
    inverse = torch.where(none, 0.0, torch.ones_like(weight) / weight)
    mean = torch.where(none, 0.0, v_mean[:, :, None])
    out = fma(total[..., :-1] * inverse, v_scale[:, :, None], mean)
    last = m[..., 0] if m.shape[-1] else torch.full(dot.shape, NO_KEYS)
    log = torch.log2(weight[..., 0].double()).float()
    lse = fma(last + log, torch.tensor(0.6931471806), dot)
    return out, torch.where(none[..., 0], -torch.inf, lse)
