"""Features of language models as arguments of a call: sinks, softcap, grouped heads, dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from oracle import HALF, T8F8, assert_attention_close, attention, measure, normal, qkv
from sage_patch.attention import sage_attention
from sage_patch.kernels import ops
from zoo.calls import ALL, DEFAULT, INT8, run, tolerance_of


@pytest.mark.parametrize("recipe", ["exact", *INT8])
def test_sink_takes_its_share(recipe: str) -> None:
    """A sink of 3.0 a head over 128 keys: dropping it leaves cosine 0.9999 but a norm 10 % too large."""
    q, k, v = qkv(2, 4, 128, dim=64)
    sinks = torch.full((4,), 3.0)
    error = assert_attention_close(
        run(q, k, v, recipe, sinks=sinks), attention(q, k, v, sinks=sinks)[0], tolerance_of(recipe)
    )
    assert abs(error.norm_ratio - 1) < 0.01, error
    if recipe != DEFAULT:  # with FP8 values 3.8 % is the recipe's own noise
        assert error.rel_l1 < 0.03, error
    dropped = measure(run(q, k, v, recipe), attention(q, k, v, sinks=sinks)[0])
    assert dropped.norm_ratio > 1.08


@pytest.mark.parametrize("recipe", ["exact", *INT8])
def test_softcap_is_applied(recipe: str) -> None:
    """Logits of up to 326 under a cap of 50, on the true scores, K's mean included."""
    q, k, v = qkv(1, 4, 1031, dim=64)
    q, k = q * 8, k * 8
    want = attention(q, k, v, softcap=50.0)[0]
    tolerance = HALF if recipe == "exact" else T8F8
    assert_attention_close(run(q, k, v, recipe, softcap=50.0), want, tolerance)
    assert measure(run(q, k, v, recipe), want).cosine < 0.5
    q, k = q / 8, k / 8 + 3 * normal(1, 4, 1, 64, seed=5)
    assert_attention_close(run(q, k, v, recipe, softcap=5.0), attention(q, k, v, softcap=5.0)[0], tolerance)


@pytest.mark.parametrize(("heads", "kv_heads"), [(33, 2), (3, 2), (2, 3), (0, 1)])
def test_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int) -> None:
    """Before anything runs, with both counts in the message."""
    q, k = torch.zeros(1, heads, 130, 64).half(), torch.zeros(1, kv_heads, 130, 64).half()
    with pytest.raises(ValueError, match=f"num_heads {heads} .* num_kv_heads {kv_heads}"):
        sage_attention(q, k, k, enable_gqa=True)
    assert not ops.counts()


@pytest.mark.parametrize("recipe", ALL)
def test_drop_in_for_sdpa_with_grouped_heads(recipe: str) -> None:
    """Enable_gqa by keyword or as the eighth positional argument; grouped equals repeated heads."""
    q, k, v = qkv(1, 8, 130, dim=64, kv_heads=2)
    named = sage_attention(q, k, v, recipe=recipe, enable_gqa=True)
    assert torch.equal(sage_attention(q, k, v, None, 0.0, False, None, True, recipe=recipe), named)
    wide = [x.repeat_interleave(4, dim=1) for x in (k, v)]
    repeated = sage_attention(q, *wide, recipe=recipe)
    assert measure(named, repeated).rel_l1 < 1e-4


@pytest.mark.parametrize("recipe", ALL)
def test_dropout_is_never_lost(recipe: str) -> None:
    """Dropout 0.1 drops, through SDPA's own generator, and is counted; dropout 0.0 runs quantized."""
    q, k, v = qkv(1, 2, 200, dim=64)
    torch.manual_seed(0)
    want = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    torch.manual_seed(0)
    assert torch.equal(run(q, k, v, recipe, dropout_p=0.1), want)
    (key,) = ops.counts()
    assert key.reason == ("policy" if recipe == "exact" else "dropout")
    assert_attention_close(run(q, k, v, recipe, dropout_p=0.0), attention(q, k, v)[0], tolerance_of(recipe))
