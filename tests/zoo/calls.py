"""What tests of the public function share: a call on either device that says what it must have run, the recipes each
device computes, and small helpers for layouts and masks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle import HALF, QUANTIZED, RECIPE_TOLERANCE, Tolerance
from sage_patch.attention import sage_attention
from sage_patch.backends import as_run
from sage_patch.kernels import ops
from sage_patch.recipes import parse_recipe
from zoo import gpu_cases

FP16, DEFAULT = "qk_int8_pv_fp16", "qk_int8_pv_fp8"
INT8 = [FP16, DEFAULT]
ALL = ["exact", *QUANTIZED]
NO_SMOOTH_V = f"{DEFAULT}:smooth_v=off"  # the variants run on the CPU only
HALVES = [torch.float16, torch.bfloat16]


def on_devices(cpu: list[str], cuda: list[str] = INT8) -> pytest.MarkDecorator:
    """One body for both devices, as `device` and `recipe`: these recipes on the CPU, those on the card."""
    card = [pytest.param("cuda", recipe, marks=pytest.mark.gpu) for recipe in cuda]
    return pytest.mark.parametrize(("device", "recipe"), [*(("cpu", recipe) for recipe in cpu), *card])


def run(query: Tensor, key: Tensor, value: Tensor, recipe: str = DEFAULT, **options: Any) -> Any:
    """The public function; on a card the counters must show that the kernels computed this call."""
    if query.is_cuda:
        ops.reset_counts()
    out = sage_attention(query, key, value, recipe=recipe, enable_gqa=query.shape[1] != key.shape[1], **options)
    if query.is_cuda:
        ran = as_run(parse_recipe(recipe), "sm90", query.shape[-1])
        assert [(key.recipe, key.backend, key.reason) for key in ops.counts()] == [(ran.name, "sm90", "")]
    return out


def run_exact(query: Tensor, key: Tensor, value: Tensor, recipe: str, reason: str, **options: Any) -> Any:
    """The public function, which must have run the exact path and counted this reason."""
    ops.reset_counts()
    out = sage_attention(query, key, value, recipe=recipe, enable_gqa=query.shape[1] != key.shape[1], **options)
    assert [(key.recipe, key.backend, key.reason) for key in ops.counts()] == [("exact", "exact", reason)]
    return out


def tolerance_of(recipe: str) -> Tolerance:
    """Of a recipe or one of its variants, on half-precision tensors."""
    return HALF if recipe == "exact" else RECIPE_TOLERANCE[recipe.partition(":")[0]]


def nhd(x: Tensor) -> Tensor:
    """[B, H, N, D] as a contiguous [B, N, H, D], and back."""
    return x.transpose(1, 2).contiguous()


def additive(seen: Tensor, hidden: float = -math.inf, dtype: torch.dtype = torch.float16) -> Tensor:
    """The added mask that says the same as a boolean one."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, hidden)


def poison(query: Tensor, key: Tensor, value: Tensor, recipe: str) -> None:
    """Leaves NaN where the next call will put its own numbers: in freed memory and, on a card, in shared memory."""
    if query.is_cuda:
        gpu_cases.poison()
        return
    run(*(torch.full_like(x, math.nan) for x in (query, key, value)), recipe)
    pool = [torch.full((n,), math.nan) for n in (100, 10_000, 1_000_000)]
    del pool


def packed_lengths(*lengths: list[int], device: str = "cpu") -> list[Tensor]:
    """Cumulative lengths of each list of lengths."""
    return [torch.tensor([*itertools.accumulate(items, initial=0)], device=device) for items in lengths]
