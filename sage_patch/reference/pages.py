"""The pages of a quantized key/value cache on the CPU: how they are written, read back, and attended to.

A page holds 128 tokens of one head as one record of bytes: what the attention kernel reads, followed by its scales.
The kernels of a CUDA device do the same to the same bytes; `append` and `attend` have their arguments.
Every number of a page follows from the tokens in it and from the two means, so it never matters in which pieces the
tokens came.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from sage_patch.args import PageArgs
from sage_patch.reference.emulator import tile_image as ti
from sage_patch.reference.emulator.float32 import e4m3_code, e4m3_value, to_half
from sage_patch.reference.emulator.forward import FP8_OFFSET, NO_KEYS, finish
from sage_patch.reference.emulator.logits import LN2
from sage_patch.reference.emulator.prepare import TINY, Queries, int8_scale, int8_values, quantize_queries
from sage_patch.reference.quantize import E4M3_MAX, LOG2E
from sage_patch.reference.rotation import rotate, rotate_back

PAGE_TOKENS = ti.TILE_TOKENS
TAIL_TOKENS = 2 * PAGE_TOKENS
_SCORES_PER_STEP = 1 << 24  # elements of the score matrix held at once


@dataclass(frozen=True)
class Record:
    """Where things stand in a page's record, in bytes: K image | V image | 4 K scales | dim V scales | lost
    tokens, a bit each | padding."""

    dim: int  # padded head_dim, 64 or 128

    @property
    def v_at(self) -> int:
        return PAGE_TOKENS * self.dim

    @property
    def k_scale_at(self) -> int:
        return 2 * PAGE_TOKENS * self.dim

    @property
    def v_scale_at(self) -> int:
        return self.k_scale_at + 4 * ti.SCALE_GROUPS

    @property
    def lost_at(self) -> int:
        return self.v_scale_at + 4 * self.dim

    @property
    def size(self) -> int:
        return (self.lost_at + PAGE_TOKENS // 8 + 127) // 128 * 128

    @cached_property
    def k_map(self) -> Tensor:
        """int64 [128 * dim]: byte of (token, channel) in the record."""
        return ti.k_offsets(self.dim).flatten()

    @cached_property
    def v_map(self) -> Tensor:
        return (ti.v_offsets(self.dim) + self.v_at).flatten()


_RECORDS = {64: Record(64), 128: Record(128)}


def record_of(dim: int) -> Record:
    """The record of a padded head_dim, 64 or 128."""
    return _RECORDS[dim]


class Store(Protocol):
    """What `append` and `attend` need of sage_patch.pages.Pages, which says what each is."""

    head_dim: int
    dim: int
    rotated: bool
    length: int
    first_slab: int
    slab_pages: int
    slabs: list[Tensor]
    tail: Tensor
    k_mean: Tensor
    v_mean: Tensor

    def records(self, first_page: int, end_page: int) -> Tensor: ...


def append(pages: Store, key: Tensor, value: Tensor) -> None:
    """Write key and value [B, Hkv, n, D] as tokens pages.length .. pages.length + n - 1; `length` itself stays.

    The slabs are there already. With less than a page stored it is written anew anyway, and the means are taken of all
    tokens, not of a few. Pages of slabs that were dropped (before first_slab) are not written.
    """
    length, d = pages.length, pages.head_dim
    if length < PAGE_TOKENS:
        key, value = (torch.cat([pages.tail[i][:, :, :length], x], dim=2) for i, x in enumerate((key, value)))
        length = 0
        pages.k_mean[..., :d] = ti.sampled_mean(key)
        pages.v_mean[..., :d] = ti.v_mean(value)
    end = length + key.shape[2]
    first_page = max(length // PAGE_TOKENS, pages.first_slab * pages.slab_pages)
    start = first_page * PAGE_TOKENS
    older = torch.arange(min(start, length), length, device=key.device) % TAIL_TOKENS
    new = slice(max(0, start - length), None)
    k = torch.cat([pages.tail[0][:, :, older], key[:, :, new]], dim=2)
    v = torch.cat([pages.tail[1][:, :, older], value[:, :, new]], dim=2)
    records = quantize(k, v, pages.k_mean, pages.v_mean, pages.rotated)
    for i in range(records.shape[2]):
        slab, page = divmod(first_page + i, pages.slab_pages)
        pages.slabs[slab - pages.first_slab][:, :, page] = records[:, :, i]
    kept = min(key.shape[2], TAIL_TOKENS)
    slots = torch.arange(end - kept, end, device=key.device) % TAIL_TOKENS
    pages.tail[0][:, :, slots] = key[:, :, key.shape[2] - kept :]
    pages.tail[1][:, :, slots] = value[:, :, value.shape[2] - kept :]


def quantize(key: Tensor, value: Tensor, k_mean: Tensor, v_mean: Tensor, rotated: bool = False) -> Tensor:
    """Records uint8 [B, H, pages, size] of key and value [B, H, n, D], whose first token is a page's first.

    k_mean, v_mean: float32 [B, H, dim]. rotated: keys less their mean are rotated over `dim` channels. A token with a
    number that is not finite is held as zeros, counts for no scale, and is noted as lost: a row that sees it becomes
    NaN, and no other.
    """
    record = record_of(k_mean.shape[-1])
    batch, heads, tokens, _ = key.shape
    pages = (tokens + PAGE_TOKENS - 1) // PAGE_TOKENS
    k, v = _centred(key, k_mean, pages), _centred(value, v_mean, pages)
    lost = ~(k.isfinite() & v.isfinite()).all(-1, keepdim=True)
    k, v = torch.where(lost, 0.0, k), torch.where(lost, 0.0, v)

    k = rotate(k) if rotated else k
    group = ti.k_group(torch.arange(PAGE_TOKENS, device=key.device))
    amax = torch.stack([k[..., group == g, :].abs().amax((-1, -2)) for g in range(ti.SCALE_GROUPS)], dim=-1)
    k_scale, inverse = int8_scale(amax)
    k_codes = int8_values(k, inverse[..., group, None]).view(torch.uint8)

    amax = v.abs().amax(-2)
    none = amax < TINY
    v_scale = torch.where(none, 0.0, amax * torch.tensor(1.0 / E4M3_MAX))
    inverse = torch.where(none, 0.0, torch.full_like(amax, E4M3_MAX) / amax)
    v_codes = e4m3_code(v * inverse[..., None, :])

    records = torch.zeros(batch, heads, pages, record.size, dtype=torch.uint8, device=key.device)
    records[..., record.k_map] = k_codes.flatten(-2)
    records[..., record.v_map] = v_codes.flatten(-2)
    records[..., record.k_scale_at : record.v_scale_at] = k_scale.contiguous().view(torch.uint8)
    records[..., record.v_scale_at : record.v_scale_at + 4 * record.dim] = v_scale.contiguous().view(torch.uint8)
    bits = lost.reshape(*lost.shape[:-2], PAGE_TOKENS // 8, 8) * (1 << torch.arange(8, device=key.device))
    records[..., record.lost_at : record.lost_at + PAGE_TOKENS // 8] = bits.sum(-1).to(torch.uint8)
    return records


def _centred(x: Tensor, mean: Tensor, pages: int) -> Tensor:
    """x [B, H, n, D] less its mean, float32 [B, H, pages, 128, dim], zero behind the last token and channel."""
    tokens, d = x.shape[-2:]
    x = x.float() - mean[:, :, None, :d]
    x = torch.nn.functional.pad(x, (0, mean.shape[-1] - d, 0, pages * PAGE_TOKENS - tokens))
    return x.unflatten(2, (pages, PAGE_TOKENS))


@dataclass
class Unpacked:
    """What records hold, in token and channel order."""

    k: Tensor  # int8 [B, H, pages, 128, dim]
    k_scale: Tensor  # float32 [B, H, pages, 128], of each token
    v: Tensor  # uint8 E4M3 codes [B, H, pages, 128, dim]
    v_scale: Tensor  # float32 [B, H, pages, dim]
    lost: Tensor  # bool [B, H, pages, 128]: tokens with a number that was not finite


def unpack(records: Tensor, dim: int) -> Unpacked:
    """records uint8 [B, H, pages, size] of padded head_dim `dim`."""
    record = record_of(dim)
    image = (PAGE_TOKENS, dim)
    group = ti.k_group(torch.arange(PAGE_TOKENS, device=records.device))
    k_scale = records[..., record.k_scale_at : record.v_scale_at].contiguous().view(torch.float32)
    v_scale = records[..., record.v_scale_at : record.lost_at].contiguous().view(torch.float32)
    bits = records[..., record.lost_at : record.lost_at + PAGE_TOKENS // 8, None]
    bits = bits >> torch.arange(8, device=records.device)
    return Unpacked(
        k=records[..., record.k_map.to(records.device)].view(torch.int8).unflatten(-1, image),
        k_scale=k_scale[..., group],
        v=records[..., record.v_map.to(records.device)].unflatten(-1, image),
        v_scale=v_scale,
        lost=(bits & 1).bool().flatten(-2),
    )


def dequantize(
    records: Tensor, k_mean: Tensor, v_mean: Tensor, dtype: torch.dtype, rotated: bool = False
) -> tuple[Tensor, Tensor]:
    """(key, value) [B, H, pages * 128, dim] in `dtype` of records uint8 [B, H, pages, size]."""
    of = unpack(records, k_mean.shape[-1])
    key = of.k.float() * of.k_scale[..., None]
    key = (rotate_back(key, key.shape[-1]) if rotated else key) + k_mean[:, :, None, None]
    value = e4m3_value(of.v) * of.v_scale[..., None, :] + v_mean[:, :, None, None]
    key, value = (torch.where(of.lost[..., None], math.nan, x) for x in (key, value))
    return to_half(key.flatten(2, 3), dtype), to_half(value.flatten(2, 3), dtype)


def attend(pages: Store, query: Tensor, args: PageArgs) -> tuple[Tensor, Tensor | None]:
    """Attention of query [B, Hq, q_len, D], the last q_len tokens of the store, over its pages.

    Returns (out [B, Hq, q_len, D] in query's dtype, lse float32 [B, Hq, q_len], natural log, or None). A row that sees
    no key gives 0 and -inf.
    """
    batch, heads, q_len, d = query.shape
    first = first_key(pages.length, q_len, args.left, args.attn_mask)
    first_page = min(first, max(pages.length - 1, 0)) // PAGE_TOKENS
    end_page = (pages.length + PAGE_TOKENS - 1) // PAGE_TOKENS
    of = unpack(pages.records(first_page, end_page), pages.dim)
    outs, lses = [], []
    step = max(1, _SCORES_PER_STEP // max(1, batch * heads * (end_page - first_page) * PAGE_TOKENS))
    for row0 in range(0, q_len, step):
        rows = slice(row0, min(row0 + step, q_len))
        position = torch.arange(pages.length - q_len + row0, pages.length - q_len + rows.stop)
        mask = None if args.attn_mask is None else args.attn_mask[:, :, rows]
        columns = torch.arange(first_page * PAGE_TOKENS, end_page * PAGE_TOKENS)
        seen = visible(position, columns, pages.length, args._replace(attn_mask=mask))
        queries = quantize_queries(query[:, :, rows], pages.k_mean, args.scale, rotated=pages.rotated)
        out, lse = _attend_rows(queries, of, pages.v_mean, seen, args)
        outs.append(to_half(out[..., :d], query.dtype))
        lses.append(lse)
    if not outs:
        outs, lses = [torch.empty_like(query)], [query.new_empty(batch, heads, 0, dtype=torch.float32)]
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2) if args.return_lse else None


def first_key(length: int, q_len: int, left: int, attn_mask: Tensor | None) -> int:
    """Position of the first key that any row can see."""
    first = 0 if attn_mask is None else length - attn_mask.shape[-1]
    return first if left < 0 else max(first, length - q_len - left)


def visible(position: Tensor, column: Tensor, length: int, args: PageArgs) -> Tensor:
    """bool [B or 1, Hq or 1, rows, keys]: which rows, by position, see which keys, by position. args.attn_mask: of
    these rows."""
    seen = (column < length).expand(position.shape[0], -1)
    if args.is_causal:
        seen = seen & (column <= position[:, None])
    if args.left >= 0:
        seen = seen & (column >= position[:, None] - args.left)
    seen = seen[None, None]
    if args.kv_starts is not None:
        seen = seen & (column >= args.kv_starts[:, None])[:, None, None]
    if args.attn_mask is None:
        return seen
    masked = length - args.attn_mask.shape[-1]  # position of the mask's first key
    low = max(masked, int(column[0])) if len(column) else 0
    inner = args.attn_mask[..., low - masked :]
    return seen & torch.nn.functional.pad(inner, (low - int(column[0]), len(column) - (length - int(column[0]))))


def _attend_rows(
    queries: Queries,
    of: Unpacked,
    v_mean: Tensor,
    seen: Tensor,
    args: PageArgs,
) -> tuple[Tensor, Tensor]:
    """(out float32 [B, Hq, rows, dim], lse [B, Hq, rows]) of some rows; seen bool [B or 1, Hq or 1, rows, keys].

    The query heads of a kv head are rows of one product. All pages are formed at once: a page's P refers to m as it
    stands after that page, and its sums are scaled to the last m, as the kernel's running sums are step by step.
    """
    batch, heads, rows, _ = queries.q.shape
    kv_heads, n = of.k.shape[1:3]
    groups = heads // kv_heads

    def per_kv_head(x: Tensor) -> Tensor:  # [B, Hq, rows, ..] -> [B, Hkv, groups * rows, ..]
        return x.unflatten(1, (kv_heads, groups)).flatten(2, 3)

    seen = seen.expand(-1, heads, -1, -1) if seen.shape[1] > 1 or groups > 1 else seen
    seen = per_kv_head(seen) if seen.shape[1] == heads else seen
    scores = torch.matmul(per_kv_head(queries.q).float(), of.k.flatten(2, 3).float().transpose(-1, -2))
    x = scores * (per_kv_head(queries.scale)[..., None] * of.k_scale.flatten(2)[:, :, None])
    if args.softcap:
        softcap = args.softcap
        dot = per_kv_head(queries.dot)[..., None]
        x = softcap * torch.tanh((x * LN2 + dot) / softcap) * LOG2E
    x = torch.where(seen, x, -math.inf).unflatten(-1, (n, PAGE_TOKENS))  # [B, Hkv, groups * rows, n, 128]
    seen = seen.unflatten(-1, (n, PAGE_TOKENS))

    top = torch.where(x.isnan(), -math.inf, x).amax(-1) - FP8_OFFSET
    m = top.clamp_min(NO_KEYS).cummax(-1).values if n else top
    p = e4m3_value(e4m3_code(torch.exp2(x - m[..., None])))
    p = torch.where(seen, p, 0.0).transpose(2, 3)  # [B, Hkv, n, groups * rows, 128]
    last = m[..., -1:] if n else m.new_full((*m.shape[:-1], 1), NO_KEYS)
    factors = torch.exp2(m - last).transpose(2, 3)[..., None]  # [B, Hkv, n, groups * rows, 1]
    p = torch.where((seen & of.lost[:, :, None]).any(-1).transpose(2, 3)[..., None], math.nan, p)
    sums = torch.matmul(p, e4m3_value(of.v)) * of.v_scale[..., None, :]
    total = torch.cat([sums, p.sum(-1, keepdim=True)], dim=-1).mul_(factors).sum(2)

    def per_head(t: Tensor) -> Tensor:  # [B, Hkv, groups * rows, ..] -> [B, Hq, rows, ..]
        return t.unflatten(2, (groups, rows)).flatten(1, 2)

    mean = v_mean.repeat_interleave(groups, dim=1)
    return finish(per_head(total), per_head(last), torch.ones_like(mean), mean, queries.dot, args.sinks, args.softcap)
