"""Regression tests for reported faults in masks, in rows with nothing to attend to, and in smoothing.

Each test is named after what it guards and names its fault in the docstring.
"""

from __future__ import annotations

import math

import pytest
import torch

from oracle import (
    HALF,
    QUANTIZED,
    RECIPE_TOLERANCE,
    T8F8,
    Tolerance,
    assert_attention_close,
    attention,
    measure,
    normal,
    qkv,
    visible,
)  # fmt: skip
from sage_patch.attention import sage_attention
from sage_patch.kernels import ops

DEFAULT = "qk_int8_pv_fp8"
ALL = ["exact", *QUANTIZED]


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: str = DEFAULT, **options):
    return sage_attention(q, k, v, recipe=recipe, enable_gqa=q.shape[1] != k.shape[1], **options)


def tolerance_of(recipe: str) -> Tolerance:
    return HALF if recipe == "exact" else RECIPE_TOLERANCE[recipe]


def additive(seen: torch.Tensor, hidden: float = -math.inf, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden)


# --- E: masks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ALL)
def test_mask_is_honoured(recipe: str) -> None:
    """E-01, E-10: keys 0..76 of 512 are visible; a hundredfold V behind the mask changes nothing."""
    q, k, v = qkv(1, 2, 512, dim=64)
    seen = (torch.arange(512) < 77).view(1, 1, 1, 512)
    want = attention(q, k[:, :, :77], v[:, :, :77])[0]
    first = run(q, k, v, recipe, attn_mask=seen)
    assert_attention_close(first, want, tolerance_of(recipe))
    v[:, :, 77:] *= 100
    assert torch.equal(run(q, k, v, recipe, attn_mask=seen), first)
    assert all(key.recipe == recipe for key in ops.counts())


def test_text_padding_runs_quantized() -> None:
    """E-03: 4,096 image and up to 256 text tokens, mask [B, 1, 1, S]: the common case is not refused."""
    q, k, v = qkv(2, 1, 256, 4352, 64)
    seen = torch.arange(4352) < torch.tensor([4096 + 40, 4096 + 256]).view(2, 1, 1, 1)
    out = sage_attention(q, k, v, seen)
    assert_attention_close(out, attention(q, k, v, seen)[0], T8F8)
    assert [(key.recipe, key.reason) for key in ops.counts()] == [(DEFAULT, "")]


@pytest.mark.parametrize("recipe", ALL)
def test_padding_may_be_anywhere(recipe: str) -> None:
    """E-04: left padding, a hole and a random half in one batch: keys go by index, never by count."""
    q, k, v = qkv(3, 2, 200, 1031, 64)
    n = torch.arange(1031)
    hole = (n < 200) | (n >= 400)
    random = torch.rand(1031, generator=torch.Generator().manual_seed(0)) < 0.5
    seen = torch.stack([n >= 300, hole, random]).view(3, 1, 1, 1031)
    k = k.masked_fill(~seen.mT, 1e3)  # what is hidden would be seen
    assert_attention_close(run(q, k, v, recipe, attn_mask=seen), attention(q, k, v, seen)[0], tolerance_of(recipe))


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("is_causal", [False, True])
def test_mask_that_hides_nothing_changes_nothing(recipe: str, is_causal: bool) -> None:
    """E-08: all-zero and all-True masks are bit-equal to no mask, and stay quantized."""
    q, k, v = qkv(2, 2, 200, 333, 64)
    want = run(q, k, v, recipe, is_causal=is_causal)
    full = torch.ones(1, 1, 200, 333, dtype=torch.bool)
    for mask in (full, additive(full), full[:, :, :1]):
        got = run(q, k, v, recipe, is_causal=is_causal, attn_mask=mask)
        if recipe == "exact":  # torch picks another kernel when there is a mask
            assert_attention_close(got, want, HALF)
        else:
            assert torch.equal(got, want)
    assert all(key.recipe == recipe for key in ops.counts())


@pytest.mark.parametrize("recipe", ALL)
def test_bool_keeps_float_adds_integers_raise(recipe: str) -> None:
    """E-09: one pattern as bool, 0/-inf and 0/-1e4 agrees; as int64 or uint8 it is refused."""
    q, k, v = qkv(2, 2, 100, 300, 64)
    seen = torch.rand(2, 1, 1, 300, generator=torch.Generator().manual_seed(0)) < 0.6
    want = run(q, k, v, recipe, attn_mask=seen)
    assert_attention_close(want, attention(q, k, v, seen)[0], tolerance_of(recipe))
    for mask in (additive(seen), additive(seen, -1e4)):
        got = run(q, k, v, recipe, attn_mask=mask)
        assert torch.equal(got, want) if recipe != "exact" else measure(got, want).rel_l1 < 1e-3
    for dtype in (torch.int64, torch.uint8):
        with pytest.raises(ValueError, match="attn_mask"):
            run(q, k, v, recipe, attn_mask=seen.to(dtype))


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_trailing_padding_equals_the_shorter_call(recipe: str) -> None:
    """E-12: 1,088 tokens of which the last 57 are masked equal 1,031 tokens, and run quantized."""
    q, k, v = qkv(2, 2, 1088, dim=64)
    seen = (torch.arange(1088) < 1031).view(1, 1, 1, 1088)
    padded = run(q, k, v, recipe, attn_mask=seen)[:, :, :960]  # whole blocks of rows, so that groups coincide
    short = run(q[:, :, :1031], k[:, :, :1031], v[:, :, :1031], recipe)[:, :, :960]
    assert measure(padded, short).rel_l1 < 1e-4
    assert all(not key.reason for key in ops.counts())


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_window_and_causality_equal_their_mask(recipe: str) -> None:
    """E-01: a pattern given by arguments is bit-equal to the same pattern given as a mask."""
    q, k, v = qkv(1, 2, 100, 300, 64)
    for options in (dict(is_causal=True), dict(is_causal=True, causal_align="top_left"), dict(window=(20, 7))):
        mask = visible(100, 300, **options)
        assert torch.equal(run(q, k, v, recipe, **options), run(q, k, v, recipe, attn_mask=mask))


# --- F: rows with nothing to attend to ------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_left_padded_rows_are_zero(recipe: str, kind: str) -> None:
    """F-01: left padding of 0, 5 and 1,030 of 1,031 under causality: zero rows, real rows right, all finite."""
    q, k, v = qkv(3, 1, 1031, dim=32)
    pads = torch.tensor([0, 5, 1030])
    seen = (torch.arange(1031) >= pads.view(3, 1, 1, 1)) & visible(1031, 1031, True)
    out = run(q, k, v, recipe, attn_mask=seen if kind == "bool" else additive(seen))
    assert_attention_close(out, attention(q, k, v, seen)[0], tolerance_of(recipe))
    for item, pad in enumerate(pads.tolist()):
        assert not out[item, :, :pad].any()
        real, *unpadded = (x[item : item + 1, :, pad:] for x in (out, q, k, v))
        assert_attention_close(real, attention(*unpadded, is_causal=True)[0], tolerance_of(recipe), what=f"item {item}")


@pytest.mark.parametrize("recipe", ALL)
def test_padding_with_softcap_and_causality(recipe: str) -> None:
    """F-02: right padding: no NaN, and the real rows equal the unpadded run."""
    q, k, v = qkv(2, 2, 300, dim=64)
    lengths = torch.tensor([300, 177])
    seen = torch.arange(300) < lengths.view(2, 1, 1, 1)
    out = run(q, k, v, recipe, attn_mask=seen, softcap=50.0, is_causal=True)
    assert torch.isfinite(out).all()
    for item, n in enumerate(lengths.tolist()):
        one = [x[item : item + 1, :, :n] for x in (q, k, v)]
        got = out[item : item + 1, :, :n]
        assert_attention_close(got, attention(*one, softcap=50.0, is_causal=True)[0], tolerance_of(recipe))
        alone = run(*one, recipe, softcap=50.0, is_causal=True)
        whole = n // 64 * 64  # blocks of rows that the padding does not share
        assert measure(got[:, :, :whole], alone[:, :, :whole]).rel_l1 < 2e-3


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("return_lse", [False, True])
def test_documented_answer_for_each_kind_of_dead_row(recipe: str, dtype: torch.dtype, return_lse: bool) -> None:
    """F-03: a row of False or of -inf sees nothing and is zero; a row of finfo.min sees every key alike."""
    q, k, v = qkv(1, 2, 6, 10, 32, dtype=dtype)
    seen = torch.ones(1, 1, 6, 10, dtype=torch.bool)
    seen[..., 5, :] = False
    lowest = torch.finfo(dtype).min
    for mask in (seen, additive(seen, dtype=dtype), additive(seen, lowest, dtype)):
        out = run(q, k, v, recipe, attn_mask=mask, return_lse=return_lse)
        out, lse = out if return_lse else (out, None)
        assert_attention_close(out[:, :, :5], attention(q, k, v)[0][:, :, :5], tolerance_of(recipe))
        if mask.dtype == torch.bool or torch.isneginf(mask).any():
            assert not out[:, :, 5].any()
            assert lse is None or torch.isneginf(lse[:, :, 5]).all()
        else:
            # beside float16's lowest number scores still count, beside the others' they are rounded away
            want = attention(q, k, v, mask)[0]
            assert measure(out, want).rel_l1 < tolerance_of(recipe).rel_l1
            assert dtype == torch.float16 or measure(want[:, :, 5], v.mean(dim=2)).rel_l1 < 0.01


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_dead_row_is_selected_not_multiplied(recipe: str, kind: str) -> None:
    """F-05: a dead row is zero although V holds NaN in its masked slots, which other rows do see."""
    q, k, v = qkv(1, 2, 20, 140, 32)
    v[:, :, 7] = math.nan
    seen = torch.ones(1, 1, 20, 140, dtype=torch.bool)
    seen[..., 3, :] = False
    out = run(q, k, v, recipe, attn_mask=seen if kind == "bool" else additive(seen))
    assert not out[:, :, 3].any() and torch.isnan(out[:, :, 4:]).all()


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("heads", [1, 4])
def test_mask_and_causality_hide_together(recipe: str, kind: str, heads: int) -> None:
    """F-05, C-06: a key that the mask shows to some rows only, and causality to the others only, is seen by none:
    its NaN cannot leak, and it has no part in means and scales."""
    q, k, v = qkv(1, 4, 40, 150, 32, kv_heads=2)
    seen = (torch.rand(1, heads, 40, 150, generator=torch.Generator().manual_seed(0)) < 0.8).contiguous()
    seen[..., 10:, 30] = False  # key 30: shown to rows 0..9, reached by rows 30..39
    never = torch.arange(150) >= 40
    never[30] = True
    k[:, :, never], v[:, :, never] = math.nan, math.inf
    options = dict(is_causal=True, causal_align="top_left")
    out = run(q, k, v, recipe, attn_mask=seen if kind == "bool" else additive(seen), **options)
    assert_attention_close(
        out, attention(q, k.nan_to_num(0), v.nan_to_num(0, 0, 0), seen, **options)[0], tolerance_of(recipe)
    )


@pytest.mark.parametrize("recipe", ALL)
def test_item_without_keys_beside_nan(recipe: str) -> None:
    """F-05: an item whose every key is masked and NaN is zero, not the mean of V and not NaN."""
    q, k, v = qkv(2, 2, 20, 140, 32)
    k[1], v[1] = math.nan, math.nan
    seen = torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 1, 140)
    out = run(q, k, v, recipe, attn_mask=seen)
    assert not out[1].any()
    assert_attention_close(out[:1], attention(q[:1], k[:1], v[:1])[0], tolerance_of(recipe))


# --- O: smoothing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [10, 30, 100, 300])
def test_key_channel_with_an_offset(offset: float) -> None:
    """O-01: the error does not grow with K's common offset; without smoothing it does."""
    q, k, v = qkv(1, 4, 300, 1031, 64)
    k[..., 7] += offset
    want = attention(q, k, v)[0]
    assert_attention_close(run(q, k, v), want, T8F8)
    without = measure(run(q, k, v, f"{DEFAULT}:smooth=none"), want).rel_l1
    assert without > {10: 0.04, 30: 0.06, 100: 0.15, 300: 0.5}[offset]


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("kv_len", [1, 2, 4, 12, 77, 503])
def test_smoothing_never_hurts(recipe: str, kv_len: int) -> None:
    """O-01: on plain data and few keys each kind of smoothing costs at most 10 %; one key returns V itself."""
    q, k, v = qkv(8, 4, 64, kv_len)
    want = attention(q, k, v)[0]
    error = measure(run(q, k, v, recipe), want).rel_l1
    if kv_len == 1:
        assert torch.equal(run(q, k, v, recipe), v.expand_as(q))
    for off in ("smooth=none", "smooth_v=off", "smooth=none,smooth_v=off"):
        assert error <= 1.1 * measure(run(q, k, v, f"{recipe}:{off}"), want).rel_l1, off


@pytest.mark.parametrize("recipe", ["qk_int8_pv_fp16", DEFAULT])
def test_values_with_an_offset_keep_their_detail(recipe: str) -> None:
    """O-03: V = 40 + N(0,1): the error is small beside |V - mean|, where plain cosine sees nothing. float32
    tensors, because a half-precision output near 40 has steps of 1/32 itself."""
    q, k, v = qkv(1, 4, 300, 1031, 64, dtype=torch.float32)
    v = v + 40
    want = attention(q, k, v)[0]
    centred = Tolerance(0.998, 0.06, 0.99, "V smoothing in the numpy model: 0.038", centred=0.06)
    assert_attention_close(run(q, k, v, recipe), want, centred, value=v)
    without = measure(run(q, k, v, f"{DEFAULT}:smooth_v=off"), want, v)
    assert without.centred > 1 and without.cosine > 0.9999  # the fault, and why cosine misses it
    half = [x.half() for x in (q, k, v)]
    out, best = run(*half, recipe), attention(*half)[0]
    assert measure(out, best, half[2]).centred < measure(best.half(), best, half[2]).centred + 0.06


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_int4_needs_its_smoothing(dtype: torch.dtype) -> None:
    """O-01: with a common offset in Q and K, INT4 is close with both smoothed and poor with neither."""
    q, k, v = qkv(1, 2, 256, 1031, 64, dtype=dtype)
    q, k = q + 3 * normal(1, 2, 1, 64, seed=7).to(dtype), k + 5 * normal(1, 2, 1, 64, seed=8).to(dtype)
    want = attention(q, k, v)[0]
    error = {s: measure(run(q, k, v, f"qk_int4_pv_fp8:smooth={s}"), want).rel_l1 for s in ("none", "k", "q", "qk")}
    assert error["qk"] < min(error["k"], error["q"]) and error["none"] > 2 * error["qk"] and error["qk"] < 0.28
