"""Single GPU instructions on float32 tensors, computed through float64 on any device.

What the hardware defines exactly (fma, the conversions to E4M3 and to half types) is reproduced bit for bit; of the
approximate exponential only its error bound is public, so it is modelled as correctly rounded, with that bound as a
band.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Error bound of ex2.approx.ftz.f32 over its full range, in units of the last place (PTX ISA, "ex2").
EX2_ULPS = 2
_SMALLEST_NORMAL = 2.0**-126


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32 tensors, rounded once.

    The product is exact in float64. The sum may be inexact there and would then be rounded twice, so it is first
    rounded to odd: a last bit that is odd remembers that something was cut off, and no tie can appear that is none.
    """
    product, addend = torch.broadcast_tensors(a.double() * b.double(), c.double())
    total = product + addend
    part = total - product  # the error of the sum, exactly (Knuth's two-sum)
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error != 0) & error.isfinite() & (bits & 1 == 0), bits + towards, bits)
    return odd.view(torch.float64).float()


def exp2(x: Tensor) -> Tensor:
    """2^x for float32 x, correctly rounded; results below the normal range are flushed to zero (ex2.approx.ftz)."""
    y = torch.exp2(x.double()).float()
    return torch.where(y < _SMALLEST_NORMAL, torch.zeros_like(y), y)


def exp2_band(x: Tensor, ulps: int = EX2_ULPS) -> tuple[Tensor, Tensor]:
    """The least and the greatest float32 that the hardware may return for 2^x. Zero stays zero, NaN stays NaN."""
    y = exp2(x)
    positive = y > 0
    bits = y.view(torch.int32)
    low = torch.where(positive, (bits - ulps).clamp_min(0), bits).view(torch.float32)
    high = torch.where(positive & y.isfinite(), bits + ulps, bits).view(torch.float32)
    return low, high


def e4m3_code(x: Tensor) -> Tensor:
    """float32 -> E4M3 codes, uint8: nearest even, saturating at 448, NaN is 0x7F (cvt.rn.satfinite.e4m3x2.f32)."""
    code = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), torch.full_like(code, 0x7F), code)


def e4m3_value(code: Tensor) -> Tensor:
    """uint8 E4M3 codes -> float32."""
    return code.view(torch.float8_e4m3fn).float()


def to_half(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 -> float16 or bfloat16, nearest even; what overflows becomes the largest finite number, as the
    kernel's conversions do (cvt.rn.satfinite)."""
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).to(dtype)
