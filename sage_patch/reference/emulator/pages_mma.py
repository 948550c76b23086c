"""The mma.sync kernels' attention over pages on the CPU: what differs from Hopper's, which pages.py follows.

Keys are taken 64 at a time. V's E4M3 codes are multiplied as FP16, exactly, and so P is FP16: a page's bytes are the
same on every card, its sums are not. Row sums are those of P before its rounding. Source:
cuda_kernels/pages_attend_mma.cuh. Exponents are formed as forward_mma.py says. What the tensor core's own sums round is
not followed: 64 exact products are rounded once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sage_patch.args import PageArgs
from sage_patch.reference import pages as reference
from sage_patch.reference.emulator import pages
from sage_patch.reference.emulator.float32 import e4m3_value, exp2, fma, to_half
from sage_patch.reference.emulator.forward import FP16_OFFSET, MAX_STEP, NO_KEYS
from sage_patch.reference.emulator.forward_mma import KEYS, MAGIC, maximum
from sage_patch.reference.emulator.forward_mma import MAX_STEP as MAX_INTEGER_STEP
from sage_patch.reference.emulator.logits import HIDDEN, LOG2E
from sage_patch.reference.pages import Unpacked


def _part(
    of: Unpacked, item: slice, halves: list[int], q: Tensor, step: Tensor, dot: Tensor, sees: Tensor, softcap: float
) -> pages.Part:
    """One warp's walk over its half pages (turns), or a CTA's."""
    rows = q.shape[:3]
    k, v = (x[item].flatten(2, 3) for x in (of.k, of.v))
    k_scale, lost = (x[item].flatten(2) for x in (of.k_scale, of.lost))
    m, weight = torch.full(rows, NO_KEYS), torch.zeros(rows)
    sums = torch.zeros(*rows, q.shape[-1])
    for half in halves:
        keys = slice(half * KEYS, half * KEYS + KEYS)
        seen = sees[..., keys]
        scores = torch.matmul(q.double(), k[:, :, keys].double().transpose(-1, -2)).to(torch.int32)
        scores = torch.where(seen, scores, HIDDEN)
        steps = step[..., None] * k_scale[:, :, None, keys]
        if softcap:
            cap = softcap * LOG2E
            x = fma(scores.float(), _at_most(steps, MAX_STEP), (dot * LOG2E)[..., None])
            x = torch.where(seen, cap - 2 * cap / (1 + exp2(2 / softcap * x)), -math.inf)
            top = torch.where(x.isnan(), -math.inf, x).amax(-1) - FP16_OFFSET
        else:
            steps = _at_most(steps, MAX_INTEGER_STEP)
            top = maximum(scores, steps, torch.tensor(FP16_OFFSET))
        factor, m = exp2(m - torch.maximum(m, top)), torch.maximum(m, top)
        if not softcap:
            x = fma(scores.float() + MAGIC, steps, -fma(torch.tensor(MAGIC), steps, m[..., None]))
            p = exp2(x)
        else:
            p = exp2(x - m[..., None])
        p = torch.where(seen, p, 0.0)
        weight = fma(weight, factor, p.sum(-1))
        weight = torch.where((seen & lost[:, :, None, keys]).any(-1), math.nan, weight)
        products = torch.matmul(to_half(p, torch.float16).double(), e4m3_value(v[:, :, keys]).double()).float()
        v_scale = of.v_scale[item][:, :, None, half * KEYS // reference.PAGE_TOKENS]
        sums = fma(products, v_scale, sums * factor[..., None])
    return sums, m, weight


def _at_most(steps: Tensor, most: float) -> Tensor:
    return torch.where(steps > most, most, steps)  # a NaN stays


MMA = pages.Family(few=16, turns=4, span=64, ctas=3, keys=KEYS, part=_part)


def emulate(store: reference.Store, query: Tensor, args: PageArgs, sms: int = pages.SMS) -> tuple[Tensor, Tensor]:
    """pages.emulate of these kernels."""
    return pages.emulate(store, query, args, sms, MMA)
