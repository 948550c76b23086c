"""Quantized attention for Hugging Face models: right, reversible, and honest about what ran.

`import sage_patch` is light: it loads neither torch nor transformers, and needs no package but torch. It only makes
sure that "sage2" is known to transformers once transformers is there, so that `from_pretrained(...,
attn_implementation="sage2")` works.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sage_patch._hook import register_when_loaded

if TYPE_CHECKING:
    from sage_patch.attention import UnsupportedCall, sage_attention
    from sage_patch.config import ConfigError, load_policy
    from sage_patch.errors import SagePatchError
    from sage_patch.extras import MissingPackage
    from sage_patch.handle import Handle, PatchError
    from sage_patch.integrations.quantized_cache import QuantizedCache
    from sage_patch.integrations.static_cache import StaticQuantizedCache
    from sage_patch.patch import applied, apply, plan, revert, rows, stats
    from sage_patch.policy import Policy, PolicyError, Rule, Span

__version__ = "0.1.0"

_HOME = {
    "SagePatchError": "errors",
    "MissingPackage": "extras",
    "Handle": "handle",
    "PatchError": "handle",
    "applied": "patch",
    "apply": "patch",
    "plan": "patch",
    "revert": "patch",
    "rows": "patch",
    "stats": "patch",
    "UnsupportedCall": "dispatch",
    "sage_attention": "attention",
    "Policy": "policy",
    "PolicyError": "policy",
    "Rule": "policy",
    "Span": "policy",
    "ConfigError": "config",
    "load_policy": "config",
    "QuantizedCache": "integrations.quantized_cache",
    "StaticQuantizedCache": "integrations.static_cache",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name == "compat":  # a package of its own, not a name of one
        return importlib.import_module("sage_patch.compat")
    if name not in _HOME:
        raise AttributeError(f"module 'sage_patch' has no attribute {name!r}")
    from sage_patch.extras import needed_for

    with needed_for(f"sage_patch.{name}"):
        return getattr(importlib.import_module(f"sage_patch.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


register_when_loaded()
