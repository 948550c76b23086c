"""The index maps of the K and V tile images and of mask bits: the same truth as cuda_kernels/tile_image.h.

An image holds one block of 128 tokens of one head as the attention kernel reads it: swizzled for wgmma, V
transposed and its tokens ordered so that the registers holding the scores are the registers holding P.
The maps are tensors of byte offsets, so that an image is packed or unpacked by one gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_TOKENS = 128
SCALE_GROUPS = 4
V_PITCH = 128
HALF_PANEL = 64
MEAN_SAMPLES = 64
MEAN_GROUPS = 16
V_SIGNIFICANCE = 8.0  # a V channel is shifted if its mean is at least 1 / this of its largest value (quantize.cu)


def swizzle(row: Tensor, byte: Tensor, pitch: int) -> Tensor:
    """wgmma's shared-memory swizzle for rows of 128 or 64 bytes: the 16-byte chunk index XOR bits of the row."""
    x = row & 7 if pitch == 128 else (row >> 1) & 3
    return row * pitch + (((byte >> 4) ^ x) << 4) + (byte & 15)


def k_group(token: Tensor) -> Tensor:
    """Which of the four INT8 scales of a K image a token uses."""
    return token % 8 // 2


def v_position(token: Tensor) -> Tensor:
    """Where a token stands in a V^T row: in each 16 tokens position 4c + t holds {2c, 2c+1, 2c+8, 2c+9}[t]."""
    return (token & ~15) | ((token & 7) // 2 * 4) | ((token & 8) // 4) | (token & 1)


def v_token(position: Tensor) -> Tensor:
    """The inverse of v_position."""
    return (position & ~15) | ((position & 15) // 4 * 2) | ((position & 2) * 4) | (position & 1)


def _grid(dim: int) -> tuple[Tensor, Tensor]:
    return torch.arange(TILE_TOKENS)[:, None], torch.arange(dim)[None, :]


def k_offsets(dim: int) -> Tensor:
    """Byte offset of (token, channel) in a K image, int64 [128, dim]; dim 64, 128, or 256 in two panels of 128."""
    token, channel = _grid(dim)
    if dim <= 128:
        return swizzle(token, channel, dim)
    return channel // 128 * (TILE_TOKENS * 128) + swizzle(token, channel % 128, 128)


def v_offsets(dim: int) -> Tensor:
    """Byte offset of (token, channel) in an E4M3 V image, int64 [128, dim]."""
    token, channel = _grid(dim)
    return swizzle(channel, v_position(token), V_PITCH)


def v16_offsets(dim: int) -> Tensor:
    """Byte offset of (token, channel) in a 16-bit V image, int64 [128, dim]."""
    token, channel = _grid(dim)
    return channel // HALF_PANEL * (TILE_TOKENS * 128) + swizzle(token, channel % HALF_PANEL * 2, 128)


def mask_word(row: Tensor, c: Tensor) -> Tensor:
    """Which of the 256 words of mask bits of 64 rows and a key tile is word c of a row."""
    return row // 16 * 64 + row % 8 * 8 + c * 2 + row // 8 % 2


def mask_bit(column: Tensor) -> Tensor:
    """Which bit of its word a column (key of the tile) is; the word is column % 8 // 2."""
    return column // 8 * 2 + column % 2


def mean_tokens(length: int) -> Tensor:
    """The tokens a smoothing vector is the mean of: min(length, 64) spread over the visible ones, int64."""
    n = min(length, MEAN_SAMPLES)
    return torch.arange(n) * length // max(n, 1)


def samples(x: Tensor, seen: Tensor | None = None) -> Tensor:
    """The sampled tokens of x [..., tokens, channels], float32. Non-finite values become zero, and so do tokens that
    `seen` (bool [tokens]) leaves out."""
    tokens = mean_tokens(x.shape[-2]).to(x.device)
    rows = x[..., tokens, :].float()
    rows = torch.where(rows.isfinite(), rows, 0.0)
    return rows if seen is None else torch.where(seen[tokens, None], rows, 0.0)


def sampled_mean(x: Tensor, seen: Tensor | None = None) -> Tensor:
    """The kernel's smoothing vector of x [..., tokens, channels], float32 [..., channels], bit for bit: partial sum g
    adds samples g, g + 16, g + 32, g + 48 in that order, the 16 partial sums are added in order, and the total is
    divided by the number of samples. Non-finite values count as zero. Samples that `seen` (bool [tokens]) leaves out do
    not count at all. No samples: zeros."""
    rows = samples(x, seen)
    count = rows.shape[-2] if seen is None else int(seen[mean_tokens(x.shape[-2]).to(x.device)].sum())
    total = torch.zeros(*x.shape[:-2], x.shape[-1], dtype=torch.float32, device=x.device)
    if count == 0:
        return total
    for g in range(MEAN_GROUPS):
        partial = torch.zeros_like(total)
        for s in range(g, rows.shape[-2], MEAN_GROUPS):
            partial = partial + rows[..., s, :]
        total = total + partial
    return total / count


def v_mean(x: Tensor, seen: Tensor | None = None) -> Tensor:
    """V's smoothing vector: the sampled mean, or zero in channels where it is below an eighth of the largest sample
    (the mean is then mostly sampling noise, and E4M3 is least biased around zero)."""
    mean = sampled_mean(x, seen)
    if x.shape[-2] == 0:
        return mean
    top = samples(x, seen).abs().amax(-2)
    return torch.where(mean.abs() * V_SIGNIFICANCE >= top, mean, 0.0)
