"""What is particular to diffusers: which parts of a pipeline denoise, what their attention modules are, and what runs
in place of diffusers' own dispatcher while a model is patched.

While a model is patched, a backend chosen through diffusers' set_attention_backend has no say: the recipe has. It is
in force again after revert(). What only the dispatcher understands (context parallelism, flex block masks, arguments
of its own) goes to the dispatcher untouched and is counted as exact with its reason.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from sage_patch.integrations.context_parallel import attend_split, can_split
from sage_patch.integrations.sdpa import RUNNING, leave, sdpa
from sage_patch.policy import Role

# Parts of a pipeline that denoise, by name or by where their class lives. Autoencoders and encoders are left alone.
DENOISERS = ("transformer", "transformer_2", "unet", "prior", "decoder", "controlnet")
_DENOISER_PACKAGES = tuple(f"diffusers.models.{kind}." for kind in ("transformers", "unets", "controlnets"))


def denoisers(pipeline: Any) -> dict[str, nn.Module]:
    """The denoising models of a diffusers pipeline by component name; empty if this is not a pipeline."""
    components = getattr(pipeline, "components", None)
    if not isinstance(components, dict):
        return {}
    found: dict[str, nn.Module] = {}
    for name, part in components.items():
        if not isinstance(part, nn.Module) or not _runs(part) or any(part is other for other in found.values()):
            continue
        if name in DENOISERS or (type(part).__module__ + ".").startswith(_DENOISER_PACKAGES):
            found[name] = part
    return found


def scheduler_for(pipeline: Any, denoiser: str) -> str:
    """The component name of the scheduler whose steps a denoiser runs in: the one that shares the beginning of its name
    (prior_scheduler of prior_prior), else "scheduler"; "" if there is none."""
    names = [n for n, part in pipeline.components.items() if n.endswith("scheduler") and part is not None]
    own = [n for n in names if f"{denoiser}_".startswith(n.removesuffix("scheduler")) and n != "scheduler"]
    return max(own, key=len, default="scheduler" if "scheduler" in names else "")


def is_diffusers_model(model: nn.Module) -> bool:
    return any(base.__module__.startswith("diffusers.") for base in type(model).__mro__)


def _runs(part: nn.Module) -> bool:
    """Whether a component computes something. A container of weights for others, as MotionAdapter, has an empty
    forward, which names nothing that it could call."""
    code = getattr(type(part).forward, "__code__", None)
    return code is None or bool(code.co_names)


def heads_of(module: nn.Module) -> tuple[int | None, int | None, int | None]:
    """(query heads, KV heads, head_dim) of an attention module of diffusers, None where it does not say."""
    heads = getattr(module, "heads", None)
    heads = heads if isinstance(heads, int) else None
    inner = getattr(module, "inner_dim", None)
    head_dim = inner // heads if isinstance(inner, int) and heads else None
    kv_dim = getattr(module, "inner_kv_dim", None)
    kv_heads = kv_dim // head_dim if isinstance(kv_dim, int) and head_dim else heads
    return heads, kv_heads, head_dim


def role_of(last: str, module: nn.Module) -> Role:
    """By the last part of the module's name where it says so, then by what the module says of itself."""
    if "self" in last:
        return "self"
    if "cross" in last or "_to_" in last:  # audio_to_video_attn
        return "cross"
    second = last.endswith("attn2")
    extra_keys = (getattr(module, name, None) for name in ("added_kv_proj_dim", "add_k_proj"))
    if not second and any(keys is not None for keys in extra_keys):
        return "joint"
    said = getattr(module, "is_cross_attention", None)
    return "cross" if (second if said is None else said) else "self"


def dispatchers() -> dict[Callable, Callable]:
    """What patched classes call instead of diffusers' dispatcher; nothing where diffusers was never imported."""
    module = sys.modules.get("diffusers.models.attention_dispatch")
    return {module.dispatch_attention_fn: _dispatcher(module.dispatch_attention_fn)} if module is not None else {}


def _dispatcher(original: Callable) -> Callable:
    """What runs in place of diffusers' dispatch_attention_fn; tensors [B, tokens, H, D], also the output."""

    @functools.wraps(original)
    def dispatch(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        attention_kwargs: dict[str, Any] | None = None,
        *,
        backend: Any = None,
        parallel_config: Any = None,
    ) -> Tensor:
        def untouched() -> Tensor:
            return original(  # type: ignore[no-any-return]
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, attention_kwargs,
                backend=backend, parallel_config=parallel_config,
            )  # fmt: skip

        tag = RUNNING.tag
        reason = ""
        if attention_kwargs:
            reason = f"argument_{next(iter(attention_kwargs))}"
        elif attn_mask is not None and not isinstance(attn_mask, Tensor):
            reason = "mask_block"
        if tag is None or reason:
            leave(tag, reason)
            return untouched()
        mask = attn_mask
        if mask is not None and tuple(mask.shape) == (query.shape[0], key.shape[1]):
            mask = mask[:, None, None, :]  # the dispatcher's own reading of a mask [B, kv_len]
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if parallel_config is None:
            return sdpa(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)
        split = parallel_config.context_parallel_config
        if is_causal or not can_split(split, q, k, v, mask, enable_gqa):
            leave(tag, "context_parallel")
            return untouched()
        out = attend_split(tag, split, q, k, v, mask, dropout_p, scale)
        return untouched() if out is None else out.transpose(1, 2)

    return dispatch
