"""The script that times whole models, on the CPU: a small model in the big ones' place, and a clock of our own."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import zoo.plain as zoo
from sage_patch.evaluation.bench import timing
from sage_patch.evaluation.bench.timing import Figure
from sage_patch.recipes import parse_recipe

SCRIPTS = str(Path(__file__).parents[1] / "scripts")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    found = importlib.import_module("gpu_models")
    shapes = importlib.import_module("model_shapes")

    def small() -> Any:
        model, inputs = zoo.build("vit")
        inputs = {n: x.bfloat16() for n, x in inputs.items()}
        return model.bfloat16(), lambda: model(**inputs)

    monkeypatch.setattr(found, "MODELS", {"small": shapes.ModelShape("Small", small, 16, 32)})
    monkeypatch.setattr(
        found, "measure", lambda run, given: Figure(2.0, 3.0, (0, 1), (1, 2)) if run() is not None else 0
    )
    monkeypatch.setattr(timing, "device_id", lambda: "0")
    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1 << 30)
    here = found.shape
    monkeypatch.setattr(found, "shape", lambda *given: here(*given, device="cpu"))
    return found


def test_every_way_takes_turns(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "models.json"
    monkeypatch.setattr(sys, "argv", ["gpu_models.py", "--parts", "small", "--rounds", "2", "--out", str(out)])
    script.main()
    record = json.loads(out.read_text())
    row = record["small"]
    assert row["rounds"] == 2 and row["attention"] == {"tokens": 16, "head_dim": 32, "is_causal": False}
    assert row["exact"]["bit_equal"] and row["exact"]["ran"] == [["exact", "policy", "exact"]]
    for way in ("sdpa_default", "exact", "qk_int8_pv_fp8"):
        assert row[way]["ms"] == 3.0 and row[way]["burst_ms"] == 2.0 and len(row[way]["each_ms"]) == 2
        assert row[way]["speedup_over_default"] == row[way]["peak_over_default"] == 1.0
    assert "FlashAttention-3 is not installed" in row["fa3_bf16"]["unavailable"]
    try:
        parse_recipe("qk_int8_pv_fp8:exp=chord")
    except ValueError:
        assert "unknown variant 'exp'" in row["chord"]["unavailable"]
    else:
        assert row["chord"]["ms"] == 3.0
    assert "--budget 600" in record["command"]


def test_what_does_not_fit_is_said(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "models.json"
    monkeypatch.setattr(sys, "argv", ["s", "--parts", "small", "--rounds", "9", "--budget", "1e-9", "--out", str(out)])
    script.main()
    row = json.loads(out.read_text())["small"]
    assert "budget of 1e-09 seconds was over" in row.get("error", "") or row["rounds"] == 1
    for words in (["--parts", "x"], ["--ways", "exact"]):
        monkeypatch.setattr(sys, "argv", ["s", *words, "--out", str(out)])
        with pytest.raises(SystemExit):
            script.main()
