"""The exponents duo and chord on the CPU: how far from 2^x, in which tiles, and that no score leaves their range."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle import attention, measure
from sage_patch import backends, sage_attention
from sage_patch.recipes import NO_LIMITS, RECIPES, Call, parse_recipe
from sage_patch.reference.emulator import exponent
from sage_patch.reference.emulator import forward as sm90
from sage_patch.reference.emulator import tile_image as ti
from sage_patch.reference.emulator.float32 import e4m3_code, e4m3_value

FP8 = "qk_int8_pv_fp8"
EXPONENTS = ("duo", "chord")
# of 2^x before E4M3's rounding, relative: root mean square and largest; mean within 1e-3 of 1
SPREAD = {"duo": (0.006, 0.012), "chord": (0.021, 0.042)}


def tensors(q_len: int, kv_len: int, dim: int, seed: int = 0, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, dim, generator=g) for n in (q_len, kv_len, kv_len))
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def before_rounding(t: Tensor, exp: str) -> Tensor:
    """What exponent.codes_of_bits rounds to E4M3."""
    half = t.view(torch.float32).half()
    if exp == "chord":
        return t.view(torch.float32)
    later = (half.view(torch.int16) + exponent.HALF_OCTAVE).view(torch.float16)
    return later.float() * exponent.ROOT + half.float()


@pytest.mark.parametrize("exp", EXPONENTS)
def test_distance_from_the_exponential(exp: str) -> None:
    x = torch.linspace(-5, 8.8, 100_000, dtype=torch.float64)
    t = ((x + exponent.BIAS[exp]) * exponent.OCTAVE).int()
    ratio = before_rounding(t, exp).double() / torch.exp2(x)
    rms, largest = SPREAD[exp]
    assert abs(float(ratio.mean()) - 1) < 1e-3
    assert float(ratio.std()) < rms and float((ratio - 1).abs().max()) < largest
    codes = exponent.codes_of_bits(t, exp).int()
    assert bool((codes.diff() >= 0).all()) and int((codes - e4m3_code(torch.exp2(x).float()).int()).abs().max()) <= 1


@pytest.mark.parametrize("exp", EXPONENTS)
def test_ends_of_the_range(exp: str) -> None:
    """The largest P is E4M3's largest number, what is far below is zero, down to the last octave that is allowed."""
    x = torch.tensor([sm90.FP8_OFFSET, 9.0, -11.0, -60.0, -exponent.REACH_LIMIT, -125.5])
    t = ((x + exponent.BIAS[exp]) * exponent.OCTAVE).int()
    assert exponent.codes_of_bits(t, exp).tolist() == [0x7E, 0x7E, 0, 0, 0, 0]
    assert exponent.codes_of_bits(torch.tensor([-1, -(2**23), -(2**31)], dtype=torch.int32), exp).tolist() == [0] * 3


SIZES = (0.0, 1e-30, 1e-6, 1e-3, 0.1, 1.0, 3.0, 5.0, 10.0, 20.0, 40.0, 100.0, 1e3, 1e6, 1e30)


def held(s: sm90.Stages, exp: str) -> Tensor:
    """Asserts of all tiles formed by bits that no product leaves int32 and every code is near 2^(x - m); which they
    are."""
    mine = s.by_bits.repeat_interleave(ti.TILE_TOKENS, -1)
    magic = torch.tensor(exponent.MAGIC)
    factor = (s.steps.double() * exponent.OCTAVE).round()
    reference = s.m.double().repeat_interleave(ti.TILE_TOKENS, -1)
    t = s.scores.double() * factor + (exponent.BIAS[exp] - reference) * exponent.OCTAVE
    assert bool(((t > 0) & (t < 2.0**31 - 2.0**23))[mine].all())  # positive floats, and not NaN
    assert float(magic) == 1.5 * 2**23
    x = s.scores.double() * s.steps.double() - reference
    drift = s.scores.double().abs() / 2 / exponent.OCTAVE + 2.0**-12  # rounding of a step and of the reference
    p, top = e4m3_value(s.p).double(), 448.0
    low, high = torch.exp2(x - drift), torch.exp2(x + drift)
    most = 1 + SPREAD[exp][1] + 2.0**-4
    fits = (p <= (high * most).clamp_max(top) + 2.0**-10) & (p >= (low / most).clamp_max(top) - 2.0**-10)
    assert bool(fits[mine].all())
    return mine


@pytest.mark.parametrize("exp", EXPONENTS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_scores_of_any_size(exp: str, dim: int) -> None:
    q, k, v = tensors(18, 300, dim, heads=1)
    shares = {}
    for size in SIZES:
        s = sm90.emulate((q.float() * size).bfloat16(), k, v, scale=dim**-0.5, exp=exp)
        shares[size] = float(held(s, exp)[..., :256].float().mean())
        assert bool(s.out.isfinite().all())
    assert shares[1.0] == shares[0.0] == 1 and shares[1e6] == shares[1e30] == 0
    for change in (torch.logspace(-9, 9, 18)[:, None], torch.logspace(9, -9, 18)[:, None]):
        held(sm90.emulate((q * change).bfloat16(), k, v, scale=dim**-0.5, exp=exp), exp)
    for change in (torch.logspace(-9, 9, 300)[:, None], torch.logspace(9, -9, 300)[:, None]):
        held(sm90.emulate(q, (k * change).bfloat16(), v, scale=dim**-0.5, exp=exp), exp)
    for sign in (1, -1):  # constants: all scores far above zero, or far below, of which the tile's own minimum knows
        for size in (1.0, 40.0, 90.0, 200.0, 1e4):
            s = sm90.emulate(
                torch.full_like(q, size), torch.full_like(k, sign), v, scale=dim**-0.5, exp=exp, smooth_k=False
            )
            held(s, exp)
            assert bool((s.p[..., :256] == s.p[..., :1]).all()) and int(s.p[..., 0].min()) >= 0x7C


def test_other_tiles_are_the_exact_ones() -> None:
    q, k, v = tensors(70, 300, 64)
    for size in (1.0, 30.0, 100.0):
        s, exact = (sm90.emulate(q * size, k, v, scale=0.125, is_causal=True, exp=e) for e in ("chord", "exact"))
        others = ~s.by_bits.repeat_interleave(ti.TILE_TOKENS, -1)
        assert torch.equal(s.m, exact.m) and torch.equal(s.p[others], exact.p[others]) and bool(others.any())


@pytest.mark.parametrize("exp", EXPONENTS)
def test_largest_integers(exp: str) -> None:
    """Every quantized number 127: the largest scores there are, at steps from tiny to coarse."""
    q, k, v = (torch.ones_like(x) for x in tensors(16, 256, 256, heads=1))
    k[..., ::2, :] = -1
    for scale in (1e-8, 1e-4, 0.01, 0.1, 0.2, 0.3, 0.5, 1.0, 100.0):
        held(sm90.emulate(q, k, v, scale=scale, exp=exp, smooth_k=False), exp)


@pytest.mark.parametrize("exp", EXPONENTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_not_finite_stays(exp: str, bad: float, which: int) -> None:
    given = list(tensors(100, 300, 64))
    given[which][:, 0, 40, 3] = bad
    options: dict[str, Any] = {"scale": 0.125, "is_causal": True}
    got, exact = (sm90.emulate(*given, exp=e, **options) for e in (exp, "exact"))
    assert torch.equal(got.out.isnan(), exact.out.isnan()) and torch.equal(got.lse.isnan(), exact.lse.isnan())
    if which == 0:  # a warp's 16 rows are exact with it
        assert not bool(got.by_bits[:, 0, 32:48].any()) and bool(got.by_bits[:, 0, 32:48].logical_not().all())
        assert bool(got.by_bits[:, 0, 48:64, 0].all()) and bool(got.by_bits[:, 1, :, 0].all())
    out = sage_attention(*given, is_causal=True, recipe=f"{FP8}:exp={exp}")
    want = sage_attention(*given, is_causal=True, recipe=FP8)
    assert torch.equal(out.isnan(), want.isnan())


def test_which_tiles() -> None:
    """Tiles that 64 rows see whole, of integer scores."""
    q, k, v = tensors(130, 400, 64)

    def tiles(**options: Any) -> list[list[int]]:
        s = sm90.emulate(q, k, v, scale=0.125, exp="chord", **options)
        assert bool((s.by_bits[:, :, :64] == s.by_bits[:, :, :1]).all())
        return s.by_bits[0, 0, [0, 64, 128]].int().tolist()

    assert tiles() == [[1, 1, 1, 0]] * 3
    assert tiles(is_causal=True) == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert tiles(left=150, right=200)[1] == [0, 0, 1, 0]
    assert tiles(kv_lens=[256]) == [[1, 1, 0, 0]] * 3
    assert tiles(softcap=20.0) == [[0, 0, 0, 0]] * 3
    mask = torch.ones(1, 1, 130, 400, dtype=torch.bool)
    mask[..., 70, 130] = False
    assert tiles(attn_mask=mask) == [[1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 0]]
    assert tiles(attn_mask=torch.zeros(mask.shape).masked_fill(~mask, -3.0))[1] == [1, 0, 1, 0]


@pytest.mark.parametrize("exp", EXPONENTS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_reference_is_the_kernels(exp: str, dim: int) -> None:
    """The CPU backend and the emulator form P alike: as near as with the exact exponent."""
    q, k, v = tensors(100, 700, dim, heads=1)
    mask = torch.rand(1, 1, 100, 700, generator=torch.Generator().manual_seed(1)) > 0.1
    mask[..., 128:512] = True
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}):
        for size in (1.0, 6.0):
            apart = {}
            for e in (exp, "exact"):
                s = sm90.emulate(q * size, k, v, scale=dim**-0.5, exp=e, **options)
                out = sage_attention(q * size, k, v, recipe=f"{FP8}:exp={e}", **options)
                apart[e] = measure(out, s.out.double()).rel_l1
            assert apart[exp] < 1.3 * apart["exact"] + 1e-3, (options, size, apart)


@pytest.mark.parametrize("dim", [64, 128])
def test_accuracy(dim: int) -> None:
    q, k, v = tensors(256, 1024, dim)
    ref = attention(q, k, v)[0]
    exact, duo, chord = (
        measure(sage_attention(q, k, v, recipe=f"{FP8}:exp={e}"), ref).rel_l1 for e in ("exact", *EXPONENTS)
    )
    assert duo < 1.02 * exact and chord < 1.12 * exact


def test_the_word_in_a_recipe() -> None:
    assert parse_recipe(FP8).exp == "duo" and parse_recipe(f"{FP8}:exp=exact").exp == "exact"
    for name in ("qk_int8_pv_fp16", "qk_int4_pv_fp8", f"{FP8}:smooth=qk"):  # what has no other
        assert parse_recipe(name).exp == "exact"
    with pytest.raises(ValueError, match="exp must be one of exact, duo, chord; got 'cord'"):
        parse_recipe(f"{FP8}:exp=cord")


def test_where_it_is_refused() -> None:
    """With P in half precision, and where no score stays an integer; on cards whose kernels have no such exponent."""
    for backend, device in (("reference", "cpu"), ("sm90", "cuda"), ("mma", "cuda")):
        call = Call(backend, device, "bfloat16", 64, 64, 2, 2, 4096, 4096)
        for name in RECIPES:
            if name == "exact":
                continue
            for exp in EXPONENTS:
                recipe = parse_recipe(f"{name}:exp={exp}")
                fits = name == FP8 and backend != "mma"
                assert backends.why_not(recipe, call, NO_LIMITS) == (None if fits else "variant")
                assert backends.why_not(replace(recipe, smooth="qk"), call, NO_LIMITS) == "variant"
