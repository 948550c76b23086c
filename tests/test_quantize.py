"""The quantizers: groups, ranges, rounding, smoothing, and what happens to numbers that are not ordinary."""

from __future__ import annotations

import math

import pytest
import torch

from oracle import normal
from sage_patch.reference.quantize import (
    E4M3_MAX,
    Quantized,
    key_groups,
    quantize_e4m3,
    quantize_int,
    query_groups,
    round_e4m3,
    subtract_block_mean,
    subtract_mean,
)

CPU = torch.device("cpu")
TILINGS = ["mma", "wgmma"]


def dequantized(x: Quantized) -> torch.Tensor:
    return x.values.float() * x.scale[..., None]


def members(groups: torch.Tensor, token: int) -> list[int]:
    return (groups == groups[token]).nonzero().flatten().tolist()


def one_group(length: int) -> torch.Tensor:
    return torch.zeros(length, dtype=torch.int64)


# --- groups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tiling", "rows"), [("mma", 32), ("wgmma", 16)])
def test_query_thread_groups_are_rows_i_and_i_plus_8_of_a_warp(tiling: str, rows: int) -> None:
    """SageAttention2, appendix A.6: tokens of one warp with equal n mod 8 share the scale of one thread."""
    groups = query_groups(300, "thread", tiling, CPU)
    assert groups.tolist() == [n // rows * 8 + n % 8 for n in range(300)]
    assert members(groups, 3) == list(range(3, rows, 8))
    assert members(groups, rows + 5) == list(range(rows + 5, 2 * rows, 8))


@pytest.mark.parametrize(("tiling", "block"), [("mma", 64), ("wgmma", 128)])
def test_key_thread_groups_are_columns_2j_and_2j_plus_1_of_a_tile(tiling: str, block: int) -> None:
    """SageAttention2, appendix A.6: a thread owns two neighbouring columns of every eight."""
    groups = key_groups(300, "thread", tiling, CPU)
    assert groups.tolist() == [n // block * 4 + (n % 8) // 2 for n in range(300)]
    assert members(groups, 0)[:6] == [0, 1, 8, 9, 16, 17]
    assert members(groups, 5)[:6] == [4, 5, 12, 13, 20, 21]
    assert len(members(groups, 0)) == block // 4
    assert min(members(groups, block + 2)) == block + 2  # the next tile starts new groups


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("which", [query_groups, key_groups])
def test_coarse_groups(which, tiling: str) -> None:
    """tensor: one group; token: one each; block: whole tiles; warp: a warp's rows of Q, and the whole tile of K."""
    block = {query_groups: {"mma": 128, "wgmma": 64}, key_groups: {"mma": 64, "wgmma": 128}}[which][tiling]
    warp = {"mma": 32, "wgmma": 16}[tiling] if which is query_groups else block
    length = 1031
    assert not which(length, "tensor", tiling, CPU).any()
    assert which(length, "token", tiling, CPU).tolist() == list(range(length))
    assert which(length, "block", tiling, CPU).tolist() == [n // block for n in range(length)]
    assert which(length, "warp", tiling, CPU).tolist() == [n // warp for n in range(length)]


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("which", [query_groups, key_groups])
@pytest.mark.parametrize("granularity", ["block", "warp", "thread", "token"])
@pytest.mark.parametrize("length", [1, 7, 77, 128, 503, 1031])
def test_groups_of_a_prefix_are_a_prefix_of_the_groups(which, granularity: str, tiling: str, length: int) -> None:
    """A token's group never depends on how many tokens follow; the last group index covers every token."""
    groups = which(length, granularity, tiling, CPU)
    assert torch.equal(groups, which(2048, granularity, tiling, CPU)[:length])
    x = normal(1, 1, length, 8, dtype=torch.float32)
    assert quantize_int(x, 8, groups).values.shape == x.shape  # whichever group the last token falls into


# --- integers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_round_to_nearest_even(bits: int) -> None:
    """Ties go to the even neighbour, in both signs; amax is chosen so that the scale is exactly 1."""
    top = 127.0 if bits == 8 else 7.0
    x = torch.tensor([top, 0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, -3.5, 0.49999, -6.5]).view(1, 1, 1, -1)
    got = quantize_int(x, bits, one_group(1))
    assert got.values.flatten().tolist() == [top, 0, 2, 2, 4, 0, -2, -2, -4, 0, -6]
    assert got.scale.item() == 1.0


@pytest.mark.parametrize(("bits", "top"), [(4, 7), (8, 127)])
def test_integers_fill_the_symmetric_range_and_err_by_half_a_step(bits: int, top: int) -> None:
    """Both ends are reached and never passed (-128 and -8 are not used); every error is at most half a step."""
    x = normal(2, 3, 257, 64, dtype=torch.float32)
    got = quantize_int(x, bits, query_groups(257, "thread", "wgmma", CPU))
    assert got.values.dtype == torch.int8
    assert int(got.values.max()) == top and int(got.values.min()) == -top
    error = (dequantized(got) - x).abs()
    assert (error <= got.scale[..., None] * (0.5 + 1e-5)).all()


def test_scale_is_the_largest_absolute_value_of_the_group() -> None:
    """scale = amax / 127, one amax for each head and group, found on a brute-force loop."""
    x = normal(1, 2, 100, 16, dtype=torch.float32)
    groups = key_groups(100, "thread", "mma", CPU)
    got = quantize_int(x, 8, groups)
    for head in range(2):
        for token in range(100):
            amax = x[0, head, groups == groups[token]].abs().max()
            assert got.scale[0, head, token] == amax / 127


def test_tensor_granularity_shares_one_scale_over_heads_but_not_over_the_batch() -> None:
    """Per-tensor means per batch item: the scale must not depend on who else is in the batch."""
    x = normal(3, 4, 50, 16, dtype=torch.float32)
    scale = quantize_int(x, 8, one_group(50), share_heads=True).scale
    assert torch.equal(scale, (x.abs().amax(dim=(1, 2, 3)) / 127).view(3, 1, 1).expand(3, 4, 50))


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_group_gives_zeros_with_scale_one(bits: int) -> None:
    """No 0/0, and no leak into the neighbour group."""
    x = torch.zeros(1, 1, 32, 16)
    x[:, :, 16:] = 3.0
    got = quantize_int(x, bits, query_groups(32, "warp", "wgmma", CPU))
    assert not got.values[:, :, :16].any() and (got.scale[:, :, :16] == 1).all()
    assert torch.allclose(dequantized(got)[:, :, 16:], x[:, :, 16:])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("constant", [1e-30, 6e-8, 1.0, -65504.0, 1e30, 3e38])
def test_constant_group_is_kept_to_a_rounding(constant: float, bits: int) -> None:
    """A constant becomes the end of the range whatever its size, from 1e-30 to the largest floats."""
    got = quantize_int(torch.full((1, 1, 20, 8), constant), bits, one_group(20))
    assert (got.values.abs() == (127 if bits == 8 else 7)).all()
    assert torch.allclose(dequantized(got), torch.tensor(constant), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("power", [-100, -20, 20, 100])
def test_epsilon_is_relative(power: int, bits: int) -> None:
    """Multiplying the input by a power of two multiplies the scales by it and leaves every integer alone."""
    x = normal(1, 2, 129, 32, dtype=torch.float32)
    groups = key_groups(129, "thread", "wgmma", CPU)
    plain, scaled = quantize_int(x, bits, groups), quantize_int(x * 2.0**power, bits, groups)
    assert torch.equal(plain.values, scaled.values)
    assert torch.equal(plain.scale * 2.0**power, scaled.scale)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_stays_in_its_row(bad: float) -> None:
    """A token with NaN or infinity gets scale NaN; the tokens that share its group quantize as if it were absent."""
    x = normal(1, 1, 32, 16, dtype=torch.float32)
    groups = query_groups(32, "warp", "wgmma", CPU)
    clean = x.clone()
    clean[0, 0, 5] = 0.0
    x[0, 0, 5, 3] = bad
    got, want = quantize_int(x, 8, groups), quantize_int(clean, 8, groups)
    others = torch.arange(32) != 5
    assert torch.isnan(got.scale[0, 0, 5]) and torch.isnan(dequantized(got)[0, 0, 5]).all()
    assert torch.equal(got.values[:, :, others], want.values[:, :, others])
    assert torch.equal(got.scale[:, :, others], want.scale[:, :, others])


# --- E4M3 -----------------------------------------------------------------------------------------------------


def test_e4m3_rounding_equals_torch_over_its_whole_range() -> None:
    """Bit-equal to float8_e4m3fn: a dense sweep, every representable number, every midpoint and its neighbours."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[torch.isfinite(every)].sort().values
    middles = (every[1:] + every[:-1]) / 2
    near = torch.cat([torch.nextafter(middles, torch.tensor(s)) for s in (-math.inf, math.inf)])
    dense = torch.linspace(-E4M3_MAX, E4M3_MAX, 1_000_001)
    small = torch.linspace(-(2.0**-5), 2.0**-5, 200_001)
    x = torch.cat([every, middles, near, dense, small, torch.tensor([1e-30, -1e-30, 2.0**-10, 2.0**-149])])
    assert torch.equal(round_e4m3(x), x.to(torch.float8_e4m3fn).float())


def test_e4m3_rounding_saturates_and_leaves_its_input_alone() -> None:
    """Above 448 the answer is 448, not NaN; the argument is read only."""
    x = torch.tensor([449.0, -500.0, 1e30, math.inf, -math.inf])
    before = x.clone()
    assert round_e4m3(x).tolist() == [448, -448, 448, 448, -448]
    assert torch.equal(x, before)


@pytest.mark.parametrize("power", [-20, 0, 20])
def test_value_channels_have_their_own_scale(power: int) -> None:
    """Per channel over all tokens: amax / 448, so that an outlier channel costs the others nothing."""
    x = normal(2, 2, 300, 8, dtype=torch.float32) * 2.0**power
    x[..., 3] *= 1e5
    values, scale = quantize_e4m3(x)
    assert torch.equal(scale, x.abs().amax(dim=-2, keepdim=True) / E4M3_MAX)
    assert values.abs().amax() == E4M3_MAX
    relative = ((values * scale - x).abs().sum(dim=-2) / x.abs().sum(dim=-2)).max()
    assert relative < 0.04  # a uniform rounding error of up to 1/16 averages 0.023


def test_zero_value_channel_stays_zero_and_non_finite_stays_in_place() -> None:
    """An all-zero channel divides nothing by zero; NaN and infinity become NaN and leave the scale alone."""
    x = normal(1, 2, 40, 8, dtype=torch.float32)
    x[:, 0, :, 5] = 0.0
    clean = quantize_e4m3(x)
    assert not clean[0][:, 0, :, 5].any() and (clean[1][:, 0, :, 5] == 1).all()
    dirty = x.clone()
    dirty[0, 0, 7, 2], dirty[0, 1, 9, 4] = math.nan, math.inf
    values, scale = quantize_e4m3(dirty)
    assert torch.isnan(values).nonzero().tolist() == [[0, 0, 7, 2], [0, 1, 9, 4]]
    untouched = torch.ones(2, 8, dtype=torch.bool)
    untouched[0, 2] = untouched[1, 4] = False
    assert torch.equal(scale[0, :, 0][untouched], clean[1][0, :, 0][untouched])


# --- smoothing ------------------------------------------------------------------------------------------------


def test_mean_counts_visible_tokens_only() -> None:
    """Hidden tokens, whatever they hold, neither enter the mean nor survive it."""
    x = normal(2, 3, 60, 8)
    seen = torch.rand(2, 1, 60, generator=torch.Generator().manual_seed(1)) < 0.5
    poisoned = x.masked_fill(~seen[..., None], math.nan)
    centred, mean = subtract_mean(poisoned, seen)
    for item in range(2):
        want = x[item][:, seen[item, 0]].double().mean(dim=-2)
        assert torch.allclose(mean[item, :, 0].double(), want, atol=1e-6)
        assert not centred[item][:, ~seen[item, 0]].any()
    assert torch.equal(subtract_mean(x, torch.ones_like(seen))[0], subtract_mean(x, None)[0])


def test_mean_of_nothing_is_zero() -> None:
    """No visible token: mean 0, all tokens 0, nothing divided by zero."""
    centred, mean = subtract_mean(torch.full((1, 2, 5, 4), math.nan), torch.zeros(1, 1, 5, dtype=torch.bool))
    assert not centred.any() and not mean.any()


def test_mean_of_a_channel_with_nan_is_zero() -> None:
    """A visible NaN would spread through the mean to every token: that channel is not centred instead."""
    x = normal(1, 1, 30, 4, dtype=torch.float32)
    x[0, 0, 3, 2] = math.nan
    centred, mean = subtract_mean(x, None)
    assert mean[0, 0, 0, 2] == 0 and torch.isfinite(mean).all()
    assert torch.isnan(centred).nonzero().tolist() == [[0, 0, 3, 2]]


def test_half_precision_input_is_averaged_in_float32() -> None:
    """65,504 + 65,504 overflows fp16; the mean of large fp16 values must not."""
    x = torch.full((1, 1, 500, 4), 60000.0, dtype=torch.float16)
    centred, mean = subtract_mean(x, None)
    assert torch.equal(mean, torch.full_like(mean, 60000.0)) and not centred.any()
    rows, block = subtract_block_mean(x, 64)
    assert torch.equal(block, torch.full_like(block, 60000.0)) and not rows.any()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_block_mean_is_the_mean_of_each_block_of_rows(length: int) -> None:
    """SageAttention2, section 3.1; the last block averages the rows that exist."""
    q = normal(1, 2, length, 8) + 4
    rows, mean = subtract_block_mean(q, 64)
    for start in range(0, length, 64):
        part = q[:, :, start : start + 64].float()
        want = part.mean(dim=-2, keepdim=True).expand_as(part)
        assert torch.allclose(mean[:, :, start : start + 64], want, atol=1e-5)
    assert torch.equal(rows, q.float() - mean)


def test_bad_query_row_stays_in_its_row_under_block_smoothing() -> None:
    """The mean of a block that holds one NaN row must not reach the other rows of the block."""
    q = normal(1, 1, 100, 8)
    q[0, 0, 10, 1] = math.nan
    rows, mean = subtract_block_mean(q, 64)
    others = torch.arange(100) != 10
    assert torch.isfinite(rows[:, :, others]).all() and torch.isfinite(mean[:, :, others]).all()
