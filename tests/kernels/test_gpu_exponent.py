"""The exponents duo and chord on the GPU: the emulator's numbers, the accuracy they promise, scores of any size."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle import attention, measure
from sage_patch.recipes import UnsupportedCall
from sage_patch.reference.emulator import forward as sm90
from sage_patch.reference.emulator.float32 import e4m3_value
from zoo import golden_stages as golden
from zoo.gpu_cases import DEVICE, FP8, FP16, forward, normal, poison, qkv
from zoo.kernel_calls import Extras

pytestmark = pytest.mark.gpu
EXPONENTS = ("duo", "chord")
# Share of outputs in rows whose P is certain; what is left is 1 / l. Rows of one key repeat a number of V, where that
# last bit of 1 / l decides more often.
EQUAL, EQUAL_ONE_HOT = 0.9995, 0.998


def named(exp: str) -> str:
    return f"{FP8}:exp={exp}"


def like_the_emulator(
    exp: str, q: Tensor, k: Tensor, v: Tensor, scale: float, equal: float = EQUAL, **options: Any
) -> float:
    """Asserts that a call gives the emulator's output; the share of its tiles that are formed by bits."""
    asked = dict(options)
    extras = Extras(**{n: asked.pop(n) for n in list(asked) if n in Extras._fields})
    out, lse = forward(q, k, v, scale=scale, recipe=named(exp), return_lse=True, extras=extras, **asked)
    out, lse = out.cpu(), lse.cpu()
    given = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in options.items()}
    s = sm90.emulate(q, k, v, scale=scale, exp=exp, **given)
    uncertain = (e4m3_value(s.p_high) - e4m3_value(s.p_low)).abs().sum(-1, keepdim=True)
    certain = ((uncertain == 0) & ~s.out.isnan().any(-1, keepdim=True)).expand(out.shape)
    assert torch.equal(out.isnan(), s.out.isnan())
    if bool(certain.any()):
        assert float((out == s.out)[certain].float().mean()) >= equal
    mass = e4m3_value(s.p).sum(-1, keepdim=True).clamp_min(1e-30)
    value = torch.where(v.isfinite(), v, 0.0).cpu()
    good = ~s.out.isnan()
    slack = (uncertain / mass * value.abs().max()).expand(out.shape)[good]
    assert golden.output_steps(out[good], s.out[good], value, slack) <= 1.0
    live = s.lse.isfinite()
    assert torch.equal(lse.isfinite(), live)
    band = 1e-5 * s.lse.abs().clamp_min(1.0) + (uncertain / mass)[..., 0]
    assert bool(((lse - s.lse).abs() <= band)[live].all())
    return float(s.by_bits.float().mean())


@pytest.mark.parametrize("exp", EXPONENTS)
@pytest.mark.parametrize("d", [64, 40, 96, 72, 128, 256, 160])
def test_outputs_are_the_emulators(exp: str, d: int) -> None:
    poison()
    dtype = torch.float16 if d == 64 else torch.bfloat16
    q, k, v = qkv(2, 2, 1, 75, 640, d, dtype)
    k = k + 3 * normal(1, 1, 1, d, dtype=dtype, seed=7)
    assert like_the_emulator(exp, q, k, v, d**-0.5) > 0.9
    assert 0.3 < like_the_emulator(exp, q, k[:, :, :555], v[:, :, :555], d**-0.5, is_causal=True) < 0.9
    lens = torch.tensor([640, 300], dtype=torch.int32, device=DEVICE)
    assert like_the_emulator(exp, q, k, v, d**-0.5, kv_lens=lens) > 0.6


@pytest.mark.parametrize("exp", EXPONENTS)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("kind", ["bool", "float", "window", "sinks", "padding", "softcap"])
def test_masks(exp: str, d: int, kind: str) -> None:
    poison()
    q, k, v = qkv(1, 2, 1, 130, 520, d)
    random = torch.Generator(DEVICE).manual_seed(3)
    seen = torch.rand(1, 2, 130, 520, generator=random, device=DEVICE) > 0.4
    seen[..., 128:384] = True
    options: dict[str, Any] = {
        "bool": {"attn_mask": seen},
        "float": {"attn_mask": torch.zeros(seen.shape, device=DEVICE).masked_fill(~seen, -2.0)},
        "window": {"left": 300, "right": 40},
        "sinks": {"sinks": torch.tensor([1.5, 80.0], device=DEVICE)},
        "padding": {"key_padding": torch.arange(520, device=DEVICE)[None] % 3 > 0},
        "softcap": {"softcap": 20.0},
    }[kind]
    share = like_the_emulator(exp, q, k, v, d**-0.5, **options) if kind != "softcap" else 0.5
    assert share >= (0.15 if kind == "window" else 0.4)
    if kind == "softcap":  # all of its tiles are float logits
        got, want = (forward(q, k, v, scale=d**-0.5, recipe=r, extras=Extras(**options))[0] for r in (named(exp), FP8))
        assert torch.equal(got, want)


@pytest.mark.parametrize("exp", EXPONENTS)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_lengths(exp: str, d: int) -> None:
    poison()
    for n in (1, 77, 503, 1031):
        for kn in (1, 128, 503, 1031):
            for causal in (False, True):
                q, k, v = qkv(1, 4, 2, n, kn, d, torch.float16)
                out = forward(q, k, v, scale=d**-0.5, recipe=named(exp), is_causal=causal)[0]
                ref = attention(q, k, v, scale=d**-0.5, is_causal=causal)[0]
                assert bool(out.isfinite().all())
                live = ref.abs().sum(-1) > 0
                if bool(live.any()):
                    assert float((out - ref)[live].abs().sum() / ref[live].abs().sum()) < 0.08


@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_accuracy(d: int, causal: bool) -> None:
    q, k, v = qkv(1, 8, 4, 4096, 4096, d)
    ref = attention(q, k, v, scale=d**-0.5, is_causal=causal)[0]
    exact, duo, chord = (
        measure(forward(q, k, v, scale=d**-0.5, recipe=named(e), is_causal=causal)[0], ref).rel_l1
        for e in ("exact", *EXPONENTS)
    )
    assert duo <= 1.02 * exact and chord <= 1.12 * exact and exact <= 0.04, (exact, duo, chord)


@pytest.mark.parametrize("exp", EXPONENTS)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_scores_of_any_size(exp: str, d: int) -> None:
    """From constants to scores whose bits would wrap; the ways are the bound's, the scores' own and the exact one."""
    q, k, v = qkv(1, 2, 2, 70, 640, d)
    shares = {}
    for size in (0.0, 1e-6, 1e-3, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 1e3, 1e5, 1e8):
        shares[size] = like_the_emulator(exp, q * size, k, v, d**-0.5, EQUAL if size < 10 else EQUAL_ONE_HOT)
    assert shares[1.0] == 1 and shares[1e8] == 0
    rows = torch.logspace(-6, 6, 70, device=DEVICE)[:, None]
    like_the_emulator(exp, (q * rows).bfloat16(), k, v, d**-0.5, EQUAL_ONE_HOT)
    keys = torch.logspace(-6, 6, 640, device=DEVICE)[:, None]
    like_the_emulator(exp, q, (k * keys).bfloat16(), v, d**-0.5, EQUAL_ONE_HOT)
    for scale in (1e-30, 1e30, -(d**-0.5)):
        like_the_emulator(exp, q, k, v, scale, EQUAL_ONE_HOT)
    ones = torch.ones_like(k)
    for sign in (1, -1):  # all scores the same, far above or below zero: K keeps its mean
        out = forward(200 * q.abs(), sign * ones, v, scale=d**-0.5, recipe=named(exp), smooth_k=False)[0]
        mean = v.double().mean(-2, keepdim=True)
        assert float((out - mean).abs().max()) < 0.03


@pytest.mark.parametrize("exp", EXPONENTS)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite(exp: str, d: int, bad: float) -> None:
    q, k, v = qkv(1, 2, 2, 200, 640, d)
    run = functools.partial(forward, scale=d**-0.5, is_causal=True)
    for which in range(3):
        tensors = [q.clone(), k.clone(), v.clone()]
        tensors[which][:, 0, 150, 3] = bad
        got, want = (run(*tensors, recipe=named(e))[0] for e in (exp, "exact"))
        assert torch.equal(got.isfinite(), want.isfinite())
        good = want.isfinite()
        assert float((got - want)[good].float().abs().max()) < 0.15
        like_the_emulator(exp, *tensors, d**-0.5, is_causal=True)


def test_refusals() -> None:
    q, k, v = qkv(1, 2, 2, 70, 200, 64)
    with pytest.raises(UnsupportedCall, match="need recipe fp8"):
        forward(q, k, v, scale=0.125, recipe=f"{FP16}:exp=duo")
