"""The compiled kernels on the GPU through the public function: long sequences, and more heads than a grid dimension.

They are too long for a whole float64 oracle, so rows are sampled: rows of attention do not depend on each other.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from oracle import RECIPE_TOLERANCE, assert_attention_close, attention, measure
from zoo.calls import run
from zoo.gpu_cases import DEVICE, RECIPES, normal, qkv

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", RECIPES)
def test_accuracy_does_not_depend_on_length(recipe: str) -> None:
    """Self-attention of 65,536 to 262,144 tokens: 512 rows from all over err as little at each length."""
    errors = {}
    for length in (65536, 131072, 163840, 196608, 262144):
        q, k, v = (normal(1, 2, length, 128, dtype=torch.float16, seed=s) for s in range(3))
        generator = torch.Generator().manual_seed(length)
        rows = torch.cat([torch.tensor([0, length - 1]), torch.randint(length, (510,), generator=generator)]).to(DEVICE)
        out = run(q, k, v, recipe)[:, :, rows]
        want = attention(q[:, :, rows], k, v)[0]
        errors[length] = assert_attention_close(out, want, RECIPE_TOLERANCE[recipe], what=f"{length} tokens").rel_l1
        causal = run(q, k, v, recipe, is_causal=True)
        for row in (127, length // 2 + 1, length - 1):  # a row with few keys has more noise of its own
            seen = slice(0, row + 1)
            part = causal[:, :, row : row + 1], attention(q[:, :, row : row + 1], k[:, :, seen], v[:, :, seen])[0]
            assert measure(*part).cosine > 0.99, f"causal, row {row} of {length}"
    assert max(errors.values()) < 1.3 * errors[65536], errors


@pytest.mark.parametrize("recipe", RECIPES)
def test_128000_tokens_in_both_layouts(recipe: str) -> None:
    """[2, 28, 128000, 128]: both layouts agree bit for bit, 256 sampled rows are right, and the memory that the call
    takes is at most 1.3 times that of q, k and v. A result with 1 % of its rows shifted by one would not pass."""
    hnd = [normal(2, 28, 128_000, 128, dtype=torch.float16, seed=s) for s in range(3)]
    size = sum(x.numel() * x.element_size() for x in hnd)
    outs = []
    for layout in ("HND", "NHD"):
        tensors = hnd if layout == "HND" else [x.transpose(1, 2).contiguous() for x in hnd]
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = run(*tensors, recipe, tensor_layout=layout)
        assert torch.cuda.max_memory_allocated() - before <= 1.3 * size
        outs.append(out if layout == "HND" else out.transpose(1, 2))
    assert torch.equal(*outs)
    rows = torch.randint(128_000 - 1, (32,), generator=torch.Generator().manual_seed(0))
    rows[0], rows[1], rows[2] = 0, 127_999, rows[3] + 1
    rows = rows.to(DEVICE)
    got, want = [], []
    for b, h in itertools.product((0, 1), (0, 1, 14, 27)):
        q, k, v = (x[b : b + 1, h : h + 1] for x in hnd)
        got.append(outs[0][b : b + 1, h : h + 1, rows])
        want.append(attention(q[:, :, rows], k, v)[0])
    good, right = torch.cat(got), torch.cat(want)
    assert_attention_close(good, right, RECIPE_TOLERANCE[recipe])
    shifted = good.clone()
    shifted[:3, :, 2] = good[:3, :, 3]  # 3 of 256 rows are their neighbours
    with pytest.raises(AssertionError, match="tolerance from"):
        assert_attention_close(shifted, right, RECIPE_TOLERANCE[recipe])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("b,h,n,d", [(9216, 8, 16, 40), (70000, 1, 16, 64)])
def test_more_heads_than_a_grid_dimension(recipe: str, b: int, h: int, n: int, d: int) -> None:
    """More than 65,535 heads over the batch, as attention over time with pixels in the batch has them."""
    q, k, v = qkv(b, h, h, n, n, d, torch.float16)
    out = run(q, k, v, recipe)
    pick = torch.randperm(b, generator=torch.Generator().manual_seed(0))[:62]
    pick = torch.cat([torch.tensor([0, b - 1]), pick]).to(DEVICE)
    want = attention(q[pick], k[pick], v[pick])[0]
    assert_attention_close(out[pick], want, RECIPE_TOLERANCE[recipe])
