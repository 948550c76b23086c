"""A quantized store of fixed size on a GPU: the bytes of the growing one, in CUDA graphs and compiled models too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sage_patch
from sage_patch import QuantizedCache, StaticQuantizedCache
from sage_patch.args import PageArgs
from sage_patch.integrations.static_cache_calls import run_of
from sage_patch.pages import Pages
from sage_patch.reference.pages import PAGE_TOKENS
from sage_patch.static_pages import StaticPages
from tiny import text_model, tokens

pytestmark = pytest.mark.gpu

PIECES = ([600], [130, *[1] * 30, 200, 5, 235], [1, 5, 121, 1, 300, 172], [127, 1, 1, 471])


def random_tokens(length: int, dim: int, batch: int = 2, kv_heads: int = 2) -> tuple[Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(length + dim)
    shape = (2, batch, kv_heads, length, dim)
    key, value = torch.randn(shape, generator=g, device="cuda") + 2 * torch.randn(
        2, batch, kv_heads, 1, dim, generator=g, device="cuda"
    )
    return key.bfloat16(), value.bfloat16()


def stores(dim: int, rotated: bool, capacity: int = 3000, batch: int = 2) -> tuple[Pages, StaticPages]:
    return (
        Pages(batch, 2, dim, torch.bfloat16, "cuda", rotated=rotated),
        StaticPages(batch, 2, dim, torch.bfloat16, "cuda", capacity, rotated),
    )


def assert_same_bytes(grown: Pages, fixed: StaticPages) -> None:
    assert fixed.held.tolist() == [grown.length, 0]
    assert torch.equal(grown.k_mean, fixed.k_mean) and torch.equal(grown.v_mean, fixed.v_mean)
    ends = -(-grown.length // PAGE_TOKENS)
    records = fixed.store.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :ends]
    assert torch.equal(grown.records(0, ends), records)


@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 80])
@pytest.mark.parametrize("rotated", [False, True])
def test_the_bytes_of_a_growing_store(pieces: list[int], dim: int, rotated: bool) -> None:
    key, value = random_tokens(600, dim)
    grown, fixed = stores(dim, rotated)
    for k, v in zip(key.split(pieces, 2), value.split(pieces, 2), strict=True):
        grown.append(k, v)
        fixed.append(k, v)
    assert_same_bytes(grown, fixed)


@pytest.mark.parametrize("rows", [1, 5, 40, 200])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("what", ["plain", "window", "starts", "mask", "softcap"])
def test_attention_of_a_growing_store(rows: int, dim: int, what: str) -> None:
    """Keys may be cut elsewhere, by the capacity: partial sums are added in another order."""
    key, value = random_tokens(2500, dim)
    grown, fixed = stores(dim, False)
    for pages in (grown, fixed):
        pages.append(key, value)
    query = torch.randn(2, 8, rows, dim, device="cuda", dtype=torch.bfloat16)
    args = PageArgs(dim**-0.5)
    if what == "window":
        args = args._replace(left=300)
    elif what == "softcap":
        args = args._replace(softcap=20.0)
    elif what != "plain":
        args = args._replace(kv_starts=torch.tensor([0, 700], dtype=torch.int32, device="cuda"))
    want, _ = grown.attend(query, args)
    if what == "mask":
        at = torch.arange(3000, device="cuda")
        ends = torch.arange(2500 - rows, 2500, device="cuda")[:, None]
        mask = ((at >= args.kv_starts[:, None])[:, None] & (at <= ends))[:, None]
        args = args._replace(kv_starts=None, is_causal=False, attn_mask=mask)
        if rows == 1:
            starts, until = run_of(mask)
            assert starts.tolist() == [0, 700] and until.tolist() == [2500, 2500]
            holed = mask.clone()
            holed[1, :, :, 900:1000] = False
            assert run_of(holed)[1].tolist() == [2500, 0]
            masked, _ = grown.attend(query, args._replace(attn_mask=holed[..., :2500]))
            starts, until = run_of(holed)
            got = fixed.attend(query, args._replace(attn_mask=holed, kv_starts=starts, mask_until=until), "")
            # an output of 4 has steps of 1/32
            assert torch.allclose(got.transpose(1, 2).float(), masked.float(), rtol=2**-7, atol=2e-2)
            assert (masked[1].float() - want[1].float()).abs().max() > 1e-3
            args = args._replace(kv_starts=run_of(mask)[0], mask_until=run_of(mask)[1])
    got = fixed.attend(query, args, "").transpose(1, 2)
    assert (got.float() - want.float()).abs().max() < 2e-2
    assert (got.float() - want.float()).abs().sum() / want.float().abs().sum() < 0.01


def test_the_same_bits_where_keys_are_cut_the_same_way() -> None:
    key, value = random_tokens(3000, 128)
    grown, fixed = stores(128, True)
    for pages in (grown, fixed):
        pages.append(key, value)
    query = torch.randn(2, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    want, _ = grown.attend(query, PageArgs(0.1))
    assert torch.equal(fixed.attend(query, PageArgs(0.1), "").transpose(1, 2), want)


@pytest.mark.parametrize("start", [100, 700])
def test_a_captured_step_goes_on(start: int) -> None:
    """Across the end of a page, and, from 100 tokens on, across the point from which means stay."""
    key, value = random_tokens(start + 200, 128)
    grown, fixed = stores(128, False)
    for pages in (grown, fixed):
        pages.append(key[:, :, :start], value[:, :, :start])
    query = torch.randn(200, 2, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v, q = key[:, :, :1].clone(), value[:, :, :1].clone(), query[0].clone()

    def step() -> Tensor:
        fixed.append(k, v)
        return fixed.attend(q, PageArgs(0.1), "")

    held = fixed.held.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    fixed.held.copy_(held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for i in range(200):
        at = slice(start + i, start + i + 1)
        for x, y in ((k, key[:, :, at]), (v, value[:, :, at]), (q, query[i])):
            x.copy_(y)
        grown.append(key[:, :, at], value[:, :, at])
        graph.replay()
        want, _ = grown.attend(query[i], PageArgs(0.1))
        assert (out.transpose(1, 2).float() - want.float()).abs().max() < 2e-2
    assert_same_bytes(grown, fixed)


def test_generate_compiles_and_writes_the_same_tokens() -> None:
    """Greedy steps by CUDA graphs of a compiled model, ragged batch."""
    model = text_model("llama", "sdpa").cuda().bfloat16()
    ids = tokens(2, 160).cuda()
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    given = dict(input_ids=ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    with sage_patch.applied(model):
        want = model.generate(**given, past_key_values=QuantizedCache(model.config))
        plain = model.generate(**given, past_key_values=StaticQuantizedCache(model.config, 256), disable_compile=True)
        got = model.generate(**given, past_key_values=StaticQuantizedCache(model.config, 256))
    assert torch.equal(plain, want)
    assert (got == want).float().mean() > 0.9  # compiled layers round otherwise
