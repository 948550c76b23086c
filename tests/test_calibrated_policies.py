"""The calibrated policies under docs/calibrated: each says what its record holds, and one is measured again."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sage_patch.config import load_policy, load_run_config
from sage_patch.evaluation.calibration.targets import parse_targets
from sage_patch.evaluation.models import load_pipeline, load_text_model
from sage_patch.patch import plan

ROOT = Path(__file__).parent.parent
POLICIES = sorted((ROOT / "docs" / "calibrated").glob("*.yaml"))
CONFIGS = {"lm_tiny": "tiny", "flux": "quickstart_image", "wan": "quickstart_video"}


def record(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "docs" / "results" / f"calibrate_{name}.json").read_text())


def test_one_is_shipped_for_every_real_model() -> None:
    assert [p.stem for p in POLICIES] == ["flux", "lm_tiny", "smollm2", "wan"]


@pytest.mark.parametrize("path", POLICIES, ids=lambda p: p.stem)
def test_it_is_what_its_record_says(path: Path) -> None:
    """Met in a full run, which the cheapest rung misses; cheaper than the best single one; half or more below exact."""
    policy, found = load_policy(path), record(path.stem)
    made = policy.calibration
    assert made is not None and made.model_hash == found["model"]["hash"]
    chosen, single = found["chosen"], found["best_single_rung"]
    for name, value in made.achieved.items():
        measured = chosen["metrics"][name]
        assert math.isclose(value, measured, rel_tol=1e-4) if measured is not None else math.isinf(value)
    assert all(t.met_by(made.achieved) for t in parse_targets(made.targets, found["task"]))
    cheapest = min((r for r in found["runs"] if r["name"].endswith(" everywhere")), key=lambda run: run["cost"])
    assert not cheapest["met"] and cheapest["cost"] < chosen["cost"]
    assert math.isclose(made.cost, chosen["cost"], rel_tol=1e-3) and chosen["cost"] < single["cost"] < 1
    assert 2 * chosen["sites_below_exact"] >= chosen["sites"] == len(found["plan"])
    assert found["seconds"] + found["reused"]["seconds"] < 15 * 60
    assert all(rule.reason for rule in policy.rules)
    assert len(policy.rules) < chosen["sites"] or chosen["sites"] < 10


@pytest.mark.parametrize("name", CONFIGS)
def test_it_fits_the_shipped_model_without_weights(name: str) -> None:
    overrides = [f"policy={ROOT / 'docs' / 'calibrated' / name}.yaml", "model.meta=true"]
    config = load_run_config(ROOT / "configs" / f"{CONFIGS[name]}.yaml", overrides)
    model = load_text_model(config.model)[0] if config.task.kind == "text" else load_pipeline(config.model)
    assert plan(model, config.policy.build()).rows() == record(name)["plan"]


def test_in_a_fresh_process_it_reproduces_its_score() -> None:
    """The first four windows of the confirming run, measured again under the policy file; the model's hash must fit."""
    code = (
        "import json\n"
        "from sage_patch.config import load_run_config\n"
        "from sage_patch.evaluation.judge import judge_for\n"
        "more = ['policy=docs/calibrated/lm_tiny.yaml', 'task.max_new_tokens=1']\n"
        "config = load_run_config('configs/tiny.yaml', more)\n"
        "judge = judge_for(config, lambda *_: None)\n"
        "judge.windows = judge.windows[:4]\n"
        "print(json.dumps(judge.measure('policy', config.policy.build()).each))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    again, before = json.loads(done.stdout), record("lm_tiny")["chosen"]["each"]
    assert len(again) == 4 and len(before) == 16
    for now, then in zip(again, before[:4], strict=True):
        assert math.isclose(now["kl"], then["kl"], rel_tol=0.02), (now, then)
        assert math.isclose(now["nll"], then["nll"], rel_tol=1e-3) and abs(now["top1"] - then["top1"]) < 0.01
