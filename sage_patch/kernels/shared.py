"""What every copy of this package in one process shares.

A reload in a notebook, or an import after sys.modules was cleared, runs the modules again, while models that were
patched before go on with the old ones. torch lets an operator be defined once, and a call must be counted once: so the
operators and the counters are made by the first copy and found by the others.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_KEPT: dict[str, Any] = torch.ops.sage_patch.__dict__.setdefault("_kept_by_sage_patch", {})


def keep(name: str, made: T) -> T:
    """`made`, or what an earlier copy of the package has kept under this name."""
    return _KEPT.setdefault(name, made)


def _lock() -> threading.Lock:
    """A lock that no other thread holds in a forked process."""
    lock = threading.Lock()
    if hasattr(os, "register_at_fork"):  # where processes can fork
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


LOCK: threading.Lock = _KEPT["lock"] if "lock" in _KEPT else keep("lock", _lock())


class Operators:
    """torch.library.Library("sage_patch"), of which the newest copy of the package gives the bodies."""

    def __init__(self) -> None:
        self._library = _KEPT.get("library") or keep("library", torch.library.Library("sage_patch", "DEF"))
        self._schemas: dict[str, str] = keep("schemas", {})
        self._bodies: dict[tuple[str, str], Callable[..., Any]] = keep("bodies", {})

    def define(self, schema: str) -> None:
        """Define an operator. Raises ImportError if an earlier copy has defined it otherwise."""
        name = schema.partition("(")[0]
        if name not in self._schemas:
            self._library.define(schema)
            self._schemas[name] = schema
        elif self._schemas[name] != schema:
            raise ImportError(
                f"another version of sage_patch is loaded in this process, and its operator {name!r} has other "
                "arguments: restart the process"
            )

    def impl(self, name: str, body: Callable[..., Any], dispatch_key: str) -> None:
        if self._set(name, dispatch_key, body):
            self._library.impl(name, self._newest(name, dispatch_key), dispatch_key)

    def fake(self, name: str, body: Callable[..., Any]) -> None:
        if self._set(name, "fake", body):
            torch.library.register_fake(f"sage_patch::{name}", self._newest(name, "fake"), lib=self._library)

    def _set(self, name: str, key: str, body: Callable[..., Any]) -> bool:
        """Whether it is the first body under this key."""
        first = (name, key) not in self._bodies
        self._bodies[name, key] = body
        return first

    def _newest(self, name: str, key: str) -> Callable[..., Any]:
        bodies = self._bodies
        return lambda *args: bodies[name, key](*args)
