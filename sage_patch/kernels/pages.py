"""Calls the compiled library's quantized cache: append tokens to the pages of a store, attend over them.

library.py packs calls on whole key and value tensors; here they are pages of a `Pages` store (pages.py).
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import torch
from torch import Tensor

from sage_patch.args import PageArgs
from sage_patch.kernels import library, torch_private
from sage_patch.kernels.structs import CStruct

# struct Sage2Pages of sage2_pages.h in two pieces: the call, and where it works
CALL = CStruct(
    size="I", device="i", capability="i", dtype="i", batch="i", heads="i", kv_heads="i", head_dim="i", tokens="i",
    length="i", slab_pages="i", first_slab="i", causal="i", left="i", scale="f", softcap="f",
    mask_first="i", mask_columns="i", settled="i", rotate="i",
    q="P", k="P", v="P", out="P", lse="P", slabs="P", tail="P", k_mean="P", v_mean="P", kv_starts="P", mask="P",
    sinks="P", held="P", mask_until="P",
    q_strides="3q", k_strides="3q", v_strides="3q", out_strides="3q", mask_strides="4q",
)  # fmt: skip
PLACE = CStruct(workspace="P", workspace_bytes="N", stream="P")
SIZE = CALL.size + PLACE.size


class Store(Protocol):
    """What the kernels need of sage_patch.pages.Pages, which says what each is.

    held: int32 [2] on the device: the length, kept there; `length` is then how many tokens there is room for. settled:
    such a store is known to hold a whole page, so that its means stay.
    """

    held: Tensor | None
    settled: bool
    num_kv_heads: int
    rotated: bool
    length: int
    first_slab: int
    slab_pages: int
    tail: Tensor
    k_mean: Tensor
    v_mean: Tensor

    @property
    def slab_table(self) -> Tensor: ...


def _dtype_code(tensor: Tensor) -> int:
    code = library.DTYPES.get(tensor.dtype)
    if code is None:
        raise ValueError(f"dtype {tensor.dtype}: a quantized cache on CUDA holds float16 and bfloat16")
    return code


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with a last dimension of stride 1, which the kernels need; other strides are read as they are."""
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def append(pages: Store, key: Tensor, value: Tensor) -> None:
    """Write `key` and `value` [batch, num_kv_heads, n, head_dim] behind the store's `length` tokens: into the tail, and
    into every page that they touch. With less than a page stored, the means are taken anew, of all tokens.

    The slabs must be there; `pages.length` is the caller's to advance, `pages.held` is advanced here. Pages of
    dropped slabs are not written.
    """
    key, value = _rows(key), _rows(value)
    index = key.get_device()
    lib, capability = library.of_device(index)
    batch, heads, tokens, head_dim = key.shape
    packed = CALL.pack(
        size=SIZE, device=index, capability=capability, dtype=_dtype_code(key), batch=batch, heads=heads,
        kv_heads=heads, head_dim=head_dim, tokens=tokens, length=pages.length, slab_pages=pages.slab_pages,
        first_slab=pages.first_slab, causal=1, left=-1, scale=1.0, settled=pages.settled, rotate=pages.rotated,
        held=0 if pages.held is None else pages.held.data_ptr(),
        k=key.data_ptr(), v=value.data_ptr(),
        slabs=pages.slab_table.data_ptr(), tail=pages.tail.data_ptr(), k_mean=pages.k_mean.data_ptr(),
        v_mean=pages.v_mean.data_ptr(), k_strides=key.stride()[:3], v_strides=value.stride()[:3],
    )  # fmt: skip
    packed += PLACE.pack(stream=torch_private.current_stream(index))
    library.check(lib, _on_device(index, lib.sage2_pages_append, packed))


def attend(pages: Store, query: Tensor, args: PageArgs) -> tuple[Tensor, Tensor | None]:
    """Attention of `query` [batch, heads, q_len, head_dim] over the store.

    Returns the output, laid out [batch, q_len, heads, head_dim] in memory, and if asked the natural log-sum-exp of the
    true scaled scores, float32 [batch, heads, q_len]. A row that sees no key is zero, its log-sum-exp -inf.
    """
    query = _rows(query)
    index = query.get_device()
    lib, capability = library.of_device(index)
    batch, heads, tokens, head_dim = query.shape
    out = query.new_empty((batch, tokens, heads, head_dim)).transpose(1, 2)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=query.device) if args.return_lse else None
    mask, columns, mask_strides = args.attn_mask, 0, (0, 0, 0, 0)
    if mask is not None:
        if mask.dtype != torch.bool or mask.get_device() != index:
            raise ValueError(f"attn_mask must be bool on cuda:{index}; got {mask.dtype} on {mask.device}")
        columns = mask.shape[-1]
        mask = mask.expand(batch, heads, tokens, columns)
        mask_strides = mask.stride()  # type: ignore[assignment]
    sinks = None if args.sinks is None else args.sinks.float().contiguous()
    packed = CALL.pack(
        size=SIZE, device=index, capability=capability, dtype=_dtype_code(query), batch=batch, heads=heads,
        kv_heads=pages.num_kv_heads, head_dim=head_dim, tokens=tokens, length=pages.length,
        slab_pages=pages.slab_pages, first_slab=pages.first_slab, causal=args.is_causal, left=args.left,
        scale=args.scale, softcap=args.softcap, mask_columns=columns,
        mask_first=0 if pages.held is not None else pages.length - columns, rotate=pages.rotated,
        held=0 if pages.held is None else pages.held.data_ptr(),
        mask_until=library.address_of("mask_until", args.mask_until, torch.int32, (batch,), index),
        q=query.data_ptr(), out=out.data_ptr(), lse=0 if lse is None else lse.data_ptr(),
        slabs=pages.slab_table.data_ptr(), k_mean=pages.k_mean.data_ptr(), v_mean=pages.v_mean.data_ptr(),
        kv_starts=library.address_of("kv_starts", args.kv_starts, torch.int32, (batch,), index),
        mask=0 if mask is None else mask.data_ptr(),
        sinks=library.address_of("sinks", sinks, torch.float32, (heads,), index),
        q_strides=query.stride()[:3], out_strides=out.stride()[:3], mask_strides=mask_strides,
    )  # fmt: skip
    bytes_needed = ctypes.c_size_t()
    sized = (packed + PLACE.pack(), ctypes.byref(bytes_needed))
    library.check(lib, _on_device(index, lib.sage2_pages_workspace_bytes, *sized))
    size, stream = bytes_needed.value, torch_private.current_stream(index)
    workspace = torch_private.allocate(size, stream)
    packed += PLACE.pack(workspace=workspace, workspace_bytes=size, stream=stream)
    code = _on_device(index, lib.sage2_pages_attend, packed)
    torch_private.free(workspace)  # reused in the stream's order only
    library.check(lib, code)
    return out, lse


def _on_device(index: int, function: Any, *args: Any) -> int:
    """The library works on the current device, which must be the tensors'."""
    if index < 0 or index == torch_private.current_device():
        return function(*args)  # type: ignore[no-any-return]
    with torch.cuda.device(index):
        return function(*args)  # type: ignore[no-any-return]
