"""One call of the operator in plain torch: exact attention, and the quantized recipes of the reference.

Both take one dense problem at a time, so sequences laid end to end are cut apart here, and lengths become a mask.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sage_patch.args import Args, scale_for
from sage_patch.recipes import Recipe
from sage_patch.reference import images, pages
from sage_patch.reference.attention import attend_keys, quantized_attention
from sage_patch.reference.exact import exact_attention
from sage_patch.reference.visibility import Visibility


def prepare(index: int | None) -> None:
    """Nothing has to be built."""


def forward(query: Tensor, key: Tensor, value: Tensor, args: Args, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """(out [B, Hq, q_len, Dv] in args.out_layout, lse float32 [B, Hq, q_len] or None); recipe: exact or quantized."""
    # Autocast would turn the float32 products of either path into half precision.
    with without_autocast(query.device):
        if args.cu_seqlens_q is None or args.cu_seqlens_k is None:
            mask = with_run(args.attn_mask, args.kv_starts, args.kv_lens, key.shape[2])
            out, lse = _dense(query, key, value, mask, args, recipe)
            return in_layout(out, args.out_layout), lse
        out, lse_all = empty_outputs(query, value, args)
        out.zero_()  # tokens that belong to no sequence
        lse_all.fill_(-math.inf)
        q, k = ends_within(args.cu_seqlens_q, query.shape[2]), ends_within(args.cu_seqlens_k, key.shape[2])
        for i in range(len(q) - 1):
            rows, keys = slice(q[i], q[i + 1]), slice(k[i], k[i + 1])
            part, lse = _dense(query[:, :, rows], key[:, :, keys], value[:, :, keys], None, args, recipe)
            out[:, :, rows] = part
            if lse is not None:
                lse_all[:, :, rows] = lse
        return out, lse_all


def _dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, args: Args, recipe: Recipe
) -> tuple[Tensor, Tensor | None]:
    """One dense problem. An empty sequence or batch inside a quantized call has nothing to quantize."""
    visibility = visibility_of(query.shape[2], key.shape[2], mask, args.left, args.right, args.top_left)
    options: dict[str, Any] = {
        "scale": scale_for(args.scale, query.shape[-1]),
        "softcap": args.softcap,
        "sinks": args.sinks,
    }
    if recipe.is_exact or not (query.shape[0] and query.shape[2] and key.shape[2]):
        return exact_attention(
            query, key, value, visibility, return_lse=args.return_lse, guard_rows=args.guard_rows, **options
        )
    return quantized_attention(query, key, value, visibility, recipe, return_lse=args.return_lse, **options)


quantize_kv, image_size = images.pack, images.size


def attend_image(
    query: Tensor, image: Tensor, shape: tuple[int, ...], v_head_dim: int, args: Args, recipe: Recipe
) -> tuple[Tensor, Tensor | None]:
    """`forward` over the image of keys of this shape and values of v_head_dim, that was made by `quantize_kv`."""
    keys = images.unpack(image, shape, v_head_dim, query.dtype, recipe)
    scale, visibility = scale_for(args.scale, query.shape[-1]), Visibility(query.shape[2], shape[2])
    with without_autocast(query.device):
        out, lse = attend_keys(query, keys, visibility, recipe, scale=scale, return_lse=args.return_lse)
    return in_layout(out, args.out_layout), lse


@torch.compiler.assume_constant_result
def knows_autocast(device: str) -> bool:
    """Whether a type of device has an autocast at all; some have none to switch off."""
    return torch.amp.is_autocast_available(device)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A block whose products keep their dtypes; where no autocast is on, there is none to switch off."""
    if not knows_autocast(device.type) or not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def visibility_of(
    q_len: int, kv_len: int, attn_mask: Tensor | None, left: int, right: int, top_left: bool
) -> Visibility:
    """left, right: as in Args."""
    return Visibility(
        q_len=q_len,
        kv_len=kv_len,
        attn_mask=attn_mask,
        left=None if left < 0 else left,
        right=None if right < 0 else right,
        offset=0 if top_left else kv_len - q_len,
    )


def with_run(attn_mask: Tensor | None, kv_starts: Tensor | None, kv_lens: Tensor | None, kv_len: int) -> Tensor | None:
    """The mask that also says which keys there are: item b's, from kv_starts[b] (0 if None) on, kv_lens[b] of them."""
    if kv_lens is None:
        return attn_mask
    index = torch.arange(kv_len, device=kv_lens.device) - (0 if kv_starts is None else kv_starts[:, None])
    there = ((index >= 0) & (index < kv_lens[:, None]))[:, None, None, :]
    return there if attn_mask is None else attn_mask & there


def ends_within(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """The offsets of packed sequences: what lies outside of the tokens is moved to the nearest end, and a sequence that
    would end before its start is empty."""
    inside = (min(max(offset, 0), tokens) for offset in cu_seqlens.tolist())
    return list(itertools.accumulate(inside, max))


def empty_outputs(query: Tensor, value: Tensor, args: Args) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, q_len, Dv], contiguous in args.out_layout; lse float32 [B, Hq, q_len] or empty)."""
    batch, heads, q_len, _ = query.shape
    if args.out_layout == "NHD":
        out = query.new_empty(batch, q_len, heads, value.shape[-1]).transpose(1, 2)
    else:
        out = query.new_empty(batch, heads, q_len, value.shape[-1])
    return out, query.new_empty((batch, heads, q_len) if args.return_lse else (0,), dtype=torch.float32)


def in_layout(out: Tensor, out_layout: str) -> Tensor:
    """out [B, H, N, D], its memory contiguous in that layout."""
    return out.transpose(1, 2).contiguous().transpose(1, 2) if out_layout == "NHD" else out.contiguous()


@dataclass
class OneSlab:
    """A quantized cache of up to 1,024 tokens, as `append` and `attend` of a backend's pages take it. The user's is
    sage_patch.pages.Pages, which says what each is."""

    num_kv_heads: int
    head_dim: int  # 64 or 128
    slab: Tensor
    tail: Tensor
    k_mean: Tensor
    v_mean: Tensor
    slab_table: Tensor
    rotated: bool = False
    length: int = 0
    first_slab: int = 0
    slab_pages: int = 8
    held: Tensor | None = None
    settled: bool = False

    @property
    def dim(self) -> int:
        return self.head_dim

    @property
    def slabs(self) -> list[Tensor]:
        return [self.slab]

    def records(self, first_page: int, end_page: int) -> Tensor:
        return self.slab[:, :, first_page:end_page]


def one_slab(batch: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> OneSlab:
    """An empty one; head_dim 64 or 128."""
    sizes = (batch, num_kv_heads)
    slab = torch.zeros(*sizes, OneSlab.slab_pages, pages.record_of(head_dim).size, dtype=torch.uint8, device=device)
    k_mean, v_mean = (torch.zeros(*sizes, head_dim, device=device) for _ in range(2))
    tail = torch.zeros(2, *sizes, pages.TAIL_TOKENS, head_dim, dtype=dtype, device=device)
    table = torch.tensor([slab.data_ptr()]).to(device)
    return OneSlab(num_kv_heads, head_dim, slab, tail, k_mean, v_mean, table)
