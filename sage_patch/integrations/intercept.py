"""Run a class's own code with some of the functions it calls replaced, and nothing else in the process changed.

A Python function finds the functions it calls in its module's globals. Here a second function is made around the very
same code object, whose globals are a copy with a few entries exchanged. No source is copied, the module keeps its
globals, and the original function keeps working. Unlike a torch function mode it costs nothing per torch call, and
torch.compile reads it as ordinary Python. The copy is as old as the rebinding: a global that a module changes later is
not seen.

Reached are functions called by name (`attend(...)`, `F.attend(...)`, `torch.nn.functional.attend(...)`), also through
helper functions of the same package and other methods of the class. Not reached are local imports, decorated methods
and methods of a parent called through super(): `rebound_methods` then returns nothing for them, which callers report.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

_Memo = dict[FunctionType, FunctionType | None]


def rebound_methods(cls: type, replacements: Mapping[Any, Any]) -> dict[str, FunctionType]:
    """Every method of a class, inherited ones too, that calls a replaced function, rebound; by name.

    replacements: function -> what is called instead. Empty if the class calls none of them.
    """
    memo: _Memo = {}
    found: dict[str, FunctionType] = {}
    seen: set[str] = set()
    for base in cls.__mro__:
        if base in (object, nn.Module):
            break
        for name, member in vars(base).items():
            if isinstance(member, FunctionType) and name not in seen:
                rebound = _rebind(member, replacements, memo)
                if rebound is not None:
                    found[name] = rebound
            seen.add(name)
    return found


def _rebind(function: FunctionType, replacements: Mapping[Any, Any], memo: _Memo) -> FunctionType | None:
    """The function with replaced globals; None if neither it nor its helpers call a replaced function."""
    if function in memo:
        return memo[function]
    memo[function] = None  # what a helper that calls itself finds
    names = _names(function.__code__)
    package = function.__globals__.get("__name__", "").partition(".")[0]
    changed: dict[str, Any] = {}
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        instead: Any = None
        if isinstance(value, ModuleType):
            instead = _stand_in(value, names, replacements)
        elif callable(value) and _replaced(value, replacements):
            instead = replacements[value]
        elif isinstance(value, FunctionType) and (value.__module__ or "").partition(".")[0] == package:
            instead = _rebind(value, replacements, memo)
        if instead is not None:
            changed[name] = instead
    if changed:
        memo[function] = _with_globals(function, changed)
    return memo[function]


def _with_globals(function: FunctionType, changed: dict[str, Any]) -> FunctionType:
    # Without __name__, a compiler takes these globals as they are; with it, it would look into the module of that name.
    scope = {name: value for name, value in function.__globals__.items() if name != "__name__"} | changed
    rebound = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    rebound.__kwdefaults__ = function.__kwdefaults__
    rebound.__qualname__, rebound.__module__ = function.__qualname__, function.__module__
    rebound.__doc__, rebound.__annotations__ = function.__doc__, function.__annotations__
    return rebound


def _stand_in(module: ModuleType, names: set[str], replacements: Mapping[Any, Any]) -> ModuleType | None:
    """A copy of a module (of torch.nn.functional, say) with replaced functions; None if none of `names` is one."""
    changed: dict[str, Any] = {}
    for name in names & vars(module).keys():
        value = vars(module)[name]
        if isinstance(value, ModuleType):
            if value.__name__.startswith(module.__name__ + "."):  # downwards only: modules refer to each other in rings
                inner = _stand_in(value, names, replacements)
                if inner is not None:
                    changed[name] = inner
        elif callable(value) and _replaced(value, replacements):
            changed[name] = replacements[value]
    if not changed:
        return None
    copy = ModuleType(module.__name__, module.__doc__)
    copy.__dict__.update(vars(module) | changed)
    return copy


def _replaced(value: Any, replacements: Mapping[Any, Any]) -> bool:
    return any(value is original for original in replacements)  # by identity: not every callable can be hashed


def _names(code: CodeType) -> set[str]:
    """Global and attribute names in a code object and the functions nested in it."""
    nested = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*nested)
