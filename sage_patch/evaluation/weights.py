"""Weights as a run file asks for them: of fewer bits, and with LoRA adapters laid over them.

Both come before the patch. Neither changes which modules attend, so the sites are those of the model without them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sage_patch.errors import ModelError
from sage_patch.recipes import nearest
from sage_patch.schema import AdapterSpec, ModelSpec, QuantizeSpec

_TORCHAO = {"int8": "Int8WeightOnlyConfig", "int4": "Int4WeightOnlyConfig", "float8": "Float8WeightOnlyConfig"}


def quantization_of(spec: QuantizeSpec, hub: str, dtype: torch.dtype) -> Any:
    """The configuration by which `hub`, "transformers" or "diffusers", reads weights in fewer bits.

    dtype: what 4-bit weights are computed in.
    """
    module = importlib.import_module(hub)
    if spec.library == "torchao":
        made = getattr(importlib.import_module("torchao.quantization"), _TORCHAO[str(spec.type)])
        return module.TorchAoConfig(made())
    if spec.type == "int8":
        return module.BitsAndBytesConfig(load_in_8bit=True)
    return module.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=spec.type, bnb_4bit_compute_dtype=dtype)


def quantized_components(
    spec: ModelSpec, components: Mapping[str, tuple[str, str] | None], dtype: torch.dtype
) -> dict[str, Any]:
    """What `DiffusionPipeline.from_pretrained` is to be told beside the rest, so that its weights are as asked for.

    components: (library, class name) by name, of the pipeline's index. Raises ModelError.
    """
    if spec.quantize is None:
        return {}
    import diffusers

    asked = spec.quantize.files or spec.quantize.components or _denoisers(components)
    for name in asked:
        if components.get(name) is None:
            key = "files" if spec.quantize.files else "components"
            there = [n for n, part in components.items() if part is not None]
            raise ModelError(f"model.quantize.{key}: the pipeline has no component {name!r}{nearest(name, there)}")
    if spec.quantize.files is not None:
        return {name: _from_gguf(spec, name, file, components, dtype) for name, file in spec.quantize.files.items()}
    hubs = {name: component[0] for name in asked if (component := components[name]) is not None}
    foreign = [name for name, hub in hubs.items() if hub not in ("diffusers", "transformers")]
    if foreign:
        raise ModelError(
            f"model.quantize.components: {foreign[0]} is of {hubs[foreign[0]]}, which takes no such weights"
        )
    mapping = {name: quantization_of(spec.quantize, hub, dtype) for name, hub in hubs.items()}
    return {"quantization_config": diffusers.PipelineQuantizationConfig(quant_mapping=mapping)}


def _denoisers(components: Mapping[str, tuple[str, str] | None]) -> list[str]:
    import diffusers

    found = {name: getattr(diffusers, part[1], None) for name, part in components.items() if part}
    packages = ("diffusers.models.transformers", "diffusers.models.unets")
    return [name for name, made in found.items() if str(getattr(made, "__module__", "")).startswith(packages)]


def _from_gguf(
    spec: ModelSpec,
    name: str,
    file: str,
    components: Mapping[str, tuple[str, str] | None],
    dtype: torch.dtype,
) -> Any:
    import diffusers

    component = components[name]
    assert component is not None
    made: Any = getattr(diffusers, component[1], None)
    if not hasattr(made, "from_single_file"):
        raise ModelError(f"model.quantize.files.{name}: diffusers reads no single file of {component[1]}")
    if not Path(file).is_file() and "://" not in file:
        owner, repository, rest = file.split("/", 2)
        file = f"https://huggingface.co/{owner}/{repository}/blob/main/{rest}"
    config = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    pinned = {"config_revision": spec.revision} if spec.revision is not None else {}
    return made.from_single_file(
        file, config=spec.path, subfolder=name, quantization_config=config, dtype=dtype, **pinned
    )


def add_adapters(model: Any, adapters: list[AdapterSpec]) -> None:
    """Load LoRA weights into a language model or a pipeline, all of them active, each at its scale.

    Raises ModelError where the model takes none or a file holds none for it.
    """
    if not adapters:
        return
    add = _add_to_module if isinstance(model, nn.Module) else _add_to_pipeline
    try:
        add(model, adapters)
    except ModelError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError, ImportError) as error:
        raise ModelError(f"model.adapters: {type(model).__name__} does not take them: {error}") from error


def _names(adapters: list[AdapterSpec]) -> list[str]:
    return [f"run_{number}" for number in range(len(adapters))]


def _add_to_pipeline(pipeline: Any, adapters: list[AdapterSpec]) -> None:
    if not hasattr(pipeline, "load_lora_weights"):
        raise ModelError(f"model.adapters: {type(pipeline).__name__} takes no LoRA adapters")
    for number, (name, adapter) in enumerate(zip(_names(adapters), adapters, strict=True)):
        if adapter.part is not None and getattr(pipeline, adapter.part, None) is None:
            raise ModelError(f"model.adapters.{number}.part: {type(pipeline).__name__} has no {adapter.part}")
        more = {n: v for n in ("weight_name", "revision") if (v := getattr(adapter, n)) is not None}
        if adapter.part is not None:
            more["load_into_transformer_2"] = True
        pipeline.load_lora_weights(adapter.path, adapter_name=name, **more)
        if not any(name in found for found in pipeline.get_list_adapters().values()):
            raise ModelError(f"model.adapters.{number}: {adapter.path} holds no LoRA for {type(pipeline).__name__}")
    pipeline.set_adapters(_names(adapters), adapter_weights=[adapter.scale for adapter in adapters])


def _add_to_module(model: Any, adapters: list[AdapterSpec]) -> None:
    if not hasattr(model, "load_adapter"):
        raise ModelError(f"model.adapters: {type(model).__name__} takes no LoRA adapters")
    for number, (name, adapter) in enumerate(zip(_names(adapters), adapters, strict=True)):
        more = {"adapter_kwargs": {"revision": adapter.revision}} if adapter.revision is not None else {}
        model.load_adapter(adapter.path, adapter_name=name, **more)
        scalings = [getattr(module, "scaling", None) for module in model.modules()]  # PEFT's layers: by adapter
        scaled = [scaling for scaling in scalings if isinstance(scaling, dict) and name in scaling]
        if not scaled:
            raise ModelError(f"model.adapters.{number}: {adapter.path} holds no LoRA for {type(model).__name__}")
        for scaling in scaled:
            scaling[name] *= adapter.scale
    model.set_adapter(_names(adapters))
