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
from typing import Any, Literal

import torch
from torch import Tensor

RECIPES = {"qk_int8_pv_fp8": 0, "qk_int8_pv_fp16": 1}
_DTYPES = {torch.float16: 0, torch.bfloat16: 1}
_CAUSAL, _TOP_LEFT, _SMOOTH_V, _NO_SMOOTH_K = 1, 2, 4, 8

# struct Sage2Args of sage2.h
_ARGS = struct.Struct("@IIiiiiiiiiifPPPPPPPNP12q")
_VERSION = 1


class KernelError(RuntimeError):
    """The library refused a call or a launch failed."""


class UnsupportedCall(KernelError):
    """The arguments are legal but no kernel covers them."""


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


def _check(code: int) -> None:
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
    allocate: Callable[[int, int, int], tuple[Any, int]],
) -> tuple[bytes, Tensor, Tensor | None, Any, tuple[Tensor, Tensor, Tensor]]:
    """Checks, allocations and the packed struct: (args, out, lse, workspace, the inputs it points to)."""
    dtype, index, qs, ks = query.dtype, query.get_device(), query.shape, key.shape
    if (
        ks != value.shape
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
    lens = 0
    if kv_lens is not None:
        if (
            kv_lens.dtype != torch.int32
            or kv_lens.shape != (qs[0],)
            or kv_lens.get_device() != index
            or not kv_lens.is_contiguous()
        ):
            raise ValueError(f"kv_lens must be a contiguous int32 tensor of shape ({qs[0]},) on {query.device}")
        lens = kv_lens.data_ptr()
    h, n = (1, 2) if tensor_layout == "HND" else (2, 1)
    shape = (qs[0], qs[h], ks[h], qs[n], ks[n], qs[3], recipe)
    size = _workspace_sizes.get(shape) or workspace_bytes(*shape)
    if tensor_layout == out_layout:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    elif qt == (qs[1] * qs[2] * qs[3], qs[3], qs[1] * qs[3], 1):
        out = torch.empty_like(query)  # takes the query's own strides, which are those of the other layout
    else:
        out = query.new_empty((qs[0], qs[2], qs[1], qs[3])).transpose(1, 2)
    ot = out.stride()
    lse = torch.empty((qs[0], qs[h], qs[n]), dtype=torch.float32, device=query.device) if return_lse else None
    stream = torch._C._cuda_getCurrentRawStream(index)
    workspace, address = allocate(size, index, stream)
    args = _ARGS.pack(
        _ARGS.size,
        flags,
        index,
        code,
        recipe,
        qs[0],
        qs[h],
        ks[h],
        qs[n],
        ks[n],
        qs[3],
        scale,
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        lens,
        address,
        size,
        stream,
        qt[0],
        qt[h],
        qt[n],
        kt[0],
        kt[h],
        kt[n],
        vt[0],
        vt[h],
        vt[n],
        ot[0],
        ot[h],
        ot[n],
    )
    return args, out, lse, workspace, (query, key, value)


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
        _check(self.lib.sage2_prepare(self.args))

    def forward(self) -> None:
        _check(self.lib.sage2_forward(self.args))

    def run(self) -> None:
        _check(self.lib.sage2_prepare_and_forward(self.args))


def workspace_bytes(*shape: int) -> int:
    """shape: batch, heads, kv_heads, q_len, kv_len, head_dim, recipe"""
    lib = load()
    size = _workspace_sizes.get(shape)
    if size is None:
        b, h, kh, n, kn, d, recipe = shape
        size = lib.sage2_workspace_bytes(_ARGS.pack(_ARGS.size, 0, 0, 0, recipe, b, h, kh, n, kn, d, 1.0, *([0] * 21)))
        if size == 0:
            message = lib.sage2_last_error().decode()
            raise (
                UnsupportedCall if "support" in message or "large" in message or "exceeds" in message else ValueError
            )(message)
        if len(_workspace_sizes) > 4096:
            _workspace_sizes.clear()
        _workspace_sizes[shape] = size
    return size


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
    return_lse: bool = False,
) -> Call:
    """The call that `forward` would run, for launching its parts."""
    flags = is_causal * _CAUSAL + causal_top_left * _TOP_LEFT + smooth_v * _SMOOTH_V + (not smooth_k) * _NO_SMOOTH_K
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
    smooth_v: bool = True,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Quantized attention on CUDA tensors of one device; any view whose last dimension has stride 1 is read in place.

    tensor_layout: "HND" [batch, heads, tokens, head_dim] or "NHD" [batch, tokens, heads, head_dim], of all three
        inputs and of the output's shape; out_layout: in which order the output, a new tensor of the inputs' dtype, lies
        in memory, contiguous.
    scale: of the softmax. is_causal: row i sees key j where j <= i + kv_len - q_len (the item's own kv length), or
        j <= i with causal_top_left. kv_lens: int32 [batch] on the device; keys from kv_lens[b] on
        do not exist for item b.
    recipe: "qk_int8_pv_fp8" or "qk_int8_pv_fp16". smooth_v: quantize V minus a per-channel vector.
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
                smooth_v=smooth_v,
                return_lse=return_lse,
            )
    flags = is_causal * _CAUSAL + causal_top_left * _TOP_LEFT + smooth_v * _SMOOTH_V
    lib = _library or load()
    args, out, lse, workspace, _ = _pack(
        query, key, value, tensor_layout, out_layout, scale, flags, RECIPES[recipe], kv_lens, return_lse, _raw_workspace
    )
    code = lib.sage2_prepare_and_forward(args)
    torch._C._cuda_cudaCachingAllocator_raw_delete(workspace)
    if code:
        _check(code)
    return out, lse
