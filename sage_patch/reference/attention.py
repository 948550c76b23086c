"""The quantized recipes in plain PyTorch, on any device: oracle of the kernels and CPU backend.

The order of work is the kernel's: keys in tiles of one tensor-core block, base-2 online softmax whose maximum
carries the offset that puts P into E4M3's range, row sum over the quantized P, products of one tile folded
into a float32 output (two-level accumulation; SageAttention2, arXiv 2411.10958, sections 3.1 to 3.4).
Integer products are exact: a float32 matmul holds sums of up to 1,024 products of +-127 without rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_patch.recipes import Recipe
from sage_patch.reference.emulator import exponent
from sage_patch.reference.emulator.accumulator import product as tensor_core_product
from sage_patch.reference.emulator.float32 import e4m3_value
from sage_patch.reference.quantize import (
    BLOCK_K,
    BLOCK_Q,
    E4M3_MAX,
    LOG2E,
    hide,
    key_groups,
    quantize_e4m3,
    quantize_int,
    query_groups,
    round_e4m3,
    subtract_block_mean,
    subtract_mean,
    subtract_significant_mean,
)
from sage_patch.reference.rotation import rotate, rotated_width
from sage_patch.reference.visibility import Visibility

# Added to every exponent so that the largest P of a row becomes E4M3's largest number.
P_OFFSET_FP8 = math.log2(E4M3_MAX)
_ROWS_PER_STEP = 2048


@dataclass(frozen=True)
class Keys:
    """K and V of one call after smoothing and quantization, float32 holding integers and E4M3 numbers."""

    k: Tensor  # [B, Hkv, kv_len, D or, rotated, its width]
    k_scale: Tensor  # [B, Hkv, kv_len]
    k_smooth: Tensor | None  # unquantized smoothed K, kept only for Q smoothing's correction
    k_mean: Tensor | None  # [B, Hkv, 1, D]
    v: Tensor  # [B, Hkv, kv_len, Dv]
    half: torch.dtype  # element type of P and V in the fp16 recipes
    v_scale: Tensor | None  # [B, Hkv, 1, Dv]
    v_mean: Tensor | None  # [B, Hkv, 1, Dv]


def quantized_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    recipe: Recipe,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    emulate_accumulator: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention under a quantized recipe.

    query [B, Hq, q_len, D], key [B, Hkv, kv_len, D], value [B, Hkv, kv_len, Dv], any float dtype; sinks [Hq].
    Returns (out [B, Hq, q_len, Dv] in query's dtype, lse float32 [B, Hq, q_len] in natural log of the true
    scaled scores, or None). A row that sees no key gives 0 and -inf. Inputs are not written.
    emulate_accumulator: model the 13-bit truncating FP8 accumulator within a tile (slow; small shapes).
    """
    # sums run in memory order: one order, so that any view gives the bits of its contiguous copy
    keys = prepare_keys(key.contiguous(), value.contiguous(), visibility, recipe)
    return attend_keys(
        query, keys, visibility, recipe, scale=scale, softcap=softcap, sinks=sinks, return_lse=return_lse,
        emulate_accumulator=emulate_accumulator,
    )  # fmt: skip


def attend_keys(
    query: Tensor,
    keys: Keys,
    visibility: Visibility,
    recipe: Recipe,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    emulate_accumulator: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`quantized_attention` over keys and values that were quantized before."""
    batch, heads, q_len, _ = query.shape
    kv_heads = keys.k.shape[1]
    query = query.contiguous()
    grouped = (batch, kv_heads, heads // kv_heads)
    out = query.new_empty(batch, heads, q_len, keys.v.shape[-1], dtype=torch.float32)
    lse = query.new_empty(batch, heads, q_len, dtype=torch.float32)

    q_all = query.float()
    q_mean = None
    # logit that K smoothing removed from a whole row; it must come back where absolute logits matter
    row_shift = None
    if keys.k_mean is not None and (softcap or sinks is not None or return_lse):
        row_shift = torch.matmul(q_all.reshape(*grouped, q_len, -1), keys.k_mean[:, :, None].transpose(-1, -2))
        row_shift = row_shift[..., 0] * scale  # [B, Hkv, G, q_len]
    if recipe.smooth_q:
        q_all, q_mean = subtract_block_mean(q_all, BLOCK_Q[recipe.tiling])
    step = scale * LOG2E  # of a product of quantized Q and K
    if recipe.rotate != "none":
        q_all, step = rotate(q_all), step * rotated_width(q_all.shape[-1])
    q_int = quantize_int(
        q_all,
        recipe.qk_bits,
        query_groups(q_len, recipe.granularity, recipe.tiling, query.device),
        share_heads=recipe.granularity == "tensor",
    )
    sink_logit = sinks.float().reshape(1, kv_heads, -1, 1) if sinks is not None else None
    for row0 in range(0, q_len, _ROWS_PER_STEP):
        row1 = min(row0 + _ROWS_PER_STEP, q_len)
        part = slice(row0, row1)
        rows = _Rows(
            q=q_int.values[:, :, part].float().reshape(*grouped, row1 - row0, -1),
            sigma=(q_int.scale[:, :, part] * step).reshape(*grouped, row1 - row0, 1),
            mean=None if q_mean is None else (q_mean[:, :, part] * (scale * LOG2E)).reshape(*grouped, row1 - row0, -1),
            shift=None if row_shift is None else row_shift[..., part],
            first=row0,
            last=row1,
        )
        block, block_lse = _mainloop(rows, keys, visibility, recipe, softcap, sink_logit, emulate_accumulator)
        out[:, :, part] = block.reshape(batch, heads, row1 - row0, -1)
        lse[:, :, part] = block_lse.reshape(batch, heads, row1 - row0)
    return out.to(query.dtype), lse if return_lse else None


@dataclass(frozen=True)
class _Rows:
    """A block of query rows, heads grouped by their kv head: [B, Hkv, G, rows, ...]."""

    q: Tensor
    sigma: Tensor  # q_scale * scale * log2(e)
    mean: Tensor | None  # Q's block mean, already times scale * log2(e)
    shift: Tensor | None  # scale * q . k_mean, natural-log units
    first: int
    last: int


def prepare_keys(key: Tensor, value: Tensor, visibility: Visibility, recipe: Recipe) -> Keys:
    """Contiguous key and value of a call, smoothed and quantized."""
    visible = visibility.visible_keys(key.shape[1], key.device)
    k_mean = None
    if recipe.smooth_k:
        k_float, k_mean = subtract_mean(key, visible)
    else:
        k_float = hide(key.float(), visible)
    groups = key_groups(key.shape[-2], recipe.granularity, recipe.tiling, key.device)
    k_turned = rotate(k_float) if recipe.rotate != "none" else k_float
    k_int = quantize_int(k_turned, recipe.qk_bits, groups, share_heads=recipe.granularity == "tensor")

    v_mean = v_scale = None
    if recipe.pv == "fp8":
        if recipe.smooth_v:
            v_float, v_mean = subtract_significant_mean(value, visible)
        else:
            v_float = hide(value.float(), visible)
        v, v_scale = quantize_e4m3(v_float)
    else:
        v = hide(value, visible)
        if v.dtype not in (torch.float16, torch.bfloat16):
            v, v_scale = _half_with_scale(v.float())
    half = v.dtype
    return Keys(
        k=k_int.values.float(),
        k_scale=k_int.scale,
        k_smooth=k_float if recipe.smooth_q else None,
        k_mean=k_mean,
        v=v.float(),
        half=half,
        v_scale=v_scale,
        v_mean=v_mean,
    )


def _half_with_scale(v: Tensor) -> tuple[Tensor, Tensor]:
    """float32 V as fp16 with a power-of-two scale per channel, so that any finite V stays finite."""
    amax = v.abs().amax(dim=-2, keepdim=True)
    exponent = torch.where(amax > 0, torch.floor(torch.log2(amax.clamp_min(1e-30))), 0.0)
    scale = torch.exp2(exponent)
    return (v / scale).half(), scale


def _mainloop(
    rows: _Rows,
    keys: Keys,
    visibility: Visibility,
    recipe: Recipe,
    softcap: float,
    sink_logit: Tensor | None,
    emulate_accumulator: bool,
) -> tuple[Tensor, Tensor]:
    """One block of query rows over all key tiles: (out [B, Hkv, G, rows, Dv], lse [B, Hkv, G, rows])."""
    batch, kv_heads, group, count, _ = rows.q.shape
    heads = kv_heads * group
    block = BLOCK_K[recipe.tiling]
    offset = P_OFFSET_FP8 if recipe.pv == "fp8" else 0.0
    top = rows.q.new_full((batch, kv_heads, group, count), -math.inf)  # running maximum minus offset, log2
    total = torch.zeros_like(top)
    out = rows.q.new_zeros(batch, kv_heads, group, count, keys.v.shape[-1])
    lo, hi = visibility.key_range(rows.first, rows.last)
    for col0 in range(lo // block * block, hi, block):
        col1 = min(col0 + block, keys.k.shape[-2])
        scores = _tile_scores(rows, keys, visibility, recipe, softcap, col0, col1, heads)
        new_top = torch.maximum(top, scores.amax(dim=-1) - offset)
        finite_top = torch.where(torch.isneginf(new_top), 0.0, new_top)
        x = scores.sub_(finite_top[..., None])
        p = _exp2(x)
        p = round_e4m3(p) if recipe.pv == "fp8" else p.to(keys.half).float()
        if recipe.exp != "exact" and not softcap:
            by_bits = _by_bits(x, finite_top, rows, visibility, block, col0, col1, heads)
            p = torch.where(by_bits, _p_by_bits(x, recipe.exp), p)
        alpha = _exp2(top - finite_top)
        v = keys.v[:, :, col0:col1]
        if emulate_accumulator and recipe.pv == "fp8":
            product, mass = _truncating_product(p, v)
        else:
            flat = p.reshape(batch, kv_heads, group * count, col1 - col0)
            product, mass = torch.matmul(flat, v).view_as(out), p.sum(dim=-1)
        total = total * alpha + mass
        out = out.mul_(alpha[..., None]).add_(product)
        top = new_top
    # softcap acts on true logits: with it the row shift is in the scores already
    shift = rows.shift if rows.shift is not None and not softcap else torch.zeros_like(total)
    return _epilogue(out, top, total, shift, keys, sink_logit)


def _exp2(x: Tensor) -> Tensor:
    """2^x, the same bits wherever in a batch a number lies: torch's vectors, and its loop over what fills none, differ
    in the last place, so the numbers are made to fill the vectors of each thread."""
    count = x.numel()
    missing = -count % (64 * torch.get_num_threads())
    if not missing:
        return torch.exp2(x)
    return torch.exp2(torch.nn.functional.pad(x.reshape(-1), (0, missing)))[:count].view(x.shape)


def _tile_scores(
    rows: _Rows,
    keys: Keys,
    visibility: Visibility,
    recipe: Recipe,
    softcap: float,
    col0: int,
    col1: int,
    heads: int,
) -> Tensor:
    """Scores of one tile in log2 units, [B, Hkv, G, rows, cols], masked entries -inf."""
    batch, kv_heads, group, count, _ = rows.q.shape
    flat = (batch, kv_heads, group * count, -1)
    k = keys.k[:, :, col0:col1]
    scores = torch.matmul(rows.q.reshape(flat), k.transpose(-1, -2)).view(batch, kv_heads, group, count, col1 - col0)
    scores = scores.mul_(rows.sigma * keys.k_scale[:, :, None, None, col0:col1])
    if rows.mean is not None:  # Q smoothing's correction: mean(Q) . smoothed K, exact
        assert keys.k_smooth is not None
        correction = torch.matmul(rows.mean.reshape(flat), keys.k_smooth[:, :, col0:col1].transpose(-1, -2))
        scores = scores.add_(correction.view_as(scores))
    if softcap:  # acts on true logits, so the row shift comes back first
        if rows.shift is not None:
            scores = scores + rows.shift[..., None] * LOG2E
        scores = torch.tanh(scores / (softcap * LOG2E)).mul_(softcap * LOG2E)
    mask = visibility.mask_tile(rows.first, rows.last, col0, col1)
    if mask is not None:
        shape = mask.shape
        mask = (
            mask.reshape(shape[0], kv_heads, group, *shape[2:]) if shape[1] == heads and heads > 1 else mask[:, :, None]
        )
        if mask.dtype == torch.bool:
            scores = scores.masked_fill_(~mask, -math.inf)
        else:
            scores = scores + _bias_log2(mask)
    band = visibility.band(rows.first, rows.last, col0, col1, scores.device)
    return scores if band is None else scores.masked_fill_(~band, -math.inf)


def _by_bits(
    x: Tensor, top: Tensor, rows: _Rows, visibility: Visibility, block: int, col0: int, col1: int, heads: int
) -> Tensor:
    """Which rows of a tile get P by exponent.py, bool [B, Hkv, G, rows, 1]: those of 64 that all see it whole, with
    nothing added, and of 16 none of whose scores is too far below its row's reference."""
    count = x.shape[-2]
    plain = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    if col1 - col0 < block:
        return torch.zeros_like(plain)[..., None]
    mask, band = visibility.mask_tile(rows.first, rows.last, col0, col1), None
    if mask is not None:
        seen = mask if mask.dtype == torch.bool else mask == 0
        seen = seen.all(-1)
        plain &= seen.reshape(seen.shape[0], *x.shape[1:3], -1) if seen.shape[1] == heads > 1 else seen[:, :, None]
    band = visibility.band(rows.first, rows.last, col0, col1, x.device)
    if band is not None:
        plain &= band.all(-1)
    near = (x.amin(-1) > -exponent.REACH_LIMIT) & (top.abs() < exponent.FURTHEST)
    return (exponent.all_of(plain[..., None], 64) & exponent.all_of(near[..., None], exponent.WARP_ROWS))[
        ..., :count, :
    ]


def _p_by_bits(x: Tensor, exp: str) -> Tensor:
    """P of exponents x: the kernel's formula, but for its rounding of a score's step to 2^-23 octaves."""
    t = ((x + exponent.BIAS[exp]) * exponent.OCTAVE).clamp_min_(0.0)
    return e4m3_value(exponent.codes_of_bits(t.int(), exp))


def _bias_log2(bias: Tensor) -> Tensor:
    """An additive mask in log2 units. Only -inf hides: a finite bias stays finite, though the lowest float32
    times log2(e) would not, so that a row of finfo.min sees every key alike."""
    scaled = (bias.float() * LOG2E).clamp_min_(torch.finfo(torch.float32).min)
    return scaled.masked_fill_(torch.isneginf(bias), -math.inf)


def _epilogue(
    out: Tensor, top: Tensor, total: Tensor, shift: Tensor, keys: Keys, sink_logit: Tensor | None
) -> tuple[Tensor, Tensor]:
    dead = total == 0
    denominator = total
    finite_top = torch.where(torch.isneginf(top), 0.0, top)
    if sink_logit is not None:
        # a head's sink is an absolute logit: compare it with scores that have lost their row shift
        denominator = total + _exp2((sink_logit - shift) * LOG2E - finite_top)
    inverse = torch.where(dead, 0.0, 1.0 / torch.where(dead, 1.0, denominator))[..., None]
    if keys.v_scale is not None:
        out = out * keys.v_scale[:, :, None]
    out = out * inverse
    if keys.v_mean is not None:
        out = out + keys.v_mean[:, :, None] * (total[..., None] * inverse)
    lse = (finite_top + torch.log2(denominator)) / LOG2E + shift
    return torch.where(dead[..., None], 0.0, out), torch.where(dead, -math.inf, lse)


def _truncating_product(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(P V, row sum of P) as the FP8 tensor core forms them; the row sum is a column of ones beside V.

    p [B, Hkv, G, rows, cols], v [B, Hkv, cols, Dv].
    """
    product = tensor_core_product(p, torch.nn.functional.pad(v, (0, 1), value=1.0)[:, :, None])
    return product[..., :-1], product[..., -1]
