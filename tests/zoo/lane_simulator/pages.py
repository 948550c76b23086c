"""Attention over a quantized cache by cuda_kernels/pages_attend_mma.cuh on the CPU, lane by lane. Parts are combined by
the emulator, whose kernel for that is Hopper's too."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from sage_patch.args import PageArgs
from sage_patch.pages import Pages
from sage_patch.reference.emulator import pages as emulated
from sage_patch.reference.emulator.pages_mma import MMA
from sage_patch.reference.emulator.prepare import padded_dim

LOG2E = 1.4426950408889634
_POINTERS = "q out lse k_mean v_mean partial stats slabs kv_starts mask sinks"
_INTEGERS = (
    "batch heads kv_heads head_dim tokens length bf16 slab_pages record causal left rotate span splits turns "
    "mask_columns"
)
_FLOATS = "scale scale_log2 softcap softcap_step"


class PagesCall(ctypes.Structure):
    """PagesCall of lane_simulator/simulate.cpp."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS.split()]
        + [(name, ctypes.c_int32) for name in _INTEGERS.split()]
        + [(name, ctypes.c_float) for name in _FLOATS.split()]
    )


def simulate_pages(library: ctypes.CDLL, store: Pages, query: Tensor, args: PageArgs, sms: int) -> Tensor:
    """out float32 [batch, heads, q_len, head_dim] of one call on a card with `sms` SMs. With more than one part, of
    calls without sinks."""
    batch, heads, q_len, d = query.shape
    kv_heads, dim = store.num_kv_heads, padded_dim(d)
    group, rows = heads // kv_heads, heads // kv_heads * q_len
    cut = emulated.plan(batch, kv_heads, rows, q_len, store.length, args.left, sms, MMA)
    tiles = -(-rows // cut.span)
    held = min(rows, cut.span)
    out = torch.full_like(query, math.nan)
    partial = torch.full((batch, kv_heads, tiles, cut.parts, held, dim), math.nan)
    stats = torch.full((batch, kv_heads, tiles, cut.parts, held, 4), math.nan)
    table = torch.tensor([x.data_ptr() for x in store.slabs], dtype=torch.int64)
    mask = None if args.attn_mask is None else args.attn_mask.expand(batch, 1, q_len, -1).contiguous()
    given = {
        "q": query, "out": out, "k_mean": store.k_mean, "v_mean": store.v_mean, "partial": partial, "stats": stats,
        "slabs": table, "kv_starts": args.kv_starts, "mask": mask, "sinks": args.sinks,
    }  # fmt: skip
    call = PagesCall(
        batch=batch, heads=heads, kv_heads=kv_heads, head_dim=d, tokens=q_len, length=store.length,
        bf16=query.dtype == torch.bfloat16, slab_pages=store.slab_pages, record=store.slabs[0].shape[-1],
        causal=args.is_causal, left=args.left, rotate=store.rotated, span=cut.span, splits=cut.splits, turns=cut.turns,
        mask_columns=0 if mask is None else mask.shape[-1], scale=args.scale,
        scale_log2=args.scale * LOG2E * (dim if store.rotated else 1), softcap=args.softcap * LOG2E,
        softcap_step=2 / args.softcap if args.softcap else 0.0,
        **{name: x.data_ptr() for name, x in given.items() if x is not None},
    )  # fmt: skip
    library.simulate_pages(ctypes.byref(call))
    if cut.parts == 1:
        return out.float()
    assert args.sinks is None
    whole = torch.zeros(batch, kv_heads, rows, dim)
    for tile in range(tiles):
        n = min(held, rows - tile * cut.span)
        parts = [
            (partial[:, :, tile, part, :n], stats[:, :, tile, part, :n, 0], stats[:, :, tile, part, :n, 1])
            for part in range(cut.parts)
        ]
        sums, _, weight = emulated._combined(parts, dim)
        none = (weight == 0)[..., None]
        whole[:, :, tile * cut.span : tile * cut.span + n] = torch.where(
            none, 0.0, sums / weight[..., None] + store.v_mean[:, :, None]
        )
    return whole.unflatten(2, (q_len, group)).transpose(2, 3).flatten(1, 2)[..., :d].to(query.dtype).float()
