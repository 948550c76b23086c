"""Calls the compiled library: one load per architecture, argument packing, error codes to exceptions.

`forward` is the whole Python side of a kernel call: it takes CUDA tensors, allocates output, log-sum-exp and
workspace from torch's allocator, and launches on the current stream of the tensors' device. It checks what the
library cannot see (devices, dtypes); shapes and limits are checked in C and come back as exceptions.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sage_patch import backends
from sage_patch.args import Args, key_padding
from sage_patch.errors import SagePatchError
from sage_patch.kernels import driver, first_use, torch_private
from sage_patch.kernels.structs import CStruct
from sage_patch.recipes import Recipe, UnsupportedCall

# What sage2.h says in numbers; tests/kernels/test_layout.py compares them.
VERSION = 5
ERRORS = {"ARGUMENT": 1, "UNSUPPORTED": 2, "WORKSPACE": 3, "DEVICE": 4, "CUDA": 5}
FLAGS = {"CAUSAL": 1, "TOP_LEFT": 2, "SMOOTH_V": 4, "NO_SMOOTH_K": 8, "INT4": 16, "SMOOTH_Q": 32}
DTYPES = {torch.float16: 0, torch.bfloat16: 1}
PV = {"fp8": 0, "fp16": 1}
MASK_KINDS = {torch.bool: 1, torch.float16: 2, torch.bfloat16: 3, torch.float32: 4}
_CAUSAL, _TOP_LEFT, _SMOOTH_V, _NO_SMOOTH_K, _INT4, _SMOOTH_Q = FLAGS.values()
_BITS = {8: 0, 4: _INT4}

# struct Sage2Args of sage2.h in three pieces: what every call has, what only calls with more than lengths have, and
# where the call works.
CALL = CStruct(
    size="I", flags="I", device="i", capability="i", dtype="i", recipe="i",
    batch="i", heads="i", kv_heads="i", q_len="i", kv_len="i", head_dim="i", v_head_dim="i", scale="f",
    q="P", k="P", v="P", out="P", lse="P", kv_lens="P",
    q_strides="3q", k_strides="3q", v_strides="3q", out_strides="3q",
)  # fmt: skip
EXTRAS = CStruct(
    kv_starts="P", key_padding="P", key_padding_stride="q", cu_seqlens_q="P", cu_seqlens_k="P",
    mask="P", mask_strides="4q", sinks="P", softcap="f", left="i", right="i", mask_kind="i",
)  # fmt: skip
PLACE = CStruct(workspace="P", workspace_bytes="N", stream="P")
SIZE = CALL.size + EXTRAS.size + PLACE.size
_NO_EXTRAS = EXTRAS.pack(left=-1, right=-1)
_NOWHERE = PLACE.pack()


class KernelError(SagePatchError, RuntimeError):
    """The library refused a call or a launch failed."""


_lock = threading.Lock()
_workspace_sizes: dict[tuple[int, ...], int] = {}
_by_architecture: dict[str, ctypes.CDLL] = {}
_by_device: dict[int, tuple[ctypes.CDLL, int]] = {}  # and the device's capability, 10 * major + minor


def prepare(index: int | None) -> None:
    """Have the library of a device at hand; None: of the current one. Raises BuildError if it cannot be."""
    load(torch_private.current_device() if index is None else index)


def load(index: int) -> ctypes.CDLL:
    """The library that holds the machine code of the CUDA device `index`, built first if need be."""
    return of_device(index)[0]


def of_device(index: int) -> tuple[ctypes.CDLL, int]:
    """(the library, the device's compute capability as 10 * major + minor) of the CUDA device `index`."""
    found = _by_device.get(index)
    if found is None:
        capability = torch.cuda.get_device_capability(index)
        architecture = backends.architecture_of(capability)
        if architecture is None:
            raise UnsupportedCall(
                f"cuda:{index} has compute capability {capability[0]}.{capability[1]}; kernels exist for "
                f"{backends.capabilities()}"
            )
        found = _by_device[index] = load_for(architecture), 10 * capability[0] + capability[1]
        backend = backends.BACKENDS[backends.find("cuda", capability)]
        if not backend.is_proven:
            try:
                first_use.compare(backend, forward, f"cuda:{index}")
            except Exception:
                del _by_device[index]
                raise
    return found


def load_for(architecture: str) -> ctypes.CDLL:
    """The library that holds an architecture's machine code, such as "90": the one that came with the package, else
    one of the cache, built first if need be. Loaded once a process."""
    lib = _by_architecture.get(architecture)
    if lib is None:
        with _lock:
            lib = _by_architecture.get(architecture)
            if lib is None:
                from sage_patch.kernels import build, nvrtc

                path = build.find_library(architecture)
                lib = _open(str(path))
                nvrtc.load_images(lib, path, architecture)
                for held in architectures(lib):
                    _by_architecture.setdefault(held, lib)
                if architecture not in _by_architecture:
                    raise KernelError(
                        f"{path} holds kernels for {', '.join(architectures(lib))}, not for {architecture}: "
                        "remove the file or reinstall the package"
                    )
    return _by_architecture[architecture]


def _open(path: str) -> ctypes.CDLL:
    lib = ctypes.CDLL(path)
    if lib.sage2_version() != VERSION:
        raise KernelError(
            f"{path} is version {lib.sage2_version()} of the library, this package needs version {VERSION}: remove the "
            "file or reinstall the package"
        )
    driver.check(lib.sage2_cuda_version())
    lib.sage2_last_error.restype = ctypes.c_char_p
    lib.sage2_page_bytes.restype = ctypes.c_size_t
    for name in ("sage2_prepare", "sage2_forward", "sage2_prepare_and_forward"):
        getattr(lib, name).argtypes = [ctypes.c_char_p]
    for name in ("sage2_pages_append", "sage2_pages_attend"):
        getattr(lib, name).argtypes = [ctypes.c_char_p]
    for name in ("sage2_workspace_bytes", "sage2_pages_workspace_bytes"):
        getattr(lib, name).argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)]
    return lib


def architectures(lib: ctypes.CDLL) -> list[str]:
    """The architectures that a library holds machine code for, such as "90"."""
    found = (ctypes.c_int * 32)()
    return [str(a) for a in found[: lib.sage2_architectures(found, 32)]]


def check(lib: ctypes.CDLL, code: int) -> None:
    """Raise what an error code stands for, with the library's message."""
    if code:
        kind = {ERRORS["ARGUMENT"]: ValueError, ERRORS["UNSUPPORTED"]: UnsupportedCall}.get(code, KernelError)
        raise kind(lib.sage2_last_error().decode())


def _pack(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    args: Args,
    recipe: Recipe,
    padding: Tensor | None,
    allocate: Callable[[int, int, int], tuple[Any, int]],
) -> tuple[ctypes.CDLL, bytes, Tensor, Tensor | None, Any, tuple[Tensor, ...]]:
    """Checks, allocations and the packed struct: (library, struct, out, lse, workspace, the tensors it points to)."""
    dtype, index, qs, ks, vs = query.dtype, query.get_device(), query.shape, key.shape, value.shape
    if (
        ks[:3] != vs[:3]
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
            f"value {tuple(vs)} {value.dtype} {value.device} do not belong together"
        )
    code = DTYPES.get(dtype)
    if code is None:
        raise ValueError(f"dtype {dtype}: float16 and bfloat16 are supported")
    lib, capability = of_device(index)
    # Any strides will do except a stretched last dimension; such tensors are copied.
    qt, kt, vt = query.stride(), key.stride(), value.stride()
    if (qt[3] != 1 or kt[3] != 1 or vt[3] != 1) and qs[3] > 1:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        qt, kt, vt = query.stride(), key.stride(), value.stride()
    batch, heads, q_len, head_dim = qs
    nhd = args.out_layout == "NHD"
    if vs[3] != head_dim:
        out = query.new_empty((batch, q_len, heads, vs[3]) if nhd else (batch, heads, q_len, vs[3]))
        out = out.transpose(1, 2) if nhd else out
    elif not nhd:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    elif qt == (heads * q_len * head_dim, head_dim, heads * head_dim, 1):
        out = torch.empty_like(query)  # takes the query's own strides, which are those of the other layout
    else:
        out = query.new_empty((batch, q_len, heads, head_dim)).transpose(1, 2)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=query.device) if args.return_lse else None
    flags = (
        (args.right == 0) * _CAUSAL
        + args.top_left * _TOP_LEFT
        + recipe.smooth_v * _SMOOTH_V
        + (not recipe.smooth_k) * _NO_SMOOTH_K
        + _BITS[recipe.qk_bits]
        + recipe.smooth_q * _SMOOTH_Q
    )
    shape = (batch, heads, ks[1], q_len, ks[2], head_dim, vs[3])
    pv, items, extras = PV[recipe.pv], batch, None
    kept: tuple[Tensor, ...] = ()
    if (
        args.attn_mask is not None or padding is not None or args.kv_starts is not None or args.left >= 0
        or args.right > 0 or args.softcap or args.sinks is not None or args.cu_seqlens_q is not None
    ):  # fmt: skip
        items, extras, kept = _pack_extras(args, padding, shape, index)
    packed = CALL.pack(
        size=SIZE, flags=flags, device=index, capability=capability, dtype=code, recipe=pv,
        batch=items, heads=heads, kv_heads=ks[1], q_len=q_len, kv_len=ks[2], head_dim=head_dim,
        v_head_dim=vs[3], scale=args.scale,
        q=query.data_ptr(), k=key.data_ptr(), v=value.data_ptr(), out=out.data_ptr(),
        lse=0 if lse is None else lse.data_ptr(),
        kv_lens=address_of("kv_lens", args.kv_lens, torch.int32, (batch,), index),
        q_strides=qt[:3], k_strides=kt[:3], v_strides=vt[:3], out_strides=out.stride()[:3],
    )  # fmt: skip
    if extras is None:
        packed += _NO_EXTRAS
        sized = (capability, flags & (_INT4 | _SMOOTH_Q), pv, *shape)
        size = _workspace_sizes.get(sized)
        if size is None:
            if len(_workspace_sizes) > 4096:
                _workspace_sizes.clear()
            size = _workspace_sizes[sized] = workspace_bytes(lib, packed + _NOWHERE)
    else:
        packed += extras
        size = workspace_bytes(lib, packed + _NOWHERE)
    stream = torch_private.current_stream(index)
    workspace, address = allocate(size, index, stream)
    packed += PLACE.pack(workspace=address, workspace_bytes=size, stream=stream)
    return lib, packed, out, lse, workspace, (query, key, value, *kept)


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


def _pack_extras(
    args: Args, padding: Tensor | None, shape: tuple[int, ...], index: int
) -> tuple[int, bytes, tuple[Tensor, ...]]:
    """(items, the struct's middle piece, tensors to keep until the launch). items: the batch size, or how many
    sequences lie in its only item."""
    batch, heads, _, q_len, kv_len, _, _ = shape
    mask, kind, strides = 0, 0, (0, 0, 0, 0)
    attn_mask, sinks = args.attn_mask, args.sinks
    kept: list[Tensor] = []
    if attn_mask is not None:
        if attn_mask.get_device() != index or attn_mask.dtype not in MASK_KINDS:
            raise ValueError(
                f"attn_mask must be bool, float16, bfloat16 or float32 on cuda:{index}; got "
                f"{attn_mask.dtype} on {attn_mask.device}"
            )
        expanded = attn_mask.expand(batch, heads, q_len, kv_len)
        strides = tuple(s if n > 1 else 0 for s, n in zip(expanded.stride(), expanded.shape, strict=True))  # type: ignore[assignment]
        mask, kind = expanded.data_ptr(), MASK_KINDS[attn_mask.dtype]
    items, cu = batch, [0, 0]
    if args.cu_seqlens_q is not None or args.cu_seqlens_k is not None:
        if batch != 1 or args.cu_seqlens_q is None or args.cu_seqlens_k is None:
            raise ValueError(f"cu_seqlens_q and cu_seqlens_k belong together and need batch 1; got batch {batch}")
        items = args.cu_seqlens_q.shape[0] - 1
        for i, (name, given) in enumerate((("cu_seqlens_q", args.cu_seqlens_q), ("cu_seqlens_k", args.cu_seqlens_k))):
            kept.append(given.int().contiguous())
            cu[i] = address_of(name, kept[-1], torch.int32, (items + 1,), index)
    padding_at = stride = 0
    if padding is not None:
        kept.append(padding.contiguous())
        padding_at = address_of("key_padding", kept[-1], torch.bool, (padding.shape[0], kv_len), index)
        stride = kv_len if padding.shape[0] > 1 else 0
    if sinks is not None:
        sinks = sinks.float().contiguous()
        kept.append(sinks)
    packed = EXTRAS.pack(
        kv_starts=address_of("kv_starts", args.kv_starts, torch.int32, (batch,), index),
        key_padding=padding_at, key_padding_stride=stride, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1],
        mask=mask, mask_strides=strides, mask_kind=kind,
        sinks=address_of("sinks", sinks, torch.float32, (heads,), index),
        softcap=args.softcap, left=args.left, right=args.right,
    )  # fmt: skip
    return items, packed, tuple(kept)


def workspace_bytes(lib: ctypes.CDLL, packed: bytes) -> int:
    """Of a call, whose pointers and strides are not looked at. Raises ValueError or UnsupportedCall."""
    size = ctypes.c_size_t()
    check(lib, lib.sage2_workspace_bytes(packed, ctypes.byref(size)))
    return size.value


def _tensor_workspace(size: int, index: int, stream: int) -> tuple[Tensor, int]:
    workspace = torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}")
    return workspace, workspace.data_ptr()


def _raw_workspace(size: int, index: int, stream: int) -> tuple[int, int]:
    """Without the cost of a tensor; given back right after the launch."""
    address = torch_private.allocate(size, stream)
    return address, address


class Call:
    """One call's packed arguments, output and workspace. `prepare` and `forward` can be launched separately (timing,
    repeated attention against one K and V); both use the stream that was current when the call was made.

    Arguments are `launch`'s.
    """

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, args: Args, recipe: Recipe, padding: Tensor | None = None
    ) -> None:
        packed = _pack(query, key, value, args, recipe, padding, _tensor_workspace)
        self.lib, self.args, self.out, self.lse, self.workspace, self.inputs = packed

    def prepare(self) -> None:
        check(self.lib, self.lib.sage2_prepare(self.args))

    def forward(self) -> None:
        check(self.lib, self.lib.sage2_forward(self.args))

    def run(self) -> None:
        check(self.lib, self.lib.sage2_prepare_and_forward(self.args))


def forward(query: Tensor, key: Tensor, value: Tensor, args: Args, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """The operator's call on CUDA tensors; a mask that only says which keys there are goes as key padding."""
    padding = None
    if args.attn_mask is not None:
        if args.attn_mask.dtype == torch.float64:
            args = args._replace(attn_mask=args.attn_mask.float())
        elif args.left < 0 and args.right < 0 and args.kv_lens is None:
            padding = key_padding(args.attn_mask)
            if padding is not None:
                args = args._replace(attn_mask=None)
    return launch(query, key, value, args, recipe, padding)


def launch(
    query: Tensor, key: Tensor, value: Tensor, args: Args, recipe: Recipe, padding: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Quantized attention on CUDA tensors of one device; any view whose last dimension has stride 1 is read in place.

    args: as it says, of which recipe, reason and site are not looked at; recipe says whether K, V (minus a vector per
    head) and Q (64 rows at a time minus their mean, whose logits are added in float32) are smoothed. INT4 and a
    smoothed Q need head_dim at most 128; the latter takes q_len / 64 x kv_len floats a head while the call runs.
    padding: bool [batch or 1, kv_len], False: there is no such key; not with masks, causal, windows or lengths.
    Returns the output, a new tensor of the inputs' dtype, and if asked the natural log-sum-exp of the true scaled
    scores, float32 [batch, heads, q_len]. A row that sees no key is zero, its log-sum-exp -inf. Raises ValueError,
    UnsupportedCall or KernelError.
    """
    index = query.get_device()
    if index >= 0 and index != torch_private.current_device():
        with torch.cuda.device(index):
            return launch(query, key, value, args, recipe, padding)
    lib, packed, out, lse, workspace, _inputs = _pack(query, key, value, args, recipe, padding, _raw_workspace)
    code = lib.sage2_prepare_and_forward(packed)
    torch_private.free(workspace)
    if code:
        check(lib, code)
    return out, lse
