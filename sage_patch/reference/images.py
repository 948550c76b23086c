"""Keys and values as they travel between processes on a CPU: quantized once, bytes that attention reads elsewhere.

The compiled kernels send what their pre-processing leaves in a workspace; here it is the same numbers in token order,
beside a scale for each key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sage_patch.recipes import Recipe
from sage_patch.reference.attention import Keys, prepare_keys
from sage_patch.reference.rotation import rotated_width
from sage_patch.reference.visibility import Visibility

_ALIGNMENT = 256
_F32 = torch.float32


def _fields(
    shape: tuple[int, ...], v_head_dim: int, dtype: torch.dtype, recipe: Recipe
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """(field of Keys, shape, dtype as sent), wide elements first. shape, dtype: the key's."""
    batch, heads, tokens, head_dim = shape
    width = rotated_width(head_dim) if recipe.rotate != "none" else head_dim
    is_half = dtype in (torch.float16, torch.bfloat16)
    half = torch.float8_e4m3fn if recipe.pv == "fp8" else dtype if is_half else torch.float16
    per_channel = (batch, heads, 1, v_head_dim)
    fields: list[tuple[str, tuple[int, ...], torch.dtype]] = [("k_scale", (batch, heads, tokens), _F32)]
    fields += [("k_mean", (batch, heads, 1, head_dim), _F32)] * recipe.smooth_k
    fields += [("v_scale", per_channel, _F32)] * (recipe.pv == "fp8" or not is_half)
    fields += [("v_mean", per_channel, _F32)] * (recipe.pv == "fp8" and recipe.smooth_v)
    return [*fields, ("v", (batch, heads, tokens, v_head_dim), half), ("k", (batch, heads, tokens, width), torch.int8)]


def size(shape: tuple[int, ...], v_head_dim: int, dtype: torch.dtype, recipe: Recipe) -> int:
    """Bytes of the image of keys [B, Hkv, tokens, D] of this shape and dtype; a multiple of 256."""
    sizes = (math.prod(dims) * kind.itemsize for _, dims, kind in _fields(shape, v_head_dim, dtype, recipe))
    return -(-sum(sizes) // _ALIGNMENT) * _ALIGNMENT


def pack(key: Tensor, value: Tensor, recipe: Recipe) -> Tensor:
    """key and value [B, Hkv, tokens, D] under a recipe that does not smooth Q, as uint8 [size]."""
    keys = prepare_keys(key.contiguous(), value.contiguous(), Visibility(1, key.shape[2]), recipe)
    shape, v_head_dim, dtype = tuple(key.shape), value.shape[3], key.dtype
    parts = [
        getattr(keys, name).to(kind).contiguous().flatten().view(torch.uint8)
        for name, _, kind in _fields(shape, v_head_dim, dtype, recipe)
    ]
    raw = torch.cat(parts)
    return torch.nn.functional.pad(raw, (0, size(shape, v_head_dim, dtype, recipe) - raw.numel()))


def unpack(raw: Tensor, shape: tuple[int, ...], v_head_dim: int, dtype: torch.dtype, recipe: Recipe) -> Keys:
    """What `pack` was given, quantized."""
    found: dict[str, Tensor | None] = {"k_mean": None, "v_scale": None, "v_mean": None}
    at, half = 0, _F32
    for name, dims, kind in _fields(shape, v_head_dim, dtype, recipe):
        end = at + math.prod(dims) * kind.itemsize
        part = raw[at:end].view(kind).view(dims)
        half = part.dtype if name == "v" and recipe.pv == "fp16" else half
        found[name], at = part.float(), end
    return Keys(k_smooth=None, half=half, **found)  # type: ignore[arg-type]
