"""The paper's orderings come out on tensors captured from a trained model; capture is bounded and leaves it alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sage_patch.cli import app
from sage_patch.config import load_run_config
from sage_patch.evaluation.ablation import RUNGS, TABLES, AblationError, ablate, score_calls, tables
from sage_patch.evaluation.calls import Capture, compute
from sage_patch.evaluation.methods import INT4, INT8, METHODS, move_scales, round_weights, shift_channels
from sage_patch.evaluation.metrics import errors
from sage_patch.evaluation.models import load_text_model
from sage_patch.kernels import ops
from tiny import captured
from tiny_pipelines import save_text_to_video

ROOT = Path(__file__).resolve().parents[1]
PLAIN = {4: INT4, 8: INT8}


@pytest.fixture(scope="module")
def calls() -> list[ops.ObservedCall]:
    model, tokenizer = load_text_model(load_run_config(ROOT / "configs/tiny.yaml").model)
    text = (ROOT / "tests/assets/heldout.txt").read_text()[:6000]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :640]
    calls = captured(model, lambda: model(ids, use_cache=False))
    assert len(calls) == 8 and calls[0].site == "model.layers.0.self_attn"
    return calls


@pytest.fixture
def a_real_call(calls: list[ops.ObservedCall]) -> ops.ObservedCall:
    return calls[3]


@pytest.fixture(scope="module")
def measured(calls: list[ops.ObservedCall]) -> dict[str, dict[str, dict[str, float]]]:
    return {title: {r["recipe"]: r for r in rows} for title, rows in tables(score_calls(calls[::2])).items()}


@pytest.mark.parametrize("bits", [4, 8])
def test_smoothing_order(measured, bits):
    rows = measured[f"smoothing, INT{bits}"]
    error = {s: rows[f"{PLAIN[bits]},smooth={s}"]["rel_l1"] for s in ("none", "k", "q", "qk")}
    assert error["qk"] < min(error["k"], error["q"]) <= max(error["k"], error["q"]) < error["none"]


@pytest.mark.parametrize("bits", [4, 8])
def test_granularity_order(measured, bits):
    rows = measured[f"granularity, INT{bits}"]
    errors = [rows[f"{PLAIN[bits]},granularity={g}"]["rel_l1"] for g in ("tensor", "block", "warp", "thread", "token")]
    assert errors == sorted(errors, reverse=True)


def test_fp16_values_are_the_remedy_rung(measured):
    rows = measured["P and V, INT8 Q and K"]
    assert rows["qk_int8_pv_fp16:rotate=none"]["rel_l1"] < 0.5 * rows[PLAIN[8]]["rel_l1"]


def test_capture_reverts_and_bounds_its_memory():
    model, _ = load_text_model(load_run_config(ROOT / "configs/tiny.yaml").model)
    ids = torch.arange(200)[None] + 5
    assert len(captured(model, lambda: model(ids), limit_bytes=1)) == 0
    assert model.config._attn_implementation == "sdpa"


def a_call(site: str, number: int, kv_len: int = 128) -> ops.ObservedCall:
    tensor = torch.full((1, 1, kv_len, 4), float(number))
    return ops.ObservedCall(f"h1/{site}", tensor, tensor, tensor, None, 1.0, -1, -1, False)


@pytest.mark.parametrize("made, kept", [(3, [0, 1, 2]), (4, [0, 2]), (5, [0, 2, 4]), (24, [0, 8, 16])])
def test_a_site_keeps_few_calls_evenly_spread(made, kept):
    found = Capture("x", per_site=3)
    for number in range(made):
        found.observe(a_call("a", number))
        found.observe(a_call("b", number))
    assert [int(c.key[0, 0, 0, 0]) for c in found.calls] == kept * 2
    assert found.seen == 2 * made and found.used == len(found.calls) * 3 * 128 * 4 * 4


def test_what_cannot_be_ablated_is_counted_and_said():
    found = Capture("toy", limit_bytes=1)
    found.observe(a_call("a", 0, kv_len=127))
    found.observe(a_call("a", 0))
    with pytest.raises(AblationError, match="toy: none of 2 attention calls can be ablated: 1 have fewer than 128"):
        ablate(found)


def run(config: Path, folder: Path, *options: str) -> tuple[dict, dict]:
    """ablation.json and anatomy.json of the command."""
    done = CliRunner().invoke(app, ["ablate", str(config), "--out", str(folder), *options])
    assert done.exit_code == 0, done.output
    assert "# Operator ablations on real tensors" in done.output
    found = [json.loads((folder / f"{name}.json").read_text()) for name in ("ablation", "anatomy")]
    return found[0]["models"][config.stem], found[1]["models"][config.stem]


def test_the_command_makes_the_tables_of_a_language_model(tmp_path):
    short = ["--set", "task.windows=2", "--set", "task.window_tokens=160"]
    ablation, anatomy = run(ROOT / "configs/tiny.yaml", tmp_path, *short, "--site", "model.layers.2.self_attn")
    assert (ablation["calls"], ablation["calls_seen"], ablation["tokens"]) == (8, 8, 160)
    assert [(s["site"], s["recipe"]) for s in ablation["sites"][:3]] == [("model.layers.0.self_attn", r) for r in RUNGS]
    assert set(ablation["tables"]) == set(TABLES) and anatomy["site"] == "model.layers.2.self_attn"


def test_the_command_makes_the_tables_of_a_pipeline(tmp_path):
    pipeline = save_text_to_video(tmp_path / "pipe")
    config = tmp_path / "video.yaml"
    config.write_text(f"""
version: 1
model: {{path: {pipeline}, dtype: float32, device: cpu, prompt_table: table.safetensors, latents_are_pixels: true}}
policy: {{recipe: qk_int8_pv_fp8, quantize_fp32: true}}
task: {{kind: video, prompts: [walk], steps: 2, height: 144, width: 128, num_frames: 17, guidance_scale: 1.0}}
""")
    ablation, anatomy = run(config, tmp_path, "--per-site", "1")
    # of two blocks at two steps the self-attention, once each; cross-attention has four keys
    assert ablation["calls"] == 2 and ablation["calls_short"] == 4 and ablation["calls_seen"] == 8
    assert anatomy["site"].endswith("attn1") and not anatomy["causal"]


def test_a_misspelt_site_is_found_before_the_long_work(tmp_path):
    command = ["ablate", str(ROOT / "configs/tiny.yaml"), "--out", str(tmp_path), "--site", "nowhere"]
    done = CliRunner().invoke(app, [*command, "--set", "task.windows=2", "--set", "task.window_tokens=160"])
    assert done.exit_code == 2 and "no captured call of site 'nowhere'" in done.output
    assert not (tmp_path / "ablation.json").exists()


@pytest.mark.parametrize("bits", [4, 8])
def test_rotation_is_the_best_answer_to_outlier_channels(measured, bits):
    rows = measured[f"outlier channels, INT{bits}"]
    best = min(rows, key=lambda name: rows[name]["rel_l1"])
    assert best == PLAIN[bits].replace("none", "hadamard")
    assert all(r["rel_l1"] < 1.1 * rows[PLAIN[bits]]["rel_l1"] for r in rows.values())


def test_methods_are_exact_but_for_what_they_round(a_real_call):
    """P and V in E4M3 without ranges of their own are the recipe itself, and no method changes the attention."""
    exact = compute(a_real_call, "exact")
    recipe = errors(compute(a_real_call, PLAIN[8]), exact)
    assert round_weights(a_real_call, "e4m3", by_tile=False) == pytest.approx(recipe, rel=1e-4)
    for moved in (move_scales, shift_channels):
        assert moved(a_real_call, "exact")["rel_l1"] < 1e-5
    for name, method in METHODS.items():
        assert 0 < method(a_real_call)["rel_l1"] < (0.25 if "int4" in name else 0.06), name


def test_methods_under_masks_and_grouped_heads():
    """What a row does not see cannot reach it: hidden keys may hold anything finite."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 140, 32, generator=generator) for h in (4, 2, 2))
    mask = (torch.arange(140) < 130).expand(2, 1, 1, 140)
    k[:, :, 130:], v[:, :, 130:] = 1e4, 1e4
    call = ops.ObservedCall("h1/a", q, k, v, mask, 0.2, -1, 0, False)
    for name, method in METHODS.items():
        assert 0 < method(call)["rel_l1"] < (0.3 if "int4" in name else 0.07), name
