"""The pre-processing kernel in PyTorch, bit for bit, from a workspace's bytes or from the inputs. For tests only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sage_patch.reference import tile_image as ti

TINY = 1e-30


@dataclass
class Prepared:
    """Per (batch x kv head): images, scales and smoothing vectors as the attention kernel reads them."""

    k: Tensor  # int8 [heads, blocks, 128, dim]
    k_scale: Tensor  # [heads, blocks, 4]
    v: Tensor  # fp8: uint8 codes, fp16: float16 [heads, blocks, 128, dim]
    k_mean: Tensor  # [heads, dim]
    v_mean: Tensor
    v_scale: Tensor


def from_workspace(raw: Tensor, heads: int, blocks: int, dim: int, fp16: bool) -> Prepared:
    """Unpacks the workspace (layout: place() in cuda_kernels/api.cu)."""
    raw = raw.cpu()
    at = 0

    def take(count: int, dtype: torch.dtype) -> Tensor:
        nonlocal at
        size = count * dtype.itemsize
        piece = raw[at : at + size].clone().view(dtype)
        at += (size + 255) // 256 * 256
        return piece

    tokens = ti.TILE_TOKENS
    k = (
        take(heads * blocks * tokens * dim, torch.uint8)
        .view(heads, blocks, -1)[:, :, ti.k_offsets(dim)]
        .view(torch.int8)
    )
    v_bytes = take(heads * blocks * tokens * dim * (2 if fp16 else 1), torch.uint8).view(heads, blocks, -1)
    if fp16:
        v = v_bytes.view(torch.float16)[:, :, ti.v16_offsets(dim) // 2]
    else:
        v = v_bytes[:, :, ti.v_offsets(dim)]
    k_scale = take(heads * blocks * 4, torch.float32).view(heads, blocks, 4)
    vectors = []
    for _ in range(3):
        padded = (heads * dim * 4 + 255) // 256 * 64
        vectors.append(take(padded, torch.float32)[: heads * dim].view(heads, dim))
    return Prepared(k, k_scale, v, *vectors)


def prepare(key: Tensor, value: Tensor, keys: list[int], dim: int, fp16: bool, smooth_v: bool) -> Prepared:
    """key, value [batch, kv_heads, tokens, head_dim]; keys: the visible length of each item."""
    key, value = key.cpu(), value.cpu()
    batch, heads, length, d = key.shape
    blocks = (length + 127) // 128
    out = Prepared(
        torch.zeros(batch * heads, blocks, 128, dim, dtype=torch.int8),
        torch.zeros(batch * heads, blocks, 4),
        torch.zeros(batch * heads, blocks, 128, dim, dtype=torch.float16 if fp16 else torch.uint8),
        torch.zeros(batch * heads, dim),
        torch.zeros(batch * heads, dim),
        torch.zeros(batch * heads, dim),
    )
    group = ti.k_group(torch.arange(128))
    for b in range(batch):
        n = keys[b]
        used = (n + 127) // 128
        for h in range(heads):
            i = b * heads + h
            k, v = key[b, h, :n].float(), value[b, h, :n].float()
            out.k_mean[i, :d] = ti.sampled_mean(k)
            k = k - out.k_mean[i, :d]
            k = torch.nn.functional.pad(k, (0, dim - d, 0, used * 128 - n)).view(used, 128, dim)
            for g in range(4):
                amax = k[:, group == g].abs().amax((1, 2))
                tiny = amax < TINY
                inverse = torch.where(
                    tiny, 0.0, torch.full_like(amax, 127.0) / amax
                )  # 127 / tensor would multiply by a reciprocal
                out.k_scale[i, :used, g] = torch.where(tiny, 0.0, amax * torch.tensor(1.0 / 127.0))
                out.k[i, :used, group == g] = (
                    (k[:, group == g].double() * inverse[:, None, None]).round().to(torch.int8)
                )
            if smooth_v:
                out.v_mean[i, :d] = ti.v_mean(v)
            v = v - out.v_mean[i, :d]
            amax = v.abs().amax(0) if n else torch.zeros(d)
            tiny = amax < TINY
            if fp16:
                scale = torch.exp2(torch.frexp(amax).exponent.float() - 1)
                inverse = torch.ones_like(scale) / scale
            else:
                scale, inverse = amax * torch.tensor(1.0 / 448.0), torch.full_like(amax, 448.0) / amax
            out.v_scale[i, :d] = torch.where(tiny, 0.0, scale)
            v = v * torch.where(tiny, 0.0, inverse)
            v = torch.nn.functional.pad(v, (0, dim - d, 0, used * 128 - n)).view(used, 128, dim)
            out.v[i, :used] = v.half() if fp16 else v.to(torch.float8_e4m3fn).view(torch.uint8)
    return out
