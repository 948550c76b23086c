"""The torch operator behind every attention call that is not being differentiated: schema, fake, counters.

One opaque node, so that torch.compile sees no Python inside it, and so that a compiled model still counts:
the counters live in the operator's body. Calls that need gradients run in plain PyTorch and are counted
through `count`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_patch.kernels import library
from sage_patch.kernels.stopwatch import Stopwatch
from sage_patch.recipes import Recipe, parse_recipe
from sage_patch.reference.attention import quantized_attention
from sage_patch.reference.exact import exact_attention
from sage_patch.reference.visibility import Visibility


class CallKey(NamedTuple):
    """What is counted: where a call came from, what ran it, and why it was exact (empty if quantized)."""

    site: str
    recipe: str
    backend: str
    reason: str


_COUNTS: Counter[CallKey] = Counter()


def counts(prefix: str = "") -> dict[CallKey, int]:
    """Calls so far at sites whose key starts with `prefix`."""
    return {k: n for k, n in list(_COUNTS.items()) if k.site.startswith(prefix)}


def reset_counts(prefix: str = "") -> None:
    for key in [k for k in list(_COUNTS) if k.site.startswith(prefix)]:
        _COUNTS.pop(key, None)


def add_count(key: CallKey) -> None:
    """Count one call that runs beside the operator, in eager mode only."""
    _COUNTS[key] += 1


class ObservedCall(NamedTuple):
    """What an observer is given: the tensors of one call as the operator received them, [B, H, tokens, D]."""

    site: str
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    scale: float
    left: int
    right: int
    top_left: bool


_OBSERVERS: list[Callable[[ObservedCall], None]] = []


@contextlib.contextmanager
def observe(observer: Callable[[ObservedCall], None]) -> Iterator[None]:
    """Call `observer` with every attention call inside the with-block, before it runs. For capture, not for change:
    the observer must not write to the tensors, and copies what it keeps."""
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


_STOPWATCHES: list[Stopwatch] = []


@contextlib.contextmanager
def timed(watch: Stopwatch) -> Iterator[None]:
    """Let `watch` run while the operator runs, for every attention call inside the with-block."""
    _STOPWATCHES.append(watch)
    try:
        yield
    finally:
        _STOPWATCHES.remove(watch)


def backend_for(device: torch.device) -> str:
    """Which backend computes quantized recipes on tensors of this device: "reference", "sm90" or "none"."""
    if device.type == "cpu":
        return "reference"
    if device.type != "cuda":
        return "none"
    return _cuda_backend(torch.cuda.current_device() if device.index is None else device.index)


@torch.compiler.assume_constant_result
def _cuda_backend(index: int) -> str:
    return _cached_cuda_backend(index)  # apart: a compiler looks through a cache, past the mark above


@functools.cache
def _cached_cuda_backend(index: int) -> str:
    return "sm90" if torch.cuda.get_device_capability(index) == (9, 0) else "none"


def prepare(device: torch.device) -> None:
    """Have the compiled library of the device at hand, built first if need be; raises BuildError if it cannot be."""
    if backend_for(device) == "sm90":
        library.load()


_LIBRARY = torch.library.Library("sage_patch", "DEF")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? kv_starts, Tensor? kv_lens, "
    "Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, float scale, int left, int right, bool top_left, "
    "float softcap, bool return_lse, str out_layout, str recipe, str reason, str site) -> (Tensor, Tensor)"
)
# `ticket` is only written so that the operator has an effect: without one a compiler may drop the call.
_LIBRARY.define("count(Tensor(a!) ticket, str recipe, str reason, str site) -> ()")


def visibility_of(
    q_len: int, kv_len: int, attn_mask: Tensor | None, left: int, right: int, top_left: bool
) -> Visibility:
    return Visibility(
        q_len=q_len,
        kv_len=kv_len,
        attn_mask=attn_mask,
        left=None if left < 0 else left,
        right=None if right < 0 else right,
        offset=0 if top_left else kv_len - q_len,
    )


def key_padding(mask: Tensor | None) -> Tensor | None:
    """The bool [B or 1, kv_len] view (True = seen) behind a 4-D boolean mask that is the same for all heads and
    queries, or None for any other mask. Looks at sizes and strides, never at values."""
    if mask is None or mask.dtype != torch.bool or any(mask.shape[d] != 1 and mask.stride(d) != 0 for d in (1, 2)):
        return None
    return mask[:, 0, 0] if mask.shape[1] and mask.shape[2] else None


_DEVICES = ("cpu", "cuda")
_parse_recipe = functools.cache(parse_recipe)


def attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
    """The operator `attention`, with its arguments; its body at once where nobody could see the difference.

    The dispatcher costs several microseconds a call. Only compilers, tracers, tensor subclasses and dispatch modes need
    to see an operator; a plain eager call does not.
    """
    if (
        torch.compiler.is_compiling()
        or type(query) is not Tensor
        or type(key) is not Tensor
        or type(value) is not Tensor
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()
        or query.device.type not in _DEVICES
    ):
        return attention(query, key, value, *rest)
    return _timed_body(query, key, value, *rest) if _STOPWATCHES else _body(query, key, value, *rest)


def _attention(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out, lse = _timed_body(query, *rest) if _STOPWATCHES else _body(query, *rest)
    return out, lse if lse is not None else _no_lse(query)


def _timed_body(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
    with contextlib.ExitStack() as stack:
        for watch in _STOPWATCHES:
            stack.enter_context(watch.running(query.device))
        return _body(query, *rest)


def _body(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    kv_starts: Tensor | None,
    kv_lens: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    scale: float,
    left: int,
    right: int,
    top_left: bool,
    softcap: float,
    return_lse: bool,
    out_layout: str,
    recipe: str,
    reason: str,
    site: str,
) -> tuple[Tensor, Tensor | None]:
    chosen = _parse_recipe(recipe)
    backend = "exact" if chosen.is_exact else backend_for(query.device)
    _COUNTS[CallKey(site, recipe, backend, reason)] += 1
    for observer in _OBSERVERS:
        seen = with_run(attn_mask, kv_starts, kv_lens, key.shape[2])
        observer(ObservedCall(site, query, key, value, seen, scale, left, right, top_left))
    if backend == "sm90":  # the envelope has let nothing else through than what the kernel takes
        extras = None
        if (
            attn_mask is not None or kv_starts is not None or left >= 0 or right > 0 or softcap
            or sinks is not None or cu_seqlens_q is not None
        ):  # fmt: skip
            if attn_mask is not None and attn_mask.dtype == torch.float64:
                attn_mask = attn_mask.float()
            padding = key_padding(attn_mask) if left < 0 and right < 0 and kv_lens is None else None
            extras = library.Extras(
                attn_mask=attn_mask if padding is None else None,
                key_padding=None if padding is None else padding.contiguous(),
                kv_starts=kv_starts,
                left=left, right=right, softcap=softcap,
                sinks=None if sinks is None else sinks.float().contiguous(),
                cu_seqlens_q=None if cu_seqlens_q is None else cu_seqlens_q.int().contiguous(),
                cu_seqlens_k=None if cu_seqlens_k is None else cu_seqlens_k.int().contiguous(),
            )  # fmt: skip
        return library.forward(
            query, key, value, out_layout=out_layout,  # type: ignore[arg-type]
            scale=scale, is_causal=right == 0, causal_top_left=top_left, kv_lens=kv_lens,
            recipe=f"qk_int{chosen.qk_bits}_pv_{chosen.pv}",
            smooth_k=chosen.smooth_k, smooth_v=chosen.smooth_v, smooth_q=chosen.smooth_q,
            return_lse=return_lse, extras=extras,
        )  # fmt: skip
    attn_mask = with_run(attn_mask, kv_starts, kv_lens, key.shape[2])
    # Autocast would turn the float32 products of either path into half precision.
    with torch.autocast(query.device.type, enabled=False):
        if cu_seqlens_q is None or cu_seqlens_k is None:
            visibility = visibility_of(query.shape[2], key.shape[2], attn_mask, left, right, top_left)
            out, lse = _run(chosen, query, key, value, visibility, scale, softcap, sinks, return_lse)
            return _in_layout(out, out_layout), lse
        out, lse_all = _empty_outputs(query, value, return_lse, out_layout)
        out.zero_()  # tokens that belong to no sequence
        lse_all.fill_(-math.inf)
        q, k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for i in range(len(q) - 1):
            part_q, part_k, part_v = (
                query[:, :, q[i] : q[i + 1]],
                key[:, :, k[i] : k[i + 1]],
                value[:, :, k[i] : k[i + 1]],
            )
            visibility = visibility_of(part_q.shape[2], part_k.shape[2], None, left, right, top_left)
            part, lse = _run(chosen, part_q, part_k, part_v, visibility, scale, softcap, sinks, return_lse)
            out[:, :, q[i] : q[i + 1]] = part
            if lse is not None:
                lse_all[:, :, q[i] : q[i + 1]] = lse
        return out, lse_all


def with_run(attn_mask: Tensor | None, kv_starts: Tensor | None, kv_lens: Tensor | None, kv_len: int) -> Tensor | None:
    """The mask that also says which keys there are: item b's, from kv_starts[b] (0 if None) on, kv_lens[b] of them."""
    if kv_lens is None:
        return attn_mask
    index = torch.arange(kv_len, device=kv_lens.device) - (0 if kv_starts is None else kv_starts[:, None])
    there = ((index >= 0) & (index < kv_lens[:, None]))[:, None, None, :]
    return there if attn_mask is None else attn_mask & there


def _run(
    recipe: Recipe,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """One dense problem. An empty sequence or batch inside a quantized call has nothing to quantize."""
    if recipe.is_exact or not (query.shape[0] and query.shape[2] and key.shape[2]):
        # On a GPU one row's mask guard would cost more than its attention; the unpatched call has none either.
        guard = query.device.type == "cpu" or query.shape[2] > 1
        return exact_attention(
            query, key, value, visibility,
            scale=scale, softcap=softcap, sinks=sinks, return_lse=return_lse, guard_hidden=guard,
        )  # fmt: skip
    return quantized_attention(
        query,
        key,
        value,
        visibility,
        recipe,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        return_lse=return_lse,
    )


def _in_layout(out: Tensor, out_layout: str) -> Tensor:
    return out.transpose(1, 2).contiguous().transpose(1, 2) if out_layout == "NHD" else out.contiguous()


def _no_lse(query: Tensor) -> Tensor:
    return query.new_empty((0,), dtype=torch.float32)


def _empty_outputs(query: Tensor, value: Tensor, return_lse: bool, out_layout: str) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, q_len, Dv], contiguous in out_layout; lse float32 [B, Hq, q_len] or empty)."""
    batch, heads, q_len, _ = query.shape
    if out_layout == "NHD":
        out = query.new_empty(batch, q_len, heads, value.shape[-1]).transpose(1, 2)
    else:
        out = query.new_empty(batch, heads, q_len, value.shape[-1])
    if not return_lse:
        return out, _no_lse(query)
    return out, query.new_empty((batch, heads, q_len), dtype=torch.float32)


def _attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    kv_starts: Tensor | None,
    kv_lens: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    scale: float,
    left: int,
    right: int,
    top_left: bool,
    softcap: float,
    return_lse: bool,
    out_layout: str,
    recipe: str,
    reason: str,
    site: str,
) -> tuple[Tensor, Tensor]:
    return _empty_outputs(query, value, return_lse, out_layout)


def _count(ticket: Tensor, recipe: str, reason: str, site: str) -> None:
    _COUNTS[CallKey(site, recipe, "exact", reason)] += 1


def _count_fake(ticket: Tensor, recipe: str, reason: str, site: str) -> None:
    return None


for _device in _DEVICES:
    _LIBRARY.impl("attention", _attention, _device.upper())
    _LIBRARY.impl("count", _count, _device.upper())
torch.library.register_fake("sage_patch::attention", _attention_fake, lib=_LIBRARY)
torch.library.register_fake("sage_patch::count", _count_fake, lib=_LIBRARY)

TICKET = torch.zeros(1)
attention = torch.ops.sage_patch.attention.default
count = torch.ops.sage_patch.count.default
