"""Calls that need gradients are exact calls, with SDPA's own gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from oracle import QUANTIZED, qkv
from sage_patch.backends import why_not
from sage_patch.kernels import ops
from sage_patch.recipes import NO_LIMITS, Call, parse_recipe
from zoo.calls import ALL, DEFAULT, run


@pytest.mark.parametrize("recipe", ["sage2", *ALL])
def test_projections_get_their_gradient(recipe: str) -> None:
    """With requires_grad the gradients are SDPA's, bit for bit; without grad mode the call is quantized."""
    leaves, theirs = ([x.requires_grad_() for x in qkv(1, 2, 140, dim=64, dtype=torch.bfloat16)] for _ in range(2))
    out = run(*leaves, recipe)
    assert out.grad_fn is not None
    out.float().square().sum().backward()
    F.scaled_dot_product_attention(*theirs).float().square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) and a.grad.any() for a, b in zip(leaves, theirs, strict=True))
    ops.reset_counts()
    with torch.no_grad():
        assert run(*leaves, recipe).grad_fn is None
    (key,) = ops.counts()
    assert key.recipe == (DEFAULT if recipe == "sage2" else recipe)


def test_gradients_decide_before_anything_else() -> None:
    """A recipe never claims a call that needs gradients, whatever its size and limits."""
    call = Call("reference", "cpu", "float16", 64, 64, 2, 2, 500, 500, needs_grad=True)
    assert {why_not(parse_recipe(r), call, NO_LIMITS) for r in QUANTIZED} == {"needs_grad"}
