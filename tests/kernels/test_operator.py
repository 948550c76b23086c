"""A plain eager call skips the dispatcher; whoever needs to see an operator still sees one. Both count and agree."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sage_patch.kernels import ops

REST = (None, None, None, None, None, None, 0.125, -1, -1, False, 0.0, False, "NHD", "qk_int8_pv_fp8", "", "here")


class Seen(TorchDispatchMode):
    """Collects the names of the operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_shortcut_is_the_operator() -> None:
    q, k, v = (torch.randn(2, 2, n, 64, generator=torch.Generator().manual_seed(n)).half() for n in (40, 150, 150))
    direct, no_lse = ops.attend(q, k, v, *REST)
    through, empty = ops.attention(q, k, v, *REST)
    assert torch.equal(direct, through) and direct.stride() == through.stride()
    assert no_lse is None and empty.numel() == 0
    assert list(ops.counts("here").values()) == [2]


def test_modes_transforms_and_profilers_see_the_operator() -> None:
    q = torch.randn(1, 2, 40, 64).half()
    with Seen() as seen:
        ops.attend(q, q, q, *REST)
    assert "sage_patch.attention.default" in seen.names
    with torch.profiler.profile() as profile:
        ops.attend(q, q, q, *REST)
    assert "sage_patch::attention" in {event.key for event in profile.key_averages()}
    assert ops.attend(q.to("meta"), q.to("meta"), q.to("meta"), *REST)[0].device.type == "meta"


def test_one_variable_moves_every_cache(monkeypatch, tmp_path):
    from sage_patch.kernels import build, crossover

    monkeypatch.setenv("SAGE_PATCH_CACHE", str(tmp_path))
    assert build.cache_dir() == tmp_path and crossover.user_table().parent == tmp_path
    monkeypatch.delenv("SAGE_PATCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert build.cache_dir() == tmp_path / "x" / "sage_patch"
