"""The implementation names that the configurations of a patched transformers model get.

transformers looks up by that name which attention function a module calls and which function builds its masks, and
some modules also ask whether it contains "flash".
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from sage_patch.integrations.source import (
    STRICTEST_LAST,
    MaskStyle,
    asks_for_flash,
    has_own_attention,
    modeling_file_of,
    packs_under_flash,
    style_for,
)
from sage_patch.policy import AttentionSite

NAME = "sage2"
# The same under the other mask styles: chosen by apply() where a model needs its masks written out.
NAMES: dict[MaskStyle, str] = {"implicit": NAME, "bool": "sage2_bool_masks", "float": "sage2_float_masks"}
# The same once more, for configurations of modules that attend to many images or windows: one call with their lengths
# under a name that contains "flash", one call for each under any other. Set by apply() only, and only where that is
# all that such a name changes.
PACKED_NAMES: dict[MaskStyle, str] = {style: name + "_flash" for style, name in NAMES.items()}
# And for the length of generate_batch(), which puts "paged|" before the name that it finds.
PAGED_NAMES = tuple("paged|" + name for name in NAMES.values())
OUR_NAMES = frozenset([*NAMES.values(), *PACKED_NAMES.values(), *PAGED_NAMES])


def mask_styles(found: list[tuple[AttentionSite, nn.Module]]) -> dict[int, MaskStyle]:
    """The mask style of every configuration object that sites hold, by id; under 0, the strictest of them all."""
    causal: dict[int, bool] = {}
    files: dict[int, str] = {}
    for _, module in found:
        key = id(getattr(module, "config", None))
        causal[key] = causal.get(key, True) and getattr(module, "is_causal", False) is True
        files[key] = type(module).__module__
    styles = {key: style_for(files[key], causal[key]) for key in causal}
    strictest = max(styles.values(), key=STRICTEST_LAST.index)
    return {**styles, 0: strictest}


def config_copies(model: nn.Module, styles: dict[int, MaskStyle]) -> list[tuple[nn.Module, str, Any, Any]]:
    """(module, attribute, original config, patched copy) for every configuration object the modules hold.

    A submodel that attends in its own code keeps its implementation: its masks must not change type.
    """
    from transformers import PretrainedConfig

    memo: dict[int, Any] = {}
    found = []
    packed = _packed_configs(model)
    for module in model.modules():
        for attribute, value in list(module.__dict__.items()):
            if isinstance(value, PretrainedConfig):
                found.append((module, attribute, value, copy.deepcopy(value, memo)))
    for _, _, original, copied in found:
        _set_implementation(original, copied, styles, packed)
    return found


def give_names_back(model: nn.Module, originals: dict[int, str], default: str) -> None:
    """Undo the names on a model whose configurations are copies already: a copy of a patched model. originals: the
    implementation before apply() by the id of a configuration that sites hold; default: of the others."""
    from transformers import PretrainedConfig

    def visit(config: Any) -> None:
        if config._attn_implementation_internal in OUR_NAMES:
            config._attn_implementation_internal = originals.get(id(config), default)
        for key in getattr(config, "sub_configs", {}):
            if getattr(config, key, None) is not None:
                visit(getattr(config, key))

    for module in model.modules():
        for value in module.__dict__.values():
            if isinstance(value, PretrainedConfig):
                visit(value)


def _packed_configs(model: nn.Module) -> set[int]:
    """Ids of the configurations all of whose modules that ask for "flash" only pack their calls then."""
    asking: dict[int, list[type]] = {}
    for module in model.modules():
        if asks_for_flash(type(module)):  # type: ignore[arg-type]
            asking.setdefault(id(getattr(module, "config", None)), []).append(type(module))
    return {key for key, classes in asking.items() if all(map(packs_under_flash, classes))}


def _set_implementation(original: Any, copied: Any, styles: dict[int, MaskStyle], packed: set[int]) -> None:
    """Set our name on the copy and on its sub-configurations. One without sites of its own may still build masks
    for those of others (wrapper models do): it takes the strictest style."""
    if not has_own_attention(modeling_file_of(type(original))):
        names = PACKED_NAMES if id(original) in packed else NAMES
        copied._attn_implementation_internal = names[styles.get(id(original), styles[0])]
    for key in getattr(original, "sub_configs", {}):
        sub = getattr(original, key, None)
        if sub is not None:
            _set_implementation(sub, getattr(copied, key), styles, packed)
