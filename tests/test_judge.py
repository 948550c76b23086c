"""One policy against the unpatched model: what a judge measures, and that it measures the same twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sage_patch.config import load_run_config
from sage_patch.evaluation import judge as judges
from sage_patch.evaluation import metrics
from sage_patch.evaluation.judge import LADDER, Judge, PictureJudge, TextJudge, judge_for
from sage_patch.evaluation.models import ModelError
from sage_patch.evaluation.picture_metrics import Unavailable, temporal_error
from sage_patch.kernels import ops
from sage_patch.policy import Policy, PolicyError, Rule
from sage_patch.schema import RunConfig
from tiny_pipelines import save_text_to_video

ROOT = Path(__file__).parent.parent
TEXT = ["task.windows=3", "task.window_tokens=256", "task.max_new_tokens=4"]


def quiet(label: str, done: int, total: int) -> None:
    return None


def policy(recipe: str, **more: Any) -> Policy:
    return Policy(recipe=recipe, quantize_fp32=True, **more)


@pytest.fixture(scope="module")
def text() -> TextJudge:
    judge = judge_for(load_run_config(ROOT / "configs" / "tiny.yaml", TEXT), quiet)
    assert isinstance(judge, TextJudge)
    return judge


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> PictureJudge:
    folder = tmp_path_factory.mktemp("judge-video")
    save_text_to_video(folder / "pipeline")
    model = {
        "path": "./pipeline", "device": "cpu", "prompt_table": "table.safetensors", "latents_are_pixels": True
    }  # fmt: skip
    size = {"height": 144, "width": 128, "num_frames": 17, "steps": 2}
    task = {"kind": "video", "prompts": ["run", "walk"], "seeds": [1, 2], **size}
    (folder / "run.yaml").write_text(yaml.safe_dump({"version": 1, "model": model, "task": task}))
    judge = judge_for(load_run_config(folder / "run.yaml"), quiet)
    assert isinstance(judge, PictureJudge)
    return judge


def test_a_text_judge_measures_what_the_metrics_say(text: TextJudge) -> None:
    """Against logits computed here, without the judge: KL, agreement and both perplexities."""
    found = text.measure("policy", policy("qk_int4_pv_fp8"))
    comparison = metrics.TextComparison()
    with torch.no_grad():
        for tokens in text.windows:
            exact = metrics.ExactWindow(text.model(input_ids=tokens[None]).logits[0], tokens)
            with judges.applied(text.model, policy("qk_int4_pv_fp8")):
                comparison.add(text.model(input_ids=tokens[None]).logits[0], exact)
    wanted = comparison.summary()
    for name in ("kl", "top1", "ppl", "ppl_change"):
        assert found.metrics[name] == pytest.approx(wanted[name], rel=1e-5), name
    assert found.metrics["kl"] > 0.05 and len(found.each) == 3
    assert 0 <= found.metrics["agreement"] <= 1
    assert {(c["recipe"], c["calls"]) for c in found.calls} == {("qk_int4_pv_fp8", 3)} and len(found.calls) == 8
    assert all(c["recipe"] == "exact" for c in found.prompt_calls)  # a short prompt: nothing to quantize


def test_exact_is_the_unpatched_model(text: TextJudge, video: PictureJudge) -> None:
    assert text.measure("exact", Policy(recipe="exact")).metrics["kl"] == pytest.approx(0, abs=1e-6)
    drawn = video.measure("exact", Policy(recipe="exact")).metrics
    assert drawn["worst_psnr"] == float("inf") and drawn["temporal_error"] == 0


@pytest.mark.parametrize("which", ["text", "video"])
def test_measuring_twice_gives_the_same_figures_and_leaves_the_model_unpatched(
    which: str, request: pytest.FixtureRequest
) -> None:
    """A calibration measures many policies on one judge: what came before must not show."""
    judge: Judge = request.getfixturevalue(which)
    first = judge.measure("a", policy("qk_int8_pv_fp8")).metrics
    judge.measure("b", policy("qk_int4_pv_fp8"))
    assert judge.measure("c", policy("qk_int8_pv_fp8")).metrics == first
    judge.plan(Policy())  # raises if the model were still patched


def test_the_ladder_goes_from_cheap_to_exact(text: TextJudge, video: PictureJudge) -> None:
    kl = [text.measure(r, policy(r)).metrics["kl"] for r in LADDER]
    assert kl == sorted(kl, reverse=True)
    psnr = [video.measure(r, policy(r)).metrics["psnr"] for r in LADDER]
    assert psnr == sorted(psnr)


def test_policies_measured_together_have_the_figures_of_each_alone(text: TextJudge) -> None:
    """Window by window, with no answer of the unpatched model kept from one to the next."""
    policies = {recipe: policy(recipe) for recipe in LADDER[:2]}
    apart = [text.measure(name, p) for name, p in policies.items()]
    judge = judge_for(text.config, quiet, kept_bytes=0)
    together = judge.measure_all(policies)
    for one, other in zip(apart, together, strict=True):
        assert (one.metrics, one.each, one.outputs) == (other.metrics, other.each, other.outputs)
        assert one.calls == other.calls and [t["text"] for t in one.texts] == [t["text"] for t in other.texts]
    assert judge._kept == {} and judge.baseline_facts()["metrics"] == text.baseline_facts()["metrics"]  # type: ignore[attr-defined]


def test_the_time_inside_attention_is_part_of_the_whole(text: TextJudge, video: PictureJudge) -> None:
    """Patched it is the operator's, unpatched that of torch's own attention."""
    for judge in (text, video):
        found, base = judge.measure("p", policy("qk_int8_pv_fp8")), judge.baseline_facts()
        assert found.attention_seconds is not None and 0 < found.attention_seconds < found.seconds
        assert 0 < base["attention_seconds"] < base["seconds"] == found.baseline_seconds
        assert found.peak_memory is None and "only CUDA" in found.unavailable["peak_memory"]


def test_run_exact_shows_every_site_to_an_observer(text: TextJudge, video: PictureJudge) -> None:
    for judge, calls in ((text, 1), (video, 4)):  # a window; two steps of a clip, each with and without its prompt
        seen: list[str] = []
        with ops.observe(lambda call, seen=seen: seen.append(call.site.partition("/")[2])):  # type: ignore[misc]
            judge.run_exact()
        sites = [s.name for s in judge.plan(Policy()).sites]
        assert sorted(seen) == sorted(sites * calls)


def test_steps_are_those_of_the_task(text: TextJudge, video: PictureJudge) -> None:
    assert (text.has_steps, text.num_steps) == (False, None)
    assert (video.has_steps, video.num_steps) == (True, 2)


def test_logits_that_are_too_many_to_keep_are_computed_again(text: TextJudge) -> None:
    wanted = text.measure("p", policy("qk_int4_pv_fp8")).each
    again = judge_for(text.config, quiet, kept_bytes=256 * 4096 * 4)
    assert again.measure("p", policy("qk_int4_pv_fp8")).each == wanted
    assert len(again._kept) < 3  # type: ignore[attr-defined]


def test_what_does_not_fit_costs_no_computation(text: TextJudge) -> None:
    with pytest.raises(PolicyError, match="matched no site"):
        text.measure("p", Policy(rules=[Rule(match="nothing", recipe="exact")]))
    meta: RunConfig = load_run_config(ROOT / "configs" / "tiny.yaml", ["model.meta=true"])
    with pytest.raises(ModelError, match="measuring needs weights"):
        judge_for(meta, quiet)


def test_the_temporal_error_sees_flicker_and_not_a_shift() -> None:
    """sum |(a' - a) - (e' - e)| / sum |e' - e|, worked out by hand."""
    exact = torch.tensor([0.0, 0.1, 0.3]).view(3, 1, 1, 1).expand(3, 3, 2, 2)
    assert temporal_error(exact + 0.2, exact) == pytest.approx(0, abs=1e-6)
    flicker = exact + torch.tensor([0.0, 0.06, 0.0]).view(3, 1, 1, 1)
    assert temporal_error(flicker, exact) == pytest.approx(0.12 / 0.3)
    with pytest.raises(Unavailable, match="^one frame has no motion$"):
        temporal_error(exact[:1], exact[:1])
    with pytest.raises(Unavailable, match="^nothing moves in the unpatched clip$"):
        temporal_error(exact, exact[:1].expand_as(exact))
