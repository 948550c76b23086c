"""What the Hopper kernels quantize before any product, bit for bit: K and V images, Q rows and their scales; and what
the means that Q loses add to the logits.

Everything here is integer, float32 and conversion arithmetic in a fixed order, so the numbers equal the GPU's.
Sources: cuda_kernels/quantize.cu (K, V), int8.cuh (the INT8 rule), query.cuh (Q), smooth_q.cu (Q's
means), api.cu (the workspace).
`dim` is the padded head dimension, 64 or 128; a head is one (batch item, kv head) pair; tokens come in blocks of 128.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_patch.reference.emulator import tile_image as ti
from sage_patch.reference.emulator.float32 import e4m3_code, fma, to_half
from sage_patch.reference.emulator.rotation import rotate_rows
from sage_patch.reference.quantize import E4M3_MAX, LOG2E
from sage_patch.reference.rotation import rotate

# A group or channel whose largest magnitude is below this counts as all zero: 127 / amax would near float32's end.
TINY = 1e-30
V_REACH = 4.0  # a V channel's scale holds so many times its largest sample, if there are others
BEYOND = 1.03125  # times the largest number of an image: what is less is rounded to that at most
FP16_MAX = 2.0  # of V's FP16 images
SMOOTH_ROWS = 64  # rows of Q that lose one mean
MOST_CORRECTION = 1e28  # of a logit, by Q's mean


@dataclass
class Prepared:
    """Per head: images in token and channel order, scales and smoothing vectors, as the attention kernel reads them."""

    k: Tensor  # int8 [heads, blocks, 128, dim]
    k_scale: Tensor  # float32 [heads, blocks, 4]
    v: Tensor  # fp8: uint8 E4M3 codes, fp16: float16 [heads, blocks, 128, dim]
    k_mean: Tensor  # float32 [heads, dim]
    v_mean: Tensor  # float32 [heads, dim]
    v_scale: Tensor  # float32 [heads, dim]


@dataclass
class Queries:
    """Quantized query rows."""

    q: Tensor  # int8 [batch, heads, q_len, dim]
    scale: Tensor  # float32 [batch, heads, q_len], times softmax scale and log2(e)
    dot: Tensor  # float32 [batch, heads, q_len]: softmax scale * (unquantized q . k_mean)


def padded_dim(head_dim: int) -> int:
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def from_workspace(raw: Tensor, heads: int, blocks: int, dim: int, fp16: bool) -> Prepared:
    """Unpacks the bytes of a workspace (layout: place() in api.cu; maps: tile_image)."""
    raw = raw.cpu()
    at = 0

    def take(count: int, dtype: torch.dtype) -> Tensor:
        nonlocal at
        size = count * dtype.itemsize
        piece = raw[at : at + size].clone().view(dtype)
        at += (size + 255) // 256 * 256
        return piece

    tokens = ti.TILE_TOKENS
    k_bytes = take(heads * blocks * tokens * dim, torch.uint8).view(heads, blocks, -1)
    v_bytes = take(heads * blocks * tokens * dim * (2 if fp16 else 1), torch.uint8).view(heads, blocks, -1)
    if fp16:
        halves = v_bytes.view(torch.float16).view(-1, heads, blocks, tokens * min(dim, 128))
        v = torch.cat([half[:, :, ti.v16_offsets(min(dim, 128)) // 2] for half in halves], dim=-1)
    else:  # of 256 channels: all images of the first half, then those of the second
        halves = v_bytes.view(-1, heads, blocks, tokens * min(dim, 128))
        v = torch.cat([half[:, :, ti.v_offsets(min(dim, 128))] for half in halves], dim=-1)
    k_scale = take(heads * blocks * ti.SCALE_GROUPS, torch.float32).view(heads, blocks, ti.SCALE_GROUPS)
    vectors = []
    for _ in range(3):
        padded = (heads * dim * 4 + 255) // 256 * 64
        vectors.append(take(padded, torch.float32)[: heads * dim].view(heads, dim))
    return Prepared(k_bytes[:, :, ti.k_offsets(dim)].view(torch.int8), k_scale, v, *vectors)


def prepare(
    key: Tensor,
    value: Tensor,
    keys: Sequence[int],
    dim: int,
    fp16: bool,
    smooth_v: bool,
    seen: Tensor | None = None,
    *,
    smooth_k: bool = True,
    int4: bool = False,
    rotated: bool = False,
) -> Prepared:
    """The pre-processing launch. key, value [batch, kv_heads, tokens, head_dim], float16 or bfloat16; keys: how many
    each item has, from its first token on. Blocks behind them stay zero (the kernel does not write them).

    seen: bool [batch, tokens], keys that some row sees under a mask. The others may hold anything: they count neither
    for a mean nor for a scale, and their K is zero, and so is their V. int4: 7 levels of K.
    rotated: K less its mean is rotated over `dim` channels.
    """
    key, value = key.cpu(), value.cpu()
    batch, heads, length, d = key.shape
    blocks = (length + ti.TILE_TOKENS - 1) // ti.TILE_TOKENS
    images = (batch * heads, blocks, ti.TILE_TOKENS, dim)
    out = Prepared(
        k=torch.zeros(images, dtype=torch.int8),
        k_scale=torch.zeros(batch * heads, blocks, ti.SCALE_GROUPS),
        v=torch.zeros(images, dtype=torch.float16 if fp16 else torch.uint8),
        k_mean=torch.zeros(batch * heads, dim),
        v_mean=torch.zeros(batch * heads, dim),
        v_scale=torch.zeros(batch * heads, dim),
    )
    for b in range(batch):
        for h in range(heads):
            some = None if seen is None else seen[b, : keys[b]]
            _prepare_k(out, b * heads + h, key[b, h, : keys[b]], some, smooth_k, int4, rotated)
            _prepare_v(out, b * heads + h, value[b, h, : keys[b]].float(), fp16, smooth_v, some)
    return out


def _blocked(x: Tensor, dim: int) -> Tensor:
    """[tokens, channels] -> [blocks, 128, dim], zeros behind the last token and channel."""
    tokens, channels = x.shape
    blocks = (tokens + ti.TILE_TOKENS - 1) // ti.TILE_TOKENS
    x = torch.nn.functional.pad(x, (0, dim - channels, 0, blocks * ti.TILE_TOKENS - tokens))
    return x.view(blocks, ti.TILE_TOKENS, dim)


def _prepare_k(
    out: Prepared, head: int, k: Tensor, seen: Tensor | None, smooth: bool, int4: bool, rotated: bool
) -> None:
    tokens, channels = k.shape
    mean = ti.sampled_mean(k.float(), seen) if smooth else torch.zeros(channels)
    out.k_mean[head, :channels] = mean
    centred = rotate_rows(k, mean) if rotated else k.float() - mean
    if seen is not None:
        centred = torch.where(seen[:, None], centred, 0.0)
    centred = _blocked(centred, out.k.shape[-1])
    group = ti.k_group(torch.arange(ti.TILE_TOKENS))
    for g in range(ti.SCALE_GROUPS):
        mine = centred[:, group == g]
        amax = _largest(mine, (1, 2))
        scale, inverse = int8_scale(amax, int4)
        out.k_scale[head, : len(amax), g] = scale
        out.k[head, : len(amax), group == g] = int8_values(mine, inverse[:, None, None])


def _prepare_v(out: Prepared, head: int, v: Tensor, fp16: bool, smooth_v: bool, seen: Tensor | None) -> None:
    """A channel's scale leaves room above its largest sample; one that overflows takes it from its true maximum."""
    tokens, channels = v.shape
    mean = ti.v_mean(v, seen) if smooth_v else torch.zeros(channels)
    there = torch.ones(tokens, dtype=torch.bool) if seen is None else seen
    limit = FP16_MAX if fp16 else E4M3_MAX
    most = _range(v, there[:, None] & ~v.isnan(), mean)  # NaN does not count: it stays where it is
    sampled = ti.mean_tokens(tokens)
    largest = _range(v[sampled], there[sampled, None] & v[sampled].isfinite(), mean)
    reach = largest * V_REACH if tokens > ti.MEAN_SAMPLES else largest
    scale, inverse = _v_scale(reach, fp16, limit)
    usable = (largest >= TINY) & reach.isfinite()
    scale, inverse = torch.where(usable, scale, 0.0), torch.where(usable, inverse, 2.0**127)
    overflows = most * inverse > limit * BEYOND
    true_scale, true_inverse = _v_scale(most, fp16, limit)
    scale, inverse = torch.where(overflows, true_scale, scale), torch.where(overflows, true_inverse, inverse)
    out.v_mean[head, :channels], out.v_scale[head, :channels] = mean, scale
    scaled = _blocked(torch.where(there[:, None], (v - mean) * inverse, 0.0), out.v.shape[-1])
    out.v[head, : len(scaled)] = to_half(scaled, torch.float16) if fp16 else e4m3_code(scaled)


def _range(v: Tensor, counts: Tensor, mean: Tensor) -> Tensor:
    """The largest |v - mean| of each channel over the tokens that count, float32 [channels]; zero without any."""
    if not len(v):
        return torch.zeros_like(mean)
    low, high = torch.where(counts, v, math.inf).amin(0), torch.where(counts, v, -math.inf).amax(0)
    return torch.where(low <= high, torch.maximum((low - mean).abs(), (high - mean).abs()), 0.0)


def _v_scale(amax: Tensor, fp16: bool, limit: float) -> tuple[Tensor, Tensor]:
    """(scale, inverse) of channels that hold up to `amax`, which becomes `limit`; FP16: its leading power of two
    becomes one. Infinite: the channel is NaN."""
    if fp16:
        scale = (amax.view(torch.int32) & 0x7F800000).view(torch.float32)
        inverse = torch.ones_like(scale) / scale
    else:
        scale = amax * torch.tensor(1.0 / limit)
        inverse = torch.full_like(amax, limit) / amax
    none, infinite = amax < TINY, amax.isinf()
    scale = torch.where(none, 0.0, torch.where(infinite, math.nan, scale))
    return scale, torch.where(none | infinite, 0.0, inverse)


def _largest(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest magnitude, where NaN exceeds infinity and infinity everything else."""
    return x.abs().amax(dims)  # torch's maximum keeps NaN


def int8_scale(amax: Tensor, int4: bool = False) -> tuple[Tensor, Tensor]:
    """(scale, inverse) with x ~ q * scale and q = rint(x * inverse). Non-finite amax: scale NaN, inverse 0."""
    levels = 7.0 if int4 else 127.0
    none, lost = amax < TINY, ~amax.isfinite()
    # both operands are tensors: `127 / amax` would multiply by a reciprocal, which rounds twice
    inverse = torch.full_like(amax, levels) / amax
    scale = amax * torch.tensor(1.0 / levels)
    return torch.where(none, 0.0, torch.where(lost, math.nan, scale)), torch.where(none | lost, 0.0, inverse)


def int8_values(x: Tensor, inverse: Tensor) -> Tensor:
    """rint(x * inverse) of the exact product as int8. NaN and infinity times an inverse of zero give -1, the low
    byte of the NaN that the kernel's magic addition returns; their scale is NaN, so no one sees it."""
    exact = x.double() * inverse.double()
    return torch.where(exact.isnan(), -1.0, exact.round()).to(torch.int8)


def quantize_queries(
    query: Tensor,
    k_mean: Tensor,
    scale: float,
    *,
    q_mean: Tensor | None = None,
    int4: bool = False,
    rotated: bool = False,
) -> Queries:
    """Q on its way into the attention kernel: INT8, or 7 levels, with one scale a row.

    query [batch, heads, q_len, head_dim]; k_mean [batch, kv_heads, dim]; scale: of the softmax; q_mean: of
    `query_means`, or None if Q keeps its mean; rotated: what is left is rotated, and the row's scale has the width that
    the product lacks. The rows' dots are those of Q as it came.
    """
    d, dim = query.shape[-1], k_mean.shape[-1]
    x = torch.nn.functional.pad(query.float(), (0, dim - d))
    centred = x if q_mean is None else x - of_rows(q_mean, x.shape[2])
    centred = rotate(centred) if rotated else centred
    row_scale, inverse = int8_scale(_largest(centred, (-1,)), int4)
    single = torch.tensor(scale, dtype=torch.float32)
    log2_scale = (single.double() * LOG2E).float() * (dim if rotated else 1)
    mean = k_mean.repeat_interleave(query.shape[1] // k_mean.shape[1], dim=1)[:, :, None, :]
    return Queries(int8_values(centred, inverse[..., None]), row_scale * log2_scale, _dot(x, mean) * single)


def of_rows(x: Tensor, q_len: int) -> Tensor:
    """[batch, heads, blocks, ..] of blocks of 64 rows -> [batch, heads, q_len, ..]."""
    return x.repeat_interleave(SMOOTH_ROWS, dim=2)[:, :, :q_len]


def query_means(query: Tensor, dim: int) -> Tensor:
    """The mean of every 64 rows, float32 [batch, heads, blocks, dim], rows added in order; zero where not finite."""
    batch, heads, q_len, d = query.shape
    blocks = (q_len + SMOOTH_ROWS - 1) // SMOOTH_ROWS
    x = torch.nn.functional.pad(query.float(), (0, dim - d, 0, blocks * SMOOTH_ROWS - q_len))
    x = x.view(batch, heads, blocks, SMOOTH_ROWS, dim)
    total = torch.zeros(batch, heads, blocks, dim)
    for row in range(SMOOTH_ROWS):  # those behind the last one add zero
        total = total + x[:, :, :, row]
    count = torch.tensor([min(q_len - b * SMOOTH_ROWS, SMOOTH_ROWS) for b in range(blocks)], dtype=torch.float32)
    mean = total / count[:, None]
    return torch.where(mean.isfinite(), mean, 0.0)


def corrections(q_mean: Tensor, key: Tensor, keys: Tensor, k_mean: Tensor, scale: float) -> Tensor:
    """What Q's means add to the logits, in log2 units: float32 [batch, heads, blocks, n], zero where there is no key.

    q_mean of `query_means`; key [batch, kv_heads, tokens, head_dim], the item's keys first, keys int64 [batch] of them;
    k_mean [batch, kv_heads, dim]; scale: of the softmax. K is not quantized. Channels in order, one fma each.
    """
    batch, heads, blocks, dim = q_mean.shape
    length, d = key.shape[2:]
    n = (length + ti.TILE_TOKENS - 1) // ti.TILE_TOKENS * ti.TILE_TOKENS
    k = torch.nn.functional.pad(key.float(), (0, dim - d, 0, n - length)) - k_mean[:, :, None]
    k = k.repeat_interleave(heads // key.shape[1], dim=1)
    total = torch.zeros(batch, heads, blocks, n)
    for channel in range(dim):
        total = fma(q_mean[..., channel, None], k[:, :, None, :, channel], total)
    log2_scale = (torch.tensor(scale, dtype=torch.float32).double() * LOG2E).float()
    total = (total * log2_scale).clamp(-MOST_CORRECTION, MOST_CORRECTION)  # a NaN stays
    return torch.where(torch.arange(n) < keys[:, None, None, None], total, 0.0)


def _dot(x: Tensor, mean: Tensor) -> Tensor:
    """x . mean as load_q forms it: a lane adds eight neighbouring channels in order, then a butterfly over lanes.
    (Rows of a CTA's later tiles are added in another order; the difference is some units of the last place.)"""
    x, mean = torch.broadcast_tensors(x, mean)
    lanes, means = x.unflatten(-1, (-1, 8)), mean.unflatten(-1, (-1, 8))
    total = torch.zeros(lanes.shape[:-1])
    for e in range(8):
        total = fma(lanes[..., e], means[..., e], total)
    while total.shape[-1] > 1:  # neighbours first; addition commutes, so every lane ends with the same sum
        total = total[..., ::2] + total[..., 1::2]
    return total[..., 0]
