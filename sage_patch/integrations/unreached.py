"""Attention of a model that is not reached: named in the refusal and in the report, with what it calls."""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
import re
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from sage_patch.integrations.diffusers import is_diffusers_model
from sage_patch.integrations.intercept import is_patched
from sage_patch.integrations.rebind import LEFT_ALONE, names_in, package_of, variables_of
from sage_patch.integrations.sites import Site, plain_modules
from sage_patch.integrations.source import is_routed

SDPA = "scaled_dot_product_attention"
# Processors of diffusers that a pipeline switches on, and what switches them off.
_CURES = {"Sliced": "disable_attention_slicing()", "XFormers": "disable_xformers_memory_efficient_attention()"}
_SOFTMAX = re.compile("_?softmax")
# Functions that attend, by the names that their packages give them.
_ATTENDING = re.compile(
    r"_?flash_attn(_\w+)?_(func|with_kvcache)\w*|_?flash_attention_forward|memory_efficient_attention\w*"
    r"|sageattn\w*|flex_attention|_?scaled_dot_product\w*attention\w*|multi_head_attention_forward"
)


class Unreached(NamedTuple):
    """A module whose attention does not pass through sage_patch, and the functions that it calls for it.

    beside: the module is a site, and calls these as well. processor: the class of the object that attends for it.
    """

    name: str
    class_name: str
    calls: tuple[str, ...] = ()
    beside: bool = False
    processor: str = ""

    def __str__(self) -> str:
        if self.beside:
            return f"{self.name}: also calls {' and '.join(self.calls)}, which is not patched"
        why = f" ({self.why})" if self.why else ""
        return f"{self.name}: not patched, {self.class_name} computes attention in its own code" + why

    @property
    def why(self) -> str:
        """What is called, and for torch's own function why that does not help; "" if nothing was found. For processors
        that others switch on, how they are switched off."""
        if self.processor:
            cure = next((cure for words, cure in _CURES.items() if words in self.processor), "set_attn_processor(...)")
            return f"its processor is {self.processor}; call {cure} before apply()"
        if not self.calls:
            return ""
        text = f"it calls {' and '.join(self.calls)}"
        if SDPA in self.calls:
            text += (
                ", but not by a name of its module: an import inside the function, an attribute, super(), a decorator"
                " written in C or a global that the module sets while it runs"
            )
        return text


def unreached_modules(model: nn.Module, sites: list[Site], prefix: str = "") -> list[Unreached]:
    """What looks like attention in a model, by class name or by what it calls, but is no site, nor in or around one.

    In a model of diffusers (softmax written out, linear attention, torch's MultiheadAttention) only the innermost are
    listed.
    """
    modules = plain_modules(model)
    taken = {id(site.module): site for site in sites}
    names = [name for name, module in modules.items() if id(module) in taken and not taken[id(module)].is_routed]
    of_diffusers = is_diffusers_model(model)
    found: list[Unreached] = []
    for name, module in reversed(modules.items()):
        site = taken.get(id(module))
        if site is not None:
            found += _beside(prefix + name, module, site)
            continue
        if of_diffusers:
            around = any(_inside(other.name, prefix + name) for other in found)
            attends = _attends_by_name(module) and not _near(name, names) and not around
        else:
            attends = _attends(name, module, names)
        if attends:
            cls: Any = type(module)
            calls = _attending(cls) or _attending(cls, words=_SOFTMAX)
            processor = getattr(module, "processor", None)
            used = type(processor).__name__ if callable(processor) else ""
            found.append(Unreached(prefix + name, cls.__name__, calls, processor=used))
    return found[::-1]


def _attends_by_name(module: nn.Module) -> bool:
    """For diffusers, whose classes are named with care."""
    class_name = type(module).__name__
    attends = re.search(r"Attn|Attention", class_name) and not re.search(r"Block|Mlp|Model$|Adapter", class_name)
    return bool(attends) or callable(getattr(module, "processor", None))


def _attends(name: str, module: nn.Module, sites: list[str]) -> bool:
    """For models of others. Inside of a site, and around one, only what calls a known function is said to attend."""
    cls: Any = type(module)
    named = "Attention" in cls.__name__ and any(True for _ in module.parameters()) and not _near(name, sites)
    calls = package_of(cls) not in LEFT_ALONE and bool(_attending(cls))
    return (named or calls) and not any(is_routed(type(m)) for m in module.modules())  # type: ignore[arg-type]


def _near(name: str, sites: list[str]) -> bool:
    return any(site == name or _inside(site, name) or _inside(name, site) for site in sites)


def _inside(inner: str, outer: str) -> bool:
    return not outer or inner.startswith(outer + ".")


def _beside(name: str, module: nn.Module, site: Site) -> Iterator[Unreached]:
    """A site that would take another function where its package is installed: it may never come to ours."""
    if site.is_routed:
        return
    for carrier in site.carriers:
        cls: Any = type(carrier)._sage_patch_original if is_patched(carrier) else type(carrier)
        calls = tuple(c for c in _attending(cls, only_present=True) if c != SDPA)
        if calls and package_of(cls) != "diffusers":
            yield Unreached(name, cls.__name__, calls, beside=True)


@functools.cache
def _attending(cls: Any, only_present: bool = False, words: re.Pattern = _ATTENDING) -> tuple[str, ...]:
    """Names of the attention functions that a class's methods call, through helpers of their package too.

    only_present: leave out what cannot be called as its package is not installed.
    """
    found: dict[str, None] = {}
    seen: set[Any] = set()
    for base in cls.__mro__:
        if base in (object, nn.Module):
            break
        for member in vars(base).values():
            function = _unwrapped(member)
            if isinstance(function, FunctionType):
                found |= dict.fromkeys(_called(function, only_present, words, seen))
    return tuple(found)


def _called(function: FunctionType, only_present: bool, words: re.Pattern, seen: set[Any]) -> Iterator[str]:
    if function in seen:
        return
    seen.add(function)
    variables, names = variables_of(function), names_in(function.__code__)
    for name in sorted(names):
        if words.fullmatch(name) and (not only_present or _present(name, function, variables)):
            yield name
    for value in variables.values():
        helpers = [value]
        if isinstance(value, type) and package_of(value) == package_of(function):  # an autograd function, say
            helpers = [] if issubclass(value, nn.Module) else list(vars(value).values())
        for helper in map(_unwrapped, helpers):
            if isinstance(helper, FunctionType) and package_of(helper) == package_of(function):
                yield from _called(helper, only_present, words, seen)


def _unwrapped(value: Any) -> Any:
    """The function inside decorators, static methods too."""
    value = value.__func__ if isinstance(value, staticmethod) else value
    return inspect.unwrap(value) if callable(value) and hasattr(value, "__wrapped__") else value


def _present(name: str, function: FunctionType, variables: dict[str, Any]) -> bool:
    if name in variables:
        return callable(variables[name])
    if any(isinstance(value, ModuleType) and hasattr(value, name) for value in variables.values()):
        return True
    packages = {imported.partition(".")[0] for imported in _imports(function.__code__)}
    return any(importlib.util.find_spec(package) is not None for package in packages if package)


def _imports(code: CodeType) -> set[str]:
    found = {i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"}
    return found.union(*(_imports(c) for c in code.co_consts if isinstance(c, CodeType)))
