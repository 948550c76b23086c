"""Which backend computes a call: that of the tensors' own device."""

from __future__ import annotations

import pytest
import torch

from sage_patch.kernels import ops


def test_backend_is_that_of_the_tensors_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda:1 is judged by its own capability, while cuda:0 is current; a device without an index is the current
    one. The GPU tests run the call itself where there are two devices."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(9, 0), (7, 5)].__getitem__)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    ops._cached_backend.cache_clear()
    try:
        found = [ops.backend_for(torch.device(name)) for name in ("cuda:0", "cuda:1", "cuda")]
    finally:
        ops._cached_backend.cache_clear()
    assert found == ["sm90", "none", "sm90"]
