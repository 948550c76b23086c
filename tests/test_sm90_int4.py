"""INT4 and Q smoothing in the emulator of the Hopper kernel: against the reference recipe, and against float64.

Where every 64 rows of Q hardly differ, their mean is nearly all of them: the INT4 part of a score is small and the
correction must be right to the tolerance of the INT8 recipes, under every feature.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_sm90_reference import random_mask
from torch import Tensor

from oracle import RECIPE_TOLERANCE, ROWS_REL_L1, assert_attention_close, attention, measure, qkv
from sage_patch.backends import why_not
from sage_patch.recipes import Call, Limits, parse_recipe
from sage_patch.reference.emulator import forward as sm90
from sage_patch.reference.emulator import prepare as sm90_prepare
from sage_patch.reference.quantize import BLOCK_Q, subtract_block_mean

RECIPES = ("qk_int4_pv_fp8", "qk_int4_pv_fp16")
Q_LEN, KV_LEN = 150, 300


def alike(batch: int = 1, heads: int = 2, dim: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Queries that are the same in every block of 64 rows but for a tenth, keys and values with offsets."""
    q, k, v = qkv(batch, heads, Q_LEN, KV_LEN, dim, kv_heads=1, dtype=torch.float32)
    common = qkv(batch, heads, 3, 1, dim, dtype=torch.float32, seed=9)[0]
    q = sm90_prepare.of_rows(common, Q_LEN) + 0.1 * q
    k[..., 3] += 4.0
    v[..., 5] += 8.0
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def close(recipe: str, tensors: tuple[Tensor, ...], seen: Tensor | None = None, **options: Any) -> sm90.Stages:
    """Emulates and compares with float64. seen: bool mask for the oracle, in place of what `options` say about keys."""
    q, k, v = tensors
    s = sm90.emulate(q, k, v, recipe=recipe, scale=0.125, **options)
    oracle_options: dict[str, Any] = {n: options[n] for n in ("softcap", "sinks") if n in options}
    if seen is None:
        seen = options.get("attn_mask")
        oracle_options |= {"window": (options.get("left", -1), options.get("right", -1))}
        oracle_options |= {"is_causal": options.get("is_causal", False)}
    k, v = (torch.where(x.isfinite(), x, 0.0) for x in (k, v))
    ref, lse = attention(q, k, v, seen, scale=0.125, **oracle_options)
    dead = lse == -math.inf
    assert not s.out[dead].any() and torch.equal(s.lse == -math.inf, dead) and bool(s.out.isfinite().all())
    assert measure(s.out[~dead], ref[~dead]).rel_l1 < ROWS_REL_L1[recipe.replace("int4", "int8")]
    assert (s.lse - lse)[~dead].abs().max() < 0.15
    return s


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dim", [24, 64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
def test_is_attention(recipe: str, dim: int, is_causal: bool) -> None:
    q, k, v = qkv(2, 4, 70, 200, dim, kv_heads=2, dtype=torch.bfloat16)
    s = sm90.emulate(q, k, v, recipe=recipe, scale=dim**-0.5, is_causal=is_causal)
    want, lse = attention(q, k, v, is_causal=is_causal)
    assert_attention_close(s.out, want, RECIPE_TOLERANCE[recipe])
    assert (s.lse - lse).abs().max() < 0.5
    assert int(s.queries.q.abs().max()) == int(s.images.k.abs().max()) == 7
    assert s.logits is not None and bool(s.logits.used.all()) and not s.logits.error.any()


def test_blocks_and_means_are_the_references() -> None:
    assert sm90_prepare.SMOOTH_ROWS == BLOCK_Q[parse_recipe("qk_int4_pv_fp8").tiling]
    q = qkv(1, 2, Q_LEN, 1, 64, dtype=torch.float32)[0] + 3
    mean = subtract_block_mean(q, BLOCK_Q["wgmma"])[1]
    torch.testing.assert_close(sm90_prepare.of_rows(sm90_prepare.query_means(q, 64), Q_LEN), mean, rtol=1e-6, atol=1e-6)


def test_correction_is_the_exact_product() -> None:
    """Of K as it came, minus its smoothing vector; zero where there is no key."""
    q, k, _ = qkv(2, 4, 70, 200, 40, kv_heads=2, dtype=torch.float16)
    mean, keys = sm90_prepare.query_means(q, 64), torch.tensor([200, 37])
    k_mean = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(0))
    k_mean[..., 40:] = 0.0
    got = sm90_prepare.corrections(mean, k, keys, k_mean, 0.125)
    centred = (k.double() - k_mean[:, :, None, :40].double()).repeat_interleave(2, 1)
    want = mean[..., :40].double() @ centred.transpose(-1, -2) * 0.125 / math.log(2)
    want[1, :, :, 37:] = 0.0
    torch.testing.assert_close(got[..., :200].double(), want, rtol=1e-5, atol=1e-6)
    assert got.shape == (2, 4, 2, 256) and not got[..., 200:].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_equal_rows_have_exact_logits(recipe: str) -> None:
    """All of Q is its mean then. What is left is the error of P and V alone; without Q smoothing it is not."""
    q, k, v = alike()
    q = q[:, :, :1].expand(-1, -1, 64, -1)
    want, lse = attention(q, k, v, scale=0.125)
    s = sm90.emulate(q, k, v, recipe=recipe, scale=0.125)
    assert not s.queries.q.any() and (s.lse - lse).abs().max() < (0.05 if "fp8" in recipe else 1e-4)
    raw = sm90.emulate(q, k, v, recipe=recipe, scale=0.125, smooth_q=False)
    assert measure(raw.out_float, want).rel_l1 > 3 * measure(s.out_float, want).rel_l1


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "options",
    (
        {"is_causal": True},
        {"left": 40, "is_causal": True},
        {"left": 100, "right": 20},
        {"softcap": 5.0},
        {"softcap": 20.0, "is_causal": True, "sinks": torch.tensor([-100.0, 3.0])},
        {"sinks": torch.tensor([300.0, 3.0])},
    ),
    ids=lambda x: "-".join(x),
)
def test_features(recipe: str, options: dict[str, Any]) -> None:
    close(recipe, alike(), **options)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks(recipe: str, softcap: float, dtype: torch.dtype) -> None:
    """Keys that no row sees hold NaN, which their correction holds too; it reaches nobody."""
    q, k, v = alike()
    mask = random_mask(1, 2, Q_LEN, KV_LEN)
    mask[..., [3, 50]] = False
    k[:, :, [3, 50]], v[:, :, [3, 50]] = math.nan, math.inf
    if dtype != torch.bool:
        bias = torch.randn(mask.shape, generator=torch.Generator().manual_seed(2)) * 2
        bias[..., 128:256] = 0.0
        mask = bias.masked_fill(~mask, -math.inf)
    s = close(recipe, (q, k, v), attn_mask=mask, softcap=softcap)
    assert s.logits is not None and not s.logits.x.isnan().any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_keys_that_do_not_exist(recipe: str) -> None:
    """Lengths, padding anywhere (the correction is of the keys that are left: the same bits as without the others),
    padding on the left."""
    q, k, v = alike(batch=2)
    token = torch.arange(KV_LEN)
    lens = [KV_LEN, 77]
    behind = token < torch.tensor(lens)[:, None]
    keep = torch.rand(2, KV_LEN, generator=torch.Generator().manual_seed(3)) > 0.5
    keep[1] = False
    before = token >= torch.tensor([0, 131])[:, None]
    for there, options in (
        (behind, {"kv_lens": lens}),
        (keep, {"key_padding": keep}),
        (before, {"kv_starts": [0, 131], "kv_lens": [KV_LEN, KV_LEN - 131]}),
    ):
        gone = ~there[:, None, :, None]
        hidden = k.masked_fill(gone, math.nan), v.masked_fill(gone, math.nan)
        s = close(recipe, (q, *hidden), there[:, None, None].expand(2, 1, Q_LEN, -1), **options)
        left = there[0].nonzero()[:, 0]
        alone = sm90.emulate(q[:1], k[:1, :, left], v[:1, :, left], recipe=recipe, scale=0.125)
        assert torch.equal(s.out[:1], alone.out) and torch.equal(s.lse[:1], alone.lse)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_query_row_stays_alone(recipe: str, bad: float) -> None:
    """Its channel counts for no mean; the other rows of its block lose a little smoothing, nothing else."""
    q, k, v = alike(heads=1)
    q[0, 0, 20, 5] = bad
    s = sm90.emulate(q, k, v, recipe=recipe, scale=0.125)
    assert s.out[0, 0].isnan().any(-1).nonzero().flatten().tolist() == [20]


@pytest.mark.parametrize("recipe", RECIPES)
def test_huge_logits_keep_their_order(recipe: str) -> None:
    """An integer step may be worth hundreds of log2 units; the largest score still takes the row."""
    q, k, v = alike()
    q, k = q.float() * 100, k.float() * 100
    want = attention(q, k, v, scale=0.125)[0]
    s = sm90.emulate(q.bfloat16(), k.bfloat16(), v, recipe=recipe, scale=0.125)
    assert bool(s.out.isfinite().all()) and float(s.steps.max()) > sm90.MAX_STEP
    assert measure(s.out, want).rel_l1 < 0.35


def test_what_the_kernel_takes() -> None:
    call = Call("sm90", "cuda", "bfloat16", 128, 128, 8, 8, 4096, 4096)
    for name in RECIPES:
        assert why_not(parse_recipe(name), call) is None
        assert why_not(parse_recipe(f"{name}:smooth=k"), call) is None
        assert why_not(parse_recipe(f"{name}:granularity=block"), call) == "variant"
        assert why_not(parse_recipe(f"{name}:tiling=mma"), call) == "variant"
        assert why_not(parse_recipe(name), call._replace(head_dim=129)) == "head_dim"
        assert (
            why_not(parse_recipe(name), call._replace(dtype="float32"), Limits(quantize_fp32=True)) == "dtype_float32"
        )
    assert why_not(parse_recipe("qk_int8_pv_fp8"), call._replace(head_dim=192)) is None
    assert why_not(parse_recipe("qk_int8_pv_fp8:smooth=qk"), call._replace(head_dim=192)) == "head_dim"
    assert why_not(parse_recipe("sage2:smooth=none"), call) is None
