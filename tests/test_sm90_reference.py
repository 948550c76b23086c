"""The emulator of the Hopper kernel by itself: its arithmetic against exact fractions, and what a caller is promised
about empty, hidden and non-finite inputs. Golden arrays from the GPU: tests/kernels/test_golden.py."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle import RECIPE_TOLERANCE, ROWS_REL_L1, assert_attention_close, attention, measure, normal, qkv
from sage_patch.reference.emulator import float32
from sage_patch.reference.emulator import forward as sm90
from sage_patch.reference.emulator import logits as sm90_logits
from sage_patch.reference.emulator import prepare as sm90_prepare
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


# --- masks, windows, softcap, sinks, padding, sequences -------------------------------------------------------------

Q_LEN, KV_LEN = 70, 300


def close(recipe: str, tensors: tuple[Tensor, ...], seen: Tensor | None = None, **options: Any) -> sm90.Stages:
    """Emulates and compares with float64. seen: bool mask for the oracle, in place of what `options` say about keys."""
    q, k, v = tensors
    s = sm90.emulate(q, k, v, recipe=recipe, scale=0.125, **options)
    softcap, sinks, mask = options.get("softcap", 0.0), options.get("sinks"), options.get("attn_mask")
    window = (options.get("left", -1), options.get("right", -1))
    k, v = (torch.where(x.isfinite(), x, 0.0) for x in (k, v))
    if seen is None:
        is_causal = options.get("is_causal", False)
        ref, lse = attention(
            q, k, v, mask, scale=0.125, softcap=softcap, sinks=sinks, window=window, is_causal=is_causal
        )
    else:
        ref, lse = attention(q, k, v, seen, scale=0.125, softcap=softcap, sinks=sinks)
    dead = lse == -math.inf
    assert not s.out[dead].any() and torch.equal(s.lse == -math.inf, dead) and bool(s.out.isfinite().all())
    assert measure(s.out[~dead], ref[~dead]).rel_l1 < ROWS_REL_L1[recipe]
    assert (s.lse - lse)[~dead].abs().max() < 0.15
    return s


def small(heads: int = 2, batch: int = 1, dim: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    return qkv(batch, heads, Q_LEN, KV_LEN, dim, kv_heads=1, dtype=torch.bfloat16)


def random_mask(*shape: int) -> Tensor:
    """Half of it hidden, a tile seen whole, another not at all by the first 64 rows, an empty row."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[..., 128:256] = True
    mask[..., :64, :128] = False
    mask[..., 23, :] = False
    return mask


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "options",
    ({"left": 40, "is_causal": True}, {"left": 100, "right": 20}, {"right": 7}, {"left": 0, "is_causal": True}),
    ids=str,
)
def test_windows(recipe: str, options: dict[str, Any]) -> None:
    s = close(recipe, small(), **options)
    assert "left" not in options or not s.walked[:, :, :64, 0].any()  # rows look right of the first tile


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_bool_masks(recipe: str, dim: int, heads: int, is_causal: bool) -> None:
    """One mask for all heads or one each; keys that no row sees hold NaN and count for no mean and no scale."""
    q, k, v = small(dim=dim)
    mask = random_mask(1, heads, Q_LEN, KV_LEN)
    mask[..., [3, 50]] = False
    k[:, :, [3, 50]], v[:, :, [3, 50]] = math.nan, math.inf
    s = close(recipe, (q, k, v), attn_mask=mask, is_causal=is_causal)
    assert not s.walked[:, :, :64, 0].any() and s.walked[:, :, 64:, 0].all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_whole_mask_equals_no_mask(recipe: str) -> None:
    everything = torch.ones(1, 1, Q_LEN, KV_LEN, dtype=torch.bool)
    plain = sm90.emulate(*small(), recipe=recipe, scale=0.125, is_causal=True)
    for mask in (everything, torch.where(everything, 0.0, 1.0)):
        masked = sm90.emulate(*small(), recipe=recipe, scale=0.125, is_causal=True, attn_mask=mask)
        if mask.dtype == torch.bool:  # a zero bias leaves the integers only where a tile is seen whole
            assert torch.equal(plain.out, masked.out) and torch.equal(plain.lse, masked.lse)
        assert torch.equal(plain.scores, masked.scores) and measure(masked.out, plain.out).rel_l1 < 1e-3


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_float_masks(recipe: str, softcap: float, dtype: torch.dtype) -> None:
    """-inf hides, -10000 hardly differs from it; a tile to which zero is added keeps integer scores."""
    bias = normal(1, 2, Q_LEN, KV_LEN, dtype=dtype, seed=5) * 2
    bias = bias.masked_fill(~random_mask(1, 2, Q_LEN, KV_LEN), -math.inf)
    bias[..., 30:40] = -10000.0
    bias[..., 128:256] = 0.0
    s = close(recipe, small(), attn_mask=bias, softcap=softcap)
    assert s.logits is not None and s.logits.used[..., 1].all() == bool(softcap)
    row = bias[:, :1, 5:6]
    close(recipe, small(), attn_mask=row, softcap=softcap)
    close(recipe, small(), attn_mask=normal(1, 1, Q_LEN, KV_LEN, dtype=dtype, seed=6) * 2, softcap=softcap)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("softcap", [0.0, 20.0, 0.5])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sinks_and_softcap(recipe: str, softcap: float, is_causal: bool) -> None:
    """Both must see what smoothing takes from K; a sink may be far below the keys or far above."""
    q, k, v = small(heads=3)
    k[..., 3] += 4.0
    v[..., 5] += 8.0
    close(recipe, (q, k, v), softcap=softcap, sinks=torch.tensor([-100.0, 3.0, 300.0]), is_causal=is_causal)
    if softcap:
        close(recipe, (q, k, v), softcap=softcap, is_causal=is_causal)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [1, 2])
def test_key_padding(recipe: str, rows: int) -> None:
    """Padding anywhere, NaN in it: the same bits as the call without those keys; an item may have none at all."""
    q, k, v = small(batch=2)
    keep = torch.rand(rows, KV_LEN, generator=torch.Generator().manual_seed(3)) > 0.5
    if rows == 2:
        keep[1] = False
    gone = (~keep).expand(2, -1)[:, None, :, None]
    k, v = k.masked_fill(gone, math.nan), v.masked_fill(gone, math.nan)
    s = close(recipe, (q, k, v), keep[:, None, None].expand(2, 1, Q_LEN, -1), key_padding=keep)
    left = keep[0].nonzero()[:, 0]
    alone = sm90.emulate(q[:1], k[:1, :, left], v[:1, :, left], recipe=recipe, scale=0.125)
    assert torch.equal(s.out[:1], alone.out) and torch.equal(s.lse[:1], alone.lse)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("is_causal,top_left", [(False, False), (True, False), (True, True)])
def test_left_padding(recipe: str, is_causal: bool, top_left: bool) -> None:
    """Positions are those of the padded call: with a square call both corners mean the same."""
    n, starts = 150, [0, 131, 150]
    q, k, v = qkv(3, 2, n, n, 64, dtype=torch.bfloat16)
    token = torch.arange(n)
    seen = (token >= torch.tensor(starts)[:, None])[:, None, None].expand(3, 1, n, n)
    if is_causal:
        seen = seen & (token <= token[:, None])
    k, v = (x.masked_fill((token < torch.tensor(starts)[:, None])[:, None, :, None], math.nan) for x in (k, v))
    lens = [n - s for s in starts]
    close(recipe, (q, k, v), seen, kv_starts=starts, kv_lens=lens, is_causal=is_causal, top_left=top_left)


@pytest.mark.parametrize("recipe", RECIPES)
def test_mask_with_lengths_and_window(recipe: str) -> None:
    """The diagonal is the item's own: it ends on its last key."""
    q, k, v = small(batch=2)
    lens, mask = torch.tensor([KV_LEN, 201]), random_mask(1, 1, Q_LEN, KV_LEN)
    at = torch.arange(KV_LEN) - torch.arange(Q_LEN)[:, None] - (lens[:, None, None, None] - Q_LEN)
    seen = mask & (torch.arange(KV_LEN) < lens[:, None, None, None]) & (at >= -150) & (at <= 0)
    k[1, :, 201:] = math.nan
    close(recipe, (q, k, v), seen, attn_mask=mask, kv_lens=lens.tolist(), left=150, is_causal=True)


def test_sequences_are_cut_out() -> None:
    q, k, v = small()
    parts = sm90.sequences(q, k, v, [2, 7, 7, 60], [3, 80, 90, 299])
    assert [(x.shape[2], y.shape[2]) for x, y, _ in parts] == [(5, 77), (0, 10), (53, 209)]
    assert torch.equal(parts[2][0], q[:, :, 7:60]) and torch.equal(parts[0][2], v[:, :, 3:80])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=["dense", "softcap"])
def test_a_tile_that_a_row_does_not_see_changes_nothing(recipe: str, options: dict[str, Any]) -> None:
    """Why skipped tiles need no model: m and the sums stay to the bit, whoever else of the group sees the tile."""
    mask = torch.ones(1, 1, Q_LEN, KV_LEN, dtype=torch.bool)
    mask[..., 5, :128] = mask[..., 5, 256:] = False  # row 5 sees the middle tile alone, its group all three
    s = sm90.emulate(*small(), recipe=recipe, scale=0.125, attn_mask=mask, **options)
    assert s.walked.all()
    m, t = s.m[:, :, 5], s.t[:, :, 5]
    assert bool((m[..., 2] == sm90.NO_KEYS).all()) and torch.equal(m[..., 0], m[..., 1])
    assert not t[:, :, 2].any() and (torch.equal(t[:, :, 0], t[:, :, 1]) if "fp16" in recipe else not t[:, :, 0].any())


def test_softcap_is_within_its_bound() -> None:
    """The bound holds the exact value and what the instructions' worst errors give, and is a few units of the last
    place, of the cap and of the logit."""
    x = torch.cat([torch.linspace(-300, 300, 4001), torch.linspace(-1e-3, 1e-3, 501)])
    shift = torch.linspace(-20, 20, len(x))
    exact = x.double() + shift.double()
    for softcap in (0.5, 5.0, 30.0):
        y, error = sm90_logits.softcapped(x, shift, softcap)
        cap = softcap / math.log(2)
        assert bool(((y - cap * torch.tanh(exact / cap)).abs() <= error).all())
        assert bool((error <= 16 * 2.0**-23 * cap + 4 * 2.0**-23 * (x.abs() + shift.abs())).all())
        for side in (-1, 1):  # ex2.approx is off by two units, rcp.approx by one
            e = torch.exp2(2 / softcap * exact) * (1 + side * 2.0**-22)
            worst = cap - 2 * cap / (1 + e) * (1 - side * 2.0**-23)
            assert bool(((y - worst).abs() <= error).all())


def test_unseen_keys_count_for_no_mean() -> None:
    """Smoothing vectors are those of the seen samples alone, whatever the others hold."""
    x = normal(60, 64, dtype=torch.float32) + 40
    seen = torch.arange(60) % 3 > 0
    want = x[seen].mean(0)
    x[~seen] = 1e4
    heads = x.half()[None, None]
    made = sm90_prepare.prepare(heads, heads, [60], 64, False, True, seen[None])
    torch.testing.assert_close(made.k_mean[0], want, rtol=1e-3, atol=0)
    torch.testing.assert_close(made.v_mean[0], want, rtol=1e-3, atol=0)
    assert made.v_scale.max() < 0.1 and made.k_scale.max() < 0.1
    assert not sm90_prepare.prepare(heads, heads, [60], 64, False, True, ~seen[None] & seen).v_scale.any()
