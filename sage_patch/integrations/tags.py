"""The tag that a patched attention site carries: what the code that runs in its place needs to know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from sage_patch.integrations.source import MaskStyle
from sage_patch.recipes import ExactBackend, Limits, Recipe

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
    now, "" if it can. by_step: the recipe holds for the denoising step that is running only. by_processor: an object
    that the module holds attends for it. exact_backend: what computes its exact calls. handle: what apply() returned,
    kept here for as long as the site is patched.
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
    by_processor: bool = False
    exact_backend: ExactBackend = "torch"
    handle: Any = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or unpickled model keeps its plan and counts apart from the original: it has no handle, and so
        nobody who tells it the denoising step."""
        site = self.key.partition("/")[2]
        refusal = _COPY_REFUSAL.format(site) if self.by_step else self.refusal
        rest = (self.recipe, self.on_unsupported, self.limits, self.original, self.style, self.exact_reason)
        return SiteTag, (
            COPY_PREFIX + site,
            COPY_PREFIX + "*",
            *rest,
            refusal,
            self.by_step,
            self.by_processor,
            self.exact_backend,
        )
