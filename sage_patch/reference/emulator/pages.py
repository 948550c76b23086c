"""The Hopper kernel's attention over pages on the CPU, part by part: the same numbers in the same order.

pages.py computes the same function with all pages at once; here the keys are cut into parts as a card cuts them, every
part has running references and sums of its own, P V goes through the tensor core's accumulator, and parts are combined
in order. For tests: small shapes, no speed. Source: cuda_kernels/pages_attend.cu. What is exact and what lies in a band
is as in sm90.py, whose stages this uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_patch.args import PageArgs
from sage_patch.reference import pages as reference
from sage_patch.reference.emulator.float32 import exp2, fma, to_half
from sage_patch.reference.emulator.forward import (
    MAX_STEP,
    NO_KEYS,
    add_sink,
    exponents_of,
    factors_of,
    partial_sums_fp8,
    probabilities,
    reference_exponents,
    steps_of,
)
from sage_patch.reference.emulator.logits import HIDDEN, LOG2E, logits
from sage_patch.reference.emulator.prepare import quantize_queries
from sage_patch.reference.pages import PAGE_TOKENS, Unpacked

MAX_PARTS = 128
START_COST = 4  # pages that a CTA could read while it starts and writes its part
COMBINE_THREADS = 256
SMS = 132  # of an H100 or H200 (SXM)


Part = tuple[Tensor, Tensor, Tensor]  # sums [1, Hkv, rows, dim], reference m and sum of P [1, Hkv, rows]


@dataclass(frozen=True)
class Family:
    """How a family of kernels works on pages. few: packed rows up to which the parts of a CTA, `turns` of them, take
    turns on the keys, `keys` at a time; span: rows of a CTA with more, of which an SM holds `ctas`. part: one part's
    walk over its turns, as `_part`."""

    few: int
    turns: int
    span: int
    ctas: int
    keys: int
    part: Callable[..., Part]


@dataclass(frozen=True)
class Plan:
    """How a call is cut. span: packed rows of a CTA. splits: CTAs along the keys. turns: parts of a CTA that take turns
    on its keys, `keys` at a time; 1: its warps share them and hold different rows."""

    span: int
    splits: int
    turns: int
    keys: int

    @property
    def parts(self) -> int:
        return self.splits * self.turns

    def turns_of(self, part: int, first: int, end: int) -> list[int]:
        """The turns of one part, in order, of a CTA row whose keys lie in pages first .. end - 1: numbers of runs of
        `keys` tokens."""
        each, runs = -(-max(end - first, 0) // self.splits), PAGE_TOKENS // self.keys
        split, turn = divmod(part, self.turns)
        start, stop = runs * (first + split * each), runs * min(end, first + (split + 1) * each)
        return list(range(start, stop))[turn :: self.turns]


def emulate(
    pages: reference.Store, query: Tensor, args: PageArgs, sms: int = SMS, family: Family | None = None
) -> tuple[Tensor, Tensor]:
    """(out in query's dtype [B, Hq, q_len, D], lse float32 [B, Hq, q_len]) as a card with `sms` SMs has them, but for
    the last bits of its approximate instructions. family: None for Hopper's."""
    family = family or HOPPER
    scale, left, softcap, sinks = args.scale, args.left, args.softcap, args.sinks
    batch, heads, q_len, d = query.shape
    dim, kv_heads = pages.k_mean.shape[-1], pages.k_mean.shape[1]
    group, rows, length = heads // kv_heads, heads // kv_heads * q_len, pages.length
    oldest = pages.first_slab * pages.slab_pages
    of = reference.unpack(pages.records(oldest, -(-length // PAGE_TOKENS)), dim)
    columns = torch.arange(oldest * PAGE_TOKENS, -(-length // PAGE_TOKENS) * PAGE_TOKENS)
    position = torch.arange(length - q_len, length)
    seen = reference.visible(position, columns, length, args)
    seen = seen.expand(batch, heads, q_len, len(columns))
    queries = quantize_queries(query, pages.k_mean, scale, rotated=pages.rotated)
    cut = plan(batch, kv_heads, rows, q_len, length, left, sms, family)
    runs = oldest * PAGE_TOKENS // cut.keys

    def packed(x: Tensor) -> Tensor:  # [B, Hq, q_len, ..] -> [B, Hkv, rows, ..], token by token
        return x.unflatten(1, (kv_heads, group)).transpose(2, 3).flatten(2, 3)

    q, step, dot, sees = packed(queries.q), packed(queries.scale), packed(queries.dot), packed(seen)
    out, lse = torch.zeros(batch, kv_heads, rows, dim), torch.zeros(batch, kv_heads, rows)
    for b in range(batch):
        start = max(int(args.kv_starts[b]) if args.kv_starts is not None else 0, oldest * PAGE_TOKENS)
        for row in range(0, rows, cut.span):
            r = slice(row, min(row + cut.span, rows))
            first, end = _page_range(row // group, (r.stop - 1) // group, start, length, q_len, left, args.is_causal)
            item = slice(b, b + 1)
            results = [
                family.part(of, item, [p - runs for p in mine], q[item, :, r], step[item, :, r], dot[item, :, r],
                            sees[item, :, r], softcap)
                for part in range(cut.parts)
                for mine in [cut.turns_of(part, first, end)]
            ]  # fmt: skip
            sums, m, weight = _combined(results, dim) if cut.parts > 1 else results[0]
            sink = None if sinks is None else sinks.float().view(kv_heads, group)[:, torch.arange(row, r.stop) % group]
            out[item, :, r], lse[item, :, r] = _closed(
                sums, m, weight, dot[item, :, r], pages.v_mean[item, :, None], sink, softcap
            )

    def per_head(x: Tensor) -> Tensor:
        return x.unflatten(2, (q_len, group)).transpose(2, 3).flatten(1, 2)

    return to_half(per_head(out)[..., :d], query.dtype), per_head(lse)


def _page_range(
    first_row: int, last_row: int, start: int, length: int, q_len: int, left: int, is_causal: bool
) -> tuple[int, int]:
    """Pages [first, end) that rows of these tokens walk."""
    if not is_causal:
        return start // PAGE_TOKENS, -(-length // PAGE_TOKENS)
    offset = length - q_len
    lowest = start if left < 0 else max(start, first_row + offset - left)
    return lowest // PAGE_TOKENS, -(-min(length, last_row + offset + 1) // PAGE_TOKENS)


def _part(
    of: Unpacked, item: slice, pages: list[int], q: Tensor, step: Tensor, dot: Tensor, sees: Tensor, softcap: float
) -> Part:
    """One warpgroup's walk over its pages. sm90's stages run from the last tile to the first, so pages are reversed."""
    rows, dim = q.shape[2], q.shape[3]
    sums, weight = torch.zeros(1, q.shape[1], rows, dim), torch.zeros(1, q.shape[1], rows)
    if not pages:
        return sums, torch.full_like(weight, NO_KEYS), weight
    order = torch.tensor(pages[::-1])
    keys = (order[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()
    k = of.k[item][:, :, order].flatten(2, 3)
    scores = torch.matmul(q.double(), k.double().transpose(-1, -2)).to(torch.int32)
    scores = torch.where(sees[..., keys], scores, HIDDEN)
    steps = steps_of(of.k_scale[item][:, :, order, 0:8:2], step, MAX_STEP)
    biased = torch.zeros(1, 1, 1, len(pages), dtype=torch.bool)
    changed = logits(scores, steps, dot, softcap, None, biased)
    m = reference_exponents(scores, steps, changed, fp16=False)
    factors = factors_of(m)
    p = probabilities(exp2(exponents_of(scores, steps, changed, m)[0]), scores, fp16=False)
    t = partial_sums_fp8(p, of.v[item][:, :, order])
    v_scale = of.v_scale[item][:, :, order]
    for i in reversed(range(len(pages))):
        a = factors[..., i, None]
        sums = fma(t[..., i, :-1], v_scale[:, :, None, i], sums * a)
        weight = fma(weight, a[..., 0], t[..., i, -1])
    lost = (sees[..., keys] & of.lost[item][:, :, order].flatten(2)[:, :, None]).any(-1)
    return sums, m[..., 0], torch.where(lost, math.nan, weight)


HOPPER = Family(few=64, turns=2, span=128, ctas=1, keys=PAGE_TOKENS, part=_part)


def plan(
    batch: int, kv_heads: int, rows: int, q_len: int, length: int, left: int = -1, sms: int = SMS,
    family: Family = HOPPER,
) -> Plan:  # fmt: skip
    """cut_pages: the number of splits that ends first. rows: packed rows of a kv head, q_len * group."""
    is_few = rows <= family.few
    span, turns, places = (family.few, family.turns, sms) if is_few else (family.span, 1, family.ctas * sms)
    ctas = batch * kv_heads * -(-rows // span)
    seen = length if left < 0 else min(length, left + q_len)
    tiles = seen // PAGE_TOKENS + 1
    best, splits = math.inf, 1
    for s in range(1, min(MAX_PARTS // max(turns, 2), (tiles + 1) // 2) + 1):
        waves = -(-ctas * s // places)
        time = waves * (-(-tiles // s) + START_COST)
        if time < best:
            best, splits = time, s
        if waves > 8:
            break
    return Plan(span, splits, turns, family.keys)


def _combined(parts: list[Part], dim: int) -> Part:
    """The kernel `combine`: groups of parts a channel, then the groups in order."""
    m = torch.stack([part[1] for part in parts]).amax(0)
    weights = [torch.where(part[2] == 0, 0.0, exp2(part[1] - m)) for part in parts]
    total = torch.zeros_like(m)
    for part, weight in zip(parts, weights, strict=True):
        total = fma(part[2], weight, total)
    groups = COMBINE_THREADS // dim
    sums = torch.zeros_like(parts[0][0])
    for g in range(groups):
        one = torch.zeros_like(sums)
        for part, weight in list(zip(parts, weights, strict=True))[g::groups]:
            one = torch.where(weight[..., None] == 0, one, fma(part[0], weight[..., None], one))
        sums = sums + one
    return sums, m, total


def _closed(
    sums: Tensor, m: Tensor, weight: Tensor, dot: Tensor, v_mean: Tensor, sink: Tensor | None, softcap: float
) -> tuple[Tensor, Tensor]:
    """close_row: (out float32 [1, Hkv, rows, dim], lse [1, Hkv, rows]); sink [Hkv, rows] or None."""
    none = weight == 0
    lacks = torch.zeros_like(dot) if softcap else dot
    shrink, kept = torch.ones_like(weight), torch.ones_like(weight)
    if sink is not None:
        m, weight, shrink, kept = add_sink((sink[None] - lacks) * LOG2E, m, weight)
    factor = torch.where(none, 0.0, shrink / weight)
    mean = torch.where(none[..., None], 0.0, v_mean * kept[..., None])
    lse = fma(m + torch.log2(weight.double()).float(), torch.tensor(0.6931471806), lacks)
    return fma(sums, factor[..., None], mean), torch.where(none, -torch.inf, lse)
