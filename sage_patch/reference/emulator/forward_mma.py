"""The mma.sync attention kernels on the CPU: the stages of forward.py, summed in these kernels' order.

For tests. Sources: cuda_kernels/fwd_mma.cuh (order of work), mma_softmax.cuh (exponents). Images, scales, scores and
float logits are forward.py's; what differs: keys are taken 64 at a time, from the last on; an exponent is formed from
the score's float with 1.5 * 2^23 in it, so one integer step counts at most MAX_STEP; row sums are those of P before
its rounding in both recipes; P V of FP8, and of FP16 with split sums, is folded into O after every 64 keys.

What a product's own sums round is the card's: here every instruction's sum is exact and rounded once, as the lane
simulator has it; `accumulator` puts a model of a tensor core in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sage_patch.reference.emulator import tile_image as ti
from sage_patch.reference.emulator.accumulator import Accumulator, product
from sage_patch.reference.emulator.float32 import e4m3_code, e4m3_value, exp2, fma, to_half
from sage_patch.reference.emulator.forward import FP8_OFFSET, FP16_OFFSET, FP16_SLACK, NO_KEYS, Stages, finish
from sage_patch.reference.emulator.logits import HIDDEN

KEYS = 64  # of one turn
MAGIC = 12582912.0  # 1.5 * 2^23
MAX_STEP = 0.0625  # bound of one integer step in log2 units, where scores stay integers
SPLIT_OFFSET = 8.0  # 64 keys * 2^8 * |v| < 2 stay inside fp16's range


@dataclass
class Sums:
    """After all keys: O and l [batch, heads, q_len, dim + 1], the reference exponent [batch, heads, q_len]."""

    total: Tensor
    m: Tensor


def attend(
    stages: Stages,
    *,
    recipe: str,
    split: bool = False,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    accumulator: Accumulator | None = None,
) -> tuple[Tensor, Tensor]:
    """(out float32 [batch, heads, q_len, dim], lse float32 [batch, heads, q_len]) of the mma.sync kernels.

    stages: of forward.emulate for the same call; recipe, sinks, softcap: as given there; split: P V summed in fp16, 64
    keys at a time (FP8: of images whose V reaches 2.25, not 448).
    """
    sums = summed(stages, recipe.endswith("fp16"), split, accumulator)
    heads = stages.scores.shape[1]
    v_scale, v_mean = (_per_head(x, stages, heads) for x in (stages.images.v_scale, stages.images.v_mean))
    return finish(sums.total, sums.m[..., None], v_scale, v_mean, stages.queries.dot, sinks, softcap)


def _per_head(x: Tensor, stages: Stages, heads: int) -> Tensor:
    batch = stages.scores.shape[0]
    kv_heads = x.shape[0] // batch
    return x.view(batch, kv_heads, *x.shape[1:]).repeat_interleave(heads // kv_heads, dim=1)


def summed(stages: Stages, fp16: bool, split: bool, accumulator: Accumulator | None) -> Sums:
    """All keys, 64 at a time."""
    rows, n = stages.scores.shape[:3], stages.scores.shape[-1]
    v = _per_head(stages.images.v, stages, rows[1]).flatten(2, 3)  # [batch, heads, n, dim]
    v = v.float() if fp16 else e4m3_value(v)
    offset = torch.tensor(FP8_OFFSET if not fp16 else SPLIT_OFFSET if split else FP16_OFFSET)
    slack = FP16_SLACK if fp16 and not split else 0.0
    steps = torch.where(stages.steps > MAX_STEP, MAX_STEP, stages.steps)  # a NaN stays
    m = torch.full(rows, NO_KEYS)
    lanes = torch.zeros(*rows, 4)  # a row's four lanes have its sum in parts
    total = torch.zeros(*rows, v.shape[-1])
    for first in range(n - KEYS, -1, -KEYS):
        part = slice(first, first + KEYS)
        scores, step = stages.scores[..., part], steps[..., part]
        top = maximum(scores, step, offset)
        changed = stages.logits
        if changed is not None:
            used = changed.used[..., first // ti.TILE_TOKENS]
            x = changed.x[..., part]
            top = torch.where(used, torch.where(x.isnan(), -torch.inf, x).amax(-1) - offset, top)
        new = torch.where(top > m + slack, top, m)
        factor, m = exp2(m - new), new
        reference = fma(torch.tensor(MAGIC), step, m[..., None])
        p = exp2(fma(scores.float() + MAGIC, step, -reference))
        if changed is not None:
            p = torch.where(used[..., None], exp2(x - m[..., None]), p)
        p = torch.where(scores == HIDDEN, 0.0, p)
        columns = p.unflatten(-1, (KEYS // 8, 4, 2))  # 8-key block, lane, parity
        parities = torch.zeros(*rows, 4, 2)
        for block in range(KEYS // 8):
            parities = parities + columns[..., block, :, :]
        lanes = fma(lanes, factor[..., None], parities[..., 0] + parities[..., 1])
        if fp16 and not split:
            total = _product(to_half(p, torch.float16), v[:, :, part], total * factor[..., None], 16, accumulator)
            continue
        weights = to_half(p, torch.float16) if fp16 else e4m3_value(e4m3_code(p))
        tile = _product(weights, v[:, :, part], torch.zeros_like(total), 16 if fp16 else 32, accumulator, split)
        total = fma(total, factor[..., None], tile)
    weight = (lanes[..., 0] + lanes[..., 1]) + (lanes[..., 2] + lanes[..., 3])
    return Sums(torch.cat([total, weight[..., None]], -1), m)


def maximum(scores: Tensor, steps: Tensor, offset: Tensor) -> Tensor:
    """The largest exponent of each row, minus the offset: a lane takes its own columns, all of one scale."""
    group = ti.k_group(torch.arange(KEYS))
    magic = torch.tensor(MAGIC)
    top = torch.full(scores.shape[:-1], NO_KEYS)
    for c in range(ti.SCALE_GROUPS):
        largest, step = scores[..., group == c].amax(-1), steps[..., group == c][..., 0]
        f = fma(largest.float() + magic, step, -fma(magic, step, offset))
        top = torch.fmax(top, torch.where(largest == HIDDEN, NO_KEYS, f))  # fmaxf drops a NaN
    return top


def _product(
    p: Tensor, v: Tensor, start: Tensor, keys: int, accumulator: Accumulator | None, split: bool = False
) -> Tensor:
    """start + P V, `keys` keys an instruction in order."""
    if accumulator is not None:
        return product(p, v, start, accumulator)
    for first in range(0, p.shape[-1], keys):
        part = slice(first, first + keys)
        exact = start.double() + torch.matmul(p[..., part].double(), v[..., part, :].double())
        start = to_half(exact.float(), torch.float16).float() if split else exact.float()
    return start
