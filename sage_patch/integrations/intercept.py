"""Reach attention that a class computes in its own code, by exchanging what that code calls.

A patched object keeps its identity and its name; its class becomes a subclass that runs the original code with a few
functions replaced (see rebind.py): torch's scaled_dot_product_attention and diffusers' dispatch_attention_fn. Nothing
global is touched, no object is copied, and taking the subclass away restores exactly what was there.

The object is the module itself, or the processor object that it hands its attention to, or both.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch.nn.functional as F
from torch import nn

from sage_patch.dispatch import UnsupportedCall
from sage_patch.integrations.diffusers import dispatchers
from sage_patch.integrations.rebind import LEFT_ALONE, package_of, rebound_methods
from sage_patch.integrations.sdpa import RUNNING, leave, sdpa
from sage_patch.integrations.tags import TAG


def carriers_of(module: nn.Module) -> list[Any]:
    """The objects whose classes compute a module's attention; empty if it is not reached.

    Where a processor attends, the module is intercepted beside it: the processor may not be told whom it works for,
    and one that is put in its place later is noticed.
    """
    cls, processor = type(module), getattr(module, "processor", None)
    if package_of(cls) in LEFT_ALONE or _is_processor_class(cls):
        return []
    if callable(processor) and (_reached(type(processor)) or package_of(cls) == "diffusers"):
        return [processor, module] if _reached(type(processor)) else []
    return [module] if _reached(cls) else []


def is_patched(carrier: Any) -> bool:
    return hasattr(type(carrier), "_sage_patch_original")


def patch(carrier: Any) -> None:
    """Give an object its intercepting class, and the methods it keeps as attributes (hooks do) that class's own."""
    original, cls = type(carrier), intercepting(type(carrier))
    object.__setattr__(carrier, "__class__", cls)
    _exchange_bound_methods(carrier, original, cls)


def unpatch(carrier: Any) -> None:
    """Give an object back the class it had; nothing happens to one that is not patched."""
    cls = type(carrier)
    if "_sage_patch_original" in vars(cls):  # not in one that someone derived from it since: without a tag it is inert
        object.__setattr__(carrier, "__class__", cls._sage_patch_original)
        _exchange_bound_methods(carrier, cls, cls._sage_patch_original)


def _exchange_bound_methods(carrier: Any, before: type, after: type) -> None:
    # accelerate's hooks keep the method they wrap on the module itself, diffusers' (group offload) in their registry
    registry = vars(carrier).get("_diffusers_hook")
    for holder in (vars(carrier), *(vars(hook) for hook in getattr(registry, "_fn_refs", ()))):
        for name, value in list(holder.items()):
            if isinstance(value, MethodType) and value.__self__ is carrier:
                method = value.__func__.__name__
                if getattr(before, method, None) is value.__func__:
                    holder[name] = MethodType(getattr(after, method), carrier)


@functools.cache
def methods_of(cls: type) -> dict[str, Any]:
    """The methods of a class that call attention in a way that can be replaced, rebound, by name."""
    return rebound_methods(cls, {F.scaled_dot_product_attention: sdpa, **dispatchers()})


def _reached(cls: type) -> bool:
    """Whether a class calls attention in a way that can be replaced; a patched class does."""
    return hasattr(cls, "_sage_patch_original") or bool(methods_of(cls))


def _is_processor_class(cls: type) -> bool:
    """Whether a class is called as processor(attn, ...), as those with weights of their own (IP-Adapter) are too."""
    return not issubclass(cls, nn.Module) or cls.__call__ is not nn.Module.__call__


def intercepting(cls: type) -> type:
    """The subclass of a processor class, or of a module class, whose attention passes through sage_patch."""
    return cls if hasattr(cls, "_sage_patch_original") else _intercepting(cls)


@functools.cache
def _intercepting(cls: type) -> type:
    methods = methods_of(cls)
    if _is_processor_class(cls):
        entries = {"__call__": _processor_entry(methods.get("__call__", cls.__call__))}
    else:  # also from methods that others call, instead of forward
        inner = {"forward": cls.forward, **methods}  # type: ignore[attr-defined]
        entries = {name: _module_entry(m) for name, m in inner.items() if isinstance(m, FunctionType)}

    def reduce(self: Any, protocol: int) -> Any:
        made, arguments, *rest = super(alias, self).__reduce_ex__(max(protocol, 2))  # type: ignore[misc]
        if made is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (_rebuild, (cls, *arguments[1:]), *rest)
        return (made, arguments, *rest)

    body = {
        **methods,
        **entries,
        "__reduce_ex__": reduce,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_sage_patch_original": cls,
    }
    alias: Any = _alias_type(type(cls))(cls.__name__, (cls,), body)
    return alias


# Whoever filters keyword arguments by the signature of a call, as diffusers does, finds the original's.


def _module_entry(inner: Callable) -> Callable:
    @functools.wraps(inner)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer, tag = (RUNNING.tag, RUNNING.training), self.__dict__.get(TAG)
        if tag is not None and tag.refusal:
            raise UnsupportedCall(tag.refusal)
        if tag is not None and tag.by_processor and not is_patched(self.processor):
            leave(tag, "processor_replaced")
            tag = None
        RUNNING.tag, RUNNING.training = tag, self.training
        try:
            return inner(self, *args, **kwargs)
        finally:
            RUNNING.tag, RUNNING.training = outer

    return call


def _processor_entry(inner: Callable) -> Callable:
    @functools.wraps(inner)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer = tag, training = RUNNING.tag, RUNNING.training
        if args and isinstance(args[0], nn.Module):
            tag, training = args[0].__dict__.get(TAG), args[0].training
        if tag is not None and tag.refusal:
            raise UnsupportedCall(tag.refusal)
        RUNNING.tag, RUNNING.training = tag, training
        try:
            return inner(self, *args, **kwargs)
        finally:
            RUNNING.tag, RUNNING.training = outer

    return call


@functools.cache
def _alias_type(metaclass: type) -> type:
    """The type of intercepting classes: each equals the class it stands for, so that the tuples and registries in which
    libraries look classes up (diffusers for PAG, layer skipping, its defaults) still find it."""

    def equal(self: Any, other: Any) -> bool:
        return other is self or other is self._sage_patch_original

    return type("Alias", (metaclass,), {"__eq__": equal, "__hash__": lambda self: hash(self._sage_patch_original)})


def _rebuild(cls: type, *arguments: Any) -> Any:
    """A copied or unpickled object is an intercepting one again; its state follows."""
    alias = intercepting(cls)
    return cls.__new__(alias, *arguments)
