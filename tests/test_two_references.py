"""The CPU backend and the emulator of the Hopper kernel must err alike, or what is calibrated on a CPU means nothing
on a GPU. They differ on purpose: whole means against sampled ones, thread groups of query rows against single rows.

`python tests/test_two_references.py` prints the table of docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from oracle import attention, measure, qkv
from sage_patch.config import load_run_config
from sage_patch.evaluation.models import load_text_model
from sage_patch.reference.attention import quantized_attention
from sage_patch.reference.emulator import forward as sm90
from sage_patch.reference.emulator import tile_image
from sage_patch.reference.quantize import subtract_mean, subtract_significant_mean
from sage_patch.reference.visibility import Visibility
from tiny import captured
from zoo.kernel_calls import recipe_of

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("qk_int8_pv_fp8", "qk_int8_pv_fp16", "qk_int4_pv_fp8", "qk_int4_pv_fp16")
INPUTS = ("N(0,1)", "K bias +300", "V offset 40", "lm-tiny-d128")


class Sample(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool


@cache
def samples(name: str) -> list[Sample]:
    """Inputs of one row of the table, in the half type that the kernel takes."""
    if name == "lm-tiny-d128":
        return list(_captured())
    found = []
    for dim in (64, 128):
        q, k, v = qkv(1, 2, 256, 1031, dim, dtype=torch.float32)
        k[..., 3] += 300.0 * (name == "K bias +300")
        v += 40.0 * (name == "V offset 40")
        found.append(Sample(q.half(), k.half(), v.half(), False))
    return found


def _captured() -> Iterator[Sample]:
    """Every other attention call of the small trained model on held-out text."""
    model, tokenizer = load_text_model(load_run_config(ROOT / "configs/tiny.yaml").model)
    text = (ROOT / "tests/assets/heldout.txt").read_text()[:6000]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :384]
    for call in captured(model, lambda: model(ids, use_cache=False))[::2]:
        assert call.right == 0 and call.left in (None, -1) and call.attn_mask is None
        assert call.scale == pytest.approx(call.query.shape[-1] ** -0.5)
        yield Sample(call.query.bfloat16(), call.key.bfloat16(), call.value.bfloat16(), True)


@cache
def errors(name: str, recipe: str) -> tuple[float, float]:
    """Error of the CPU backend and of the emulated kernel against exact attention, averaged over the samples.

    Relative L1, before the output's own rounding; with a V offset relative to the distance from V's mean, or the offset
    would hide the error."""
    found = []
    for s in samples(name):
        scale, (q_len, kv_len) = s.query.shape[-1] ** -0.5, (s.query.shape[2], s.key.shape[2])
        seen = Visibility(q_len, kv_len, right=0 if s.is_causal else None, offset=kv_len - q_len)
        want = attention(s.query, s.key, s.value, is_causal=s.is_causal)[0]
        floats = (x.float() for x in (s.query, s.key, s.value))
        backend = quantized_attention(*floats, seen, recipe_of(recipe), scale=scale)[0]
        kernel = sm90.emulate(s.query, s.key, s.value, recipe=recipe, scale=scale, is_causal=s.is_causal).out_float
        pair = [measure(x, want, s.value) for x in (backend, kernel)]
        found.append([e.centred if name == "V offset 40" else e.rel_l1 for e in pair])
    backend_error, kernel_error = (sum(x) / len(found) for x in zip(*found, strict=True))
    return backend_error, kernel_error


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", INPUTS)
def test_errors_agree(name: str, recipe: str) -> None:
    backend, kernel = errors(name, recipe)
    assert kernel == pytest.approx(backend, rel=0.10)


def test_smoothing_rules_of_v_agree() -> None:
    """Both shift a channel with an offset, neither one whose mean is noise; on a length that needs no sampling both
    decide alike in every channel, up to channels at the very threshold."""
    x = qkv(1, 1, 1, 64, 128, dtype=torch.float32)[2] + torch.linspace(-1, 1, 128)
    mean = subtract_significant_mean(x, None)[1][0, 0, 0]
    sampled = tile_image.v_mean(x[0, 0])
    assert torch.allclose(mean, sampled, atol=1e-5)
    assert 0 < int((mean == 0).sum()) < 128
    assert subtract_significant_mean(x + 40, None)[1].all() and tile_image.v_mean(x[0, 0] + 40).all()


def test_values_on_a_grid_stay_on_it() -> None:
    """V from an FP8 cache: with the mean kept only where it matters the values are quantized without any error."""
    v = qkv(1, 1, 1, 1031, 64, dtype=torch.float32)[2].to(torch.float8_e4m3fn).float()
    centred, mean = subtract_significant_mean(v, None)
    assert torch.equal(centred, v) and not mean.any()
    assert subtract_mean(v, None)[1].all()  # what the plain rule would subtract


def test_significant_mean_counts_visible_tokens_only() -> None:
    """A hidden outlier cannot make a mean look small, and hidden tokens become zero."""
    v = torch.full((1, 1, 10, 4), 3.0)
    v[0, 0, 9] = torch.tensor([1e6, float("nan"), float("inf"), 0.0])
    seen = (torch.arange(10) < 9)[None, None]
    centred, mean = subtract_significant_mean(v, seen)
    assert torch.equal(mean, torch.full_like(mean, 3.0)) and not centred.any()
    centred, mean = subtract_significant_mean(v[:, :, :0], None)
    assert centred.shape[2] == 0 and not mean.any()


if __name__ == "__main__":
    print("| input | recipe | CPU backend | Hopper kernel, emulated | ratio |\n|---|---|---|---|---|")
    for name in INPUTS:
        for recipe in RECIPES:
            a, b = errors(name, recipe)
            print(f"| {name} | `{recipe}` | {a:.5f} | {b:.5f} | {b / a:.3f} |")
