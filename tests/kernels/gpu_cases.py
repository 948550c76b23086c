"""What the GPU tests share: inputs, a kernel call, a check against float64. Importing it skips a file elsewhere."""

from __future__ import annotations

import itertools
import math
from typing import Any

import kernel_oracle as oracle
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device; torch.cuda.is_available() is False", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip(
        f"these tests are of compute capability 9.0, this device is {torch.cuda.get_device_capability()}",
        allow_module_level=True,
    )

import kernel_calls  # noqa: E402

DEVICE = "cuda"
FP8, FP16 = "qk_int8_pv_fp8", "qk_int8_pv_fp16"
RECIPES = (FP8, FP16)
INT4_RECIPES = ("qk_int4_pv_fp8", "qk_int4_pv_fp16")


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def qkv(
    b: int, h: int, hk: int, n: int, kn: int, d: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        normal(b, h, n, d, dtype=dtype, seed=seed),
        normal(b, hk, kn, d, dtype=dtype, seed=seed + 1000),
        normal(b, hk, kn, d, dtype=dtype, seed=seed + 2000),
    )


def poison() -> None:
    """Leaves NaN in the allocator's free blocks and in shared memory."""
    pools = [torch.full((size,), math.nan, device=DEVICE) for size in (1 << 10, 1 << 16, 1 << 20, 1 << 23, 1 << 25)]
    del pools
    for d, recipe in itertools.product((64, 128), RECIPES):
        bad = torch.full((1, 64, 256, d), math.nan, dtype=torch.bfloat16, device=DEVICE)
        forward(bad, bad, bad, scale=1.0, recipe=recipe, return_lse=True)


def forward(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """kernel_calls.forward; its log-sum-exp is None unless it was asked for."""
    return kernel_calls.forward(*tensors, **options)  # type: ignore[return-value]


def check(
    recipe: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    lse_tolerance: float | None = None,
    **kw: Any,
) -> dict[str, float]:
    """Errors of one call against the oracle, asserted small; dead rows are asserted zero. kv_lens: a list."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    kv_lens = kw.pop("kv_lens", None)
    lens = None if kv_lens is None else torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE)
    out, lse = forward(
        q,
        k,
        v,
        scale=scale,
        recipe=recipe,
        return_lse=True,
        kv_lens=lens,
        is_causal=kw.get("causal", False),
        causal_top_left=kw.get("top_left", False),
    )
    ref, ref_lse = oracle.attention(q, k, v, scale, kv_lens=kv_lens, **kw)
    e = oracle.errors(out, ref)
    what = f"{tuple(q.shape)} {tuple(k.shape)} {q.dtype} {recipe} {kw} {kv_lens}: {e}"
    assert oracle.acceptable(e, recipe), what
    dead = ref_lse == -math.inf
    assert bool((lse[dead] == -math.inf).all()) and bool((out[dead] == 0).all()), f"dead rows: {what}"
    if lse_tolerance is not None:
        assert float((lse.double() - ref_lse)[~dead].abs().max()) < lse_tolerance, what
    return e
