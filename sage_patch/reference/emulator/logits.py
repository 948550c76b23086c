"""Float logits of the Hopper kernels, where softcap, an additive mask or Q's mean changes scores before the softmax.

For tests. Source: logits.cuh. An additive mask and Q's mean alone are IEEE arithmetic and equal the hardware's bits.
Softcap takes two approximate instructions, so each of its logits comes with a bound of how far the hardware's may lie
from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sage_patch.reference import quantize
from sage_patch.reference.emulator.float32 import EX2_ULPS, exp2, fma

LOG2E = torch.tensor(quantize.LOG2E)  # float32, as kLog2e
LN2 = 0.6931471805599453
HIDDEN = -(2**31)  # an int32 score that a row does not see
ULP = 2.0**-23  # of float32, relative, at most
RCP_ULPS = 1  # error bound of rcp.approx.ftz.f32 (PTX ISA, "rcp")


@dataclass
class Logits:
    """Of tiles that leave the integer scores; shapes [batch, heads, q_len, ..]."""

    used: Tensor  # bool [.., tiles]
    x: Tensor  # float32 [.., n], log2 units; -inf: the row does not see the key
    error: Tensor  # float32 [.., n]: the hardware's logit is within x - error .. x + error


def logits(
    scores: Tensor,
    steps: Tensor,
    dot: Tensor,
    softcap: float,
    bias: Tensor | None,
    biased: Tensor,
    correction: Tensor | None = None,
    every_tile: bool = False,
) -> Logits | None:
    """None where no tile needs them.

    scores int32 and steps float32 (log2 units of one integer) [batch, heads, q_len, n]; dot float32 [batch, heads,
    q_len]: scale * q . k_mean, which softcap must see; bias, biased: Pattern's; correction float32 [batch, heads,
    q_len, n]: what Q's mean adds to each key's logit; every_tile: all tiles leave the integers.
    """
    if not softcap and bias is None and not every_tile:
        return None
    x = scores.float() * steps if correction is None else fma(scores.float(), steps, correction)
    error = torch.zeros_like(x)
    used = biased.expand(*x.shape[:3], -1)
    if softcap:
        x, error = softcapped(x, dot[..., None] * LOG2E, softcap)
    if softcap or every_tile:
        used = torch.ones_like(used)
    if bias is not None:
        here = biased.repeat_interleave(x.shape[-1] // biased.shape[-1], -1)
        with_bias = fma(bias, LOG2E, x)
        error = torch.where(here & (error > 0), error + ULP * with_bias.abs(), error)
        x = torch.where(here, with_bias, x)
    hidden = scores == HIDDEN
    x = torch.where(hidden, -torch.inf, x)
    return Logits(used, x, torch.where(hidden | ~error.isfinite(), 0.0, error))


def softcapped(x: Tensor, shift: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """cap * tanh((x + shift) / cap) in log2 units, as cap - 2 cap / (1 + 2^(k (x + shift))), and its error bound.

    The bound follows the steps: the sum (which the compiler may fuse with either product), k's product, the
    exponential e, 1 + e, the reciprocal r, the last fma. A relative error of e counts (1 - r) times in r, and r counts
    2 cap times.
    """
    cap, k = torch.tensor(softcap) * LOG2E, torch.tensor(2.0) / torch.tensor(softcap)
    total = x + shift
    t = k * total
    e = exp2(t)
    r = 1.0 / (1.0 + e)
    r = torch.where(r < torch.finfo(torch.float32).tiny, 0.0, r)
    y = fma(-2.0 * cap, r, cap)
    total_error = ULP / 2 * (x.abs() + shift.abs()) + ULP * total.abs()
    e_error = LN2 * (k * total_error + ULP * t.abs()) + (EX2_ULPS + 1) * ULP
    r_error = (1.0 - r) * e_error + (RCP_ULPS + 1) * ULP
    # r and r's error are zero where e overflows: the answer is cap
    error = 2.0 * cap * torch.where(r == 0, 0.0, r * r_error) + ULP * y.abs()
    return y, error
