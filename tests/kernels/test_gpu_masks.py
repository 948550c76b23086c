"""What the dense kernels do not know, against float64: masks, windows, sinks, softcap, sequences, padding."""

from __future__ import annotations

import math

import pytest
import torch

from oracle import attention
from zoo.gpu_cases import DEVICE, FP16, RECIPES, diagonal, forward, normal, poison, qkv, same
from zoo.kernel_calls import Extras

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("d", (64, 128))
@pytest.mark.parametrize("q_len,kv_len", ((300, 300), (1, 500), (77, 1031), (513, 200), (700, 700)))
@pytest.mark.parametrize(
    "left,right,is_causal", ((100, -1, True), (0, -1, True), (130, 40, False), (-1, 7, False), (5, 5, False))
)
def test_windows(recipe: str, d: int, q_len: int, kv_len: int, left: int, right: int, is_causal: bool) -> None:
    poison()
    q, k, v = qkv(2, 4, 2, q_len, kv_len, d)
    at = diagonal(q_len, kv_len)
    hidden = torch.zeros_like(at, dtype=torch.bool)
    if left >= 0:
        hidden |= at < -left
    if right >= 0 or is_causal:
        hidden |= at > (0 if is_causal else right)
    same(recipe, q, k, v, Extras(left=left, right=right), hidden, is_causal=is_causal)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", ((2, 4), (1, 4), (2, 1), (1, 1)))
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("q_len,kv_len,d", ((300, 430, 128), (130, 129, 64), (1, 77, 64), (257, 1031, 128)))
def test_bool_masks(recipe: str, shape: tuple[int, int], is_causal: bool, q_len: int, kv_len: int, d: int) -> None:
    """Random, block-wise, empty rows and keys that no row sees, which hold NaN."""
    poison()
    q, k, v = qkv(2, 4, 2, q_len, kv_len, d)
    generator = torch.Generator(DEVICE).manual_seed(1)
    mask = torch.rand(*shape, q_len, kv_len, device=DEVICE, generator=generator) > 0.4
    mask[..., 128:256] = True
    mask[..., : q_len // 2, 256:] = False
    mask[..., q_len // 3, :] = False
    unseen = [3, 50] if kv_len > 60 else [3]
    mask[..., unseen] = False
    hidden = ~mask
    if is_causal:
        hidden = hidden | (diagonal(q_len, kv_len) > 0)
    k[:, :, unseen] = math.nan
    v[:, :, unseen] = math.inf
    same(recipe, q, k, v, Extras(attn_mask=mask), hidden.expand(2, 4, -1, -1), is_causal=is_causal)


@pytest.mark.parametrize("recipe", RECIPES)
def test_bool_mask_with_lengths_and_window(recipe: str) -> None:
    q, k, v = qkv(2, 4, 4, 300, 430, 128)
    mask = torch.rand(1, 1, 300, 430, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)) > 0.3
    lens = torch.tensor([430, 201], dtype=torch.int32, device=DEVICE)
    at = (
        torch.arange(430, device=DEVICE) - torch.arange(300, device=DEVICE)[:, None] - (lens[:, None, None, None] - 300)
    )
    hidden = ~mask | (torch.arange(430, device=DEVICE) >= lens[:, None, None, None]) | (at < -150) | (at > 0)
    k[1, :, 201:] = math.nan
    same(recipe, q, k, v, Extras(attn_mask=mask, left=150), hidden.expand(2, 4, -1, -1), kv_lens=lens, is_causal=True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("q_len,kv_len,d", ((300, 430, 128), (70, 129, 64)))
@pytest.mark.parametrize("softcap", (0.0, 5.0))
def test_float_masks(recipe: str, dtype: torch.dtype, q_len: int, kv_len: int, d: int, softcap: float) -> None:
    """A bias with -inf, -10000 and whole tiles of zero; a transposed one; a broadcast one."""
    poison()
    q, k, v = qkv(2, 4, 2, q_len, kv_len, d)
    bias = normal(1, 4, q_len, kv_len, dtype=dtype, seed=5) * 2
    bias[..., 10:20] = -math.inf
    bias[..., 30:40] = -10000.0
    bias[..., 128:256] = 0.0
    bias[..., 5, :] = -math.inf
    hidden = (bias == -math.inf).expand(2, -1, -1, -1)
    same(recipe, q, k, v, Extras(attn_mask=bias, softcap=softcap), hidden, bias=bias)
    turned = bias.transpose(-1, -2).contiguous().transpose(-1, -2)
    same(recipe, q, k, v, Extras(attn_mask=turned, softcap=softcap), hidden, bias=bias)
    row = bias[:, :1, 6:7]
    same(recipe, q, k, v, Extras(attn_mask=row, softcap=softcap), (row == -math.inf).expand(2, 4, q_len, -1), bias=row)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("d", (64, 128))
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("softcap", (0.0, 20.0, 0.5))
def test_sinks_and_softcap(recipe: str, d: int, is_causal: bool, softcap: float) -> None:
    """With a bias on K's channels, which smoothing takes away and softcap and sinks must see; on V's, likewise."""
    q, k, v = qkv(2, 4, 2, 300, 300, d)
    k[..., 3] += 4.0
    v[..., 5] += 8.0
    sinks = torch.tensor([-100.0, 0.0, 5.0, 300.0], device=DEVICE)
    hidden = diagonal(300, 300) > 0 if is_causal else torch.zeros(300, 300, dtype=torch.bool, device=DEVICE)
    for given in (None, sinks) if softcap else (sinks,):
        same(recipe, q, k, v, Extras(softcap=softcap, sinks=given), hidden, is_causal=is_causal)
    same(recipe, q, k, v, Extras(sinks=sinks, left=64), hidden | (diagonal(300, 300) < -64), is_causal=is_causal)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("d", (64, 128))
@pytest.mark.parametrize("rows", (1, 2))
def test_key_padding(recipe: str, d: int, rows: int) -> None:
    """Padding anywhere, per item or shared, none and all, NaN in it; the same bits as the call without those keys."""
    poison()
    q, k, v = qkv(2, 4, 2, 200, 700, d)
    keep = torch.rand(rows, 700, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3)) > 0.5
    keep[0, :130] = False
    if rows == 2:
        keep[1] = False
    gone = (~keep).expand(2, -1)[:, None, :, None]
    k, v = k.masked_fill(gone, math.nan), v.masked_fill(gone, math.nan)
    same(recipe, q, k, v, Extras(key_padding=keep), (~keep)[:, None, None].expand(2, 4, 200, -1))
    left = keep[0].nonzero()[:, 0]
    out, _ = forward(q, k, v, scale=0.1, recipe=recipe, extras=Extras(key_padding=keep))
    alone, _ = forward(q[:1], k[:1, :, left], v[:1, :, left], scale=0.1, recipe=recipe)
    assert torch.equal(out[:1], alone)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("is_causal,top_left", ((False, False), (True, False), (True, True)))
def test_left_padding(recipe: str, is_causal: bool, top_left: bool) -> None:
    poison()
    q, k, v = qkv(3, 4, 2, 300, 300, 128)
    starts = torch.tensor([0, 131, 300], dtype=torch.int32, device=DEVICE)
    keys = torch.arange(300, device=DEVICE)
    k[1, :, :131], v[1, :, :131], k[2], v[2] = math.nan, math.nan, math.nan, math.nan
    hidden = (keys < starts[:, None])[:, None, None].expand(3, 4, 300, -1)
    if is_causal:
        hidden = hidden | (diagonal(300, 300) > 0)
    same(
        recipe, q, k, v, Extras(kv_starts=starts), hidden, kv_lens=300 - starts, is_causal=is_causal, top_left=top_left
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("d", (64, 128))
@pytest.mark.parametrize("is_causal,left", ((False, -1), (True, -1), (True, 100)))
def test_sequences(recipe: str, d: int, is_causal: bool, left: int) -> None:
    """Sequences laid end to end equal the same sequences alone, bit for bit; empty ones and tokens of none included."""
    poison()
    lengths_q, lengths_k = [5, 0, 300, 128, 1, 257, 64], [77, 10, 300, 0, 500, 257, 64]
    cu_q = torch.tensor([2, *lengths_q]).cumsum(0).int().to(DEVICE)
    cu_k = torch.tensor([3, *lengths_k]).cumsum(0).int().to(DEVICE)
    total_q, total_k = int(cu_q[-1]) + 4, int(cu_k[-1]) + 5
    q, k, v = (
        normal(1, total, h, d, seed=s).transpose(1, 2)
        for total, h, s in ((total_q, 4, 0), (total_k, 2, 1), (total_k, 2, 2))
    )
    extras = Extras(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, left=left)
    out, lse = forward(q, k, v, scale=0.1, recipe=recipe, is_causal=is_causal, return_lse=True, extras=extras)
    expected, expected_lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for i, (n, m) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        if n and m:
            a, b = int(cu_q[i]), int(cu_k[i])
            part = q[:, :, a : a + n], k[:, :, b : b + m], v[:, :, b : b + m]
            alone = Extras(left=m + n if left < 0 else left)
            expected[:, :, a : a + n], expected_lse[:, :, a : a + n] = forward(
                *part, scale=0.1, recipe=recipe, is_causal=is_causal, return_lse=True, extras=alone
            )
    assert torch.equal(out, expected)
    torch.testing.assert_close(
        lse, expected_lse, rtol=0, atol=2e-5
    )  # q . k_mean is added in another order in later tiles


@pytest.mark.parametrize("recipe", RECIPES)
def test_whole_mask_equals_no_mask(recipe: str) -> None:
    q, k, v = qkv(1, 2, 2, 700, 700, 128)
    everything = torch.ones(1, 1, 700, 700, dtype=torch.bool, device=DEVICE)
    for is_causal in (False, True):
        masked, _ = forward(q, k, v, scale=0.1, recipe=recipe, is_causal=is_causal, extras=Extras(attn_mask=everything))
        plain, _ = forward(q, k, v, scale=0.1, recipe=recipe, is_causal=is_causal)
        assert torch.equal(masked, plain)


def test_general_calls_under_a_graph() -> None:
    """Capture and replay with new values of the mask, the offsets and the inputs."""
    q, k, v = qkv(1, 4, 2, 300, 300, 128)
    mask = torch.ones(1, 1, 300, 300, dtype=torch.bool, device=DEVICE)
    run = lambda: forward(q, k, v, scale=0.1, extras=Extras(attn_mask=mask, left=200, right=200))[0]  # noqa: E731
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    mask[..., 100:] = False
    q.copy_(normal(1, 4, 300, 128, seed=9))
    graph.replay()
    assert torch.equal(out, run())


@pytest.mark.parametrize("recipe", RECIPES)
def test_hidden_keys_have_no_weight_beside_far_larger_scores(recipe: str) -> None:
    """Keys of one tile with scales a thousandfold apart: a row that sees one large negative score sees nothing else."""
    q, k, v = qkv(1, 1, 1, 64, 128, 64)
    q[:], k = 32.0, 0.0025 * k
    k[:, :, 2], k[:, :, 10] = -100.0, 100.0
    mask = torch.ones(1, 1, 64, 128, dtype=torch.bool, device=DEVICE)
    mask[..., 0, :] = False
    mask[..., 0, 2] = True
    out, _ = forward(q, k, v, scale=0.125, recipe=recipe, extras=Extras(attn_mask=mask))
    torch.testing.assert_close(out[0, 0, 0].float(), v[0, 0, 2].float(), rtol=0.07, atol=0.02)
    k[:, :, 77] = math.nan  # whoever sees it is lost; who sees nothing of the tile is not
    mask[..., 0, :] = False
    out, lse = forward(q, k, v, scale=0.125, recipe=recipe, return_lse=True, extras=Extras(attn_mask=mask))
    assert bool((out[0, 0, 0] == 0).all()) and float(lse[0, 0, 0]) == -math.inf
    assert bool(out[0, 0, 1].isnan().all())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("d", (64, 128, 256))
@pytest.mark.parametrize("how", ("mask", "window"))
def test_rows_beside_tiny_ones_keep_their_bits(recipe: str, d: int, how: str) -> None:
    """Hidden scores vanish by themselves, or, beside rows that are zero, tiny or NaN, by comparison: the same bits."""
    if recipe == FP16 and d > 128:
        pytest.skip("one recipe has head_dim 256")
    q, k, v = qkv(1, 2, 1, 300, 700, d)
    mask = torch.rand(1, 1, 300, 700, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(5)) > 0.7
    mask[..., 7::50, :] = False
    extras = Extras(attn_mask=mask) if how == "mask" else Extras(left=90, right=40)
    call = lambda: forward(q, k, v, scale=d**-0.5, recipe=recipe, return_lse=True, extras=extras)  # noqa: E731
    out, lse = call()
    for value in (0.0, 1e-7, math.nan):
        q[:, :, 3::8] = value
        changed, changed_lse = call()
        kept = torch.arange(300, device=DEVICE) % 8 != 3
        assert torch.equal(out[:, :, kept], changed[:, :, kept])
        assert torch.equal(lse[:, :, kept], changed_lse[:, :, kept])
        if value == 0.0:
            hidden = ~mask if how == "mask" else (diagonal(300, 700) > 40) | (diagonal(300, 700) < -90)
            same(recipe, q, k, v, extras, hidden)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_lowest_numbers_attend_evenly(recipe: str, dtype: torch.dtype) -> None:
    """A row whose added mask is the lowest number of its type everywhere: the mean of V, as torch has it."""
    q, k, v = qkv(1, 2, 2, 70, 130, 64)
    bias = torch.zeros(1, 1, 70, 130, dtype=dtype, device=DEVICE)
    bias[..., 3, :] = torch.finfo(dtype).min
    bias[..., 4, 60:] = torch.finfo(dtype).min
    out, _ = forward(q, k, v, scale=0.125, recipe=recipe, extras=Extras(attn_mask=bias))
    torch.testing.assert_close(out[:, :, 3].float(), v.float().mean(2), rtol=0.05, atol=0.02)
    alone, _ = attention(q[:, :, 4:5], k[:, :, :60], v[:, :, :60])
    torch.testing.assert_close(out[:, :, 4:5].double(), alone, rtol=0.1, atol=0.05)
