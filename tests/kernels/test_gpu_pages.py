"""The quantized cache on a GPU: the same bytes as the CPU reference, and attention against it and against float64."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oracle import attention
from sage_patch.args import PageArgs
from sage_patch.pages import Pages
from sage_patch.reference.emulator import pages_mma
from sage_patch.reference.pages import PAGE_TOKENS

pytestmark = pytest.mark.gpu

PIECES = ([600], [130, *[1] * 30, 200, 5, 235], [1, 5, 121, 1, 300, 172], [200, 400], [127, 1, 1, 471])


def inputs(
    length: int, batch: int = 2, kv_heads: int = 2, dim: int = 64, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Keys and values on the CPU, with a mean of their own in every channel."""
    g = torch.Generator().manual_seed(seed)
    key = torch.randn(batch, kv_heads, length, dim, generator=g) + 3 * torch.randn(batch, kv_heads, 1, dim, generator=g)
    value = torch.randn(batch, kv_heads, length, dim, generator=g) + 0.5
    return key.to(dtype), value.to(dtype)


def queries(batch: int, heads: int, rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(batch, heads, rows, dim, generator=torch.Generator().manual_seed(7)).to(dtype)


def filled(key: Tensor, value: Tensor, pieces: list[int] | None = None, device: str = "cuda", **options) -> Pages:
    batch, heads, _, dim = key.shape
    pages = Pages(batch, heads, dim, key.dtype, device, **options)
    for k, v in zip(*(x.split(pieces or [x.shape[2]], dim=2) for x in (key, value)), strict=True):
        pages.append(k.to(device), v.to(device))
    return pages


def exact(query: Tensor, key: Tensor, value: Tensor, *, left: int = -1, **options) -> tuple[Tensor, Tensor]:
    """The oracle, of the last rows of a causal call."""
    return attention(query, key, value, is_causal=True, window=(left, -1), **options)


def check(pages: Pages, query: Tensor, key: Tensor, value: Tensor, limit: float = 0.06, **options) -> None:
    """Close to float64 and to the reference on the same bytes; options of Pages.attend, tensors on the CPU."""
    scale = query.shape[-1] ** -0.5
    on_card = {n: x.cuda() if isinstance(x, Tensor) else x for n, x in options.items()}
    out, lse = pages.attend(query.cuda(), PageArgs(scale=scale, return_lse=True, **on_card))
    known = {n: x for n, x in options.items() if n != "kv_starts"}
    if "kv_starts" in options:
        known["attn_mask"] = (torch.arange(key.shape[2]) >= options["kv_starts"][:, None])[:, None, None]
    want, want_lse = exact(query, key, value, **known)
    out, lse = out.double().cpu(), lse.double().cpu()
    dead = (want_lse == -math.inf) | (want.abs().sum(-1) == 0)
    assert bool(torch.isfinite(out).all()) and not out[dead].any()
    assert bool((lse[want_lse == -math.inf] == -math.inf).all())
    live = want[~dead]
    if len(live):
        assert (out[~dead] - live).abs().sum() / live.abs().sum() < limit
        assert torch.nn.functional.cosine_similarity(out[~dead], live, dim=-1).min() > 0.95
        assert (lse - want_lse)[~dead].abs().max() < 0.15

    mirror = filled(key, value, device="cpu")
    args = PageArgs(scale=scale, return_lse=True, **options)
    if os.environ.get("SAGE_PATCH_TEST_BACKEND"):  # P is FP16 there
        near, near_lse = pages_mma.emulate(mirror, query, args)
    else:
        near, near_lse = mirror.attend(query, args)
    near, near_lse = near.double(), near_lse.double()
    if len(live):  # parts are summed in another order, P refers to another maximum: a code here and there
        assert (out - near)[~dead].abs().sum() / near[~dead].abs().sum() < 0.02
        assert (lse - near_lse)[~dead].abs().max() < 1 / 64  # one code of P, of the few keys that a window leaves


@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 80, 44])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_same_bytes_as_the_reference(pieces: list[int], dim: int, dtype: torch.dtype) -> None:
    key, value = inputs(sum(pieces), dim=dim, dtype=dtype)
    card, mirror = filled(key, value, pieces), filled(key, value, pieces, device="cpu")
    assert torch.equal(card.k_mean.cpu(), mirror.k_mean) and torch.equal(card.v_mean.cpu(), mirror.v_mean)
    ends = (card.length + PAGE_TOKENS - 1) // PAGE_TOKENS
    assert torch.equal(card.records(0, ends).cpu(), mirror.records(0, ends))
    slots = torch.arange(max(0, ends - 2) * PAGE_TOKENS, card.length) % card.tail.shape[3]  # of the last two pages
    assert torch.equal(card.tail.cpu()[..., slots, :], mirror.tail[..., slots, :])


@pytest.mark.parametrize("length", [1, 77, 128, 129, 503, 1031])
@pytest.mark.parametrize("rows", [1, 3, 64, 300])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (7, 1)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_attention_over_pages(length: int, rows: int, heads: tuple[int, int], dim: int) -> None:
    if rows > length:
        pytest.skip("more rows than tokens")
    key, value = inputs(length, kv_heads=heads[1], dim=dim)
    check(filled(key, value), queries(2, heads[0], rows, dim, key.dtype), key, value)


@pytest.mark.parametrize("dim", [40, 72, 77, 96])
def test_odd_head_dims_and_strides(dim: int) -> None:
    key, value = inputs(700, dim=dim, dtype=torch.float16)
    query = queries(2, 5, 4, dim, torch.float16).transpose(1, 2)  # [batch, heads, q_len, dim] with heads inside tokens
    check(filled(key, value), query, key, value)


def some(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.3


FEATURES: dict[str, Callable[[int], dict]] = {
    "left padding": lambda rows: {"kv_starts": torch.tensor([0, 700], dtype=torch.int32)},
    "nothing left": lambda rows: {"kv_starts": torch.tensor([2500, 0], dtype=torch.int32)},
    "window": lambda rows: {"left": 300},
    "window, padding": lambda rows: {"left": 1900, "kv_starts": torch.tensor([0, 700], dtype=torch.int32)},
    "softcap": lambda rows: {"softcap": 20.0},
    "sinks": lambda rows: {"sinks": torch.linspace(-2, 5, 8)},
    "mask": lambda rows: {"attn_mask": some(2, 1, rows, 2500)},
    "mask of heads": lambda rows: {"attn_mask": some(1, 8, 1, 2500)},
    "all hidden": lambda rows: {"attn_mask": torch.zeros(2, 1, rows, 2500, dtype=torch.bool)},
    "all of it": lambda rows: {
        "left": 1900, "softcap": 30.0, "sinks": torch.linspace(-2, 5, 8),
        "kv_starts": torch.tensor([0, 700], dtype=torch.int32),
    },
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("dim", [64, 128])
def test_what_a_call_can_ask_for(feature: str, rows: int, dim: int) -> None:
    key, value = inputs(2500, dim=dim)
    check(filled(key, value, [2000, 500]), queries(2, 8, rows, dim, key.dtype), key, value, **FEATURES[feature](rows))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("rows", [1, 20, 200])
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(bad: float, which: str, rows: int) -> None:
    key, value = inputs(300)
    (key if which == "key" else value)[0, :, 290, 3] = bad
    (key if which == "key" else value)[1, :, :100] = bad
    pages, mirror = filled(key, value), filled(key, value, device="cpu")
    assert torch.equal(pages.records(0, 3).cpu(), mirror.records(0, 3))
    starts = torch.tensor([0, 100], dtype=torch.int32, device="cuda")
    out, lse = pages.attend(
        queries(2, 4, rows, 64, key.dtype).cuda(), PageArgs(scale=0.125, kv_starts=starts, return_lse=True)
    )
    sees = torch.arange(300 - rows, 300, device="cuda") >= 290
    assert out[0][:, sees].isnan().all() and lse[0][:, sees].isnan().all()
    assert out[0][:, ~sees].isfinite().all() and out[1].isfinite().all() and lse[1].isfinite().all()


def test_repeated_calls_give_the_same_bits_and_windows_drop_slabs() -> None:
    key, value = inputs(5000, dim=128)
    query = queries(2, 8, 3, 128, key.dtype)
    pages = filled(key, value)
    first = pages.attend(query.cuda(), PageArgs(scale=0.1))[0]
    assert all(torch.equal(first, pages.attend(query.cuda(), PageArgs(scale=0.1))[0]) for _ in range(5))
    sliding = filled(key, value, [4000, 997, 1, 1, 1], window=1000)
    assert sliding.first_slab > 0
    out = sliding.attend(query[:, :, -1:].cuda(), PageArgs(scale=0.1, left=999))[0].double().cpu()
    want, _ = exact(query[:, :, -1:], key, value, scale=0.1, left=999)
    assert (out - want).abs().sum() / want.abs().sum() < 0.06


def test_a_captured_step_replays() -> None:
    key, value = inputs(1000, dim=128)
    pages = filled(key[:, :, :999], value[:, :, :999])
    step_k, step_v = key[:, :, 999:].cuda(), value[:, :, 999:].cuda()
    query = queries(2, 8, 1, 128, key.dtype).cuda()
    pages.append(step_k, step_v)
    want = pages.attend(query, PageArgs(scale=0.1))[0].clone()
    pages.crop(1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        pages.slab_table  # noqa: B018  (made before the capture)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            pages.append(step_k, step_v)
            got = pages.attend(query, PageArgs(scale=0.1))[0]
    got.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want)
