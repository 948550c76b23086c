"""The paper's orderings come out on tensors captured from a trained model, and capture leaves the model alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sage_patch.config import load_run_config
from sage_patch.evaluation.ablation import capture, tables
from sage_patch.evaluation.models import load_text_model

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, dict[str, float]]]:
    model, tokenizer = load_text_model(load_run_config(ROOT / "configs/tiny.yaml").model)
    text = (ROOT / "tests/assets/heldout.txt").read_text()[:6000]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :640]
    calls = capture(model, lambda m: m(ids, use_cache=False), "lm-tiny-d128")
    assert len(calls) == 8 and calls[0].call.site == "model.layers.0.self_attn"
    return {title: {r["recipe"]: r for r in rows} for title, rows in tables(calls[::2]).items()}


@pytest.mark.parametrize("bits", [4, 8])
def test_smoothing_order(measured, bits):
    rows = measured[f"smoothing, INT{bits}"]
    error = {s: rows[f"qk_int{bits}_pv_fp8:smooth={s}"]["relative_l1"] for s in ("none", "k", "q", "qk")}
    assert error["qk"] < min(error["k"], error["q"]) <= max(error["k"], error["q"]) < error["none"]


@pytest.mark.parametrize("bits", [4, 8])
def test_granularity_order(measured, bits):
    rows = measured[f"granularity, INT{bits}"]
    errors = [
        rows[f"qk_int{bits}_pv_fp8:granularity={g}"]["relative_l1"]
        for g in ("tensor", "block", "warp", "thread", "token")
    ]
    assert errors == sorted(errors, reverse=True)


def test_fp16_values_are_the_remedy_rung(measured):
    rows = measured["P and V, INT8 Q and K"]
    assert rows["qk_int8_pv_fp16"]["relative_l1"] < 0.5 * rows["qk_int8_pv_fp8"]["relative_l1"]


def test_capture_reverts_and_bounds_its_memory():
    model, _ = load_text_model(load_run_config(ROOT / "configs/tiny.yaml").model)
    ids = torch.arange(200)[None] + 5
    assert len(capture(model, lambda m: m(ids), "x", limit_bytes=1)) == 0
    assert model.config._attn_implementation == "sdpa"
