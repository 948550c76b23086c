"""What a run file says of a model for real cards: offload, device maps, callbacks, and what does not fit.

Everything that a CPU can do is done here with tiny models; of the rest the calls into the libraries are asserted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sage_patch
from loading import BITS, IDS, ROOT, TASK, FakePipeline, drawn, recorded, spec_of, written
from sage_patch.config import ConfigError, load_run_config
from sage_patch.errors import ModelError
from sage_patch.evaluation import models
from sage_patch.evaluation.drawing import Drawer
from sage_patch.evaluation.models import load_pipeline, load_text_model
from sage_patch.evaluation.run import run
from sage_patch.kernels import ops
from sage_patch.patch import device_of
from sage_patch.schema import ModelSpec, PictureTask
from tiny import EVERYTHING, text_model

pytest_plugins = ["loading"]

# --- the file


@pytest.mark.parametrize(
    ("kind", "model", "message"),
    [
        ("text", {"offload": "model"}, "model.offload: is for image and video tasks; a language model larger than the"),
        ("text", {"vae_tiling": True}, "model.vae_tiling: is for image and video tasks"),
        ("text", {"device_map": "nearest"}, "model.device_map: of text tasks is one of auto, balanced, "),
        ("video", {"device_map": "auto"}, "model.device_map: of video tasks is one of balanced; got 'auto'"),
        ("video", {"device_map": {"vae": 0}}, "model.device_map: of video tasks is balanced, a mapping is for"),
        ("text", {"device_map": {"model": 1.5}}, "model.device_map: must be a name, or a mapping of modules to dev"),
        ("video", {"device_map": "balanced", "offload": "group"}, "model: device_map says where the weights are"),
        ("text", {"device_map": "auto", "device": "cuda"}, "model: device_map says where the weights are: leave out"),
        ("text", {"max_memory": {0: "20GiB"}}, "model: max_memory is for a device_map"),
        ("video", {"offload": "disk"}, "model.offload: must be one of model, group, sequential; got 'disk'"),
        ("video", {"ofload": "model"}, 'model.ofload: unknown key "ofload"; nearest: "offload"'),
        ("video", {"quantize": {"library": "torchao", "type": "nf4"}}, "torchao needs type, one of int8, int4, float8"),
        ("video", {"quantize": {"library": "bitsandbytes"}}, "bitsandbytes needs type, one of nf4, fp4, int8"),
        ("video", {"quantize": {"library": "gguf", "type": "int8"}}, "gguf needs files .* and takes no type"),
        ("video", {"quantize": {"library": "hqq"}}, "model.quantize.library: must be one of bitsandbytes, torchao, g"),
        (
            "text",
            {"quantize": {"library": "gguf", "files": {"a": "o/n/f.gguf"}}},
            "library: gguf is for image and video tasks; a language model's GGUF file is model.package and model.gguf",
        ),
        (
            "text",
            {"quantize": {"library": "torchao", "type": "int8", "components": ["x"]}},
            "model.quantize.components: is for image and video tasks",
        ),
        ("video", {"quantize": {"library": "gguf", "files": {"transformer": "./no.gguf"}}}, "no such file: /.*no.gguf"),
        ("video", {"quantize": {"library": "gguf", "files": {"transformer": "no.gguf"}}}, "no such file: /.*/no.gguf"),
        ("video", {"adapters": [{"path": "./no"}]}, "model.adapters.0.path: no such folder: /.*/no"),
        ("video", {"adapters": [{"path": "o/n", "scale": "1"}]}, "model.adapters.0.scale: must be a number; got '1'"),
        ("video", {"adapters": [{"path": "o/n", "weight": 1}]}, "model.adapters.0.weight: unknown key"),
        ("text", {"adapters": [{"path": "o/n", "part": "transformer_2"}]}, "model.adapters.0.part: is for image and"),
        ("text", {"adapters": [{"path": "o/n", "weight_name": "x"}]}, "adapters.0.weight_name: is for image and video"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_before_anything_is_loaded(tmp_path, kind, model, message):
    text = {"kind": "text", "prompts": ["a"], "text": str(ROOT / "tests/assets/heldout.txt")}
    with pytest.raises(ConfigError, match=message):
        load_run_config(written(tmp_path, {"path": "some/model", **model}, text if kind == "text" else TASK))


def test_a_package_has_one_file(tmp_path):
    text = {"kind": "text", "prompts": ["a"], "text": str(ROOT / "tests/assets/heldout.txt")}
    with pytest.raises(ConfigError, match="revision, variant and quantize are for a path"):
        load_run_config(written(tmp_path, {"package": "p", "gguf": "x.gguf", "revision": "main"}, text))


def test_paths_of_weights_are_relative_to_the_file_and_hub_ids_stay(tmp_path):
    (tmp_path / "lora").mkdir()
    (tmp_path / "t.gguf").write_bytes(b"")
    model = {
        "path": "owner/name",
        "adapters": [{"path": "lora"}, {"path": "owner/lora", "scale": -0.5}],
        "quantize": {"library": "gguf", "files": {"transformer": "t.gguf", "transformer_2": "owner/name/x/y.gguf"}},
    }
    loaded = load_run_config(written(tmp_path, model)).model
    assert [a.path for a in loaded.adapters] == [str(tmp_path / "lora"), "owner/lora"]
    assert loaded.quantize.files == {"transformer": str(tmp_path / "t.gguf"), "transformer_2": "owner/name/x/y.gguf"}


# --- offload


@pytest.mark.parametrize("offload", ["model", "group"])
def test_a_run_under_offload_is_the_run_without(video, tmp_path, offload):
    """The same pictures and calls, and `exact` beside the policy equals the unpatched pipeline bit for bit."""
    policy = {"recipe": "qk_int8_pv_fp8", "quantize_fp32": True}
    model = {"path": str(video), "device": "cpu", "prompt_table": "table.safetensors", "latents_are_pixels": True}
    results, frames = {}, {}
    for name, more in (("plain", {}), (offload, {"offload": offload})):
        config = load_run_config(written(tmp_path, model | more, policy=policy, compare=["exact"]))
        results[name], gallery = run(config, "test", lambda *_: None)
        assert gallery is not None
        frames[name] = gallery.drawn
    plain, found = results["plain"], results[offload]
    assert found["config"]["model"]["offload"] == offload
    assert found["rows"][1]["metrics"]["ssim"] == 1 and found["rows"][1]["metrics"]["psnr"] in (None, float("inf"))
    for before, after in zip(plain["rows"], found["rows"], strict=True):
        assert before["calls"] == after["calls"] and sum(row["calls"] for row in after["calls"]) == 2 * 2 * 2 * 2
        pairs = zip(frames["plain"][before["name"]], frames[offload][after["name"]], strict=True)
        differ = max(float((a - b).abs().mean()) for a, b in pairs)
        assert differ == 0 if offload == "group" else differ < 1e-3  # moved weights may be summed in another order
    assert found["rows"][0]["metrics"]["psnr"] < 100
    assert found["model"]["device"].startswith("cpu")


def test_offload_that_a_pipeline_refuses_is_said(video, monkeypatch):
    from diffusers import WanPipeline

    monkeypatch.setattr(WanPipeline, "model_cpu_offload_seq", None)
    with pytest.raises(
        ModelError, match="model.offload: WanPipeline cannot be placed by model: .*model_cpu_offload_seq"
    ):
        load_pipeline(spec_of(video, offload="model"))
    with pytest.raises(ModelError, match="model.offload: sequential brings layer after layer to a card, and model.dev"):
        load_pipeline(spec_of(video, offload="sequential"))


@pytest.mark.parametrize(
    ("offload", "call", "arguments"),
    [
        ("model", "enable_model_cpu_offload", {"device": "cuda:1"}),
        ("sequential", "enable_sequential_cpu_offload", {"device": "cuda:1"}),
        (
            "group",
            "enable_group_offload",
            {
                "onload_device": torch.device("cuda:1"),
                "offload_device": torch.device("cpu"),
                "offload_type": "leaf_level",
                "use_stream": True,
            },
        ),
    ],
)
def test_offload_to_a_card_is_asked_of_diffusers_with_the_card_that_computes(offload, call, arguments):
    from sage_patch.evaluation.placement import place

    told: list[Any] = []
    pipeline = SimpleNamespace(**{call: lambda **given: told.append(given)})
    assert place(pipeline, ModelSpec(path="a/b", offload=offload), "cuda:1") is pipeline
    assert told == [arguments]


def test_the_device_that_computes_is_prepared_though_the_weights_rest_elsewhere(monkeypatch):
    """A missing compiler is found by apply(), not by the first picture."""
    prepared: set[torch.device] = set()
    monkeypatch.setattr(ops, "prepare", prepared.add)
    model = text_model()
    model.model.layers[0]._hf_hook = SimpleNamespace(execution_device="meta")
    assert device_of(model) == torch.device("meta") and device_of(text_model()) == torch.device("cpu")
    sage_patch.apply(model).revert()
    assert prepared == {torch.device("cpu"), torch.device("meta")}


def test_tiling_of_an_autoencoder(image, video):
    pipeline = load_pipeline(ModelSpec(path=str(image), device="cpu", vae_tiling=True))
    assert pipeline.vae.use_tiling
    with pytest.raises(ModelError, match="model.vae_tiling: WanPipeline has no autoencoder"):
        load_pipeline(spec_of(video, vae_tiling=True))


# --- device maps


@pytest.mark.parametrize(
    "device_map", ["auto", {"": "cpu"}, {"model.embed_tokens": "cpu", "model": "cpu", "lm_head": "cpu"}]
)
def test_a_language_model_is_spread_and_patched(language, device_map):
    spec = ModelSpec(path=str(language), dtype="float32", device_map=device_map, max_memory={"cpu": "8GiB"})
    model, _ = load_text_model(spec)
    with torch.no_grad():
        expected = text_model()(IDS).logits
        assert torch.equal(model(IDS).logits, expected)
        with sage_patch.applied(model, EVERYTHING) as handle:
            assert not torch.equal(model(IDS).logits, expected)
    assert handle.stats()["quantized"] == handle.stats()["calls"] == 2
    assert device_of(model).type == "cpu"


def test_a_pipeline_is_spread(video, monkeypatch):
    from diffusers import DiffusionPipeline

    told = recorded(monkeypatch, DiffusionPipeline, "from_pretrained", FakePipeline())
    spec = ModelSpec(path=str(video), device_map="balanced", max_memory={0: "20GiB"}, dtype="bfloat16")
    pipeline = load_pipeline(spec)
    absent = dict.fromkeys(("tokenizer", "text_encoder", "vae", "transformer_2"))
    assert told == [
        ((str(video),), {"dtype": torch.bfloat16, "device_map": "balanced", "max_memory": {0: "20GiB"}, **absent})
    ]
    assert pipeline.moved == []


# --- callbacks


def test_callbacks_act_at_the_end_of_the_steps(image):
    from diffusers.callbacks import SDCFGCutoffCallback

    spec = ModelSpec(path=str(image), device="cpu")
    task: dict[str, Any] = {"kind": "image", "prompts": ["a cat"], "steps": 4, "guidance_scale": 5.0}
    cutoff = [{"name": "SDCFGCutoffCallback", "cutoff_step_index": 1}]
    pipeline, ticks = load_pipeline(spec), []
    pictures = [
        Drawer(pipeline, spec, PictureTask(**task, callbacks=more)).draw("a cat", 0, ticks.append).frames
        for more in ([], cutoff, [])
    ]
    expected = pipeline(
        "a cat", num_inference_steps=4, guidance_scale=5.0, output_type="pt",
        generator=torch.Generator().manual_seed(0),
        callback_on_step_end=SDCFGCutoffCallback(cutoff_step_ratio=None, cutoff_step_index=1),
    )[0]  # fmt: skip
    assert torch.equal(pictures[1], expected) and ticks == [1, 2, 3, 4] * 3
    assert not torch.equal(pictures[0], pictures[1]) and torch.equal(pictures[0], pictures[2])


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        ({"name": "SDCFGCutofCallback", "cutoff_step_ratio": 0.5}, "must match"),
        ({"name": "IPAdapterScaleCutoffCallback", "cutoff_step_ratio": 0.5}, "must match"),
        ({"name": "SDCFGCutoffCallback"}, "needs either cutoff_step_ratio or cutoff_step_index"),
        ({"name": "SDCFGCutoffCallback", "cutoff_step_ratio": 1.5}, "cutoff_step_ratio: must be at most 1"),
    ],
)
def test_callbacks_that_no_file_may_name(tmp_path, callback, message):
    with pytest.raises(ConfigError, match=f"task.callbacks.0.*{message}"):
        load_run_config(written(tmp_path, {"path": "some/model"}, TASK | {"callbacks": [callback]}))


def test_callbacks_that_a_pipeline_cannot_take(image, video):
    spec, pipeline = spec_of(video), load_pipeline(spec_of(video))
    cases = {
        "SDDCFGCutoffCallback": 'task.callbacks.0.name: diffusers has no .*; nearest: "SDCFGCutoffCallback"',
        "SDXLCFGCutoffCallback": "SDXLCFGCutoffCallback changes add_text_embeds, add_time_ids, which WanPipeline",
    }
    for name, message in cases.items():
        with pytest.raises(ModelError, match=message):
            drawn(pipeline, spec, callbacks=[{"name": name, "cutoff_step_ratio": 0.5}])
    with pytest.raises(ModelError, match="task.callbacks: SimpleNamespace calls nothing at the end of a step"):
        models.callbacks_of(
            SimpleNamespace(),
            PictureTask(**TASK, callbacks=[{"name": "SDCFGCutoffCallback", "cutoff_step_index": 1}]).callbacks,
        )


# --- the shipped examples


def test_the_shipped_run_files_for_24_gb_ask_for_what_they_say(monkeypatch, libraries):
    """The calls into diffusers, to the argument; the pipelines are not downloaded."""
    from diffusers import DiffusionPipeline

    indices = {
        "Wan-AI/Wan2.1-T2V-14B-Diffusers": {
            "_class_name": "WanPipeline",
            "transformer": ("diffusers", "WanTransformer3DModel"),
        },
        "black-forest-labs/FLUX.1-dev": {
            "_class_name": "FluxPipeline",
            "transformer": ("diffusers", "FluxTransformer2DModel"),
            "text_encoder_2": ("transformers", "T5EncoderModel"),
        },
    }
    monkeypatch.setattr(DiffusionPipeline, "load_config", lambda path, **_: indices[path])
    monkeypatch.setattr(models, "resolve_device", lambda name: "cuda")
    pipelines = []
    for name in ("run_wan_24gb", "run_flux_24gb"):
        config = load_run_config(ROOT / "configs" / f"{name}.yaml")
        told = recorded(monkeypatch, DiffusionPipeline, "from_pretrained", FakePipeline())
        pipelines.append(load_pipeline(config.model))
        assert config.policy.build() == sage_patch.load_policy(name.split("_")[1])
        [((path,), given)] = told
        assert path in indices and given.pop("dtype") == torch.bfloat16
        if name == "run_wan_24gb":
            assert given == {}
        else:
            mapping = given.pop("quantization_config")["quant_mapping"]
            assert given == {} and {n: dict(made) for n, made in mapping.items()} == {"transformer": BITS[0][2]}
    assert pipelines[0].moved == [("group", torch.device("cuda"), "leaf_level")]
    assert pipelines[1].moved == [("model", "cuda")]


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["model", "group", "sequential"])
def test_calls_under_offload_run_on_the_card(video, offload):
    """Weights rest on the CPU; the calls run on the card's kernels and the pictures are those without offload."""
    frames = {}
    for how in (None, offload):
        more = {"offload": how} if how else {}
        spec = ModelSpec(
            path=str(video),
            device="cuda",
            dtype="bfloat16",
            prompt_table="table.safetensors",
            latents_are_pixels=True,
            **more,
        )
        pipeline = load_pipeline(spec)
        exact = drawn(pipeline, spec)
        with sage_patch.applied(pipeline, EVERYTHING) as handle:
            frames[how] = drawn(pipeline, spec)
        assert handle.stats()["quantized"] == handle.stats()["calls"] == 2 * 2 * 2 * 2, handle.report()
        assert {row["backend"] for row in handle.rows()} <= {"sm90", "mma", "mma_fp16"}
        assert torch.equal(drawn(pipeline, spec), exact)
    assert torch.equal(frames[None], frames[offload])
