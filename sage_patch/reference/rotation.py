"""The rotation of Q and K before they are quantized. The kernels do K in another order of work (emulator/rotation.py).

A Hadamard matrix H has entries of +-1 and H H^T = width * I, so (q H) . (k H) = width * (q . k): scores stay what they
were, while a channel that is larger than the others is spread over all of them and no longer sets their scale (QuaRot,
arXiv 2404.00456, applied to attention). It comes after smoothing and before the one rounding, in float32:

1. channels past head_dim are zero: the width is the next power of two, 64 at least, which is what the kernels hold;
2. each number is divided by the width: exact (a power of two), and no sum of the next steps can overflow;
3. butterflies (a, b) -> (a + b, a - b) over channels 1, 2, 4, .. width / 2 apart, in this order, each sum rounded to
   float32. A thread holds 8 neighbouring channels, so the first three steps stay in its registers and the others are
   one exchange with the lane 1, 2, 4, .. apart, who keeps a + b if its bit is not set, else a - b.

The product of two such vectors is 1 / width of what it was; `rotated_width` goes into the softmax scale, again exactly.
No matrix is normalized by a square root anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_WIDTH = 64


def rotated_width(head_dim: int) -> int:
    """Channels of a rotated vector: head_dim's next power of two, at least 64."""
    return max(MIN_WIDTH, 1 << (head_dim - 1).bit_length())


def rotate(x: Tensor) -> Tensor:
    """x [.., head_dim] -> float32 [.., rotated_width(head_dim)]: its zero-padded vectors times H / width.

    A vector that holds NaN or infinity becomes one of NaN and infinities; zeros stay zeros.
    """
    width = rotated_width(x.shape[-1])
    x = torch.nn.functional.pad(x.float(), (0, width - x.shape[-1])) * (1.0 / width)
    distance = 1
    while distance < width:
        a, b = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        distance *= 2
    return x


def rotate_back(x: Tensor, head_dim: int) -> Tensor:
    """What `rotate` made x [.., width] of, but for rounding: float32 [.., head_dim]."""
    return (rotate(x) * x.shape[-1])[..., :head_dim]
