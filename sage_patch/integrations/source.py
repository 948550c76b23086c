"""What the source of a model or pipeline says: does it use transformers' attention registry, which masks does it need,
whose scheduler does it step.

The libraries have no flag for these questions, and transformers answers the first for itself by reading source too.
Kept apart from sites.py, which looks at live modules.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Literal

from torch import nn

# Which mask a model must be given so that "no mask" cannot mean two things:
#   implicit: as "sdpa": none where plain causality is all there is; the module's is_causal says so
#   bool:     always written out; no mask means that nothing is hidden
#   float:    as "eager": written out and additive, for files that were never made for boolean masks
MaskStyle = Literal["implicit", "bool", "float"]
STRICTEST_LAST: tuple[MaskStyle, ...] = ("implicit", "bool", "float")


@functools.cache
def is_routed(cls: type) -> bool:
    """Whether the code of a module class takes a function from transformers' attention registry."""
    for base in cls.__mro__:
        if base is nn.Module:
            break
        if hasattr(base, "config_class") and not base.__name__.endswith("Attention"):
            continue  # whole models, which may mention the registry for other reasons
        if "ALL_ATTENTION_FUNCTIONS" in _source(base):
            return True
    return False


@functools.cache
def asks_for_flash(cls: type) -> bool:
    """Whether the code of a module class behaves otherwise under an implementation whose name contains "flash"."""
    return bool(_asking(cls))


@functools.cache
def packs_under_flash(cls: type) -> bool:
    """Whether that is all it does: one call for all images or windows with the lengths beside it, not one call each."""
    sources = _asking(cls)
    once = all(source.count("is_flash_attention_requested") == 1 for source in sources)
    return bool(sources) and once and all("cu_seq_lens_q=" in source for source in sources)


def _asking(cls: type) -> list[str]:
    """The sources of a class and its bases that ask; the base of all models asks only when it is loaded."""
    sources = [_source(base) for base in cls.__mro__ if base.__module__ != "transformers.modeling_utils"]
    return [source for source in sources if "is_flash_attention_requested" in source]


@functools.cache
def has_own_attention(modeling_file: str) -> bool:
    """transformers' own test of a modeling file: it defines attention classes and never asks the registry."""
    source = _module_source(modeling_file)
    defines = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE) is not None
    asks = re.search(r"ALL_ATTENTION_FUNCTIONS(\.get_interface\(|\[)", source)  # the second until transformers 5
    return defines and asks is None


@functools.cache
def supports_bool_masks(modeling_file: str) -> bool:
    """Whether the file's models take "sdpa", that is, boolean masks; unknown files are believed to."""
    source = _module_source(modeling_file)
    return not source or "_supports_sdpa = True" in source


@functools.cache
def leaves_masks_alone(modeling_file: str) -> bool:
    """A file without "sdpa" whose masks still only travel to the attention function: sinks alone kept it out."""
    source = _module_source(modeling_file)
    rebuilds = re.search(r"attention_mask\.dtype|cat\(\[attention_mask|pad\(attention_mask", source)
    return "_supports_attention_backend = True" in source and rebuilds is None


@functools.cache
def mask_style(modeling_file: str) -> MaskStyle:
    """The style that is safe for every module of a file, when only the file is known."""
    source = _module_source(modeling_file)
    if not source:
        return "implicit"
    assigned = re.findall(r"self\.is_causal = (.*)", source)
    causal = bool(assigned) and all(a.startswith(("True", "not getattr(")) for a in assigned)
    return style_for(modeling_file, causal)


@functools.cache
def builds_causal_masks_by_name(modeling_file: str) -> bool:
    """Whether the file asks transformers for its causal masks; only such a mask may be left out for being plain."""
    source = _module_source(modeling_file)
    return not source or re.search(r"create_(causal|sliding_window_causal|chunked_causal)_mask\b", source) is not None


def runs_on_scheduler_copies(pipeline_type: type) -> bool:
    """Whether a pipeline steps only deep copies of its scheduler, never the scheduler itself."""
    source = "".join(_source(base) for base in pipeline_type.__mro__)
    return "deepcopy(self.scheduler)" in source and "self.scheduler.step(" not in source


def style_for(modeling_file: str, always_causal: bool) -> MaskStyle:
    """The style for modules of a file that are (or are not) all causal whenever they get no mask."""
    always_causal = always_causal and builds_causal_masks_by_name(modeling_file)
    if supports_bool_masks(modeling_file):
        return "implicit" if always_causal else "bool"
    return "implicit" if always_causal and leaves_masks_alone(modeling_file) else "float"


def modeling_file_of(config_type: type) -> str:
    """The modeling module that stands beside a configuration class."""
    return config_type.__module__.replace(".configuration_", ".modeling_")


def _module_source(name: str) -> str:
    module = sys.modules.get(name)
    return _source(module) if module is not None and ".modeling_" in name else ""


def _source(thing: object) -> str:
    try:
        return inspect.getsource(thing)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""
