"""The exact path by each of torch's SDPA backends, on the CPU and on a card: rows that see no key, gradients, large
batches, and the whole argument set, against float64.

A forced backend that cannot run a call leaves it to "math", as torch's own choice would.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_exact import BANDS, EXTRAS, HKV, HQ, NK, NQ, WINDOWS, B, D, masks
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from oracle import HALF, SINGLE, Tolerance, assert_attention_close, attention, normal, packed_attention, qkv
from sage_patch.attention import sage_attention
from sage_patch.reference import exact
from sage_patch.reference.visibility import Visibility

CPU = [("cpu", "MATH"), ("cpu", "FLASH_ATTENTION")]
CARD = [("cuda", name) for name in ("MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION")]
PLACES = [
    *(pytest.param(*place, id="-".join(place)) for place in CPU),
    *(pytest.param(*place, id="-".join(place), marks=pytest.mark.gpu) for place in CARD),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
TOLERANCE: dict[torch.dtype, Tolerance] = {torch.float16: HALF, torch.bfloat16: HALF, torch.float32: SINGLE}


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run under the backend that the test's parameters name."""
    chosen = getattr(SDPBackend, request.node.callspec.params["name"])
    with sdpa_kernel([chosen, SDPBackend.MATH], set_priority=True):
        yield


every_backend = pytest.mark.parametrize(("device", "name"), PLACES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def run(*tensors: Tensor, device: str, **options: Any) -> Any:
    """sage_attention of CPU tensors, on the device; results come back."""
    moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in options.items()}
    heads = 1  # both in [B, H, N, D] and in packed [total, H, D]
    grouped = tensors[0].shape[heads] != tensors[1].shape[heads]
    out = sage_attention(*(x.to(device) for x in tensors), enable_gqa=grouped, **{"recipe": "exact", **moved})
    return tuple(x.cpu() for x in out) if isinstance(out, tuple) else out.cpu()


@every_backend
@every_dtype
@pytest.mark.parametrize("band", BANDS)
def test_whole_argument_set(device: str, name: str, dtype: torch.dtype, band: str, backend: None) -> None:
    """Every mask kind x causal corner x window, with and without what torch cannot express."""
    q, k, v = qkv(B, HQ, NQ, NK, D, kv_heads=HKV, dtype=dtype)
    for (kind, mask), window in itertools.product(masks(dtype).items(), WINDOWS.values()):
        options = dict(attn_mask=mask, window=window, **BANDS[band])
        want, want_lse = attention(q, k, v, **options)
        assert_attention_close(run(q, k, v, device=device, **options), want, TOLERANCE[dtype], what=f"{kind} {window}")
        out, lse = run(q, k, v, device=device, return_lse=True, **options, **EXTRAS["plain"])
        assert_attention_close(out, want, TOLERANCE[dtype], what=f"{kind} {window}, lse")
        assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse)), kind
        assert (lse - want_lse).nan_to_num(0).abs().max() < 1e-4, kind
    for extra in ("softcap", "sinks", "both"):
        want, _ = attention(q, k, v, **BANDS[band], **EXTRAS[extra])
        assert_attention_close(run(q, k, v, device=device, **BANDS[band], **EXTRAS[extra]), want, TOLERANCE[dtype])


# --- rows that see no key -------------------------------------------------------------------------------------


def blind_calls(dtype: torch.dtype) -> dict[str, tuple[int, int, dict[str, Any]]]:
    """(q_len, kv_len, options) of calls in which some rows see no key."""
    padding = torch.ones(2, 1, 1, 64, dtype=torch.bool)
    padding[0, ..., :40] = False  # left padding
    item = torch.ones(2, 1, 1, 64, dtype=torch.bool)
    item[1] = False
    rows = torch.ones(2, 1, 64, 64, dtype=torch.bool)
    rows[0, :, 5:9] = False

    def added(seen: Tensor) -> Tensor:
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -math.inf)

    return {
        "more queries than keys": (64, 16, dict(is_causal=True)),
        "more queries than keys, 1 key": (64, 1, dict(is_causal=True)),
        "a window behind the keys": (64, 16, dict(is_causal=True, causal_align="top_left", window=8)),
        "a window on both sides": (64, 16, dict(causal_align="top_left", window=(4, 3))),
        "left padding, causal": (64, 64, dict(is_causal=True, attn_mask=padding)),
        "left padding, causal, added": (64, 64, dict(is_causal=True, attn_mask=added(padding))),
        "left padding, causal, window": (64, 64, dict(is_causal=True, attn_mask=padding, window=9)),
        "an item that sees nothing": (64, 64, dict(attn_mask=item)),
        "an item that sees nothing, added": (64, 64, dict(attn_mask=added(item))),
        "rows of a boolean mask": (64, 64, dict(attn_mask=rows)),
        "rows of an added mask": (64, 64, dict(attn_mask=added(rows))),
    }


@every_backend
@every_dtype
@pytest.mark.parametrize("call", list(blind_calls(torch.float32)))
def test_rows_without_keys(device: str, name: str, dtype: torch.dtype, call: str, backend: None) -> None:
    """0 with lse -inf, whatever their queries hold, for the exact recipe and for the default that goes exact as short;
    their gradients and what they add to those of keys and values are 0, the others' are right."""
    q_len, kv_len, options = blind_calls(dtype)[call]
    q, k, v = qkv(2, 4, q_len, kv_len, 64, kv_heads=2, dtype=dtype)
    want, want_lse = attention(q, k, v, **options)
    blind = torch.isneginf(want_lse)
    assert blind.any()
    poisoned = q.masked_fill(blind[..., None], math.nan)
    for query, recipe in ((q, "exact"), (poisoned, "exact"), (q, "sage2")):
        out = run(query, k, v, device=device, recipe=recipe, **options)
        assert not out[blind].any(), "a row that sees no key is not 0"
        assert_attention_close(out, want, TOLERANCE[dtype])
        out, lse = run(query, k, v, device=device, recipe=recipe, return_lse=True, **options)
        assert_attention_close(out, want, TOLERANCE[dtype])
        assert torch.equal(torch.isneginf(lse), blind)
    weight = normal(*want.shape, dtype=torch.float64, seed=8)
    theirs = [x.double().requires_grad_() for x in (q, k, v)]
    (attention(*theirs, **options)[0] * weight).sum().backward()
    for query in (q, poisoned):
        ours = [x.clone().requires_grad_() for x in (query, k, v)]
        (run(*ours, device=device, **options).double() * weight).sum().backward()
        assert not ours[0].grad[blind].any()
        for got, right in zip(ours, theirs, strict=True):
            assert torch.isfinite(got.grad).all()
            # one key has no gradient at all, but for roundings
            size = right.grad.abs().sum().clamp_min(0.05 * right.grad.numel())
            error = (got.grad.double() - right.grad).abs().sum() / size
            assert error < (1e-5 if dtype == torch.float32 else 0.02), error


@every_backend
@every_dtype
def test_packed_rows_without_keys(device: str, name: str, dtype: torch.dtype, backend: None) -> None:
    """Sequences with more queries than keys, without keys, without queries, and tokens of none."""
    cu_q, cu_k = torch.tensor([0, 20, 25, 25, 33]), torch.tensor([0, 6, 6, 13, 30])
    q, k, v = (normal(40, heads, 32, dtype=dtype, seed=n) for n, heads in enumerate((4, 2, 2)))
    for options in (dict(is_causal=True), dict(is_causal=True, window=4), dict(window=(2, 1)), {}):
        want, want_lse = packed_attention(q, k, v, cu_q, cu_k, **options)
        out, lse = run(q, k, v, device=device, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, **options)
        assert_attention_close(out.transpose(0, 1), want.transpose(0, 1), TOLERANCE[dtype])
        assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))
        out = run(q, k, v, device=device, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
        assert_attention_close(out.transpose(0, 1), want.transpose(0, 1), TOLERANCE[dtype])


# --- scales, gradients of the mask, large batches, empty calls ------------------------------------------------


@every_backend
@every_dtype
@pytest.mark.parametrize("scale", [-0.3, 0.0, -1e-3])
def test_scales_that_are_not_positive(device: str, name: str, dtype: torch.dtype, scale: float, backend: None) -> None:
    """Causality and masks hold whatever the sign of the scale."""
    q, k, v = qkv(2, 4, 64, dim=64, kv_heads=2, dtype=dtype)
    for options in (dict(is_causal=True), {}, dict(is_causal=True, window=9), dict(is_causal=True, softcap=3.0)):
        want, _ = attention(q, k, v, scale=scale, **options)
        assert_attention_close(run(q, k, v, device=device, scale=scale, **options), want, TOLERANCE[dtype])


@every_backend
@every_dtype
@pytest.mark.parametrize("with_query", [False, True])
@pytest.mark.parametrize("length", [64, 61])
def test_gradients_of_an_added_mask(
    device: str, name: str, dtype: torch.dtype, with_query: bool, length: int, backend: None
) -> None:
    """A learned bias gets its gradient, also where it alone asks for one."""
    q, k, v = qkv(1, 2, length, dim=64, dtype=dtype)
    weight = normal(1, 2, length, 64, dtype=torch.float64, seed=8)
    grads = []
    for call in (lambda *x, **o: run(*x, device=device, **o), lambda *x, **o: attention(*x, **o)[0]):
        bias = normal(1, 2, length, length, dtype=dtype, seed=4).requires_grad_()
        query = q.clone().requires_grad_(with_query)
        (call(query, k, v, attn_mask=bias).double() * weight).sum().backward()
        grads.append(bias.grad.double())
    assert (grads[0] - grads[1]).abs().sum() / grads[1].abs().sum() < (1e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.gpu
@pytest.mark.parametrize(("device", "name"), CARD)
@every_dtype
@pytest.mark.parametrize(("batch", "heads"), [(65535, 1), (65536, 1), (66000, 1), (1, 66000), (33000, 2), (3, 40000)])
@pytest.mark.parametrize("case", ["plain", "causal", "mask", "gradient"])
def test_batches_beyond_the_grid(
    device: str, name: str, dtype: torch.dtype, batch: int, heads: int, case: str, backend: None
) -> None:
    """More batch x heads than one launch takes."""
    q, k, v = (x.requires_grad_(case == "gradient") for x in qkv(batch, heads, 8, dim=16, dtype=dtype))
    options: dict[str, Any] = dict(is_causal=True) if case == "causal" else {}
    if case == "mask":
        options["attn_mask"] = torch.rand(batch, 1, 1, 8, generator=torch.Generator().manual_seed(0)) < 0.7
    out = run(q, k, v, device=device, **options)
    want, _ = attention(q, k, v, **options)
    assert_attention_close(out, want.detach(), TOLERANCE[dtype])
    if case == "gradient":
        grads = []
        for result in (out, want):
            result.double().square().sum().backward()
            grads.append(q.grad.double())
            q.grad = None
        assert (grads[0] - grads[1]).abs().sum() / grads[1].abs().sum() < (1e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(7, 2, 1), (7, 1, 1), (1, 12, 6), (1, 12, 1), (2, 12, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_parts_of_a_batch(batch: int, heads: int, kv_heads: int, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that a large batch goes in make the same answer, for grouped heads and every shape of mask."""
    monkeypatch.setattr(exact, "_LARGEST_GRID", 5)
    q, k, v = qkv(batch, heads, 8, dim=16, kv_heads=kv_heads, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, 1, 1, 8), (1, heads, 8, 8), (batch, heads, 8, 8), (1, 1, 8, 8)] if masked else [()]
    for shape in shapes:
        mask = torch.rand(shape, generator=generator) < 0.7 if shape else None
        out = exact._in_parts(q, k, v, mask, not masked, 0.25, 0.0, True)
        want, _ = attention(q, k, v, mask, scale=0.25, is_causal=not masked)
        live = want.abs().sum(-1) > 0
        assert torch.allclose(out.double()[live], want[live], atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.bool, torch.float16])
@pytest.mark.parametrize("guard_rows", [False, True])
def test_an_adapters_mask_reaches_torch_as_it_is(
    device: str, kind: torch.dtype, guard_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that stands for an unpatched one passes the very mask on, whatever its rows; our own gives torch's CUDA
    kernels rows that all of them can read."""
    q, k, v = (x.to(device) for x in qkv(2, 4, 37, dim=32, dtype=torch.float16))
    mask = (torch.rand(2, 1, 37, 37, device=device) < 0.7).to(kind)
    seen: list[Tensor] = []
    torchs = F.scaled_dot_product_attention

    def looked_at(*tensors: Tensor, attn_mask: Tensor, **options: Any) -> Tensor:
        seen.append(attn_mask)
        return torchs(*tensors, attn_mask=attn_mask, **options)

    monkeypatch.setattr(exact, "_TORCH_SDPA", looked_at)
    visibility = Visibility(q_len=37, kv_len=37, attn_mask=mask)
    out, _ = exact.exact_attention(q, k, v, visibility, scale=0.2, guard_rows=guard_rows)
    assert (seen[0].data_ptr() == mask.data_ptr() and seen[0].stride() == mask.stride()) == (not guard_rows)
    if guard_rows and device == "cuda":
        assert seen[0].stride(2) % 8 == 0
    if not guard_rows:
        assert torch.equal(out, torchs(q, k, v, attn_mask=mask, scale=0.2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["exact", "qk_int8_pv_fp8"])
@pytest.mark.parametrize("grad", [False, True])
def test_empty_calls(device: str, recipe: str, grad: bool) -> None:
    """No batch, rows, keys or channels: the shape that torch gives, and a backward pass."""
    for batch, q_len, kv_len, dim, v_dim in itertools.product((0, 2), (0, 5), (0, 5), (0, 8), (0, 8)):
        shapes = ((batch, 2, q_len, dim), (batch, 2, kv_len, dim), (batch, 2, kv_len, v_dim))
        q, k, v = (torch.ones(shape, device=device, requires_grad=grad) for shape in shapes)
        for options in ({}, dict(is_causal=True), dict(window=4), dict(window=4, is_causal=True, return_lse=True)):
            out = sage_attention(q, k, v, recipe=recipe, **options)
            out = out[0] if isinstance(out, tuple) else out
            assert out.shape == (batch, 2, q_len, v_dim) and out.is_contiguous()
            assert torch.equal(out, torch.ones_like(out) * (kv_len > 0)) or options.get("is_causal") or not kv_len
            if grad:
                out.sum().backward()
                assert all(x.grad is None or torch.isfinite(x.grad).all() for x in (q, k, v))


def test_a_finite_bias_hides_nothing_in_a_narrower_dtype() -> None:
    """-1e9 is no -inf: a row of it in a float32 mask beside half precision still sees its keys, and all alike."""
    for dtype, low in ((torch.float16, -1e9), (torch.bfloat16, torch.finfo(torch.float32).min)):
        q, k, v = qkv(1, 2, 8, dim=16, dtype=dtype)
        mask = torch.zeros(1, 1, 8, 8)
        mask[..., 3, :] = low
        out = sage_attention(q, k, v, mask, recipe="exact")
        assert torch.isfinite(out).all() and out[:, :, 3].any(dim=-1).all()
        assert_attention_close(out[:, :, 4:], attention(q, k, v)[0][:, :, 4:], HALF)
