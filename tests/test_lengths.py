"""Lengths: tails of tiles, one row, few keys, many small items, cross lengths, and memory that held something else.

A test without a recipe means INT8 QK with FP8 PV and all smoothing on; twins on the card run the compiled kernels.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from oracle import HALF, QUANTIZED, RECIPE_TOLERANCE, T8F8, assert_attention_close, attention, measure, qkv
from sage_patch.attention import sage_attention
from sage_patch.kernels import ops
from zoo.calls import DEFAULT, INT8, NO_SMOOTH_V, on_devices, poison, run, run_exact


@on_devices([*INT8, NO_SMOOTH_V])
def test_accuracy_does_not_jump_at_multiples_of_the_tile(device: str, recipe: str) -> None:
    """One query row, 6:1 grouped heads, kv_len across 128 and 256."""
    errors = {}
    for kv_len in (*range(120, 141), *range(250, 263)):
        q, k, v = qkv(1, 6, 1, kv_len, 128, kv_heads=1, device=device)
        errors[kv_len] = measure(run(q, k, v, recipe), attention(q, k, v)[0])
    sizes = [e.rel_l1 for e in errors.values()]
    assert min(e.cosine for e in errors.values()) > 0.998
    assert max(sizes) / min(sizes) < 2, {n: round(e.rel_l1, 4) for n, e in errors.items()}


@on_devices(INT8)
def test_many_small_cross_attentions_in_a_batch(device: str, recipe: str) -> None:
    """81 frames with 32 keys each: the first and the last are as good as any."""
    heads, q_len = (3, 156) if device == "cpu" else (12, 1560)
    q, k, v = qkv(81, heads, q_len, 32, 128, device=device)
    out = run(q, k, v, recipe)
    assert torch.isfinite(out).all()
    for item in (slice(0, 1), slice(40, 41), slice(80, 81)):
        want = attention(q[item], k[item], v[item])[0]
        assert_attention_close(out[item], want, RECIPE_TOLERANCE[recipe], what=f"items {item}")


@on_devices(QUANTIZED)
@pytest.mark.parametrize(("q_len", "kv_len", "dim"), [(1001, 503, 64), (1001, 503, 128), (9, 9, 64)])
def test_what_memory_held_before_does_not_matter(device: str, recipe: str, q_len: int, kv_len: int, dim: int) -> None:
    """A run on NaN and a freed pool of NaN come between: the bits must be those of a clean run."""
    batch, heads = (1, 1) if device == "cpu" else (2, 4)
    q, k, v = qkv(batch, heads, q_len, kv_len, dim, device=device)
    for is_causal in (False, True):
        clean = run(q, k, v, recipe, is_causal=is_causal)
        assert_attention_close(clean, attention(q, k, v, is_causal=is_causal)[0], RECIPE_TOLERANCE[recipe])
        poison(q, k, v, recipe)
        assert torch.equal(run(q, k, v, recipe, is_causal=is_causal), clean)


@pytest.mark.parametrize("dim", [64, 128])
def test_every_kv_len_up_to_two_tiles(dim: int) -> None:
    """1..260 keys, no residue of any tile size left out."""
    q, k, v = qkv(1, 2, 64, 260, dim)
    for kv_len in range(1, 261):
        part = k[:, :, :kv_len], v[:, :, :kv_len]
        assert_attention_close(run(q, *part), attention(q, *part)[0], T8F8, what=f"kv_len {kv_len}")


@pytest.mark.parametrize("dim", [96, 128])
@pytest.mark.parametrize("lengths", [(2048, 8192), (8192, 77), (1, 8192), (1031, 503)])
def test_lengths_may_differ(dim: int, lengths: tuple[int, int]) -> None:
    """Cross lengths are first class. The oracle checks every 16th row: rows do not depend on each other."""
    q, k, v = qkv(1, 1, *lengths, dim)
    assert_attention_close(run(q, k, v)[:, :, ::16], attention(q[:, :, ::16], k, v)[0], T8F8)


@on_devices(QUANTIZED)
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_one_query_row(device: str, recipe: str, kv_heads: int) -> None:
    """Decode shapes, causal or not, are right when quantized by name, and exact by default."""
    for kv_len in (1, 2, 7, 64, 129, 1031):
        q, k, v = qkv(1, 4, 1, kv_len, 64, kv_heads=kv_heads, device=device)
        want = attention(q, k, v)[0]
        for is_causal in (False, True):  # one row at the bottom sees every key
            out = run(q, k, v, recipe, is_causal=is_causal)
            assert_attention_close(out, want, RECIPE_TOLERANCE[recipe], what=f"kv_len {kv_len}")
    assert_attention_close(run_exact(q, k, v, "sage2", "decode", is_causal=True), want, HALF)


def test_short_attention_goes_exact_without_an_exception(device: str) -> None:
    """By default 77 text tokens are bit-equal to SDPA, and on a card so are 1,024, below its break-even length; 4,096
    tokens are quantized."""
    for length, reason in {"cpu": [(77, "short_kv")], "cuda": [(77, "short_kv"), (1024, "short")]}[device]:
        short = qkv(1, 2 if device == "cpu" else 4, length, dim=64, device=device)
        assert torch.equal(run_exact(*short, "sage2", reason), F.scaled_dot_product_attention(*short))
    ops.reset_counts()
    batch, heads, dim = (1, 1, 32) if device == "cpu" else (4, 32, 64)
    q, k, v = qkv(batch, heads, 4096, dim=dim, device=device)
    out = sage_attention(q, k, v)
    backend = "reference" if device == "cpu" else "sm90"
    assert [(key.recipe, key.backend, key.reason) for key in ops.counts()] == [(DEFAULT, backend, "")]
    assert_attention_close(out[:1, :2], attention(q[:1, :2], k[:1, :2], v[:1, :2])[0], T8F8)
