"""Added masks that only hide: many models write "may not attend" as a large negative number.

A float mask costs the Hopper kernel more than it saves, a boolean one does not, and which of the two a float mask
really is only its values tell. They are read once a tensor, and only where the answer can matter: on a card whose
kernels would take the call but for its mask. The answer is noted on the tensor, so that the layers that share a mask
read it once a forward.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sage_patch.backends import why_not
from sage_patch.dispatch import Options, mask_kind
from sage_patch.recipes import Call, Limits, Recipe

_NOTE = "_sage_patch_hides"
# exp of such a score is 0 beside any other, in every dtype: what diffusers adds, and what the lowest numbers are below.
_HIDDEN = -1e4


def with_bool_mask(options: Options, call: Call, recipe: Recipe, limits: Limits) -> tuple[Options, Call]:
    """The same call with a boolean mask, where its float mask alone keeps it from running quantized and only hides."""
    if call.mask != "float" or recipe.is_exact or why_not(recipe, call, limits) != "mask_float":
        return options, call
    seen = seen_keys(options.attn_mask)
    if seen is None:
        return options, call
    options = replace(options, attn_mask=seen)
    return options, call._replace(mask=mask_kind(options))


def seen_keys(mask: Tensor | None) -> Tensor | None:
    """The boolean mask (True = seen) that says the same as an added one, or None if there is none.

    None too for masks that are not looked at: one plane for each head (a learned bias, or a copy made for this call
    alone, and reading either would make every layer wait for the device), one that is being differentiated, compiled or
    made in inference mode. A row that hides every key stays with its float mask, under which it attends to them all.
    """
    if mask is None or torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or mask.requires_grad:
        return None
    if mask.is_inference() or not mask.numel() or (mask.shape[1] > 1 and mask.stride(1) != 0):
        return None
    version, seen = getattr(mask, _NOTE, (-1, None))
    if version != mask._version:
        plane = mask[:, :1]
        seen = plane == 0
        only_hides = (seen | (plane <= _HIDDEN)).all() & seen.any(dim=-1).all()
        seen = seen if bool(only_hides) else None
        setattr(mask, _NOTE, (mask._version, seen))
    return seen
