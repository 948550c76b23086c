"""The attention of picture.py: a free function with rotary positions."""

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, pe: Tensor) -> Tensor:
    q, k = apply_rope(q, k, pe)
    x = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return x.transpose(1, 2).flatten(2)


def rope(length: int, dim: int) -> Tensor:
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
    out = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], dim=-1)
    return out.unflatten(-1, (2, 2))[None, None]


def apply_rope(q: Tensor, k: Tensor, pe: Tensor) -> tuple[Tensor, Tensor]:
    def turn(x: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (-1, 1, 2))
        return (pe[..., 0] * pairs[..., 0] + pe[..., 1] * pairs[..., 1]).reshape(x.shape)

    return turn(q), turn(k)
