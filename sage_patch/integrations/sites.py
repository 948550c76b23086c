"""Find the attention sites of any nn.Module, and the tag that a patched site carries.

A site of a transformers model is a module whose class looks its attention function up in transformers' registry.
Modules are recognised by duck typing and by their source, never by a list of model names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from sage_patch.integrations.source import MaskStyle, is_routed
from sage_patch.policy import AttentionSite
from sage_patch.recipes import Limits, Recipe

TAG = "_sage_patch"  # attribute of a patched site module
FLAG_PREFIX = "flag/"  # counter keys of calls that come from attn_implementation="sage2" without apply()
COPY_PREFIX = "copy/"  # counter keys of deep copies of a patched model
_COPY_REFUSAL = (
    "the recipe of {!r} depends on the denoising step, which a copy of a patched model is not told; "
    "copy the model before apply(), then apply to the copy"
)


@dataclass(frozen=True)
class SiteTag:
    """What the attention function needs to know about the module that calls it.

    key: counter key of this site; group: counter key of its whole model, used inside compiled graphs, where a
    string per layer would make every layer a graph of its own. original: the implementation before apply().
    style: what the masks of this module's model look like, and so what no mask means. refusal: why the site cannot run
    now, "" if it can. by_step: the recipe holds for the denoising step that is running only.
    """

    key: str
    group: str
    recipe: Recipe
    on_unsupported: Literal["exact", "error"]
    limits: Limits
    original: str
    style: MaskStyle
    exact_reason: str = "policy"
    refusal: str = ""
    by_step: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or unpickled model keeps its plan and counts apart from the original: it has no handle, and so
        nobody who tells it the denoising step."""
        site = self.key.partition("/")[2]
        refusal = _COPY_REFUSAL.format(site) if self.by_step else self.refusal
        rest = (self.recipe, self.on_unsupported, self.limits, self.original, self.style, self.exact_reason)
        return SiteTag, (COPY_PREFIX + site, COPY_PREFIX + "*", *rest, refusal, self.by_step)


def find_sites(model: nn.Module) -> list[tuple[AttentionSite, nn.Module]]:
    """Every module of `model` that asks transformers' registry for its attention function, in module order."""
    modules = dict(model.named_modules())
    return [(_describe(name, module, modules), module) for name, module in modules.items() if is_routed(type(module))]  # type: ignore[arg-type]


def own_attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that look like attention but do not go through the registry, nor hold one that does."""
    found = []
    for name, module in model.named_modules():
        if not re.search(r"Attention", type(module).__name__) or not any(True for _ in module.parameters()):
            continue
        if not any(is_routed(type(m)) for m in module.modules()):  # type: ignore[arg-type]
            found.append((name, module))
    return found


def _describe(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> AttentionSite:
    stack, index, depth = place_of(name, modules)
    config = _config_of(module)
    heads = _first_int(module, config, ("num_heads", "num_attention_heads", "n_heads"))
    groups = getattr(module, "num_key_value_groups", None)
    kv_heads = _first_int(module, config, ("num_key_value_heads", "num_kv_heads"))
    if heads is not None and isinstance(groups, int) and groups > 0 and heads % groups == 0:
        kv_heads = heads // groups
    head_dim = _first_int(module, None, ("head_dim", "qk_head_dim", "attention_head_size", "key_value_proj_dim"))
    if head_dim is None and heads:
        hidden = _first_int(module, config, ("embed_dim", "hidden_size", "d_model"))
        head_dim = hidden // heads if hidden else None
    return AttentionSite(
        name=name,
        stack=stack,
        index=index,
        depth=depth,
        role=_role(name, module),
        num_heads=heads,
        num_kv_heads=kv_heads if kv_heads is not None else heads,
        head_dim=head_dim,
    )


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


def _role(name: str, module: nn.Module) -> Literal["self", "cross", "joint"]:
    words = f"{name.rsplit('.', 1)[-1]} {type(module).__name__}".lower()
    if "cross" in words or "encoder_attn" in words or "encdecattention" in words.replace("_", ""):
        return "cross"
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
