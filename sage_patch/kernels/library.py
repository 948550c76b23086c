"""Calls the compiled library: one load per architecture, argument packing, error codes to exceptions.

`launch` is the whole Python side of a kernel call: it takes CUDA tensors, allocates output, log-sum-exp and
workspace from torch's allocator, and launches on the current stream of the tensors' device. It checks what the
library cannot see (devices, dtypes); shapes and limits are checked in C and come back as exceptions. All of that that
is the same for every call of a kind is a `Plan`, made once.
"""

from __future__ import annotations

import ctypes
import math
import operator
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_patch import backends
from sage_patch.args import Args, key_padding
from sage_patch.errors import SagePatchError
from sage_patch.kernels import accumulators, driver, first_use, torch_private
from sage_patch.kernels.plans import PLANS
from sage_patch.kernels.structs import CStruct
from sage_patch.recipes import Recipe, UnsupportedCall

# What sage2.h says in numbers; tests/kernels/test_layout.py compares them.
VERSION = 5
ERRORS = {"ARGUMENT": 1, "UNSUPPORTED": 2, "WORKSPACE": 3, "DEVICE": 4, "CUDA": 5}
FLAGS = {
    "CAUSAL": 1, "TOP_LEFT": 2, "SMOOTH_V": 4, "NO_SMOOTH_K": 8, "INT4": 16, "SMOOTH_Q": 32, "ROTATE": 64,
    "EXP_DUO": 128, "EXP_CHORD": 256, "PV_FP16_SUMS": 1024,
}  # fmt: skip
DTYPES = {torch.float16: 0, torch.bfloat16: 1}
PV = {"fp8": 0, "fp16": 1}
MASK_KINDS = {torch.bool: 1, torch.float16: 2, torch.bfloat16: 3, torch.float32: 4}
_CAUSAL, _TOP_LEFT, _SMOOTH_V, _NO_SMOOTH_K, _INT4, _SMOOTH_Q, _ROTATE, _DUO, _CHORD, _PV_FP16_SUMS = FLAGS.values()
_BITS = {8: 0, 4: _INT4}
_EXP = {"exact": 0, "duo": _DUO, "chord": _CHORD}

# struct Sage2Args of sage2.h in two pieces: what is the same whenever a call is repeated with other tensors of the same
# kind, and where these tensors and the workspace lie.
FACTS = CStruct(
    size="I", flags="I", device="i", capability="i", dtype="i", recipe="i",
    batch="i", heads="i", kv_heads="i", q_len="i", kv_len="i", head_dim="i", v_head_dim="i", scale="f",
    q_strides="3q", k_strides="3q", v_strides="3q", out_strides="3q", key_padding_stride="q", mask_strides="4q",
    softcap="f", left="i", right="i", mask_kind="i", workspace_bytes="N",
)  # fmt: skip
POINTERS = CStruct(
    q="P", k="P", v="P", out="P", lse="P", kv_lens="P", kv_starts="P", key_padding="P", cu_seqlens_q="P",
    cu_seqlens_k="P", mask="P", sinks="P", workspace="P", stream="P",
)  # fmt: skip
SIZE = FACTS.size + POINTERS.size


class KernelError(SagePatchError, RuntimeError):
    """The library refused a call or a launch failed."""


_lock = threading.Lock()
_by_architecture: dict[str, ctypes.CDLL] = {}
_by_device: dict[int, tuple[ctypes.CDLL, int]] = {}  # and the device's capability, 10 * major + minor
# (device, type of P and V) whose products are summed in fp16. Fixed once a device's library is loaded: plans rely on
# that.
sums_in_fp16: set[tuple[int, str]] = set()


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
        if index < 0:
            raise ValueError("the tensors are on no CUDA device")
        capability = torch.cuda.get_device_capability(index)
        architecture = backends.architecture_of(capability)
        if architecture is None:
            raise UnsupportedCall(
                f"cuda:{index} has compute capability {capability[0]}.{capability[1]}; kernels exist for "
                f"{backends.capabilities()}"
            )
        found = _by_device[index] = load_for(architecture), 10 * capability[0] + capability[1]
        backend = backends.BACKENDS[backends.find("cuda", capability)]
        sums_in_fp16.difference_update([(index, pv) for pv in PV])
        if backend.has_fp16_sums:
            sums_in_fp16.update((index, pv) for pv in accumulators.in_fp16(torch.cuda.get_device_name(index)))
        if not backend.is_proven:
            try:
                first_use.compare(backend, forward, f"cuda:{index}")
            except Exception:
                del _by_device[index]
                PLANS.clear()  # those of the comparison's calls
                raise
    return found


def loaded_from(index: int) -> str | None:
    """The file of the library that the CUDA device `index` uses; None if it has not loaded one."""
    found = _by_device.get(index)
    return None if found is None else found[0]._name


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


class Plan(NamedTuple):
    """One kind of call, checked: all there is to know about it but where its tensors lie.

    device: its index. facts: the struct's first piece. out_shape: of the output as its memory lies, which is NHD
    if out_is_nhd; like_query: it has the query's shape and strides. lse_shape: None if no log-sum-exp is asked for.
    is_padding: the mask goes as key padding. recipe: its id is part of the cache's key, and no other object can have
    that id while it is kept here.
    """

    lib: ctypes.CDLL
    device: int
    facts: bytes
    workspace_bytes: int
    out_shape: tuple[int, ...]
    out_is_nhd: bool
    like_query: bool
    lse_shape: tuple[int, ...] | None
    is_padding: bool
    recipe: Recipe

    def launch(self, query: Tensor, key: Tensor, value: Tensor, tensors: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
        """Run a call of this kind. tensors: the first six of Args. Of all tensors only their addresses are asked."""
        lib, index, facts, size = self[:4]
        if index != torch_private.current_device():
            with torch.cuda.device(index):
                return self.launch(query, key, value, tensors)
        out, lse = self.outputs(query)
        stream = torch_private.current_stream(index)
        there = _addresses(query, key, value, out, lse, tensors, self.is_padding)
        # Without the cost of a tensor, and given back right after the launch: torch reuses it in the stream's order.
        workspace = torch_private.allocate(size, stream)
        code = lib.sage2_prepare_and_forward(facts + POINTERS.pack_in_order(*there, workspace, stream))
        torch_private.free(workspace)
        if code:
            check(lib, code)
        return out, lse

    def outputs(self, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """A new output, as its memory lies, and a log-sum-exp if the call has one."""
        out = torch.empty_like(query) if self.like_query else query.new_empty(self.out_shape)
        return out, None if self.lse_shape is None else query.new_empty(self.lse_shape, dtype=torch.float32)

    def of_user(self, query: Tensor, is_packed: bool) -> Plan:
        """For the tensors as a user of `sage_attention` holds them: tokens before heads, packed ones without a batch.
        They lie where their views lie that the plan was made for."""
        out_shape = self.out_shape[1:] if is_packed else self.out_shape
        lse_shape = self.lse_shape[1:] if is_packed and self.lse_shape is not None else self.lse_shape
        strides = tuple(math.prod(out_shape[i + 1 :]) for i in range(len(out_shape)))
        like_query = query.shape == out_shape and query.stride() == strides
        return self._replace(out_shape=out_shape, lse_shape=lse_shape, like_query=like_query)


def plan(query: Tensor, key: Tensor, value: Tensor, args: Args, recipe: Recipe) -> Plan | None:
    """The plan of a call, from the cache or made; None: some tensor has to be copied first (`readable`).

    Made from sizes, strides, dtypes, devices and numbers alone, which are the cache's key. Raises as `launch` does.
    """
    mask, starts, lens, sinks, cu_q, cu_k = args[:6]
    others: tuple[object, ...] | None = None
    if not (mask is starts is lens is sinks is cu_q is cu_k is None):
        others = tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in args[:6])
    found_by = (
        query.shape, query.stride(), query.dtype, query.get_device(),
        key.shape, key.is_contiguous() or key.stride(), key.dtype, key.get_device(),
        value.shape, value.is_contiguous() or value.stride(), value.dtype, value.get_device(),
        others, args[6:13], id(recipe),
    )  # fmt: skip
    found: Plan | None = PLANS.get(found_by)
    if found is None:
        given = (query, key, value, args)
        if not all(map(operator.is_, readable(*given), given)):
            return None
        found = _plan(*given, recipe)
        PLANS.put(found_by, found)
    return found


def is_padding(args: Args) -> bool:
    """Whether the mask only says which keys there are, in a call that may have key padding."""
    return args.left < 0 and args.right < 0 and args.kv_lens is None and key_padding(args.attn_mask) is not None


def readable(query: Tensor, key: Tensor, value: Tensor, args: Args) -> tuple[Tensor, Tensor, Tensor, Args]:
    """The tensors as the kernels read them: where they lie if they can be, else copied. Any strides will do but a
    stretched last dimension of query, key, value and padding; small vectors are contiguous and of one dtype."""
    query, key, value = (
        x if x.stride(3) == 1 or x.shape[3] == 1 or x.is_contiguous() else x.contiguous() for x in (query, key, value)
    )
    mask, _, _, sinks, cu_q, cu_k = args[:6]
    if mask is sinks is cu_q is cu_k is None:
        return query, key, value, args
    if mask is not None and mask.dtype == torch.float64:
        mask = mask.float()
    elif mask is not None and (mask.shape[3] != key.shape[2] or mask.stride(3) != 1) and is_padding(args):
        mask = mask[:, :1, :1].expand(-1, -1, -1, key.shape[2]).contiguous()
    read = (
        mask,
        None if sinks is None else sinks.float().contiguous(),
        None if cu_q is None else cu_q.int().contiguous(),
        None if cu_k is None else cu_k.int().contiguous(),
    )
    if not all(map(operator.is_, read, (args.attn_mask, sinks, cu_q, cu_k))):
        args = args._replace(attn_mask=read[0], sinks=read[1], cu_seqlens_q=read[2], cu_seqlens_k=read[3])
    return query, key, value, args


def _plan(query: Tensor, key: Tensor, value: Tensor, args: Args, recipe: Recipe) -> Plan:
    """Checks and packs what is readable."""
    dtype, index, qs, ks, vs = query.dtype, query.get_device(), query.shape, key.shape, value.shape
    if (
        ks[:3] != vs[:3]
        or qs[0] != ks[0]
        or qs[3] != ks[3]
        or key.dtype != dtype
        or value.dtype != dtype
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
    batch, heads, q_len, head_dim = qs
    kv_heads, kv_len, width = ks[1], ks[2], vs[3]
    nhd = args.out_layout == "NHD"
    if nhd:
        out_shape, out_strides = (batch, q_len, heads, width), (q_len * heads * width, width, heads * width, 1)
    else:
        out_shape, out_strides = (batch, heads, q_len, width), (heads * q_len * width, q_len * width, width, 1)
    items, mask, cu_q, cu_k = batch, args.attn_mask, args.cu_seqlens_q, args.cu_seqlens_k
    if cu_q is not None or cu_k is not None:
        if batch != 1 or cu_q is None or cu_k is None:
            raise ValueError(f"cu_seqlens_q and cu_seqlens_k belong together and need batch 1; got batch {batch}")
        items = cu_q.shape[0] - 1
        address_of("cu_seqlens_q", cu_q, torch.int32, (items + 1,), index)
        address_of("cu_seqlens_k", cu_k, torch.int32, (items + 1,), index)
    address_of("kv_lens", args.kv_lens, torch.int32, (batch,), index)
    address_of("kv_starts", args.kv_starts, torch.int32, (batch,), index)
    address_of("sinks", args.sinks, torch.float32, (heads,), index)
    kind, padding_stride, mask_strides, as_padding = 0, 0, (0, 0, 0, 0), False
    if mask is not None:
        if mask.get_device() != index or mask.dtype not in MASK_KINDS:
            raise ValueError(
                f"attn_mask must be bool, float16, bfloat16 or float32 on cuda:{index}; got {mask.dtype} on "
                f"{mask.device}"
            )
        seen = mask.expand(batch, heads, q_len, kv_len)
        strides = tuple(s if n > 1 else 0 for s, n in zip(seen.stride(), seen.shape, strict=True))
        as_padding = is_padding(args)
        if as_padding:
            padding_stride = strides[0]
        else:
            kind, mask_strides = MASK_KINDS[mask.dtype], strides  # type: ignore[assignment]
    facts: dict[str, Any] = dict(
        size=SIZE,
        flags=(args.right == 0) * _CAUSAL
        + args.top_left * _TOP_LEFT
        + recipe.smooth_v * _SMOOTH_V
        + (not recipe.smooth_k) * _NO_SMOOTH_K
        + _BITS[recipe.qk_bits]
        + recipe.smooth_q * _SMOOTH_Q
        + (recipe.rotate != "none") * _ROTATE
        + _EXP[recipe.exp]
        + ((index, recipe.pv) in sums_in_fp16) * _PV_FP16_SUMS,
        device=index, capability=capability, dtype=code, recipe=PV[recipe.pv],
        batch=items, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim,
        v_head_dim=width, scale=args.scale,
        q_strides=query.stride()[:3], k_strides=key.stride()[:3], v_strides=value.stride()[:3],
        out_strides=out_strides[:3], key_padding_stride=padding_stride, mask_strides=mask_strides,
        softcap=args.softcap, left=args.left, right=args.right, mask_kind=kind,
    )  # fmt: skip
    lse_shape = (batch, heads, q_len) if args.return_lse else None
    # Of the addresses the size of the workspace asks only whether they are there.
    there = _addresses(query, key, value, query, query if args.return_lse else None, args, as_padding)
    size = workspace_bytes(lib, FACTS.pack(**facts) + POINTERS.pack_in_order(*there, 0, 0))
    return Plan(
        lib, index, FACTS.pack(**facts, workspace_bytes=size), size, out_shape, nhd,
        width == head_dim and query.stride() == out_strides, lse_shape, as_padding, recipe,
    )  # fmt: skip


def _addresses(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None, args: Sequence[Any], as_padding: bool
) -> tuple[int, ...]:
    """The struct's second piece, but for the workspace and the stream. args: `Args`, or its tensors alone."""
    mask, starts, lens, sinks, cu_q, cu_k = args[:6]
    at = 0 if mask is None else mask.data_ptr()
    return (
        query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(),
        0 if lens is None else lens.data_ptr(),
        0 if starts is None else starts.data_ptr(),
        at if as_padding else 0,
        0 if cu_q is None else cu_q.data_ptr(),
        0 if cu_k is None else cu_k.data_ptr(),
        0 if as_padding else at,
        0 if sinks is None else sinks.data_ptr(),
    )  # fmt: skip


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


def workspace_bytes(lib: ctypes.CDLL, packed: bytes) -> int:
    """Of a call, whose strides are not looked at. Raises ValueError or UnsupportedCall."""
    size = ctypes.c_size_t()
    check(lib, lib.sage2_workspace_bytes(packed, ctypes.byref(size)))
    return size.value


class Call:
    """One call's packed arguments, output and workspace. `prepare` and `forward` can be launched separately (timing,
    repeated attention against one K and V); both use the stream that was current when the call was made.

    Arguments are `launch`'s. workspace: one that `prepare` filled for another call on such keys, on this device.
    """

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, args: Args, recipe: Recipe, workspace: Tensor | None = None
    ) -> None:
        query, key, value, args = readable(query, key, value, args)
        plan = _plan(query, key, value, args, recipe)
        self.lib = plan.lib
        out, self.lse = plan.outputs(query)
        if workspace is None:
            workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=query.device)
        self.workspace = workspace
        there = _addresses(query, key, value, out, self.lse, args, plan.is_padding)
        place = self.workspace.data_ptr(), torch_private.current_stream(plan.device)
        self.args = plan.facts + POINTERS.pack_in_order(*there, *place)
        self.out = out.transpose(1, 2) if plan.out_is_nhd and not plan.like_query else out
        self.inputs = (query, key, value, *args[:6])

    def prepare(self) -> None:
        check(self.lib, self.lib.sage2_prepare(self.args))

    def forward(self) -> None:
        check(self.lib, self.lib.sage2_forward(self.args))

    def run(self) -> None:
        check(self.lib, self.lib.sage2_prepare_and_forward(self.args))


def launch(query: Tensor, key: Tensor, value: Tensor, args: Args, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """Quantized attention on CUDA tensors of one device; any view whose last dimension has stride 1 is read in place.

    args: as it says, of which recipe, reason and site are not looked at; recipe says whether K, V (minus a vector per
    head) and Q (64 rows at a time minus their mean, whose logits are added in float32) are smoothed. INT4 and a
    smoothed Q need head_dim at most 128; the latter takes q_len / 64 x kv_len floats a head while the call runs.
    A mask that only says which keys there are goes as key padding.
    Returns the output, a new tensor of the inputs' dtype, and if asked the natural log-sum-exp of the true scaled
    scores, float32 [batch, heads, q_len]. A row that sees no key is zero, its log-sum-exp -inf. Raises ValueError,
    UnsupportedCall or KernelError.
    """
    found = plan(query, key, value, args, recipe)
    if found is None:
        query, key, value, args = readable(query, key, value, args)
        found = plan(query, key, value, args, recipe)
        assert found is not None, "copies are readable"
    out, lse = found.launch(query, key, value, args)
    return out.transpose(1, 2) if found.out_is_nhd and not found.like_query else out, lse


forward = launch  # what backends.py asks of a module of kernels
