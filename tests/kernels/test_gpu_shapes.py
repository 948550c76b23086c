"""The compiled kernels on the GPU: images bit for bit, every length, any view, offsets beyond 2^31."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from oracle import KERNEL_TOLERANCE, assert_attention_close, attention, measure
from sage_patch.kernels import library
from sage_patch.reference.emulator import prepare as mirror
from zoo.gpu_cases import DEVICE, FP8, FP16, RECIPES, check, forward, normal, poison, qkv
from zoo.kernel_calls import make_call

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("smooth_v", [True, False])
def test_images_equal_the_mirror(dtype: torch.dtype, recipe: str, smooth_v: bool) -> None:
    poison()
    wide = ((256, 129), (200, 300), (256, 1031)) if recipe == FP8 else ()
    for d, n in ((64, 1), (64, 300), (128, 129), (128, 2500), (40, 77), (96, 1031), (72, 64), *wide):
        q, k, v = qkv(2, 2, 2, 16, n, d, dtype)
        k, v = k + 3 * normal(1, 1, 1, d, dtype=dtype, seed=7), v * 2 - 1
        v[..., 3] = 0.5
        lens = [n, max(1, n // 2)]
        call = make_call(
            q,
            k,
            v,
            scale=1.0,
            recipe=recipe,
            smooth_v=smooth_v,
            kv_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        )
        call.prepare()
        dim, fp16 = mirror.padded_dim(d), recipe == FP16
        got = mirror.from_workspace(call.workspace, 4, (n + 127) // 128, dim, fp16)
        want = mirror.prepare(k, v, lens, dim, fp16, smooth_v)
        for b in range(2):
            used, rows = (lens[b] + 127) // 128, slice(2 * b, 2 * b + 2)
            for name in ("k", "k_scale", "v"):
                a, c = getattr(got, name)[rows, :used], getattr(want, name)[rows, :used]
                assert torch.equal(a, c), f"{name} d={d} n={n} item {b}: {int((a != c).sum())} of {a.numel()} differ"
        for name in ("k_mean", "v_mean", "v_scale"):
            assert torch.equal(getattr(got, name), getattr(want, name)), f"{name} d={d} n={n}"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("d", [64, 128])
def test_every_key_length(d: int, recipe: str) -> None:
    poison()
    q, k, v = qkv(1, 2, 2, 64, 300, d)
    seen = [check(recipe, q, k[:, :, :n], v[:, :, :n], lse_tolerance=0.05).rel_l1 for n in range(1, 301)]
    assert max(seen[40:]) < 2 * min(seen[40:])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal,top_left", [(False, False), (True, False), (True, True)])
def test_length_mixes(d: int, recipe: str, causal: bool, top_left: bool) -> None:
    poison()
    for n, kn, g in itertools.product((1, 77, 192, 503, 1031), (1, 2, 7, 128, 129, 503, 1031), (1, 4)):
        q, k, v = qkv(2, 4, 4 // g, n, kn, d, torch.float16)
        check(recipe, q, k, v, causal=causal, top_left=top_left, lse_tolerance=0.06)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("d", [8, 7, 16, 32, 33, 40, 72, 80, 96, 112, 120, 127])
def test_head_dims(d: int, recipe: str) -> None:
    poison()
    q, k, v = qkv(2, 3, 3, 200, 333, d)
    if d < 16:  # the cosine of a row of a few numbers is a coarse measure
        out = forward(q, k, v, scale=d**-0.5, recipe=recipe)[0]
        assert measure(out, attention(q, k, v, scale=d**-0.5)[0]).rel_l1 < 0.06
        return
    check(recipe, q, k, v)
    check(recipe, q, k, v, scale=0.25, causal=True)


def test_gqa_single_query_sweep() -> None:
    q, k, v = qkv(1, 6, 1, 1, 262, 128, torch.float16)
    seen = []
    for n in (*range(120, 141), *range(250, 263)):
        e = check(FP8, q, k[:, :, :n], v[:, :, :n])
        assert e.cosine > 0.998
        seen.append(e.rel_l1)
    assert max(seen) / min(seen) < 2


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_key_lengths_hide_what_lies_behind(recipe: str, value: float) -> None:
    poison()
    lens = [40, 128, 1, 0, 77]
    for causal in (False, True):
        q, k, v = qkv(5, 4, 2, 70, 128, 64)
        kk, vv = k.clone(), v.clone()
        for b, n in enumerate(lens):
            kk[b, :, n:], vv[b, :, n:] = value, value
        check(recipe, q, kk, vv, kv_lens=lens, causal=causal, lse_tolerance=0.06)
    short = forward(q[:1], k[:1, :, :40], v[:1, :, :40], scale=0.125, recipe=recipe)[0]
    whole = forward(
        q[:1], kk[:1], vv[:1], scale=0.125, recipe=recipe, kv_lens=torch.tensor([40], dtype=torch.int32, device=DEVICE)
    )[0]
    assert torch.equal(short, whole)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("d", [64, 80, 128])
def test_any_view_equals_contiguous(d: int, recipe: str) -> None:
    q, k, v = qkv(2, 4, 2, 333, 333, d)
    want, want_lse = forward(q, k, v, scale=0.1, recipe=recipe, return_lse=True)

    def nhd(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def wide(x: Tensor) -> Tensor:
        big = torch.full((*x.shape[:-1], d + 32), math.nan, dtype=x.dtype, device=DEVICE)
        big[..., :d] = x
        return big[..., :d]

    def shifted(x: Tensor, by: int) -> Tensor:
        flat = torch.full((x.numel() + 16,), math.nan, dtype=x.dtype, device=DEVICE)
        flat[by : by + x.numel()] = x.flatten()
        return flat[by : by + x.numel()].view(x.shape)

    def batched(x: Tensor) -> Tensor:
        big = torch.full((8, *x.shape[1:]), math.nan, dtype=x.dtype, device=DEVICE)
        big[3:5] = x
        return big[3:5]

    views = [nhd, wide, batched, lambda x: shifted(x, 1), lambda x: shifted(x, 4), lambda x: shifted(x, 7), lambda x: x]
    for a, b, c in [(f, f, f) for f in views] + list(itertools.product(views[:2] + views[-1:], repeat=3)):
        got, lse = forward(a(q), b(k), c(v), scale=0.1, recipe=recipe, return_lse=True)
        assert torch.equal(got, want) and torch.equal(lse, want_lse)
    # one fused buffer, and the NHD names
    fused = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], -1)
    fq, fk, fv = (x.unflatten(-1, (-1, d)) for x in fused.split([4 * d, 2 * d, 2 * d], -1))
    got, lse = forward(fq, fk, fv, scale=0.1, recipe=recipe, tensor_layout="NHD", out_layout="NHD", return_lse=True)
    assert got.shape == (2, 333, 4, d) and got.is_contiguous()
    assert torch.equal(got.transpose(1, 2), want) and torch.equal(lse, want_lse)
    got, _ = forward(fq, fk, fv, scale=0.1, recipe=recipe, tensor_layout="NHD", out_layout="HND")
    assert (
        got.shape == (2, 333, 4, d) and got.transpose(1, 2).is_contiguous() and torch.equal(got.transpose(1, 2), want)
    )
    for query in (q, nhd(q)):
        got, _ = forward(query, k, v, scale=0.1, recipe=recipe, out_layout="NHD")
        assert got.shape == q.shape and got.transpose(1, 2).is_contiguous() and torch.equal(got, want)


def test_strides_of_single_dimensions_mean_nothing() -> None:
    q, k, v = qkv(1, 1, 1, 400, 400, 64)
    odd = [x.as_strided(x.shape, (17, 5, 64, 1)) for x in (q, k, v)]
    assert torch.equal(forward(*odd, scale=0.1)[0], forward(q, k, v, scale=0.1)[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_offsets_beyond_int32(recipe: str) -> None:
    stride = (1 << 21) + 64
    big = torch.empty(1031 * stride + 4096, dtype=torch.float16, device=DEVICE)
    views = [big.as_strided((1, 2, 1031, 64), (0, 128, stride, 1), 1024 * i) for i in range(3)]
    for i, x in enumerate(views):
        x.copy_(normal(1, 2, 1031, 64, dtype=torch.float16, seed=i))
    for causal in (False, True):
        got = forward(*views, scale=0.125, recipe=recipe, is_causal=causal)[0]
        assert torch.equal(
            got, forward(*(x.contiguous() for x in views), scale=0.125, recipe=recipe, is_causal=causal)[0]
        )
    check(recipe, *(x.contiguous() for x in views))


@pytest.mark.parametrize("b,h,n,d", [(9216, 8, 16, 40), (70000, 1, 16, 64)])
def test_more_heads_than_a_grid_dimension(b: int, h: int, n: int, d: int) -> None:
    q, k, v = qkv(b, h, h, n, n, d)
    out = forward(q, k, v, scale=d**-0.5)[0]
    pick = torch.randperm(b, generator=torch.Generator().manual_seed(0))[:64].to(DEVICE)
    ref = attention(q[pick], k[pick], v[pick], scale=d**-0.5)[0]
    assert_attention_close(out[pick], ref, KERNEL_TOLERANCE[FP8])


def test_many_small_items() -> None:
    q, k, v = qkv(81, 12, 12, 1560, 32, 128)
    out = forward(q, k, v, scale=128**-0.5)[0]
    for b in (0, 80):
        one = slice(b, b + 1)
        assert_attention_close(out[one], attention(q[one], k[one], v[one])[0], KERNEL_TOLERANCE[FP8])
    assert bool(out.isfinite().all())


def test_inputs_are_read_only() -> None:
    tensors = qkv(2, 4, 2, 333, 777, 128)
    before = [x.clone() for x in tensors]
    forward(*tensors, scale=0.1, is_causal=True, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("q_len", [1, 7, 64, 77, 193])
@pytest.mark.parametrize("dim", [40, 64, 128])
def test_nothing_is_written_beside_the_output(recipe: str, q_len: int, dim: int) -> None:
    """Items without keys and rows that end inside a tile: the bytes around output and log-sum-exp stay as they were."""
    q, k, v = qkv(3, 2, 2, q_len, 130, dim, torch.float16)
    lens = torch.tensor([130, 0, 9], dtype=torch.int32, device=DEVICE)
    options = dict(scale=0.125, recipe=recipe, kv_lens=lens, is_causal=True, return_lse=True)
    want, want_lse = forward(q, k, v, **options)
    call = make_call(q, k, v, **options)
    buffers, guard, fields = [], 4096, library.POINTERS.unpack(call.args[library.FACTS.size :])
    for name, old in (("out", call.out), ("lse", call.lse)):  # the same call, into the middle of a larger buffer
        marked = torch.full((old.numel() + 2 * guard,), 7.0, dtype=old.dtype, device=DEVICE)
        fields[name] = marked[guard:].data_ptr()
        buffers.append(marked)
    call.args = call.args[: library.FACTS.size] + library.POINTERS.pack(**fields)
    call.run()
    for marked, expected in zip(buffers, (want, want_lse), strict=True):
        inside = slice(guard, guard + expected.numel())
        assert torch.equal(marked[inside].view(expected.shape), expected)
        assert (marked[:guard] == 7).all() and (marked[inside.stop :] == 7).all()
    assert not want[1].any() and torch.isneginf(want_lse[1]).all()
