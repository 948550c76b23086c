"""Regression tests for faults reported against quantized attention elsewhere: number range, tails, layouts, masks,
dead rows, smoothing. Each test is named after what it guards and names its fault in the docstring.

Wherever a test says "default" it means INT8 QK with FP8 PV and all smoothing on.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from oracle import (
    HALF,
    QUANTIZED,
    RECIPE_TOLERANCE,
    T8F8,
    assert_attention_close,
    attention,
    measure,
    normal,
    packed_attention,
    qkv,
)  # fmt: skip
from sage_patch.attention import sage_attention
from sage_patch.kernels import ops

DEFAULT = "qk_int8_pv_fp8"
INT8 = ["qk_int8_pv_fp16", DEFAULT]
NO_SMOOTH_V = f"{DEFAULT}:smooth_v=off"
HALVES = [torch.float16, torch.bfloat16]


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: str = DEFAULT, **options):
    return sage_attention(q, k, v, recipe=recipe, enable_gqa=q.shape[1] != k.shape[1], **options)


def nhd(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous()


def only_quantized() -> bool:
    return all(not key.reason for key in ops.counts())


# --- A: number range ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [*QUANTIZED, NO_SMOOTH_V])
def test_sum_of_values_may_pass_the_half_range(recipe: str) -> None:
    """A-01: 4,096 equal weights on V = 30 sum to 122,880, past fp16; the average must still be 30."""
    q, k, v = qkv(2, 4, 64, 4096, 64)
    out = run(torch.zeros_like(q), k, torch.full_like(v, 30.0), recipe)
    assert ((out - 30).abs() <= 0.1).all()


@pytest.mark.parametrize("recipe", [*INT8, NO_SMOOTH_V])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_beyond_the_half_range(recipe: str, dtype: torch.dtype) -> None:
    """A-02: a channel of 4e5 must not become infinite on its way in, nor cost the other channels anything."""
    q, k, v = qkv(1, 2, 256, 4096, 128, dtype=dtype)
    v[..., 3] *= 1e5
    out, want = run(q, k, v, recipe), attention(q, k, v)[0]
    rest = [c for c in range(128) if c != 3]
    tolerance = RECIPE_TOLERANCE[recipe.partition(":")[0]]
    assert_attention_close(out[..., rest], want[..., rest], tolerance)
    # one channel has no direction within a row: look along the rows instead
    assert_attention_close(out[..., 3], want[..., 3], tolerance)


@pytest.mark.parametrize("recipe", [*QUANTIZED, NO_SMOOTH_V])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_zero_value_channel_is_exactly_zero(recipe: str, layout: str) -> None:
    """A-03: amax 0 must not divide 0 by 0; the other channels keep their accuracy."""
    q, k, v = qkv(1, 4, 100, 777, 128)
    v[:, 1, :, 5] = 0
    tensors = (q, k, v) if layout == "HND" else (nhd(q), nhd(k), nhd(v))
    out = run(*tensors, recipe, tensor_layout=layout)
    out = out if layout == "HND" else out.transpose(1, 2)
    assert not out[:, 1, :, 5].any() and out[:, 0, :, 5].any()
    assert_attention_close(out, attention(q, k, v)[0], RECIPE_TOLERANCE[recipe.partition(":")[0]])


@pytest.mark.parametrize("recipe", [*QUANTIZED, NO_SMOOTH_V])
@pytest.mark.parametrize("dtype", HALVES)
def test_constant_value_channel_is_exact(recipe: str, dtype: torch.dtype) -> None:
    """A-05: V = 0.001 everywhere comes back as 0.001, within 1 %; centred V is all zero then."""
    for kv_len in (77, 512, 513):
        q, k, v = qkv(1, 2, 64, kv_len, 64, dtype=dtype)
        v = torch.full_like(v, 0.001)
        out = run(q, k, v, recipe)
        assert ((out / v[..., :1, :] - 1).abs() <= 0.01).all()


@pytest.mark.parametrize("recipe", [*INT8, NO_SMOOTH_V])
def test_tiny_inputs_behave_like_small_ones(recipe: str) -> None:
    """A-07: q, k, v of 1e-6, in fp16's subnormal range and in float32; and K exactly zero."""
    for dtype in (torch.float16, torch.float32):
        q, k, v = ((1e-6 * x).to(dtype) for x in qkv(1, 2, 300, 1031, 64, dtype=torch.float32))
        for keys in (k, torch.zeros_like(k)):
            want = attention(q, keys, v)[0]
            got = run(q, keys, v, recipe)
            error = measure(got, want.to(dtype))
            assert torch.isfinite(got).all() and error.rel_l1 < 0.06, f"{dtype}: {error}"
    # a value scale of 1 keeps the fp16 output away from zero, so that tiny scores are seen to be uniform
    got = run(*(1e-6 * normal(1, 2, 300, 64) for _ in range(2)), normal(1, 2, 300, 64), recipe)
    assert measure(got, normal(1, 2, 300, 64).mean(dim=2, keepdim=True).expand_as(got)).rel_l1 < 0.06


@pytest.mark.parametrize("recipe", [*INT8, NO_SMOOTH_V])
def test_accuracy_does_not_jump_at_multiples_of_the_tile(recipe: str) -> None:
    """A-08: one query row, 6:1 grouped heads, kv_len across 128 and 256."""
    errors = {}
    for kv_len in (*range(120, 141), *range(250, 263)):
        q, k, v = qkv(1, 6, 1, kv_len, 128, kv_heads=1)
        errors[kv_len] = measure(run(q, k, v, recipe), attention(q, k, v)[0])
    sizes = [e.rel_l1 for e in errors.values()]
    assert min(e.cosine for e in errors.values()) > 0.998
    assert max(sizes) / min(sizes) < 2, {n: round(e.rel_l1, 4) for n, e in errors.items()}


@pytest.mark.parametrize("recipe", [*QUANTIZED, NO_SMOOTH_V])
@pytest.mark.parametrize("gap", [7.5, 10.0])
def test_a_long_tail_of_small_weights_keeps_its_mass(recipe: str, gap: float) -> None:
    """A-09: one key stands out by `gap`, 16,383 small ones carry much of the sum; V of ones returns one, and with
    the large key's V at zero the output is the mass of the tail."""
    q, k = torch.zeros(1, 1, 64, 64).half(), torch.zeros(1, 1, 16384, 64).half()
    q[..., 0], k[0, 0, 5, 0] = 8, gap
    v = torch.ones_like(k)
    out = run(q, k, v, recipe)
    assert ((out >= 0.97) & (out <= 1.03)).all()
    v[0, 0, 5] = 0
    assert (run(q, k, v, recipe) - attention(q, k, v)[0]).abs().max() <= 0.03


@pytest.mark.parametrize("recipe", [*QUANTIZED, f"{DEFAULT}:smooth=none"])
@pytest.mark.parametrize("packed", [False, True])
def test_huge_logits_stay_finite(recipe: str, packed: bool) -> None:
    """A-11: q, k of +-3e4 give scores of 1e10: finite, and the largest score wins wherever it leads by 50."""
    q, k, v = qkv(1, 4, 257, dim=128)
    q, k = q.sign() * 3e4, k.sign() * 3e4
    want = attention(q, k, v)[0]
    if packed:
        cu = torch.tensor([0, 257])
        out = run(*(nhd(x)[0] for x in (q, k, v)), recipe, cu_seqlens_q=cu, cu_seqlens_k=cu).transpose(0, 1)[None]
    else:
        out = run(q, k, v, recipe)
    assert torch.isfinite(out).all()
    if "int8" in recipe:  # INT4 does not resolve neighbouring scores of this size
        top = torch.topk(q.double() @ k.double().mT * 128**-0.5, 2, dim=-1).values
        sure = top[..., 0] - top[..., 1] > 50
        error = (out.double() - want).norm(dim=-1)[sure] / want.norm(dim=-1)[sure]
        assert sure.float().mean() > 0.5
        assert error.max() < (1e-2 if "fp16" in recipe else T8F8.rel_l1)  # FP8 still rounds the winner's V


@pytest.mark.parametrize("factor", [1, 16, 400])
@pytest.mark.parametrize("recipe", ["qk_int8_pv_fp16", NO_SMOOTH_V, DEFAULT])
def test_inputs_that_were_fp8_before(recipe: str, factor: int) -> None:
    """A-12: activations on E4M3's grid, times 1, 16 or 400, at ordinary logits: cosine above 0.998."""
    q, k, v = (
        (x.to(torch.float8_e4m3fn).float() * factor).bfloat16() for x in qkv(1, 2, 300, 1031, 64, dtype=torch.float32)
    )
    assert all(torch.isfinite(x).all() for x in (q, k, v))
    scale = 64**-0.5 / factor**2
    assert measure(run(q, k, v, recipe, scale=scale), attention(q, k, v, scale=scale)[0]).cosine > 0.998


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("factor", [1, 16, 400])
def test_fp8_outliers_stay_finite_averages(recipe: str, factor: int) -> None:
    """A-12: with 0.1 % of entries at +-7,168 rows turn into single keys, which INT8 cannot always tell apart; but
    the output stays finite and within the range of its values."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.where(torch.rand(x.shape, generator=generator) < 1e-3, x.sign() * 448 * 16, x * factor).bfloat16()
        for x in qkv(1, 2, 300, 1031, 64, dtype=torch.float32)
    )
    out = run(q, k, v, recipe).float()
    high, low = v.float().amax(dim=-2, keepdim=True), v.float().amin(dim=-2, keepdim=True)
    slack = (high - low) * 0.07  # one E4M3 step
    assert torch.isfinite(out).all() and (out <= high + slack).all() and (out >= low - slack).all()


@pytest.mark.parametrize("recipe", INT8)
def test_many_small_cross_attentions_in_a_batch(recipe: str) -> None:
    """A-13: 81 frames with 32 keys each: the first and the last are as good as any."""
    q, k, v = qkv(81, 3, 156, 32, 128)
    out = run(q, k, v, recipe)
    assert torch.isfinite(out).all()
    want = attention(q, k, v)[0]
    for item in (0, 40, 80):
        assert_attention_close(out[item : item + 1], want[item : item + 1], T8F8, what=f"item {item}")


# --- C: tails and lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize(("q_len", "kv_len", "dim"), [(1001, 503, 64), (1001, 503, 128), (9, 9, 64)])
def test_what_memory_held_before_does_not_matter(recipe: str, q_len: int, kv_len: int, dim: int) -> None:
    """C-01: a run on NaN inputs and a freed pool of NaN come first; the bits must be those of a clean run."""
    q, k, v = qkv(1, 1, q_len, kv_len, dim)
    clean = run(q, k, v, recipe)
    assert_attention_close(clean, attention(q, k, v)[0], RECIPE_TOLERANCE[recipe])
    run(*(torch.full_like(x, math.nan) for x in (q, k, v)), recipe)
    pool = [torch.full((n,), math.nan) for n in (100, 10_000, 1_000_000)]
    del pool
    assert torch.equal(run(q, k, v, recipe), clean)


@pytest.mark.parametrize("dim", [64, 128])
def test_every_kv_len_up_to_two_tiles(dim: int) -> None:
    """C-03: 1..260 keys, no residue of any tile size left out."""
    q, k, v = qkv(1, 2, 64, 260, dim)
    for kv_len in range(1, 261):
        part = k[:, :, :kv_len], v[:, :, :kv_len]
        assert_attention_close(run(q, *part), attention(q, *part)[0], T8F8, what=f"kv_len {kv_len}")


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_one_query_row(recipe: str, kv_heads: int) -> None:
    """C-04: decode shapes, causal or not, are right when quantized by name, and exact by default."""
    for kv_len in (1, 2, 7, 64, 129, 1031):
        q, k, v = qkv(1, 4, 1, kv_len, 64, kv_heads=kv_heads)
        for is_causal in (False, True):  # one row at the bottom sees every key
            out = run(q, k, v, recipe, is_causal=is_causal)
            assert_attention_close(out, attention(q, k, v)[0], RECIPE_TOLERANCE[recipe], what=f"kv_len {kv_len}")
    ops.reset_counts()
    run(q, k, v, "sage2", is_causal=True)
    assert [key.reason for key in ops.counts()] == ["decode"]


def test_short_attention_goes_exact_without_an_exception() -> None:
    """C-05: 77 text tokens are bit-equal to SDPA; 4,096 tokens are quantized."""
    short = qkv(1, 2, 77, dim=64)
    assert torch.equal(sage_attention(*short), F.scaled_dot_product_attention(*short))
    sage_attention(*qkv(1, 1, 4096, dim=32))
    assert [(key.recipe, key.reason) for key in ops.counts()] == [("exact", "short_kv"), (DEFAULT, "")]


@pytest.mark.parametrize("recipe", ["exact", *QUANTIZED])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_unused_cache_slots_may_hold_anything(recipe: str, bad: float, kind: str) -> None:
    """C-06: 88 of 128 slots hold NaN or infinity; means, scales and products must not see them."""
    q, k, v = qkv(2, 2, 20, 128, 64)
    k[:, :, 40:], v[:, :, 40:] = bad, bad
    mask = (torch.arange(128) < 40).expand(2, 1, 1, 128)
    if kind == "float":
        mask = torch.zeros(mask.shape, dtype=torch.float16).masked_fill(~mask, -math.inf)
    want = attention(q, k[:, :, :40], v[:, :, :40])[0]
    tolerance = HALF if recipe == "exact" else RECIPE_TOLERANCE[recipe]
    assert_attention_close(run(q, k, v, recipe, attn_mask=mask), want, tolerance)


@pytest.mark.parametrize("recipe", ["exact", *QUANTIZED])
@pytest.mark.parametrize(
    ("q_lens", "k_lens", "heads", "kv_heads", "is_causal"),
    [([5, 0, 7, 3], [9, 4, 0, 2], 4, 4, False), ([0, 1, 0, 1], [0, 3, 0, 5], 9, 3, True)],
    ids=["C-08", "C-10"],
)
def test_packed_items_without_rows_or_keys(recipe, q_lens, k_lens, heads, kv_heads, is_causal) -> None:
    """C-08, C-10: items without keys give zero and -inf, items without rows give nothing, the rest is right."""
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0) for lens in (q_lens, k_lens))
    q, k, v = (
        normal(int(n), h, 64, seed=s) for s, (n, h) in enumerate([(cu_q[-1], heads), *[(cu_k[-1], kv_heads)] * 2])
    )
    out, lse = run(q, k, v, recipe, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, is_causal=is_causal, return_lse=True)
    want, want_lse = packed_attention(q, k, v, cu_q, cu_k, is_causal=is_causal)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))
    tolerance = HALF if recipe == "exact" else replace(RECIPE_TOLERANCE[recipe], worst_row=0.8)
    assert_attention_close(out, want, tolerance)


# --- D: layouts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("start", [1, 4, 7])
def test_unaligned_views_and_chunks(recipe: str, start: int) -> None:
    """D-01: a chunk of a gathered batch, and a view that starts off a 16-byte boundary."""
    q, k, v = qkv(2, 2, 77, dim=40)
    want = run(q, k, v, recipe)
    chunks = [torch.cat([torch.full_like(x, math.nan)] * 2 + [x])[4:6] for x in (q, k, v)]
    moved = [torch.cat([torch.full((start,), math.nan).half(), x.flatten()])[start:].view(x.shape) for x in (q, k, v)]
    assert torch.equal(run(*chunks, recipe), want) and torch.equal(run(*moved, recipe), want)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_strides_of_batch_one_and_head_one(recipe: str) -> None:
    """D-03: [1, 2, 1000, 64] with stride(0) = 17, one head with stride(1) = 5."""
    q, k, v = qkv(1, 2, 1000, dim=64)
    want = run(q, k, v, recipe)
    assert torch.equal(run(*(x.as_strided(x.shape, (17, *x.stride()[1:])) for x in (q, k, v)), recipe), want)
    one = [x[:, :1].contiguous() for x in (q, k, v)]
    odd = [x.as_strided(x.shape, (x.stride(0), 5, *x.stride()[2:])) for x in one]
    assert torch.equal(run(*odd, recipe), run(*one, recipe))


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("which", range(8))
def test_each_of_q_k_v_may_have_its_own_layout(recipe: str, which: int) -> None:
    """D-05, D-06: any subset of q, k, v as NHD views, and V as a slice of a wider last dimension."""
    q, k, v = qkv(1, 16, 62, dim=128)
    want = run(q, k, v, recipe)
    views = [nhd(x).transpose(1, 2) if which >> n & 1 else x for n, x in enumerate((q, k, v))]
    assert torch.equal(run(*views, recipe), want)
    wide = torch.cat([v, torch.full_like(v, math.nan)], dim=-1)[..., :128]
    assert torch.equal(run(views[0], views[1], wide, recipe), want)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_keeps_batch_shape_and_dtype(batch: int, layout: str, dtype: torch.dtype) -> None:
    """D-07: shape of query with V's last dimension, lse [B, H, q_len] in float32, in every combination."""
    q, k, v = qkv(batch, 3, 66, 80, 64, 32, dtype=dtype)
    want, want_lse = attention(q, k, v)
    tensors = (q, k, v) if layout == "HND" else (nhd(q), nhd(k), nhd(v))
    out, lse = run(*tensors, tensor_layout=layout, return_lse=True)
    assert torch.equal(run(*tensors, tensor_layout=layout), out) and out.dtype == dtype
    out = out if layout == "HND" else out.transpose(1, 2)
    assert lse.shape == (batch, 3, 66) and lse.dtype == torch.float32
    assert_attention_close(out, want, T8F8)
    assert (lse - want_lse).abs().max() < 0.05


def test_layout_is_what_was_named() -> None:
    """D-08: with as many heads as tokens the shape cannot tell; the name does."""
    x = qkv(1, 32, 32, dim=64)
    hnd, as_nhd = run(*x), run(*x, tensor_layout="NHD")
    assert measure(hnd, as_nhd).cosine < 0.9
    assert_attention_close(hnd, attention(*x)[0], T8F8)
    assert_attention_close(as_nhd.transpose(1, 2), attention(*(t.transpose(1, 2) for t in x))[0], T8F8)


@pytest.mark.parametrize("recipe", [*QUANTIZED, f"{DEFAULT}:smooth=none,smooth_v=off"])
def test_two_calls_merge_by_lse(recipe: str) -> None:
    """D-09, K-07: 400 + 631 keys with a key bias of 30, merged, equal the single call; lse within 0.05 nat."""
    q, k, v = qkv(1, 4, 77, 1031, 64)
    k = k + 30 if "smooth=none" not in recipe else k
    parts = [run(q, k[:, :, s], v[:, :, s], recipe, return_lse=True) for s in (slice(0, 400), slice(400, None))]
    total = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out.double() * torch.exp(lse - total)[..., None] for out, lse in parts)
    want, want_lse = attention(q, k, v)
    assert_attention_close(merged, want, RECIPE_TOLERANCE[recipe.partition(":")[0]])
    if "int8" in recipe:
        assert (total - want_lse).abs().max() < 0.05
        assert (run(q, k, v, recipe, return_lse=True)[1] - want_lse).abs().max() < 0.05


@pytest.mark.parametrize("recipe", ["exact", *QUANTIZED])
@pytest.mark.parametrize("width", [43, 1031])
def test_mask_strides_mean_nothing(recipe: str, width: int) -> None:
    """D-11: bool and float masks of odd width, transposed, expanded over batch, heads or rows."""
    q, k, v = qkv(2, 2, 30, width, 32)
    seen = torch.rand(2, 2, 30, width, generator=torch.Generator().manual_seed(0)) < 0.7
    for full in (seen, torch.zeros(seen.shape).half().masked_fill(~seen, -math.inf)):
        want = run(q, k, v, recipe, attn_mask=full)
        turned = full.transpose(-1, -2).contiguous().transpose(-1, -2)
        assert torch.equal(run(q, k, v, recipe, attn_mask=turned), want)
        for small in (full[:1], full[:, :1], full[:1, :1, :1], full[0, 0]):
            spread = small.expand(full.shape)
            want = run(q, k, v, recipe, attn_mask=spread.contiguous())
            assert torch.equal(run(q, k, v, recipe, attn_mask=spread), want)
            assert torch.equal(run(q, k, v, recipe, attn_mask=small), want)
