"""Smoothing and the quantizers: what a recipe does to Q, K and V before the matrix products.

Sources: SageAttention2 (arXiv 2411.10958) sections 3.1 (smoothing), 3.2 and appendix A.6 (per-thread groups),
3.3 (E4M3 for P and V). Differences from the released code, all on purpose: rounding is to nearest even
everywhere, means and subtraction are in float32, and no epsilon is added to a scale, so that tiny inputs
keep their precision; a group of zeros has scale 1 and quantizes to zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_patch.recipes import Granularity, Tiling
from sage_patch.reference.emulator.tile_image import V_SIGNIFICANCE

E4M3_MAX = 448.0
LOG2E = 1.4426950408889634
# Smallest amax that is not treated as zero: below it 127 / amax would overflow float32. The kernels stop earlier, at
# emulator.prepare.TINY.
_TINY = 1e-36

# Rows of Q per warp, and query rows and keys per tile, of the two tensor-core families.
WARP_ROWS: dict[str, int] = {"mma": 32, "wgmma": 16}
BLOCK_Q: dict[str, int] = {"mma": 128, "wgmma": 64}
BLOCK_K: dict[str, int] = {"mma": 64, "wgmma": 128}


@dataclass(frozen=True)
class Quantized:
    """Integers with their scales. values: int8 [B, H, N, D]; scale: float32 [B, H, N], one per token
    (tokens of one group hold the same number); x is approximately values * scale[..., None]."""

    values: Tensor
    scale: Tensor


def query_groups(length: int, granularity: Granularity, tiling: Tiling, device: torch.device) -> Tensor:
    """Group index of each query token, int64 [length].

    "thread": a thread of the tensor-core layout owns rows i and i+8 of its warp's 16-row fragments, so the
    tokens of one warp with equal n % 8 share a scale (SageAttention2 A.6).
    """
    n = torch.arange(length, device=device)
    rows = WARP_ROWS[tiling]
    if granularity == "tensor":
        return torch.zeros_like(n)
    if granularity == "block":
        return n // BLOCK_Q[tiling]
    if granularity == "warp":
        return n // rows
    if granularity == "thread":
        return n // rows * 8 + n % 8
    return n


def key_groups(length: int, granularity: Granularity, tiling: Tiling, device: torch.device) -> Tensor:
    """Group index of each key token, int64 [length].

    "thread": a thread owns columns 2j and 2j+1 of every 8-column fragment, so the keys of one tile with
    equal (n % 8) // 2 share a scale. "warp" equals "block": all warps of a CTA read the same keys.
    """
    n = torch.arange(length, device=device)
    block = BLOCK_K[tiling]
    if granularity == "tensor":
        return torch.zeros_like(n)
    if granularity in ("block", "warp"):
        return n // block
    if granularity == "thread":
        return n // block * 4 + n % 8 // 2
    return n


def quantize_int(x: Tensor, bits: int, groups: Tensor, share_heads: bool = False) -> Quantized:
    """Symmetric integers of so many bits, at most 8, one scale per group of tokens.

    x: float [B, H, N, D]; groups: int64 [N]. share_heads: one scale for all heads too (per-tensor).
    scale = amax / qmax, values = round_to_nearest_even(x * (qmax / amax)), qmax = 2 ** (bits - 1) - 1.
    A token that holds NaN or infinity gets scale NaN and does not count for its group: it stays in its row.
    """
    qmax = float(2 ** (bits - 1) - 1)
    x = x.float()
    amax = x.abs().amax(dim=-1)  # [B, H, N]
    finite = torch.isfinite(amax)
    amax = torch.where(finite, amax, 0.0)
    if share_heads:
        amax = amax.amax(dim=1, keepdim=True).expand_as(amax)
    if amax.shape[-1]:
        count = int(groups.max()) + 1  # in "thread" groups the last token need not be in the last group
        index = groups.expand_as(amax)
        per_group = torch.zeros(*amax.shape[:-1], count, device=x.device).scatter_reduce_(
            -1, index, amax, "amax", include_self=True
        )
        amax = per_group.gather(-1, index)
    zero = amax < _TINY
    scale = torch.where(zero, 1.0, amax / qmax)
    inverse = torch.where(zero, 0.0, qmax / amax.clamp_min(_TINY))
    values = torch.round(x * inverse[..., None]).clamp_(-qmax, qmax).nan_to_num_(0.0).to(torch.int8)
    return Quantized(values, torch.where(finite, scale, math.nan))


def round_e4m3(x: Tensor) -> Tensor:
    """x rounded to E4M3 (nearest even, saturating at 448), kept as float32.

    Adding and subtracting 1.5 * 2^20 * 2^e leaves a float32 with three mantissa bits below its leading one;
    below 2^-6 the step is the fixed 2^-9 of E4M3's subnormals. Ten times faster on a CPU than converting to
    float8_e4m3fn and back, and equal to it bit for bit (tested over all of its range).
    """
    x = x.float().clamp(-E4M3_MAX, E4M3_MAX)
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # 2^e, sign dropped
    magic = power.clamp_min_(2.0**-6).mul_(1.5 * 2.0**20)
    return x.add_(magic).sub_(magic) if not x.requires_grad else (x + magic) - magic


def quantize_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per-channel E4M3. x: float [B, H, N, D] -> (values float32 holding E4M3 numbers, scale [B, H, 1, D]).

    An all-zero channel has scale 1 and stays exactly zero; NaN and infinity become NaN and leave the scale alone.
    """
    x = x.float()
    finite = torch.isfinite(x)
    amax = (
        torch.where(finite, x.abs(), 0.0).amax(dim=-2, keepdim=True)
        if x.shape[-2]
        else x.new_zeros(*x.shape[:-2], 1, x.shape[-1])
    )
    zero = amax < _TINY
    scale = torch.where(zero, 1.0, amax / E4M3_MAX)
    inverse = torch.where(zero, 0.0, E4M3_MAX / amax.clamp_min(_TINY))
    return torch.where(finite, round_e4m3(x * inverse), math.nan), scale


def subtract_mean(x: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """(x - mean, mean) over the visible tokens, in float32; hidden tokens become zero.

    x: [B, H, N, D]; visible: bool [B or 1, H or 1, N] or None; mean: [B, H, 1, D], zero if nothing is visible.
    """
    x = x.float()
    if visible is None:
        mean = _finite(x.mean(dim=-2, keepdim=True))
        return x - mean, mean
    x = hide(x, visible)
    count = visible.sum(dim=-1, keepdim=True)[..., None].clamp_min(1)
    mean = _finite(x.sum(dim=-2, keepdim=True) / count)
    return torch.where(visible[..., None], x - mean, 0.0), mean


def subtract_significant_mean(x: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """V's smoothing: as `subtract_mean`, but zero instead of the mean in channels where eight times its magnitude does
    not reach the largest visible value.

    E4M3 is densest around zero, so a small mean buys nothing; and values that lie on a grid already (an FP8 cache, FP8
    weights) would leave it by an arbitrary amount, after which equal values round alike and their errors add up.
    """
    centred, mean = subtract_mean(x, visible)
    if not x.shape[-2]:
        return centred, mean
    x = hide(x.float(), visible)
    mean = torch.where(mean.abs() * V_SIGNIFICANCE >= x.abs().amax(dim=-2, keepdim=True), mean, 0.0)
    return hide(x - mean, visible), mean


def subtract_block_mean(q: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(q - mean, mean) per block of query rows, float32; both [B, H, N, D] (SageAttention2 section 3.1)."""
    q = q.float()
    length = q.shape[-2]
    groups = torch.arange(length, device=q.device) // block
    count = int(groups[-1]) + 1
    sums = q.new_zeros(*q.shape[:-2], count, q.shape[-1]).index_add_(-2, groups, q)
    mean = _finite(sums / torch.bincount(groups, minlength=count)[:, None]).index_select(-2, groups)
    return q - mean, mean


def _finite(mean: Tensor) -> Tensor:
    """Any constant vector may be subtracted; one that is not finite would spread one bad token to all."""
    return torch.where(torch.isfinite(mean), mean, 0.0)


def hide(x: Tensor, visible: Tensor | None) -> Tensor:
    """x with hidden tokens set to zero by selection, so that NaN in them is gone too."""
    return x if visible is None else torch.where(visible[..., None], x, 0.0)
