"""Numbers of every size: sums, products and channels past a type's range, zeros, constants, outliers, long tails.

A test without a recipe means INT8 QK with FP8 PV and all smoothing on; twins on the card run the compiled kernels.
"""

from __future__ import annotations

import pytest
import torch

from oracle import QUANTIZED, T8F8, assert_attention_close, attention, measure, normal, qkv
from sage_patch.recipes import parse_recipe
from zoo.calls import DEFAULT, FP16, HALVES, INT8, NO_SMOOTH_V, nhd, on_devices, run, tolerance_of


@pytest.mark.parametrize("recipe", [*QUANTIZED, NO_SMOOTH_V])
def test_sum_of_values_may_pass_the_half_range(recipe: str) -> None:
    """4,096 equal weights on V = 30 sum to 122,880, past fp16; the average must still be 30."""
    q, k, v = qkv(2, 4, 64, 4096, 64)
    out = run(torch.zeros_like(q), k, torch.full_like(v, 30.0), recipe)
    assert ((out - 30).abs() <= 0.1).all()


@pytest.mark.parametrize("recipe", [*INT8, NO_SMOOTH_V])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_beyond_the_half_range(recipe: str, dtype: torch.dtype) -> None:
    """A channel of 4e5 must not become infinite on its way in, nor cost the other channels anything."""
    q, k, v = qkv(1, 2, 256, 4096, 128, dtype=dtype)
    v[..., 3] *= 1e5
    out, want = run(q, k, v, recipe), attention(q, k, v)[0]
    rest = [c for c in range(128) if c != 3]
    tolerance = tolerance_of(recipe)
    assert_attention_close(out[..., rest], want[..., rest], tolerance)
    # one channel has no direction within a row: look along the rows instead
    assert_attention_close(out[..., 3], want[..., 3], tolerance)


@on_devices([*QUANTIZED, NO_SMOOTH_V])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_zero_value_channel_is_exactly_zero(device: str, recipe: str, layout: str) -> None:
    """A channel of V that is zero in one head only: a scale of 0 divides nothing, the others keep their accuracy."""
    batch, q_len = (1, 100) if device == "cpu" else (2, 777)
    q, k, v = qkv(batch, 4, q_len, 777, 128, device=device)
    v[:, 1, :, 5] = 0
    tensors = (q, k, v) if layout == "HND" else (nhd(q), nhd(k), nhd(v))
    out = run(*tensors, recipe, tensor_layout=layout)
    out = out if layout == "HND" else out.transpose(1, 2)
    assert not out[:, 1, :, 5].any() and out[:, 0, :, 5].any()
    assert_attention_close(out, attention(q, k, v)[0], tolerance_of(recipe))


@pytest.mark.parametrize("recipe", [*QUANTIZED, NO_SMOOTH_V])
@pytest.mark.parametrize("dtype", HALVES)
def test_constant_value_channel_is_exact(recipe: str, dtype: torch.dtype) -> None:
    """V = 0.001 everywhere comes back as 0.001, within 1 %; centred V is all zero then."""
    for kv_len in (77, 512, 513):
        q, k, v = qkv(1, 2, 64, kv_len, 64, dtype=dtype)
        v = torch.full_like(v, 0.001)
        out = run(q, k, v, recipe)
        assert ((out / v[..., :1, :] - 1).abs() <= 0.01).all()


@on_devices([*INT8, NO_SMOOTH_V])
def test_tiny_inputs_behave_like_small_ones(device: str, recipe: str) -> None:
    """q, k, v of 1e-6, in fp16's subnormal range and in float32, and K exactly zero: within 6 % of the oracle rounded
    to the output's type as well. On a card float32 runs exact."""
    heads, q_len = (2, 300) if device == "cpu" else (4, 1031)
    for dtype in (torch.float16, torch.float32) if device == "cpu" else (torch.float16,):
        q, k, v = ((1e-6 * x).to(dtype) for x in qkv(1, heads, q_len, 1031, 64, dtype=torch.float32, device=device))
        for keys in (k, torch.zeros_like(k)):
            got, want = run(q, keys, v, recipe), attention(q, keys, v)[0]
            error = measure(got, want.to(dtype))
            assert torch.isfinite(got).all() and error.rel_l1 < 0.06, f"{dtype}: {error}"
    # a value scale of 1 keeps the fp16 output away from zero, so that tiny scores are seen to be uniform
    small, v = 1e-6 * normal(1, 2, 300, 64, device=device), normal(1, 2, 300, 64, device=device)
    got = run(small, small, v, recipe)
    assert measure(got, v.mean(dim=2, keepdim=True).expand_as(got)).rel_l1 < 0.06


@on_devices([*QUANTIZED, NO_SMOOTH_V])
@pytest.mark.parametrize("gap", [7.5, 10.0])
def test_a_long_tail_of_small_weights_keeps_its_mass(device: str, recipe: str, gap: float) -> None:
    """One key stands out by `gap`, 16,383 small ones carry much of the sum; V of ones returns one, and with the large
    key's V at zero the output is the mass of the tail."""
    q, k = (torch.zeros(1, 1, n, 64, dtype=torch.float16, device=device) for n in (64, 16384))
    q[..., 0], k[0, 0, 5, 0] = 8, gap
    v = torch.ones_like(k)
    out = run(q, k, v, recipe)
    assert ((out >= 0.97) & (out <= 1.03)).all()
    v[0, 0, 5] = 0
    assert (run(q, k, v, recipe) - attention(q, k, v)[0]).abs().max() <= 0.03


@on_devices([*QUANTIZED, f"{DEFAULT}:smooth=none"])
@pytest.mark.parametrize("packed", [False, True])
def test_huge_logits_stay_finite(device: str, recipe: str, packed: bool) -> None:
    """q, k of +-3e4 give scores of 1e10: finite, the largest score wins wherever it leads by 50, and one packed
    sequence is the batch of one. On a card rotated keys are out of the second: their groups' scales differ, and an
    integer step is worth 16 octaves at most."""
    q, k, v = qkv(1, 4, 257, dim=128, device=device)
    q, k = q.sign() * 3e4, k.sign() * 3e4
    out = run(q, k, v, recipe)
    if packed:
        cu, whole = torch.tensor([0, 257], device=device), out
        out = run(*(nhd(x)[0] for x in (q, k, v)), recipe, cu_seqlens_q=cu, cu_seqlens_k=cu).transpose(0, 1)[None]
        assert torch.equal(out, whole)
    assert torch.isfinite(out).all()
    if device == "cuda" and parse_recipe(recipe).rotate != "none":
        recipe = f"{recipe}:rotate=none"
        out = run(q, k, v, recipe)
    if "int8" in recipe:  # INT4 does not resolve neighbouring scores of this size
        want = attention(q, k, v)[0]
        top = torch.topk(q.double() @ k.double().mT * 128**-0.5, 2, dim=-1).values
        sure = top[..., 0] - top[..., 1] > 50
        error = (out.double() - want).norm(dim=-1)[sure] / want.norm(dim=-1)[sure]
        assert sure.float().mean() > 0.5
        assert error.max() < (1e-2 if "fp16" in recipe else T8F8.rel_l1)  # FP8 still rounds the winner's V


@on_devices([FP16, NO_SMOOTH_V, DEFAULT])
@pytest.mark.parametrize("factor", [1, 16, 400])
def test_inputs_that_were_fp8_before(device: str, recipe: str, factor: int) -> None:
    """Activations on E4M3's grid, times 1, 16 or 400, at ordinary logits: cosine above 0.998."""
    q, k, v = fp8_before(device, factor)
    assert all(torch.isfinite(x).all() for x in (q, k, v))
    scale = 64**-0.5 / factor**2
    assert measure(run(q, k, v, recipe, scale=scale), attention(q, k, v, scale=scale)[0]).cosine > 0.998


@on_devices(QUANTIZED)
@pytest.mark.parametrize("factor", [1, 16, 400])
def test_fp8_outliers_stay_finite_averages(device: str, recipe: str, factor: int) -> None:
    """With 0.1 % of entries at +-7,168 rows turn into single keys, which INT8 cannot always tell apart; but the output
    stays finite and within the range of its values."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.where((torch.rand(x.shape, generator=generator) < 1e-3).to(device), x.sign() * 448 * 16, x)
        for x in fp8_before(device, factor)
    )
    out = run(q, k, v, recipe).float()
    high, low = v.float().amax(dim=-2, keepdim=True), v.float().amin(dim=-2, keepdim=True)
    slack = (high - low) * 0.07  # one E4M3 step
    assert torch.isfinite(out).all() and (out <= high + slack).all() and (out >= low - slack).all()


def fp8_before(device: str, factor: int) -> list[torch.Tensor]:
    """Query, key and value on E4M3's grid, times a factor, in bfloat16."""
    batch, heads, q_len = (1, 2, 300) if device == "cpu" else (2, 4, 1031)
    tensors = qkv(batch, heads, q_len, 1031, 64, dtype=torch.float32, device=device)
    return [(x.to(torch.float8_e4m3fn).float() * factor).bfloat16() for x in tensors]
