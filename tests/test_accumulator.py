"""The model of the FP8 tensor core's accumulator, against what was measured on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from oracle import T8F8, assert_attention_close, attention, measure, qkv
from sage_patch.recipes import parse_recipe
from sage_patch.reference.attention import quantized_attention
from sage_patch.reference.emulator.accumulator import FP8_ACCUMULATOR_BITS, FP16, product
from sage_patch.reference.emulator.accumulator import accumulate as fp8_accumulate
from sage_patch.reference.visibility import Visibility


def step(products: list[float], acc: float = 0.0) -> float:
    return fp8_accumulate(torch.tensor(products, dtype=torch.float64)[:, None], torch.tensor([acc]).double()).item()


@pytest.mark.parametrize(
    ("products", "acc", "result"),
    [
        ([1.0, 2.0**-13], 0.0, 1 + 2.0**-13),  # the last bit that is kept
        ([1.0, 2.0**-14], 0.0, 1.0),  # the first that is lost
        ([-1.0, 2.0**-14], 0.0, -1.0),  # each term is cut toward zero before the sum
        ([1.0, 3.75 * 2.0**-13], 0.0, 1 + 3 * 2.0**-13),  # truncated, not rounded
        ([256.0, 2.0**-5], 0.0, 256 + 2.0**-5),  # relative to the largest term
        ([256.0, 2.0**-6], 0.0, 256.0),
        ([1.0], 2.0**-14, 1.0),  # the accumulator is a term like the others
        ([2.0**-14], 1.0, 1.0),
        ([256.0], 1 + 2.0**-5 + 2.0**-6, 257 + 2.0**-5),  # and loses its own low bits
        ([0.0, 0.0], 0.0, 0.0),
        ([1.0, -1.0], 0.0, 0.0),
    ],
)
def test_measured_facts(products: list[float], acc: float, result: float) -> None:
    """Sums read back from the hardware, one instruction each, in either sign."""
    assert step(products, acc) == result
    assert step([-p for p in products], -acc) == -result


def test_lost_terms_do_not_add_up() -> None:
    """Terms are cut one by one: 31 products of 2^-14 beside 1 are worth nothing, although together nearly 2^-9."""
    assert step([1.0] + [2.0**-14] * 31) == 1.0
    assert step([2.0**-14] * 31) == 31 * 2.0**-14  # alone they are the largest term, and kept


def test_order_of_the_terms_does_not_matter() -> None:
    """Aligned terms are integers: their sum is exact in any order."""
    products = torch.randn(32, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    acc = torch.zeros(16, dtype=torch.float64)
    assert torch.equal(fp8_accumulate(products, acc), fp8_accumulate(products.flip(0), acc))


def test_result_is_cut_too() -> None:
    """Two terms whose sum reaches the next power of two lose one bit more, toward zero."""
    odd = 1 + 2.0**-13
    assert step([odd, 1.0]) == 2.0  # 2 + 2^-13 is cut at 2^-12
    assert step([-odd, -1.0]) == -2.0
    assert step([odd, odd]) == 2 + 2.0**-12


def test_products_are_aligned_by_their_factors() -> None:
    """1.5 * 1.5 = 2.25 has exponent 0, that of its factors: it does not push out a bit that 2.0 would."""
    p, v = torch.tensor([1.5, 2.0**-6]).double(), torch.tensor([[1.5], [2.0**-7]]).double()
    assert product(p[None], v).item() == 2.25  # kept at 2^-13, then lost in the result's own cut
    p, v = torch.tensor([1.5, -1.5, 2.0**-6]).double(), torch.tensor([[1.5], [1.5], [2.0**-7]]).double()
    assert product(p[None], v).item() == 2.0**-13


def test_half_precision_keeps_more() -> None:
    """FP16: 25 bits below the largest term on the way, float32's 23 in the result."""
    one, v = torch.tensor([[1.0, 2.0**-12, -1.0]]), torch.tensor([[1.0], [2.0**-13], [1.0]])
    assert product(one, v, kind=FP16).item() == 2.0**-25
    assert product(one[:, :2], v[:2], kind=FP16).item() == 1.0
    assert product(one[:, :2], v[:2], start=torch.tensor([[-1.0]]), kind=FP16).item() == 2.0**-25
    assert product(one[:, :2] * torch.tensor([1.0, 0.5]), v[:2], start=torch.tensor([[-1.0]]), kind=FP16).item() == 0.0


def accumulate(p: torch.Tensor, v: torch.Tensor, fold: int) -> torch.Tensor:
    """sum p v in instructions of 32 keys; every `fold` keys the tensor-core sum moves to an exact one."""
    total = torch.zeros(v.shape[1], dtype=torch.float64)
    for start in range(0, len(p), fold):
        acc = torch.zeros_like(total)
        for k in range(start, min(start + fold, len(p)), 32):
            acc = fp8_accumulate(p[k : k + 32, None] * v[k : k + 32], acc)
        total += acc
    return total


@pytest.mark.parametrize("keys", [4096, 16384])
def test_two_levels_drift_less_than_one(keys: int) -> None:
    """Why each tile is folded into a float32 output: with V of one sign a single accumulator loses mass as it
    grows, and the loss grows with the length; in two levels it stays at that of one tile."""
    generator = torch.Generator().manual_seed(0)
    p = torch.exp2(torch.randn(keys, generator=generator).clamp(-4, 4)).to(torch.float8_e4m3fn).double()
    v = (1 + torch.rand(keys, 8, generator=generator)).to(torch.float8_e4m3fn).double()
    exact = p @ v
    one = (1 - accumulate(p, v, keys) / exact).mean().item()
    two = (1 - accumulate(p, v, 128) / exact).mean().item()
    assert 0 < two < 2e-3  # truncation always loses, never gains, when all terms are positive
    assert one > 5 * two
    assert one > 0.01 * keys / 4096


def test_values_without_mean_do_not_drift() -> None:
    """What V smoothing buys: without a common sign the truncations cancel and even one level stays unbiased."""
    generator = torch.Generator().manual_seed(1)
    p = torch.exp2(torch.randn(4096, generator=generator).clamp(-4, 4)).to(torch.float8_e4m3fn).double()
    v = torch.randn(4096, 64, generator=generator).to(torch.float8_e4m3fn).double()
    error = accumulate(p, v, 4096) - p @ v
    assert error.abs().mean() / (p.sum() * v.abs().mean()) < 1e-3


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_through_the_emulated_accumulator(is_causal: bool) -> None:
    """The emulated path is the plain one but for 2^-13: it must meet the recipe's tolerance and nearly equal it."""
    q, k, v = qkv(1, 2, 70, 300, dim=32)
    recipe = parse_recipe("qk_int8_pv_fp8")
    seen = Visibility(70, 300, right=0 if is_causal else None, offset=230)
    plain, plain_lse = quantized_attention(q, k, v, seen, recipe, scale=32**-0.5, return_lse=True)
    emulated, lse = quantized_attention(
        q, k, v, seen, recipe, scale=32**-0.5, return_lse=True, emulate_accumulator=True
    )
    assert_attention_close(emulated, attention(q, k, v, is_causal=is_causal)[0], T8F8)
    assert measure(emulated, plain).rel_l1 < 4 * 2.0**-FP8_ACCUMULATOR_BITS + 2.0**-10  # and the fp16 output's step
    assert lse is not None and plain_lse is not None
    assert (lse <= plain_lse + 1e-6).all() and (plain_lse - lse).max() < 1e-2
