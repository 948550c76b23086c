"""Regression tests for faults reported elsewhere, on the GPU: number range, tails, short lengths, layouts, masks.

What the other GPU tests ask of the kernel itself is asked here of the public function, with the same inputs and
tolerances as the CPU tests of these faults; the counters prove that the kernel, or the exact path, computed the call.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from gpu_cases import DEVICE, FP8, FP16, INT4_RECIPES, RECIPES, forward, poison
from gpu_cases import qkv as large_qkv
from kernel_calls import make_call
from torch import Tensor

import oracle
from oracle import HALF, RECIPE_TOLERANCE, T8F8, assert_attention_close, attention, measure, packed_attention
from sage_patch.attention import sage_attention
from sage_patch.backends import why_not
from sage_patch.kernels import library, ops
from sage_patch.recipes import NO_LIMITS, Call
from sage_patch.recipes import RECIPES as ALL_RECIPES

pytestmark = pytest.mark.gpu

HALVES = [torch.float16, torch.bfloat16]


def qkv(*args, **options) -> list[Tensor]:
    """The CPU tests' own numbers, on the GPU."""
    return [x.to(DEVICE) for x in oracle.qkv(*args, **options)]


def nhd(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def run(q: Tensor, k: Tensor, v: Tensor, recipe: str, **options):
    """The public function, which must have run the kernel."""
    ops.reset_counts()
    out = sage_attention(q, k, v, recipe=recipe, enable_gqa=q.shape[1] != k.shape[1], **options)
    assert [(key.recipe, key.backend, key.reason) for key in ops.counts()] == [(recipe, "sm90", "")]
    return out


def run_exact(q: Tensor, k: Tensor, v: Tensor, recipe: str, reason: str, **options):
    """The public function, which must have run the exact path and counted this reason."""
    ops.reset_counts()
    out = sage_attention(q, k, v, recipe=recipe, enable_gqa=q.shape[1] != k.shape[1], **options)
    assert [(key.recipe, key.backend, key.reason) for key in ops.counts()] == [("exact", "exact", reason)]
    return out


# --- number range ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_zero_value_channel_is_exactly_zero_in_both_layouts(recipe: str, layout: str) -> None:
    """A channel of V that is zero in one head only: a scale of 0 divides nothing, the others keep their accuracy."""
    q, k, v = qkv(2, 4, 777, dim=128)
    v[:, 1, :, 5] = 0
    tensors = (q, k, v) if layout == "HND" else (nhd(q), nhd(k), nhd(v))
    out = run(*tensors, recipe, tensor_layout=layout)
    out = out if layout == "HND" else out.transpose(1, 2)
    assert not out[:, 1, :, 5].any() and out[:, 0, :, 5].any()
    assert_attention_close(out, attention(q, k, v)[0], RECIPE_TOLERANCE[recipe])


@pytest.mark.parametrize("recipe", RECIPES)
def test_subnormal_inputs_behave_like_small_ones(recipe: str) -> None:
    """q, k, v of 1e-6, subnormal in fp16, and K exactly zero: within 6 % of the oracle rounded to fp16 as well."""
    q, k, v = (1e-6 * x for x in qkv(1, 4, 1031, dim=64, dtype=torch.float32))
    q, k, v = q.half(), k.half(), v.half()
    for keys in (k, torch.zeros_like(k)):
        got, want = run(q, keys, v, recipe), attention(q, keys, v)[0]
        error = measure(got, want.half())
        assert torch.isfinite(got).all() and error.rel_l1 < 0.06, error


@pytest.mark.parametrize("recipe", RECIPES)
def test_accuracy_does_not_jump_at_multiples_of_the_tile(recipe: str) -> None:
    """One query row, 6:1 grouped heads, kv_len across 128 and 256."""
    errors = {}
    for kv_len in (*range(120, 141), *range(250, 263)):
        q, k, v = qkv(1, 6, 1, kv_len, 128, kv_heads=1)
        errors[kv_len] = measure(run(q, k, v, recipe), attention(q, k, v)[0])
    sizes = [e.rel_l1 for e in errors.values()]
    assert min(e.cosine for e in errors.values()) > 0.998
    assert max(sizes) / min(sizes) < 2, {n: round(e.rel_l1, 4) for n, e in errors.items()}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gap", [7.5, 10.0])
def test_a_long_tail_of_small_weights_keeps_its_mass(recipe: str, gap: float) -> None:
    """One key stands out by `gap` among 16,384. V of ones returns one; with the large key's V at zero the output is
    the mass of the tail."""
    q, k = torch.zeros(1, 1, 64, 64, device=DEVICE).half(), torch.zeros(1, 1, 16384, 64, device=DEVICE).half()
    q[..., 0], k[0, 0, 5, 0] = 8, gap
    v = torch.ones_like(k)
    out = run(q, k, v, recipe)
    assert ((out >= 0.97) & (out <= 1.03)).all()
    v[0, 0, 5] = 0
    assert (run(q, k, v, recipe) - attention(q, k, v)[0]).abs().max() <= 0.03


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("factor", [1, 16, 400])
def test_inputs_that_were_fp8_before(recipe: str, factor: int) -> None:
    """Activations on E4M3's grid, times 1, 16 or 400: right at ordinary logits; with 0.1 % of entries at +-7,168 rows
    turn into single keys, and the output stays finite and within the range of its values."""
    tensors = [
        (x.to(torch.float8_e4m3fn).float() * factor).bfloat16() for x in qkv(2, 4, 1031, dim=64, dtype=torch.float32)
    ]
    scale = 64**-0.5 / factor**2
    want = attention(*tensors, scale=scale)[0]
    assert measure(run(*tensors, recipe, scale=scale), want).cosine > 0.998
    generator = torch.Generator().manual_seed(3)
    spots = [(torch.rand(x.shape, generator=generator) < 1e-3).to(DEVICE) for x in tensors]
    q, k, v = (torch.where(s, x.sign() * 448 * 16, x) for s, x in zip(spots, tensors, strict=True))
    out = run(q, k, v, recipe).float()
    high, low = v.float().amax(dim=-2, keepdim=True), v.float().amin(dim=-2, keepdim=True)
    slack = (high - low) * 0.07  # one E4M3 step
    assert torch.isfinite(out).all() and (out <= high + slack).all() and (out >= low - slack).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_many_small_cross_attentions_in_a_batch(recipe: str) -> None:
    """81 frames with 32 keys each: the first and the last are as good as any."""
    q, k, v = large_qkv(81, 12, 12, 1560, 32, 128, torch.float16)
    out = run(q, k, v, recipe)
    assert torch.isfinite(out).all()
    for item in (slice(0, 1), slice(40, 41), slice(80, 81)):
        want = attention(q[item], k[item], v[item])[0]
        assert_attention_close(out[item], want, RECIPE_TOLERANCE[recipe], what=f"items {item}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_huge_logits_in_packed_sequences_are_those_of_the_batch(recipe: str) -> None:
    """Scores of 1e10 in a packed call give what the unpacked call gives, and nothing that is not finite."""
    q, k, v = qkv(1, 4, 257, dim=128)
    q, k = q.sign() * 3e4, k.sign() * 3e4
    packed, cu = [nhd(x)[0] for x in (q, k, v)], torch.tensor([0, 257], device=DEVICE)
    out = run(*packed, recipe, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert torch.isfinite(out).all()
    assert torch.equal(out, nhd(run(q, k, v, recipe))[0])


# --- tails and lengths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("q_len", "kv_len", "dim"), [(1001, 503, 64), (1001, 503, 128), (9, 9, 64)])
def test_what_memory_held_before_does_not_matter(recipe: str, q_len: int, kv_len: int, dim: int) -> None:
    """NaN in free device memory and in shared memory: the bits are those of the run before."""
    q, k, v = qkv(2, 4, q_len, kv_len, dim)
    for is_causal in (False, True):
        first = run(q, k, v, recipe, is_causal=is_causal)
        assert_attention_close(first, attention(q, k, v, is_causal=is_causal)[0], RECIPE_TOLERANCE[recipe])
        poison()
        assert torch.equal(run(q, k, v, recipe, is_causal=is_causal), first)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_one_query_row(recipe: str, kv_heads: int) -> None:
    """Decode shapes, causal or not, are right when quantized by name, and exact by default."""
    for kv_len in (1, 2, 7, 64, 129, 1031):
        q, k, v = qkv(1, 4, 1, kv_len, 64, kv_heads=kv_heads)
        want = attention(q, k, v)[0]
        for is_causal in (False, True):  # one row at the bottom sees every key
            out = run(q, k, v, recipe, is_causal=is_causal)
            assert_attention_close(out, want, RECIPE_TOLERANCE[recipe], what=f"kv_len {kv_len}")
    assert_attention_close(run_exact(q, k, v, "sage2", "decode", is_causal=True), want, HALF)


def test_short_attention_is_the_unpatched_one_and_long_is_quantized() -> None:
    """By default 77 text tokens, and 1,024 tokens below the card's break-even length, are bit-equal to torch's own;
    4,096 tokens run on the kernel."""
    for length, reason in ((77, "short_kv"), (1024, "short")):
        short = qkv(1, 4, length, dim=64)
        assert torch.equal(run_exact(*short, "sage2", reason), F.scaled_dot_product_attention(*short))
    ops.reset_counts()
    q, k, v = large_qkv(4, 32, 32, 4096, 4096, 64)
    out = sage_attention(q, k, v)
    assert [(key.recipe, key.backend, key.reason) for key in ops.counts()] == [(FP8, "sm90", "")]
    assert_attention_close(out[:1, :2], attention(q[:1, :2], k[:1, :2], v[:1, :2])[0], T8F8)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_unused_cache_slots_behind_a_mask_may_hold_anything(recipe: str, bad: float, kind: str) -> None:
    """What a mask hides from every row cannot leak."""
    q, k, v = qkv(2, 2, 20, 128, 64)
    k[:, :, 40:], v[:, :, 40:] = bad, bad
    mask = (torch.arange(128, device=DEVICE) < 40).expand(2, 1, 1, 128)
    if kind == "float":
        mask = torch.zeros(mask.shape, dtype=torch.float16, device=DEVICE).masked_fill(~mask, -math.inf)
    want = attention(q, k[:, :, :40], v[:, :, :40])[0]
    assert_attention_close(run(q, k, v, recipe, attn_mask=mask), want, RECIPE_TOLERANCE[recipe])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("q_lens", "k_lens", "heads", "kv_heads", "is_causal"),
    [([5, 0, 7, 3], [9, 4, 0, 2], 4, 4, False), ([0, 1, 0, 1], [0, 3, 0, 5], 9, 3, True)],
)
def test_packed_items_without_rows_or_keys(recipe, q_lens, k_lens, heads, kv_heads, is_causal) -> None:
    """Items without keys give zero and -inf, items without rows give nothing, the rest is right."""
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0) for lens in (q_lens, k_lens))
    q = oracle.normal(sum(q_lens), heads, 64, seed=0)
    k, v = (oracle.normal(sum(k_lens), kv_heads, 64, seed=s) for s in (1, 2))
    want, want_lse = packed_attention(q, k, v, cu_q, cu_k, is_causal=is_causal)
    options = dict(cu_seqlens_q=cu_q.to(DEVICE), cu_seqlens_k=cu_k.to(DEVICE), is_causal=is_causal, return_lse=True)
    out, lse = run(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), recipe, **options)
    assert torch.equal(torch.isneginf(lse).cpu(), torch.isneginf(want_lse))
    assert_attention_close(out.cpu(), want, RECIPE_TOLERANCE[recipe])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("q_len", [1, 7, 64, 77, 193])
@pytest.mark.parametrize("dim", [40, 64, 128])
def test_nothing_is_written_beside_the_output(recipe: str, q_len: int, dim: int) -> None:
    """Items without keys and rows that end inside a tile: the bytes around output and log-sum-exp stay as they were."""
    q, k, v = qkv(3, 2, q_len, 130, dim)
    lens = torch.tensor([130, 0, 9], dtype=torch.int32, device=DEVICE)
    options = dict(scale=0.125, recipe=recipe, kv_lens=lens, is_causal=True, return_lse=True)
    want, want_lse = forward(q, k, v, **options)
    call = make_call(q, k, v, **options)
    buffers, guard, fields = [], 4096, library.CALL.unpack(call.args)
    for name, old in (("out", call.out), ("lse", call.lse)):  # the same call, into the middle of a larger buffer
        marked = torch.full((old.numel() + 2 * guard,), 7.0, dtype=old.dtype, device=DEVICE)
        fields[name] = marked[guard:].data_ptr()
        buffers.append(marked)
    call.args = library.CALL.pack(**fields) + call.args[library.CALL.size :]
    call.run()
    for marked, expected in zip(buffers, (want, want_lse), strict=True):
        inside = slice(guard, guard + expected.numel())
        assert torch.equal(marked[inside].view(expected.shape), expected)
        assert (marked[:guard] == 7).all() and (marked[inside.stop :] == 7).all()
    assert not want[1].any() and torch.isneginf(want_lse[1]).all()


# --- layouts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_strides_of_batch_one_and_head_one(recipe: str) -> None:
    """[1, 2, 4000, 64] with stride(0) = 17, one head with stride(1) = 5."""
    q, k, v = qkv(1, 2, 4000, dim=64)
    want = run(q, k, v, recipe)
    assert torch.equal(run(*(x.as_strided(x.shape, (17, *x.stride()[1:])) for x in (q, k, v)), recipe), want)
    one = [x[:, :1].contiguous() for x in (q, k, v)]
    odd = [x.as_strided(x.shape, (x.stride(0), 5, *x.stride()[2:])) for x in one]
    assert torch.equal(run(*odd, recipe), run(*one, recipe))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("which", range(8))
def test_each_of_q_k_v_may_have_its_own_layout(recipe: str, which: int) -> None:
    """Any subset of q, k, v as NHD views, and V as a slice of a wider last dimension."""
    q, k, v = qkv(1, 16, 62, dim=128)
    want = run(q, k, v, recipe)
    views = [nhd(x).transpose(1, 2) if which >> n & 1 else x for n, x in enumerate((q, k, v))]
    assert torch.equal(run(*views, recipe), want)
    wide = torch.cat([v, torch.full_like(v, math.nan)], dim=-1)[..., :128]
    assert torch.equal(run(views[0], views[1], wide, recipe), want)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_output_keeps_batch_shape_and_dtype(recipe: str, dtype: torch.dtype, layout: str) -> None:
    """Shape, dtype and device of query, lse [B, H, q_len] in float32, for 1 to 3 items, with and without lse; float32
    tensors run exact with the same shapes."""
    for batch in (1, 2, 3):
        q, k, v = qkv(batch, 3, 66, 80, 64, dtype=dtype)
        want, want_lse = attention(q, k, v)
        tensors = (q, k, v) if layout == "HND" else (nhd(q), nhd(k), nhd(v))
        out, lse = run(*tensors, recipe, tensor_layout=layout, return_lse=True)
        assert torch.equal(run(*tensors, recipe, tensor_layout=layout), out)
        assert (out.shape, out.dtype, out.device) == (tensors[0].shape, dtype, q.device) and out.is_contiguous()
        assert (lse.shape, lse.dtype, lse.device) == ((batch, 3, 66), torch.float32, q.device)
        assert_attention_close(out if layout == "HND" else out.transpose(1, 2), want, RECIPE_TOLERANCE[recipe])
        assert (lse - want_lse).abs().max() < 0.05
        single = [x.float() for x in tensors]
        out, lse = run_exact(*single, recipe, "dtype_float32", tensor_layout=layout, return_lse=True)
        assert out.shape == tensors[0].shape and out.dtype == torch.float32 and lse.shape == (batch, 3, 66)
        assert_attention_close(out if layout == "HND" else out.transpose(1, 2), want, HALF)


@pytest.mark.parametrize("recipe", RECIPES)
def test_layout_is_what_was_named(recipe: str) -> None:
    """With as many heads as tokens the shape cannot tell; the name does."""
    x = qkv(1, 32, 32, dim=64)
    hnd, as_nhd = run(*x, recipe), run(*x, recipe, tensor_layout="NHD")
    assert measure(hnd, as_nhd).cosine < 0.9
    assert_attention_close(hnd, attention(*x)[0], RECIPE_TOLERANCE[recipe])
    want = attention(*(t.transpose(1, 2) for t in x))[0].transpose(1, 2)
    assert_attention_close(as_nhd, want, RECIPE_TOLERANCE[recipe])


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_calls_merge_by_lse(recipe: str) -> None:
    """400 + 631 keys with a key bias of 30, merged, equal the single call; each lse is of the true logits, within
    0.05 nat, although they lie far from the smoothed ones."""
    q, k, v = qkv(1, 4, 77, 1031, 64)
    k = k + 30
    parts = [run(q, k[:, :, s], v[:, :, s], recipe, return_lse=True) for s in (slice(0, 400), slice(400, None))]
    want, want_lse = attention(q, k, v)
    assert_merged(parts, want, want_lse, recipe)
    assert (run(q, k, v, recipe, return_lse=True)[1] - want_lse).abs().max() < 0.05


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_calls_merge_by_lse_without_smoothing(recipe: str) -> None:
    """The same with neither K nor V smoothed, which the public function does not offer on this device."""
    q, k, v = qkv(1, 4, 77, 1031, 64)
    parts = []
    for s in (slice(0, 400), slice(400, None)):
        call = make_call(
            q, k[:, :, s], v[:, :, s], scale=0.125, recipe=recipe, smooth_k=False, smooth_v=False, return_lse=True
        )
        call.run()
        parts.append((call.out, call.lse))
    assert_merged(parts, *attention(q, k, v), recipe)


def assert_merged(parts: list[tuple[Tensor, Tensor]], want: Tensor, want_lse: Tensor, recipe: str) -> None:
    total = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out.double() * torch.exp(lse - total)[..., None] for out, lse in parts)
    assert_attention_close(merged, want, RECIPE_TOLERANCE[recipe])
    assert (total - want_lse).abs().max() < 0.05


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("width", [43, 1031])
def test_mask_strides_mean_nothing(recipe: str, width: int) -> None:
    """Bool and float masks of odd width, transposed, expanded over batch, heads or rows: read by position."""
    q, k, v = qkv(2, 2, 30, width, 64)
    seen = (torch.rand(2, 2, 30, width, generator=torch.Generator().manual_seed(0)) < 0.7).to(DEVICE)
    for full in (seen, torch.zeros(seen.shape, device=DEVICE).half().masked_fill(~seen, -math.inf)):
        kind = "bool" if full.dtype == torch.bool else "float"
        turned = full.transpose(-1, -2).contiguous().transpose(-1, -2)
        small = [full[:1], full[:, :1], full[:1, :1, :1], full[0, 0]]
        for mask in (full, turned, *small, *(x.expand(full.shape) for x in small)):
            out, want = run(q, k, v, recipe, attn_mask=mask), attention(q, k, v, mask)[0]
            assert_attention_close(out, want, RECIPE_TOLERANCE[recipe], what=f"{kind} {mask.stride()}")


def test_kernel_recipes_are_all_here() -> None:
    """A recipe that the kernel learns must be run by these tests too."""
    call = Call("sm90", "cuda", "bfloat16", 128, 128, 8, 8, 4096, 4096)
    taken = {r.name for r in ALL_RECIPES.values() if why_not(r, call, NO_LIMITS) is None}
    assert set(RECIPES) == {FP8, FP16} and taken == {FP8, FP16, *INT4_RECIPES}  # test_gpu_int4.py
