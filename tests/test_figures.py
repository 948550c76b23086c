"""The table of figures: whatever is measured is in it, and what follows from it is sound; and older results files."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sage_patch import figures
from sage_patch.cli import app
from sage_patch.evaluation import metrics, picture_metrics
from sage_patch.schema import TARGETS, TargetSpec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import rewrite_results  # noqa: E402


def test_every_name_of_a_figure_is_its_own() -> None:
    for of in (lambda f: f.key, lambda f: f.bound, lambda f: f.target, lambda f: (f.heading, f.kinds)):
        names = [of(figure) for figure in figures.FIGURES if of(figure)]
        assert len(names) == len(set(names)), names


def test_what_is_measured_of_pictures_is_in_the_table() -> None:
    """Else it would be in results.json and in no table."""
    measured = {*picture_metrics.FRAMES, *picture_metrics.CLIPS}
    shown = {figure.key for figure in figures.of_kind("video")} - {"lpips", "clip_score", "fid"}
    assert measured == {key for key in shown if not key.startswith("worst_")}
    assert {figure.key for figure in figures.of_kind("text")} <= {
        *metrics.TextComparison([1.0], [1.0], [1.0], [1.0], [1.0], [1.0]).summary(), "agreement"
    }  # fmt: skip


@pytest.mark.parametrize("figure", [f for f in figures.FIGURES if f.target], ids=lambda f: f.key)
def test_what_may_be_a_target_is_met_and_undamaged_by_the_unpatched_model(figure: figures.Figure) -> None:
    assert figure.exact is not None and figure.keeps(figure.exact, figure.exact)
    assert figure.damage(figure.exact) == 0 or math.isinf(figure.exact)
    worse = {"share": 0.5, "dB": 20.0, "x": 0.5}.get(figure.unit, 0.5)
    assert not figure.keeps(worse, figure.exact) and (figure.unit == "x" or figure.damage(worse) > 0)


def test_bounds_of_a_configuration_follow() -> None:
    assert TARGETS["text"] == ("max_kl", "min_top1", "max_ppl_change") and TARGETS["image"] == TARGETS["video"]
    assert set(TargetSpec.model_fields) == {*TARGETS["text"], *TARGETS["image"]} == set(figures.BY_BOUND)
    change = figures.BY_BOUND["max_ppl_change"]
    assert change.keeps(-0.004, 0.005) and not change.keeps(-0.006, 0.005) and not change.keeps(math.nan, 0.005)


TEXT_RUN: dict[str, Any] = {
    "schema": 1, "kind": "text", "date": "d", "command": "c", "environment": {}, "config": {}, "model": {"class": "M"},
    "text": {"windows": 2, "window_tokens": 8, "file": "f"}, "exact_seconds_per_window": 2.0, "plan": [],
    "quality": [{"name": "policy", "recipe": "r", "windows": 2, "kl": 0.5, "top1": 0.25, "ppl": 3.0, "ppl_exact": 2.0,
                 "seconds_per_window": 3.0, "slowdown": 1.5, "calls": [{"site": "a", "backend": "reference"}],
                 "sites": [{"name": "a", "cosine": 1.0, "rel_l1": 0.125, "worst_row": 0.25}]}],
    "generation": {"prompts": [{"prompt": "p", "prompt_tokens": 3, "agreement": 0.75,
                                "exact": {"text": "x", "tokens": 4, "seconds": 2.0, "tokens_per_second": 2.0},
                                "policy": {"text": "y", "tokens": 4, "seconds": 1.0, "tokens_per_second": 4.0}}],
                   "agreement": 0.75, "calls": [{"site": "a", "recipe": "exact"}]},
    "targets": [], "passed": True, "seconds": 9.0,
}  # fmt: skip


def test_an_older_run_is_rewritten_without_a_change_of_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(TEXT_RUN))
    done = CliRunner().invoke(app, ["report", str(path), "--out", str(tmp_path)])
    assert done.exit_code == 2 and f"python scripts/rewrite_results.py {path} brings it up to date" in done.stderr
    found = rewrite_results.rewrite(json.loads(path.read_text()))
    (row,) = found["rows"]
    assert row["metrics"] == {"kl": 0.5, "top1": 0.25, "ppl": 3.0, "ppl_exact": 2.0} and row["unavailable"] == {}
    assert (row["seconds"], row["mean"], row["slowdown"]) == (6.0, {"seconds": 3.0}, 1.5)
    assert row["outputs"] == [{"site": "a", "cosine": 1.0, "rel_l1": 0.125, "worst_row": 0.25}]
    assert row["texts"] == [{"text": "y", "tokens": 4, "seconds": 1.0, "agreement": 0.75}]
    assert found["unpatched"]["metrics"] == {"ppl": 2.0} and found["unpatched"]["texts"][0]["prompt_tokens"] == 3
    assert found["schema"] == 2 and rewrite_results.rewrite(json.loads(json.dumps(found))) == found
    path.write_text(json.dumps(found))
    done = CliRunner().invoke(app, ["report", str(path), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "| policy (`r`) | 0.5000 | 25.00% |" in (tmp_path / "report.md").read_text()


def test_older_pictures_keep_their_figures_and_their_reasons() -> None:
    old = {"prompt": "p", "seed": 1, "psnr": [30.0, None], "ssim": [0.5, 1.0], "ms_ssim": "unavailable: small"}
    new = rewrite_results._picture(old)
    assert new["metrics"] == {"psnr": math.inf, "worst_psnr": 30.0, "ssim": 0.75, "worst_ssim": 0.5}
    assert new["frames"] == {"psnr": [30.0, None], "ssim": [0.5, 1.0]}
    assert rewrite_results._spelled({"relative_l1": 1, "relative_l1_worst": 2, "psnr_worst": 3, "kl_worst": 4}) == {
        "rel_l1": 1, "worst_rel_l1": 2, "worst_psnr": 3, "kl_worst": 4
    }  # fmt: skip
