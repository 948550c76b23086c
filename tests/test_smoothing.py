"""Smoothing: offsets that queries, keys and values share cost no accuracy, and the log-sum-exp still counts them."""

from __future__ import annotations

import pytest
import torch

from oracle import QUANTIZED, T8F8, Tolerance, assert_attention_close, attention, measure, normal, qkv
from zoo.calls import DEFAULT, on_devices, run, tolerance_of


@pytest.mark.parametrize("offset", [10, 30, 100, 300])
def test_key_channel_with_an_offset(offset: float) -> None:
    """The error does not grow with K's common offset; without smoothing it does."""
    q, k, v = qkv(1, 4, 300, 1031, 64)
    k[..., 7] += offset
    want = attention(q, k, v)[0]
    assert_attention_close(run(q, k, v), want, T8F8)
    without = measure(run(q, k, v, f"{DEFAULT}:smooth=none,rotate=none"), want).rel_l1
    assert without > {10: 0.04, 30: 0.06, 100: 0.15, 300: 0.5}[offset]


def turned(x: torch.Tensor) -> torch.Tensor:
    """RoPE with base 1e6: channels i and i + D/2 turn together."""
    tokens, dim = x.shape[-2:]
    turns = torch.arange(tokens)[:, None] * 1e6 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    cos, sin = (f(torch.cat([turns, turns], dim=-1)) for f in (torch.cos, torch.sin))
    first, second = x.double().chunk(2, dim=-1)
    return x.double() * cos + torch.cat([-second, first], dim=-1) * sin


@pytest.mark.parametrize(
    "pair, bias, int8, int4, rotated",
    [
        (62, 300, 0.0345, 0.185, 0.0353),
        (30, 30, 0.0445, 0.54, 0.0341),
        (30, 100, 0.098, 0.76, 0.0369),
        (2, 30, 0.081, 0.77, 0.0386),
        (2, 300, 0.67, 0.81, 0.166),
    ],
)
def test_a_key_bias_that_rope_turns_costs_what_the_page_says(
    pair: int, bias: float, int8: float, int4: float, rotated: float
) -> None:
    """A bias in channels that hardly turn is taken out; the faster they turn, the more of it stays in the keys, unless
    they are rotated."""
    q, k, v = (x.double() for x in qkv(1, 2, 600, 600, 128))
    both = [pair, pair + 64]
    k[..., both] += torch.tensor([bias, -0.6 * bias], dtype=torch.float64)
    q[..., both] *= min(1, 8 / bias)
    call = [x.bfloat16() for x in (turned(q), turned(k), v)]
    want = attention(*call, is_causal=True)[0]
    for recipe, error in ((f"{DEFAULT}:rotate=none", int8), ("qk_int4_pv_fp8:rotate=none", int4), (DEFAULT, rotated)):
        assert measure(run(*call, recipe, is_causal=True), want).rel_l1 == pytest.approx(error, rel=0.1), recipe


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("kv_len", [1, 2, 4, 12, 77, 503])
def test_smoothing_never_hurts(recipe: str, kv_len: int) -> None:
    """On plain data and few keys each kind of smoothing costs at most 10 %; one key returns V itself."""
    q, k, v = qkv(8, 4, 64, kv_len)
    want = attention(q, k, v)[0]
    error = measure(run(q, k, v, recipe), want).rel_l1
    if kv_len == 1:
        assert torch.equal(run(q, k, v, recipe), v.expand_as(q))
    for off in ("smooth=none", "smooth_v=off", "smooth=none,smooth_v=off"):
        assert error <= 1.1 * measure(run(q, k, v, f"{recipe}:{off}"), want).rel_l1, off


@pytest.mark.parametrize("recipe", ["qk_int8_pv_fp16", DEFAULT])
def test_values_with_an_offset_keep_their_detail(recipe: str) -> None:
    """V = 40 + N(0,1): the error is small beside |V - mean|, where plain cosine sees nothing. float32
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
    """With a common offset in Q and K, INT4 is close with both smoothed and poor with neither."""
    q, k, v = qkv(1, 2, 256, 1031, 64, dtype=dtype)
    q, k = q + 3 * normal(1, 2, 1, 64, seed=7).to(dtype), k + 5 * normal(1, 2, 1, 64, seed=8).to(dtype)
    want = attention(q, k, v)[0]
    error = {s: measure(run(q, k, v, f"qk_int4_pv_fp8:smooth={s}"), want).rel_l1 for s in ("none", "k", "q", "qk")}
    assert error["qk"] < min(error["k"], error["q"]) and error["none"] > 2 * error["qk"] and error["qk"] < 0.28


# --- log-sum-exp ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smooth", ["none", "k", "q", "qk"])
@pytest.mark.parametrize("granularity", ["thread", "token"])
def test_lse_counts_the_mean_that_smoothing_removed(smooth: str, granularity: str) -> None:
    """K + 30: the lse of the true logits, which lie hundreds away from the smoothed ones."""
    q, k, v = qkv(1, 4, 200, 1031, 64)
    shifted = k + 30
    want = attention(q, shifted, v)[1]
    _, lse = run(q, shifted, v, f"{DEFAULT}:smooth={smooth},granularity={granularity}", return_lse=True)
    if smooth in ("k", "qk"):
        assert (lse - want).abs().max() < 0.05
    else:  # not smoothed: a key near 30 has ten times the INT8 noise, but nothing of its size is missing
        assert (lse - want).abs().mean() < 0.3
    assert (want - attention(q, k, v)[1]).abs().max() > 50


@on_devices([*QUANTIZED, f"{DEFAULT}:smooth=none,smooth_v=off"])
def test_two_calls_merge_by_lse(device: str, recipe: str) -> None:
    """400 + 631 keys with a key bias of 30, merged, equal the single call; each lse is of the true logits, within 0.05
    nat, although they lie far from the smoothed ones."""
    q, k, v = qkv(1, 4, 77, 1031, 64, device=device)
    k = k + 30 if "smooth=none" not in recipe else k
    parts = [run(q, k[:, :, s], v[:, :, s], recipe, return_lse=True) for s in (slice(0, 400), slice(400, None))]
    total = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out.double() * torch.exp(lse - total)[..., None] for out, lse in parts)
    want, want_lse = attention(q, k, v)
    assert_attention_close(merged, want, tolerance_of(recipe))
    if "int8" in recipe:
        assert (total - want_lse).abs().max() < 0.05
        assert (run(q, k, v, recipe, return_lse=True)[1] - want_lse).abs().max() < 0.05
