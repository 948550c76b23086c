"""The emulator of the Hopper kernel by itself: its arithmetic against exact fractions, and what a caller is promised
about empty, hidden and non-finite inputs. Golden arrays from the GPU: tests/kernels/test_golden.py."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from oracle import RECIPE_TOLERANCE, assert_attention_close, attention, qkv
from sage_patch.reference import float32, sm90
from sage_patch.reference.quantize import round_e4m3

RECIPES = ("qk_int8_pv_fp8", "qk_int8_pv_fp16")


def is_nearest(x: Tensor, exact: Fraction) -> bool:
    """Whether a float32 is the nearest to an exact number, ties to even."""
    down, up = (torch.nextafter(x, torch.tensor(s * math.inf)) for s in (-1, 1))
    middles = [(Fraction(x.item()) + Fraction(y.item())) / 2 for y in (down, up)]
    even = int(x.view(torch.int32)) % 2 == 0
    return middles[0] <= exact <= middles[1] if even else middles[0] < exact < middles[1]


def test_fma_rounds_once() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(500, generator=generator) for _ in range(3))
    c = c * torch.exp2(torch.randint(-40, 40, (500,), generator=generator).float())
    for x, y, z, r in zip(a, b, c, float32.fma(a, b, c), strict=True):
        assert is_nearest(r, Fraction(x.item()) * Fraction(y.item()) + Fraction(z.item()))


def test_fma_where_float64_would_round_twice() -> None:
    """(1 + 2^-12)^2 ends in half a unit of float32: what float64 drops of the addend decides the direction."""
    x = torch.tensor(1 + 2.0**-12)
    for c, want in ((0.0, 1 + 2.0**-11), (2.0**-80, 1 + 2.0**-11 + 2.0**-23), (-(2.0**-80), 1 + 2.0**-11)):
        assert float32.fma(x, x, torch.tensor(c)) == want
        assert float32.fma(-x, x, torch.tensor(-c)) == -want


def test_exponential_and_its_band() -> None:
    x = torch.linspace(-140, 16, 4001)
    y, (low, high) = float32.exp2(x), float32.exp2_band(x)
    assert torch.equal(float32.exp2(torch.arange(-126.0, 16)), torch.tensor([2.0**i for i in range(-126, 16)]))
    assert bool((low <= y).all() and (y <= high).all() and (y[x < -126] == 0).all())
    assert bool((high <= y * (1 + 3 * 2.0**-23)).all() and (low >= y * (1 - 3 * 2.0**-23)).all())
    assert float32.exp2(torch.tensor(math.nan)).isnan()


def test_e4m3_codes() -> None:
    x = torch.cat([torch.linspace(-500, 500, 4001), torch.linspace(-0.05, 0.05, 4001), torch.tensor([math.inf])])
    assert torch.equal(float32.e4m3_value(float32.e4m3_code(x)), round_e4m3(x))
    assert float32.e4m3_code(torch.tensor([math.nan, -math.nan])).tolist() == [0x7F, 0x7F]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dim", [24, 64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
def test_is_attention(recipe: str, dim: int, is_causal: bool) -> None:
    q, k, v = qkv(2, 4, 70, 200, dim, kv_heads=2, dtype=torch.bfloat16)
    s = sm90.emulate(q, k, v, recipe=recipe, scale=dim**-0.5, is_causal=is_causal)
    want, lse = attention(q, k, v, is_causal=is_causal)
    assert_attention_close(s.out, want, RECIPE_TOLERANCE[recipe])
    assert (s.lse - lse).abs().max() < 0.06
    assert s.out.dtype == torch.bfloat16 and s.scores.shape == (2, 4, 70, 256)


@pytest.mark.parametrize("recipe", RECIPES)
def test_hidden_keys_do_not_matter(recipe: str) -> None:
    """Whatever lies behind an item's length: the same bits. No keys at all: zero and minus infinity."""
    q, k, v = qkv(3, 2, 9, 140, 64)
    lengths = [140, 0, 3]
    clean = sm90.emulate(q, k, v, recipe=recipe, scale=0.125, kv_lens=lengths)
    for item, n in enumerate(lengths):
        k[item, :, n:] = v[item, :, n:] = math.nan
    poisoned = sm90.emulate(q, k, v, recipe=recipe, scale=0.125, kv_lens=lengths)
    assert torch.equal(clean.out, poisoned.out) and torch.equal(clean.lse, poisoned.lse)
    assert not clean.out[1].any() and bool((clean.lse[1] == -math.inf).all())
    empty = sm90.emulate(q, k[:, :, :0], v[:, :, :0], recipe=recipe, scale=0.125)
    assert not empty.out.any() and bool((empty.lse == -math.inf).all())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_inputs_stay_visible(recipe: str, bad: float) -> None:
    """As sage2.h says: in q its row; in k every row of the tiles that see it; in v its channel."""

    def run(which: int) -> Tensor:
        tensors = qkv(1, 1, 70, 300, 64, dtype=torch.bfloat16)
        tensors[which][0, 0, 20, 5] = bad
        return sm90.emulate(*tensors, recipe=recipe, scale=0.125, is_causal=True, top_left=True).out[0, 0].isnan()

    in_q, in_k, in_v = run(0), run(1), run(2)
    assert in_q.all(-1).nonzero().flatten().tolist() == [20] and in_q.any(-1).sum() == 1
    assert in_k[20:].all()
    assert in_v[:, 5].all() and not in_v[:, [0, 4, 6]].any()
