"""Runs the mma.sync kernels of cuda_kernels/fwd_mma.cuh on the CPU, lane by lane, from the numbers of the emulator.

The kernels' own headers are compiled with a host compiler; this folder has the instructions. Slow: small shapes.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sage_patch.kernels import build
from sage_patch.reference.emulator import tile_image as ti
from sage_patch.reference.emulator.forward import Stages
from sage_patch.reference.emulator.prepare import corrections, query_means
from sage_patch.reference.emulator.visible import present

ROWS = 128  # of a query tile
NO_LIMIT = 1 << 30
DENSE, MASKED, ADJUSTED = 0, 2, 3  # Family of params.h
PRODUCTS = {"fp16": 0, "fp16_split": 1, "fp8": 2, "fp8_split": 3}
MASK_KINDS = {torch.bool: 1, torch.float16: 2, torch.bfloat16: 3, torch.float32: 4}
LOG2E = 1.4426950408889634

_POINTERS = (
    "q out lse k v k_scale k_mean v_mean v_scale q_mean correction kv_lens kv_starts cu_q cu_k schedule mask bits "
    "lists counts sinks"
)
_INTEGERS = (
    "batch heads kv_heads q_len kv_len head_dim v_head_dim blocks q_tiles total q_blocks bf16 causal top_left left "
    "right family int4 smooth_q all_logits mask_kind mask_batch mask_heads product packed v_channel rotate"
)
_FLOATS = "scale scale_log2 softcap softcap_step"


class Call(ctypes.Structure):
    """Call of lane_simulator/simulate.cpp."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS.split()]
        + [(name, ctypes.c_int32) for name in _INTEGERS.split()]
        + [(name, ctypes.c_float) for name in _FLOATS.split()]
    )


class PrepareCall(ctypes.Structure):
    """PrepareCall of lane_simulator/simulate.cpp."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in "key value k v k_scale k_mean v_mean v_scale kv_lens kv_starts cu_k key_index seen overflow".split()
    ] + [
        (name, ctypes.c_int32)
        for name in (
            "batch kv_heads kv_len head_dim v_head_dim blocks bf16 fp16_pv int4 smooth_v size aligned rotate".split()
        )
    ] + [(name, ctypes.c_float) for name in ("reach", "limit")]  # fmt: skip


def compile_simulator(folder: Path, *flags: str) -> ctypes.CDLL | None:
    """The kernels' headers beside the simulator's, compiled in `folder`; None without a C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return None
    for source in (build.source_dir(), Path(__file__).parent):
        for path in source.iterdir():
            if path.suffix in (".h", ".cuh", ".cpp"):
                shutil.copyfile(path, folder / path.name)
    command = [compiler, "-O1", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-I.", "-w", "simulate.cpp"]
    subprocess.run([*command, *flags, "-o", "simulate.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "simulate.so"))


@dataclass
class Options:
    """What a call asks for beside its tensors, as emulate() of the emulator takes it."""

    product: str = "fp16"
    packed: bool = False
    rotated: bool = False
    is_causal: bool = False
    top_left: bool = False
    kv_lens: list[int] | None = None
    kv_starts: list[int] | None = None
    left: int = -1
    right: int = -1
    attn_mask: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    cu_seqlens: tuple[list[int], list[int]] | None = None  # of queries and keys: sequences laid end to end
    keep: list[Tensor] = field(default_factory=list)  # what pointers lead to


def k_image(k: Tensor, packed: bool) -> Tensor:
    """int8 [heads, blocks, 128, dim] -> the bytes of the images; packed: INT4, two a byte."""
    dim = k.shape[-1]
    if not packed:
        out = torch.zeros(*k.shape[:2], ti.TILE_TOKENS * dim, dtype=torch.uint8)
        out[:, :, ti.k_offsets(dim).flatten()] = k.view(torch.uint8).flatten(2)
        return out
    pairs = (k[..., ::2] & 15) | (k[..., 1::2] & 15) << 4  # channel 2 i in the low nibble
    token, byte = torch.arange(ti.TILE_TOKENS)[:, None], torch.arange(dim // 2)[None]
    chunk = token >> 1 & 3 if dim == 128 else token >> 2 & 1
    offsets = token * (dim // 2) + ((byte >> 4 ^ chunk) << 4) + (byte & 15)
    out = torch.zeros(*k.shape[:2], ti.TILE_TOKENS * dim // 2, dtype=torch.uint8)
    out[:, :, offsets.flatten()] = pairs.view(torch.uint8).flatten(2)
    return out


def v_image(v: Tensor) -> Tensor:
    """[heads, blocks, 128, dim] E4M3 codes or float16 -> the bytes of the images; dim at most 128."""
    dim = v.shape[-1]
    if v.dtype == torch.float16:
        out = torch.zeros(*v.shape[:2], ti.TILE_TOKENS * dim, dtype=torch.float16)
        out[:, :, (ti.v16_offsets(dim) // 2).flatten()] = v.flatten(2)
        return out.view(torch.uint8)
    out = torch.zeros(*v.shape[:2], ti.TILE_TOKENS * dim, dtype=torch.uint8)
    out[:, :, ti.v_offsets(dim).flatten()] = v.flatten(2)
    return out


def mask_bits(visible: Tensor, plain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """pack_mask and list_tiles: (bits, lists, counts) of bool [planes, q_len, n], what rows see and what a tile has of
    that alone (no addend)."""
    planes, q_len, n = visible.shape
    tiles, groups, q_tiles = n // ti.TILE_TOKENS, ROWS // 64, -(-q_len // ROWS)
    behind = (0, 0, 0, q_tiles * ROWS - q_len)
    seen = torch.nn.functional.pad(visible, behind).view(planes, q_tiles, groups, 64, tiles, ti.TILE_TOKENS)
    whole = torch.nn.functional.pad(visible & plain, behind, value=True).view_as(seen)
    column = torch.arange(ti.TILE_TOKENS)
    word = ti.mask_word(torch.arange(64)[:, None], (column % 8 // 2)[None])  # [64, 128]
    values = seen.permute(0, 1, 4, 2, 3, 5).flatten(-2).long() << ti.mask_bit(column).repeat(64)
    bits = torch.zeros(*values.shape[:-1], 256, dtype=torch.int64)
    bits.index_add_(-1, word.flatten(), values)
    some, all_of = seen.any(-1).any(3), whole.all(-1).all(3)  # [planes, q_tiles, groups, tiles]
    classes = torch.where(some, torch.where(all_of, 1, 2), 0)
    lists = torch.zeros(planes, q_tiles, tiles, dtype=torch.int64)
    counts = torch.zeros(planes, q_tiles, dtype=torch.int32)
    for plane in range(planes):
        for q_tile in range(q_tiles):
            mine = classes[plane, q_tile]
            walked = [t for t in reversed(range(tiles)) if mine[:, t].any()]
            counts[plane, q_tile] = len(walked)
            for i, t in enumerate(walked):
                lists[plane, q_tile, i] = t | sum(int(mine[g, t]) << (24 + 2 * g) for g in range(groups))
    return _unsigned(bits), _unsigned(lists), counts


class MaskCall(ctypes.Structure):
    """MaskCall of lane_simulator/simulate.cpp."""

    _fields_ = [
        (name, ctypes.c_void_p) for name in "mask kv_lens bits lists seen classes counts".split()
    ] + [
        (name, ctypes.c_int32)
        for name in "kind mb mh rows q_len kv_len blocks q_tiles tile_rows top_left left right".split()
    ]  # fmt: skip


def simulate_mask(
    library: ctypes.CDLL, mask: Tensor, q_len: int, *, kv_lens: list[int] | None = None, top_left: bool = False,
    left: int = NO_LIMIT, right: int = NO_LIMIT,
) -> dict[str, Tensor]:  # fmt: skip
    """What the mask kernels make of a mask [mb, mh, q_len or 1, kv_len]: bits, lists and counts as mask_bits has them,
    and `seen`, the bits of the keys that any row of an item sees."""
    mb, mh, rows, kv_len = mask.shape
    blocks, q_tiles = -(-kv_len // ti.TILE_TOKENS), -(-q_len // ROWS)
    planes = mb * mh
    out = {
        "bits": torch.full((planes, q_tiles, blocks, ROWS // 64, 256), -1, dtype=torch.int32),
        "lists": torch.zeros(planes, q_tiles, blocks, dtype=torch.int32),
        "counts": torch.full((planes, q_tiles), -1, dtype=torch.int32),
        "seen": torch.zeros(mb, blocks * 4, dtype=torch.int32),
    }
    scratch = torch.zeros(planes, q_tiles * (ROWS // 64), blocks, dtype=torch.uint8)
    lens = None if kv_lens is None else torch.tensor(kv_lens, dtype=torch.int32)
    mask = mask.contiguous()
    call = MaskCall(
        mask=mask.data_ptr(), classes=scratch.data_ptr(), kv_lens=None if lens is None else lens.data_ptr(),
        **{name: tensor.data_ptr() for name, tensor in out.items()},
        kind=MASK_KINDS[mask.dtype], mb=mb, mh=mh, rows=rows, q_len=q_len, kv_len=kv_len, blocks=blocks,
        q_tiles=q_tiles, tile_rows=ROWS, top_left=top_left, left=left, right=right,
    )  # fmt: skip
    library.simulate_mask(ctypes.byref(call))
    return out


def _unsigned(x: Tensor) -> Tensor:
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)


def simulate_prepare(
    library: ctypes.CDLL, key: Tensor, value: Tensor, recipe: str, *, packed: bool = False, size: int = 1,
    aligned: bool = True, split: bool = False, rotated: bool = False, kv_lens: list[int] | None = None,
    kv_starts: list[int] | None = None,
    cu_k: list[int] | None = None, key_index: Tensor | None = None, seen: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """The bytes of the K and V images, scales and vectors that the pre-processing writes, and what overflowed.

    key, value [batch, kv_heads, kv_len, head_dim], contiguous; size: CTAs of a part of a head; aligned: rows of whole
    16 bytes; split: V's range is that of sums in fp16; cu_k: sequences laid end to end; key_index: int32
    [batch, kv_len], the keys that there are, kv_lens of them; seen: bool [kv_len], keys that some row sees.
    """
    batch, kv_heads, kv_len, head_dim = key.shape
    dim, v_dim = (next(width for width in (64, 128, 256) if width >= x.shape[-1]) for x in (key, value))
    sequences = batch if cu_k is None else len(cu_k) - 1
    heads, blocks = sequences * kv_heads, -(-kv_len // 128) if cu_k is None else kv_len // 128 + sequences
    images = (batch * kv_heads) * blocks * 128
    fp16, int4 = recipe.endswith("fp16"), recipe.startswith("qk_int4")
    out = {
        "k": torch.zeros(images * dim // (2 if packed else 1), dtype=torch.uint8),
        "v": torch.zeros(images * (v_dim if dim == 256 else dim) * (2 if fp16 else 1), dtype=torch.uint8),
        "k_scale": torch.zeros(images // (blocks * 128), blocks, 4),
        **{name: torch.full((heads, dim), math.nan) for name in ("k_mean", "v_mean", "v_scale")},
        "overflow": torch.zeros(heads * (3 if v_dim == 256 else 2) * size, dtype=torch.int32),
    }
    given = {"kv_lens": kv_lens, "kv_starts": kv_starts, "cu_k": cu_k, "key_index": key_index}
    tensors = {"key": key, "value": value} | out
    tensors |= {name: torch.as_tensor(x, dtype=torch.int32) for name, x in given.items() if x is not None}
    if seen is not None:
        bits = torch.nn.functional.pad(seen, (0, blocks * 128 - kv_len)).view(-1, 32).long() << torch.arange(32)
        tensors["seen"] = _unsigned(bits.sum(1))
    call = PrepareCall(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        batch=sequences, kv_heads=kv_heads, kv_len=kv_len, head_dim=head_dim, v_head_dim=value.shape[-1],
        blocks=blocks, bf16=key.dtype == torch.bfloat16, fp16_pv=fp16, int4=2 if packed else int4, smooth_v=True,
        size=size, aligned=aligned, rotate=rotated, reach=4, limit=2 if fp16 else 2.25 if split else 448,
    )  # fmt: skip
    library.simulate_prepare(ctypes.byref(call))
    return out


def simulate(
    library: ctypes.CDLL, stages: Stages, query: Tensor, key: Tensor, options: Options, scale: float
) -> tuple[Tensor, Tensor]:
    """(out in query's dtype [batch, heads, q_len, head_dim], lse) of the kernel for one call.

    stages: of forward.emulate for the same call: the images, scales and vectors that the kernel reads. key as it came:
    Q's smoothing adds logits from it. Poisoned: what the kernel must not read is NaN.
    """
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    images = stages.images
    dim, blocks = images.k.shape[-1], images.k.shape[1]
    int4, smooth_q = options.packed or stages.queries.q.abs().max() <= 7, False
    call = Call(batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len)
    keep = options.keep

    def give(name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            tensor = tensor.contiguous()
            keep.append(tensor)
            setattr(call, name, tensor.data_ptr())

    out, lse = torch.full_like(query, math.nan), torch.full((batch, heads, q_len), math.nan)
    give("q", query), give("out", out), give("lse", lse)
    give("k", k_image(images.k, options.packed))
    give("k_scale", images.k_scale)
    for name in ("k_mean", "v_mean", "v_scale"):
        give(name, getattr(images, name))
    if int4:
        smooth_q = True
        q_mean = query_means(query, dim)
        there, _, keys = present(key, key, options.kv_lens, options.kv_starts, None)
        give("q_mean", q_mean)
        k_mean = images.k_mean.view(batch, kv_heads, dim)
        give("correction", corrections(q_mean, there, keys, k_mean, scale))
    for name in ("kv_lens", "kv_starts"):
        given = getattr(options, name)
        give(name, None if given is None else torch.tensor(given, dtype=torch.int32))
    give("sinks", options.sinks)
    mask = options.attn_mask
    call.q_tiles = -(-q_len // ROWS)
    if options.cu_seqlens is not None:  # tiles in the order of tokens; two more that no sequence needs
        cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in options.cu_seqlens)
        ends = zip(cu_q.tolist(), cu_q[1:].tolist(), strict=False)
        schedule = [(b, row) for b, (first, end) in enumerate(ends) for row in range(0, end - first, ROWS)]
        schedule += [(-1, 0)] * 2
        give("cu_q", cu_q), give("cu_k", cu_k), give("schedule", torch.tensor(schedule, dtype=torch.int32))
        call.batch, call.q_tiles = len(cu_q) - 1, len(schedule)
    call.total, call.blocks, call.q_blocks = batch * heads * call.q_tiles, blocks, -(-q_len // 64)
    call.head_dim = call.v_head_dim = head_dim
    call.bf16, call.causal, call.top_left = query.dtype == torch.bfloat16, options.is_causal, options.top_left
    call.left = NO_LIMIT if options.left < 0 else options.left
    call.right = 0 if options.is_causal else NO_LIMIT if options.right < 0 else options.right
    call.all_logits, call.int4, call.smooth_q = bool(options.softcap or int4), 2 if options.packed else int4, smooth_q
    call.product, call.packed = PRODUCTS[options.product], options.packed
    call.rotate = options.rotated
    call.scale, call.scale_log2 = scale, scale * LOG2E * (dim if options.rotated else 1)
    call.softcap, call.softcap_step = options.softcap * LOG2E, 2.0 / options.softcap if options.softcap else 0.0
    masked = options.left >= 0 or (not options.is_causal and options.right >= 0) or options.sinks is not None
    masked |= options.cu_seqlens is not None
    call.family = MASKED if masked or mask is not None or (options.kv_starts and options.top_left) else DENSE
    if call.all_logits or (mask is not None and mask.dtype != torch.bool):
        call.family = ADJUSTED
    if mask is not None:
        planes = (batch if options.kv_lens or mask.shape[0] > 1 else 1, heads if mask.shape[1] > 1 else 1)
        give("mask", mask.expand(*planes, q_len, kv_len))
        visible = stages.visible.expand(batch, heads, q_len, -1)[: planes[0], : planes[1]].flatten(0, 1)
        plain = torch.ones(1, 1, q_len, kv_len, dtype=torch.bool) if mask.dtype == torch.bool else mask == 0
        behind = (0, visible.shape[-1] - kv_len)
        plain = torch.nn.functional.pad(plain, behind).expand(*planes, -1, -1).flatten(0, 1)
        for name, tensor in zip(("bits", "lists", "counts"), mask_bits(visible, plain), strict=True):
            give(name, tensor)
        call.mask_kind, (call.mask_batch, call.mask_heads) = MASK_KINDS[mask.dtype], planes
    width = min(dim, 128)
    for channel in range(0, min(dim, head_dim), width):
        give("v", v_image(images.v[..., channel : channel + width]))
        call.v_channel, call.v_head_dim = channel, min(head_dim - channel, width)
        part = torch.full((batch, heads, q_len, call.v_head_dim), math.nan, dtype=query.dtype)
        give("out", part)
        library.simulate(ctypes.byref(call))
        out[..., channel : channel + width] = part
    return out, lse
