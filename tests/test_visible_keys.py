"""Which keys a row sees without a mask: causality, windows and packed sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oracle import HALF, QUANTIZED, T8F8, assert_attention_close, attention, measure, normal, packed_attention, qkv
from zoo.calls import ALL, INT8, on_devices, packed_lengths, run, tolerance_of


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("q_len", [64, 1])
def test_causal_corner_is_bottom_right(recipe: str, q_len: int) -> None:
    """With a cache longer than the query the last row sees everything; top-left only on request."""
    q, k, v = qkv(1, 4, q_len, 1031, 64)
    out = run(q, k, v, recipe, is_causal=True)
    assert_attention_close(out, attention(q, k, v, is_causal=True)[0], tolerance_of(recipe))
    top_left = run(q, k, v, recipe, is_causal=True, causal_align="top_left")
    assert measure(top_left, out).cosine < 0.5
    want = attention(q, k, v, is_causal=True, causal_align="top_left")[0]
    tolerance = tolerance_of(recipe)  # of INT4, for rows that see few keys
    assert_attention_close(top_left, want, replace(tolerance, worst_row=0.8) if "int4" in recipe else tolerance)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_early_causal_rows_are_as_good_as_late_ones(recipe: str) -> None:
    """Rows 0..63 of 2,048 err at most twice as much as rows 1,024 on; row 0 is V[0] within one step."""
    q, k, v = qkv(1, 2, 2048, dim=64)
    out, want = run(q, k, v, recipe, is_causal=True), attention(q, k, v, is_causal=True)[0]
    early, late = measure(out[:, :, :64], want[:, :, :64]), measure(out[:, :, 1024:], want[:, :, 1024:])
    assert early.rel_l1 <= 2 * late.rel_l1
    step = 2.0**-3 if "fp8" in recipe else 2.0**-10
    centred = v[:, :, 0].float() - v.float().mean(dim=2)
    assert ((out[:, :, 0] - v[:, :, 0]).abs() <= step * centred.abs() + 2e-3).all()


@pytest.mark.parametrize("recipe", ["exact", *INT8])
def test_window_is_exactly_w_keys(recipe: str) -> None:
    """16 keys with its own; one more costs a worst row of cosine -0.24 and hardly shows on average."""
    q, k, v = qkv(2, 4, 256, dim=64)
    q, k = q * 2, k * 2
    i = torch.arange(256)
    distance = i[:, None] - i[None, :]
    want = attention(q, k, v, (distance >= 0) & (distance < 16))[0]
    assert_attention_close(run(q, k, v, recipe, is_causal=True, window=16), want, HALF if recipe == "exact" else T8F8)
    assert measure(run(q, k, v, recipe, is_causal=True, window=17), want).worst_row < 0.5


@pytest.mark.parametrize("recipe", ALL)
def test_no_window_and_the_smallest_one(recipe: str) -> None:
    """None, 0 and negative are no window; a window of 1 sees only its own key and returns V."""
    q, k, v = qkv(1, 2, 200, dim=64)
    want = run(q, k, v, recipe, is_causal=True)
    for window in (None, 0, -1, (-1, -1), (-5, -5)):
        assert torch.equal(run(q, k, v, recipe, is_causal=True, window=window), want)
    own = run(q, k, v, recipe, is_causal=True, window=1)
    if "fp8" in recipe:
        assert measure(own, v).rel_l1 < T8F8.rel_l1
    else:
        assert torch.equal(own, v)


# --- packed sequences -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("lengths", [[4, 2, 4], [300, 731]])
def test_packed_segments_do_not_see_each_other(recipe: str, lengths: list[int]) -> None:
    """Another first segment changes no bit of the others."""
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


@on_devices(ALL)
@pytest.mark.parametrize(
    ("q_lens", "k_lens", "heads", "kv_heads", "is_causal"),
    [([5, 0, 7, 3], [9, 4, 0, 2], 4, 4, False), ([0, 1, 0, 1], [0, 3, 0, 5], 9, 3, True)],
    ids=["prompts", "decoding"],
)
def test_packed_items_without_rows_or_keys(device, recipe, q_lens, k_lens, heads, kv_heads, is_causal) -> None:
    """Items without keys give zero and -inf, items without rows give nothing, the rest is right."""
    cu_q, cu_k = packed_lengths(q_lens, k_lens, device=device)
    q = normal(sum(q_lens), heads, 64, seed=0, device=device)
    k, v = (normal(sum(k_lens), kv_heads, 64, seed=s, device=device) for s in (1, 2))
    out, lse = run(q, k, v, recipe, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, is_causal=is_causal, return_lse=True)
    want, want_lse = packed_attention(q, k, v, cu_q, cu_k, is_causal=is_causal)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))
    assert_attention_close(out, want, tolerance_of(recipe))
