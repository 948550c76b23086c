"""Reach the attention of diffusers models: every processor, whether or not it goes through diffusers' dispatcher.

A patched processor keeps its object and its name; its class becomes a subclass that runs the original code with two
functions replaced (see intercept.py): torch's scaled_dot_product_attention and diffusers' dispatch_attention_fn.
Nothing global is touched, no processor is copied, and taking the subclass away restores exactly what was there. A
module of diffusers that calls either function in its own forward is treated the same way.

While a model is patched, a backend chosen through diffusers' set_attention_backend has no say: the recipe has. It is
in force again after revert(). What only the dispatcher understands (context parallelism, flex block masks, arguments
of its own) goes to the dispatcher untouched and is counted as exact with its reason.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_patch.dispatch import Options, UnsupportedCall, attend, choose, describe, tick, unify
from sage_patch.integrations.float_masks import with_bool_mask
from sage_patch.integrations.intercept import rebound_methods
from sage_patch.integrations.sites import TAG, SiteTag, place_of
from sage_patch.kernels.torch_private import function_modes, torch_functions_in_force
from sage_patch.policy import AttentionSite, Role

# Parts of a pipeline that denoise, by name or by where their class lives. Autoencoders and encoders are left alone.
DENOISERS = ("transformer", "transformer_2", "unet", "prior", "decoder", "controlnet")
_DENOISER_PACKAGES = tuple(f"diffusers.models.{kind}." for kind in ("transformers", "unets", "controlnets"))


class _Running(threading.local):
    """The site whose processor runs in this thread. Set for every thread at once: compiled code guards on its being."""

    def __init__(self) -> None:
        self.tag: SiteTag | None = None


_RUNNING = _Running()


def denoisers(pipeline: Any) -> dict[str, nn.Module]:
    """The denoising models of a diffusers pipeline by component name; empty if this is not a pipeline."""
    components = getattr(pipeline, "components", None)
    if not isinstance(components, dict):
        return {}
    found: dict[str, nn.Module] = {}
    for name, part in components.items():
        denoises = name in DENOISERS or (type(part).__module__ + ".").startswith(_DENOISER_PACKAGES)
        if isinstance(part, nn.Module) and denoises and not any(part is other for other in found.values()):
            found[name] = part
    return found


def find_processor_sites(model: nn.Module, prefix: str = "") -> list[tuple[AttentionSite, nn.Module]]:
    """Every module of a diffusers model whose attention can be reached, in module order."""
    modules = dict(model.named_modules())
    return [
        (_describe(prefix + name, name, module, modules), module)
        for name, module in modules.items()
        if carrier_of(module) is not None
    ]


def unreached_modules(model: nn.Module) -> list[tuple[str, str]]:
    """(name, class) of what looks like attention in a diffusers model, but is no site, nor around or inside one.

    Softmax written out, linear attention, torch's MultiheadAttention, decorated processors. Told by class names, and
    only the innermost are listed.
    """
    modules = list(model.named_modules())
    sites = [name for name, module in modules if carrier_of(module) is not None]
    found: list[tuple[str, str]] = []
    for name, module in reversed(modules):
        class_name = type(module).__name__
        attends = re.search(r"Attn|Attention", class_name) and not re.search(r"Block|Mlp|Model$|Adapter", class_name)
        if not attends and not callable(getattr(module, "processor", None)):
            continue
        if any(site == name or _inside(site, name) or _inside(name, site) for site in sites):
            continue
        if not any(_inside(inner, name) for inner, _ in found):
            found.append((name, class_name))
    return found[::-1]


def is_diffusers_model(model: nn.Module) -> bool:
    return any(base.__module__.startswith("diffusers.") for base in type(model).__mro__)


def _inside(inner: str, outer: str) -> bool:
    return not outer or inner.startswith(outer + ".")


def carrier_of(module: nn.Module) -> Any:
    """The object whose class computes a module's attention: its processor, or a diffusers module itself; or None."""
    processor = getattr(module, "processor", None)
    if callable(processor):
        return processor if _reached(type(processor)) else None
    own = type(module).__module__.startswith("diffusers.") and not _is_processor_class(type(module))
    return module if own and _reached(type(module)) else None


def _is_processor_class(cls: type) -> bool:
    """Whether a class is called as processor(attn, ...), as those with weights of their own (IP-Adapter) are too."""
    return not issubclass(cls, nn.Module) or cls.__call__ is not nn.Module.__call__


def patch_processor(processor: Any) -> None:
    """Give a site's carrier its intercepting class."""
    processor.__class__ = intercepting(type(processor))


def unpatch_processor(processor: Any) -> None:
    """Give a carrier back the class it had; nothing happens to one that is not patched."""
    if is_patched(processor):
        processor.__class__ = type(processor)._sage_patch_original


def is_patched(processor: Any) -> bool:
    return hasattr(type(processor), "_sage_patch_original")


def _replacements() -> dict[Any, Callable]:
    """What a patched processor calls instead of what. Where diffusers was never imported, no model is of diffusers."""
    found: dict[Any, Callable] = {F.scaled_dot_product_attention: _sdpa}
    dispatcher = sys.modules.get("diffusers.models.attention_dispatch")
    if dispatcher is not None:
        found[dispatcher.dispatch_attention_fn] = _dispatcher(dispatcher.dispatch_attention_fn)
    return found


@functools.cache
def _methods(cls: type) -> dict[str, Any]:
    return rebound_methods(cls, _replacements())


def _reached(cls: type) -> bool:
    """Whether a class calls attention in a way that can be replaced; a patched class does."""
    return hasattr(cls, "_sage_patch_original") or bool(_methods(cls))


def intercepting(cls: type) -> type:
    """The subclass of a processor class, or of a module class, whose attention passes through sage_patch."""
    return cls if hasattr(cls, "_sage_patch_original") else _intercepting(cls)


@functools.cache
def _intercepting(cls: type) -> type:
    methods = _methods(cls)
    is_processor = _is_processor_class(cls)
    entry = "__call__" if is_processor else "forward"
    inner = methods.get(entry, getattr(cls, entry))

    # diffusers filters keyword arguments by the signature of the call.
    @functools.wraps(inner)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        site = args[0] if is_processor else self
        outer, tag = _RUNNING.tag, site.__dict__.get(TAG)
        if tag is not None and tag.refusal:
            raise UnsupportedCall(tag.refusal)
        _RUNNING.tag = tag
        try:
            return inner(self, *args, **kwargs)
        finally:
            _RUNNING.tag = outer

    def reduce(self: Any, protocol: int) -> Any:
        return _rebuild, (cls, self.__dict__)

    body = {
        **methods,
        entry: call,
        "__reduce_ex__": reduce,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_sage_patch_original": cls,
    }
    return _alias_type(type(cls))(cls.__name__, (cls,), body)


@functools.cache
def _alias_type(metaclass: type) -> type:
    """The type of intercepting classes: each equals the class it stands for, so that the tuples and registries in which
    diffusers looks processor classes up (for PAG, layer skipping, its defaults) still find it."""

    def equal(self: Any, other: Any) -> bool:
        return other is self or other is self._sage_patch_original

    return type("Alias", (metaclass,), {"__eq__": equal, "__hash__": lambda self: hash(self._sage_patch_original)})


def _rebuild(cls: type, state: dict[str, Any]) -> Any:
    """A copied or unpickled processor is an intercepting one again."""
    processor: Any = object.__new__(intercepting(cls))
    processor.__dict__.update(state)
    return processor


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
        tag = _RUNNING.tag
        reason = ""
        if parallel_config is not None:
            reason = "context_parallel"
        elif attention_kwargs:
            reason = f"argument_{next(iter(attention_kwargs))}"
        elif attn_mask is not None and not isinstance(attn_mask, Tensor):
            reason = "mask_block"
        if tag is None or reason:
            _leave(tag, reason)
            return original(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, attention_kwargs,
                backend=backend, parallel_config=parallel_config,
            )  # fmt: skip
        if attn_mask is not None and tuple(attn_mask.shape) == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None, :]  # the dispatcher's own reading of a mask [B, kv_len]
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)

    return dispatch


def _leave(tag: SiteTag | None, reason: str) -> None:
    """Count a call that goes to its original function; raises UnsupportedCall where the policy forbids that."""
    if tag is None:
        return
    site = tag.group if torch.compiler.is_compiling() else tag.key
    if tag.on_unsupported == "error" and not tag.recipe.is_exact:
        raise UnsupportedCall(
            f"recipe {tag.recipe.name!r} cannot run this call at {site.partition('/')[2]}: {reason}; "
            'use on_unsupported "exact", or the recipe "exact" here'
        )
    tick(reason, site)


def _sdpa(
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
    tag = _RUNNING.tag
    reason = "rank" if query.dim() != 4 else "function_mode" if _is_watched() else ""
    if tag is None or reason:
        _leave(tag, reason)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
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
    quick, call = with_bool_mask(options, call, tag.recipe, tag.limits)
    recipe, reason = choose(tag.recipe, call, tag.limits, tag.on_unsupported, tag.exact_reason, site)
    if not recipe.is_exact:
        options = quick
    return attend(query, key, value, options, call, recipe, reason, site)[0]


def _is_watched() -> bool:
    """Whether a function mode of diffusers waits for this very call to change its result, as skip_attention_scores
    does. It would not see ours."""
    if torch.compiler.is_compiling() or not torch_functions_in_force():
        return False
    return any(type(mode).__module__.startswith("diffusers.") for mode in function_modes())


def _describe(full_name: str, name: str, module: nn.Module, modules: dict[str, nn.Module]) -> AttentionSite:
    stack, index, depth = place_of(name, modules)
    heads = getattr(module, "heads", None)
    heads = heads if isinstance(heads, int) else None
    inner = getattr(module, "inner_dim", None)
    head_dim = inner // heads if isinstance(inner, int) and heads else None
    kv_dim = getattr(module, "inner_kv_dim", None)
    kv_heads = kv_dim // head_dim if isinstance(kv_dim, int) and head_dim else heads
    return AttentionSite(
        name=full_name,
        stack=full_name[: len(full_name) - len(name)] + stack if stack else "",
        index=index,
        depth=depth,
        role=_role(name.rsplit(".", 1)[-1], module),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )


def _role(last: str, module: nn.Module) -> Role:
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
