"""The quantized recipes in plain PyTorch, against the float64 oracle."""

from __future__ import annotations

import math

import pytest
import torch

from oracle import QUANTIZED, RECIPE_TOLERANCE, assert_attention_close, attention, measure, normal, qkv, visible
from sage_patch.attention import sage_attention
from sage_patch.recipes import parse_recipe
from sage_patch.reference.quantize import key_groups, quantize_int, query_groups, subtract_block_mean, subtract_mean
from sage_patch.reference.rotation import rotate, rotate_back

HEAD_DIMS = [32, 40, 64, 72, 96, 128, 160, 256]
LENGTHS = [(1, 1), (1, 1031), (77, 1), (77, 77), (503, 77), (77, 503), (503, 1031), (1031, 503)]
CORNERS = [dict(), dict(is_causal=True), dict(is_causal=True, causal_align="top_left")]
HEADS = [(2, 2), (4, 2), (3, 1)]


def run(recipe: str, *tensors: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor]:
    grouped = tensors[0].shape[1] != tensors[1].shape[1]
    return sage_attention(*tensors, recipe=recipe, return_lse=True, enable_gqa=grouped, **options)


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_head_dim_and_length(recipe: str, dim: int) -> None:
    """All length pairs at every head_dim; causal corners, grouped heads and dtypes rotate so that each length
    meets each of them over the head_dims."""
    turn = HEAD_DIMS.index(dim)
    for n, (q_len, kv_len) in enumerate(LENGTHS):
        corner, (heads, kv_heads) = CORNERS[(n + turn) % 3], HEADS[(n + turn // 3) % 3]
        dtype = torch.float16 if (n + turn) % 2 else torch.bfloat16
        q, k, v = qkv(1, heads, q_len, kv_len, dim, kv_heads=kv_heads, dtype=dtype, seed=n)
        out, lse = run(recipe, q, k, v, **corner)
        want, want_lse = attention(q, k, v, **corner)
        what = f"{recipe} D={dim} {q_len}x{kv_len} {heads}:{kv_heads} {corner} {dtype}"
        assert out.dtype == dtype and lse.dtype == torch.float32
        assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse)), what
        if q_len * kv_len == 1:
            assert torch.equal(out, v.repeat_interleave(heads // kv_heads, dim=1)), what
        else:
            assert_attention_close(out, want, RECIPE_TOLERANCE[recipe], what=what)


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize(("dim", "v_dim"), [(192, 128), (64, 128), (48, 32), (32, 1)])
def test_value_head_dim_may_differ(recipe: str, dim: int, v_dim: int) -> None:
    """Output takes V's head_dim, scale comes from Q's."""
    q, k, v = qkv(1, 2, 77, 503, dim, v_dim, kv_heads=1)
    out, _ = run(recipe, q, k, v, is_causal=True)
    if v_dim > 1:
        assert_attention_close(out, attention(q, k, v, is_causal=True)[0], RECIPE_TOLERANCE[recipe])
    assert out.shape == (1, 2, 77, v_dim)


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("granularity", ["tensor", "block", "warp", "thread", "token"])
@pytest.mark.parametrize("tiling", ["mma", "wgmma"])
def test_every_granularity_and_tiling(recipe: str, granularity: str, tiling: str) -> None:
    """Variants used for ablations keep the recipe's tolerance on plain data."""
    q, k, v = qkv(1, 2, 150, 300, 64)
    out, _ = run(f"{recipe}:granularity={granularity},tiling={tiling}", q, k, v)
    if recipe.startswith("qk_int8") or granularity in ("thread", "token"):
        assert_attention_close(out, attention(q, k, v)[0], RECIPE_TOLERANCE[recipe])
    else:  # coarse INT4 is what the paper shows to be worse; it must still be attention
        assert measure(out, attention(q, k, v)[0]).cosine > 0.94


# --- log-sum-exp ----------------------------------------------------------------------------------------------


def dequantized(recipe: str, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys whose exact product is what the recipe's integers stand for, shifts included: further
    channels carry Q's block mean against smoothed K, and each row's product with K's mean."""
    r = parse_recipe(recipe)
    k_smooth, k_mean = subtract_mean(k, None)
    q_float, q_mean = subtract_block_mean(q, 64) if r.smooth_q else (q.float(), torch.zeros(q.shape))
    q_int = quantize_int(rotate(q_float), r.qk_bits, query_groups(q.shape[2], r.granularity, r.tiling, q.device))
    k_int = quantize_int(rotate(k_smooth), r.qk_bits, key_groups(k.shape[2], r.granularity, r.tiling, k.device))
    q_held, k_held = (rotate_back(x.values.float() * x.scale[..., None], q.shape[-1]) for x in (q_int, k_int))
    shift = q.double() @ k_mean.double().transpose(-1, -2)
    columns = torch.ones(*k.shape[:-1], 1, dtype=torch.float64)
    return (
        torch.cat([q_held.double(), q_mean.double(), shift], dim=-1),
        torch.cat([k_held.double(), k_smooth.double(), columns], dim=-1),
    )


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("bias", [0.0, 30.0])
def test_lse_is_that_of_the_scores_that_were_used(recipe: str, bias: float) -> None:
    """Against float64 on the dequantized scores the LSE errs by less than 1e-3 nat, K's mean included; what is
    left is quantization of the scores, and with FP8 the rounding of P, which the row sum shares with the output
    so that weights sum to one (at most 1/16 on one key, far less over many)."""
    q, k, v = qkv(1, 2, 130, 1031, 64)
    k = k + bias
    _, lse = run(recipe, q, k, v)
    _, want = attention(*dequantized(recipe, q, k), v, scale=64**-0.5)
    error = (lse - want).abs()
    if recipe.endswith("fp16"):
        assert error.max() < 1e-3, f"{error.max():.2e}"
    else:
        assert error.mean() < 2e-3 and error.max() < 8e-3, f"{error.mean():.2e} {error.max():.2e}"


@pytest.mark.parametrize(("recipe", "mean"), [("qk_int8_pv_fp16", 1e-3), ("qk_int8_pv_fp8", 2e-3)])
def test_lse_is_that_of_the_true_scores(recipe: str, mean: float) -> None:
    """Against float64 on the inputs themselves: INT8 noise of about 1e-2 a score averages out over the keys."""
    q, k, v = qkv(1, 2, 130, 1031, 64)
    error = (run(recipe, q, k, v)[1] - attention(q, k, v)[1]).abs()
    assert error.mean() < mean and error.max() < 0.05, f"{error.mean():.2e} {error.max():.2e}"


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("smooth", ["none", "k", "qk"])
@pytest.mark.parametrize("shards", [2, 3, 4])
def test_shards_of_keys_merge_by_lse(recipe: str, smooth: str, shards: int) -> None:
    """Ring attention: shards of uneven length, each smoothed by its own mean, merge to the unsharded answer."""
    q, k, v = qkv(1, 2, 77, 1031, 64, kv_heads=1)
    k = k + 2 * normal(1, 1, 1, 64, seed=9)
    cuts = [0, *sorted({2: [400], 3: [77, 640], 4: [1, 130, 700]}[shards]), 1031]
    name = f"{recipe}:smooth={smooth}"
    parts = [run(name, q, k[:, :, a:b], v[:, :, a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    lses = torch.stack([lse for _, lse in parts])
    total = torch.logsumexp(lses, dim=0)
    merged = sum(out.double() * torch.exp(lse - total)[..., None] for out, lse in parts)
    want, want_lse = attention(q, k, v)
    tolerance = RECIPE_TOLERANCE[recipe]
    if smooth != "none":
        assert_attention_close(merged, want, tolerance)
        assert (total - want_lse).abs().mean() < (5e-3 if "int8" in recipe else 0.1)
    else:  # without smoothing the recipe itself is worse on keys with a mean: merging must add nothing to that
        assert measure(merged, want).rel_l1 < 1.3 * measure(run(name, q, k, v)[0], want).rel_l1 + 0.01


# --- same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("lengths", [(1, 300), (77, 503), (130, 130)])
def test_batch_invariance(recipe: str, lengths: tuple[int, int]) -> None:
    """An item gives the same bits alone and in a batch, whoever its neighbours are."""
    q, k, v = qkv(5, 4, *lengths, 64, kv_heads=2)
    k[3], v[3] = k[3] * 1e3, v[3] * 1e3
    out, lse = run(recipe, q, k, v, is_causal=True)
    for item in range(5):
        one = slice(item, item + 1)
        alone, alone_lse = run(recipe, q[one], k[one], v[one], is_causal=True)
        assert torch.equal(alone, out[one]) and torch.equal(alone_lse, lse[one]), f"item {item}"


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_determinism(recipe: str) -> None:
    """Same inputs, same bits, ten times, with the allocator disturbed in between."""
    q, k, v = qkv(2, 2, 131, 259, 40)
    first = run(recipe, q, k, v, is_causal=True)
    for n in range(10):
        junk = torch.full((1000 + 977 * n,), math.nan)
        again = run(recipe, q, k, v, is_causal=True)
        del junk
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def fused_views(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same numbers as `x` [B, H, N, D] behind other strides."""
    b, h, n, d = x.shape
    if how == "nhd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "fused":  # one of three in a [B, N, 3, H, D] buffer
        buffer = torch.full((b, n, 3, h, d), math.nan, dtype=x.dtype)
        buffer[:, :, 1] = x.transpose(1, 2)
        return buffer[:, :, 1].transpose(1, 2)
    if how == "offset":  # neither the buffer's start nor 16-byte aligned
        buffer = torch.full((x.numel() + 11,), math.nan, dtype=x.dtype)
        buffer[7 : 7 + x.numel()] = x.flatten()
        return buffer[7 : 7 + x.numel()].view(x.shape)
    if how == "wide":  # a slice of a wider last dimension
        buffer = torch.full((b, h, n, d + 5), math.nan, dtype=x.dtype)
        buffer[..., 3 : 3 + d] = x
        return buffer[..., 3 : 3 + d]
    if how == "last":  # the last dimension strided
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    raise AssertionError(how)


@pytest.mark.parametrize("recipe", ["exact", *QUANTIZED])
@pytest.mark.parametrize("how", ["nhd", "fused", "offset", "wide", "last"])
def test_views_equal_contiguous(recipe: str, how: str) -> None:
    """Strides, offsets and fused QKV buffers change no bit, and what lies beside the view is never read."""
    q, k, v = qkv(2, 4, 77, 203, 64, kv_heads=2)
    want = run(recipe, q, k, v, is_causal=True)
    got = run(recipe, *(fused_views(x, how) for x in (q, k, v)), is_causal=True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert got[0].is_contiguous()


@pytest.mark.parametrize("recipe", ["exact", *QUANTIZED])
def test_strides_of_size_one_dimensions_mean_nothing(recipe: str) -> None:
    """Batch 1 and head 1 may carry any stride."""
    q, k, v = qkv(1, 1, 77, 203, 64)
    want = run(recipe, q, k, v)
    odd = [x.as_strided(x.shape, (17, 5, 64, 1)) for x in (q, k, v)]
    got = run(recipe, *odd)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    row = q[:, :, :1].as_strided((1, 1, 1, 64), (3, 1, 7, 1))
    assert torch.equal(run(recipe, row, *odd[1:])[0], run(recipe, q[:, :, :1], k, v)[0])


@pytest.mark.parametrize("recipe", ["exact", *QUANTIZED])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_inputs_are_never_modified(recipe: str, dtype: torch.dtype) -> None:
    """float32 needs the most care: every `.float()` on it is the caller's own memory."""
    q, k, v = qkv(1, 2, 70, 140, 32, dtype=dtype)
    mask = torch.where(visible(70, 140, True), 0.0, -math.inf).to(dtype)[None, None]
    sinks = normal(2, dtype=torch.float32)
    before = [x.clone() for x in (q, k, v, mask, sinks)]
    run(recipe, q, k, v, attn_mask=mask, sinks=sinks, softcap=20.0, is_causal=True)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, mask, sinks), before, strict=True))


# --- non-finite -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_query_row_stays_in_its_row(recipe: str, bad: float) -> None:
    """A query row with NaN or infinity gives NaN in its own output row; every other row is what it would have
    been, apart from sharing a scale and a mean with a row of zeros."""
    q, k, v = qkv(1, 2, 100, 140, 32)
    q[0, 1, 40, 3] = bad
    out, lse = run(recipe, q, k, v)
    others = torch.ones(2, 100, dtype=torch.bool)
    others[1, 40] = False
    want = attention(q.nan_to_num(0, 0, 0), k, v)[0]
    assert_attention_close(out[:, others][None], want[:, others][None], RECIPE_TOLERANCE[recipe])
    assert torch.isnan(out[0, 1, 40]).all() and torch.isnan(lse[0, 1, 40])
    assert torch.isfinite(lse[:, others]).all()


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_bad_value_stays_in_its_channel_and_head(recipe: str) -> None:
    """A visible NaN in V is honest NaN in its channel of its head, and nowhere else."""
    q, k, v = qkv(1, 2, 60, 140, 32)
    v[0, 1, 50, 7] = math.nan
    out, _ = run(recipe, q, k, v)
    nan = torch.isnan(out)
    assert nan[0, 1, :, 7].all() and nan.sum() == 60
