"""The mma.sync kernels, lane by lane on a CPU, against the emulator: no GPU, no nvcc.

The source is the kernels' own, so operand layouts, swizzles, half images, barriers and what may be read before it is
written are tested with it: the simulator ends the program at a bank conflict of ldmatrix, a misaligned or stray access,
and shared memory begins as NaN.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_patch.reference.emulator import forward, forward_mma
from sage_patch.reference.emulator import prepare as emulated_prepare
from sage_patch.reference.emulator.float32 import to_half
from sage_patch.reference.emulator.prepare import Prepared, padded_dim, prepare
from sage_patch.reference.emulator.visible import present
from zoo.lane_simulator import Options, compile_simulator, k_image, simulate, simulate_prepare, v_image


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiled = compile_simulator(tmp_path_factory.mktemp("lane_simulator"))
    if compiled is None:
        pytest.skip("no C++ compiler")
    return compiled


def inputs(heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int, batch: int = 1) -> tuple[Tensor, ...]:
    torch.manual_seed(dim + q_len + kv_len)
    q = torch.randn(batch, heads, q_len, dim) + 0.5
    k, v = (torch.randn(batch, kv_heads, kv_len, dim) + mean for mean in (1.0, 0.25))
    return q, k, v


def check(
    library: ctypes.CDLL,
    shape: tuple[int, int, int, int, int],
    options: Options,
    recipe: str,
    dtype: torch.dtype = torch.float16,
    batch: int = 1,
    poison: bool = False,
) -> None:
    """The kernel's output is the emulator's, but for the last bits that contractions and orders of addition leave."""
    query, key, value = (x.to(dtype) for x in inputs(*shape, batch=batch))
    if poison:  # keys that no item has
        for b, keys in enumerate(options.kv_lens or []):
            start = 0 if options.kv_starts is None else options.kv_starts[b]
            for x in (key, value):
                x[b, :, :start] = math.nan
                x[b, :, start + keys :] = math.nan
    scale = 1 / math.sqrt(shape[-1])
    asked = {
        name: getattr(options, name)
        for name in (
            "is_causal",
            "top_left",
            "kv_lens",
            "kv_starts",
            "left",
            "right",
            "attn_mask",
            "softcap",
            "sinks",
            "rotated",
        )
    }
    stages = forward.emulate(query, key, value, recipe=recipe, scale=scale, **asked)
    expected, lse = forward_mma.attend(
        stages, recipe=recipe, split=options.product.endswith("_split"), sinks=options.sinks, softcap=options.softcap
    )
    out, out_lse = simulate(library, stages, query, key, options, scale)
    expected = to_half(expected[..., : shape[-1]], dtype).float()
    step = 2.0**-10 if dtype == torch.float16 else 2.0**-7
    far = (out.float() - expected).abs() > step * expected.abs() + 1e-5
    assert not out.isnan().any()
    # A probability at a rounding boundary may fall to the other side: rare, and then small.
    assert far.float().mean() < 0.01 and (out.float() - expected).abs().max() < 0.02, far.float().mean()
    assert torch.equal(out_lse.isinf(), lse.isinf())
    assert torch.allclose(out_lse, lse, atol=2e-5, rtol=2e-6)


FP8, FP16 = "qk_int8_pv_fp8", "qk_int8_pv_fp16"


def same_images(
    found: dict[str, Tensor], want: Prepared, keys: list[int], *, packed: bool = False, v_head_dim: int = 256
) -> None:
    """Bit for bit, images of keys that exist; keys: of each head."""
    width = want.v.shape[-1]
    half = min(width, 128)
    parts = [v_image(want.v[..., at : at + half]).flatten() for at in range(0, min(width, v_head_dim), half)]
    written = torch.arange(want.k.shape[1]) < -(-torch.tensor(keys)[:, None] // 128)
    assert torch.equal(found["k"].view(*written.shape, -1)[written], k_image(want.k, packed)[written])
    v, wanted = (x.view(len(parts), *written.shape, -1)[:, written] for x in (found["v"], torch.cat(parts)))
    if want.v.dtype == torch.float16:  # any NaN is one
        v, wanted = (x.view(torch.float16).float().nan_to_num(nan=1e5) for x in (v, wanted))
    assert torch.equal(v, wanted)
    assert torch.equal(found["k_scale"][written], want.k_scale[written])
    for name in ("k_mean", "v_mean", "v_scale"):
        assert torch.allclose(found[name], getattr(want, name), rtol=0, atol=0, equal_nan=True), name


@pytest.mark.parametrize(
    ("dim", "kv_len", "recipe", "dtype", "options"),
    [
        (64, 300, FP8, torch.float16, {}),
        (64, 300, FP16, torch.bfloat16, {"size": 2}),
        (128, 520, FP8, torch.bfloat16, {"size": 4}),
        (128, 700, FP8, torch.float16, {}),
        (128, 400, FP16, torch.bfloat16, {}),
        (128, 130, FP16, torch.float16, {"aligned": False}),
        (100, 200, FP8, torch.float16, {"aligned": False, "size": 2}),
        (80, 300, FP8, torch.bfloat16, {}),
        (64, 200, "qk_int4_pv_fp16", torch.float16, {"packed": True}),
        (128, 200, "qk_int4_pv_fp8", torch.bfloat16, {"packed": True, "size": 2}),
        (128, 200, "qk_int4_pv_fp8", torch.bfloat16, {"aligned": False}),
        (256, 200, FP8, torch.float16, {}),
        (256, 400, FP16, torch.float16, {"size": 2}),
        (200, 300, FP8, torch.bfloat16, {}),
        (256, 200, FP8, torch.bfloat16, {"aligned": False}),
        (64, 300, FP8, torch.float16, {"kv_lens": [130, 0], "kv_starts": [7, 0]}),
        (64, 1, FP8, torch.float16, {}),
        (128, 64, FP16, torch.bfloat16, {}),
        (40, 300, FP8, torch.float16, {"rotated": True, "kv_lens": [130, 0], "kv_starts": [7, 0]}),
        (96, 300, FP16, torch.bfloat16, {"rotated": True, "size": 2}),
        (128, 300, FP8, torch.float16, {"rotated": True}),
        (128, 300, FP8, torch.float16, {"rotated": True, "aligned": False}),
        (128, 200, "qk_int4_pv_fp8", torch.bfloat16, {"rotated": True, "packed": True}),
        (256, 300, FP8, torch.bfloat16, {"rotated": True}),
    ],
)
def test_images(
    library: ctypes.CDLL, dim: int, kv_len: int, recipe: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """The pre-processing writes the emulator's images, bit for bit; keys that no item has are never read."""
    kv_lens, starts = options.get("kv_lens"), options.get("kv_starts")
    _, key, value = (x.to(dtype) for x in inputs(1, 2, 1, kv_len, dim, batch=2))
    for b, keys in enumerate(kv_lens or []):
        for x in (key, value):
            x[b, :, : starts[b]] = x[b, :, starts[b] + keys :] = math.nan
    found = simulate_prepare(library, key, value, recipe, **options)
    there, values, keys = present(key, value, kv_lens, starts, None)
    want = prepare(
        there, values, keys.tolist(), padded_dim(dim), recipe.endswith("fp16"), True, int4=recipe.startswith("qk_int4"),
        rotated=bool(options.get("rotated")),
    )  # fmt: skip
    assert not found["overflow"].any()
    same_images(found, want, keys.repeat_interleave(2).tolist(), packed=bool(options.get("packed")))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("dim", "recipe", "dtype"),
    [(64, FP8, torch.bfloat16), (128, FP16, torch.float16), (128, FP8, torch.float16), (256, FP8, torch.bfloat16)],
)
def test_values_beyond_the_sample(library: ctypes.CDLL, dim: int, recipe: str, dtype: torch.dtype, size: int) -> None:
    """A channel that a value overflows takes its true maximum, NaN and infinity stay in their channels, and every
    other channel keeps what its samples gave."""
    _, key, value = (x.to(dtype) for x in inputs(1, 4, 1, 300, dim))
    sampled = torch.arange(64) * 300 // 64
    apart = [t for t in range(300) if t not in sampled]
    untouched = prepare(key, value, [300], dim, recipe == FP16, True)
    value[0, 0, apart[7], 3] = 3000.0
    value[0, 1, apart[-1], dim - 1] = -math.inf
    value[0, 2, apart[100]] = math.nan
    value[0, 3, :, 5] = 0.5
    value[0, 3, apart[50], 5] = 0.75
    want = prepare(key, value, [300], dim, recipe == FP16, True)
    found = simulate_prepare(library, key, value, recipe, size=size)
    same_images(found, want, [300] * 4)
    assert found["overflow"].view(4, -1).any(-1).tolist() == [True, True, False, True]
    assert want.v_scale[1, dim - 1].isnan() and want.v_scale[0, 3] > 100 * untouched.v_scale[0, 3]
    changed = want.v_scale.view(torch.int32) != untouched.v_scale.view(torch.int32)
    assert changed.nonzero().tolist() == [[0, 3], [1, dim - 1], [3, 5]]


def test_keys_of_an_index_and_of_a_mask(library: ctypes.CDLL) -> None:
    """Keys that an index leaves out or no row sees may hold anything."""
    _, key, value = (x.to(torch.bfloat16) for x in inputs(1, 2, 1, 300, 128, batch=2))
    keep = torch.rand(2, 300, generator=torch.Generator().manual_seed(1)) < 0.6
    count = keep.sum(1).tolist()
    index = torch.zeros(2, 300, dtype=torch.int32)
    poisoned = [x.clone() for x in (key, value)]
    for b in range(2):
        index[b, : count[b]] = keep[b].nonzero()[:, 0]
        for x in poisoned:
            x[b, :, ~keep[b]] = math.nan
    for recipe in (FP8, FP16):
        found = simulate_prepare(library, *poisoned, recipe, kv_lens=count, key_index=index, size=2)
        there, values, keys = present(key, value, None, None, keep)
        want = prepare(there, values, keys.tolist(), 128, recipe == FP16, True)
        padded = Prepared(
            **{
                name: torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, 3 - x.shape[1])) if x.ndim > 2 else x
                for name, x in vars(want).items()
            }
        )
        same_images(found, padded, keys.repeat_interleave(2).tolist())
        seen = keep[0].clone()
        seen[130:260] = False
        found = simulate_prepare(library, *poisoned, recipe, seen=seen & keep[1])
        want = prepare(key, value, [300, 300], 128, recipe == FP16, True, (seen & keep[1]).expand(2, -1))
        same_images(found, want, [300] * 4)


@pytest.mark.parametrize("recipe", [FP8, FP16])
def test_images_of_packed_sequences(library: ctypes.CDLL, recipe: str) -> None:
    """Each sequence's are those of a call on it alone, however many CTAs share a head."""
    cu = [3, 40, 40, 300, 430]
    _, key, value = (x.half() for x in inputs(1, 2, 1, 441, 64))
    value[0, 1, 77, 9] = 500.0  # no sample
    found = simulate_prepare(library, key, value, recipe, cu_k=cu, size=2)
    for b, (first, end) in enumerate(zip(cu, cu[1:], strict=False)):
        want = prepare(key[:, :, first:end], value[:, :, first:end], [end - first], 64, recipe == FP16, True)
        blocks, at = want.k.shape[1], first // 128 + b
        mine = {name: found[name].view(4, 2, -1)[b] for name in ("k_mean", "v_mean", "v_scale")}
        if first == end:
            assert not any(x.any() for x in mine.values())
            continue
        for name in ("k", "v", "k_scale"):
            mine[name] = found[name].view(2, 441 // 128 + 4, -1)[:, at : at + blocks].flatten()
        mine["k_scale"] = mine["k_scale"].view(2, blocks, 4)
        same_images(mine, want, [end - first] * 2)


SHAPE = (2, 1, 150, 333, 128)  # heads, kv heads, rows, keys, channels


@pytest.mark.parametrize(("dim", "product"), [(40, "fp8"), (96, "fp8"), (128, "fp16"), (256, "fp8")])
def test_rotation(library: ctypes.CDLL, dim: int, product: str) -> None:
    check(library, (2, 1, 70, 130, dim), Options(product, rotated=True, is_causal=True), f"qk_int8_pv_{product}")


@pytest.mark.parametrize("packed", [True, False])
def test_rotation_of_int4(library: ctypes.CDLL, packed: bool) -> None:
    """Q's means come off first, and what they add to the logits is not rotated."""
    check(library, (1, 1, 130, 200, 128), Options("fp16", packed=packed, rotated=True), "qk_int4_pv_fp16")


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("product", ["fp16", "fp8", "fp16_split", "fp8_split"])
def test_dense(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, product: str, dim: int) -> None:
    if product == "fp8_split":  # V's images reach no further, so that 64 keys * 448 stay inside fp16's range
        monkeypatch.setattr(emulated_prepare, "E4M3_MAX", 2.25)
    check(library, (*SHAPE[:4], dim), Options(product), f"qk_int8_pv_{product.removesuffix('_split')}")


def test_on_small_multiprocessors(tmp_path: Path) -> None:
    """FP16 P V has eight warps where an SM has 100 KB; dense and masked, with the log-sum-exp."""
    small = compile_simulator(tmp_path, "-DSAGE2_SMALL_SM")
    if small is None:
        pytest.skip("no C++ compiler")
    check(small, SHAPE, Options("fp16"), "qk_int8_pv_fp16")
    check(small, (1, 1, 150, 333, 96), Options("fp16", is_causal=True), "qk_int8_pv_fp16", torch.bfloat16)
    check(small, (2, 1, 150, 333, 64), Options("fp16", is_causal=True), "qk_int8_pv_fp16")
    check(small, (1, 1, 150, 333, 128), Options("fp16", left=70, right=30), "qk_int8_pv_fp16")
    check(small, (1, 1, 70, 200, 128), Options("fp8"), "qk_int8_pv_fp8")  # as elsewhere


@pytest.mark.parametrize("head_dim", [256, 200])
@pytest.mark.parametrize("product", ["fp16", "fp8"])
def test_wide_heads(library: ctypes.CDLL, product: str, head_dim: int) -> None:
    check(library, (1, 1, 70, 200, head_dim), Options(product), f"qk_int8_pv_{product}", torch.bfloat16)


@pytest.mark.parametrize("product", ["fp16", "fp8"])
@pytest.mark.parametrize(("q_len", "kv_len", "top_left"), [(150, 333, False), (200, 90, False), (200, 333, True)])
def test_causal(library: ctypes.CDLL, product: str, q_len: int, kv_len: int, top_left: bool) -> None:
    options = Options(product, is_causal=True, top_left=top_left)
    check(library, (1, 1, q_len, kv_len, 128), options, f"qk_int8_pv_{product}")


@pytest.mark.parametrize("product", ["fp16", "fp8"])
def test_lengths_and_starts(library: ctypes.CDLL, product: str) -> None:
    options = Options(product, kv_lens=[0, 130, 64], kv_starts=[0, 7, 100])
    check(library, (1, 1, 40, 200, 64), options, f"qk_int8_pv_{product}", batch=3, poison=True)


@pytest.mark.parametrize("product", ["fp16", "fp8"])
def test_windows_and_sinks(library: ctypes.CDLL, product: str) -> None:
    options = Options(product, is_causal=True, left=70, sinks=torch.tensor([0.5, 3.0]))
    check(library, SHAPE, options, f"qk_int8_pv_{product}")


@pytest.mark.parametrize("product", ["fp16", "fp8"])
def test_masks_of_truth_values(library: ctypes.CDLL, product: str) -> None:
    torch.manual_seed(3)
    mask = torch.rand(1, 2, 150, 333) < 0.7
    mask[:, :, 5] = False
    mask[:, 0, :, 60:200] = False
    check(library, SHAPE, Options(product, attn_mask=mask), f"qk_int8_pv_{product}")


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_added_masks(library: ctypes.CDLL, kind: torch.dtype) -> None:
    torch.manual_seed(4)
    mask = torch.randn(1, 1, 150, 333).to(kind)
    mask[:, :, :, 200:240] = -math.inf
    mask[:, :, 130:, :128] = 0
    check(library, SHAPE, Options("fp16", attn_mask=mask), "qk_int8_pv_fp16")


@pytest.mark.parametrize("product", ["fp16", "fp8"])
def test_softcap(library: ctypes.CDLL, product: str) -> None:
    check(library, SHAPE, Options(product, softcap=20.0, is_causal=True), f"qk_int8_pv_{product}")


@pytest.mark.parametrize("product", ["fp16", "fp8"])
def test_packed_sequences(library: ctypes.CDLL, product: str) -> None:
    """Each sequence's rows are those of a call on it alone."""
    cu_q, cu_k = [0, 5, 5, 200, 341], [0, 40, 40, 300, 441]
    query, key, value = (x.half() for x in inputs(2, 1, cu_q[-1], cu_k[-1], 64))
    recipe, scale = f"qk_int8_pv_{product}", 0.125
    alone = [
        forward.emulate(*parts, recipe=recipe, scale=scale, is_causal=True) if parts[0].shape[2] else None
        for parts in forward.sequences(query, key, value, cu_q, cu_k)
    ]
    images = alone[0].images
    blocks = cu_k[-1] // 128 + len(alone)
    together = {name: torch.zeros(1, blocks, *getattr(images, name).shape[2:], dtype=getattr(images, name).dtype)
                for name in ("k", "k_scale", "v")}  # fmt: skip
    for b, stages in enumerate(alone):
        for name, x in together.items() if stages is not None else ():
            mine = getattr(stages.images, name)
            first = cu_k[b] // 128 + b
            x[:, first : first + mine.shape[1]] = mine
    vectors = {
        name: torch.cat([getattr(images if s is None else s.images, name) for s in alone])
        for name in ("k_mean", "v_mean", "v_scale")
    }
    stages = replace(alone[0], images=Prepared(**together, **vectors))
    options = Options(product, is_causal=True, cu_seqlens=(cu_q, cu_k))
    out, lse = simulate(library, stages, query, key, options, scale)
    for b, mine in enumerate(alone):
        if mine is None:
            continue
        rows = slice(cu_q[b], cu_q[b + 1])
        want, want_lse = forward_mma.attend(mine, recipe=recipe)
        assert float((out[:, :, rows].float() - want).abs().max()) < 2e-3
        assert torch.allclose(lse[:, :, rows], want_lse, atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("product", ["fp16", "fp8"])
@pytest.mark.parametrize("packed", [True, False])
def test_int4(library: ctypes.CDLL, packed: bool, product: str, dim: int) -> None:
    """Two a byte through the tensor cores' INT4, and as 7 levels of INT8: the same scores."""
    options = Options(product, packed=packed, is_causal=True)
    check(library, (1, 1, 130, 200, dim), options, f"qk_int4_pv_{product}")
