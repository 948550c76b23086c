"""Kernels that the library does not hold, on a card: compiled by NVRTC, or by the driver from PTX.

The mma.sync family runs on a Hopper card in tests (zoo/mma_library.py). Here its library holds code for other cards
alone, as the wheel's does on a card of the future.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sage_patch import args as call_args
from sage_patch.kernels import build, library, nvrtc, plain
from sage_patch.kernels.plans import PLANS
from sage_patch.recipes import EXACT, RECIPES
from zoo import mma_library

pytestmark = pytest.mark.gpu
BOUNDS = {"qk_int8_pv_fp16": 0.02, "qk_int8_pv_fp8": 0.055}  # of N(0, 1), as in self tests


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The libraries in use come back."""
    monkeypatch.setattr(library, "_by_architecture", {})
    monkeypatch.setattr(library, "_by_device", {})
    PLANS.clear()
    yield
    PLANS.clear()


def _units() -> dict[str, tuple[str, ...]]:
    """The mma.sync family is compiled for Hopper too; Hopper's own is not there."""
    units = {
        n: (*m, "90a") if n.endswith("_mma.cu") or n.startswith("fwd_mma") else m for n, m in build.units().items()
    }
    return {name: mark for name, mark in units.items() if mark != ("90a",)}


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().sum() / want.abs().sum())


def _check(recipes: tuple[str, ...]) -> None:
    """Full and causal calls, and a mask, whose pre-processing is other kernels' work: against float32."""
    generator = torch.Generator().manual_seed(0)
    for head_dim in (64, 128):
        q, k, v = (torch.randn(1, 4, n, head_dim, generator=generator).half() for n in (300, 700, 700))
        there = [x.cuda() for x in (q, k, v)]
        for name in recipes:
            for is_causal in (False, True):
                args = call_args.plain(head_dim**-0.5, is_causal)
                want = plain.forward(q.float(), k.float(), v.float(), args, EXACT)[0]
                got = library.launch(*there, args, RECIPES[name])[0].float().cpu()
                assert _error(got, want) < BOUNDS[name], (head_dim, name, is_causal)
            mask = torch.rand(1, 1, 300, 700, generator=generator) < 0.7
            args = call_args.plain(head_dim**-0.5, False)._replace(attn_mask=mask)
            want = plain.forward(q.float(), k.float(), v.float(), args, EXACT)[0]
            got = library.launch(*there, args._replace(attn_mask=mask.cuda()), RECIPES[name])[0].float().cpu()
            assert _error(got, want) < BOUNDS[name], (head_dim, name, "mask")


@pytest.mark.skipif(nvrtc.find_library() is None, reason="no NVRTC")
def test_nvrtcs_kernels_run(restored: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No nvcc, and a library without a kernel for this card: compiled, launched by the library's own code, right."""
    units, sources = _units(), build.source_dir()
    monkeypatch.setattr(build, "units", lambda: units)
    monkeypatch.setattr(build, "source_dir", lambda: sources)
    with monkeypatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, "-DSAGE2_TEST_BACKEND=mma"))
        host = build.build(["120"], tmp_path / "libsage2-sm120.so")
    assert library.architectures(library._open(str(host))) == ["120"]
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    lib = library.load_for(mma_library.ARCHITECTURE)
    assert library.architectures(lib) == [mma_library.ARCHITECTURE]
    monkeypatch.setitem(library._by_device, 0, (lib, mma_library.CAPABILITY))
    _check(("qk_int8_pv_fp16", "qk_int8_pv_fp8"))


def test_the_driver_compiles_ptx(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """PTX of an older architecture alone, which has no FP8: what a card gets that is newer than the library."""
    units = _units()
    monkeypatch.setattr(build, "units", lambda: units)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DSAGE2_TEST_BACKEND=mma"))
    monkeypatch.setattr(build, "_targets", lambda unit, architectures: ["-gencode=arch=compute_80,code=compute_80"])
    lib = library._open(str(build.build([mma_library.ARCHITECTURE])))
    monkeypatch.setitem(library._by_device, 0, (lib, mma_library.CAPABILITY))
    _check(("qk_int8_pv_fp16",))
