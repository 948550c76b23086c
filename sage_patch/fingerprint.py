"""Which model a calibrated policy belongs to: a hash of architecture and weights, and whether a policy is stale.

A calibration holds for the weights it was measured on. The hash reads names, shapes, dtypes and a sample of the values
of the modules that get patched, so it costs milliseconds and is the same in every process and on every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from sage_patch.policy import CALIBRATION_SCHEMA, Calibration

_VALUES = 64  # of each parameter, evenly spread


def hash_of(parts: Mapping[str, nn.Module]) -> str:
    """The hash "architecture-weights", 16 hex digits each, of a model ({"": model}) or a pipeline's denoising models.

    The second half holds dtypes too, and is "weightless" if a parameter is on the meta device.
    """
    shapes, values = hashlib.sha256(), hashlib.sha256()
    weightless = False
    for part, root in sorted(parts.items()):
        shapes.update(f"{part} {type(root).__name__}\n".encode())
        for name, parameter in sorted(root.named_parameters()):
            shapes.update(f"{name} {tuple(parameter.shape)}\n".encode())
            if parameter.is_meta:
                weightless = True
                continue
            values.update(f"{name} {parameter.dtype}\n".encode())
            for tensor in _plain(parameter.detach()):
                flat = tensor.reshape(-1)
                sample = flat[:: max(1, len(flat) // _VALUES)][:_VALUES].contiguous().cpu()
                values.update(sample.view(torch.uint8).numpy().tobytes())
    return f"{shapes.hexdigest()[:16]}-{'weightless' if weightless else values.hexdigest()[:16]}"


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, or what quantized weights are made of (codes, scales), which cannot be sampled themselves."""
    flatten = getattr(tensor, "__tensor_flatten__", None)  # of subclasses that wrap others
    if flatten is None:
        yield tensor.as_subclass(torch.Tensor)
        return
    for name in flatten()[0]:
        yield from _plain(getattr(tensor, name))


def why_stale(calibration: Calibration, parts: Mapping[str, nn.Module]) -> str | None:
    """Why a calibrated policy must not be used with a model, with the remedy, or None if it fits.

    Of a model without weights, which can only be planned, the architecture alone is compared.
    """
    remedy = (
        f"; calibrate again ({calibration.command}), or delete the calibration section of the policy to use its rules "
        "as they are, without what was measured"
    )
    if calibration.schema_version != CALIBRATION_SCHEMA:
        return (
            f"the policy is stale: it was calibrated under schema {calibration.schema_version}, and this release reads "
            f"{CALIBRATION_SCHEMA}{remedy}"
        )
    wanted, _, wanted_weights = calibration.model_hash.partition("-")
    found, _, found_weights = hash_of(parts).partition("-")
    if wanted != found:
        what = "a model with other modules or shapes"
    elif found_weights not in ("weightless", wanted_weights):
        what = "other weights, or another dtype, of the same architecture"
    else:
        return None
    return (
        f"the policy is stale: it was calibrated on {what} (hash {calibration.model_hash}, this model has "
        f"{found}-{found_weights}){remedy}"
    )
