"""The pre-processing kernel in PyTorch, bit for bit, under the names the kernel tests use."""

from __future__ import annotations

from sage_patch.reference.sm90_prepare import Prepared, from_workspace, prepare

__all__ = ["Prepared", "from_workspace", "prepare"]
