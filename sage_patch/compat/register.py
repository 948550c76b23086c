"""`install()`: from then on `import sageattention` finds our functions, and so does whoever asks whether it is there.

Two things are put into the process and taken out again: the modules `sageattention` and `sageattention.core` in
`sys.modules`, with specs, and a finder that answers `importlib.metadata.version("sageattention")`.
"""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any

from sage_patch.errors import SagePatchError

NAME = "sageattention"
_CORE = f"{NAME}.core"  # the module that has upstream's functions; some import them from there
_ASKS_ONCE = "diffusers.models.attention_dispatch"  # looks for sageattention when it is imported, and never again


class InstallError(SagePatchError, RuntimeError):
    """SageAttention itself is in use already; nothing was changed."""


class Installed:
    """The way back: `remove()`, or the end of a with-block. What was imported meanwhile keeps our functions."""

    def __init__(self) -> None:
        self._finder = _Finder()
        self._modules = _modules()

    def remove(self) -> None:
        """Take the modules and the finder away; once more changes nothing."""
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)

    def __enter__(self) -> Installed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def install() -> Installed:
    """Register sage_patch as the module `sageattention`, until the handle that is returned takes it away.

    Call it before whatever imports sageattention or asks for it: diffusers asks once, when its models are imported.
    A second call returns the same handle. Raises InstallError if SageAttention itself is imported already.
    """
    present = sys.modules.get(NAME)
    if present is not None:
        handle = getattr(present, "_installed", None)
        if isinstance(handle, Installed):
            return handle
        raise InstallError(
            f"{NAME} is imported already, from {getattr(present, '__file__', None) or 'an unknown place'}; call "
            "sage_patch.compat.install() before whatever imports it"
        )
    dispatch = sys.modules.get(_ASKS_ONCE)
    if dispatch is not None and not getattr(dispatch, "_CAN_USE_SAGE_ATTN", False):
        warnings.warn(
            'diffusers has looked for sageattention already, and found none: set_attention_backend("sage") stays '
            "refused; call sage_patch.compat.install() before diffusers' models are imported",
            stacklevel=2,
        )
    handle = Installed()
    for module in handle._modules.values():
        module._installed = handle  # type: ignore[attr-defined]
    sys.modules.update(handle._modules)
    sys.meta_path.insert(0, handle._finder)
    return handle


def _modules() -> dict[str, ModuleType]:
    from sage_patch.compat import sageattention as ours

    made = {}
    for name in (NAME, _CORE):
        module = ModuleType(name, ours.__doc__)
        spec = ModuleSpec(name, _Ready(), origin=ours.__file__, is_package=name == NAME)
        module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, ours.__file__
        module.__package__ = NAME
        for public in ours.__all__:
            setattr(module, public, getattr(ours, public))
        module.__all__ = list(ours.__all__)  # type: ignore[attr-defined]
        module.__version__ = ours.__version__  # type: ignore[attr-defined]
        made[name] = module
    made[NAME].__path__ = []
    made[NAME].core = made[_CORE]  # type: ignore[attr-defined]
    return made


class _Ready(Loader):
    """The loader of modules that are complete: they are what `sys.modules` holds."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return sys.modules.get(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do; importlib.reload() comes by here."""


class _Finder(MetaPathFinder):
    """Finds no module, but the metadata of one distribution."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        present = sys.modules.get(name)
        handle = getattr(present, "_installed", None)
        return present.__spec__ if present is not None and isinstance(handle, Installed) else None

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        wanted = getattr(context, "name", None)
        if wanted is None or str(wanted).lower().replace("-", "_") == NAME:
            yield _Distribution()


class _Distribution(importlib.metadata.Distribution):
    """What `importlib.metadata` reads of an installed package: its name and version."""

    def read_text(self, filename: str) -> str | None:
        from sage_patch.compat.sageattention import __version__

        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {__version__}\nSummary: sage_patch, by that name\n"
        return f"{NAME}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{NAME} is sage_patch, installed for this process: it has no files of its own")
