"""Head dimensions: none is an error, the scale is that of the true one, and values may have their own."""

from __future__ import annotations

import pytest

from oracle import HALF, T8F8, Tolerance, assert_attention_close, attention, measure, qkv
from sage_patch.kernels import ops
from zoo.calls import ALL, INT8, run, tolerance_of


@pytest.mark.parametrize("dim", [8, 40, 64, 72, 80, 96, 128, 160, 192, 256, 384, 512])
@pytest.mark.parametrize("recipe", ["sage2", *INT8])
def test_no_head_dim_is_an_error(dim: int, recipe: str) -> None:
    """Quantized and right, or exact and counted; the output is contiguous with the true head_dim."""
    q, k, v = qkv(1, 2, 130, 200, dim)
    out = run(q, k, v, recipe)
    (key,) = ops.counts()
    exact = key.recipe == "exact"
    assert bool(key.reason) == exact and out.shape == q.shape and out.is_contiguous()
    assert_attention_close(out, attention(q, k, v)[0], HALF if exact else T8F8)


@pytest.mark.parametrize("dim", [40, 72, 80, 96, 112])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("recipe", INT8)
def test_scale_is_that_of_the_true_head_dim(dim: int, scale: float | None, recipe: str) -> None:
    """1/sqrt(D) of the given D, never of a padded one; an explicit scale always wins."""
    q, k, v = qkv(1, 2, 200, 300, dim)
    want = attention(q, k, v, scale=scale)[0]
    factor = (scale or dim**-0.5) * dim**0.5  # QK noise grows with the scale, and T8F8 is for factor 1
    tolerance = T8F8 if factor < 2.5 else Tolerance(0.995, 0.06, 0.9, "T8F8 with room in the rows for sharper softmax")
    assert_attention_close(run(q, k, v, recipe, scale=scale), want, tolerance)


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize(("dim", "v_dim"), [(192, 128), (64, 128), (48, 32)])
def test_value_head_dim_of_its_own(recipe: str, dim: int, v_dim: int) -> None:
    """The output has V's last dimension, and is right, in both layouts."""
    q, k, v = qkv(1, 2, 140, 200, dim, v_dim)
    out = run(q, k, v, recipe)
    assert out.shape == (1, 2, 140, v_dim)
    assert_attention_close(out, attention(q, k, v)[0], tolerance_of(recipe))
    turned = run(*(x.transpose(1, 2) for x in (q, k, v)), recipe, tensor_layout="NHD")
    assert measure(turned.transpose(1, 2), out).rel_l1 < 1e-4
