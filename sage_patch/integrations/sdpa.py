"""What runs in place of F.scaled_dot_product_attention while a site is patched: the same, under the site's recipe."""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_patch.dispatch import Options, UnsupportedCall, attend, choose, describe, tick, unify
from sage_patch.integrations.float_masks import with_bool_mask
from sage_patch.integrations.tags import SiteTag
from sage_patch.kernels.torch_private import function_modes, torch_functions_in_force


class _Running(threading.local):
    """The site that runs in this thread. Set for every thread at once: compiled code guards on its being."""

    def __init__(self) -> None:
        self.tag: SiteTag | None = None
        self.training = False  # the flag of the module whose site it is


RUNNING = _Running()


def leave(tag: SiteTag | None, reason: str) -> None:
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


def sdpa(
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
    tag = RUNNING.tag
    reason = _beyond(query, key, value, attn_mask, is_causal, enable_gqa)
    if tag is None or reason:
        leave(tag, reason)
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
        guard_rows=False,
        training=RUNNING.training,
        exact_backend=tag.exact_backend,
    )
    site = tag.group if torch.compiler.is_compiling() else tag.key
    call = describe(query, key, value, options)
    quick, call = with_bool_mask(options, call, tag.recipe, tag.limits)
    recipe, reason = choose(tag.recipe, call, tag.limits, tag.on_unsupported, tag.exact_reason, site)
    if not recipe.is_exact:
        options = quick
    return attend(query, key, value, options, call, recipe, reason, site)[0]


def _beyond(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> str:
    """Why torch's own function must take this call, "" if it need not: forms that ours has no word for, and forms that
    torch refuses, so that its error is what the model sees."""
    if query.is_nested or key.is_nested or value.is_nested:
        return "nested"
    if not query.dim() == key.dim() == value.dim() == 4 or (attn_mask is not None and attn_mask.dim() > 4):
        return "rank"
    if is_causal and attn_mask is not None:
        return "causal_mask"
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
        return "broadcast"
    if query.shape[1] != key.shape[1] and not enable_gqa:
        return "broadcast"
    return "function_mode" if _is_watched() else ""


def _is_watched() -> bool:
    """Whether a function mode of diffusers waits for this very call to change its result, as skip_attention_scores
    does. It would not see ours."""
    if torch.compiler.is_compiling() or not torch_functions_in_force():
        return False
    return any(type(mode).__module__.startswith("diffusers.") for mode in function_modes())
