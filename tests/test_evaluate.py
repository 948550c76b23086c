"""`sage-patch evaluate`: every figure of a language model and of pipelines, and that what stops a run loses nothing."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from sage_patch import cli
from sage_patch.config import ConfigError, load_run_config
from sage_patch.evaluation import evaluate, needle, picture_metrics, tables
from sage_patch.evaluation.checkpoint import Checkpoint, CheckpointError
from sage_patch.evaluation.costs import Cost
from sage_patch.evaluation.judge import Judge, TextJudge
from sage_patch.evaluation.models import ModelError, load_text_model
from sage_patch.evaluation.results_tables import results_tables
from sage_patch.schema import EvaluateSpec, ModelSpec
from tiny_pipelines import save_text_to_image, save_text_to_video

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs" / "tiny.yaml")
SMALL = (
    "task.windows=2", "task.window_tokens=256", "task.max_new_tokens=2", "compare=[qk_int4_pv_fp8]",
    "evaluate={needle_lengths: [192], needle_depths: [0, 1]}",
)  # fmt: skip
TEXT_PARTS = [
    "quality of policy", "quality of qk_int4_pv_fp8", "needle of unpatched", "needle of policy",
    "needle of qk_int4_pv_fp8", "sites",
]  # fmt: skip


def run(config: str, folder: Path, *settings: str, options: tuple[str, ...] = ()) -> Result:
    more = [part for text in settings for part in ("--set", text)]
    return CliRunner().invoke(cli.app, ["evaluate", config, *more, "--output", str(folder), *options])


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("evaluate-text")
    return run(TINY, folder, *SMALL, "targets.policy={max_kl: 0.01, min_top1: 0.9}"), folder


@pytest.fixture(scope="module")
def video_config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("evaluate-video")
    save_text_to_video(folder / "pipeline")
    model = {
        "path": "./pipeline", "device": "cpu", "prompt_table": "table.safetensors", "latents_are_pixels": True
    }  # fmt: skip
    size = {"height": 144, "width": 128, "num_frames": 17, "steps": 3}
    task = {"kind": "video", "prompts": ["run", "walk"], **size}
    rules = [{"steps": {"first": 1}, "recipe": "exact", "reason": "the first step"}]
    policy = {"recipe": "qk_int8_pv_fp8", "quantize_fp32": True, "rules": rules}
    config = {"version": 1, "model": model, "task": task, "policy": policy, "compare": ["qk_int4_pv_fp8", "exact"]}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return str(folder / "run.yaml")


@pytest.fixture(scope="module")
def video_run(video_config: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("evaluate-video-run")
    return run(video_config, folder, "targets.exact={min_psnr: 90, min_ssim: 0.9}"), folder


def test_a_language_model_gets_every_figure(text_run: tuple[Result, Path]) -> None:
    result, folder = text_run
    assert result.exit_code == 0, result.output
    found = read(folder)
    assert found["complete"] and found["parts"] == TEXT_PARTS and found["passed"]
    policy, int4 = found["rows"]
    assert 0 < policy["metrics"]["kl"] < 0.01 < int4["metrics"]["kl"]
    assert policy["metrics"]["ppl_exact"] == pytest.approx(found["unpatched"]["metrics"]["ppl"])
    assert policy["unavailable"] == {"peak_memory": "only CUDA keeps a peak that a run can set back"}
    for row in (policy, int4):
        assert 0 < row["attention_seconds"] < row["seconds"] and row["baseline_seconds"] > 0
    assert found["environment"]["packages"]["torch"] == metadata.version("torch") and len(found["model"]["hash"]) > 16
    assert found["command"].startswith("sage-patch")


def test_the_needle_figures_stand_beside_the_unpatched_models(text_run: tuple[Result, Path]) -> None:
    exact, policy, int4 = read(text_run[1])["needle"]
    assert [(c["length"], c["depth"]) for c in exact["cells"]] == [(192, 0), (192, 1)]
    assert exact["agreement"] == 1 and exact["mrr"] == exact["mrr_exact"] == policy["mrr_exact"]
    assert int4["log_likelihood"] != policy["log_likelihood"] != exact["log_likelihood"]
    assert {c["recipe"] for c in policy["calls"]} == {"qk_int8_pv_fp8"}
    assert "The unpatched model finds none itself" in text_run[0].stdout


def test_the_worst_site_is_the_one_with_the_largest_error_of_its_own(text_run: tuple[Result, Path]) -> None:
    found = read(text_run[1])
    errors = {row["site"]: row["rel_l1"] for row in found["sites"]}
    assert len(errors) == 8 and all(0 < e < 0.1 for e in errors.values())
    assert found["worst_site"] == max(errors, key=lambda site: errors[site])
    assert f"Worst site: {found['worst_site']}, rel L1" in text_run[0].stdout


def test_the_tables_are_the_same_from_the_file(text_run: tuple[Result, Path], video_run: tuple[Result, Path]) -> None:
    """Quality and speed in one row; and whoever has results.json alone can draw them."""
    for result, folder in (text_run, video_run):
        tables = results_tables(read(folder))
        assert "\n".join(t.markdown(aligned=True) for t in tables).strip() == result.stdout.strip()
        assert "\n".join(t.markdown() for t in tables).strip() in (folder / "results.md").read_text()
    figures = "| mean KL | top-1 | ppl | ppl change | ΔNLL | 2 s.e. | logit L1 | greedy | site L1 |"
    assert f"{figures} attention, s | gain | all, s | gain |" in (text_run[1] / "results.md").read_text()
    assert "greedy tests nothing here" in text_run[0].stdout  # the prompt is short


def test_clips_get_every_figure(video_run: tuple[Result, Path]) -> None:
    result, folder = video_run
    assert result.exit_code == 0, result.output
    found = read(folder)
    policy, int4, exact = found["rows"]
    assert int4["metrics"]["psnr"] < policy["metrics"]["psnr"]
    assert exact["metrics"]["psnr"] is None and exact["metrics"]["ssim"] == 1  # infinite: equal
    assert 0 == exact["metrics"]["temporal_error"] < policy["metrics"]["temporal_error"]
    assert policy["metrics"]["temporal_error"] < int4["metrics"]["temporal_error"]
    assert [(len(e["frames"]["psnr"]), len(e["frames"]["ssim"])) for e in policy["each"]] == [(5, 5)] * 2  # every frame
    assert policy["unavailable"] == {
        "ms_ssim": "needs 176 pixels a side, and there are 16",
        "worst_ms_ssim": "needs 176 pixels a side, and there are 16",
        "lpips": "no local weights: evaluate.lpips is not set",
        "clip_score": "no local weights: evaluate.clip is not set",
        "fid": "no local weights: evaluate.fid is not set",
        "peak_memory": "only CUDA keeps a peak that a run can set back",
    }
    assert [t["met"] for t in found["targets"]] == [True, True]
    assert "LPIPS is unavailable: no local weights" in result.stdout


def test_the_sites_of_a_pipeline_are_scored_at_the_recipe_of_their_step(video_run: tuple[Result, Path]) -> None:
    """6 calls a clip, of which the first, fourth and last are looked at: at steps 0 (exact by rule), 1 and 2."""
    found = read(video_run[1])
    rows = {row["site"]: row for row in found["sites"]}
    own = rows["transformer.blocks.0.attn1"]
    assert [(c["step"], c["recipe"]) for c in own["calls"]] == [(1, "qk_int8_pv_fp8"), (2, "qk_int8_pv_fp8")]
    assert rows["transformer.blocks.0.attn2"] == {
        "site": "transformer.blocks.0.attn2", "step": None, "recipe": "exact", "calls": []
    }  # fmt: skip


class Stop(KeyboardInterrupt):
    """Ctrl-C at a chosen place."""


def test_an_interrupted_run_continues_after_its_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the middle of the needle test; nothing measured before is measured again."""
    measured: list[str] = []
    original, asked = TextJudge.measure, needle.ask

    def measure(self: TextJudge, name: str, *rest: Any) -> Any:
        measured.append(name)
        return original(self, name, *rest)

    def stop(*arguments: Any) -> Any:
        raise Stop

    monkeypatch.setattr(TextJudge, "measure", measure)
    monkeypatch.setattr(needle, "ask", stop)
    result = run(TINY, tmp_path, *SMALL)
    assert result.exit_code == 130
    assert "interrupted; finished parts are in results.json, and the same command continues" in result.stderr
    half = read(tmp_path)
    assert half["parts"] == TEXT_PARTS[:2] and not half["complete"]

    monkeypatch.setattr(needle, "ask", asked)
    result = run(TINY, tmp_path, *SMALL)
    assert result.exit_code == 0, result.output
    assert "holds 2 finished parts of this run (quality of policy, quality of qk_int4_pv_fp8): continuing" in (
        result.stderr
    )
    whole = read(tmp_path)
    assert whole["parts"] == TEXT_PARTS and whole["complete"] and whole["resumed"] == 1
    assert whole["rows"] == half["rows"] and measured == ["policy", "qk_int4_pv_fp8"]

    again = run(TINY, tmp_path, *SMALL, "targets.policy.max_kl=0.00001")
    assert again.exit_code == 1 and "is complete: nothing is measured again" in again.stderr
    assert "1 of 1 targets missed" in again.stderr  # a new bound needs no new measurement
    assert measured == ["policy", "qk_int4_pv_fp8"] and read(tmp_path)["rows"] == whole["rows"]


def test_results_of_another_configuration_are_kept_beside(tmp_path: Path) -> None:
    path, kept = tmp_path / "results.json", tmp_path / "results.previous.json"
    first = Checkpoint(path, {"configuration": {"seed": 0}, "model": "a"})
    first.write({"parts": ["one"], "one": 1})
    assert Checkpoint(path, {"configuration": {"seed": 0}, "model": "a"}).found["one"] == 1
    other = Checkpoint(path, {"configuration": {"seed": 1}, "model": "a"})
    assert other.note.endswith("is kept as results.previous.json: it is of another configuration; starting anew")
    assert other.found == {} and json.loads(kept.read_text())["one"] == 1
    other.write({})
    fresh = Checkpoint(path, {"configuration": {"seed": 1}, "model": "a"}, fresh=True)
    assert fresh.found == {} and "asked to start anew" in fresh.note
    path.write_text('{"kind": "text"}')
    assert "it is of another command" in Checkpoint(path, {"model": "a"}).note
    path.write_text("no json")
    with pytest.raises(CheckpointError, match="is not JSON; move it away, or choose another folder with --output"):
        Checkpoint(path, {"model": "a"})


def test_a_full_disk_loses_no_part_that_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full from the second part on; with room again the same command goes on."""
    original, writes = tables.os.fdopen, []

    def full(*arguments: Any, **keywords: Any) -> Any:
        writes.append(1)
        if len(writes) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments, **keywords)

    monkeypatch.setattr(tables.os, "fdopen", full)
    result = run(TINY, tmp_path, *SMALL, "evaluate.needle_lengths=[]")
    assert result.exit_code == 2
    assert "the disk is full" in result.stderr and "the file of before is whole, with 1 finished parts" in result.stderr
    assert read(tmp_path)["parts"] == ["quality of policy"]
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]  # no half-written file beside it
    result = run(TINY, tmp_path, *SMALL, "evaluate.needle_lengths=[]")
    assert result.exit_code == 0 and read(tmp_path)["resumed"] == 1


def test_a_model_without_sites_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

    monkeypatch.setattr("sage_patch.evaluation.judge.load_text_model", lambda spec: (Plain(), None))
    result = run(TINY, tmp_path, *SMALL)
    assert result.exit_code == 2 and not list(tmp_path.iterdir())
    assert "error: Plain has no attention site that sage_patch knows; nothing to patch" in result.stderr


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("evaluate.needle_lengths=[20]", "evaluate.needle_lengths has 20, and fact and question alone take "),
        ("evaluate.needle_lengths=[999999]", "evaluate.needle_lengths has 999999, and the model reads at most "),
        ("evaluate.needle_depths=[2]", "evaluate.needle_depths.0: must be at most 1.0; got 2"),
        ("evaluate.lpip=x", 'unknown key "lpip"; nearest: "lpips"'),
        ("evaluate.fid=none.pt", "evaluate.fid: no such file or folder: "),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_message(setting: str, message: str, tmp_path: Path) -> None:
    result = run(TINY, tmp_path, *SMALL, setting)
    assert result.exit_code == 2 and message in result.stderr, result.stderr


class NoModel(Judge):
    """A judge of what was measured elsewhere."""

    device = facts = baseline = measure_all = run_exact = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self._cost = Cost(seconds=[1.0], attention=[0.5])


def test_a_figure_that_is_not_a_number_is_unavailable_and_meets_no_target() -> None:
    config = load_run_config(TINY, ["targets.policy={max_kl: 1, min_top1: 0.1, max_ppl_change: 0.1}"])
    measured = {"kl": float("nan"), "top1": 0.5, "ppl_change": -0.2}
    cost = Cost(seconds=[2.0], attention=[1.0])
    found = NoModel()._measured("policy", config.policy.build(), cost, measured, {}, calls=[])
    assert found.unavailable["kl"] == "not a number: the patched model's output is not finite" and found.slowdown == 2
    checked = {t["what"]: t["met"] for t in evaluate.check_targets(config, [found.row()])["targets"]}
    assert checked == {"mean KL <=": False, "top-1 agreement >=": True, "perplexity change <=": False}


def test_a_needle_lies_where_it_should() -> None:
    _, tokenizer = load_text_model(ModelSpec(path=str(ROOT / "tests/assets/lm-tiny-d128"), device="cpu"))
    text = (ROOT / "tests/assets/heldout.txt").read_text()
    made = needle.needles(tokenizer, text, [200, 300], [0.0, 0.5, 1.0], seed=1, longest=300)
    assert [n.tokens.shape[1] for n in made] == [200] * 3 + [300] * 3
    for n in made:
        written = tokenizer.decode(n.tokens[0])
        number = tokenizer.decode(n.tokens[0, -n.answer :]).strip()
        assert len(number) == 6 and number.isdigit()
        assert written.count(number) == 2 and written.endswith(f"The secret number is {number}")
        before, behind = written.index("\n\nThe secret number is"), written.index("\n\nWhat is the secret number?")
        around = behind - (written.index("asked for.\n\n") + len("asked for.\n\n"))
        assert abs(before / (before + around) - n.depth) < 0.1
    assert needle.needles(tokenizer, text, [200], [0.5], seed=1, longest=None)[0].tokens.tolist() != (
        needle.needles(tokenizer, text, [200], [0.5], seed=2, longest=None)[0].tokens.tolist()
    )
    lengths = {n.length for n in needle.needles(tokenizer, text, None, [0.5], seed=1, longest=600)}
    assert lengths == {256, 512}


class Speaker(nn.Module):
    """Says after every token what `say` gives for the tokens read so far; the rest of the vocabulary in order."""

    def __init__(self, say: Callable[[list[int], int], int]):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._say = say

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        tokens = input_ids[0].tolist()
        logits = torch.arange(50.0, 0, -1).repeat(len(tokens), 1)
        for i in range(len(tokens)):
            logits[i, self._say(tokens, i)] = 100
        return type("Out", (), {"logits": logits[None]})


def test_the_needle_figures_of_models_that_find_it_and_that_do_not() -> None:
    made = needle.Needle(5, 0.5, torch.tensor([[9, 8, 7, 3, 1]]), answer=2)
    finder = needle.ask(Speaker(lambda tokens, i: tokens[min(i + 1, 4)]), [made])
    assert finder[0].right and finder[0].mrr == 1 and finder[0].top == (3, 1)
    assert finder[0].log_likelihood == pytest.approx(0, abs=1e-6)
    # It always says 0: the right tokens 3 and 1 come fourth and second.
    other = needle.ask(Speaker(lambda tokens, i: 0), [made])
    assert not other[0].right and other[0].mrr == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert needle.summary(other, finder)["agreement"] == 0
    half = [replace(other[0], top=(3, 0))]
    found = needle.summary(half, finder)
    assert (found["agreement"], found["right"], found["right_exact"]) == (0.5, 0, 1)


class Distance(nn.Module):
    """Stands for LPIPS: the mean absolute difference."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (a - b).abs().mean((1, 2, 3))


class Features(nn.Module):
    """Stands for FID's network: the mean of two colours."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float().mean((2, 3))[:, :2]


def test_scores_with_local_weights(tmp_path: Path) -> None:
    """LPIPS and FID from TorchScript files; FID against the closed form for features without covariance."""
    x = torch.rand(2, 3, 8, 8)
    torch.jit.trace(Distance(), (x, x)).save(str(tmp_path / "lpips.pt"))
    torch.jit.trace(Features(), x.byte()).save(str(tmp_path / "fid.pt"))
    spec = EvaluateSpec(lpips=str(tmp_path / "lpips.pt"), fid=str(tmp_path / "fid.pt"))
    scores = picture_metrics.PictureScores(spec, None, torch.device("cpu"))
    exact = [torch.full((3, 3, 8, 8), 0.25), torch.full((1, 3, 8, 8), 0.5)]
    actual = [exact[0] + 0.1, exact[1] + 0.2]
    figures, reasons = scores.compare(actual, exact)
    assert figures["lpips"] == pytest.approx(2 * (3 * 0.1 + 0.2) / 4) and figures["worst_lpips"] == pytest.approx(0.4)
    bytes_, other = ([round(255 * v) for v in values] for values in ((0.25,) * 3 + (0.5,), (0.35,) * 3 + (0.7,)))
    mean = sum(other) / 4 - sum(bytes_) / 4
    spread = torch.tensor(other).float().std() - torch.tensor(bytes_).float().std()
    assert figures["fid"] == pytest.approx(2 * mean**2 + 2 * float(spread) ** 2, rel=1e-3)  # two equal features
    assert set(reasons) == {"clip_score"}
    few, why = scores.compare([exact[1]], [exact[1]])
    assert "fid" not in few and why["fid"] == "its 2 features need more frames than that, and there are 1"
    (tmp_path / "broken.pt").write_text("nothing")
    with pytest.raises(ModelError, match="is not a TorchScript file"):
        picture_metrics.PictureScores(EvaluateSpec(fid=str(tmp_path / "broken.pt")), None, torch.device("cpu"))


def test_clip_scores_come_from_a_local_folder(tmp_path: Path) -> None:
    """A tiny random CLIP: the score is 100 x cosine of its two projections, computed here from the parts."""
    from diffusers import StableDiffusionPipeline
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor

    tokenizer = StableDiffusionPipeline.from_pretrained(save_text_to_image(tmp_path / "pipeline")).tokenizer
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = sizes | {"vocab_size": len(tokenizer), "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
    vision = sizes | {"image_size": 32, "patch_size": 16}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).eval()
    model.save_pretrained(tmp_path / "clip")
    square = {"height": 32, "width": 32}
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=square)
    CLIPProcessor(images, tokenizer).save_pretrained(tmp_path / "clip")
    spec = EvaluateSpec(clip=str(tmp_path / "clip"))
    frames = [torch.rand(2, 3, 32, 32), torch.rand(1, 3, 32, 32)]
    scores = picture_metrics.PictureScores(spec, ["a red cat", "a dog"], torch.device("cpu"))
    figures, _ = scores.compare(frames, frames)
    assert -100 <= figures["clip_score"] == figures["clip_score_exact"] <= 100 and figures["clip_score"] != 0
    from_table, why = picture_metrics.PictureScores(spec, None, torch.device("cpu")).compare(frames, frames)
    assert "clip_score" not in from_table and why["clip_score"] == "the prompts are rows of a table, not text"


def test_unknown_files_are_found_when_the_configuration_is_read() -> None:
    with pytest.raises(ConfigError, match="evaluate.clip"):
        load_run_config(TINY, ["evaluate.clip=./nowhere"])
