"""Reach the attention of diffusers models: every processor, whether or not it goes through diffusers' dispatcher.

A patched processor keeps its object and its name; its class becomes a subclass whose call runs the original code under
a function mode that sees one thing only: torch's scaled_dot_product_attention. Nothing global is touched, no processor
is copied, and taking the subclass away restores exactly what was there. diffusers' own set_attention_backend reaches
only half of the processors and changes a process-wide default.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sage_patch.dispatch import Options, attend, choose, describe, unify
from sage_patch.integrations.sites import TAG, SiteTag, place_of
from sage_patch.policy import AttentionSite

# Parts of a pipeline that denoise. Autoencoders and text or image encoders are left alone.
DENOISERS = ("transformer", "transformer_2", "unet", "prior", "decoder", "controlnet")


def denoisers(pipeline: Any) -> dict[str, nn.Module]:
    """The denoising models of a diffusers pipeline by component name; empty if this is not a pipeline."""
    components = getattr(pipeline, "components", None)
    if not isinstance(components, dict):
        return {}
    return {n: components[n] for n in DENOISERS if isinstance(components.get(n), nn.Module)}


def find_processor_sites(model: nn.Module, prefix: str = "") -> list[tuple[AttentionSite, nn.Module]]:
    """Every module of a diffusers model that attends through a processor object, in module order."""
    modules = dict(model.named_modules())
    return [
        (_describe(prefix + name, name, module, modules), module)
        for name, module in modules.items()
        if callable(getattr(module, "processor", None)) and hasattr(module, "set_processor")
    ]


def patch_processor(processor: Any) -> type:
    """Give a processor object its intercepting class; returns the class it had."""
    original = type(processor)
    processor.__class__ = intercepting(original)  # type: ignore[arg-type]
    return original


def is_patched(processor: Any) -> bool:
    return getattr(type(processor), "_sage_patch_original", None) is not None


@functools.cache
def intercepting(cls: type) -> type:
    """The subclass of a processor class that lets a tagged module's attention pass through sage_patch."""
    original_call = cls.__call__

    # diffusers filters keyword arguments by the signature of the call, and reads class names.
    @functools.wraps(original_call)
    def call(self: Any, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tag = attn.__dict__.get(TAG)
        if tag is None:
            return original_call(self, attn, *args, **kwargs)
        with _Intercept(tag):
            return original_call(self, attn, *args, **kwargs)

    def reduce(self: Any, protocol: int) -> Any:
        return _rebuild, (cls, self.__dict__)

    body = {"__call__": call, "__reduce_ex__": reduce, "_sage_patch_original": cls, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**body, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _rebuild(cls: type, state: dict[str, Any]) -> Any:
    """A copied or unpickled processor is an intercepting one again."""
    processor: Any = object.__new__(intercepting(cls))  # type: ignore[arg-type]
    processor.__dict__.update(state)
    return processor


class _Intercept(TorchFunctionMode):
    """While one processor runs: scaled_dot_product_attention goes through the tag's recipe, all else is untouched."""

    def __init__(self, tag: SiteTag):
        super().__init__()
        self.tag = tag

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _sdpa(self.tag, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _sdpa(
    tag: SiteTag,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """SDPA's signature and meaning, causal aligned to the first key; tensors [B, H, tokens, D]."""
    query, key, value = unify(query, key, value)
    mask = attn_mask[(None,) * (4 - attn_mask.dim())] if attn_mask is not None else None
    options = Options(
        attn_mask=mask,
        scale=scale,
        right=0 if is_causal else -1,
        top_left=is_causal and query.shape[2] != key.shape[2],
        dropout_p=dropout_p,
        out_layout="NHD",  # what processors transpose to next
    )
    site = tag.group if torch.compiler.is_compiling() else tag.key
    call = describe(query, key, value, options)
    recipe, reason = choose(tag.recipe, call, tag.limits, tag.on_unsupported, tag.exact_reason, site)
    return attend(query, key, value, options, call, recipe, reason, site)[0]


def _describe(full_name: str, name: str, module: nn.Module, modules: dict[str, nn.Module]) -> AttentionSite:
    stack, index, depth = place_of(name, modules)
    heads = getattr(module, "heads", None)
    heads = heads if isinstance(heads, int) else None
    inner = getattr(module, "inner_dim", None)
    head_dim = inner // heads if isinstance(inner, int) and heads else None
    kv_dim = getattr(module, "inner_kv_dim", None)
    kv_heads = kv_dim // head_dim if isinstance(kv_dim, int) and head_dim else heads
    last = name.rsplit(".", 1)[-1]
    cross = bool(getattr(module, "is_cross_attention", False)) or getattr(module, "cross_attention_dim_head", None)
    if last == "attn2" and stack:
        cross = cross or not getattr(module, "is_self_attention", False)
    joint = getattr(module, "added_kv_proj_dim", None) is not None and last != "attn2"
    return AttentionSite(
        name=full_name,
        stack=full_name[: len(full_name) - len(name)] + stack if stack else "",
        index=index,
        depth=depth,
        role="joint" if joint else "cross" if cross else "self",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )
