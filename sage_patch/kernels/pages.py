"""Calls the compiled library's quantized cache: append tokens to the pages of a store, attend over them.

library.py packs calls on whole key and value tensors; here they are pages of a `Pages` store (pages.py).
"""

from __future__ import annotations

import ctypes
import struct
from typing import Protocol

import torch
from torch import Tensor

from sage_patch.kernels import library

# struct Sage2Pages of sage2_pages.h
_ARGS = struct.Struct("@I12i2f3i13PNP16q")
_DTYPES = {torch.float16: 0, torch.bfloat16: 1}
_NO_STRIDES = (0, 0, 0)
_library: ctypes.CDLL | None = None


class Store(Protocol):
    """What the kernels need of sage_patch.pages.Pages, which says what each is."""

    num_kv_heads: int
    length: int
    first_slab: int
    slab_pages: int
    tail: Tensor
    k_mean: Tensor
    v_mean: Tensor

    @property
    def slab_table(self) -> Tensor: ...


def _load() -> ctypes.CDLL:
    global _library
    if _library is None:
        lib = library.load()
        lib.sage2_page_bytes.restype = ctypes.c_size_t
        lib.sage2_pages_workspace_bytes.restype = ctypes.c_size_t
        for name in ("sage2_pages_workspace_bytes", "sage2_pages_append", "sage2_pages_attend"):
            getattr(lib, name).argtypes = [ctypes.c_char_p]
        _library = lib
    return _library


def _dtype_code(tensor: Tensor) -> int:
    code = _DTYPES.get(tensor.dtype)
    if code is None:
        raise ValueError(f"dtype {tensor.dtype}: a quantized cache on CUDA holds float16 and bfloat16")
    return code


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with a last dimension of stride 1, which the kernels need; other strides are read as they are."""
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def append(pages: Store, key: Tensor, value: Tensor) -> None:
    """Write `key` and `value` [batch, num_kv_heads, n, head_dim] behind the store's `length` tokens: into the tail, and
    into every page that they touch. With less than a page stored, the means are taken anew, of all tokens.

    The slabs must be there; `pages.length` is the caller's to advance. Pages of dropped slabs are not written.
    """
    lib = _library or _load()
    key, value = _rows(key), _rows(value)
    index = key.get_device()
    batch, heads, tokens, head_dim = key.shape
    ks, vs = key.stride(), value.stride()
    args = _ARGS.pack(
        _ARGS.size, index, _dtype_code(key), batch, heads, heads, head_dim, tokens, pages.length,
        pages.slab_pages, pages.first_slab, 1, -1, 1.0, 0.0, 0, 0, 0,
        0, key.data_ptr(), value.data_ptr(), 0, 0, pages.slab_table.data_ptr(), pages.tail.data_ptr(),
        pages.k_mean.data_ptr(), pages.v_mean.data_ptr(), 0, 0, 0, 0, 0, torch._C._cuda_getCurrentRawStream(index),
        *_NO_STRIDES, *ks[:3], *vs[:3], *_NO_STRIDES, 0, 0, 0, 0,
    )  # fmt: skip
    library.check(_on_device(lib.sage2_pages_append, args, index))


def attend(
    pages: Store,
    query: Tensor,
    *,
    scale: float,
    left: int = -1,
    is_causal: bool = True,
    kv_starts: Tensor | None = None,
    attn_mask: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of `query` [batch, heads, q_len, head_dim] over the store.

    is_causal: the queries are the last q_len tokens of the store, each sees the keys up to its own. left: and at most
    so many before that one, -1 for all. kv_starts: int32 [batch], keys before it do not exist. attn_mask: bool,
    broadcastable to [batch, heads, q_len, columns], for the last `columns` tokens of the store; keys before them are
    hidden. softcap 0: none. sinks: [heads].
    Returns the output, laid out [batch, q_len, heads, head_dim] in memory, and if asked the natural log-sum-exp of the
    true scaled scores, float32 [batch, heads, q_len]. A row that sees no key is zero, its log-sum-exp -inf.
    """
    lib = _library or _load()
    query = _rows(query)
    index = query.get_device()
    batch, heads, tokens, head_dim = query.shape
    out = query.new_empty((batch, tokens, heads, head_dim)).transpose(1, 2)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=query.device) if return_lse else None
    mask, columns, mask_strides = 0, 0, [0, 0, 0, 0]
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool or attn_mask.get_device() != index:
            raise ValueError(f"attn_mask must be bool on cuda:{index}; got {attn_mask.dtype} on {attn_mask.device}")
        columns = attn_mask.shape[-1]
        attn_mask = attn_mask.expand(batch, heads, tokens, columns)
        mask, mask_strides = attn_mask.data_ptr(), list(attn_mask.stride())
    if sinks is not None:
        sinks = sinks.float().contiguous()
    starts = library.address_of("kv_starts", kv_starts, torch.int32, (batch,), index)
    sink = library.address_of("sinks", sinks, torch.float32, (heads,), index)
    qs, os = query.stride(), out.stride()

    def packed(workspace: int, size: int, stream: int) -> bytes:
        return _ARGS.pack(
            _ARGS.size, index, _dtype_code(query), batch, heads, pages.num_kv_heads, head_dim, tokens, pages.length,
            pages.slab_pages, pages.first_slab, is_causal, left, scale, softcap, pages.length - columns, columns,
            0, query.data_ptr(), 0, 0, out.data_ptr(), 0 if lse is None else lse.data_ptr(),
            pages.slab_table.data_ptr(), 0, pages.k_mean.data_ptr(), pages.v_mean.data_ptr(), starts, mask, sink,
            workspace, size, stream, *qs[:3], *_NO_STRIDES, *_NO_STRIDES,
            *os[:3], *mask_strides,
        )  # fmt: skip

    size = _on_device(lib.sage2_pages_workspace_bytes, packed(0, 0, 0), index)
    if size == 0:
        library.check(_on_device(lib.sage2_pages_attend, packed(0, 0, 0), index))  # says what is wrong
    stream = torch._C._cuda_getCurrentRawStream(index)
    workspace = torch._C._cuda_cudaCachingAllocator_raw_alloc(size, stream)
    code = _on_device(lib.sage2_pages_attend, packed(workspace, size, stream), index)
    torch._C._cuda_cudaCachingAllocator_raw_delete(workspace)  # reused in the stream's order only
    library.check(code)
    return out, lse


def _on_device(function: object, args: bytes, index: int) -> int:
    """The library works on the current device, which must be the tensors'."""
    if index < 0 or index == torch._C._cuda_getDevice():
        return function(args)  # type: ignore[operator, no-any-return]
    with torch.cuda.device(index):
        return function(args)  # type: ignore[operator, no-any-return]
