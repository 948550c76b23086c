"""Masks as arguments of a call: what they hide is hidden, whatever it holds, what they leave is exact, and a row with
nothing to attend to is zero.

Masks of transformers' own making are in test_masks.py, layouts of masks in test_layouts.py.
"""

from __future__ import annotations

import math

import pytest
import torch

from oracle import HALF, QUANTIZED, T8F8, assert_attention_close, attention, measure, qkv, visible
from sage_patch.attention import sage_attention
from sage_patch.kernels import ops
from zoo.calls import ALL, DEFAULT, additive, on_devices, run, tolerance_of


@pytest.mark.parametrize("recipe", ALL)
def test_mask_is_honoured(recipe: str) -> None:
    """Keys 0..76 of 512 are visible; a hundredfold V behind the mask changes nothing."""
    q, k, v = qkv(1, 2, 512, dim=64)
    seen = (torch.arange(512) < 77).view(1, 1, 1, 512)
    want = attention(q, k[:, :, :77], v[:, :, :77])[0]
    first = run(q, k, v, recipe, attn_mask=seen)
    assert_attention_close(first, want, tolerance_of(recipe))
    v[:, :, 77:] *= 100
    assert torch.equal(run(q, k, v, recipe, attn_mask=seen), first)
    assert all(key.recipe == recipe for key in ops.counts())


def test_text_padding_runs_quantized() -> None:
    """4,096 image and up to 256 text tokens, mask [B, 1, 1, S]: the common case is not refused."""
    q, k, v = qkv(2, 1, 256, 4352, 64)
    seen = torch.arange(4352) < torch.tensor([4096 + 40, 4096 + 256]).view(2, 1, 1, 1)
    out = sage_attention(q, k, v, seen)
    assert_attention_close(out, attention(q, k, v, seen)[0], T8F8)
    assert [(key.recipe, key.reason) for key in ops.counts()] == [(DEFAULT, "")]


@pytest.mark.parametrize("recipe", ALL)
def test_padding_may_be_anywhere(recipe: str) -> None:
    """Left padding, a hole and a random half in one batch: keys go by index, never by count."""
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
    """All-zero and all-True masks are bit-equal to no mask, and stay quantized."""
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
    """One pattern as bool, 0/-inf and 0/-1e4 agrees; as int64 or uint8 it is refused."""
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
    """1,088 tokens of which the last 57 are masked equal 1,031 tokens, and run quantized."""
    q, k, v = qkv(2, 2, 1088, dim=64)
    seen = (torch.arange(1088) < 1031).view(1, 1, 1, 1088)
    padded = run(q, k, v, recipe, attn_mask=seen)[:, :, :960]  # whole blocks of rows, so that groups coincide
    short = run(q[:, :, :1031], k[:, :, :1031], v[:, :, :1031], recipe)[:, :, :960]
    assert measure(padded, short).rel_l1 < 1e-4
    assert all(not key.reason for key in ops.counts())


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_window_and_causality_equal_their_mask(recipe: str) -> None:
    """A pattern given by arguments is bit-equal to the same pattern given as a mask."""
    q, k, v = qkv(1, 2, 100, 300, 64)
    for options in (dict(is_causal=True), dict(is_causal=True, causal_align="top_left"), dict(window=(20, 7))):
        mask = visible(100, 300, **options)
        assert torch.equal(run(q, k, v, recipe, **options), run(q, k, v, recipe, attn_mask=mask))


@on_devices(ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_unused_cache_slots_may_hold_anything(device: str, recipe: str, bad: float, kind: str) -> None:
    """88 of 128 slots hold NaN or infinity; means, scales and products must not see them."""
    q, k, v = qkv(2, 2, 20, 128, 64, device=device)
    k[:, :, 40:], v[:, :, 40:] = bad, bad
    mask = (torch.arange(128, device=device) < 40).expand(2, 1, 1, 128)
    want = attention(q, k[:, :, :40], v[:, :, :40])[0]
    got = run(q, k, v, recipe, attn_mask=mask if kind == "bool" else additive(mask))
    assert_attention_close(got, want, tolerance_of(recipe))


# --- rows with nothing to attend to ---------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_left_padded_rows_are_zero(recipe: str, kind: str) -> None:
    """Left padding of 0, 5 and 1,030 of 1,031 under causality: zero rows, real rows right, all finite."""
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
    """Right padding: no NaN, and the real rows equal the unpadded run."""
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
    """A row of False or of -inf sees nothing and is zero; a row of finfo.min sees every key alike."""
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
    """A dead row is zero although V holds NaN in its masked slots, which other rows do see."""
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
    """A key that the mask shows to some rows only, and causality to the others only, is seen by none:
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
    """An item whose every key is masked and NaN is zero, not the mean of V and not NaN."""
    q, k, v = qkv(2, 2, 20, 140, 32)
    k[1], v[1] = math.nan, math.nan
    seen = torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 1, 140)
    out = run(q, k, v, recipe, attn_mask=seen)
    assert not out[1].any()
    assert_attention_close(out[:1], attention(q[:1], k[:1], v[:1])[0], tolerance_of(recipe))
