"""The rotation of 16-bit rows in the kernels: half on the tensor cores, half in registers, bit for bit.

A Hadamard matrix is a product of one factor for each bit of the channel's number, in any order. The kernels
(cuda_kernels/rotation.cuh, `rotate_piece`) take the vectors as they lie in memory, over the width, and

1. bits 0 and 2 to 4: one instruction of the tensor core adds 16 products with +-1 / width, each exact, and what the sum
   starts from: minus the mean, turned by these bits in float32 (over the width first, then bits 0, 2, 3, 4);
2. bits 1, 5, 6, 7: butterflies (a, b) -> (a + b, a - b), each sum rounded to float32.

The sum of 16 is that of an H200 (accumulator.py). Other cards may cut it elsewhere: their last bits differ where the
sum is not exact.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sage_patch.reference.emulator.accumulator import FP16, product
from sage_patch.reference.rotation import rotated_width

_PRODUCTS = (1, 4, 8, 16)  # distances of the channels that an instruction adds
BF16 = replace(FP16, min_exponent=-126)


def butterflies(x: Tensor, distance: int) -> Tensor:
    """(a, b) -> (a + b, a - b) of channels so far apart."""
    a, b = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
    return torch.stack([a + b, a - b], dim=-2).flatten(-3)


def rotate_rows(x: Tensor, mean: Tensor) -> Tensor:
    """x [rows, head_dim], float16 or bfloat16, less its mean [head_dim], float32, rotated: float32 [rows, width]."""
    width = rotated_width(x.shape[-1])
    pad = (0, width - x.shape[-1])
    start = torch.nn.functional.pad(mean, pad) * (-1.0 / width)
    for distance in _PRODUCTS:
        start = butterflies(start, distance)
    # [rows, pieces of 32, channels of a product, bit 1]
    rows = _apart(torch.nn.functional.pad(x, pad))
    signs = torch.eye(16)
    for distance in (1, 2, 4, 8):
        signs = butterflies(signs, distance)
    kind = FP16 if x.dtype == torch.float16 else BF16
    sums = product(rows.transpose(-1, -2), signs / width, _apart(start[None]).transpose(-1, -2), kind)
    turned = _together(sums.transpose(-1, -2))
    distance = 2
    while distance < width:
        turned = turned if distance in _PRODUCTS else butterflies(turned, distance)
        distance *= 2
    return turned


def _apart(x: Tensor) -> Tensor:
    """[rows, width] -> [rows, width / 32, 16, 2]: bit 1 of the channel last."""
    return x.unflatten(-1, (-1, 8, 2, 2)).transpose(-1, -2).flatten(-3, -2)


def _together(x: Tensor) -> Tensor:
    return x.unflatten(-2, (8, 2)).transpose(-1, -2).flatten(-4)
