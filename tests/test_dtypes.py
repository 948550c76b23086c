"""Dtypes of a call: mixed ones, float32, autocast; what stays exact is in the counts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from oracle import SINGLE, T8F8, assert_attention_close, attention, qkv
from sage_patch.attention import sage_attention
from sage_patch.kernels import ops
from zoo.calls import ALL, DEFAULT, run, tolerance_of


@pytest.mark.parametrize("value_dtype", [torch.bfloat16, torch.float16])
def test_float32_queries_with_half_values(value_dtype: torch.dtype) -> None:
    """Q, k float32 and V in half: exact in the common dtype, counted, output in query's dtype."""
    q, k, v = qkv(1, 2, 140, dim=64, dtype=torch.float32)
    out = sage_attention(q, k, v.to(value_dtype))
    assert out.dtype == torch.float32
    assert_attention_close(out, attention(q, k, v.to(value_dtype))[0], SINGLE)
    assert [key.reason for key in ops.counts()] == ["dtype_mixed"]


@pytest.mark.parametrize("recipe", ["sage2", *ALL])
def test_under_autocast_as_sdpa(recipe: str) -> None:
    """Norms under autocast return float32 q and k beside a bfloat16 V: output bfloat16, as SDPA's."""
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
    """Who runs float32 asked for float32 accuracy; by name it is quantized."""
    q, k, v = qkv(1, 1, length, dim=64, dtype=torch.float32)
    assert torch.equal(sage_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert [key.reason for key in ops.counts()] == ["dtype_float32"]
    assert_attention_close(run(q, k, v), attention(q, k, v)[0], T8F8)


def test_every_exact_call_is_in_the_counts() -> None:
    """Ten float32 calls are ten counted calls with reason dtype_float32."""
    tensors = qkv(1, 1, 130, dim=32, dtype=torch.float32)
    for _ in range(10):
        sage_attention(*tensors)
    assert [(key.backend, key.reason, n) for key, n in ops.counts().items()] == [("exact", "dtype_float32", 10)]
