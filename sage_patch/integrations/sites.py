"""Find the attention sites of any nn.Module.

A site is a module whose class looks its attention function up in transformers' registry ("routed"), or one whose own
code, or whose processor's, calls attention in a way that can be exchanged (see intercept.py). Modules are recognised by
duck typing and by their source, never by a list of model names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from sage_patch.integrations import diffusers
from sage_patch.integrations.intercept import carriers_of
from sage_patch.integrations.rebind import package_of
from sage_patch.integrations.source import is_routed
from sage_patch.integrations.tags import TAG
from sage_patch.policy import AttentionSite, Role

# What wrappers put into the names of the modules inside them: torch.compile of a block, FSDP, checkpointing.
_WRAPPER_NAMES = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@dataclass(frozen=True)
class Site:
    """An attention site and its module. carriers: the objects that get an intercepting class; none if it is routed."""

    site: AttentionSite
    module: nn.Module
    carriers: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return self.site.name

    @property
    def is_routed(self) -> bool:
        return not self.carriers


def find_sites(model: nn.Module, prefix: str = "") -> list[Site]:
    """Every attention site of a model that can be reached, in module order; names begin with `prefix`."""
    modules = plain_modules(model)
    found = []
    for name, module in modules.items():
        routed = is_routed(type(module))  # type: ignore[arg-type]
        carriers = () if routed else tuple(carriers_of(module))
        if routed or carriers:
            found.append(Site(_describe(prefix, name, module, modules, routed), module, carriers))
    return found


def plain_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by the names that they have without wrappers."""
    return {plain_name(name): module for name, module in unwrapped(model).named_modules()}


def plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside adapters (PEFT) and wrappers that spread it over devices, so that names are the model's own."""
    while True:
        base = getattr(model, "get_base_model", None)
        spreads = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
        inner: Any = base() if callable(base) else model.module if spreads else model
        if inner is model:
            return model
        model = inner


def tagged_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of every site of a patched model."""
    return ((plain_name(name), module) for name, module in model.named_modules() if TAG in module.__dict__)


def place_of(name: str, modules: dict[str, nn.Module]) -> tuple[str, int | None, int | None]:
    """(block list, index in it, number of blocks): the outermost numbered container the site sits in."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            stack = ".".join(parts[:i])
            container = modules.get(stack)
            depth = len(container) if isinstance(container, (nn.ModuleList, nn.Sequential)) else None
            return stack, int(part), depth
    return "", None, None


def _describe(prefix: str, name: str, module: nn.Module, modules: dict[str, nn.Module], routed: bool) -> AttentionSite:
    stack, index, depth = place_of(name, modules)
    of_diffusers = not routed and package_of(type(module)) == "diffusers"
    heads, kv_heads, head_dim = diffusers.heads_of(module) if of_diffusers else _heads_of(module)
    return AttentionSite(
        name=prefix + name,
        stack=prefix + stack if stack else "",
        index=index,
        depth=depth,
        role=diffusers.role_of(name.rsplit(".", 1)[-1], module) if of_diffusers else _role(name, module, routed),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )


def _heads_of(module: nn.Module) -> tuple[int | None, int | None, int | None]:
    config = _config_of(module)
    heads = _first_int(module, config, ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead"))
    groups = getattr(module, "num_key_value_groups", None)
    kv_heads = _first_int(module, config, ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head"))
    if heads is not None and isinstance(groups, int) and groups > 0 and heads % groups == 0:
        kv_heads = heads // groups
    head_dim = _first_int(module, None, ("head_dim", "qk_head_dim", "attention_head_size", "key_value_proj_dim"))
    if head_dim is None and heads:
        widths = ("embed_dim", "hidden_size", "d_model", "n_embd", "dim", "inner_dim")
        hidden = _first_int(module, config, widths)
        head_dim = hidden // heads if hidden else None
    return heads, kv_heads if kv_heads is not None else heads, head_dim


def _role(name: str, module: nn.Module, routed: bool) -> Role:
    words = f"{name.rsplit('.', 1)[-1]} {type(module).__name__}".lower()
    if "cross" in words or "encoder_attn" in words or "encdecattention" in words.replace("_", ""):
        return "cross"
    if not routed and re.search(r"joint|double|mmdit|mmattn", words):
        return "joint"  # text and picture attend to each other
    return "cross" if getattr(module, "is_cross_attention", False) is True else "self"


def _config_of(module: nn.Module) -> object:
    """The configuration of the module's own layer, where those of a model's layers differ."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    if config is None or not getattr(config, "is_heterogeneous", False):
        return config
    return config.per_layer_config[layer] if isinstance(layer, int) else None


def _first_int(module: nn.Module, config: object, names: tuple[str, ...]) -> int | None:
    for owner in (module, config):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None
