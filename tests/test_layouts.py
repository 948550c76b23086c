"""Layouts: strides, views, offsets and alignment change no bit, the output has the shape that was asked for, and the
caller's tensors stay as they were.

A test without a recipe means INT8 QK with FP8 PV and all smoothing on; twins on the card run the compiled kernels.
"""

from __future__ import annotations

import math

import pytest
import torch

from oracle import HALF, QUANTIZED, RECIPE_TOLERANCE, assert_attention_close, attention, measure, qkv, visible
from zoo.calls import ALL, DEFAULT, INT8, additive, nhd, on_devices, run, run_exact


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("start", [1, 4, 7])
def test_unaligned_views_and_chunks(recipe: str, start: int) -> None:
    """A chunk of a gathered batch, and a view that starts off a 16-byte boundary."""
    q, k, v = qkv(2, 2, 77, dim=40)
    want = run(q, k, v, recipe)
    chunks = [torch.cat([torch.full_like(x, math.nan)] * 2 + [x])[4:6] for x in (q, k, v)]
    moved = [torch.cat([torch.full((start,), math.nan).half(), x.flatten()])[start:].view(x.shape) for x in (q, k, v)]
    assert torch.equal(run(*chunks, recipe), want) and torch.equal(run(*moved, recipe), want)


@on_devices(QUANTIZED)
def test_strides_of_batch_one_and_head_one(device: str, recipe: str) -> None:
    """A batch of one with stride(0) = 17, one head with stride(1) = 5."""
    q, k, v = qkv(1, 2, 1000 if device == "cpu" else 4000, dim=64, device=device)
    want = run(q, k, v, recipe)
    assert torch.equal(run(*(x.as_strided(x.shape, (17, *x.stride()[1:])) for x in (q, k, v)), recipe), want)
    one = [x[:, :1].contiguous() for x in (q, k, v)]
    odd = [x.as_strided(x.shape, (x.stride(0), 5, *x.stride()[2:])) for x in one]
    assert torch.equal(run(*odd, recipe), run(*one, recipe))


@on_devices(QUANTIZED)
@pytest.mark.parametrize("which", range(8))
def test_each_of_q_k_v_may_have_its_own_layout(device: str, recipe: str, which: int) -> None:
    """Any subset of q, k, v as NHD views, and V as a slice of a wider last dimension."""
    q, k, v = qkv(1, 16, 62, dim=128, device=device)
    want = run(q, k, v, recipe)
    views = [nhd(x).transpose(1, 2) if which >> n & 1 else x for n, x in enumerate((q, k, v))]
    assert torch.equal(run(*views, recipe), want)
    wide = torch.cat([v, torch.full_like(v, math.nan)], dim=-1)[..., :128]
    assert torch.equal(run(views[0], views[1], wide, recipe), want)


@on_devices([DEFAULT])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_output_keeps_batch_shape_and_dtype(
    device: str, recipe: str, batch: int, layout: str, dtype: torch.dtype
) -> None:
    """Shape of query with V's last dimension, its dtype and device, lse [B, H, q_len] in float32, in every combination,
    lse asked for or not; on a card float32 runs exact."""
    q, k, v = qkv(batch, 3, 66, 80, 64, 32 if device == "cpu" else 64, dtype=dtype, device=device)
    tensors = (q, k, v) if layout == "HND" else (nhd(q), nhd(k), nhd(v))
    options = dict(tensor_layout=layout, return_lse=True)
    want, want_lse = attention(q, k, v)
    if device == "cuda" and dtype == torch.float32:
        out, lse = run_exact(*tensors, recipe, "dtype_float32", **options)
        tolerance = HALF  # torch may multiply float32 in TF32
    else:
        out, lse = run(*tensors, recipe, **options)
        assert torch.equal(run(*tensors, recipe, tensor_layout=layout), out)
        assert (lse - want_lse).abs().max() < 0.05
        tolerance = RECIPE_TOLERANCE[recipe]
    assert out.shape == (*tensors[0].shape[:-1], v.shape[-1]) and out.is_contiguous()
    assert (out.dtype, out.device) == (dtype, q.device)
    assert (lse.shape, lse.dtype, lse.device) == ((batch, 3, 66), torch.float32, q.device)
    assert_attention_close(out if layout == "HND" else out.transpose(1, 2), want, tolerance)


@on_devices(INT8)
def test_layout_is_what_was_named(device: str, recipe: str) -> None:
    """With as many heads as tokens the shape cannot tell; the name does."""
    x = qkv(1, 32, 32, dim=64, device=device)
    hnd, as_nhd = run(*x, recipe), run(*x, recipe, tensor_layout="NHD")
    assert measure(hnd, as_nhd).cosine < 0.9
    assert_attention_close(hnd, attention(*x)[0], RECIPE_TOLERANCE[recipe])
    want = attention(*(t.transpose(1, 2) for t in x))[0]
    assert_attention_close(as_nhd.transpose(1, 2), want, RECIPE_TOLERANCE[recipe])


@on_devices(ALL)
@pytest.mark.parametrize("width", [43, 1031])
def test_mask_strides_mean_nothing(device: str, recipe: str, width: int) -> None:
    """Bool and float masks of odd width, transposed, expanded over batch, heads or rows: read by position. On a card
    masks of another shape take another path: right, not bit-equal."""
    q, k, v = qkv(2, 2, 30, width, 32 if device == "cpu" else 64, device=device)
    seen = (torch.rand(2, 2, 30, width, generator=torch.Generator().manual_seed(0)) < 0.7).to(device)
    for full in (seen, additive(seen)):
        smaller = (full[:1], full[:, :1], full[:1, :1, :1], full[0, 0])
        pairs = [(full, full)] if device == "cuda" else []
        pairs += [(full, full.transpose(-1, -2).contiguous().transpose(-1, -2))]
        pairs += [(x.expand(full.shape).contiguous(), same) for x in smaller for same in (x, x.expand(full.shape))]
        for plain, strided in pairs:
            out = run(q, k, v, recipe, attn_mask=strided)
            if device == "cpu":
                assert torch.equal(out, run(q, k, v, recipe, attn_mask=plain))
            else:
                want = attention(q, k, v, strided)[0]
                assert_attention_close(out, want, RECIPE_TOLERANCE[recipe], what=f"{full.dtype} {strided.stride()}")


@pytest.mark.parametrize("recipe", [*ALL, f"{DEFAULT}:smooth=qk", f"{DEFAULT}:granularity=tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("view", ["contiguous", "nhd", "cache"])
def test_inputs_are_read_only(recipe: str, dtype: torch.dtype, view: str) -> None:
    """Q, k, v, mask and sinks keep every bit, as views and as slices of a cache too."""
    q, k, v = qkv(1, 2, 70, 140, 64, dtype=dtype)
    if view == "nhd":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif view == "cache":
        k, v = (torch.cat([x, torch.full_like(x, math.nan)], dim=2)[:, :, :140] for x in (k, v))
    mask = torch.zeros(1, 1, 70, 140, dtype=dtype).masked_fill(~visible(70, 140, True), -math.inf)
    sinks = torch.zeros(2)
    before = [x.clone() for x in (q, k, v, mask, sinks)]
    run(q, k, v, recipe, attn_mask=mask, sinks=sinks, softcap=30.0, return_lse=True)
    run(q, k, v, recipe)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, mask, sinks), before, strict=True))
