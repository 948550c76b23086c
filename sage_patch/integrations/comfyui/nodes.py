"""The two nodes: one patches a MODEL with a policy, one shows what ran. Nothing of ComfyUI is imported."""

from __future__ import annotations

import os
from typing import Any

from sage_patch.extras import needed_for
from sage_patch.integrations.comfyui.override import Override
from sage_patch.policy import Policy, PolicyError

with needed_for("the node for ComfyUI"):
    from sage_patch.config import load_policy

OPTION = "optimized_attention_override"  # of transformer_options: what ComfyUI calls in place of its own attention


def patched(model: Any, policy: Policy) -> Any:
    """A clone of a MODEL whose attention runs under the policy; the MODEL itself stays as it is.

    Raises PolicyError if another node's override is in the place.
    """
    present = model.model_options.get("transformer_options", {}).get(OPTION)
    if present is not None and not isinstance(present, Override):
        name = getattr(present, "__qualname__", type(present).__name__)
        raise PolicyError(
            f"another node has put its own attention into this MODEL ({name}): take that node out, or this one"
        )
    clone = model.clone()
    clone.model_options.setdefault("transformer_options", {})[OPTION] = Override(policy)
    return clone


def report(model: Any) -> str:
    """What ran where since the MODEL was patched, as text."""
    present = model.model_options.get("transformer_options", {}).get(OPTION)
    if not isinstance(present, Override):
        return "this MODEL is not patched: put the node 'Sage Patch' before the sampler, and give its MODEL to both"
    return present.report()


class SagePatch:
    """MODEL and a policy -> MODEL."""

    CATEGORY = "sage_patch"
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = "Quantized attention under a policy: a recipe, the name of a shipped policy, or a policy file."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "policy": ("STRING", {"default": "sage2"})}}

    @classmethod
    def IS_CHANGED(cls, model: Any = None, policy: str = "") -> float | str:
        """A policy file that was edited is read again."""
        return os.path.getmtime(policy) if os.path.isfile(policy) else policy

    def patch(self, model: Any, policy: str) -> tuple[Any]:
        return (patched(model, load_policy(policy.strip())),)


class SagePatchReport:
    """A patched MODEL and the LATENT of its sampler -> the report as STRING; shown on the node too."""

    CATEGORY = "sage_patch"
    FUNCTION = "show"
    OUTPUT_NODE = True
    RETURN_TYPES = ("STRING",)
    DESCRIPTION = "Which attention calls of a patched MODEL were quantized, and why others were not."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "after": ("LATENT",)}}

    @classmethod
    def IS_CHANGED(cls, model: Any = None, after: Any = None) -> float:
        """Never the same: a MODEL counts on."""
        return float("nan")

    def show(self, model: Any, after: Any) -> dict[str, Any]:
        text = report(model)
        return {"ui": {"text": [text]}, "result": (text,)}


NODE_CLASS_MAPPINGS: dict[str, type] = {"SagePatch": SagePatch, "SagePatchReport": SagePatchReport}
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {"SagePatch": "Sage Patch", "SagePatchReport": "Sage Patch report"}
