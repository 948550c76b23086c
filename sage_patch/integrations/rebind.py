"""Run a class's own code with some of the functions it calls replaced, and nothing else in the process changed.

A Python function finds the functions it calls in its module's globals. Here a second function is made around the very
same code, whose globals are a copy with a few entries exchanged. No source is copied, the module keeps its globals, and
the original function keeps working. Unlike a torch function mode it costs nothing per torch call, and torch.compile
reads it as ordinary Python. The copy is as old as the rebinding: a global that is set later from outside is not seen,
and a function that uses a global which its own module sets while running is left alone.

Reached are functions called by name (`attend(...)`, `F.attend(...)`, `torch.nn.functional.attend(...)`), also through
helper functions of the same package, other methods of the class, static methods, and Python wrappers that decorate
them. Not reached are local imports, wrappers written in C, functions kept in attributes, and methods of a parent called
through super(): `rebound_methods` then returns nothing for them, which callers report.
"""

from __future__ import annotations

import dis
from collections.abc import Mapping
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_Memo = dict[FunctionType, FunctionType | None]
# Their attention is reached in another way, or not at all; classes of others may derive from theirs.
LEFT_ALONE = ("torch", "transformers")


def rebound_methods(cls: type, replacements: Mapping[Any, Any]) -> dict[str, Any]:
    """Every method of a class, inherited ones too, that calls a replaced function, rebound; by name.

    replacements: function -> what is called instead. Empty if the class calls none of them.
    """
    memo: _Memo = {}
    found: dict[str, Any] = {}
    seen: set[str] = {"__init__"}  # what it stores is called from elsewhere
    for base in cls.__mro__:
        if base in (object, nn.Module):
            break
        for name, member in vars(base).items():
            function = member.__func__ if isinstance(member, staticmethod) else member
            if isinstance(function, FunctionType) and name not in seen and package_of(base) not in LEFT_ALONE:
                rebound = _rebind(function, replacements, memo)
                if rebound is not None:
                    found[name] = staticmethod(rebound) if isinstance(member, staticmethod) else rebound
            seen.add(name)
    return found


def package_of(thing: Any) -> str:
    """The top-level package in which a class or function was written."""
    return (thing.__module__ or "").partition(".")[0]


def names_in(code: CodeType) -> set[str]:
    """Global and attribute names in a code object and the functions nested in it."""
    nested = (names_in(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*nested)


def variables_of(function: FunctionType) -> dict[str, Any]:
    """What the names in a function stand for now: its module's globals that it names, and its closure's cells."""
    variables = {name: function.__globals__[name] for name in names_in(function.__code__) & function.__globals__.keys()}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            variables[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    return variables


def _rebind(function: FunctionType, replacements: Mapping[Any, Any], memo: _Memo) -> FunctionType | None:
    """The function with replaced globals; None if neither it nor its helpers call a replaced function."""
    if function in memo:
        return memo[function]
    memo[function] = None  # what a helper that calls itself finds
    names = names_in(function.__code__)
    package = package_of(function)
    changed: dict[str, Any] = {}
    variables = variables_of(function)
    for name, value in variables.items():
        instead = _instead_of(value, names, package, replacements, memo)
        if instead is not None:
            changed[name] = instead
    copied = changed.keys() - set(function.__code__.co_freevars)
    if changed and not (copied and variables.keys() & _globals_set_beside(function)):
        rebound = _with_variables(function, changed, copied)
        # What compilers and decorators keep of the function that they wrapped.
        kept = vars(function).items()
        vars(rebound).update({k: (memo.get(v) or v) if isinstance(v, FunctionType) else v for k, v in kept})
        memo[function] = rebound
    return memo[function]


def _instead_of(value: Any, names: set[str], package: str, replacements: Mapping[Any, Any], memo: _Memo) -> Any:
    """What a rebound function finds under the name of a value; None if the value itself."""
    if isinstance(value, ModuleType):
        return _stand_in(value, names, package, replacements, memo)
    if callable(value) and _replaced(value, replacements):
        return replacements[value]
    if isinstance(value, FunctionType) and package_of(value) == package:
        return _rebind(value, replacements, memo)
    return None


def _with_variables(function: FunctionType, changed: dict[str, Any], copied: set[str]) -> FunctionType:
    """A function around the same code that finds `changed` under those names, of which `copied` are globals."""
    scope = function.__globals__
    if copied:
        # Without __name__, a compiler takes these globals as they are; with it, it would look into that module.
        scope = {k: v for k, v in scope.items() if k != "__name__"} | {k: changed[k] for k in copied}
    free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = tuple(CellType(changed[name]) if name in changed else cell for name, cell in free)
    # A code object of its own: compilers keep what they compiled with the code, whichever globals it ran with.
    rebound = FunctionType(function.__code__.replace(), scope, function.__name__, function.__defaults__, closure)
    rebound.__kwdefaults__ = function.__kwdefaults__
    rebound.__qualname__, rebound.__module__ = function.__qualname__, function.__module__
    rebound.__doc__, rebound.__annotations__ = function.__doc__, function.__annotations__
    return rebound


def _stand_in(
    module: ModuleType, names: set[str], package: str, replacements: Mapping[Any, Any], memo: _Memo
) -> ModuleType | None:
    """A copy of a module (of torch.nn.functional, say) with replaced functions; None if none of `names` is one."""
    changed: dict[str, Any] = {}
    for name in names & vars(module).keys():
        value = vars(module)[name]
        # downwards only: modules refer to each other in rings
        if isinstance(value, ModuleType) and not value.__name__.startswith(module.__name__ + "."):
            continue
        instead = _instead_of(value, names, package, replacements, memo)
        if instead is not None:
            changed[name] = instead
    if not changed:
        return None
    copy = ModuleType(module.__name__, module.__doc__)
    copy.__dict__.update(vars(module) | changed)
    return copy


def _globals_set_beside(function: FunctionType) -> set[str]:
    """Globals that functions of this function's module set while they run (`global step`): in a copy they would age."""
    scope = function.__globals__
    members = list(scope.values())
    for value in scope.values():
        if isinstance(value, type) and value.__module__ == scope.get("__name__"):
            members += vars(value).values()
    own = [m for m in members if isinstance(m, FunctionType) and m.__globals__ is scope]
    return set().union(*(_globals_set_in(m.__code__) for m in [function, *own]))


def _globals_set_in(code: CodeType) -> set[str]:
    found = set().union(*(_globals_set_in(c) for c in code.co_consts if isinstance(c, CodeType)))
    if _STORE_GLOBAL in code.co_code[::2]:  # the rare case, and only this test is quick
        found |= {i.argval for i in dis.get_instructions(code) if i.opcode == _STORE_GLOBAL}
    return found


def _replaced(value: Any, replacements: Mapping[Any, Any]) -> bool:
    return any(value is original for original in replacements)  # by identity: not every callable can be hashed
