"""Calls the compiled library: argument packing, one load per process, error codes to exceptions.

`forward` is the whole Python side of a kernel call: it takes CUDA tensors, allocates output, log-sum-exp and
workspace from torch's allocator, and launches on the current stream of the tensors' device. It checks what the
library cannot see (devices, dtypes); shapes and limits are checked in C and come back as exceptions.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sage_patch.errors import SagePatchError

# The element type of P and V; INT4 is a flag beside it.
RECIPES = {"qk_int8_pv_fp8": 0, "qk_int8_pv_fp16": 1, "qk_int4_pv_fp8": 0, "qk_int4_pv_fp16": 1}
_DTYPES = {torch.float16: 0, torch.bfloat16: 1}
_CAUSAL, _TOP_LEFT, _SMOOTH_V, _NO_SMOOTH_K, _INT4, _SMOOTH_Q = 1, 2, 4, 8, 16, 32

# struct Sage2Args of sage2.h: what every call has, and what only calls with `Extras` have
_CORE = struct.Struct("@IIiiiiiiiiiifiPPPPPPPNP12q")
_TAIL = struct.Struct("@PPqPPP4qPfiii")
_SIZE = _CORE.size + _TAIL.size
_NO_EXTRAS = _TAIL.pack(*[0] * 11, 0.0, -1, -1, 0)
_VERSION = 3
_MASK_KINDS = {torch.bool: 1, torch.float16: 2, torch.bfloat16: 3, torch.float32: 4}


class KernelError(SagePatchError, RuntimeError):
    """The library refused a call or a launch failed."""


class UnsupportedCall(KernelError):
    """The arguments are legal but no kernel covers them."""


class Extras(NamedTuple):
    """What the dense kernels do not know; other families take over. Tensors are on the device of the call.

    attn_mask: bool (False hides) or float (added), broadcastable to [batch, heads, q_len, kv_len].
    key_padding: bool [batch or 1, kv_len], False: there is no such key. kv_starts: int32 [batch], beside kv_lens: item
        b's keys are [kv_starts[b], kv_starts[b] + kv_lens[b]).
    left, right: keys seen on each side of the diagonal, -1 for no limit. softcap 0: none. sinks: float32 [heads].
    cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], sequences laid end to end in one batch item.
    """

    attn_mask: Tensor | None = None
    key_padding: Tensor | None = None
    kv_starts: Tensor | None = None
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None


_lock = threading.Lock()
_workspace_sizes: dict[tuple[int, ...], int] = {}
_library: ctypes.CDLL | None = None


def load() -> ctypes.CDLL:
    """The library, built first if need be."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                from sage_patch.kernels import build

                path = build.find_library()
                lib = ctypes.CDLL(str(path))
                lib.sage2_last_error.restype = ctypes.c_char_p
                lib.sage2_workspace_bytes.restype = ctypes.c_size_t
                lib.sage2_workspace_bytes.argtypes = [ctypes.c_char_p]
                for name in ("sage2_prepare", "sage2_forward", "sage2_prepare_and_forward"):
                    getattr(lib, name).argtypes = [ctypes.c_char_p]
                if lib.sage2_version() != _VERSION:
                    raise KernelError(
                        f"{path} is version {lib.sage2_version()} of the library, this package needs version "
                        f"{_VERSION}: remove the file or reinstall the package"
                    )
                _library = lib
    return _library


def architectures() -> list[str]:
    """Compute capabilities the library holds code for, such as "9.0"."""
    found = (ctypes.c_int * 16)()
    count = load().sage2_architectures(found, 16)
    return [f"{a // 10}.{a % 10}" for a in found[:count]]


def check(code: int) -> None:
    if code:
        message = load().sage2_last_error().decode()
        if code == 1:
            raise ValueError(message)
        raise (UnsupportedCall if code == 2 else KernelError)(message)


def _pack(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensor_layout: str,
    out_layout: str,
    scale: float,
    flags: int,
    recipe: int,
    kv_lens: Tensor | None,
    return_lse: bool,
    extras: Extras | None,
    allocate: Callable[[int, int, int], tuple[Any, int]],
) -> tuple[bytes, Tensor, Tensor | None, Any, tuple[Tensor, Tensor, Tensor]]:
    """Checks, allocations and the packed struct: (args, out, lse, workspace, the inputs it points to)."""
    dtype, index, qs, ks = query.dtype, query.get_device(), query.shape, key.shape
    if (
        ks[:3] != value.shape[:3]
        or qs[0] != ks[0]
        or qs[3] != ks[3]
        or key.dtype != dtype
        or value.dtype != dtype
        or index < 0
        or key.get_device() != index
        or value.get_device() != index
    ):
        raise ValueError(
            f"query {tuple(qs)} {dtype} {query.device}, key {tuple(ks)} {key.dtype} {key.device} and "
            f"value {tuple(value.shape)} {value.dtype} {value.device} ({tensor_layout}) do not belong together"
        )
    code = _DTYPES.get(dtype)
    if code is None:
        raise ValueError(f"dtype {dtype}: float16 and bfloat16 are supported")
    # Any strides will do except a stretched last dimension; such tensors are copied.
    qt, kt, vt = query.stride(), key.stride(), value.stride()
    if (qt[3] != 1 or kt[3] != 1 or vt[3] != 1) and qs[3] > 1:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        qt, kt, vt = query.stride(), key.stride(), value.stride()
    lens = address_of("kv_lens", kv_lens, torch.int32, (qs[0],), index)
    h, n = (1, 2) if tensor_layout == "HND" else (2, 1)
    dv = value.shape[3]
    if dv != qs[3]:
        there = qs[:3] if tensor_layout == out_layout else (qs[0], qs[2], qs[1])
        out = query.new_empty((*there, dv))
        out = out if tensor_layout == out_layout else out.transpose(1, 2)
    elif tensor_layout == out_layout:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    elif qt == (qs[1] * qs[2] * qs[3], qs[3], qs[1] * qs[3], 1):
        out = torch.empty_like(query)  # takes the query's own strides, which are those of the other layout
    else:
        out = query.new_empty((qs[0], qs[2], qs[1], qs[3])).transpose(1, 2)
    ot = out.stride()
    lse = torch.empty((qs[0], qs[h], qs[n]), dtype=torch.float32, device=query.device) if return_lse else None
    items, tail = qs[0], _NO_EXTRAS
    if extras is not None:
        items, tail = _pack_extras(extras, qs[0], qs[h], qs[n], ks[n], index)
    shape = (items, qs[h], ks[h], qs[n], ks[n], qs[3], dv)
    if extras is None:
        sized = (*shape, recipe, flags & (_INT4 | _SMOOTH_Q))
        size = _workspace_sizes.get(sized) or workspace_bytes(*sized)
    else:
        size = _workspace_query(
            _CORE.pack(_SIZE, flags, index, code, recipe, *shape, scale, 0, *[0] * 5, lens, *[0] * 15) + tail
        )
    stream = torch._C._cuda_getCurrentRawStream(index)
    workspace, address = allocate(size, index, stream)
    args = _CORE.pack(
        _SIZE, flags, index, code, recipe, *shape, scale, 0,
        query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(), lens,
        address, size, stream,
        qt[0], qt[h], qt[n], kt[0], kt[h], kt[n], vt[0], vt[h], vt[n], ot[0], ot[h], ot[n],
    )  # fmt: skip
    return args + tail, out, lse, workspace, (query, key, value)


def address_of(name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], index: int) -> int:
    """Of a small contiguous tensor, checked; 0 for None."""
    if tensor is None:
        return 0
    if tensor.dtype != dtype or tensor.shape != shape or tensor.get_device() != index or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor of shape {shape} on cuda:{index}; "
            f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        )
    return tensor.data_ptr()


def _pack_extras(x: Extras, batch: int, heads: int, q_len: int, kv_len: int, index: int) -> tuple[int, bytes]:
    """(items, the tail of the struct). items: the batch size, or how many sequences lie in its only item."""
    mask, kind, strides = 0, 0, (0, 0, 0, 0)
    if x.attn_mask is not None:
        if x.attn_mask.get_device() != index or x.attn_mask.dtype not in _MASK_KINDS:
            raise ValueError(
                f"attn_mask must be bool, float16, bfloat16 or float32 on cuda:{index}; got "
                f"{x.attn_mask.dtype} on {x.attn_mask.device}"
            )
        expanded = x.attn_mask.expand(batch, heads, q_len, kv_len)
        sizes = expanded.shape
        strides = tuple(s if n > 1 else 0 for s, n in zip(expanded.stride(), sizes, strict=True))  # type: ignore[assignment]
        mask, kind = expanded.data_ptr(), _MASK_KINDS[x.attn_mask.dtype]
    items, cu_q, cu_k = batch, 0, 0
    if x.cu_seqlens_q is not None or x.cu_seqlens_k is not None:
        if batch != 1 or x.cu_seqlens_q is None or x.cu_seqlens_k is None:
            raise ValueError(f"cu_seqlens_q and cu_seqlens_k belong together and need batch 1; got batch {batch}")
        items = x.cu_seqlens_q.shape[0] - 1
        cu_q = address_of("cu_seqlens_q", x.cu_seqlens_q, torch.int32, (items + 1,), index)
        cu_k = address_of("cu_seqlens_k", x.cu_seqlens_k, torch.int32, (items + 1,), index)
    padding = stride = 0
    if x.key_padding is not None:
        padding = address_of("key_padding", x.key_padding, torch.bool, (x.key_padding.shape[0], kv_len), index)
        stride = kv_len if x.key_padding.shape[0] > 1 else 0
    return items, _TAIL.pack(
        address_of("kv_starts", x.kv_starts, torch.int32, (batch,), index), padding, stride, cu_q, cu_k, mask, *strides,
        address_of("sinks", x.sinks, torch.float32, (heads,), index), x.softcap, x.left, x.right, kind,
    )  # fmt: skip


def _tensor_workspace(size: int, index: int, stream: int) -> tuple[Tensor, int]:
    workspace = torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}")
    return workspace, workspace.data_ptr()


def _raw_workspace(size: int, index: int, stream: int) -> tuple[int, int]:
    """From the same allocator without the cost of a tensor. Given back right after the launch: the block belongs to the
    stream, so the allocator reuses it in stream order only."""
    address = torch._C._cuda_cudaCachingAllocator_raw_alloc(size, stream)
    return address, address


class Call:
    """One call's packed arguments, output and workspace. `prepare` and `forward` can be launched separately (timing,
    repeated attention against one K and V); both use the stream that was current when the call was made."""

    def __init__(self, packed: tuple[bytes, Tensor, Tensor | None, Any, tuple[Tensor, Tensor, Tensor]]) -> None:
        self.lib = load()
        self.args, self.out, self.lse, self.workspace, self.inputs = packed

    def prepare(self) -> None:
        check(self.lib.sage2_prepare(self.args))

    def forward(self) -> None:
        check(self.lib.sage2_forward(self.args))

    def run(self) -> None:
        check(self.lib.sage2_prepare_and_forward(self.args))


def workspace_bytes(*shape: int) -> int:
    """shape: batch, heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, recipe, flags"""
    size = _workspace_sizes.get(shape)
    if size is None:
        b, h, kh, n, kn, d, dv, recipe, flags = shape
        size = _workspace_query(
            _CORE.pack(_SIZE, flags, 0, 0, recipe, b, h, kh, n, kn, d, dv, 1.0, 0, *([0] * 21)) + _NO_EXTRAS
        )
        if len(_workspace_sizes) > 4096:
            _workspace_sizes.clear()
        _workspace_sizes[shape] = size
    return size


def _workspace_query(args: bytes) -> int:
    lib = load()
    size: int = lib.sage2_workspace_bytes(args)
    if size == 0:
        message = lib.sage2_last_error().decode()
        raise (UnsupportedCall if "support" in message or "large" in message or "exceeds" in message else ValueError)(
            message
        )
    return size


def _flags(recipe: str, is_causal: bool, top_left: bool, smooth_k: bool, smooth_v: bool, smooth_q: bool | None) -> int:
    flags = is_causal * _CAUSAL + top_left * _TOP_LEFT + smooth_v * _SMOOTH_V + (not smooth_k) * _NO_SMOOTH_K
    if recipe.startswith("qk_int4"):
        flags += _INT4
        smooth_q = smooth_q is not False
    return flags + _SMOOTH_Q if smooth_q else flags


def make_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    tensor_layout: Literal["HND", "NHD"] = "HND",
    out_layout: Literal["HND", "NHD"] = "HND",
    scale: float,
    is_causal: bool = False,
    causal_top_left: bool = False,
    kv_lens: Tensor | None = None,
    recipe: str = "qk_int8_pv_fp8",
    smooth_k: bool = True,
    smooth_v: bool = True,
    smooth_q: bool | None = None,
    return_lse: bool = False,
    extras: Extras | None = None,
) -> Call:
    """The call that `forward` would run, for launching its parts."""
    flags = _flags(recipe, is_causal, causal_top_left, smooth_k, smooth_v, smooth_q)
    return Call(
        _pack(
            query,
            key,
            value,
            tensor_layout,
            out_layout,
            scale,
            flags,
            RECIPES[recipe],
            kv_lens,
            return_lse,
            extras,
            _tensor_workspace,
        )
    )


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    tensor_layout: Literal["HND", "NHD"] = "HND",
    out_layout: Literal["HND", "NHD"] = "HND",
    scale: float,
    is_causal: bool = False,
    causal_top_left: bool = False,
    kv_lens: Tensor | None = None,
    recipe: str = "qk_int8_pv_fp8",
    smooth_k: bool = True,
    smooth_v: bool = True,
    smooth_q: bool | None = None,
    return_lse: bool = False,
    extras: Extras | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Quantized attention on CUDA tensors of one device; any view whose last dimension has stride 1 is read in place.

    tensor_layout: "HND" [batch, heads, tokens, head_dim] or "NHD" [batch, tokens, heads, head_dim], of all three
        inputs and of the output's shape; out_layout: in which order the output, a new tensor of the inputs' dtype, lies
        in memory, contiguous.
    scale: of the softmax. is_causal: row i sees key j where j <= i + kv_len - q_len (the item's own kv length), or
        j <= i with causal_top_left. kv_lens: int32 [batch] on the device; keys from kv_lens[b] on
        do not exist for item b.
    recipe: one of RECIPES. smooth_k, smooth_v: quantize K, V minus a vector per head. smooth_q: quantize 64 rows of Q
        at a time minus their mean, whose logits are added in float32; None: with INT4. INT4 and smooth_q: head_dim at
        most 128; smooth_q takes q_len / 64 x kv_len floats a head while the call runs.
    extras: masks, windows, softcap, sinks, sequences laid end to end.
    Returns the output and, if asked, the natural log-sum-exp of the true scaled scores, float32 [batch, heads, q_len].
    A row that sees no key is zero, its log-sum-exp -inf.
    """
    index = query.get_device()
    if index >= 0 and index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return forward(
                query,
                key,
                value,
                tensor_layout=tensor_layout,
                out_layout=out_layout,
                scale=scale,
                is_causal=is_causal,
                causal_top_left=causal_top_left,
                kv_lens=kv_lens,
                recipe=recipe,
                smooth_k=smooth_k,
                smooth_v=smooth_v,
                smooth_q=smooth_q,
                return_lse=return_lse,
                extras=extras,
            )
    flags = _flags(recipe, is_causal, causal_top_left, smooth_k, smooth_v, smooth_q)
    lib = _library or load()
    args, out, lse, workspace, _ = _pack(
        query, key, value, tensor_layout, out_layout, scale, flags, RECIPES[recipe], kv_lens, return_lse, extras,
        _raw_workspace,
    )  # fmt: skip
    code = lib.sage2_prepare_and_forward(args)
    torch._C._cuda_cudaCachingAllocator_raw_delete(workspace)
    if code:
        check(code)
    return out, lse
