"""The torch operator behind every attention call that is not being differentiated: schema, fake, counters.

One opaque node, so that torch.compile sees no Python inside it, and so that a compiled model still counts:
the counters live in the operator's body. Calls that need gradients run in plain PyTorch and are counted
through `count`.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_patch import backends
from sage_patch.args import Args, scale_for, schema
from sage_patch.kernels import fa3, plain, shared, torch_private
from sage_patch.kernels.plans import PLANS
from sage_patch.kernels.stopwatch import Stopwatch
from sage_patch.reasons import NOTE_CACHE
from sage_patch.recipes import DEFAULT_RECIPE, Recipe, parse_recipe, rotated

Forward = Callable[[Tensor, Tensor, Tensor, Args, Recipe], tuple[Tensor, Tensor | None]]


class CallKey(NamedTuple):
    """What is counted: where a call came from, what ran it, and why it was exact (empty if quantized)."""

    site: str
    recipe: str
    backend: str
    reason: str


_COUNTS: Counter[CallKey] = shared.keep("counts", Counter())


def counts(prefix: str = "") -> dict[CallKey, int]:
    """Calls so far at sites whose key starts with `prefix`."""
    with shared.LOCK:
        return {k: n for k, n in _COUNTS.items() if k.site.startswith(prefix)}


def reset_counts(prefix: str = "") -> None:
    with shared.LOCK:
        for key in [k for k in _COUNTS if k.site.startswith(prefix)]:
            del _COUNTS[key]


def add_count(key: CallKey) -> None:
    """Count one call; from any thread. Calls that run beside the operator do so themselves, in eager mode only."""
    with shared.LOCK:
        _COUNTS[key] += 1


def count_pages(site: str, is_rotated: bool, device: torch.device) -> None:
    """Count one call over the pages of a quantized cache."""
    recipe = rotated(DEFAULT_RECIPE, "auto" if is_rotated else "none")
    add_count(CallKey(site, recipe, backend_for(device), NOTE_CACHE))


def pages_module(device: torch.device) -> str | None:
    """The module that appends to quantized caches on a device and attends to them; None: they are only stored there."""
    row = backends.named(backend_for(device))
    return None if row is None else row.pages


def pages_kernels(device: torch.device) -> Any:
    """What has `append` and `attend` of quantized caches: the kernels of the device, or the reference."""
    path = pages_module(device)
    return plain.pages if path is None else backends.module(path)


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


_OBSERVERS: list[Callable[[ObservedCall], None]] = shared.keep("observers", [])


@contextlib.contextmanager
def observe(observer: Callable[[ObservedCall], None]) -> Iterator[None]:
    """Call `observer` with every attention call inside the with-block, before it runs. For capture, not for change:
    the observer must not write to the tensors, and copies what it keeps."""
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


_STOPWATCHES: list[Stopwatch] = shared.keep("stopwatches", [])


@contextlib.contextmanager
def timed(watch: Stopwatch) -> Iterator[None]:
    """Let `watch` run while the operator runs, for every attention call inside the with-block."""
    _STOPWATCHES.append(watch)
    try:
        yield
    finally:
        _STOPWATCHES.remove(watch)


def backend_for(device: torch.device) -> str:
    """Which backend computes quantized recipes on tensors of this device: a name of BACKENDS, or "none"."""
    if device.type == "cuda":
        return _backend("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return _backend(device.type, 0)


@torch.compiler.assume_constant_result
def _backend(device: str, index: int) -> str:
    return _cached_backend(device, index)  # apart: a compiler looks through a cache, past the mark above


@functools.cache
def _cached_backend(device: str, index: int) -> str:
    return backends.find(device, torch.cuda.get_device_capability(index) if device == "cuda" else None)


def prepare(device: torch.device) -> None:
    """Have everything for the device's backend at hand, built first if need be; raises BuildError if it cannot be."""
    backend = backends.named(backend_for(device))
    if backend is not None:
        backends.module(backend.kernels).prepare(device.index)


@contextlib.contextmanager
def beside(site: str, recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Count and time a quantized call beside the operator; observers, who want whole tensors, do not see it."""
    add_count(CallKey(site, recipe.name, backend_for(device), ""))
    with contextlib.ExitStack() as stack:
        for watch in _STOPWATCHES:
            stack.enter_context(watch.running(device))
        yield


_LIBRARY = shared.Operators()
_LIBRARY.define(f"attention(Tensor query, Tensor key, Tensor value, {schema()}) -> (Tensor, Tensor)")
# `ticket` is only written so that the operator has an effect: without one a compiler may drop the call.
_LIBRARY.define("count(Tensor(a!) ticket, str recipe, str reason, str site) -> ()")

_DEVICES = ("cpu", "cuda")


def attend(query: Tensor, key: Tensor, value: Tensor, args: Args) -> tuple[Tensor, Tensor | None]:
    """The operator `attention`, with its arguments; its body at once where nobody could see the difference.

    The dispatcher costs several microseconds a call. Only compilers, tracers, tensor subclasses and dispatch modes need
    to see an operator; a plain eager call does not.
    """
    if (
        torch.compiler.is_compiling()
        or type(query) is not Tensor
        or type(key) is not Tensor
        or type(value) is not Tensor
        or torch_private.is_seen()
        or not (query.is_cuda or query.is_cpu)
    ):
        return attention(query, key, value, *args)
    return _timed_body(query, key, value, args) if _STOPWATCHES else _body(query, key, value, args)


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    run = _timed_body if _STOPWATCHES else _body
    out, lse = run(query, key, value, Args(*rest))
    return out, lse if lse is not None else query.new_empty((0,), dtype=torch.float32)


def _attention_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return plain.empty_outputs(query, value, Args(*rest))


def _timed_body(query: Tensor, key: Tensor, value: Tensor, args: Args) -> tuple[Tensor, Tensor | None]:
    with contextlib.ExitStack() as stack:
        for watch in _STOPWATCHES:
            stack.enter_context(watch.running(query.device))
        return _body(query, key, value, args)


def _body(query: Tensor, key: Tensor, value: Tensor, args: Args) -> tuple[Tensor, Tensor | None]:
    found_by = (args.recipe, args.reason, args.site, query.device)
    key_counted, recipe, forward = PLANS.get(found_by) or _found(*found_by)
    if args.scale is None:
        args = args._replace(scale=scale_for(None, query.shape[-1]))
    if recipe.is_exact and args.exact_backend != "torch":
        backend = fa3.backend_for(query, key, value, args)
        key_counted = key_counted._replace(backend=backend)
        forward = fa3.forward if backend == fa3.NAME else forward
    add_count(key_counted)
    for observer in _OBSERVERS:
        seen = plain.with_run(args.attn_mask, args.kv_starts, args.kv_lens, key.shape[2])
        scale = scale_for(args.scale, query.shape[-1])
        observer(ObservedCall(args.site, query, key, value, seen, scale, args.left, args.right, args.top_left))
    return forward(query, key, value, args, recipe)


class Planned(NamedTuple):
    """A call that needs nothing more than to be counted and launched."""

    counted: CallKey
    plan: Any  # what the module of its kernels calls so

    def launch(self, query: Tensor, key: Tensor, value: Tensor, tensors: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
        """As `attend`, for whom nobody watches; tensors: the first six of Args."""
        add_count(self.counted)
        return self.plan.launch(query, key, value, tensors)  # type: ignore[no-any-return]


def planned(query: Tensor, key: Tensor, value: Tensor, args: Args) -> Planned | None:
    """What `attend` comes to whenever it is told the same of tensors of the same kind; None: not compiled kernels, or
    some tensor has to be copied first."""
    counted, recipe, _ = _found(args.recipe, args.reason, args.site, query.device)
    row = backends.named(counted.backend)
    if row is None or not row.is_compiled:
        return None
    plan = backends.module(row.kernels).plan(query, key, value, args, recipe)
    return None if plan is None else Planned(counted, plan)


def is_watched() -> bool:
    """Is there anybody who must be shown every call?"""
    return bool(_OBSERVERS or _STOPWATCHES)


def _found(name: str, reason: str, site: str, device: torch.device) -> tuple[CallKey, Recipe, Forward]:
    """What a call's words and its device come to: what is counted, the recipe, and what computes it."""
    recipe = parse_recipe(name)  # the operator's schema has no recipes, only their names
    backend = "exact" if recipe.is_exact else backend_for(device)
    # The envelope has let nothing else through than what the backend takes.
    forward = plain.forward if recipe.is_exact else backends.module(backends.BACKENDS[backend].kernels).forward
    found = CallKey(site, name, backend, reason), recipe, forward
    PLANS.put((name, reason, site, device), found)
    return found


def _count(ticket: Tensor, recipe: str, reason: str, site: str) -> None:
    add_count(CallKey(site, recipe, "exact", reason))


def _count_fake(ticket: Tensor, recipe: str, reason: str, site: str) -> None:
    return None


for _device in _DEVICES:
    _LIBRARY.impl("attention", _attention, _device.upper())
    _LIBRARY.impl("count", _count, _device.upper())
_LIBRARY.fake("attention", _attention_fake)
_LIBRARY.fake("count", _count_fake)

TICKET = torch.zeros(1)
attention = torch.ops.sage_patch.attention.default
count = torch.ops.sage_patch.count.default
