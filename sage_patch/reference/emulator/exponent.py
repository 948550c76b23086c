"""The exponents `duo` and `chord`: 2^x from the bits of an integer product, as cuda_kernels/exponent.cuh forms it.

Every bit is defined: integer arithmetic modulo 2^32 and conversions. Which tiles are formed so: those that all rows of
a warpgroup see whole, of integer scores, where no row of the warp could be too far below its reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sage_patch.reference.emulator import tile_image as ti
from sage_patch.reference.emulator.float32 import e4m3_code, fma

OCTAVE, MAGIC = 2.0**23, 12582912.0
REACH_LIMIT = 125.0  # octaves
REACH = 127.0 * 7.0 / 6.0
FURTHEST, LARGEST_STEP = 820.0, 0.25
BIAS = {"duo": 125.94257, "chord": 126.94257}  # 127 less log2 of what the chords are too large on average
ROOT = 181 / 256  # 2^-0.5 in half precision
HALF_OCTAVE = 512  # units of half precision
WARP_ROWS = 16


def reaches(q: Tensor, q_scale: Tensor) -> Tensor:
    """The bound of each row of quantized q [.., q_len, dim], in units that K's scale makes octaves; NaN: unknown."""
    bound = q.abs().sum(-1, dtype=torch.int32).float() * torch.tensor(REACH) * q_scale
    return torch.where(q_scale < 0, torch.nan, bound)


def near_tiles(scores: Tensor, steps: Tensor, m: Tensor, reach: Tensor, k_scale: Tensor) -> Tensor:
    """bool [.., q_len, tiles]: no row of the row's warp is too far below its reference in the tile.

    scores int32 and steps [.., q_len, n], m [.., q_len, tiles] after each tile, reach [.., q_len], k_scale
    [.., tiles, 4]."""
    by_bound = torch.ones_like(m, dtype=torch.bool)
    by_scores = by_bound.clone()
    split = (m.shape[-1], ti.TILE_TOKENS)
    groups = ti.k_group(torch.arange(ti.TILE_TOKENS))
    for c in range(ti.SCALE_GROUPS):
        least, g = (x.unflatten(-1, split)[..., groups == c] for x in (scores, steps))
        least, g = least.amin(-1), g[..., 0]
        by_bound &= fma(reach[..., None], k_scale[..., None, :, c], m) < REACH_LIMIT
        held = (m.abs() < FURTHEST) & (g >= 0) & (g < LARGEST_STEP)
        by_scores &= (fma(-least.float(), g, m) < REACH_LIMIT) & held
    return all_of(by_bound, WARP_ROWS) | all_of(by_scores, WARP_ROWS)


def all_of(x: Tensor, size: int) -> Tensor:
    """bool [.., q_len, tiles] -> whether all rows of the row's `size` have it, as far as they exist."""
    q_len = x.shape[-2]
    groups = (q_len + size - 1) // size
    x = torch.nn.functional.pad(x, (0, 0, 0, groups * size - q_len), value=True).unflatten(-2, (groups, size))
    return x.all(-2).repeat_interleave(size, dim=-2)[..., :q_len, :]


def codes(scores: Tensor, steps: Tensor, m: Tensor, exp: str) -> Tensor:
    """E4M3 codes uint8 [.., n] of int32 scores and steps [.., n] in tiles with references m [.., tiles]."""
    magic = torch.tensor(MAGIC)
    factor = _bits(fma(steps, torch.tensor(OCTAVE), magic)) - _bits(magic)
    bias = torch.tensor(BIAS[exp]) * 4096 + magic
    start = _bits(fma(m, torch.tensor(-4096.0), bias)) << 11
    t = scores.long() * factor + start.repeat_interleave(ti.TILE_TOKENS, -1)
    return codes_of_bits(((t + 2**31) % 2**32 - 2**31).int(), exp)


def codes_of_bits(t: Tensor, exp: str) -> Tensor:
    """E4M3 codes of int32 bit patterns, 2^23 an octave; negative patterns are zero."""
    value = t.clamp_min(0).view(torch.float32)
    if exp == "chord":
        return e4m3_code(value)
    half = value.half()
    later = (half.view(torch.int16) + HALF_OCTAVE).view(torch.float16)
    return e4m3_code((later.float() * ROOT + half.float()).half().float())  # exact in float32, rounded once


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32).long()
