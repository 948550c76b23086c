"""INT4 and Q smoothing on the GPU: against float64, against the emulator, and under every feature.

Tight limits need queries that hardly differ inside a block of 64 rows (`alike`): their mean, and with it nearly every
logit, then comes from the correction. Queries of independent numbers hold the kernel to what INT4 can do.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle import attention, measure
from sage_patch.recipes import UnsupportedCall
from sage_patch.reference.emulator import forward as sm90
from sage_patch.reference.emulator import prepare as sm90_prepare
from zoo import golden_stages as golden
from zoo.gpu_cases import DEVICE, INT4_RECIPES, check, diagonal, forward, normal, poison, qkv, same
from zoo.kernel_calls import Extras, make_call
from zoo.mma_library import of_the_card

pytestmark = pytest.mark.gpu
recipes = pytest.mark.parametrize("recipe", INT4_RECIPES)
head_dims = pytest.mark.parametrize("d", (64, 128))


def alike(
    b: int, h: int, hk: int, n: int, kn: int, d: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """As gpu_cases.qkv; every 64 rows of Q share all but a tenth, K and V have offsets."""
    q, k, v = qkv(b, h, hk, n, kn, d, torch.float32)
    common = normal(b, h, (n + 63) // 64, d, dtype=torch.float32, seed=9)
    q = common.repeat_interleave(64, 2)[:, :, :n] + 0.1 * q
    k[..., 3] += 4.0
    v[..., d // 2] += 8.0
    return q.to(dtype), k.to(dtype), v.to(dtype)


@recipes
@head_dims
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("causal,top_left", ((False, False), (True, False), (True, True)))
def test_lengths(recipe: str, d: int, dtype: torch.dtype, causal: bool, top_left: bool) -> None:
    poison()
    for n, kn, g in itertools.product((1, 77, 503, 1031), (1, 77, 503, 1031), (1, 4)):
        q, k, v = qkv(2, 4, 4 // g, n, kn, d, dtype)
        # the log-sum-exp of a row with one key is off by the error of one logit
        check(recipe, q, k, v, causal=causal, top_left=top_left, lse_tolerance=1.2)


@recipes
@pytest.mark.parametrize("d", (8, 33, 40, 72, 80, 96, 112, 127))
def test_head_dims(recipe: str, d: int) -> None:
    poison()
    q, k, v = alike(2, 3, 3, 200, 333, d)
    for is_causal in (False, True):
        hidden = diagonal(200, 333) > 0 if is_causal else torch.zeros(200, 333, dtype=torch.bool, device=DEVICE)
        same(recipe, q, k, v, Extras(), hidden, is_causal=is_causal)


@recipes
@head_dims
@pytest.mark.parametrize("options", ({}, {"is_causal": True}, {"smooth_q": False}, {"smooth_k": False}), ids=str)
def test_outputs_are_the_emulators(recipe: str, d: int, options: dict[str, Any]) -> None:
    """Rows of a first tile, of later tiles, and a last tile that is not full; more tiles than the card has SMs."""
    for heads, n, kn in ((2, 300, 200), (150, 130, 70)):
        q, k, v = alike(1, heads, heads, n, kn, d)
        given = {n: x for n, x in options.items() if n != "is_causal"}
        out, lse = forward(q, k, v, scale=0.1, recipe=recipe, return_lse=True, **options)
        pick = slice(0, heads, max(1, heads - 1))
        s = sm90.emulate(
            q[:, pick], k[:, pick], v[:, pick], recipe=recipe, scale=0.1, is_causal=options.get("is_causal", False),
            **given,
        )  # fmt: skip
        want, want_lse = of_the_card(s, recipe)
        error = measure(out[:, pick].cpu(), want).rel_l1
        assert error < 1e-3, f"relative L1 {error}"
        live = want_lse.isfinite()
        assert float((lse[:, pick].cpu() - want_lse)[live].abs().max()) < 1e-4


@pytest.mark.parametrize("case,recipe", [c for c in golden.CALLS if c[0].int4], ids=lambda x: getattr(x, "name", x))
def test_golden_cases(case: golden.Case, recipe: str) -> None:
    """Masks, padding, softcap, sinks and sequences as the emulator forms them."""
    poison()
    tensors, options = golden.on_gpu(case)
    out, lse = forward(*tensors, recipe=recipe, **options)
    for part in golden.emulated(case, recipe):
        got, got_lse = out[:, :, part.rows].cpu(), lse[:, :, part.rows].cpu()
        sinks = None if case.sinks is None else torch.tensor(case.sinks)
        want, want_lse = of_the_card(part.stages, recipe, sinks=sinks, softcap=case.softcap)
        live = want_lse.isfinite()
        assert torch.equal(got_lse.isfinite(), live) and not got[~live].any()
        if bool(live.any()):
            assert measure(got, want).rel_l1 < 1e-3
            assert float((got_lse - want_lse)[live].abs().max()) < 1e-4


@recipes
@head_dims
def test_means_and_corrections(recipe: str, d: int) -> None:
    """The two arrays of the workspace, the last ones in it, bit for bit."""
    n, kn = 2200, 300  # more than one unit of 2048 rows
    q, k, v = alike(1, 3, 3, n, kn, d, torch.float16)
    call = make_call(q, k, v, scale=0.1, recipe=recipe)
    call.run()
    blocks, width = (n + 63) // 64, 384
    mean = sm90_prepare.query_means(q.cpu(), d)
    correction_bytes, mean_bytes = (3 * blocks * x * 4 for x in (width, d))
    raw = call.workspace.cpu()
    at = len(raw) - (correction_bytes + 255) // 256 * 256
    got = raw[at : at + correction_bytes].view(torch.float32).view(1, 3, blocks, width)
    at -= (mean_bytes + 255) // 256 * 256
    assert torch.equal(raw[at : at + mean_bytes].view(torch.float32).view(1, 3, blocks, d), mean)
    prepared = sm90_prepare.prepare(k, v, [kn], d, recipe.endswith("fp16"), True, int4=True)
    want = sm90_prepare.corrections(mean, k.cpu(), torch.tensor([kn]), prepared.k_mean.view(1, 3, d), 0.1)
    assert torch.equal(got, want)
    images = sm90_prepare.from_workspace(raw, 3, 3, d, recipe.endswith("fp16"))
    assert torch.equal(images.k, prepared.k) and torch.equal(images.k_scale, prepared.k_scale)


@recipes
@head_dims
@pytest.mark.parametrize("q_len,kv_len", ((300, 300), (1, 500), (77, 1031), (513, 200)))
@pytest.mark.parametrize("left,right,is_causal", ((100, -1, True), (130, 40, False), (-1, 7, False), (5, 5, False)))
def test_windows(recipe: str, d: int, q_len: int, kv_len: int, left: int, right: int, is_causal: bool) -> None:
    poison()
    q, k, v = alike(2, 4, 2, q_len, kv_len, d)
    at = diagonal(q_len, kv_len)
    hidden = at > (0 if is_causal else right if right >= 0 else kv_len)
    if left >= 0:
        hidden = hidden | (at < -left)
    same(recipe, q, k, v, Extras(left=left, right=right), hidden, is_causal=is_causal)


@recipes
@head_dims
@pytest.mark.parametrize("dtype", (torch.bool, torch.float16, torch.float32))
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("softcap", (0.0, 5.0))
def test_masks(recipe: str, d: int, dtype: torch.dtype, is_causal: bool, softcap: float) -> None:
    """Empty rows; keys that no row sees, which hold NaN as does their correction; tiles of zero bias; transposed."""
    poison()
    q, k, v = alike(2, 4, 2, 257, 430, d)
    seen = torch.rand(2, 4, 257, 430, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)) > 0.4
    seen[..., 128:256] = True
    seen[..., :128, 256:] = False
    seen[..., 85, :] = False
    seen[..., [3, 50]] = False
    k[:, :, [3, 50]], v[:, :, [3, 50]] = math.nan, math.inf
    bias, mask = None, seen
    if dtype != torch.bool:
        bias = normal(2, 4, 257, 430, dtype=dtype, seed=5) * 2
        bias[..., 128:256] = 0.0
        mask = bias = bias.masked_fill(~seen, -math.inf)
    hidden = ~seen | (diagonal(257, 430) > 0) if is_causal else ~seen
    for given in (mask, mask.transpose(-1, -2).contiguous().transpose(-1, -2)):
        same(recipe, q, k, v, Extras(attn_mask=given, softcap=softcap), hidden, bias=bias, is_causal=is_causal)


@recipes
@head_dims
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("softcap", (0.0, 20.0, 0.5))
def test_sinks_and_softcap(recipe: str, d: int, is_causal: bool, softcap: float) -> None:
    q, k, v = alike(2, 4, 2, 300, 300, d)
    sinks = torch.tensor([-100.0, 0.0, 5.0, 300.0], device=DEVICE)
    hidden = diagonal(300, 300) > 0 if is_causal else torch.zeros(300, 300, dtype=torch.bool, device=DEVICE)
    for given in (None, sinks):
        same(recipe, q, k, v, Extras(softcap=softcap, sinks=given), hidden, is_causal=is_causal)


@recipes
@head_dims
def test_keys_that_do_not_exist(recipe: str, d: int) -> None:
    """Padding anywhere, lengths, padding on the left, NaN in all of them; the same bits as without those keys."""
    poison()
    q, k, v = alike(2, 4, 2, 200, 700, d)
    keep = torch.rand(2, 700, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3)) > 0.5
    keep[0, :130], keep[1] = False, False
    token = torch.arange(700, device=DEVICE)
    lens, starts = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([700, 77], [0, 131]))
    for there, extras, kv_lens in (
        (keep, Extras(key_padding=keep), None),
        (token < lens[:, None], Extras(), lens),
        (token >= starts[:, None], Extras(kv_starts=starts), 700 - starts),
    ):
        gone = ~there[:, None, :, None]
        kk, vv = k.masked_fill(gone, math.nan), v.masked_fill(gone, math.nan)
        same(recipe, q, kk, vv, extras, ~there[:, None, None].expand(2, 4, 200, -1), kv_lens=kv_lens)
        out, _ = forward(q, kk, vv, scale=0.1, recipe=recipe, extras=extras, kv_lens=kv_lens)
        left = there[0].nonzero()[:, 0]
        assert torch.equal(out[:1], forward(q[:1], k[:1, :, left], v[:1, :, left], scale=0.1, recipe=recipe)[0])


@recipes
@head_dims
@pytest.mark.parametrize("is_causal", (False, True))
def test_sequences(recipe: str, d: int, is_causal: bool) -> None:
    """Equal to the same sequences alone: their blocks of 64 rows begin where they begin. One is longer than a unit."""
    poison()
    lengths_q, lengths_k = [5, 0, 300, 128, 1, 2300, 64], [77, 10, 300, 0, 500, 257, 64]
    cu_q = torch.tensor([2, *lengths_q]).cumsum(0).int().to(DEVICE)
    cu_k = torch.tensor([3, *lengths_k]).cumsum(0).int().to(DEVICE)
    q, k, v = alike(1, 4, 2, int(cu_q[-1]) + 4, int(cu_k[-1]) + 5, d)
    extras = Extras(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    out, lse = forward(q, k, v, scale=0.1, recipe=recipe, is_causal=is_causal, return_lse=True, extras=extras)
    expected, expected_lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for i, (n, m) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        if n and m:
            a, b = int(cu_q[i]), int(cu_k[i])
            part = q[:, :, a : a + n], k[:, :, b : b + m], v[:, :, b : b + m]
            expected[:, :, a : a + n], expected_lse[:, :, a : a + n] = forward(
                *part, scale=0.1, recipe=recipe, is_causal=is_causal, return_lse=True
            )
    assert torch.equal(out, expected)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-5)  # q . k_mean in another order in later tiles


@recipes
@head_dims
def test_any_view_equals_contiguous(recipe: str, d: int) -> None:
    q, k, v = alike(2, 4, 2, 333, 333, d)
    want, want_lse = forward(q, k, v, scale=0.1, recipe=recipe, return_lse=True)

    def nhd(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def shifted(x: Tensor) -> Tensor:  # rows that are not 16-byte aligned
        flat = torch.full((x.numel() + 16,), math.nan, dtype=x.dtype, device=DEVICE)
        flat[1 : 1 + x.numel()] = x.flatten()
        return flat[1 : 1 + x.numel()].view(x.shape)

    for a, b, c in itertools.product((nhd, shifted, lambda x: x), repeat=3):
        got, lse = forward(a(q), b(k), c(v), scale=0.1, recipe=recipe, return_lse=True)
        assert torch.equal(got, want) and torch.equal(lse, want_lse)


@recipes
def test_equal_rows_have_exact_logits(recipe: str) -> None:
    q, k, v = alike(1, 2, 2, 1, 1031, 128)
    out, lse = forward(q.expand(-1, -1, 192, -1).contiguous(), k, v, scale=0.1, recipe=recipe, return_lse=True)
    ref, ref_lse = attention(q, k, v, scale=0.1)
    assert measure(out, ref.expand_as(out)).rel_l1 < (0.06 if "fp8" in recipe else 0.01)
    assert float((lse - ref_lse).abs().max()) < (0.05 if "fp8" in recipe else 1e-3)


@recipes
@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_a_bad_query_row_stays_alone(recipe: str, value: float) -> None:
    q, k, v = alike(1, 2, 2, 300, 500, 128)
    q[0, 0, 17, 3], q[0, 1, 200, 5] = value, value
    bad = forward(q, k, v, scale=0.1, recipe=recipe)[0].isnan().any(-1)
    assert bad.nonzero().tolist() == [[0, 0, 17], [0, 1, 200]]


@recipes
def test_prepare_and_forward_apart_and_under_a_graph(recipe: str) -> None:
    """Q's part belongs to `forward`: one prepared K and V serve many Q. A replay reads the tensors anew."""
    q, k, v = alike(1, 4, 2, 300, 430, 128)
    call = make_call(q, k, v, scale=0.1, recipe=recipe)
    call.run()
    first = call.out.clone()
    call.prepare()
    for _ in range(2):
        call.out.zero_()
        call.forward()
        assert torch.equal(call.out, first)
    q.neg_()
    call.forward()
    assert torch.equal(call.out, forward(q, k, v, scale=0.1, recipe=recipe)[0]) and not torch.equal(call.out, first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(q, k, v, scale=0.1, recipe=recipe)[0]
    q.neg_()
    graph.replay()
    assert torch.equal(out, first)


@recipes
def test_int8_with_smoothed_queries(recipe: str) -> None:
    """Q smoothing by itself, as the variants smooth=q and smooth=qk of the INT8 recipes ask for it."""
    q, k, v = alike(1, 4, 2, 300, 430, 64)
    eight = recipe.replace("int4", "int8")
    for smooth_k in (False, True):
        out, _ = forward(q, k, v, scale=0.125, recipe=eight, smooth_q=True, smooth_k=smooth_k)
        s = sm90.emulate(q, k, v, recipe=eight, scale=0.125, smooth_q=True, smooth_k=smooth_k)
        assert measure(out.cpu(), of_the_card(s, eight)[0]).rel_l1 < 1e-3


def test_wide_heads_are_refused() -> None:
    q, k, v = qkv(1, 2, 2, 64, 64, 192)
    wide: tuple[dict[str, Any], ...] = ({"recipe": "qk_int4_pv_fp8"}, {"recipe": "qk_int8_pv_fp8", "smooth_q": True})
    for options in wide:
        with pytest.raises(UnsupportedCall, match="head_dim 192: 1 to 128"):
            forward(q, k, v, scale=0.1, **options)
