"""The exact path: the whole argument set against the oracle, gradients, and bit equality with torch's SDPA."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from oracle import HALF, SINGLE, assert_attention_close, attention, normal, packed_attention, qkv
from sage_patch.attention import sage_attention
from sage_patch.dispatch import Options, attend_with_weights
from sage_patch.kernels import ops

B, HQ, HKV, NQ, NK, D = 2, 4, 2, 37, 53, 24
WINDOWS = {"no window": None, "w8": 8, "(5, 3)": (5, 3), "(-1, 2)": (-1, 2), "(4, -1)": (4, -1)}
BANDS = {"all": {}, "bottom right": dict(is_causal=True), "top left": dict(is_causal=True, causal_align="top_left")}
EXTRAS = {
    "plain": {},
    "softcap": dict(softcap=5.0),
    "sinks": dict(sinks=torch.tensor([3.0, -1.0, 0.0, 10.0])),
    "both": dict(softcap=2.0, sinks=torch.tensor([0.5, 2.0, -40.0, 1.0])),
}


def masks(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor | None]:
    """One mask of every kind and broadcast shape; some rows see nothing."""
    generator = torch.Generator().manual_seed(5)
    full = torch.rand(B, HQ, NQ, NK, generator=generator) < 0.6
    full[0, :, 3] = False
    keys = torch.rand(B, 1, 1, NK, generator=generator) < 0.6
    bias = torch.randn(B, HQ, NQ, NK, generator=generator)
    return {
        "none": None,
        "bool full": full,
        "bool keys": keys,
        "bool rows": full[:1, :1, :, :1].clone(),
        "bool 2d": full[1, 0],
        "bool heads": full[:1, :, :1],
        "float full": bias.masked_fill(~full, -math.inf).to(dtype),
        "float bias": bias[:1].to(dtype),
        "float keys": torch.zeros(B, 1, 1, NK).masked_fill(~keys, -math.inf).to(dtype),
        "float 3d": bias[0].to(dtype),
    }


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return qkv(B, HQ, NQ, NK, D, kv_heads=HKV, dtype=dtype)


def exact(*tensors: torch.Tensor, **options):
    grouped = tensors[0].shape[1] != tensors[1].shape[1]
    return sage_attention(*tensors, recipe="exact", enable_gqa=grouped, **options)


@pytest.mark.parametrize("mask", list(masks()))
@pytest.mark.parametrize("band", BANDS)
def test_whole_argument_set(mask: str, band: str) -> None:
    """Every mask kind x causal corner x window x softcap x sinks x LSE, in float32, against float64."""
    q, k, v = inputs()
    for window, extra in itertools.product(WINDOWS.values(), EXTRAS.values()):
        options = dict(attn_mask=masks()[mask], window=window, **BANDS[band], **extra)
        want, want_lse = attention(q, k, v, **options)
        out, lse = exact(q, k, v, return_lse=True, **options)
        what = f"{mask}, {band}, window {window}, {list(extra)}"
        assert_attention_close(out, want, SINGLE, what=what)
        assert_attention_close(exact(q, k, v, **options), want, SINGLE, what=f"{what}, no lse")
        assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse)), what
        assert (lse - want_lse).nan_to_num(0).abs().max() < 1e-5, what


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mask", ["none", "bool full", "float full"])
def test_other_dtypes(dtype: torch.dtype, mask: str) -> None:
    """Half precision within its roundings, float64 better than float32; LSE is float32 in all."""
    q, k, v = inputs(dtype)
    for extra in EXTRAS.values():
        options = dict(attn_mask=masks(dtype)[mask], is_causal=True, **extra)
        want, want_lse = attention(q, k, v, **options)
        for return_lse in (False, True):
            out = exact(q, k, v, return_lse=return_lse, **options)
            out, lse = out if return_lse else (out, None)
            assert out.dtype == dtype
            assert_attention_close(out, want, SINGLE if dtype == torch.float64 else HALF, what=str(extra))
            assert lse is None or (lse.dtype == torch.float32 and (lse - want_lse).nan_to_num(0).abs().max() < 1e-5)


@pytest.mark.parametrize("scale", [None, 0.3, 1.0, 1e-3])
@pytest.mark.parametrize(("dim", "v_dim"), [(24, 24), (72, 40), (40, 72), (1, 1), (512, 512)])
def test_scale_and_head_dims(scale: float | None, dim: int, v_dim: int) -> None:
    """The default scale is that of the given head_dim; an explicit scale wins; V's head_dim is its own."""
    q, k, v = qkv(1, 2, 20, 30, dim, v_dim, dtype=torch.float32)
    want, want_lse = attention(q, k, v, scale=scale)
    out, lse = exact(q, k, v, scale=scale, return_lse=True)
    assert_attention_close(out, want, SINGLE)
    assert_attention_close(exact(q, k, v, scale=scale), want, SINGLE)
    assert torch.allclose(lse.double(), want_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_packed_sequences(band: str, extra: str) -> None:
    """Packed sequences, empty ones included, equal each sequence on its own."""
    cu_q, cu_k = torch.tensor([0, 5, 5, 12, 15]), torch.tensor([0, 9, 13, 13, 15])
    q, k, v = normal(17, 4, 24, seed=1), normal(16, 2, 24, seed=2), normal(16, 2, 24, seed=3)
    q, k, v = q.float(), k.float(), v.float()
    options = dict(**BANDS[band], **EXTRAS[extra], window=6)
    out, lse = exact(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, **options)
    want, want_lse = packed_attention(q, k, v, cu_q, cu_k, **options)
    assert out.shape == (17, 4, 24) and lse.shape == (4, 17)
    assert_attention_close(out, want, SINGLE)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))
    assert (lse - want_lse).nan_to_num(0).abs().max() < 1e-5


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("band", BANDS)
def test_hidden_nan_cannot_leak(extra: str, band: str) -> None:
    """Keys that no row sees may hold anything; a row that sees nothing is zero by selection."""
    q, k, v = inputs()
    seen = masks()["bool keys"]
    assert seen is not None
    seen = seen.clone()
    seen[1] = False  # a whole item that sees nothing
    k = k.masked_fill(~seen[:, 0, 0, None, :, None], math.nan)
    v = v.masked_fill(~seen[:, 0, 0, None, :, None], math.inf)
    options = dict(**BANDS[band], **EXTRAS[extra])
    for mask in (seen, torch.zeros(seen.shape).masked_fill(~seen, -math.inf)):
        want, want_lse = attention(q, k.nan_to_num(0), v.nan_to_num(0, 0, 0), mask, **options)
        out, lse = exact(q, k, v, attn_mask=mask, return_lse=True, **options)
        assert_attention_close(out, want, SINGLE)
        assert_attention_close(exact(q, k, v, attn_mask=mask, **options), want, SINGLE)
        assert not out[1].any() and torch.isneginf(lse[1]).all()


def test_long_masks_are_computed_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocked form gives the same answer whatever the block of rows."""
    q, k, v = inputs()
    options = dict(attn_mask=masks()["float full"], is_causal=True, window=20)
    whole, whole_lse = exact(q, k, v, return_lse=True, **options)
    for elements in (1, NK * 5, NK * B * HQ * 7):
        monkeypatch.setattr("sage_patch.reference.exact._SCORES_PER_STEP", elements)
        out, lse = exact(q, k, v, return_lse=True, **options)
        assert torch.allclose(out, whole, atol=1e-6) and torch.allclose(lse, whole_lse, atol=1e-6)
        assert torch.allclose(exact(q, k, v, **options), whole, atol=1e-6)


@pytest.mark.parametrize("mask", list(masks()))
@pytest.mark.parametrize("extra", EXTRAS)
def test_weights_themselves(mask: str, extra: str) -> None:
    """output_attentions: the oracle's weights (its output for V = identity), under autocast too, counted; rows that
    see nothing are zero, hidden NaN cannot leak, and the weights make the output."""
    q, k, v = inputs()
    given = masks()[mask]
    eye = torch.eye(NK).expand(B, HKV, NK, NK)
    options = dict(is_causal=True, **EXTRAS[extra])
    want_weights, want = (attention(q, k, x, given, **options)[0] for x in (eye, v))
    if mask == "bool keys":
        bad = ~given[:, 0, 0, None, :, None]
        k, v = k.masked_fill(bad, math.nan), v.masked_fill(bad, math.nan)
    given = given[(None,) * (4 - given.dim())] if given is not None else None
    call = Options(
        attn_mask=given, scale=D**-0.5, right=0, softcap=options.get("softcap", 0.0), sinks=options.get("sinks")
    )
    out, weights = attend_with_weights(q, k, v, call, "w")
    assert_attention_close(weights, want_weights, SINGLE)
    assert_attention_close(out, want, SINGLE)
    assert [key.reason for key in ops.counts()] == ["output_attentions"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attend_with_weights(q, k, v, call, "w")[1], weights)


# --- bits of SDPA ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", [(37, 37), (37, 53), (53, 37), (1, 53), (300, 300)])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_bit_equal_to_sdpa(dtype: torch.dtype, lengths: tuple[int, int], kv_heads: int) -> None:
    """Wherever SDPA expresses the call, an exact call is an unpatched call: causal (SDPA's top-left corner), key
    padding, boolean and additive masks, scale, grouped heads, NHD views."""
    q, k, v = qkv(2, 4, *lengths, 32, kv_heads=kv_heads, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    padding = torch.rand(2, 1, 1, lengths[1], generator=generator) < 0.7
    rows = torch.rand(2, 1, *lengths, generator=generator) < 0.7
    bias = torch.randn(1, 4, *lengths, generator=generator).to(dtype)
    gqa = kv_heads != 4
    calls = [
        dict(),
        dict(scale=0.3),
        dict(is_causal=True),
        dict(attn_mask=padding),
        dict(attn_mask=rows),
        dict(attn_mask=bias, scale=0.1),
        dict(attn_mask=bias.masked_fill(~rows, -math.inf)),
    ]
    for options in calls:
        want = F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa, **options)
        corner = dict(causal_align="top_left") if options.get("is_causal") else {}
        got = sage_attention(q, k, v, enable_gqa=gqa, recipe="exact", **options, **corner)
        assert torch.equal(got, want), list(options)
        nhd = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        got = sage_attention(*nhd, enable_gqa=gqa, recipe="exact", tensor_layout="NHD", **options, **corner)
        assert torch.equal(got.transpose(1, 2), want), f"NHD {list(options)}"


def test_dropout_is_sdpas_dropout() -> None:
    """Same seed, same dropped weights as SDPA, and counted; dropout 0 drops nothing."""
    q, k, v = qkv(2, 4, 37, dim=32, dtype=torch.float32)
    torch.manual_seed(3)
    want = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, is_causal=True)
    torch.manual_seed(3)
    assert torch.equal(exact(q, k, v, dropout_p=0.25, is_causal=True), want)
    assert not torch.equal(exact(q, k, v, is_causal=True), want)


@pytest.mark.parametrize("extra", ["softcap", "sinks", "both"])
def test_dropout_of_the_forms_sdpa_lacks(extra: str) -> None:
    """With the weights that were kept known, the oracle's answer: dropped after the softmax, scaled by 1/(1-p)."""
    q, k, v = inputs()
    eye = torch.eye(NK).expand(B, HKV, NK, NK).contiguous()  # V = identity reads the weights themselves
    torch.manual_seed(7)
    dropped = exact(q, k, eye, dropout_p=0.25, **EXTRAS[extra])
    keep = (dropped != 0).double() / 0.75
    assert 0.2 < (dropped == 0).float().mean() < 0.3
    torch.manual_seed(7)
    out = exact(q, k, v, dropout_p=0.25, **EXTRAS[extra])
    assert_attention_close(out, attention(q, k, v, keep=keep, **EXTRAS[extra])[0], SINGLE)


# --- gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "bool keys", "float full"])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("band", ["all", "bottom right", "top left"])
def test_gradients(mask: str, extra: str, band: str) -> None:
    """Gradients of output and LSE by q, k, v, an additive mask and sinks equal autograd of the oracle; rows that
    see nothing give zero gradient, never NaN."""
    options = dict(**BANDS[band], **EXTRAS[extra])
    leaves = [*inputs(torch.float64)]
    given = masks(torch.float64)[mask]
    if given is not None:
        options["attn_mask"] = given
        if given.is_floating_point():
            leaves.append(given)
    if "sinks" in options:
        options["sinks"] = options["sinks"].double()
        leaves.append(options["sinks"])
    grads = []
    for call in (lambda *x, **o: exact(*x, return_lse=True, **o), attention):
        fresh = [x.clone().requires_grad_() for x in leaves]
        named = dict(options)
        if given is not None and given.is_floating_point():
            named["attn_mask"] = fresh[3]
        if "sinks" in options:
            named["sinks"] = fresh[-1]
        out, lse = call(*fresh[:3], **named)
        weight = normal(*out.shape, dtype=torch.float64, seed=8)
        ((out * weight).sum() + lse.masked_fill(torch.isneginf(lse), 0).double().sum()).backward()
        grads.append([x.grad for x in fresh])
    for got, want in zip(*grads, strict=True):
        assert torch.isfinite(got).all()
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6), (got - want).abs().max()


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_gradients_are_bit_equal_to_sdpas(layout: str) -> None:
    """Training with the patch is training without it."""
    q, k, v = qkv(2, 4, 37, dim=32, dtype=torch.float32)
    ours, theirs = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    weight = normal(2, 4, 37, 32, dtype=torch.float32, seed=4)
    views = [x.transpose(1, 2) if layout == "NHD" else x for x in ours]
    out = sage_attention(*views, is_causal=True, tensor_layout=layout)
    out = out.transpose(1, 2) if layout == "NHD" else out
    (out * weight).sum().backward()
    (F.scaled_dot_product_attention(*theirs, is_causal=True) * weight).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))


def test_gradients_of_packed_sequences() -> None:
    """Each sequence's gradient is its own; tokens of empty sequences and of none get zero."""
    cu_q, cu_k = torch.tensor([1, 5, 5, 12]), torch.tensor([2, 9, 13, 13])
    leaves = [normal(15, 2, 24, dtype=torch.float64, seed=n) for n in range(3)]
    grads = []
    for call in (exact, packed_attention):
        fresh = [x.clone().requires_grad_() for x in leaves]
        options = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, is_causal=True)
        out = call(*fresh, **options) if call is exact else call(*fresh, **options)[0]
        assert out.shape == (15, 2, 24)
        (out * normal(*out.shape, dtype=torch.float64, seed=8)).sum().backward()
        grads.append([x.grad for x in fresh])
    for got, want in zip(*grads, strict=True):
        assert torch.allclose(got, want, rtol=1e-6, atol=1e-8)
