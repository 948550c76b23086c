"""Where a pipeline's weights are while it draws: on the device, or in the CPU's memory until they are needed.

The hooks that bring them come before the patch: a call is quantized on the device it is brought to, like any other. The
unpatched model, which every policy is compared with, is drawn under the same hooks.
"""

from __future__ import annotations

from typing import Any

import torch

from sage_patch.errors import ModelError
from sage_patch.schema import ModelSpec


def place(pipeline: Any, spec: ModelSpec, device: str) -> Any:
    """The pipeline where `spec` wants it. device: the one that computes. Raises ModelError."""
    if spec.vae_tiling:
        if not hasattr(getattr(pipeline, "vae", None), "enable_tiling"):
            raise ModelError(f"model.vae_tiling: {type(pipeline).__name__} has no autoencoder that decodes in tiles")
        pipeline.vae.enable_tiling()
    if spec.device_map is not None:
        return pipeline  # from_pretrained put it there
    if spec.offload is None:
        return pipeline.to(device)
    if device == "cpu" and spec.offload == "sequential":
        raise ModelError("model.offload: sequential brings layer after layer to a card, and model.device is cpu")
    try:
        if spec.offload == "model":
            pipeline.enable_model_cpu_offload(device=device)
        elif spec.offload == "sequential":
            pipeline.enable_sequential_cpu_offload(device=device)
        else:
            pipeline.enable_group_offload(
                onload_device=torch.device(device),
                offload_device=torch.device("cpu"),
                offload_type="leaf_level",
                use_stream=device.startswith("cuda"),  # the next layer comes while this one computes
            )
    except (ValueError, RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        raise ModelError(
            f"model.offload: {type(pipeline).__name__} cannot be placed by {spec.offload}: {error}"
        ) from error
    return pipeline
