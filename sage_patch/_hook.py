"""Register "sage2" the moment transformers' model code is loaded, without loading it ourselves.

transformers has no entry points, and importing it takes seconds; this finder waits for one module name, runs the
registration after it, and takes itself away. It stands apart from __init__.py, which lists names and does nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

_WAITS_FOR = "transformers.modeling_utils"


def register_when_loaded() -> None:
    """Register now if transformers' model code is loaded, else as soon as it is."""
    module = sys.modules.get(_WAITS_FOR)
    if module is not None and hasattr(module, "AttentionInterface"):
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    importlib.import_module("sage_patch.integrations.transformers").register()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the awaited module by the other finders and wraps its loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _WAITS_FOR:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """The module's own loader, followed by the registration."""

    def __init__(self, inner: importlib.abc.Loader):
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        _register()
