"""Rotating Q and K before they are quantized: scores stay, outlier channels no longer set the scale, and the backend,
the emulator of the kernels and the pages do the same."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import yaml
from torch import Tensor

from oracle import QUANTIZED, RECIPE_TOLERANCE, assert_attention_close, attention, measure, normal, qkv
from sage_patch.args import PageArgs
from sage_patch.attention import sage_attention
from sage_patch.backends import BACKENDS, why_not
from sage_patch.config import ConfigError, load_policy, policy_to_yaml
from sage_patch.dispatch import choose
from sage_patch.pages import Pages
from sage_patch.policy import AttentionSite, resolve
from sage_patch.recipes import NO_LIMITS, RECIPES, Call, parse_recipe, rotated, with_rotation
from sage_patch.reference.emulator import forward as sm90
from sage_patch.reference.emulator import pages as emulated_pages
from sage_patch.reference.emulator.prepare import padded_dim
from sage_patch.reference.emulator.rotation import rotate_rows
from sage_patch.reference.rotation import rotate, rotate_back, rotated_width

DIMS = [16, 40, 64, 80, 96, 112, 128, 160, 256]


def hadamard(width: int) -> Tensor:
    """float64, entries +-1: Sylvester's."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < width:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def run(recipe: str, *tensors: Tensor, **options) -> tuple[Tensor, Tensor]:
    return sage_attention(*tensors, recipe=f"{recipe}:rotate=hadamard", return_lse=True, enable_gqa=True, **options)


@pytest.mark.parametrize("dim", DIMS)
def test_it_is_the_hadamard_matrix_and_keeps_scores(dim: int) -> None:
    x, y = normal(7, dim, dtype=torch.float32), normal(9, dim, dtype=torch.float32, seed=1)
    width = rotated_width(dim)
    turned = torch.nn.functional.pad(x, (0, width - dim)).double() @ hadamard(width) / width
    assert rotate(x).shape == (7, width) and (rotate(x) - turned).abs().max() < 1e-6
    products = rotate(x).double() @ rotate(y).double().T * width
    assert (products - x.double() @ y.double().T).abs().max() < 1e-5
    assert (rotate_back(rotate(x), dim) - x).abs().max() < 2e-6
    assert width == padded_dim(dim)  # what the kernels hold, so that nothing is rotated that they would not have


def test_integers_that_fit_are_rotated_exactly() -> None:
    """Every sum of small integers is exact in float32, so any other order of work would show."""
    x = torch.randint(-100, 100, (50, 128), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(rotate(x).double(), x.double() @ hadamard(128) / 128)
    assert torch.equal(rotate_back(rotate(x), 128), x)


def test_the_order_of_sums() -> None:
    """Neighbours first: what the registers of a thread hold, then lanes 1, 2, 4.. apart."""
    x = normal(5, 64, dtype=torch.float32)
    want = x / 64
    for distance in (1, 2, 4, 8, 16, 32):
        other = want[:, torch.arange(64) ^ distance]
        low = torch.arange(64) & distance == 0
        want = torch.where(low, want + other, other - want)
    assert torch.equal(rotate(x), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [40, 64, 128, 256])
def test_rows_rotated_on_tensor_cores(dim: int, dtype: torch.dtype) -> None:
    """The same vectors but for last bits, exactly those where every sum is exact; lost rows stay in their row."""
    x, mean = normal(9, dim, dtype=dtype) + 1, normal(1, dim, dtype=torch.float32, seed=1)[0]
    assert (rotate_rows(x, mean) - rotate(x.float() - mean)).abs().max() < 1e-6
    x, mean = (x * 30).round(), (mean * 30).round()
    assert torch.equal(rotate_rows(x, mean), rotate(x.float() - mean))
    for lost in (math.nan, math.inf, -math.inf):
        x[3, 17] = lost
        assert (~rotate_rows(x, mean).isfinite()).all(-1).tolist() == [i == 3 for i in range(9)]
        assert rotate_rows(x, mean)[torch.arange(9) != 3].isfinite().all()


def test_zero_huge_and_lost_numbers() -> None:
    largest = torch.finfo(torch.bfloat16).max
    assert not rotate(torch.zeros(3, 80)).any()
    huge = rotate(torch.full((1, 128), largest))
    assert huge.isfinite().all() and huge[0, 0] == largest and not huge[0, 1:].any()
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(2, 128)
        x[0, 17] = bad
        assert not rotate(x)[0].isfinite().any() and rotate(x)[1].isfinite().all()


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("dim", DIMS)
def test_it_is_attention(recipe: str, dim: int) -> None:
    """At every head_dim, causal and grouped; the LSE is that of the true scores, K's mean included."""
    q, k, v = qkv(1, 4, 200, 300, dim, kv_heads=2, dtype=torch.bfloat16)
    k = k + 5
    out, lse = run(recipe, q, k, v, is_causal=True)
    want, want_lse = attention(q, k, v, is_causal=True)
    assert_attention_close(out, want, RECIPE_TOLERANCE[recipe])
    assert (lse - want_lse).abs().mean() < (0.1 if "int4" in recipe else 0.01)


def outliers(dim: int = 128, factor: float = 20.0) -> tuple[Tensor, Tensor, Tensor]:
    """Two channels of K that are larger than the others, by token."""
    q, k, v = qkv(1, 2, 256, 1024, dim, dtype=torch.float32)
    k[..., [3, dim // 2 + 1]] *= factor
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


@pytest.mark.parametrize(("recipe", "most"), [("qk_int8_pv_fp8", 0.045), ("qk_int8_pv_fp16", 0.02)])
def test_channels_that_vary_by_token_no_longer_hurt(recipe: str, most: float) -> None:
    q, k, v = outliers()
    want = attention(q, k, v)[0]
    before = measure(sage_attention(q, k, v, recipe=f"{recipe}:rotate=none"), want).rel_l1
    after = measure(run(recipe, q, k, v)[0], want).rel_l1
    assert before > 0.08 and after < most, f"{before:.4f} {after:.4f}"


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("bias", [0.0, 40.0])
def test_what_smoothing_does_already_stays(recipe: str, bias: float) -> None:
    """N(0,1), and a constant bias: at most 3 % worse."""
    q, k, v = qkv(1, 2, 256, 1024, 128, dtype=torch.float32)
    k[..., [3, 40, 77, 110]] += bias
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    want = attention(q, k, v)[0]
    before = measure(sage_attention(q, k, v, recipe=f"{recipe}:rotate=none"), want).rel_l1
    assert measure(run(recipe, q, k, v)[0], want).rel_l1 < 1.03 * before


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_bad_row_stays_in_its_row(recipe: str) -> None:
    q, k, v = qkv(1, 2, 100, 140, 32)
    q[0, 1, 40, 3] = math.inf
    out, lse = run(recipe, q, k, v)
    others = torch.ones(2, 100, dtype=torch.bool)
    others[1, 40] = False
    want = attention(q.nan_to_num(0, 0, 0), k, v)[0]
    assert_attention_close(out[:, others][None], want[:, others][None], RECIPE_TOLERANCE[recipe])
    assert out[0, 1, 40].isnan().all() and lse[0, 1, 40].isnan() and lse[:, others].isfinite().all()


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_zeros_and_equal_keys_give_the_mean_of_values(recipe: str) -> None:
    q, _, v = qkv(1, 2, 20, 140, 64)
    for k in (torch.zeros(1, 2, 140, 64), torch.full((1, 2, 140, 64), 7.0)):
        out, _ = run(recipe, q, k.to(q.dtype), v)
        assert_attention_close(out, v.double().mean(-2, keepdim=True).expand(out.shape), RECIPE_TOLERANCE[recipe])


# --- the kernels ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("dim", [40, 64, 96, 128])
def test_the_emulator_of_the_kernels_errs_like_the_backend(recipe: str, dim: int) -> None:
    """They differ as without rotation: sampled means, a scale for every row of Q."""
    q, k, v = qkv(1, 2, 130, 400, dim, kv_heads=1, dtype=torch.bfloat16)
    k = k * torch.where(torch.arange(dim) % 17 == 0, 10.0, 1.0).to(k.dtype) + 3
    want, want_lse = attention(q, k, v, is_causal=True)
    s = sm90.emulate(q, k, v, recipe=recipe, scale=dim**-0.5, is_causal=True, rotated=True)
    out, lse = run(recipe, q, k, v, is_causal=True)
    assert measure(s.out, want).rel_l1 < 1.05 * measure(out, want).rel_l1
    assert (s.lse - want_lse).abs().mean() < 1.2 * (lse - want_lse).abs().mean()


def test_the_emulators_images_are_the_rotated_keys() -> None:
    """A K image times its scales is the rotated key less its mean, within half a step; Q's rows carry the width."""
    q, k, v = qkv(1, 1, 3, 128, 96, dtype=torch.float16)
    s = sm90.emulate(q, k, v, scale=1.0, rotated=True)
    scales = s.images.k_scale[0, 0, torch.arange(128) % 8 // 2, None]
    want = rotate(k[0, 0].float() - s.images.k_mean[0, :96])
    assert (s.images.k[0, 0].float() * scales - want).abs().sub(scales / 2).max() < 1e-6
    steps = s.queries.scale[0, 0, :, None] / 128 / 1.4426950408889634
    assert (s.queries.q[0, 0].float() * steps - rotate(q[0, 0])).abs().sub(steps / 2).max() < 1e-6
    plain = sm90.emulate(q, k, v, scale=1.0)
    assert torch.equal(plain.queries.dot, s.queries.dot) and torch.equal(plain.images.k_mean, s.images.k_mean)
    assert torch.equal(plain.images.v, s.images.v)


def test_the_emulator_without_keys_and_with_lost_ones() -> None:
    q, k, v = qkv(2, 2, 9, 140, 64)
    k[0, 0, 5, 1] = math.nan
    s = sm90.emulate(q, k, v, scale=0.125, kv_lens=[140, 0], rotated=True)
    assert s.images.k_scale[0, 0, 2].isnan() and s.images.k_scale[1].isfinite().all()
    assert not s.out[1].any() and s.lse[1].isneginf().all()


@pytest.mark.parametrize("backend", ["sm90", "mma", "reference"])
def test_every_backend_rotates(backend: str) -> None:
    call = Call(backend, "cuda", "bfloat16", 128, 128, 8, 8, 4096, 4096)
    for name in QUANTIZED:
        assert RECIPES[name].rotate == "hadamard"
        assert why_not(parse_recipe(f"{name}:rotate=hadamard"), call, NO_LIMITS) is None


def test_auto_is_what_the_backend_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the name that is counted says what ran."""
    recipe = parse_recipe("qk_int8_pv_fp8:smooth_v=off,rotate=auto")
    call = Call("sm90", "cuda", "bfloat16", 96, 96, 8, 8, 4096, 4096)
    chosen, reason = choose(recipe, call, NO_LIMITS)
    assert (chosen.name, chosen.rotate, reason) == ("qk_int8_pv_fp8:smooth_v=off", "hadamard", "")
    assert parse_recipe(chosen.name) == chosen
    plain = replace(BACKENDS["sm90"], rotates=lambda head_dim: head_dim == 64)
    monkeypatch.setitem(BACKENDS, "sm90", plain)
    chosen, _ = choose(recipe, call, NO_LIMITS)
    assert (chosen.name, chosen.rotate, chosen.smooth_v) == ("qk_int8_pv_fp8:smooth_v=off,rotate=none", "none", False)
    assert parse_recipe(chosen.name) == chosen
    assert choose(recipe, call._replace(head_dim=64, v_head_dim=64), NO_LIMITS)[0].rotate == "hadamard"
    assert choose(parse_recipe("sage2:rotate=auto"), call, NO_LIMITS)[0].name == "qk_int8_pv_fp8:rotate=none"
    wide = call._replace(backend="mma", head_dim=160, v_head_dim=160)
    assert choose(parse_recipe("sage2"), wide, NO_LIMITS)[0] == parse_recipe("qk_int8_pv_fp8:exp=exact")
    assert why_not(parse_recipe("qk_int8_pv_fp8:rotate=hadamard,exp=exact"), wide, NO_LIMITS) is None


def test_auto_on_a_cpu_is_hadamard() -> None:
    q, k, v = qkv(1, 2, 64, 300, 64, dtype=torch.bfloat16)
    out = sage_attention(q, k, v, recipe="qk_int8_pv_fp8:rotate=auto")
    assert torch.equal(out, run("qk_int8_pv_fp8", q, k, v)[0])


# --- pages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [40, 64, 96, 128])
def test_pages_hold_rotated_keys(dim: int) -> None:
    """Attended to and read back, with a smaller error than keys that are not rotated; pieces do not matter."""
    q, k, v = qkv(2, 4, 70, 300, dim, kv_heads=2, dtype=torch.float32)
    k[..., [3, 20]] *= 20
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    want, want_lse = attention(q, k, v, is_causal=True)
    args = PageArgs(scale=dim**-0.5, return_lse=True)
    plain, turned, pieces = (Pages(2, 2, dim, torch.bfloat16, "cpu", rotated=r) for r in (False, True, True))
    plain.append(k, v)
    turned.append(k, v)
    for part in (slice(0, 130), slice(130, 300)):
        pieces.append(k[:, :, part], v[:, :, part])
    out, lse = turned.attend(q, args)
    before, lse_before = plain.attend(q, args)
    assert lse is not None and lse_before is not None
    error = measure(out, want).rel_l1
    assert error < 0.06 and error < 0.6 * measure(before, want).rel_l1
    assert (lse - want_lse).abs().mean() < 0.6 * (lse_before - want_lse).abs().mean()
    held, rough = turned.dequantize()[0], plain.dequantize()[0]
    assert held.shape == k.shape and (held - k).float().norm() < (rough - k).float().norm()
    emulated, _ = emulated_pages.emulate(turned, q, args)
    assert measure(emulated, out).rel_l1 < 0.02
    assert measure(pieces.attend(q, args)[0], want).rel_l1 < 0.06


# --- as a property of recipes ---------------------------------------------------------------------------------


def test_a_policy_names_it() -> None:
    policy = load_policy({"version": 1, "recipe": "sage2", "rules": [{"layers": 0, "recipe": "sage2:rotate=hadamard"}]})
    assert parse_recipe(policy.rules[0].recipe).rotate == "hadamard"
    with pytest.raises(ValueError, match="rotate must be one of none, hadamard, auto; got 'yes'"):
        parse_recipe("sage2:rotate=yes")
    with pytest.raises(ConfigError, match="unknown variant 'rotat'; nearest: \"rotate\""):
        load_policy({"version": 1, "recipe": "sage2:rotat=hadamard"})


def test_a_policy_rotates_all_its_recipes() -> None:
    policy = load_policy(
        {
            "version": 1,
            "rotate": "none",
            "rules": [
                {"layers": 0, "recipe": "qk_int4_pv_fp8:rotate=hadamard"},
                {"layers": 1, "recipe": "exact"},
                {"layers": 2, "recipe": "qk_int8_pv_fp16:smooth=none"},
            ],
        }
    )
    sites = [
        AttentionSite(name=f"b.{i}.attn", stack="b", index=i, depth=4, num_heads=8, num_kv_heads=8, head_dim=64)
        for i in range(4)
    ]
    wanted = ["qk_int4_pv_fp8:rotate=hadamard", "exact", "qk_int8_pv_fp16:smooth=none,rotate=none", "sage2:rotate=none"]
    assert [row["recipe"] for row in resolve(policy, sites).rows()] == wanted
    assert load_policy(yaml.safe_load(policy_to_yaml(policy))) == policy
    with pytest.raises(ConfigError, match="rotate"):
        load_policy({"version": 1, "rotate": "yes"})
    assert with_rotation("sage2", None) == "sage2"
    assert rotated("qk_int8_pv_fp8:rotate=none,smooth=k", "auto") == "qk_int8_pv_fp8:smooth=k"
