"""The sums inside Hopper's tensor core, bit for bit as far as they have been observed.

Found on an H200: first by single FP8 instructions (which bits survive), then by attention outputs and row sums, which
this rule reproduces to the last bit and its neighbours (alignment to the value of a product, steps of half as many
keys, a bit more or less, no cut of the result) do not. One instruction adds 32 E4M3 or 16 FP16 products:

1. A product has the exponent that its factors' exponents add up to, although its value may be up to four times 2^that.
2. The largest exponent, the accumulator's included, sets the step: 2^-13 of it (FP16: 2^-25). Every term is cut toward
   zero at the step.
3. The sum of what is left is exact, and is cut toward zero once more, at 2^-13 (FP16: 2^-23) of its own leading
   power of two.

A subnormal factor counts with the smallest normal exponent (E4M3: -6), whatever its value; attention with peaked
probabilities shows it. The order of the terms of one instruction does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_ACCUMULATOR_BITS = 13
_NOTHING = -1000.0  # exponent of zero


@dataclass(frozen=True)
class Accumulator:
    keys: int  # products of one instruction
    bits: int  # fraction bits that a term keeps below the largest exponent
    result_bits: int  # fraction bits of the sum
    min_exponent: int  # of a factor that is not zero


FP8 = Accumulator(32, FP8_ACCUMULATOR_BITS, FP8_ACCUMULATOR_BITS, -6)
FP16 = Accumulator(16, 25, 23, -14)


def _exponent(x: Tensor) -> Tensor:
    """floor(log2 |x|), exactly; float64, far below everything for zero."""
    return torch.where(x == 0, _NOTHING, torch.frexp(x).exponent.double() - 1)


def _power(exponent: Tensor) -> Tensor:
    return torch.exp2(exponent.clamp_min(_NOTHING / 2))


def accumulate(products: Tensor, acc: Tensor, exponents: Tensor | None = None, kind: Accumulator = FP8) -> Tensor:
    """One instruction: acc + sum(products).

    products float64 [..., K, N], acc float64 [..., N]; exponents [..., K, N]: the sums of the factors' exponents,
    or None where the factors are powers of two or unknown.
    """
    if exponents is None:
        exponents = _exponent(products)
    exponents = torch.where(products == 0, _NOTHING, exponents)
    largest = torch.maximum(exponents.amax(dim=-2), _exponent(acc))
    step = _power(largest - kind.bits)
    total = (torch.trunc(products / step.unsqueeze(-2)).sum(dim=-2) + torch.trunc(acc / step)) * step
    last = _power(_exponent(total) - kind.result_bits)
    return torch.trunc(total / last) * last


def product(p: Tensor, v: Tensor, start: Tensor | None = None, kind: Accumulator = FP8) -> Tensor:
    """start + P V of one tile, `kind.keys` keys an instruction in order; float32 [..., rows, channels].

    p [..., rows, keys] and v [..., keys, channels] hold E4M3 or FP16 numbers in any float type; start float32 or None
    for an empty accumulator.
    """
    p, v = p.double(), v.double()
    shape = torch.broadcast_shapes(p.shape[:-2], v.shape[:-2])
    acc = torch.zeros(*shape, p.shape[-2], v.shape[-1], dtype=torch.float64, device=p.device)
    if start is not None:
        acc = acc + start.double()
    p_exponent, v_exponent = (torch.where(x == 0, _NOTHING, _exponent(x).clamp_min(kind.min_exponent)) for x in (p, v))
    for first in range(0, p.shape[-1], kind.keys):
        keys = slice(first, first + kind.keys)
        exponents = p_exponent[..., keys, None] + v_exponent[..., None, keys, :]
        acc = accumulate(p[..., keys, None] * v[..., None, keys, :], acc, exponents, kind)
    return acc.float()
