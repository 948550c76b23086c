"""The pre-processing on the GPU: images, scales and vectors are the emulator's bit for bit, in every mode; values
beyond what a channel's samples promise are repaired; keys that no row sees may hold anything; graphs replay on new
values.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle import KERNEL_TOLERANCE, assert_attention_close, attention
from sage_patch.reference.emulator import prepare as mirror
from sage_patch.reference.emulator.visible import present
from zoo.gpu_cases import DEVICE, FP8, FP16, RECIPES, forward, normal, poison, qkv
from zoo.kernel_calls import Extras, make_call

pytestmark = pytest.mark.gpu
WIDTHS = [(64, FP8), (64, FP16), (128, FP8), (128, FP16), (256, FP8)]


def images(key: Tensor, value: Tensor, recipe: str, heads: int, **options: Any) -> mirror.Prepared:
    """What a call on these keys and values writes, from a workspace full of ones."""
    query = normal(key.shape[0], key.shape[1], 70, key.shape[-1], dtype=key.dtype)
    call = make_call(query, key, value, scale=1.0, recipe=recipe, **options)
    call.workspace.fill_(255)
    call.prepare()
    torch.cuda.synchronize()
    dim, blocks = mirror.padded_dim(key.shape[-1]), -(-key.shape[2] // 128)
    return mirror.from_workspace(call.workspace, heads, blocks, dim, recipe.endswith("fp16"))


def same(got: mirror.Prepared, want: mirror.Prepared, keys: list[int], what: str = "") -> None:
    """keys: of each head. Blocks behind them are nobody's."""
    for head, count in enumerate(keys):
        used = -(-count // 128)
        for name in ("k", "k_scale", "v"):
            a, b = (getattr(x, name)[head, :used].float() for x in (got, want))
            if name == "v" and got.v.dtype == torch.uint8:
                a, b = (torch.where((x.long() & 127) == 127, 127.0, x) for x in (a, b))
            assert torch.equal(a.nan_to_num(nan=1e9), b.nan_to_num(nan=1e9)), (
                f"{what} {name}, head {head}: {int((a != b).sum())} of {a.numel()} differ"
            )
    for name in ("k_mean", "v_mean", "v_scale"):
        a, b = getattr(got, name), getattr(want, name)
        assert torch.allclose(a, b, rtol=0, atol=0, equal_nan=True), f"{what} {name}"


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("width", "recipe"), WIDTHS)
def test_every_shape(width: int, recipe: str, dtype: torch.dtype, shift: int) -> None:
    poison()
    dims = {64: (64, 40), 128: (128, 96, 72), 256: (256, 200)}[width]
    for d, n in itertools.product(dims, (1, 64, 65, 127, 128, 300, 1031, 5000)):
        _, k, v = qkv(2, 2, 2, 16, n, d, dtype)
        k, v = k + 3 * normal(1, 1, 1, d, dtype=dtype, seed=7), v * 2 - 1
        v[..., 3] = 0.5
        lens = [n, max(1, n // 2)]
        for x in (k, v):
            x[1, :, lens[1] :] = math.nan
        k, v = (torch.cat([x.flatten()[:shift], x.flatten()])[shift:].view(x.shape) for x in (k, v))
        got = images(k, v, recipe, 4, kv_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE))
        want = mirror.prepare(k, v, lens, width, recipe == FP16, True)
        same(got, want, [lens[0]] * 2 + [lens[1]] * 2, f"d={d} n={n}")


@pytest.mark.parametrize("recipe", ["qk_int4_pv_fp8", "qk_int4_pv_fp16"])
@pytest.mark.parametrize("dim", [64, 128])
def test_int4(dim: int, recipe: str) -> None:
    _, k, v = qkv(1, 2, 2, 16, 700, dim)
    want = mirror.prepare(k, v, [700], dim, recipe.endswith("fp16"), True, int4=True)
    same(images(k, v, recipe, 2), want, [700] * 2)


@pytest.mark.parametrize(("width", "recipe"), WIDTHS)
def test_padding_starts_and_masks(width: int, recipe: str) -> None:
    """Keys that an index leaves out, that lie before a start, or that no row sees: NaN."""
    poison()
    n = 900
    _, k, v = (x.cpu() for x in qkv(2, 2, 2, 16, n, width))
    keep = torch.rand(2, n, generator=torch.Generator().manual_seed(1)) < 0.6
    keep[:, 200:400] = False
    starts, lens = [7, 130], [700, 333]
    for kind in ("padding", "starts", "mask"):
        there = keep.clone()
        if kind == "starts":
            first, count = (torch.tensor(x)[:, None] for x in (starts, lens))
            there = (torch.arange(n) >= first) & (torch.arange(n) < first + count)
        if kind == "mask":
            there[1] = there[0]
        kk, vv = (torch.where(there[:, None, :, None], x, math.nan) for x in (k, v))
        options: dict[str, Any] = {}
        if kind == "padding":
            options["extras"] = Extras(key_padding=there.to(DEVICE))
        elif kind == "starts":
            options["kv_lens"] = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
            options["extras"] = Extras(kv_starts=torch.tensor(starts, dtype=torch.int32, device=DEVICE))
        elif width == 256 and recipe == FP16:
            continue
        else:
            options["extras"] = Extras(attn_mask=there[:1, None, None].expand(1, 1, 70, n).to(DEVICE))
        got = images(kk.to(DEVICE), vv.to(DEVICE), recipe, 4, **options)
        if kind == "mask":
            want = mirror.prepare(kk, vv, [n, n], width, recipe == FP16, True, there)
            same(got, want, [n] * 4, kind)
            continue
        found, values, keys = present(
            kk, vv, lens if kind == "starts" else None, starts if kind == "starts" else None,
            there if kind == "padding" else None,
        )  # fmt: skip
        want = mirror.prepare(found, values, keys.tolist(), width, recipe == FP16, True)
        same(got, want, keys.repeat_interleave(2).tolist(), kind)


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("width", "recipe"), WIDTHS)
def test_values_beyond_the_sample(width: int, recipe: str, dtype: torch.dtype, shift: int) -> None:
    """Outliers that are no samples, channels whose samples are all the same, heavy tails, NaN and infinity."""
    n = 3000
    _, k, v = qkv(1, 6, 6, 16, n, width, dtype)
    sampled = set((torch.arange(64) * n // 64).tolist())
    apart = [t for t in range(n) if t not in sampled]
    v[0, 0, apart[7], 3], v[0, 0, apart[-1], width - 1] = 3000.0, -2000.0
    v[0, 1, apart[900], 5], v[0, 1, 0, 6] = -math.inf, math.inf
    v[0, 2, apart[30]], v[0, 2, 0, 9] = math.nan, math.nan
    v[0, 3, :, 5], v[0, 3, :, 6] = 0.5, 0.0
    v[0, 3, apart[50], 5] = 0.75
    v[0, 4] = torch.distributions.Cauchy(0.0, 1.0).sample(v[0, 4].shape).clamp(-3e4, 3e4).to(dtype)
    v[0, 5] = (v[0, 5].float() * 1e-6).to(dtype)
    k[0, 1, 77, 3], k[0, 2, 300, 4] = math.inf, math.nan
    kk, vv = (torch.cat([x.flatten()[:shift], x.flatten()])[shift:].view(x.shape) for x in (k, v))
    want = mirror.prepare(k, v, [n], width, recipe == FP16, True)
    for _ in range(2):
        same(images(kk, vv, recipe, 6), want, [n] * 6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_packed_sequences_are_repaired(recipe: str) -> None:
    cu = torch.tensor([3, 40, 40, 1300, 1430, 5000], dtype=torch.int32, device=DEVICE)
    q, k, v = qkv(1, 4, 2, 5010, 5010, 64)
    v[0, 1, 77, 9], v[0, 0, 4000, 60] = 500.0, -700.0
    extras = Extras(cu_seqlens_q=cu, cu_seqlens_k=cu)
    out, lse = forward(q, k, v, scale=0.125, recipe=recipe, return_lse=True, extras=extras)
    for a, b in itertools.pairwise(cu.tolist()):
        if a < b:
            alone, alone_lse = forward(
                *(x[:, :, a:b] for x in (q, k, v)), scale=0.125, recipe=recipe, return_lse=True,
                extras=Extras(left=1 << 20),
            )  # fmt: skip
            assert torch.equal(out[:, :, a:b], alone) and torch.equal(lse[:, :, a:b], alone_lse)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_replays_on_values_that_overflow(recipe: str) -> None:
    q, k, v = qkv(1, 4, 4, 300, 2000, 128)
    call = make_call(q, k, v, scale=0.125, recipe=recipe)
    call.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = make_call(q, k, v, scale=0.125, recipe=recipe)
        captured.run()
    for value in (3000.0, 1.0, -math.inf):
        v[0, 1, 5, 7] = value
        captured.out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        want = forward(q, k, v, scale=0.125, recipe=recipe)[0]
        assert torch.equal(captured.out.view(torch.int16), want.view(torch.int16))
        if math.isfinite(value):
            assert_attention_close(want, attention(q, k, v, scale=0.125)[0], KERNEL_TOLERANCE[recipe])
        else:
            assert bool(want[0, 1, :, 7].isnan().all()) and int(want.isnan().sum()) == 300


def test_same_inputs_same_bits() -> None:
    _, k, v = qkv(2, 8, 8, 16, 4096, 128)
    v[0, 3, 77, 5] = 900.0
    first = images(k, v, FP8, 16)
    for _ in range(5):
        again = images(k, v, FP8, 16)
        for name, x in vars(first).items():
            assert torch.equal(x.view(torch.uint8), getattr(again, name).view(torch.uint8)), name
