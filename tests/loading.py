"""What tests of loading share: folders with tiny models, stand-ins for absent libraries, and calls kept."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from sage_patch.evaluation.drawing import Drawer
from sage_patch.schema import ModelSpec, PictureTask
from tiny import text_model
from tiny_pipelines import save_text_to_image, save_text_to_video

ROOT = Path(__file__).parent.parent
TASK = {"kind": "video", "prompts": ["run"], "steps": 2, "height": 144, "width": 128, "num_frames": 17}
IDS = torch.arange(40)[None] % 99


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_to_video(tmp_path_factory.mktemp("video") / "pipeline")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_to_image(tmp_path_factory.mktemp("image") / "pipeline")


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model's folder, with the tokenizer of the one that the repository carries."""
    folder = tmp_path_factory.mktemp("language")
    text_model().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((ROOT / "tests/assets/lm-tiny-d128" / name).read_text())
    return folder


def written(folder: Path, model: dict[str, Any], task: dict[str, Any] | None = None, **more: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "model": model, "task": task or TASK, **more}))
    return path


def drawn(pipeline: Any, spec: ModelSpec, seed: int = 0, **task: Any) -> torch.Tensor:
    return Drawer(pipeline, spec, PictureTask(**TASK | task)).draw("run", seed, lambda step: None).frames


def spec_of(folder: Path, **more: Any) -> ModelSpec:
    return ModelSpec(
        path=str(folder), device="auto" if "device_map" in more else "cpu", prompt_table="table.safetensors",
        latents_are_pixels=True, **more
    )  # fmt: skip


class FakePipeline:
    """What is left of a pipeline where its loading is only recorded."""

    def __init__(self) -> None:
        self.moved: list[Any] = []

    def set_progress_bar_config(self, **_: Any) -> None: ...

    def to(self, device: str) -> FakePipeline:
        self.moved.append(device)
        return self

    def enable_model_cpu_offload(self, device: str) -> None:
        self.moved.append(("model", device))

    def enable_group_offload(self, **given: Any) -> None:
        self.moved.append(("group", given["onload_device"], given["offload_type"]))


class Recorded(dict):
    """Stands for a configuration class: keeps what it was made with."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(kwargs)
        if args:
            self["quant_type"] = args[0]


class Int8WeightOnlyConfig(Recorded): ...


def recorded(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, result: Any) -> list[Any]:
    told: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        told.append((args, kwargs))
        return result

    monkeypatch.setattr(owner, name, call)
    return told


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes and torchao as far as a configuration asks for them."""
    import diffusers
    import transformers

    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace())
    quantization = SimpleNamespace(Int8WeightOnlyConfig=Int8WeightOnlyConfig)
    monkeypatch.setitem(sys.modules, "torchao.quantization", quantization)
    for hub in (diffusers, transformers):
        for name in ("BitsAndBytesConfig", "TorchAoConfig"):
            made = type(name, (Recorded,), {"__module__": hub.__name__})
            monkeypatch.setattr(hub, name, made, raising=False)
    monkeypatch.setattr(diffusers, "PipelineQuantizationConfig", Recorded)


BITS = [
    (
        "bitsandbytes",
        "nf4",
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
    ),
    (
        "bitsandbytes",
        "fp4",
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": torch.bfloat16},
    ),
    ("bitsandbytes", "int8", {"load_in_8bit": True}),
    ("torchao", "int8", {"quant_type": Int8WeightOnlyConfig()}),
]
