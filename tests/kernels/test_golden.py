"""Results the kernels gave on a real H200 (scripts/gpu_small.py --golden), checked where there is no GPU: the images
and scales bit for bit against the mirror of the pre-processing, outputs and log-sum-exp against float64."""

from __future__ import annotations

from pathlib import Path

import kernel_mirror as mirror
import kernel_oracle as oracle
import numpy as np
import pytest
import torch
from torch import Tensor

GOLDEN = np.load(Path(__file__).with_name("golden.npz"))
SHAPES = ((64, 70, torch.float16), (128, 70, torch.bfloat16), (40, 300, torch.bfloat16), (128, 1, torch.bfloat16))
RECIPES = ("qk_int8_pv_fp8", "qk_int8_pv_fp16")


def inputs(d: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.from_numpy(GOLDEN[f"{d}.{n}.{name}"]).view(dtype) for name in "qkv"]


@pytest.mark.parametrize("d,n,dtype", SHAPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_images(d: int, n: int, dtype: torch.dtype, recipe: str) -> None:
    _, k, v = inputs(d, n, dtype)
    want = mirror.prepare(k, v, [k.shape[2]], 64 if d <= 64 else 128, recipe == "qk_int8_pv_fp16", True)
    for name, x in vars(want).items():
        assert torch.equal(torch.from_numpy(GOLDEN[f"{d}.{n}.{recipe}.{name}"]), x), name


@pytest.mark.parametrize("d,n,dtype", SHAPES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("causal", [False, True])
def test_outputs(d: int, n: int, dtype: torch.dtype, recipe: str, causal: bool) -> None:
    q, k, v = inputs(d, n, dtype)
    ref, ref_lse = oracle.attention(q, k, v, d**-0.5, causal=causal)
    key = f"{d}.{n}.{recipe}.{int(causal)}"
    out, lse = torch.from_numpy(GOLDEN[f"{key}.out"]).view(dtype), torch.from_numpy(GOLDEN[f"{key}.lse"])
    assert oracle.acceptable(oracle.errors(out, ref), recipe)
    dead = ref_lse.isinf()
    assert torch.equal(lse.isinf(), dead) and bool((out[dead] == 0).all())
    assert float((lse - ref_lse)[~dead].abs().max()) < 0.06
