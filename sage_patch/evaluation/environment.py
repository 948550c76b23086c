"""What a bug report and a results file need: versions, devices, and a self-test of the numerics."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from sage_patch import __version__, backends
from sage_patch.attention import sage_attention
from sage_patch.errors import SagePatchError
from sage_patch.evaluation.metrics import relative_l1
from sage_patch.kernels import build, library, ops
from sage_patch.recipes import RECIPES, Recipe

PACKAGES = (
    "sage-patch",
    "torch",
    "transformers",
    "diffusers",
    "accelerate",
    "safetensors",
    "numpy",
    "torchmetrics",
    "av",
)


RESULTS_SCHEMA = 2  # of results.json and the like; 1 had other keys for `run` and `evaluate`


def record(command: str, config: BaseModel | None = None) -> dict[str, Any]:
    """What every results file begins with: when, by which command, where and with which configuration."""
    head: dict[str, Any] = {
        "schema": RESULTS_SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "environment": environment(),
    }
    return head if config is None else head | {"config": near(config.model_dump(mode="json", exclude_none=True))}


def near(value: Any) -> Any:
    """Paths inside the current folder relative to it, so that results can be shared and compared."""
    if isinstance(value, dict):
        return {k: near(v) for k, v in value.items()}
    if isinstance(value, list):
        return [near(v) for v in value]
    return value.removeprefix(f"{Path.cwd()}/") if isinstance(value, str) else value


def environment() -> dict[str, Any]:
    """Versions of everything that takes part, the processor, and the CUDA devices with their capability."""
    return {
        "packages": versions(PACKAGES),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": {"name": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "cuda": {"version": torch.version.cuda, "devices": [_cuda_device(i) for i in range(torch.cuda.device_count())]},
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("SAGE_PATCH_")},
    }


def kernels() -> dict[str, Any]:
    """What the compiled kernels need and where they run: compiler, ninja, and a row for each CUDA device.

    A row's `library` is the file that the device has loaded, None before its first call and where nothing fits it.
    """
    nvcc, ninja = build.find_nvcc(), build.find_ninja()
    rows = []
    for index in range(torch.cuda.device_count()):
        backend = backends.named(ops.backend_for(torch.device("cuda", index)))
        rows.append(
            {
                "device": f"cuda:{index}",
                "backend": backend.name if backend else None,
                "library": library.loaded_from(index) if backend else None,
            }
        )
    return {
        "nvcc": f"{build.nvcc_version(nvcc)}, {nvcc}" if nvcc else None,
        "ninja": str(ninja) if ninja else None,
        "devices": rows,
    }


def self_test() -> list[dict[str, Any]]:
    """Every recipe on every device against float64: device, recipe, error (relative L1), bound and result.

    backend: what computes the device's quantized recipes. bound: the recipe's own; a recipe without one is "wrong".
    result: "ok", "wrong", or "unavailable: reason" where a recipe cannot run on the device or its kernels cannot be
    built. Takes seconds, and on a card the time to compile where that is still to be done.
    """
    return [_test(device, recipe) for device in _devices() for recipe in RECIPES.values()]


def _devices() -> list[str]:
    return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]


def _test(device: str, recipe: Recipe) -> dict[str, Any]:
    """A causal call with grouped heads, a KV cache longer than the query, odd lengths and an outlier channel."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 210, 128, generator=generator)
    key, value = (torch.randn(1, 2, 333, 128, generator=generator) for _ in range(2))
    key[..., 5] += 20
    query, key, value = query.half(), key.half(), value.half()
    row: dict[str, Any] = {
        "device": device,
        "backend": ops.backend_for(torch.device(device)),
        "recipe": recipe.name,
        "error": None,
        "bound": recipe.self_test_bound,
    }
    try:
        out = sage_attention(
            query.to(device),
            key.to(device),
            value.to(device),
            is_causal=True,
            enable_gqa=True,
            recipe=recipe.name,
            on_unsupported="error",
        )
    except SagePatchError as error:  # no kernel for it, or none that could be built or loaded: env says so and goes on
        return row | {"result": f"unavailable: {str(error).partition(';')[0]}"}
    assert isinstance(out, torch.Tensor)
    row["error"] = relative_l1(out.cpu(), _attention_in_float64(query, key, value))
    within = recipe.self_test_bound is not None and row["error"] <= recipe.self_test_bound
    return row | {"result": "ok" if within else "wrong"}


def _attention_in_float64(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention written out, aligned bottom-right. [B, Hq, q_len, D]"""
    groups = query.shape[1] // key.shape[1]
    q, k, v = query.double(), key.double().repeat_interleave(groups, 1), value.double().repeat_interleave(groups, 1)
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v


def machine_name(facts: dict[str, Any], device: str) -> str:
    """The card or processor behind a device, of `environment()`'s facts."""
    kind, _, index = device.partition(":")
    return str((facts["cuda"]["devices"][int(index or 0)] if kind == "cuda" else facts["cpu"])["name"])


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """The installed version of each package, None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = f"{__version__} (not installed)" if name == "sage-patch" else None
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), platform.machine())


def _cuda_device(index: int) -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(index)
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "memory_gib": round(facts.total_memory / 2**30, 1),
        "processors": facts.multi_processor_count,
    }
