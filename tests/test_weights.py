"""Weights as a run file asks for them: fewer bits, LoRA adapters, versions of a hub id, and packages that are missing.

GGUF, adapters and variants are real, with tiny models; of bitsandbytes and torchao the calls are asserted.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import sage_patch
from loading import BITS, IDS, ROOT, FakePipeline, drawn, recorded, spec_of
from sage_patch.errors import ModelError
from sage_patch.evaluation.models import load_pipeline, load_text_model
from sage_patch.extras import MissingPackage
from sage_patch.patch import model_hash
from sage_patch.schema import ModelSpec
from tiny import EVERYTHING, text_model

pytest_plugins = ["loading"]

# --- fewer bits


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("library", "kind", "configuration"), BITS)
def test_a_language_model_in_fewer_bits_is_asked_for_where_it_computes(
    language, monkeypatch, library, kind, configuration
):
    from transformers import AutoModelForCausalLM

    told = recorded(monkeypatch, AutoModelForCausalLM, "from_pretrained", text_model())
    spec = ModelSpec(path=str(language), dtype="bfloat16", device="cpu", quantize={"library": library, "type": kind})
    load_text_model(spec)
    [((folder,), given)] = told
    made = given.pop("quantization_config")
    assert folder == str(language) and given == {"dtype": "bfloat16", "device_map": {"": "cpu"}}
    assert dict(made) == configuration and type(made).__module__ == "transformers"


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("library", "kind", "configuration"), BITS)
def test_a_pipeline_in_fewer_bits_is_asked_for_by_component(image, monkeypatch, library, kind, configuration):
    from diffusers import DiffusionPipeline

    told = recorded(monkeypatch, DiffusionPipeline, "from_pretrained", FakePipeline())
    quantize: dict[str, Any] = {"library": library, "type": kind}
    spec = ModelSpec(path=str(image), dtype="bfloat16", device="cpu", offload="model", quantize=quantize)
    assert load_pipeline(spec).moved == [("model", "cpu")]
    components = ["unet", "text_encoder"]
    load_pipeline(spec.model_copy(update={"quantize": spec.quantize.model_copy(update={"components": components})}))
    denoisers, chosen = (given.pop("quantization_config")["quant_mapping"] for _, given in told)
    assert told[0][1]["dtype"] == torch.bfloat16
    assert {name: type(made).__module__ for name, made in denoisers.items()} == {"unet": "diffusers"}
    hubs = {name: type(made).__module__ for name, made in chosen.items()}
    assert hubs == {"unet": "diffusers", "text_encoder": "transformers"}
    assert all(dict(made) == configuration for made in (*denoisers.values(), *chosen.values()))


@pytest.mark.usefixtures("libraries")
def test_components_that_are_not_there_or_hold_no_weights(image):
    for name, message in (("unit", "no component 'unit'; nearest: \"unet\""), ("safety_checker", "no component")):
        quantize = {"library": "torchao", "type": "int8", "components": [name]}
        with pytest.raises(ModelError, match=f"model.quantize.components: the pipeline has {message}"):
            load_pipeline(ModelSpec(path=str(image), device="cpu", quantize=quantize))


def test_weights_of_a_gguf_file(video, tmp_path):
    """Real: every matrix of the transformer in Q8_0, read by diffusers, adapted by nothing, offloaded and patched."""
    import gguf

    plain = load_pipeline(spec_of(video))
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "wan")
    for name, value in plain.transformer.state_dict().items():
        if value.dim() == 2 and value.shape[1] % 32 == 0:
            codes = gguf.quants.quantize(value.numpy(), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, codes, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    quantize = {"library": "gguf", "files": {"transformer": str(tmp_path / "t.gguf")}}
    spec = spec_of(video, quantize=quantize, offload="group")
    pipeline = load_pipeline(spec)
    assert type(pipeline.transformer.blocks[0].attn1.to_q).__name__ == "GGUFLinear"
    assert model_hash(pipeline) == model_hash(pipeline) != model_hash(plain)
    reference, frames = drawn(plain, spec), drawn(pipeline, spec)
    assert 0 < (reference - frames).abs().mean() < 0.02
    with sage_patch.applied(pipeline, EVERYTHING) as handle:
        assert not torch.equal(drawn(pipeline, spec), frames)
        assert handle.stats()["quantized"] == handle.stats()["calls"] == 2 * 2 * 2 * 2
    assert torch.equal(drawn(pipeline, spec), frames)


def test_a_gguf_file_of_the_hub_and_the_version_of_its_configuration(image, monkeypatch):
    from diffusers import DiffusionPipeline, UNet2DConditionModel

    index = dict(DiffusionPipeline.load_config(str(image)))
    monkeypatch.setattr(DiffusionPipeline, "load_config", lambda *_, **__: index)
    read = recorded(monkeypatch, UNet2DConditionModel, "from_single_file", "the model")
    told = recorded(monkeypatch, DiffusionPipeline, "from_pretrained", FakePipeline())
    quantize = {"library": "gguf", "files": {"unet": "owner/weights/q4/u.gguf"}}
    spec = ModelSpec(path="owner/name", revision="v2", dtype="bfloat16", device="cpu", quantize=quantize)
    load_pipeline(spec)
    [((file,), given)] = read
    assert file == "https://huggingface.co/owner/weights/blob/main/q4/u.gguf"
    assert given.pop("quantization_config").compute_dtype == torch.bfloat16
    assert given == {"config": "owner/name", "subfolder": "unet", "dtype": torch.bfloat16, "config_revision": "v2"}
    assert told[0][1]["unet"] == "the model" and told[0][1]["revision"] == "v2"


def test_a_component_that_no_gguf_file_can_be_read_for(image, tmp_path):
    files = {"text_encoder": str(tmp_path / "t.gguf")}
    with pytest.raises(ModelError, match="files.text_encoder: diffusers reads no single file of CLIPTextModel"):
        load_pipeline(ModelSpec(path=str(image), device="cpu", quantize={"library": "gguf", "files": files}))


def test_which_model_it_is_is_known_of_weights_that_wrap_others():
    """As torchao's do: codes and scales are sampled."""
    hashes = []
    for seed in (0, 0, 1):
        model = text_model()
        torch.manual_seed(seed)
        codes, scales = torch.randn(64, 64), torch.randn(64, 64)
        model.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(TwoTensor(codes, scales))
        hashes.append(model_hash(model))
    assert hashes[0] == hashes[1] != hashes[2]


# --- adapters


def lora_of(language: Path, folder: Path, seed: int) -> torch.Tensor:
    """Saves an adapter on q_proj; returns what it adds to the first layer's weight."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=False)
    model: Any = get_peft_model(text_model(), config)
    model.save_pretrained(folder)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    return layer.get_delta_weight("default").detach()


def test_adapters_of_a_language_model_add_up_at_their_scales(language, tmp_path):
    deltas = [lora_of(language, tmp_path / str(i), i) for i in range(2)]
    adapters = [{"path": str(tmp_path / "0"), "scale": 0.5}, {"path": str(tmp_path / "1"), "scale": -2.0}]
    model, _ = load_text_model(ModelSpec(path=str(language), dtype="float32", device="cpu", adapters=adapters))
    projection, x = model.model.layers[0].self_attn.q_proj, torch.randn(3, 64)
    with torch.no_grad():
        expected = x @ (projection.base_layer.weight + 0.5 * deltas[0] - 2 * deltas[1]).T
        torch.testing.assert_close(projection(x), expected)
        adapted = model(IDS).logits
        assert not torch.equal(adapted, text_model()(IDS).logits)
        with sage_patch.applied(model, EVERYTHING) as handle:
            model(IDS)
        assert handle.stats()["quantized"] == handle.stats()["calls"] == 2
        assert set(handle.stats()["sites"]) == {f"model.layers.{i}.self_attn" for i in range(2)}
        assert torch.equal(model(IDS).logits, adapted)


def save_lora(pipeline: Any, folder: Path, seed: int, part: str = "transformer") -> Path:
    from diffusers import WanPipeline
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    torch.manual_seed(seed)
    transformer = copy.deepcopy(getattr(pipeline, part))
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False))
    WanPipeline.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(transformer))
    return folder


@pytest.mark.parametrize("offload", [None, "model", "group"])
def test_adapters_of_a_pipeline_come_before_offload_and_patch(video, tmp_path, offload):
    plain = load_pipeline(spec_of(video))
    save_lora(plain, tmp_path, 0)
    frames = {}
    for scale in (0.0, 0.5, 1.0):
        adapters = [{"path": str(tmp_path), "weight_name": "pytorch_lora_weights.safetensors", "scale": scale}]
        spec = spec_of(video, adapters=adapters, offload=offload)
        pipeline = load_pipeline(spec)
        frames[scale] = drawn(pipeline, spec)
        with sage_patch.applied(pipeline, EVERYTHING) as handle:
            drawn(pipeline, spec)
        assert handle.stats()["quantized"] == handle.stats()["calls"] == 2 * 2 * 2 * 2
        assert set(handle.stats()["sites"]) == {f"transformer.blocks.{b}.attn{a}" for b in (0, 1) for a in (1, 2)}
    torch.testing.assert_close(frames[0.0], drawn(plain, spec_of(video)))
    assert (frames[0.5] - frames[0.0]).abs().max() > 1e-3 and (frames[1.0] - frames[0.5]).abs().max() > 1e-3


def test_adapters_of_the_second_denoising_model(video, tmp_path):
    """As Wan 2.2's, one for the first steps and one for the others."""
    one = load_pipeline(spec_of(video))
    one.register_modules(transformer_2=copy.deepcopy(one.transformer))
    one.register_to_config(boundary_ratio=0.5)
    one.save_pretrained(tmp_path / "two")
    (tmp_path / "two" / "table.safetensors").write_bytes((video / "table.safetensors").read_bytes())
    loras = [save_lora(one, tmp_path / f"lora{i}", i) for i in range(2)]
    adapters = [{"path": str(loras[0]), "scale": 0.25}, {"path": str(loras[1]), "part": "transformer_2", "scale": 0.75}]
    pipeline = load_pipeline(spec_of(tmp_path / "two", adapters=adapters))
    assert pipeline.get_list_adapters() == {"transformer": ["run_0"], "transformer_2": ["run_1"]}
    scaled = {n: getattr(pipeline, n).blocks[0].attn1.to_q.scaling for n in ("transformer", "transformer_2")}
    assert scaled == {"transformer": {"run_0": 0.25}, "transformer_2": {"run_1": 0.75}}
    with pytest.raises(ModelError, match=r"model.adapters.1.part: WanPipeline has no transformer_2"):
        load_pipeline(spec_of(video, adapters=adapters))


def test_adapters_that_do_not_fit(video, image, language, tmp_path):
    from diffusers import DiffusionPipeline

    other = save_lora(load_pipeline(spec_of(video)), tmp_path / "wan", 0)
    (tmp_path / "empty").mkdir()
    for folder, path, message in (
        (video, tmp_path / "empty", "model.adapters: WanPipeline does not take them: "),
        (image, other, r"model.adapters(.0: .* holds no LoRA for|: StableDiffusionPipeline does not take them)"),
    ):
        with pytest.raises(ModelError, match=message):
            load_pipeline(ModelSpec(path=str(folder), device="cpu", adapters=[{"path": str(path)}]))
    with pytest.raises(ModelError, match="model.adapters: LlamaForCausalLM does not take them: "):
        load_text_model(ModelSpec(path=str(language), device="cpu", adapters=[{"path": str(tmp_path / "empty")}]))
    assert not hasattr(DiffusionPipeline, "load_lora_weights")
    from sage_patch.evaluation.weights import add_adapters

    for model, name in ((torch.nn.Linear(1, 1), "Linear"), (SimpleNamespace(), "SimpleNamespace")):
        with pytest.raises(ModelError, match=f"model.adapters: {name} takes no LoRA adapters"):
            add_adapters(model, ModelSpec(path="a/b", adapters=[{"path": "a/b"}]).adapters)


# --- versions, and what is missing


def test_revision_and_variant_reach_every_part_of_a_hub_id(monkeypatch, video):
    from diffusers import DiffusionPipeline
    from transformers import AutoModelForCausalLM, AutoTokenizer

    index = dict(DiffusionPipeline.load_config(str(video)))
    asked = [
        recorded(monkeypatch, AutoTokenizer, "from_pretrained", None),
        recorded(monkeypatch, AutoModelForCausalLM, "from_pretrained", text_model()),
        recorded(monkeypatch, DiffusionPipeline, "load_config", index),
        recorded(monkeypatch, DiffusionPipeline, "from_pretrained", FakePipeline()),
    ]
    spec = ModelSpec(path="owner/name", revision="v2", variant="fp16", device="cpu")
    load_text_model(spec)
    load_pipeline(spec)
    absent = dict.fromkeys(("tokenizer", "text_encoder", "vae", "transformer_2"))
    version = {"revision": "v2", "variant": "fp16"}
    assert asked == [
        [(("owner/name",), {"revision": "v2"})],
        [(("owner/name",), {"dtype": "auto", **version})],
        [(("owner/name",), {"revision": "v2"})],
        [(("owner/name",), {"dtype": torch.float32, **version, **absent})],
    ]


def test_a_variant_of_the_files_is_read(video, tmp_path):
    pipeline = load_pipeline(spec_of(video))
    pipeline.save_pretrained(tmp_path, variant="fp16")
    (tmp_path / "table.safetensors").write_bytes((video / "table.safetensors").read_bytes())
    again = load_pipeline(spec_of(tmp_path, variant="fp16"))
    assert torch.equal(again.transformer.proj_out.weight, pipeline.transformer.proj_out.weight)
    with pytest.raises(ModelError, match="cannot load a diffusers pipeline from .*bf16"):
        load_pipeline(spec_of(tmp_path, variant="bf16"))


@pytest.mark.usefixtures("libraries")
def test_a_folder_has_no_revision_and_stored_int8_no_other_form(language, video):
    for load, folder in ((load_text_model, language), (load_pipeline, video)):
        with pytest.raises(ModelError, match="model.revision is for hub ids, and .* is a folder here"):
            load(ModelSpec(path=str(folder), device="cpu", revision="v2"))
    quantize = {"library": "torchao", "type": "int8"}
    for load, folder in ((load_text_model, "lm-tiny-d128"), (load_pipeline, "wan-doom-d128")):
        for key, value in (("variant", "fp16"), ("quantize", quantize), ("device_map", "balanced")):
            with pytest.raises(
                ModelError, match=f"model.{key}: the weights of .* are stored in this project's own INT8"
            ):
                load(ModelSpec(path=str(ROOT / "tests/assets" / folder), **{key: value}))


@pytest.mark.parametrize(
    ("package", "extra", "more"),
    [
        ("peft", "lora", {"adapters": [{"path": "a/b"}]}),
        ("bitsandbytes", "quantized", {"quantize": {"library": "bitsandbytes", "type": "nf4"}}),
        ("torchao", "quantized", {"quantize": {"library": "torchao", "type": "int8"}}),
        ("gguf", "quantized", {"quantize": {"library": "gguf", "files": {"transformer": "a/b/c.gguf"}}}),
        ("accelerate", "diffusers", {"offload": "sequential"}),
        ("accelerate", "diffusers", {"device_map": "balanced"}),
    ],
)
def test_a_missing_package_is_said_with_the_extra_that_brings_it(video, language, monkeypatch, package, extra, more):
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"model\.\S+.* needs {package}, which is not installed: pip install 'sage-patch\[{extra}\]'"
    with pytest.raises(MissingPackage, match=message):
        load_pipeline(spec_of(video, **more))
    if "offload" not in more and package != "gguf":
        more = more | {"device": "auto"}
        with pytest.raises(MissingPackage, match=message):
            load_text_model(ModelSpec(path=str(language), **more))
