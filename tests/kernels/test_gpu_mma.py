"""The mma.sync family on a Hopper card, through a library of the tests: right against float64, the emulator's numbers,
the Hopper kernels' images. `SAGE_PATCH_TEST_BACKEND=mma pytest -m gpu` runs all other tests of the card with it too."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from sage_patch.reference.emulator import forward as hopper
from sage_patch.reference.emulator import forward_mma
from sage_patch.reference.emulator import prepare as mirror
from sage_patch.reference.emulator.accumulator import FP16 as TENSOR_CORE
from zoo import mma_library
from zoo.gpu_cases import DEVICE, FP8, FP16, RECIPES, check, diagonal, forward, normal, poison, qkv, same
from zoo.kernel_calls import Extras, make_call

pytestmark = pytest.mark.gpu


@pytest.fixture(params=mma_library.BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with mma_library.on(request.param):
        yield request.param


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 200, 256])
def test_dense_and_causal(backend: str, dim: int, recipe: str) -> None:
    poison()
    for dtype, (n, kn) in ((torch.float16, (300, 700)), (torch.bfloat16, (700, 300)), (torch.bfloat16, (1, 1))):
        for causal in (False, True):
            check(recipe, *qkv(2, 4, 2, n, kn, dim, dtype), causal=causal, lse_tolerance=0.1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_lengths_of_every_residue(backend: str, recipe: str) -> None:
    for kn in range(1, 301, 7):
        q, k, v = qkv(2, 2, 1, 130, 300, 128)
        for x in (k, v):
            x[0, :, kn:] = math.nan
            x[1] = math.nan
        check_lens = [kn, 0]
        lens = torch.tensor(check_lens, dtype=torch.int32, device=DEVICE)
        out, lse = forward(q, k, v, scale=128**-0.5, recipe=recipe, kv_lens=lens, return_lse=True)
        assert bool(out.isfinite().all()) and bool((out[1] == 0).all()) and bool((lse[1] == -math.inf).all())
        check(recipe, q[:1], k[:1, :, :kn], v[:1, :, :kn])


@pytest.mark.parametrize("recipe", RECIPES)
def test_masks_windows_sinks_and_softcap(backend: str, recipe: str) -> None:
    q, k, v = qkv(2, 4, 2, 300, 700, 128)
    d = diagonal(300, 700)
    same(recipe, q, k, v, Extras(left=100, right=30), (d < -100) | (d > 30))
    hidden = torch.rand(2, 4, 300, 700, device=DEVICE) < 0.4
    hidden[:, :, 9] = True
    same(recipe, q, k, v, Extras(attn_mask=~hidden), hidden)
    bias = normal(1, 1, 300, 700, dtype=torch.float32)
    same(recipe, q, k, v, Extras(attn_mask=bias), torch.zeros_like(bias, dtype=torch.bool), bias=bias)
    sinks = normal(4, dtype=torch.float32)
    same(recipe, q, k, v, Extras(sinks=sinks), d > 0, is_causal=True)
    same(recipe, q, k, v, Extras(softcap=15.0), d > 0, is_causal=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_packed_sequences(backend: str, recipe: str) -> None:
    cu = torch.tensor([0, 5, 5, 300, 777], dtype=torch.int32, device=DEVICE)
    q, k, v = qkv(1, 4, 2, 777, 777, 64)
    extras = Extras(cu_seqlens_q=cu, cu_seqlens_k=cu)
    out, lse = forward(q, k, v, scale=0.125, recipe=recipe, is_causal=True, return_lse=True, extras=extras)
    for a, b in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        if a == b:
            continue
        one, one_lse = forward(
            q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], scale=0.125, recipe=recipe, is_causal=True, return_lse=True
        )
        assert torch.equal(out[:, :, a:b], one) and torch.equal(lse[:, :, a:b], one_lse)


def test_int4_in_nibbles_is_int4_in_bytes() -> None:
    for dim in (64, 128):
        q, k, v = qkv(2, 4, 2, 300, 700, dim)
        for recipe in ("qk_int4_pv_fp8", "qk_int4_pv_fp16"):
            found = []
            for backend in ("mma", "mma_int4"):
                with mma_library.on(backend):
                    found.append(forward(q, k, v, scale=dim**-0.5, recipe=recipe, is_causal=True, return_lse=True))
            assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(("dim", "recipe"), [(64, FP8), (64, FP16), (128, FP8), (128, FP16), (256, FP8)])
def test_images_are_those_of_clusters(dim: int, recipe: str) -> None:
    for kv_len, dtype in ((1, torch.float16), (1000, torch.bfloat16), (5000, torch.float16)):
        q, k, v = qkv(2, 2, 2, 8, kv_len, dim, dtype)
        images = []
        for backend in (None, "mma"):
            call = make_call(q, k, v, scale=dim**-0.5, recipe=recipe)
            if backend:
                with mma_library.on(backend):
                    call = make_call(q, k, v, scale=dim**-0.5, recipe=recipe)
            call.workspace.zero_()
            call.prepare()
            images.append(mirror.from_workspace(call.workspace, 4, -(-kv_len // 128), dim, recipe == FP16))
        for name, x in vars(images[0]).items():
            assert torch.equal(x.view(torch.uint8), getattr(images[1], name).view(torch.uint8)), name


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"softcap": 15.0}], ids=["dense", "causal", "softcap"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_emulator_forms_the_same_numbers(recipe: str, options: dict[str, float]) -> None:
    q, k, v = qkv(1, 2, 1, 150, 333, 64, torch.float16)
    softcap = options.get("softcap", 0.0)
    asked = {"is_causal": bool(options.get("is_causal")), "softcap": softcap}
    stages = hopper.emulate(q, k, v, recipe=recipe, scale=0.125, **asked)
    # A Hopper card multiplies E4M3 in mma.sync as FP16.
    want, want_lse = forward_mma.attend(stages, recipe=recipe, softcap=softcap, accumulator=TENSOR_CORE)
    with mma_library.on("mma"):
        extras = Extras(softcap=softcap)
        out, lse = forward(
            q, k, v, scale=0.125, recipe=recipe, is_causal=asked["is_causal"], return_lse=True, extras=extras
        )
    error = (out.cpu().float() - want).abs().sum() / want.abs().sum()
    assert float(error) < 1e-3 and float((lse.cpu() - want_lse).abs().max()) < 1e-4
