"""The compiled kernels against a float64 oracle on the GPU: lengths, layouts, masks, ranges, graphs, determinism."""

from __future__ import annotations

import itertools
import math

import kernel_mirror as mirror
import kernel_oracle as oracle
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip(
        f"kernels exist for compute capability 9.0, this device is {torch.cuda.get_device_capability()}",
        allow_module_level=True,
    )

from sage_patch.kernels import library  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
FP8, FP16 = "qk_int8_pv_fp8", "qk_int8_pv_fp16"
RECIPES = (FP8, FP16)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def qkv(
    b: int, h: int, hk: int, n: int, kn: int, d: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        normal(b, h, n, d, dtype=dtype, seed=seed),
        normal(b, hk, kn, d, dtype=dtype, seed=seed + 1000),
        normal(b, hk, kn, d, dtype=dtype, seed=seed + 2000),
    )


def poison() -> None:
    """Leaves NaN in the allocator's free blocks and in shared memory."""
    pools = [torch.full((size,), math.nan, device=DEVICE) for size in (1 << 10, 1 << 16, 1 << 20, 1 << 23, 1 << 25)]
    del pools
    for d, recipe in itertools.product((64, 128), RECIPES):
        bad = torch.full((1, 64, 256, d), math.nan, dtype=torch.bfloat16, device=DEVICE)
        library.forward(bad, bad, bad, scale=1.0, recipe=recipe, return_lse=True)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: str,
    *,
    scale: float | None = None,
    lse_tolerance: float | None = None,
    **kw,
) -> dict[str, float]:
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    kv_lens = kw.pop("kv_lens", None)
    lens = None if kv_lens is None else torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE)
    out, lse = library.forward(
        q,
        k,
        v,
        scale=scale,
        recipe=recipe,
        return_lse=True,
        kv_lens=lens,
        is_causal=kw.get("causal", False),
        causal_top_left=kw.get("top_left", False),
    )
    ref, ref_lse = oracle.attention(q, k, v, scale, kv_lens=kv_lens, **kw)
    e = oracle.errors(out, ref)
    what = f"{tuple(q.shape)} {tuple(k.shape)} {q.dtype} {recipe} {kw} {kv_lens}: {e}"
    assert oracle.acceptable(e, recipe), what
    dead = ref_lse == -math.inf
    assert bool((lse[dead] == -math.inf).all()) and bool((out[dead] == 0).all()), f"dead rows: {what}"
    if lse_tolerance is not None:
        assert float((lse.double() - ref_lse)[~dead].abs().max()) < lse_tolerance, what
    return e


# ------------------------------------------------------------------ pre-processing, bit for bit
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("smooth_v", [True, False])
def test_images_equal_the_mirror(dtype: torch.dtype, recipe: str, smooth_v: bool) -> None:
    poison()
    for d, n in ((64, 1), (64, 300), (128, 129), (128, 2500), (40, 77), (96, 1031), (72, 64)):
        q, k, v = qkv(2, 2, 2, 16, n, d, dtype)
        k, v = k + 3 * normal(1, 1, 1, d, dtype=dtype, seed=7), v * 2 - 1
        v[..., 3] = 0.5
        lens = [n, max(1, n // 2)]
        call = library.make_call(
            q,
            k,
            v,
            scale=1.0,
            recipe=recipe,
            smooth_v=smooth_v,
            kv_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        )
        call.prepare()
        dim, fp16 = (64 if d <= 64 else 128), recipe == FP16
        got = mirror.from_workspace(call.workspace, 4, (n + 127) // 128, dim, fp16)
        want = mirror.prepare(k, v, lens, dim, fp16, smooth_v)
        for b in range(2):
            used, rows = (lens[b] + 127) // 128, slice(2 * b, 2 * b + 2)
            for name in ("k", "k_scale", "v"):
                a, c = getattr(got, name)[rows, :used], getattr(want, name)[rows, :used]
                assert torch.equal(a, c), f"{name} d={d} n={n} item {b}: {int((a != c).sum())} of {a.numel()} differ"
        for name in ("k_mean", "v_mean", "v_scale"):
            assert torch.equal(getattr(got, name), getattr(want, name)), f"{name} d={d} n={n}"


# ------------------------------------------------------------------ lengths
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("d", [64, 128])
def test_every_key_length(d: int, recipe: str) -> None:
    poison()
    q, k, v = qkv(1, 2, 2, 64, 300, d)
    seen = [check(q, k[:, :, :n], v[:, :, :n], recipe, lse_tolerance=0.05)["rel_l1"] for n in range(1, 301)]
    assert max(seen[40:]) < 2 * min(seen[40:])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal,top_left", [(False, False), (True, False), (True, True)])
def test_length_mixes(d: int, recipe: str, causal: bool, top_left: bool) -> None:
    poison()
    for n, kn, g in itertools.product((1, 77, 192, 503, 1031), (1, 2, 7, 128, 129, 503, 1031), (1, 4)):
        q, k, v = qkv(2, 4, 4 // g, n, kn, d, torch.float16)
        check(q, k, v, recipe, causal=causal, top_left=top_left, lse_tolerance=0.06)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("d", [8, 7, 16, 32, 33, 40, 72, 80, 96, 112, 120, 127])
def test_head_dims(d: int, recipe: str) -> None:
    poison()
    q, k, v = qkv(2, 3, 3, 200, 333, d)
    if d < 16:  # the cosine of a row of a few numbers is a coarse measure
        out = library.forward(q, k, v, scale=d**-0.5, recipe=recipe)[0]
        assert oracle.errors(out, oracle.attention(q, k, v, d**-0.5)[0])["rel_l1"] < 0.06
        return
    check(q, k, v, recipe)
    check(q, k, v, recipe, scale=0.25, causal=True)


def test_gqa_single_query_sweep() -> None:
    q, k, v = qkv(1, 6, 1, 1, 262, 128, torch.float16)
    seen = []
    for n in (*range(120, 141), *range(250, 263)):
        e = check(q, k[:, :, :n], v[:, :, :n], FP8)
        assert e["cos"] > 0.998
        seen.append(e["rel_l1"])
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
        check(q, kk, vv, recipe, kv_lens=lens, causal=causal, lse_tolerance=0.06)
    short = library.forward(q[:1], k[:1, :, :40], v[:1, :, :40], scale=0.125, recipe=recipe)[0]
    whole = library.forward(
        q[:1], kk[:1], vv[:1], scale=0.125, recipe=recipe, kv_lens=torch.tensor([40], dtype=torch.int32, device=DEVICE)
    )[0]
    assert torch.equal(short, whole)


# ------------------------------------------------------------------ layouts
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("d", [64, 80, 128])
def test_any_view_equals_contiguous(d: int, recipe: str) -> None:
    q, k, v = qkv(2, 4, 2, 333, 333, d)
    want, want_lse = library.forward(q, k, v, scale=0.1, recipe=recipe, return_lse=True)

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
        got, lse = library.forward(a(q), b(k), c(v), scale=0.1, recipe=recipe, return_lse=True)
        assert torch.equal(got, want) and torch.equal(lse, want_lse)
    # one fused buffer, and the NHD names
    fused = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], -1)
    fq, fk, fv = (x.unflatten(-1, (-1, d)) for x in fused.split([4 * d, 2 * d, 2 * d], -1))
    got, lse = library.forward(
        fq, fk, fv, scale=0.1, recipe=recipe, tensor_layout="NHD", out_layout="NHD", return_lse=True
    )
    assert got.shape == (2, 333, 4, d) and got.is_contiguous()
    assert torch.equal(got.transpose(1, 2), want) and torch.equal(lse, want_lse)
    got, _ = library.forward(fq, fk, fv, scale=0.1, recipe=recipe, tensor_layout="NHD", out_layout="HND")
    assert got.is_contiguous() and torch.equal(got, want)


def test_strides_of_single_dimensions_mean_nothing() -> None:
    q, k, v = qkv(1, 1, 1, 400, 400, 64)
    odd = [x.as_strided(x.shape, (17, 5, 64, 1)) for x in (q, k, v)]
    assert torch.equal(library.forward(*odd, scale=0.1)[0], library.forward(q, k, v, scale=0.1)[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_offsets_beyond_int32(recipe: str) -> None:
    stride = (1 << 21) + 64
    big = torch.empty(1031 * stride + 4096, dtype=torch.float16, device=DEVICE)
    views = [big.as_strided((1, 2, 1031, 64), (0, 128, stride, 1), 1024 * i) for i in range(3)]
    for i, x in enumerate(views):
        x.copy_(normal(1, 2, 1031, 64, dtype=torch.float16, seed=i))
    for causal in (False, True):
        got = library.forward(*views, scale=0.125, recipe=recipe, is_causal=causal)[0]
        assert torch.equal(
            got, library.forward(*(x.contiguous() for x in views), scale=0.125, recipe=recipe, is_causal=causal)[0]
        )
    check(*(x.contiguous() for x in views), recipe)


@pytest.mark.parametrize("b,h,n,d", [(9216, 8, 16, 40), (70000, 1, 16, 64)])
def test_more_heads_than_a_grid_dimension(b: int, h: int, n: int, d: int) -> None:
    q, k, v = qkv(b, h, h, n, n, d)
    out = library.forward(q, k, v, scale=d**-0.5)[0]
    pick = torch.randperm(b, generator=torch.Generator().manual_seed(0))[:64].to(DEVICE)
    ref = oracle.attention(q[pick], k[pick], v[pick], d**-0.5)[0]
    assert oracle.acceptable(oracle.errors(out[pick], ref), FP8)


def test_many_small_items() -> None:
    q, k, v = qkv(81, 12, 12, 1560, 32, 128)
    out = library.forward(q, k, v, scale=128**-0.5)[0]
    for b in (0, 80):
        assert oracle.acceptable(
            oracle.errors(out[b : b + 1], oracle.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], 128**-0.5)[0]), FP8
        )
    assert bool(out.isfinite().all())


def test_inputs_are_read_only() -> None:
    tensors = qkv(2, 4, 2, 333, 777, 128)
    before = [x.clone() for x in tensors]
    library.forward(*tensors, scale=0.1, is_causal=True, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


# ------------------------------------------------------------------ number range
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_stay_averages(recipe: str) -> None:
    q, k, v = qkv(2, 4, 4, 512, 4096, 64, torch.float16)
    out = library.forward(torch.zeros_like(q), k, torch.full_like(v, 30.0), scale=0.125, recipe=recipe)[0]
    assert float((out - 30).abs().max()) < 0.1
    for smooth_v in (True, False):
        for n, dtype in itertools.product((77, 512, 513), (torch.float16, torch.bfloat16)):
            const = torch.full((1, 2, n, 64), 0.001, dtype=dtype, device=DEVICE)
            out = library.forward(
                *(x[:1, :2, :n].to(dtype) for x in (q, k)), const, scale=0.125, recipe=recipe, smooth_v=smooth_v
            )[0]
            assert float((out / const[..., : out.shape[2], :] - 1).abs().max()) < 0.01
    for gap in (7.5, 10.0):  # a peak and a long tail: rows keep their mass
        qq, kk = torch.zeros(1, 1, 64, 64, device=DEVICE).half(), torch.zeros(1, 1, 16384, 64, device=DEVICE).half()
        qq[..., 0], kk[0, 0, 5, 0] = 8.0, gap
        for smooth_v in (True, False):
            out = library.forward(qq, kk, torch.ones_like(kk), scale=0.125, recipe=recipe, smooth_v=smooth_v)[0]
            assert 0.97 < float(out.min()) and float(out.max()) < 1.03


@pytest.mark.parametrize("recipe", RECIPES)
def test_zero_and_outlier_channels(recipe: str) -> None:
    q, k, v = qkv(2, 4, 4, 777, 777, 128)
    v[0, 1, :, 5] = 0
    check(q, k, v, recipe)
    for smooth_v in (True, False):
        out = library.forward(q, k, v, scale=128**-0.5, recipe=recipe, smooth_v=smooth_v)[0]
        assert bool((out[0, 1, :, 5] == 0).all())
    q, k, v = qkv(1, 2, 2, 512, 4096, 128)
    v[..., 3] *= 1e5  # past fp16's range
    out = library.forward(q, k, v, scale=128**-0.5, recipe=recipe)[0]
    ref = oracle.attention(q, k, v, 128**-0.5)[0]
    rest = [i for i in range(128) if i != 3]
    assert bool(out.isfinite().all())
    # one channel is a vector of single numbers: its rows have no direction, so cosine over rows says nothing
    assert oracle.errors(out[..., 3:4].transpose(-1, -2), ref[..., 3:4].transpose(-1, -2))["rel_l1"] < 0.06
    assert oracle.acceptable(oracle.errors(out[..., rest], ref[..., rest]), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_tiny_and_huge_inputs(recipe: str) -> None:
    q, k, v = (x * 1e-6 for x in qkv(1, 4, 4, 1031, 1031, 64, torch.float16))
    for kk in (k, torch.zeros_like(k)):
        out = library.forward(q, kk, v, scale=0.125, recipe=recipe)[0]
        ref = oracle.attention(q, kk, v, 0.125)[0]
        # fp16's own step at these magnitudes is larger than the output: compare before the output is rounded to it
        assert bool(out.isfinite().all()) and float((out.double() - ref).abs().max()) < 1.3e-7
    b = [(x.float() * 1e-6).bfloat16() for x in qkv(1, 4, 4, 1031, 1031, 64)]
    check(*b, recipe)
    check(torch.zeros_like(b[0]), *b[1:], recipe)
    sign = [
        (torch.randint(0, 2, (2, 3, 257, 128), generator=torch.Generator().manual_seed(i)) * 2 - 1).to(
            DEVICE, torch.float16
        )
        * 3e4
        for i in range(2)
    ]
    v = normal(2, 3, 257, 128, dtype=torch.float16)
    out = library.forward(*sign, v, scale=128**-0.5, recipe=recipe)[0]
    ref = oracle.attention(*sign, v, 128**-0.5)[0]
    assert bool(out.isfinite().all())
    s = sign[0].double() @ sign[1].double().transpose(-1, -2)
    top = s.topk(2).values
    clear = top[..., 0] > top[..., 1]
    rows = (out.double() - ref).norm(dim=-1) / ref.norm(dim=-1)
    assert float(rows[clear].max()) < (0.07 if recipe == FP8 else 1e-2)  # a one-hot row is V's own rounding


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("step", [1, 16, 400])
def test_coarse_inputs(recipe: str, step: int) -> None:
    tensors = []
    for i, x in enumerate(qkv(1, 4, 4, 512, 1031, 128)):
        x = (x.float().to(torch.float8_e4m3fn).float() * step).bfloat16()
        spots = torch.rand(x.shape, generator=torch.Generator(DEVICE).manual_seed(i), device=DEVICE) < 0.001
        tensors.append(torch.where(spots, x.sign() * 448 * 16, x))
    out = library.forward(*tensors, scale=128**-0.5, recipe=recipe)[0]
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_accuracy_targets(recipe: str, dtype: torch.dtype) -> None:
    limit = 0.040 if recipe == FP8 else 0.015
    q, k, v = qkv(1, 8, 8, 1024, 4096, 128, dtype)
    assert check(q, k, v, recipe, lse_tolerance=0.05)["rel_l1"] <= limit
    biased = k.clone()
    biased[..., 7] += 300
    assert check(q, biased, v, recipe)["rel_l1"] <= limit
    for bias in (10, 30, 100, 300):
        kk = k[:, :, :1031].clone()
        kk[..., 7] += bias
        check(q, kk, v[:, :, :1031], recipe, lse_tolerance=0.05 if dtype == torch.float16 else None)
    offset = v + 40
    out = library.forward(q, k, offset, scale=128**-0.5, recipe=recipe)[0]
    ref = oracle.attention(q, k, offset, 128**-0.5)[0]
    # score the part that is not the mean, without the output dtype's own rounding of 40
    ours = (out.double() - ref).abs().sum()
    rounding = (ref.to(dtype).double() - ref).abs().sum()
    centred = (ref - offset.double().mean(2, keepdim=True)).abs().sum()
    assert float((ours - rounding).clamp_min(0) / centred) <= 0.05
    one = library.forward(q, k[:, :, :1], v[:, :, :1], scale=0.1, recipe=recipe)[0]
    assert torch.equal(one, v[:, :, :1].expand_as(one))


@pytest.mark.parametrize("recipe", RECIPES)
def test_non_finite_query_rows_stay_alone(recipe: str) -> None:
    q, k, v = qkv(1, 2, 2, 300, 500, 128)
    want = library.forward(q, k, v, scale=0.1, recipe=recipe)[0]
    q[0, 0, 17, 3], q[0, 1, 200, 5] = math.nan, math.inf
    got = library.forward(q, k, v, scale=0.1, recipe=recipe)[0]
    assert bool(got[0, 0, 17].isnan().all()) and bool(got[0, 1, 200].isnan().all())
    got[0, 0, 17], got[0, 1, 200] = want[0, 0, 17], want[0, 1, 200]
    assert torch.equal(got, want)


@pytest.mark.parametrize("recipe", RECIPES)
def test_merge_by_lse(recipe: str) -> None:
    q, k, v = qkv(1, 4, 4, 200, 1031, 64, torch.float16)
    k = k + 30 * normal(1, 4, 1, 64, dtype=torch.float16, seed=5)
    ref, ref_lse = oracle.attention(q, k, v, 0.125)
    for smooth_v in (True, False):
        parts = [
            library.forward(
                q, k[:, :, a:b], v[:, :, a:b], scale=0.125, recipe=recipe, smooth_v=smooth_v, return_lse=True
            )
            for a, b in ((0, 400), (400, 1031))
        ]
        lse = torch.stack([p[1].double() for p in parts])
        merged = sum(p[0].double() * w[..., None] for p, w in zip(parts, torch.softmax(lse, 0), strict=True))
        assert oracle.acceptable(oracle.errors(merged, ref), recipe)
        assert float((torch.logsumexp(lse, 0) - ref_lse).abs().max()) < 0.1


def test_long_sequences_do_not_drift() -> None:
    base = None
    for n in (65536, 131072, 262144):
        q, k, v = qkv(1, 2, 2, 512, n, 128, torch.float16)
        e = check(q, k, v, FP8)["rel_l1"]
        base = base or e
        assert e < 1.3 * base


# ------------------------------------------------------------------ streams, graphs, devices, repetition
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("causal", [False, True])
def test_graph_replay_sees_new_values(recipe: str, causal: bool) -> None:
    static = [x.clone() for x in qkv(2, 4, 2, 1031, 1031, 128)]
    library.forward(*static, scale=0.1, recipe=recipe, is_causal=causal)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        out, lse = library.forward(*static, scale=0.1, recipe=recipe, is_causal=causal, return_lse=True)
    for seed in (1, 2, 3):
        fresh = qkv(2, 4, 2, 1031, 1031, 128, seed=seed)
        for a, b in zip(static, fresh, strict=True):
            a.copy_(b)
        graph.replay()
        want, want_lse = library.forward(*fresh, scale=0.1, recipe=recipe, is_causal=causal, return_lse=True)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_side_stream_ordering() -> None:
    q, k, v = qkv(1, 8, 8, 1031, 2048, 128)
    want = library.forward(q, k, v, scale=0.1)[0]
    stream = torch.cuda.Stream()
    for _ in range(50):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
            late = k.clone()
            got = library.forward(q, late, v, scale=0.1)[0]
            late.fill_(math.nan)  # ordered after the kernels on the same stream
        stream.synchronize()
        assert torch.equal(got, want)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("causal", [False, True])
def test_same_bits_every_time(recipe: str, causal: bool) -> None:
    q, k, v = qkv(2, 8, 4, 1031, 1031, 128)
    want, want_lse = library.forward(q, k, v, scale=0.1, recipe=recipe, is_causal=causal, return_lse=True)
    other, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE)
    for _ in range(100):
        with torch.cuda.stream(other):
            noise = noise @ noise * 1e-3
        got, lse = library.forward(q, k, v, scale=0.1, recipe=recipe, is_causal=causal, return_lse=True)
        assert torch.equal(got, want) and torch.equal(lse, want_lse)
    alone = library.forward(q[1:], k[1:], v[1:], scale=0.1, recipe=recipe, is_causal=causal)[0]
    assert torch.equal(alone, want[1:])  # the batch around an item does not matter


def test_separate_launches_equal_the_fused_call() -> None:
    q, k, v = qkv(2, 4, 4, 500, 900, 128)
    call = library.make_call(q, k, v, scale=0.1, is_causal=True, return_lse=True)
    call.prepare()
    for _ in range(3):
        call.out.fill_(math.nan)
        call.forward()
        want, want_lse = library.forward(q, k, v, scale=0.1, is_causal=True, return_lse=True)
        assert torch.equal(call.out, want) and torch.equal(call.lse, want_lse)


def test_second_device_is_used_and_left_alone() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    q, k, v = (x.to("cuda:1") for x in qkv(1, 4, 4, 500, 900, 128))
    assert torch.cuda.current_device() == 0
    got = library.forward(q, k, v, scale=0.1)[0]
    assert torch.cuda.current_device() == 0 and got.device == q.device
    assert torch.equal(got.to("cuda:0"), library.forward(*(x.to("cuda:0") for x in (q, k, v)), scale=0.1)[0])


def test_memory_is_given_back() -> None:
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    q, k, v = qkv(1, 8, 8, 4096, 4096, 128)
    inside = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = library.forward(q, k, v, scale=0.1)[0]
    images = 2 * k.numel()
    assert torch.cuda.max_memory_allocated() - inside - out.numel() * 2 <= images + (1 << 20)
    del q, k, v, out
    assert torch.cuda.memory_allocated() == start


def test_refusals() -> None:
    q, k, v = qkv(1, 3, 2, 16, 16, 64)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        library.forward(q, k, v, scale=1.0)
    q, k, v = qkv(1, 2, 2, 16, 16, 136)
    with pytest.raises(library.UnsupportedCall, match="head_dim 136"):
        library.forward(q, k, v, scale=1.0)
    q, k, v = qkv(1, 2, 2, 16, 16, 64)
    with pytest.raises(ValueError, match="do not belong together"):
        library.forward(q, k.cpu(), v, scale=1.0)
    with pytest.raises(ValueError, match="kv_lens"):
        library.forward(q, k, v, scale=1.0, kv_lens=torch.tensor([3], device=DEVICE))
