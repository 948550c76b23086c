"""`sage-patch run` on pipelines: tiny random ones through the whole command, and the shipped trained ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

from sage_patch import cli
from sage_patch.config import ConfigError, load_run_config
from sage_patch.evaluation import judge, media, picture_metrics
from sage_patch.evaluation.drawing import Drawer
from sage_patch.evaluation.evaluate import check_targets
from sage_patch.evaluation.models import ModelError, load_pipeline
from sage_patch.evaluation.run import run
from sage_patch.schema import ModelSpec, PictureTask
from tiny_pipelines import save_class_to_image, save_text_to_image, save_text_to_video

ROOT = Path(__file__).parent.parent


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def write_config(folder: Path, name: str, model: dict[str, Any], task: dict[str, Any]) -> str:
    policy = {"recipe": "qk_int8_pv_fp8", "quantize_fp32": True}
    config = {"version": 1, "model": {"device": "cpu", **model}, "policy": policy, "task": task}
    (folder / name).write_text(yaml.safe_dump(config))
    return str(folder / name)


@pytest.fixture(scope="module")
def image_config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("image")
    save_text_to_image(folder / "pipeline")
    task = {"kind": "image", "prompts": ["a red cat", "a dog"], "steps": 3, "guidance_scale": 3.0}
    return write_config(folder, "run.yaml", {"path": "./pipeline"}, task)


@pytest.fixture(scope="module")
def video_config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("video")
    save_text_to_video(folder / "pipeline")
    model = {"path": "./pipeline", "prompt_table": "table.safetensors", "latents_are_pixels": True}
    size = {"height": 144, "width": 128, "num_frames": 17}
    return write_config(folder, "run.yaml", model, {"kind": "video", "prompts": ["run", 0], "steps": 2, **size})


@pytest.fixture(scope="module")
def image_run(image_config: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("image-run")
    more = ["--set", "compare=[exact, 'qk_int4_pv_fp8:smooth=none']", "--set", "task.seeds=[3, 4]"]
    return invoke("run", image_config, *more, "--set", "targets.policy.min_psnr=5", "--output", str(folder)), folder


@pytest.fixture(scope="module")
def video_run(video_config: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("video-run")
    return invoke("run", video_config, "--set", "compare=[qk_int4_pv_fp8]", "--output", str(folder)), folder


def test_an_image_run_writes_every_picture_and_every_figure(image_run: tuple[Result, Path]) -> None:
    result, folder = image_run
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "results.json").read_text())
    assert [(p["prompt"], p["seed"]) for p in found["pictures"]] == [
        ("a red cat", 3), ("a red cat", 4), ("a dog", 3), ("a dog", 4)
    ]  # fmt: skip
    policy, exact, int4 = (row["metrics"] for row in found["rows"])
    assert exact["psnr"] is None and exact["ssim"] == 1  # infinite: the unpatched pictures, bit for bit
    assert int4["worst_psnr"] < policy["worst_psnr"] <= policy["psnr"] < 100
    assert found["unpatched"]["seconds_per_step"] > 0 and found["passed"]
    reasons = found["rows"][0]["unavailable"]
    assert "ms_ssim" not in policy and reasons["ms_ssim"] == "needs 176 pixels a side, and there are 32"
    assert "only CUDA" in reasons["peak_memory"] and found["rows"][0]["peak_memory"] is None
    assert found["model"]["denoisers"] == {"unet": "UNet2DConditionModel"}
    names = {p.name for p in folder.iterdir()}
    assert {"sheet.png", "results.json", "results.md", "qk_int4_pv_fp8_smooth_none_03.png"} < names
    assert len([n for n in names if n.endswith(".png")]) == 4 * 4 + 1


def test_every_call_of_an_image_run_is_counted(image_run: tuple[Result, Path]) -> None:
    """4 pictures x 3 steps; self-attention has 256 tokens (64 in the middle), cross-attention 16 keys."""
    found = json.loads((image_run[1] / "results.json").read_text())
    policy = found["rows"][0]["calls"]
    calls = {(c["site"].rsplit(".", 1)[1], "mid" in c["site"], c["recipe"], c["reason"], c["calls"]) for c in policy}
    assert calls == {("attn1", False, "qk_int8_pv_fp8", "", 12), ("attn1", True, "exact", "short_kv", 12)} | {
        ("attn2", mid, "exact", "short_kv", 12) for mid in (False, True)
    }


def test_the_tables_of_an_image_run_say_it_plainly(image_run: tuple[Result, Path]) -> None:
    result, folder = image_run
    kept = (folder / "results.md").read_text()
    printed, unpadded = (re.sub(r"[ -]+", " ", text).strip() for text in (result.stdout, kept))
    assert printed in unpadded
    assert "| exact | inf | inf | 1.0000 | 1.0000 |" in kept
    assert "4 pictures of 32 x 32 px, steps: 3" in result.stdout and "slower than the unpatched model" in result.stdout
    assert "MS-SSIM is unavailable" in result.stdout and "Peak memory is unavailable" in result.stdout
    assert "sheet.png" in result.stderr


def test_a_video_run_writes_clips_that_play(video_run: tuple[Result, Path]) -> None:
    import av

    result, folder = video_run
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "results.json").read_text())
    assert [(p["prompt"], p["frames"], p["size"]) for p in found["pictures"]] == [
        ("run", 5, [18, 16]),
        (0, 5, [18, 16]),
    ]
    policy, int4 = (row["metrics"] for row in found["rows"])
    assert int4["psnr"] < policy["psnr"]
    assert {p.name for p in folder.glob("*.mp4")} == {
        f"{v}_{i:02d}.mp4" for v in ("unpatched", "policy", "qk_int4_pv_fp8") for i in (0, 1)
    }
    with av.open(str(folder / "policy_01.mp4")) as clip:
        frames = [f for f in clip.decode(video=0)]
        assert (len(frames), frames[0].height, frames[0].width) == (5, 18, 16)
        assert clip.streams.video[0].average_rate == 8


def test_plans_of_pipelines_need_no_weights(image_config: str, video_config: str) -> None:
    rule = 'policy.rules=[{match: "*.attn1", recipe: exact, reason: kept exact}]'
    for config, site in ((image_config, "unet.down_blocks.0"), (video_config, "transformer.blocks.{0-1}.attn1")):
        with_weights, without = invoke("plan", config, "--set", rule), invoke("plan", config, "--meta", "--set", rule)
        assert without.exit_code == 0, without.output
        assert with_weights.stdout == without.stdout
        assert site in without.stdout and "kept exact" in without.stdout


def test_a_missed_target_fails_the_run(video_config: str, tmp_path: Path) -> None:
    targets = ["--set", "targets.policy={min_psnr: 200, min_ssim: 0.01}"]
    result = invoke("run", video_config, "--set", "task.prompts=[run]", *targets, "--output", str(tmp_path))
    assert result.exit_code == 1
    assert "1 of 2 targets missed" in result.stderr and "MISSED" in result.stdout
    assert json.loads((tmp_path / "results.json").read_text())["passed"] is False


def test_a_figure_that_is_unavailable_meets_no_target(video_config: str) -> None:
    config = load_run_config(video_config, ["targets.policy={min_psnr: 1, min_ssim: 0.1}"])
    rows = [{"name": "policy", "metrics": {"worst_psnr": float("nan")}, "unavailable": {"worst_ssim": "small"}}]
    assert [t["met"] for t in check_targets(config, rows)["targets"]] == [False, False]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.prompts=[rum]"], "task.prompts: 'rum' is not in table.safetensors; nearest: \"run\"; it has walk, run"),
        (["task.prompts=[2]"], "task.prompts: table.safetensors has the prompts 0 to 1; got 2"),
        (["task.negative_prompt=ugly"], "task.negative_prompt is text, and this model takes its prompts from"),
        (["model.prompt_table=none.safetensors"], "model.prompt_table: no such file: "),
        (["model.prompt_table=null"], "task.prompts: 0 is a number, and there is no model.prompt_table"),
        (["task.arguments={true_cfg_scal: 2}"], "task.arguments.true_cfg_scal: WanPipeline has no argument"),
        (["task.arguments={generator: 2}"], "task.arguments.generator: is set by the run itself"),
        (["model.meta=true"], "measuring needs weights"),
        (["policy.rules=[{match: no, recipe: exact}]"], 'rule 1 ("no") matched no site'),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_pipeline_is_one_message(
    video_config: str, overrides: list[str], message: str, tmp_path: Path
) -> None:
    more = [part for text in overrides for part in ("--set", text)]
    result = invoke("run", video_config, *more, "--output", str(tmp_path))
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert message in result.stderr and "Traceback" not in result.output


def test_a_language_model_is_not_a_pipeline() -> None:
    with pytest.raises(ModelError, match="has no model_index.json; a language model runs under task.kind: text"):
        load_pipeline(ModelSpec(path=str(ROOT / "tests" / "assets" / "lm-tiny-d128"), device="cpu"))


@pytest.mark.parametrize(
    ("library", "find", "message"),
    [
        ("av", media.missing_writer, "writing clips needs PyAV: pip install 'sage-patch[media]'"),
        ("torchmetrics", picture_metrics.missing_library, "measuring pictures needs torchmetrics: pip install"),
    ],
)
def test_a_missing_library_is_found_before_the_work(
    library: str, find: Any, message: str, video_config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = media.importlib.util.find_spec
    monkeypatch.setattr(media.importlib.util, "find_spec", lambda name: None if name == library else real(name))
    monkeypatch.setattr(judge, "load_pipeline", lambda spec: pytest.fail("the pipeline was loaded first"))
    assert message in find()
    result = invoke("run", video_config, "--output", str(tmp_path))
    assert result.exit_code == 2 and message in result.stderr


def test_ctrl_c_leaves_no_file(video_config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(picture_metrics, "compare", interrupt)
    result = invoke("run", video_config, "--output", str(tmp_path))
    assert (result.exit_code, list(tmp_path.iterdir())) == (130, [])


def test_a_seed_is_a_picture(image_config: str) -> None:
    """The comparison is worth nothing if the noise differs between two runs, or is the same for two seeds."""
    config = load_run_config(image_config)
    assert isinstance(config.task, PictureTask)
    drawer = Drawer(load_pipeline(config.model), config.model, config.task)
    steps: list[int] = []
    first, again, other = (drawer.draw("a dog", seed, steps.append).frames for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert steps == [1, 2, 3] * 3
    assert 0 <= float(first.min()) < float(first.max()) <= 1


def test_a_pipeline_of_class_labels_runs_and_says_what_it_cannot_tell(tmp_path: Path) -> None:
    save_class_to_image(tmp_path / "pipeline")
    task = {"kind": "image", "prompts": [0, 2], "steps": 1}
    config = write_config(tmp_path, "run.yaml", {"path": "./pipeline", "prompt_table": "table.safetensors"}, task)
    results, gallery = run(load_run_config(config), "test", lambda *_: None)
    assert gallery is not None
    first, second = (frames[0] for frames in gallery.drawn["unpatched"])
    assert first.shape == (3, 16, 16) and torch.equal(first[0], first[2]) and not torch.equal(first, second)
    assert results["unpatched"]["seconds_per_step"] is None and results["rows"][0]["slowdown"] > 0
    assert {c["recipe"] for c in results["rows"][0]["calls"]} == {"qk_int8_pv_fp8"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: image, prompts: [cat]", "task.steps: is missing"),
        ("kind: image, prompts: [], steps: 1", "task.prompts: must not be empty"),
        ("kind: image, prompts: [cat, 1.5], steps: 1",
         "task.prompts.1: must be text, or a number in the model's prompt table; got 1.5"),
        ("kind: image, prompts: [cat], steps: 1, heigth: 8",
         'task.heigth: unknown key "heigth"; nearest: "height", "width"'),
        ("kind: image, prompts: [cat], steps: 1, fps: 8", "task: num_frames and fps are for kind: video"),
        ("kind: audio, prompts: [cat]", "task.kind: must be one of text, image, video; got 'audio'"),
        ("prompts: [cat]", "task.kind: is missing"),
    ],
)  # fmt: skip
def test_errors_of_picture_tasks_name_their_key(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"version: 1\nmodel: {{path: org/name}}\ntask: {{{text}}}\n")
    with pytest.raises(ConfigError) as caught:
        load_run_config(tmp_path / "c.yaml")
    assert str(caught.value) == f"{tmp_path}/c.yaml: {message} (line 3)"


def test_keys_of_the_other_kind_are_refused(tmp_path: Path) -> None:
    lines = (
        "version: 1", "model: {package: p, gguf: f}", "task: {kind: image, prompts: [cat], steps: 1}",
        "targets: {policy: {max_kl: 1}}",
    )  # fmt: skip
    (tmp_path / "c.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        load_run_config(tmp_path / "c.yaml")
    message = str(caught.value)
    assert "model.package: is for text tasks; name a diffusers pipeline by model.path (line 2)" in message
    assert "targets.policy.max_kl: is not a figure of image tasks; theirs are min_psnr, min_ssim (line 4)" in message
    with pytest.raises(ConfigError, match="model.prompt_table: is for image and video tasks"):
        load_run_config(ROOT / "configs" / "tiny.yaml", ["model.prompt_table=x"])


def test_psnr_of_known_noise_is_the_formula() -> None:
    """+-0.01 everywhere is a mean square of 1e-4, so 40 dB; a fifth frame that differs by 0.1 has 20 dB."""
    exact = torch.full((5, 3, 32, 32), 0.5)
    actual = exact + 0.01 * torch.sign(torch.randn(exact.shape, generator=torch.Generator().manual_seed(0)))
    actual[4] = 0.6
    found = picture_metrics.compare(actual, exact)
    assert found.frames["psnr"] == pytest.approx([40, 40, 40, 40, 20], abs=1e-3)
    assert found.unavailable["ms_ssim"] == "needs 176 pixels a side, and there are 32"
    totals, reasons = picture_metrics.summary([found])
    assert set(reasons) == {"ms_ssim", "worst_ms_ssim"} and "ms_ssim" not in totals
    assert (totals["psnr"], totals["worst_psnr"]) == pytest.approx((36, 20), abs=1e-3)
    with pytest.raises(ValueError, match="must be"):
        picture_metrics.compare(actual[:1], exact)


def test_equal_pictures_have_an_infinite_psnr_and_unit_ssim() -> None:
    picture = torch.rand(1, 3, 176, 180, generator=torch.Generator().manual_seed(0))
    found = picture_metrics.compare(picture, picture.clone())
    assert (found.frames["psnr"], found.frames["ssim"]) == ([float("inf")], [1.0])
    assert found.frames["ms_ssim"] == pytest.approx([1.0])
    assert picture_metrics.compare(picture[..., :8, :8], picture[..., :8, :8]).unavailable["ssim"] == (
        "needs 11 pixels a side, and there are 8"
    )


def test_ssim_of_flat_pictures_is_the_formula() -> None:
    """Without variance SSIM is (2 m n + c) / (m^2 + n^2 + c) with c = 0.01^2."""
    a, b = torch.full((1, 3, 16, 16), 0.5), torch.full((1, 3, 16, 16), 0.7)
    expected = (2 * 0.5 * 0.7 + 1e-4) / (0.5**2 + 0.7**2 + 1e-4)
    assert picture_metrics.compare(b, a).frames["ssim"] == pytest.approx([expected], abs=1e-6)


def test_the_sheet_shows_differences_brightened_and_pixels_square() -> None:
    exact, other = torch.zeros(1, 3, 16, 32), torch.full((1, 3, 16, 32), 0.1)
    gallery = media.Gallery(["a picture"], {"unpatched": [exact], "policy": [other]}, None)
    image = media.sheet(gallery)
    cells = [image.getpixel((120 + column * 132 + 5, 36 + 5)) for column in range(3)]
    assert cells == [(0, 0, 0), (26, 26, 26), (204, 204, 204)]
    assert image.size == (120 + 3 * 132, 36 + 68)
    large = media.Gallery(["a"], {"unpatched": [torch.zeros(1, 3, 1024, 512)]}, None)
    assert media.sheet(large).size == (120 + 132, 36 + 260)


@pytest.mark.parametrize(
    ("config", "overrides", "psnr", "top", "bottom"),
    [
        ("quickstart_image.yaml", ["task.prompts=[emoji]", "task.steps=4"], 38, (0.91, 0.75, 0.73), (1, 1, 1)),
        ("quickstart_video.yaml", ["task.prompts=[defend_the_center]", "task.steps=4", "task.num_frames=13"],
         50, (0.45, 0.35, 0.28), (0.40, 0.40, 0.40)),
    ],
)  # fmt: skip
def test_the_shipped_pipelines_draw_what_they_learned(
    config: str, overrides: list[str], psnr: float, top: tuple[float, ...], bottom: tuple[float, ...]
) -> None:
    """An emoji on white, and a brown wall above a grey floor: a wrong scale or a lost weight leaves grey noise.

    psnr: seven below what was measured; INT4 in place of INT8 loses more.
    """
    loaded = load_run_config(ROOT / "configs" / config, [*overrides, "compare=[]", "targets={}"])
    results, gallery = run(loaded, "test", lambda *_: None)
    assert gallery is not None
    frames = gallery.drawn["unpatched"][0]
    assert frames[:, :, :20].mean((0, 2, 3)).tolist() == pytest.approx(top, abs=0.05)
    assert frames[:, :, -10:].mean((0, 2, 3)).tolist() == pytest.approx(bottom, abs=0.05)
    assert results["rows"][0]["metrics"]["psnr"] > psnr
