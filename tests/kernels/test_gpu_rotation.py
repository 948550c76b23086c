"""Rotated Q and K on the GPU: images equal to the emulator's in every byte, outputs to its bits but for what its band
leaves open, in every family of kernels and in pages; and the errors that rotation is for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle import KERNEL_TOLERANCE, assert_attention_close, attention, measure
from sage_patch.args import PageArgs
from sage_patch.attention import sage_attention
from sage_patch.backends import named
from sage_patch.evaluation.metrics import relative_l1
from sage_patch.kernels import ops
from sage_patch.pages import Pages
from sage_patch.reference.emulator import forward as hopper
from sage_patch.reference.emulator import forward_mma
from sage_patch.reference.emulator import pages as emulated_pages
from sage_patch.reference.emulator import prepare as mirror
from sage_patch.reference.emulator.accumulator import FP16 as TENSOR_CORE
from zoo import mma_library
from zoo.gpu_cases import DEVICE, FP8, FP16, INT4_RECIPES, RECIPES, forward, normal, poison, qkv
from zoo.kernel_calls import Extras, make_call

pytestmark = pytest.mark.gpu

DIMS = [40, 64, 72, 80, 96, 128, 256]
LENGTHS = [1, 77, 503, 1031]


def images_of(q: Tensor, k: Tensor, v: Tensor, recipe: str, **options: Any) -> mirror.Prepared:
    call = make_call(q, k, v, scale=1.0, recipe=recipe, rotated=True, **options)
    call.workspace.zero_()
    call.prepare()
    heads, blocks = k.shape[0] * k.shape[1], -(-k.shape[2] // 128)
    return mirror.from_workspace(call.workspace, heads, blocks, mirror.padded_dim(k.shape[3]), recipe.endswith("fp16"))


def same_images(got: mirror.Prepared, want: mirror.Prepared) -> None:
    for name, x in vars(want).items():  # any NaN is one
        bits = (y.nan_to_num(nan=0.12345) if y.is_floating_point() else y for y in (getattr(got, name), x))
        one, other = (y.contiguous().view(torch.uint8) for y in bits)
        assert torch.equal(one, other), name


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("length", LENGTHS)
def test_images_are_the_emulators(dim: int, length: int) -> None:
    for dtype, recipe in ((torch.bfloat16, FP8), (torch.float16, FP16 if dim <= 128 else FP8)):
        q, k, v = qkv(2, 2, 2, 1, length, dim, dtype)
        k[..., [1, dim // 2]] *= 20
        k += 3
        lens = torch.tensor([length, length // 2], dtype=torch.int32, device=DEVICE)
        got = images_of(q, k, v, recipe, kv_lens=lens)
        fp16 = recipe == FP16
        want = mirror.prepare(k, v, [length, length // 2], mirror.padded_dim(dim), fp16, True, rotated=True)
        same_images(got, want)


@pytest.mark.parametrize("dim", [44, 64, 80, 128])
def test_images_of_other_views_and_of_int4(dim: int) -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(1, 2, 2, 1, 300, dim))
    same_images(images_of(q, k, v, FP8), mirror.prepare(k, v, [300], mirror.padded_dim(dim), False, True, rotated=True))
    wide = torch.cat([k[..., :1], k], -1)[..., 1:]  # rows of odd addresses
    same_images(images_of(q, wide, v, FP8), images_of(q, k, v, FP8))
    want = mirror.prepare(k, v, [300], mirror.padded_dim(dim), False, True, int4=True, rotated=True)
    same_images(images_of(q, k, v, "qk_int4_pv_fp8"), want)


@pytest.mark.parametrize("factor", [0.0, 1e-38, 1e-33, 1e-20, 1e20, 1e37])
def test_images_of_any_size(factor: float) -> None:
    q, k, v = qkv(1, 2, 2, 1, 200, 128)
    k = (k.float() * factor).bfloat16()
    same_images(images_of(q, k, v, FP8), mirror.prepare(k, v, [200], 128, False, True, rotated=True))
    k = torch.full_like(k, factor)
    k[0, 1, 7, 3] = -factor
    same_images(images_of(q, k, v, FP8), mirror.prepare(k, v, [200], 128, False, True, rotated=True))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_images_where_the_tensor_cores_cut_sums(dim: int, dtype: torch.dtype) -> None:
    """Channels of a key differ by many powers of two, and so do keys: bits of the sums are lost, the same as in the
    emulator."""
    q, k, v = qkv(1, 2, 2, 1, 700, dim, dtype)
    least, most = (-40, 40) if dtype == torch.bfloat16 else (-14, 12)
    k = k * torch.randint(least, most, k.shape, device=DEVICE).float().exp2().to(dtype)
    same_images(images_of(q, k, v, FP8), mirror.prepare(k, v, [700], dim, False, True, rotated=True))
    k[0, 0, 5, 3], k[0, 1, 200, 60], k[0, 1, 201, 7] = math.inf, math.nan, -math.inf
    same_images(images_of(q, k, v, FP8), mirror.prepare(k, v, [700], dim, False, True, rotated=True))


def near(out: Tensor, lse: Tensor, s: hopper.Stages, most_lse: float = 1e-4) -> None:
    live = s.lse.isfinite()
    assert torch.equal(live, lse.cpu().isfinite())
    equal = (out.cpu() == s.out).float().mean()
    assert relative_l1(out.cpu()[live], s.out_float[live]) < 3e-3 and float(equal) > 0.95, float(equal)
    assert not live.any() or float((lse.cpu() - s.lse)[live].abs().max()) < most_lse


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dim", DIMS)
def test_outputs_are_the_emulators(recipe: str, dim: int) -> None:
    """The first tile of a CTA loads its Q by another way than later ones: many heads make CTAs take several."""
    if dim > 128 and recipe == FP16:
        return
    for dtype, n, kn, causal in ((torch.bfloat16, 200, 333, True), (torch.float16, 77, 130, False)):
        q, k, v = qkv(1, 2, 1, n, kn, dim, dtype)
        k = k + 3
        out, lse = forward(q, k, v, scale=dim**-0.5, recipe=recipe, is_causal=causal, return_lse=True, rotated=True)
        near(out, lse, hopper.emulate(q, k, v, recipe=recipe, scale=dim**-0.5, is_causal=causal, rotated=True))
        more = [x.repeat(1, 200, 1, 1) for x in (q, k, v)]
        many, many_lse = forward(*more, scale=dim**-0.5, recipe=recipe, is_causal=causal, return_lse=True, rotated=True)
        # q . k_mean of later tiles is summed in another order, which the output does not see
        assert torch.equal(many.view(200, 2, n, dim), out.expand(200, -1, -1, -1))
        assert float((many_lse.view(200, 2, n) - lse).abs().max()) < 1e-4


@pytest.mark.parametrize("recipe", [*RECIPES, *INT4_RECIPES])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_the_other_families_are_the_emulators(recipe: str, dim: int) -> None:
    q, k, v = qkv(2, 2, 1, 150, 270, dim)
    k = k + 3
    random = torch.rand(2, 2, 150, 270, device=DEVICE)
    asked: list[dict[str, Any]] = [
        {"attn_mask": random < 0.5},
        {"attn_mask": normal(1, 1, 150, 270, dtype=torch.float32)},
        {"left": 60, "right": 9},
        {"softcap": 15.0},
        {"sinks": normal(2, dtype=torch.float32)},
        {"key_padding": random[0, :, 0] < 0.5},
    ]
    for extras in asked:
        out, lse = forward(
            q, k, v, scale=dim**-0.5, recipe=recipe, return_lse=True, rotated=True, extras=Extras(**extras)
        )
        on_cpu = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in extras.items()}
        s = hopper.emulate(q, k, v, recipe=recipe, scale=dim**-0.5, rotated=True, **on_cpu)
        # A P between two E4M3 codes may fall either way: an eighth of one key, of the 70 that the window leaves a row.
        near(out, lse, s, 1 / 8 / 70)


@pytest.mark.parametrize("recipe", [*RECIPES, *INT4_RECIPES])
def test_packed_sequences(recipe: str) -> None:
    cu = torch.tensor([0, 5, 5, 300, 777], dtype=torch.int32, device=DEVICE)
    q, k, v = qkv(1, 4, 2, 777, 777, 64)
    extras = Extras(cu_seqlens_q=cu, cu_seqlens_k=cu)
    options: dict[str, Any] = {"scale": 0.125, "recipe": recipe, "is_causal": True, "rotated": True}
    out = forward(q, k, v, extras=extras, **options)[0]
    for a, b in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        if a < b:
            part = (x[:, :, a:b] for x in (q, k, v))
            assert torch.equal(out[:, :, a:b], forward(*part, **options)[0])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dim", DIMS)
def test_lengths_and_grouped_heads(recipe: str, dim: int) -> None:
    if dim > 128 and recipe == FP16:
        return
    poison()
    for n in LENGTHS:
        for kn, causal in ((n, True), (1031, False), (n, False)):
            q, k, v = qkv(2, 4, 2, n, kn, dim)
            out, lse = forward(q, k, v, scale=dim**-0.5, recipe=recipe, is_causal=causal, return_lse=True, rotated=True)
            want, want_lse = attention(q, k, v, is_causal=causal)
            assert_attention_close(out, want, KERNEL_TOLERANCE[recipe], what=f"{n} {kn} {causal}")
            assert float((lse - want_lse).abs().max()) < 0.15


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_view_equals_contiguous(recipe: str) -> None:
    for dim in (44, 64, 80, 128):
        q, k, v = qkv(2, 4, 2, 300, 500, dim)
        want = forward(q, k, v, scale=dim**-0.5, recipe=recipe, rotated=True)[0]
        views = [torch.cat([x[..., :1], x], -1)[..., 1:] for x in (q, k, v)]
        assert torch.equal(forward(*views, scale=dim**-0.5, recipe=recipe, rotated=True)[0], want)
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        assert torch.equal(forward(*views, scale=dim**-0.5, recipe=recipe, rotated=True)[0], want)


@pytest.mark.parametrize("recipe", RECIPES)
def test_zero_constant_tiny_and_huge(recipe: str) -> None:
    for dim in (64, 128):
        q, k, v = qkv(1, 2, 2, 300, 500, dim)
        mean = v.double().mean(2, keepdim=True).expand(1, 2, 300, dim)
        for kk in (torch.zeros_like(k), torch.full_like(k, 7.0), k * 1e-33, torch.full_like(k, 1e30)):
            out = forward(q, kk, v, scale=dim**-0.5, recipe=recipe, rotated=True)[0]
            assert float((out.double() - mean).abs().max()) < 0.02
        out = forward(torch.zeros_like(q), k, v, scale=dim**-0.5, recipe=recipe, rotated=True)[0]
        assert float((out.double() - mean).abs().max()) < 0.02
        out, lse = forward(q * 1e18, k * 1e18, v, scale=1.0, recipe=recipe, return_lse=True, rotated=True)
        assert bool(out.isfinite().all())
        q[0, 0, 17, 3], q[0, 1, 200, 5] = math.nan, math.inf
        out = forward(q, k, v, scale=dim**-0.5, recipe=recipe, rotated=True)[0]
        lost = out.isnan().all(-1)
        assert lost[0, 0, 17] and lost[0, 1, 200] and int(lost.sum()) == 2 and int(out.isnan().sum()) == 2 * dim


def turned_bias(k: Tensor, bias: float, pair: int) -> Tensor:
    """K with a bias in one pair of channels that rotary positions have turned."""
    dim = k.shape[-1]
    angle = torch.arange(k.shape[2], device=DEVICE) * 10000.0 ** (-2 * pair / dim)
    k = k.float()
    k[..., pair] += bias * angle.cos()
    k[..., pair + dim // 2] += bias * angle.sin()
    return k.bfloat16()


def error(q: Tensor, k: Tensor, v: Tensor, rotated: bool, recipe: str = FP8) -> float:
    out = forward(q, k, v, scale=q.shape[-1] ** -0.5, recipe=recipe, rotated=rotated)[0]
    return measure(out, attention(q, k, v)[0]).rel_l1


def test_the_errors_that_rotation_is_for() -> None:
    q, k, v = qkv(1, 4, 4, 1024, 4096, 128)
    loud = k.clone()
    loud[..., [3, 65]] *= 20
    assert error(q, loud, v, False) > 0.08 and error(q, loud, v, True) <= 0.045
    for bias, pair in ((20.0, 0), (30.0, 16), (30.0, 0), (60.0, 16)):
        assert error(q, turned_bias(k, bias, pair), v, True) <= 0.065, (bias, pair)
    shifted = k.clone()
    shifted[..., [3, 40, 77, 110]] += 40
    for recipe in RECIPES:
        for kk in (k, shifted):
            assert error(q, kk, v, True, recipe) <= 1.03 * error(q, kk, v, False, recipe)
    assert error(q, k, v, True) <= 0.0388


@pytest.mark.parametrize("dim", [40, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pages(dim: int, dtype: torch.dtype) -> None:
    if not (row := named(ops.backend_for(torch.device(DEVICE)))) or row.pages is None:
        return
    q, k, v = (x.cpu() for x in qkv(2, 4, 2, 70, 600, dim, dtype))
    k[..., [1, 20]] *= 20
    k += 3
    for pieces in ([600], [130, *[1] * 30, 200, 5, 235]):
        stores = []
        for device in ("cpu", DEVICE):
            pages = Pages(2, 2, dim, dtype, device, rotated=True)
            for x, y in zip(k.split(pieces, 2), v.split(pieces, 2), strict=True):
                pages.append(x.to(device), y.to(device))
            stores.append(pages)
        assert torch.equal(stores[0].records(0, 5), stores[1].records(0, 5).cpu())
    args = PageArgs(scale=dim**-0.5, return_lse=True)
    for rows in (1, 3, 70):
        want, want_lse = attention(q[:, :, -rows:], k, v, is_causal=True)
        out, lse = stores[1].attend(q[:, :, -rows:].to(DEVICE), args)
        near_out, near_lse = emulated_pages.emulate(stores[0], q[:, :, -rows:], args)
        assert lse is not None
        assert measure(out.cpu(), want).rel_l1 < 0.06 and relative_l1(out.cpu(), near_out) < 3e-3
        assert float((lse.cpu() - near_lse).abs().max()) < 1e-3
    assert torch.equal(stores[0].dequantize()[0], stores[1].dequantize()[0].cpu())


def test_lost_tokens_of_rotated_pages() -> None:
    _, k, v = (x.cpu() for x in qkv(1, 2, 2, 1, 300, 64))
    k[0, 0, 5, 3], k[0, 1, 200, 60], v[0, 0, 77, 1] = math.inf, math.nan, -math.inf
    found = []
    for device in ("cpu", DEVICE):
        pages = Pages(1, 2, 64, torch.bfloat16, device, rotated=True)
        pages.append(k.to(device), v.to(device))
        found.append(pages.records(0, 3).cpu())
    assert torch.equal(*found)


@pytest.mark.parametrize("recipe", RECIPES)
def test_prepare_and_forward_apart_and_under_a_graph(recipe: str) -> None:
    q, k, v = qkv(2, 4, 2, 300, 500, 128)
    call = make_call(q, k, v, scale=0.1, recipe=recipe, rotated=True)
    call.run()
    want = call.out.clone()
    call.out.zero_()
    call.prepare()
    call.forward()
    assert torch.equal(call.out, want)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call = make_call(q, k, v, scale=0.1, recipe=recipe, rotated=True)
        call.run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call.run()
    call.out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(call.out, want)


def test_the_public_function() -> None:
    q, k, v = qkv(1, 4, 2, 512, 512, 80)
    out = sage_attention(q, k, v, recipe="qk_int8_pv_fp8:rotate=hadamard,exp=exact", enable_gqa=True, is_causal=True)
    assert torch.equal(out, forward(q, k, v, scale=80**-0.5, recipe=FP8, is_causal=True, rotated=True)[0])


# --- the mma.sync family ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [40, 80, 128, 256])
def test_images_without_clusters(dim: int) -> None:
    q, k, v = qkv(2, 2, 2, 8, 1000, dim)
    want = images_of(q, k, v, FP8)
    with mma_library.on("mma"):
        same_images(images_of(q, k, v, FP8), want)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_mma_outputs_are_the_emulators(dim: int, recipe: str) -> None:
    q, k, v = qkv(1, 2, 1, 150, 333, dim, torch.float16)
    k = k + 3
    with mma_library.on("mma"):
        for asked in ({}, {"is_causal": True}, {"softcap": 15.0}):
            softcap = float(asked.get("softcap", 0.0))
            causal = bool(asked.get("is_causal", False))
            out, lse = forward(
                q, k, v, scale=dim**-0.5, recipe=recipe, is_causal=causal, return_lse=True, rotated=True,
                extras=Extras(softcap=softcap),
            )  # fmt: skip
            s = hopper.emulate(q, k, v, recipe=recipe, scale=dim**-0.5, is_causal=causal, softcap=softcap, rotated=True)
            want, want_lse = forward_mma.attend(s, recipe=recipe, softcap=softcap, accumulator=TENSOR_CORE)
            assert relative_l1(out.cpu(), want[..., :dim]) < 1e-3 and float((lse.cpu() - want_lse).abs().max()) < 1e-4


def test_int4_in_nibbles_is_int4_in_bytes() -> None:
    for dim in (64, 80, 128):
        q, k, v = qkv(2, 4, 2, 300, 700, dim)
        for recipe in INT4_RECIPES:
            found = []
            for backend in ("mma", "mma_int4"):
                with mma_library.on(backend):
                    found.append(
                        forward(q, k, v, scale=dim**-0.5, recipe=recipe, is_causal=True, return_lse=True, rotated=True)
                    )
            assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
