"""Regression tests for reported faults in how a call is understood: causality and packing, LLM features, head dims,
dtypes, compile, and keeping hands off the caller's tensors.

Each test is named after what it guards and names its fault in the docstring.
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from oracle import (
    HALF,
    QUANTIZED,
    RECIPE_TOLERANCE,
    SINGLE,
    T8F8,
    Tolerance,
    assert_attention_close,
    attention,
    measure,
    normal,
    packed_attention,
    qkv,
    visible,
)  # fmt: skip
from sage_patch.attention import sage_attention
from sage_patch.backends import why_not
from sage_patch.kernels import ops
from sage_patch.recipes import NO_LIMITS, Call, parse_recipe

DEFAULT = "qk_int8_pv_fp8"
INT8 = ["qk_int8_pv_fp16", DEFAULT]
ALL = ["exact", *QUANTIZED]


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: str = DEFAULT, **options):
    return sage_attention(q, k, v, recipe=recipe, enable_gqa=q.shape[1] != k.shape[1], **options)


def tolerance_of(recipe: str) -> Tolerance:
    return HALF if recipe == "exact" else RECIPE_TOLERANCE[recipe]


# --- G: causality and packing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("q_len", [64, 1])
def test_causal_corner_is_bottom_right(recipe: str, q_len: int) -> None:
    """G-01: with a cache longer than the query the last row sees everything; top-left only on request."""
    q, k, v = qkv(1, 4, q_len, 1031, 64)
    out = run(q, k, v, recipe, is_causal=True)
    assert_attention_close(out, attention(q, k, v, is_causal=True)[0], tolerance_of(recipe))
    top_left = run(q, k, v, recipe, is_causal=True, causal_align="top_left")
    assert measure(top_left, out).cosine < 0.5
    want = attention(q, k, v, is_causal=True, causal_align="top_left")[0]
    assert_attention_close(top_left, want, tolerance_of(recipe))


@pytest.mark.parametrize("dim", [96, 128])
@pytest.mark.parametrize("lengths", [(2048, 8192), (8192, 77), (1, 8192), (1031, 503)])
def test_lengths_may_differ(dim: int, lengths: tuple[int, int]) -> None:
    """G-03: cross lengths are first class. The oracle checks every 16th row: rows do not depend on each other."""
    q, k, v = qkv(1, 1, *lengths, dim)
    assert_attention_close(run(q, k, v)[:, :, ::16], attention(q[:, :, ::16], k, v)[0], T8F8)


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("lengths", [[4, 2, 4], [300, 731]])
def test_packed_segments_do_not_see_each_other(recipe: str, lengths: list[int]) -> None:
    """G-10: another first segment changes no bit of the others."""
    cu = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (normal(int(cu[-1]), 2, 64, seed=s) for s in range(3))
    options = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, is_causal=True)
    out = run(q, k, v, recipe, **options)
    assert_attention_close(
        out.transpose(0, 1), packed_attention(q, k, v, cu, cu, is_causal=True)[0].transpose(0, 1), tolerance_of(recipe)
    )
    first = lengths[0]
    for x in (q, k, v):
        x[:first] = 100 * normal(first, 2, 64, seed=9)
    other = run(q, k, v, recipe, **options)
    assert torch.equal(other[first:], out[first:]) and not torch.equal(other[:first], out[:first])


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_early_causal_rows_are_as_good_as_late_ones(recipe: str) -> None:
    """G-13: rows 0..63 of 2,048 err at most twice as much as rows 1,024 on; row 0 is V[0] within one step."""
    q, k, v = qkv(1, 2, 2048, dim=64)
    out, want = run(q, k, v, recipe, is_causal=True), attention(q, k, v, is_causal=True)[0]
    early, late = measure(out[:, :, :64], want[:, :, :64]), measure(out[:, :, 1024:], want[:, :, 1024:])
    assert early.rel_l1 <= 2 * late.rel_l1
    step = 2.0**-3 if "fp8" in recipe else 2.0**-10
    centred = v[:, :, 0].float() - v.float().mean(dim=2)
    assert ((out[:, :, 0] - v[:, :, 0]).abs() <= step * centred.abs() + 2e-3).all()


# --- H: features of language models ---------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["exact", *INT8])
def test_sink_takes_its_share(recipe: str) -> None:
    """H-01: a sink of 3.0 a head over 128 keys: dropping it leaves cosine 0.9999 but a norm 10 % too large."""
    q, k, v = qkv(2, 4, 128, dim=64)
    sinks = torch.full((4,), 3.0)
    error = assert_attention_close(
        run(q, k, v, recipe, sinks=sinks), attention(q, k, v, sinks=sinks)[0], tolerance_of(recipe)
    )
    assert abs(error.norm_ratio - 1) < 0.01, error
    if recipe != DEFAULT:  # with FP8 values 3.8 % is the recipe's own noise
        assert error.rel_l1 < 0.03, error
    dropped = measure(run(q, k, v, recipe), attention(q, k, v, sinks=sinks)[0])
    assert dropped.norm_ratio > 1.08


@pytest.mark.parametrize("recipe", ["exact", *INT8])
def test_softcap_is_applied(recipe: str) -> None:
    """H-04: logits of up to 326 under a cap of 50, on the true scores, K's mean included."""
    q, k, v = qkv(1, 4, 1031, dim=64)
    q, k = q * 8, k * 8
    want = attention(q, k, v, softcap=50.0)[0]
    tolerance = HALF if recipe == "exact" else T8F8
    assert_attention_close(run(q, k, v, recipe, softcap=50.0), want, tolerance)
    assert measure(run(q, k, v, recipe), want).cosine < 0.5
    q, k = q / 8, k / 8 + 3 * normal(1, 4, 1, 64, seed=5)
    assert_attention_close(run(q, k, v, recipe, softcap=5.0), attention(q, k, v, softcap=5.0)[0], tolerance)


@pytest.mark.parametrize("recipe", ["exact", *INT8])
def test_window_is_exactly_w_keys(recipe: str) -> None:
    """H-07: 16 keys with its own; one more costs a worst row of cosine -0.24 and hardly shows on average."""
    q, k, v = qkv(2, 4, 256, dim=64)
    q, k = q * 2, k * 2
    i = torch.arange(256)
    distance = i[:, None] - i[None, :]
    want = attention(q, k, v, (distance >= 0) & (distance < 16))[0]
    assert_attention_close(run(q, k, v, recipe, is_causal=True, window=16), want, HALF if recipe == "exact" else T8F8)
    assert measure(run(q, k, v, recipe, is_causal=True, window=17), want).worst_row < 0.5


@pytest.mark.parametrize("recipe", ALL)
def test_no_window_and_the_smallest_one(recipe: str) -> None:
    """H-09: None, 0 and negative are no window; a window of 1 sees only its own key and returns V."""
    q, k, v = qkv(1, 2, 200, dim=64)
    want = run(q, k, v, recipe, is_causal=True)
    for window in (None, 0, -1, (-1, -1), (-5, -5)):
        assert torch.equal(run(q, k, v, recipe, is_causal=True, window=window), want)
    own = run(q, k, v, recipe, is_causal=True, window=1)
    if "fp8" in recipe:
        assert measure(own, v).rel_l1 < T8F8.rel_l1
    else:
        assert torch.equal(own, v)


@pytest.mark.parametrize(("heads", "kv_heads"), [(33, 2), (3, 2), (2, 3), (0, 1)])
def test_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int) -> None:
    """H-11: before anything runs, with both counts in the message."""
    q, k = torch.zeros(1, heads, 130, 64).half(), torch.zeros(1, kv_heads, 130, 64).half()
    with pytest.raises(ValueError, match=f"num_heads {heads} .* num_kv_heads {kv_heads}"):
        sage_attention(q, k, k, enable_gqa=True)
    assert not ops.counts()


@pytest.mark.parametrize("recipe", ALL)
def test_drop_in_for_sdpa_with_grouped_heads(recipe: str) -> None:
    """H-13: enable_gqa by keyword or as the eighth positional argument; grouped equals repeated heads."""
    q, k, v = qkv(1, 8, 130, dim=64, kv_heads=2)
    named = sage_attention(q, k, v, recipe=recipe, enable_gqa=True)
    assert torch.equal(sage_attention(q, k, v, None, 0.0, False, None, True, recipe=recipe), named)
    wide = [x.repeat_interleave(4, dim=1) for x in (k, v)]
    repeated = sage_attention(q, *wide, recipe=recipe)
    assert measure(named, repeated).rel_l1 < 1e-4


@pytest.mark.parametrize("dim", [40, 72, 80, 96, 112])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("recipe", INT8)
def test_scale_is_that_of_the_true_head_dim(dim: int, scale: float | None, recipe: str) -> None:
    """H-14: 1/sqrt(D) of the given D, never of a padded one; an explicit scale always wins."""
    q, k, v = qkv(1, 2, 200, 300, dim)
    want = attention(q, k, v, scale=scale)[0]
    factor = (scale or dim**-0.5) * dim**0.5  # QK noise grows with the scale, and T8F8 is for factor 1
    tolerance = T8F8 if factor < 2.5 else Tolerance(0.995, 0.06, 0.9, "T8F8 with room in the rows for sharper softmax")
    assert_attention_close(run(q, k, v, recipe, scale=scale), want, tolerance)


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize(("dim", "v_dim"), [(192, 128), (64, 128), (48, 32)])
def test_value_head_dim_of_its_own(recipe: str, dim: int, v_dim: int) -> None:
    """H-15: the output has V's last dimension, and is right, in both layouts."""
    q, k, v = qkv(1, 2, 140, 200, dim, v_dim)
    out = run(q, k, v, recipe)
    assert out.shape == (1, 2, 140, v_dim)
    assert_attention_close(out, attention(q, k, v)[0], tolerance_of(recipe))
    turned = run(*(x.transpose(1, 2) for x in (q, k, v)), recipe, tensor_layout="NHD")
    assert measure(turned.transpose(1, 2), out).rel_l1 < 1e-4


@pytest.mark.parametrize("recipe", ALL)
def test_dropout_is_never_lost(recipe: str) -> None:
    """H-18: dropout 0.1 drops, through SDPA's own generator, and is counted; dropout 0.0 runs quantized."""
    q, k, v = qkv(1, 2, 200, dim=64)
    torch.manual_seed(0)
    want = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    torch.manual_seed(0)
    assert torch.equal(run(q, k, v, recipe, dropout_p=0.1), want)
    (key,) = ops.counts()
    assert key.reason == ("policy" if recipe == "exact" else "dropout")
    assert_attention_close(run(q, k, v, recipe, dropout_p=0.0), attention(q, k, v)[0], tolerance_of(recipe))


# --- I: head dim ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [8, 40, 64, 72, 80, 96, 128, 160, 192, 256, 384, 512])
@pytest.mark.parametrize("recipe", ["sage2", *INT8])
def test_no_head_dim_is_an_error(dim: int, recipe: str) -> None:
    """I-01, I-04: quantized and right, or exact and counted; the output is contiguous with the true head_dim."""
    q, k, v = qkv(1, 2, 130, 200, dim)
    out = run(q, k, v, recipe)
    (key,) = ops.counts()
    exact = key.recipe == "exact"
    assert bool(key.reason) == exact and out.shape == q.shape and out.is_contiguous()
    assert_attention_close(out, attention(q, k, v)[0], HALF if exact else T8F8)


# --- J: dtypes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value_dtype", [torch.bfloat16, torch.float16])
def test_float32_queries_with_half_values(value_dtype: torch.dtype) -> None:
    """J-01: q, k float32 and V in half: exact in the common dtype, counted, output in query's dtype."""
    q, k, v = qkv(1, 2, 140, dim=64, dtype=torch.float32)
    out = sage_attention(q, k, v.to(value_dtype))
    assert out.dtype == torch.float32
    assert_attention_close(out, attention(q, k, v.to(value_dtype))[0], SINGLE)
    assert [key.reason for key in ops.counts()] == ["dtype_mixed"]


@pytest.mark.parametrize("recipe", ["sage2", *ALL])
def test_under_autocast_as_sdpa(recipe: str) -> None:
    """J-03: norms under autocast return float32 q and k beside a bfloat16 V: output bfloat16, as SDPA's."""
    q, k, v = qkv(1, 2, 140, dim=64, dtype=torch.float32)
    v = v.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, theirs = run(q, k, v, recipe), F.scaled_dot_product_attention(q, k, v)
    assert out.dtype == theirs.dtype == torch.bfloat16
    want = attention(q.bfloat16(), k.bfloat16(), v)[0]
    assert_attention_close(out, want, tolerance_of(DEFAULT if recipe == "sage2" else recipe))
    (key,) = ops.counts()
    assert (key.recipe == "exact") == (recipe == "exact")


@pytest.mark.parametrize("length", [77, 2048])
def test_float32_is_exact_unless_asked(length: int) -> None:
    """J-05: who runs float32 asked for float32 accuracy; by name it is quantized."""
    q, k, v = qkv(1, 1, length, dim=64, dtype=torch.float32)
    assert torch.equal(sage_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert [key.reason for key in ops.counts()] == ["dtype_float32"]
    assert_attention_close(run(q, k, v), attention(q, k, v)[0], T8F8)


def test_every_exact_call_is_in_the_counts() -> None:
    """J-06: ten float32 calls are ten counted calls with reason dtype_float32."""
    tensors = qkv(1, 1, 130, dim=32, dtype=torch.float32)
    for _ in range(10):
        sage_attention(*tensors)
    assert [(key.backend, key.reason, n) for key, n in ops.counts().items()] == [("exact", "dtype_float32", 10)]


# --- K: log-sum-exp of smoothed keys --------------------------------------------------------------------------


@pytest.mark.parametrize("smooth", ["none", "k", "q", "qk"])
@pytest.mark.parametrize("granularity", ["thread", "token"])
def test_lse_counts_the_mean_that_smoothing_removed(smooth: str, granularity: str) -> None:
    """K-07: K + 30: the lse of the true logits, which lie hundreds away from the smoothed ones."""
    q, k, v = qkv(1, 4, 200, 1031, 64)
    shifted = k + 30
    want = attention(q, shifted, v)[1]
    _, lse = run(q, shifted, v, f"{DEFAULT}:smooth={smooth},granularity={granularity}", return_lse=True)
    if smooth in ("k", "qk"):
        assert (lse - want).abs().max() < 0.05
    else:  # not smoothed: a key near 30 has ten times the INT8 noise, but nothing of its size is missing
        assert (lse - want).abs().mean() < 0.3
    assert (want - attention(q, k, v)[1]).abs().max() > 50


def test_backend_is_that_of_the_tensors_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda:1 is judged by its own capability, while cuda:0 is current; a device without an index is the current
    one. The GPU tests run the call itself where there are two devices."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(9, 0), (8, 6)].__getitem__)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    ops._cached_backend.cache_clear()
    try:
        found = [ops.backend_for(torch.device(name)) for name in ("cuda:0", "cuda:1", "cuda")]
    finally:
        ops._cached_backend.cache_clear()
    assert found == ["sm90", "none", "sm90"]


# --- M, R, S: inputs, gradients, repeatability ----------------------------------------------------------------


@pytest.mark.parametrize("recipe", [*ALL, f"{DEFAULT}:smooth=qk", f"{DEFAULT}:granularity=tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("view", ["contiguous", "nhd", "cache"])
def test_inputs_are_read_only(recipe: str, dtype: torch.dtype, view: str) -> None:
    """M-16: q, k, v, mask and sinks keep every bit, as views and as slices of a cache too."""
    q, k, v = qkv(1, 2, 70, 140, 64, dtype=dtype)
    if view == "nhd":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif view == "cache":
        k, v = (torch.cat([x, torch.full_like(x, math.nan)], dim=2)[:, :, :140] for x in (k, v))
    mask = torch.zeros(1, 1, 70, 140, dtype=dtype).masked_fill(~visible(70, 140, True), -math.inf)
    sinks = torch.zeros(2)
    before = [x.clone() for x in (q, k, v, mask, sinks)]
    run(q, k, v, recipe, attn_mask=mask, sinks=sinks, softcap=30.0, return_lse=True)
    run(q, k, v, recipe)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, mask, sinks), before, strict=True))


@pytest.mark.parametrize("recipe", ["sage2", *ALL])
def test_projections_get_their_gradient(recipe: str) -> None:
    """R-01: with requires_grad the gradients are SDPA's, bit for bit; without grad mode the call is quantized."""
    leaves, theirs = ([x.requires_grad_() for x in qkv(1, 2, 140, dim=64, dtype=torch.bfloat16)] for _ in range(2))
    out = run(*leaves, recipe)
    assert out.grad_fn is not None
    out.float().square().sum().backward()
    F.scaled_dot_product_attention(*theirs).float().square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) and a.grad.any() for a, b in zip(leaves, theirs, strict=True))
    ops.reset_counts()
    with torch.no_grad():
        assert run(*leaves, recipe).grad_fn is None
    (key,) = ops.counts()
    assert key.recipe == (DEFAULT if recipe == "sage2" else recipe)


def test_gradients_decide_before_anything_else() -> None:
    """R-01: a recipe never claims a call that needs gradients, whatever its size and limits."""
    call = Call("reference", "cpu", "float16", 64, 64, 2, 2, 500, 500, needs_grad=True)
    assert {why_not(parse_recipe(r), call, NO_LIMITS) for r in QUANTIZED} == {"needs_grad"}


HASH = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from oracle import QUANTIZED, qkv
from sage_patch.attention import sage_attention
for recipe in QUANTIZED:
    out = sage_attention(*qkv(1, 2, 1031, dim=64), recipe=recipe, is_causal=True)
    print(hashlib.sha256(out.numpy().tobytes()).hexdigest())
"""


def test_same_bits_every_time_and_in_another_process() -> None:
    """S-01: repeated calls, a second process, and deterministic mode give one answer."""
    tensors = qkv(1, 2, 1031, dim=64)
    hashes = []
    torch.use_deterministic_algorithms(True)
    try:
        for recipe in QUANTIZED:
            outs = [run(*tensors, recipe, is_causal=True) for _ in range(10)]
            assert all(torch.equal(out, outs[0]) for out in outs)
            hashes.append(hashlib.sha256(outs[0].numpy().tobytes()).hexdigest())
    finally:
        torch.use_deterministic_algorithms(False)
    here = Path(__file__).parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    told = subprocess.run([sys.executable, "-c", HASH, str(here)], capture_output=True, text=True, env=environment)
    assert told.returncode == 0, told.stderr
    assert told.stdout.split() == hashes
