"""The pages of a quantized cache: what they hold, that pieces do not matter, and attention over them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from oracle import T8F8, Tolerance, assert_attention_close, attention, normal
from sage_patch.args import PageArgs
from sage_patch.pages import SLAB_PAGES, Pages
from sage_patch.reference.emulator.pages import emulate, plan
from sage_patch.reference.emulator.prepare import prepare
from sage_patch.reference.pages import PAGE_TOKENS, append, record_of, unpack

SLAB_TOKENS = SLAB_PAGES * PAGE_TOKENS
LENGTHS = [1, 77, 127, 128, 129, 503, 1031]
PIECES = {
    "two": [200, 400],
    "by one": [130, *[1] * 270, 200],
    "odd": [129, 255, 1, 127, 88],
    "short first": [1, 5, 121, 1, 300, 172],
}


def kv(length: int, batch: int = 2, heads: int = 2, dim: int = 64, dtype=torch.float16, seed: int = 0):
    """Keys and values with a mean of their own in every channel, as models have it."""
    shape = (batch, heads, length, dim)
    key = normal(*shape, dtype=torch.float32, seed=seed) + 3 * normal(batch, heads, 1, dim, dtype=torch.float32, seed=9)
    value = normal(*shape, dtype=torch.float32, seed=seed + 1) + 0.5
    return key.to(dtype), value.to(dtype)


def filled(key: Tensor, value: Tensor, pieces: list[int] | None = None, **options) -> Pages:
    batch, heads, _, dim = key.shape
    pages = Pages(batch, heads, dim, key.dtype, key.device, **options)
    for k, v in zip(*(x.split(pieces or [x.shape[2]], dim=2) for x in (key, value)), strict=True):
        pages.append(k, v)
    return pages


def same(a: Pages, b: Pages) -> bool:
    """Whether two stores hold the same bytes: pages, and the tail where it is in use."""
    assert a.length == b.length
    ends = (a.length + PAGE_TOKENS - 1) // PAGE_TOKENS
    slots = torch.arange(max(a.tail_start, b.tail_start), a.length) % a.tail.shape[3]
    return torch.equal(a.records(0, ends), b.records(0, ends)) and torch.equal(
        a.tail[..., slots, :], b.tail[..., slots, :]
    )


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_page_holds_what_the_kernels_of_a_whole_call_hold(dim: int, dtype: torch.dtype) -> None:
    """K and the means, bit for bit; V's scale is the page's own, so it is that of a call whose sample is everything."""
    key, value = kv(300, dim=dim, dtype=dtype)
    pages = filled(key, value, rotated=False)
    whole = prepare(key, value, [300, 300], pages.dim, fp16=False, smooth_v=True)
    got = unpack(pages.records(0, 3), pages.dim)
    group = torch.arange(PAGE_TOKENS) % 8 // 2
    assert torch.equal(pages.k_mean.flatten(0, 1), whole.k_mean)
    assert torch.equal(pages.v_mean.flatten(0, 1), whole.v_mean)
    assert torch.equal(got.k.flatten(0, 1), whole.k)
    assert torch.equal(got.k_scale.flatten(0, 1), whole.k_scale[..., group])
    short = filled(key[:, :, :60], value[:, :, :60])
    of_call = prepare(key[:, :, :60], value[:, :, :60], [60, 60], pages.dim, fp16=False, smooth_v=True)
    one = unpack(short.records(0, 1), pages.dim)
    assert torch.equal(one.v.flatten(0, 1)[:, :, :60], of_call.v[:, :, :60])
    assert torch.equal(one.v_scale[:, :, 0].flatten(0, 1), of_call.v_scale)


def test_records_are_small_and_their_parts_do_not_overlap() -> None:
    assert [record_of(dim).size for dim in (64, 128)] == [16768, 33408]
    for dim in (64, 128):
        record = record_of(dim)
        maps = torch.cat([record.k_map, record.v_map])
        assert maps.unique().numel() == maps.numel() == record.k_scale_at and int(maps.max()) < record.k_scale_at
        assert record.v_scale_at + 4 * dim <= record.size


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_pieces_do_not_matter(name: str, dtype: torch.dtype) -> None:
    pieces = PIECES[name]
    key, value = kv(sum(pieces), dtype=dtype)
    start = 1
    while sum(pieces[:start]) < PAGE_TOKENS:
        start += 1
    first = sum(pieces[:start])  # the means are those of what came before the first whole page
    once = filled(key, value, [first, sum(pieces) - first])
    assert same(filled(key, value, pieces), once)


@pytest.mark.parametrize("dim", [64, 128])
def test_dequantized_tokens_are_within_half_a_step(dim: int) -> None:
    key, value = kv(503, dim=dim, dtype=torch.float32)
    pages = filled(key, value, rotated=False)
    k, v = pages.dequantize()
    scales = unpack(pages.records(0, 4), dim)
    step = scales.k_scale.flatten(2)[:, :, :503, None]
    assert ((k - key).abs() <= step * 0.5001 + 1e-6).all()
    # E4M3 keeps 4 bits of a number, and is exact to 2^-10 of the scale near zero
    error = (v - value).abs()
    bound = (value - pages.v_mean[:, :, None, :dim]).abs() / 16 + scales.v_scale.amax(2)[:, :, None, :dim] / 512
    assert (error <= bound * 1.01 + 1e-6).all()
    k, v = pages.dequantize(130)
    assert k.shape == v.shape == (2, 2, 373, dim)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("heads, dim", [(2, 64), (8, 128), (6, 80)])
@pytest.mark.parametrize("q_len", [1, 5, 130])
def test_attention_over_pages_is_close_to_the_oracle(length: int, heads: int, dim: int, q_len: int) -> None:
    key, value = kv(length, dim=dim)
    query = normal(2, heads, min(q_len, length), dim, seed=5)
    out, lse = filled(key, value).attend(query, PageArgs(scale=dim**-0.5, return_lse=True))
    want, want_lse = attention(query, key, value, is_causal=True)
    assert_attention_close(out, want, T8F8)
    assert out.dtype == query.dtype and out.shape == query.shape
    assert lse is not None and (lse - want_lse).abs().max() < 0.1


OPTIONS = {
    "bidirectional": dict(is_causal=False),
    "window": dict(left=99),
    "short window": dict(left=0),
    "softcap": dict(softcap=2.0),
    "sinks": dict(sinks=torch.tensor([0.5, 3.0, -2.0, 8.0])),
    "scale": dict(scale=0.3),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    options = {"scale": 0.125, **OPTIONS[name]}
    key, value = kv(700)
    query = normal(2, 4, 40, 64, seed=5)
    out, lse = filled(key, value).attend(query, PageArgs(return_lse=True, **options))
    left, causal = options.pop("left", -1), options.pop("is_causal", True)
    want, want_lse = attention(query, key, value, window=(left, 0) if causal else None, **options)
    assert_attention_close(out, want, T8F8)
    assert (lse - want_lse).abs().max() < 0.1


@pytest.mark.parametrize("q_len", [1, 40, 700])
def test_left_padding(q_len: int) -> None:
    """Keys before an item's start do not exist, whatever they hold; rows of padding are zero."""
    key, value = kv(700)
    starts = torch.tensor([0, 333], dtype=torch.int32)
    query = normal(2, 4, q_len, 64, seed=5)
    pages = filled(key, value)
    out, lse = pages.attend(query, PageArgs(scale=0.125, kv_starts=starts, return_lse=True))
    real = (torch.arange(700) >= starts[:, None])[:, None, None]
    want, want_lse = attention(query, key, value, real, is_causal=True)
    assert_attention_close(out, want, T8F8)
    assert torch.equal(lse.isneginf(), want_lse.isneginf())


def test_a_mask_covers_the_last_tokens() -> None:
    """A mask narrower than the store hides what comes before it; it may differ by head and hide whole rows."""
    key, value = kv(700)
    query = normal(2, 4, 9, 64, seed=5)
    mask = torch.rand(2, 4, 9, 333, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[0, 1, 4] = False
    out, _ = filled(key, value).attend(query, PageArgs(scale=0.125, is_causal=False, attn_mask=mask))
    want, _ = attention(query, key, value, torch.nn.functional.pad(mask, (367, 0)))
    assert_attention_close(out, want, T8F8)
    broadcast, _ = filled(key, value).attend(query, PageArgs(scale=0.125, is_causal=False, attn_mask=mask[:1, :1]))
    want, _ = attention(query, key, value, torch.nn.functional.pad(mask[:1, :1], (367, 0)))
    assert_attention_close(broadcast, want, T8F8)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["key", "value"])
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(bad: float, which: str) -> None:
    key, value = kv(300)
    broken_key, broken_value = key.clone(), value.clone()
    (broken_key if which == "key" else broken_value)[0, :, 140, 3] = bad
    query = normal(2, 4, 200, 64, seed=5)
    clean, _ = filled(key, value).attend(query, PageArgs(scale=0.125))
    pages = filled(broken_key, broken_value)
    out, _ = pages.attend(query, PageArgs(scale=0.125))
    sees = torch.arange(100, 300) >= 140
    assert out[0, :, sees].isnan().all()
    assert torch.isfinite(out[0, :, ~sees]).all() and torch.isfinite(out[1]).all()
    masked, _ = pages.attend(
        query[:, :, 160:], PageArgs(scale=0.125, kv_starts=torch.tensor([141, 0], dtype=torch.int32))
    )
    assert torch.isfinite(masked).all()
    assert torch.equal(masked[1], clean[1, :, 160:])


@pytest.mark.parametrize(
    "drift, tolerance",
    [(5, T8F8), (50, Tolerance(0.998, 0.06, 0.95, "logits of several hundred, where one row's INT8 error shows"))],
)
def test_a_mean_that_drifts_costs_accuracy_and_nothing_else(drift: int, tolerance: Tolerance) -> None:
    """The means are those of the beginning; the pages' scales follow what comes."""
    key, value = kv(1031, dtype=torch.float32)
    key[:, :, 300:] += drift
    value[:, :, 300:] -= drift / 10
    query = normal(2, 4, 16, 64, dtype=torch.float32, seed=5)
    out, lse = filled(key, value, [300, 731]).attend(query, PageArgs(scale=0.125, return_lse=True))
    want, want_lse = attention(query, key, value, is_causal=True)
    assert_attention_close(out, want, tolerance)
    assert (lse - want_lse).abs().max() < 0.02 * drift


def test_an_empty_store_and_no_queries() -> None:
    pages = Pages(2, 2, 64, torch.float16, "cpu")
    out, lse = pages.attend(normal(2, 4, 1, 64), PageArgs(scale=0.125, return_lse=True))
    assert not out.any() and lse.isneginf().all()
    pages.append(*kv(0))
    assert pages.length == 0 and pages.dequantize()[0].shape == (2, 2, 0, 64)
    pages.append(*kv(5))
    assert pages.attend(normal(2, 4, 0, 64), PageArgs(scale=0.125))[0].shape == (2, 4, 0, 64)


@pytest.mark.parametrize("end", [599, 512, 511, 480, 473])
def test_crop_within_the_tail_leaves_no_trace(end: int) -> None:
    key, value = kv(600)
    pages = filled(key, value, [300, 300])
    pages.crop(600 - end)
    assert pages.length == end and pages.pages_reopened == 0
    again_key, again_value = kv(200, seed=7)
    pages.append(again_key, again_value)
    new = [torch.cat([a[:, :, :end], b], dim=2) for a, b in ((key, again_key), (value, again_value))]
    assert same(pages, filled(*new, [300, end - 300 + 200]))


def test_crop_behind_the_tail_reopens_the_page_and_says_so() -> None:
    key, value = kv(1500, dtype=torch.float32)
    pages = filled(key, value)
    pages.crop(1500 - 300)
    assert (pages.length, pages.pages_reopened, len(pages.slabs)) == (300, 1, 1)
    query = normal(2, 4, 20, 64, dtype=torch.float32, seed=5)
    pages.append(key[:, :, 300:700], value[:, :, 300:700])
    want, _ = attention(query, key[:, :, :700], value[:, :, :700], is_causal=True)
    assert_attention_close(pages.attend(query, PageArgs(scale=0.125))[0], want, T8F8)
    pages.crop(700 - 256)  # at the edge of a page there is nothing to reopen
    pages.crop(1000)
    assert (pages.length, pages.pages_reopened) == (0, 1)
    pages.append(key, value)
    assert same(pages, filled(key, value))


def test_batches_are_selected_and_repeated() -> None:
    key, value = kv(400, batch=3)
    index = torch.tensor([2, 0, 0, 1])
    pages = filled(key, value, [350, 50])
    pages.select(index)
    pages.append(*kv(30, batch=4, seed=3))
    other = filled(key[index], value[index], [350, 50])
    other.append(*kv(30, batch=4, seed=3))
    assert same(pages, other) and torch.equal(pages.k_mean, other.k_mean)
    pages = filled(key, value)
    pages.repeat(2)
    assert same(pages, filled(key.repeat_interleave(2, 0), value.repeat_interleave(2, 0)))


def test_batch_indices_of_every_form() -> None:
    """As torch indexes with them: from the end, lists, booleans; whatever else is refused by name."""
    key, value = kv(400, batch=3)
    for index in ([-1, 0], torch.tensor([2, -3], dtype=torch.int32), torch.tensor([True, False, True]), [], [1, 1, 1]):
        pages = filled(key, value)
        pages.select(index)
        rows = torch.as_tensor(index) if len(index) else torch.empty(0, dtype=torch.int64)
        rows = rows if rows.dtype == torch.bool else rows.long()
        assert same(pages, filled(key[rows], value[rows])) and pages.batch == len(pages.tail[0])
    pages = filled(key, value)
    for index in ([3], [-4], torch.tensor([0, 99])):
        with pytest.raises(ValueError, match=f"batch index {index[-1]} is out of range: the cache holds 3 items"):
            pages.select(index)
    for index in ([0.5], torch.tensor([1, 0, 1], dtype=torch.uint8), torch.tensor([True]), torch.tensor(1), [[0]]):
        with pytest.raises(ValueError, match="batch indices must be a list of whole numbers .*, or 3 booleans"):
            pages.select(index)
    for n in (0, -1, 1.5):
        with pytest.raises(ValueError, match="repeats must be a whole number from 1"):
            pages.repeat(n)  # type: ignore[arg-type]
    assert same(pages, filled(key, value))


def test_a_copy_is_a_store_of_its_own() -> None:
    key, value = kv(400)
    pages = filled(key, value)
    assert pages.slab_table.tolist() == [s.data_ptr() for s in pages.slabs]
    other = copy.deepcopy(pages)
    assert other.slab_table.tolist() == [s.data_ptr() for s in other.slabs] != pages.slab_table.tolist()
    other.append(*kv(30))
    assert pages.length == 400 and same(pages, filled(key, value))


def test_reset_starts_over() -> None:
    key, value = kv(400)
    pages = filled(*kv(1300, seed=4))
    pages.reset()
    pages.append(key, value)
    assert same(pages, filled(key, value)) and len(pages.slabs) == 1


WINDOW = 200


def test_a_window_keeps_memory_bounded_and_answers_as_the_whole_store() -> None:
    key, value = kv(4 * SLAB_TOKENS)
    whole, pages = Pages(2, 2, 64, torch.float16, "cpu"), Pages(2, 2, 64, torch.float16, "cpu", window=WINDOW)
    at = 0
    for n in [500, 1, 1600, 1, 1, 1300, 60]:
        for store in (whole, pages):
            store.append(key[:, :, at : at + n], value[:, :, at : at + n])
        at += n
        if at > 500:  # the first piece's own attention runs on its own tensors
            query = normal(2, 4, n, 64, seed=at)
            options = dict(scale=0.125, left=WINDOW - 1, return_lse=True)
            for a, b in zip(
                pages.attend(query, PageArgs(**options)), whole.attend(query, PageArgs(**options)), strict=True
            ):
                assert torch.equal(a, b)
    assert len(pages.slabs) * pages.slab_pages <= 4  # 60 + 199 tokens touch so many pages
    assert pages.first_token == (at - 60 - WINDOW + 1) // PAGE_TOKENS * PAGE_TOKENS
    with pytest.raises(ValueError, match="has dropped what came before"):
        pages.attend(query, PageArgs(scale=0.125))
    with pytest.raises(ValueError, match="have left the window"):
        pages.dequantize()
    # a long first piece does not even write what the next query cannot see
    pages = filled(key, value, window=WINDOW)
    assert (pages.first_token, pages.slab_pages * len(pages.slabs)) == (30 * PAGE_TOKENS, 2)
    query = normal(2, 4, 1, 64, seed=1)
    expected, _ = filled(key, value).attend(query, PageArgs(scale=0.125, left=WINDOW - 1))
    assert torch.equal(pages.attend(query, PageArgs(scale=0.125, left=WINDOW - 1))[0], expected)


def test_a_window_that_keeps_its_past_can_go_back() -> None:
    key, value = kv(3000)
    pages = Pages(2, 2, 64, torch.float16, "cpu", window=WINDOW)
    pages.keep_past = True
    pages.append(key[:, :, :1000], value[:, :, :1000])
    pages.append(key[:, :, 1000:], value[:, :, 1000:])
    assert pages.first_slab == 0
    pages.crop(1900)
    assert pages.length == 1100
    pages.crop(0)
    pages.keep_past = False
    pages.append(key[:, :, :1500], value[:, :, :1500])
    pages.append(key[:, :, :5], value[:, :, :5])
    assert pages.first_token == (2600 - WINDOW + 1) // PAGE_TOKENS * PAGE_TOKENS
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        pages.crop(1000)


def test_static_stores_are_allocated_once_and_refuse_more() -> None:
    key, value = kv(1100)
    pages = Pages(2, 2, 64, torch.float16, "cpu", max_length=1100)
    slabs = [s.data_ptr() for s in pages.slabs]
    assert len(slabs) == 2
    pages.append(key[:, :, :700], value[:, :, :700])
    pages.append(key[:, :, 700:], value[:, :, 700:])
    assert same(pages, filled(key, value, [700, 400])) and [s.data_ptr() for s in pages.slabs] == slabs
    with pytest.raises(ValueError, match="made for 1100 tokens; it holds 1100 and was given 1 more"):
        pages.append(key[:, :, :1], value[:, :, :1])
    pages.reset()
    assert [s.data_ptr() for s in pages.slabs] == slabs


@pytest.mark.parametrize("dim", [64, 128])
def test_memory_at_32k_tokens_is_about_half(dim: int) -> None:
    """Static stores are allocated for their whole length, so nothing has to be computed to weigh one."""
    pages = Pages(1, 2, dim, torch.bfloat16, "cpu", max_length=32768)
    assert pages.nbytes <= 0.55 * (2 * 2 * 32768 * dim * 2)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 192"):
        Pages(1, 1, 192, torch.float16, "cpu")
    with pytest.raises(ValueError, match="float64"):
        Pages(1, 1, 64, torch.float64, "cpu")
    with pytest.raises(ValueError, match="float32"):
        Pages(1, 1, 64, torch.float32, "cuda")
    pages = Pages(2, 2, 64, torch.float16, "cpu")
    key, value = kv(5)
    with pytest.raises(ValueError, match="value: the store holds"):
        pages.append(key, value[..., :32])
    with pytest.raises(ValueError, match="key: the store holds"):
        pages.append(key.float(), value)


def test_appending_reads_its_inputs_only() -> None:
    key, value = kv(300)
    kept = key.clone(), value.clone()
    pages = Pages(2, 2, 64, torch.float16, "cpu")
    pages._grow(300)
    append(pages, key, value)
    assert torch.equal(key, kept[0]) and torch.equal(value, kept[1])


def test_stores_made_in_inference_mode_serve_outside_of_it() -> None:
    key, value = kv(300)
    with torch.inference_mode():
        pages = filled(key, value)
        pages.select(torch.tensor([1, 0]))
    pages.append(key, value)
    assert pages.length == 600


@pytest.mark.parametrize("sms", [1, 6, 132])
@pytest.mark.parametrize("q_len, options", [(1, {}), (3, {"left": 900}), (70, {}), (2, {"softcap": 4.0})])
def test_the_kernels_parts_add_up(sms: int, q_len: int, options: dict) -> None:
    """However the keys are cut, attention is that of the whole; a store with every part's own maximum included."""
    key, value = kv(1500, batch=2)
    query = normal(2, 4, q_len, 64, seed=4)
    pages = filled(key, value)
    starts = torch.tensor([0, 333], dtype=torch.int32)
    out, lse = emulate(pages, query, PageArgs(scale=0.125, kv_starts=starts, **options), sms=sms)
    want, want_lse = pages.attend(query, PageArgs(scale=0.125, kv_starts=starts, return_lse=True, **options))
    assert want_lse is not None
    assert_attention_close(out, want.double(), Tolerance(0.999, 0.02, 0.99, "codes of P"))
    assert (lse - want_lse).abs().max() < 0.02


def test_a_plan_gives_every_page_to_one_part() -> None:
    for rows, length in ((1, 40_000), (64, 9000), (65, 9000), (4, 1)):
        cut = plan(1, 8, rows, 1, length, sms=132)
        found = sorted(p for part in range(cut.parts) for p in cut.turns_of(part, 3, 3 + length // PAGE_TOKENS))
        assert found == list(range(3, 3 + length // PAGE_TOKENS)) and cut.parts <= 128
    assert plan(1, 8, 4, 1, 32768).splits == 16 and plan(32, 8, 4, 1, 32768).splits == 1
