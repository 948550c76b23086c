"""Other published ways to quantize attention, each as one row of the ablation beside the recipe that it changes.

They are computed for measurement only, in plain float32 on numbers that were rounded: what a kernel of such a method
would form, without its speed. A method is a function of a captured call that gives the errors of its output.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from sage_patch.evaluation.calls import compute
from sage_patch.evaluation.metrics import errors
from sage_patch.kernels import ops
from sage_patch.kernels.plain import visibility_of
from sage_patch.reference.quantize import (
    E4M3_MAX,
    LOG2E,
    hide,
    key_groups,
    quantize_e4m3,
    quantize_int,
    query_groups,
    round_e4m3,
    subtract_mean,
    subtract_significant_mean,
)
from sage_patch.reference.visibility import Visibility

TILE = 128  # keys that are attended at once, as in the kernels
Method = Callable[[ops.ObservedCall], dict[str, float]]


def move_scales(call: ops.ObservedCall, recipe: str) -> dict[str, float]:
    """SmoothQuant (arXiv 2211.10438, strength 1/2): channel c of K, less its mean, is divided by
    sqrt(max |K_c| / max |Q_c|) of its head and Q multiplied by it, so that both have the same range."""
    k = subtract_mean(call.key, _visibility(call).visible_keys(call.key.shape[1], call.key.device))[0]
    groups = call.query.shape[1] // call.key.shape[1]
    largest = call.query.float().unflatten(1, (-1, groups)).abs().amax((2, 3))[:, :, None]  # of the kv head's queries
    factor = (k.abs().amax(-2, keepdim=True).clamp_min(1e-6) / largest.clamp_min(1e-6)).sqrt()
    moved = call._replace(query=call.query * factor.repeat_interleave(groups, dim=1), key=call.key / factor)
    return errors(compute(moved, recipe), compute(call, "exact"))


def shift_channels(call: ops.ObservedCall, recipe: str) -> dict[str, float]:
    """Outlier Suppression+ (arXiv 2304.09145): K loses the middle of each channel's range instead of its mean. recipe:
    one that does not smooth K."""
    visible = _visibility(call).visible_keys(call.key.shape[1], call.key.device)
    key = call.key.float()
    seen = torch.ones_like(key[..., :1], dtype=torch.bool) if visible is None else visible[..., None]
    low = torch.where(seen, key, math.inf).amin(-2, keepdim=True)
    high = torch.where(seen, key, -math.inf).amax(-2, keepdim=True)
    return errors(compute(call._replace(key=key - (low + high) / 2), recipe), compute(call, "exact"))


def round_weights(call: ops.ObservedCall, to: Literal["int8", "e4m3"], by_tile: bool) -> dict[str, float]:
    """P and V of another type behind the INT8 Q and K of `qk_int8_pv_fp8:rotate=none`.

    to: "int8" is INT-FlashAttention's (arXiv 2409.16997): P times 127 rounded, V with one scale a head. by_tile: each
    row's P of 128 keys is rounded relative to its own largest (block-wise ranges, BAPS), not to the largest so far.
    """
    found = []
    for one in _heads(call):
        scores, v = _scores(one, quantized=True) * LOG2E, _value(one)
        if to == "int8":
            whole = quantize_int(v, 8, torch.zeros(v.shape[2], dtype=torch.int64))
            v = whole.values.float() * whole.scale[..., None]
        else:
            v = _e4m3_values(v)
        tiles = torch.nn.functional.pad(scores, (0, -scores.shape[1] % TILE), value=-math.inf).unflatten(1, (-1, TILE))
        top = tiles.amax(-1).clamp_min(-1e30)
        running = top.cummax(-1).values
        m = top if by_tile else running
        p = torch.exp2(tiles - m[..., None])
        p = torch.round(p * 127) / 127 if to == "int8" else round_e4m3(p * E4M3_MAX) / E4M3_MAX
        p = (p * torch.exp2(m - running[:, -1:])[..., None]).flatten(1)[:, : v.shape[2]]
        found.append(_weighted(p, p.sum(-1, keepdim=True), v[0, 0]))
    return errors(_joined(found, call), compute(call, "exact"))


def softpick(call: ops.ObservedCall) -> dict[str, float]:
    """`qk_int8_pv_fp8` where the softmax is Softpick's (arXiv 2504.20966), max(e^x - 1, 0) / sum |e^x - 1|, which needs
    no sink: against the same function of the exact scores. The models were not trained with it, so the row says what
    rounding does to such weights, not what the models would compute. A query whose scores are all negative gives zero
    exactly, against which any error is infinite."""
    pairs = [
        [_softpick(_scores(one, quantized=q), _value(one), rounded=q) for one in _heads(call)] for q in (True, False)
    ]
    return errors(*(_joined(found, call) for found in pairs))


def _softpick(x: Tensor, v: Tensor, rounded: bool) -> Tensor:
    m = x.amax(-1, keepdim=True).clamp_min(0.0)
    w = torch.where(x.isneginf(), 0.0, torch.exp(x - m) - torch.exp(-m))
    p = w.clamp_min(0.0)
    if rounded:
        p, v = round_e4m3(p * E4M3_MAX) / E4M3_MAX, _e4m3_values(v)
    return _weighted(p, p.sum(-1, keepdim=True) - w.clamp_max(0.0).sum(-1, keepdim=True), v[0, 0])


def _weighted(p: Tensor, total: Tensor, v: Tensor) -> Tensor:
    return torch.where(total > 0, p @ v / total.clamp_min(1e-30), 0.0)


def _e4m3_values(v: Tensor) -> Tensor:
    """V as `qk_int8_pv_fp8` holds it: E4M3 per channel, less the mean where that is large."""
    centred, mean = subtract_significant_mean(v, None)
    values, scale = quantize_e4m3(centred)
    return values * scale + mean


def _visibility(call: ops.ObservedCall) -> Visibility:
    return visibility_of(call.query.shape[2], call.key.shape[2], call.attn_mask, call.left, call.right, call.top_left)


def _heads(call: ops.ObservedCall) -> Iterator[ops.ObservedCall]:
    """The call of each batch item and query head by itself."""
    groups = call.query.shape[1] // call.key.shape[1]
    for b in range(call.query.shape[0]):
        for h in range(call.query.shape[1]):
            kv, mask = slice(h // groups, h // groups + 1), call.attn_mask
            if mask is not None:
                mask = mask[b : b + 1] if mask.shape[0] > 1 else mask
                mask = mask[:, h : h + 1] if mask.shape[1] > 1 else mask
            yield call._replace(
                query=call.query[b : b + 1, h : h + 1],
                key=call.key[b : b + 1, kv],
                value=call.value[b : b + 1, kv],
                attn_mask=mask,
            )


def _value(one: ops.ObservedCall) -> Tensor:
    """V of a call of one head, float32, zero where no row sees it."""
    return hide(one.value.float(), _visibility(one).visible_keys(1, one.value.device))


def _joined(heads: list[Tensor], call: ops.ObservedCall) -> Tensor:
    return torch.stack(heads).unflatten(0, call.query.shape[:2])


def _scores(one: ops.ObservedCall, quantized: bool) -> Tensor:
    """The true scaled scores of a call of one head, [q_len, kv_len], hidden ones -inf; quantized: as INT8 Q and K per
    thread give them, K's mean put back."""
    visibility = _visibility(one)
    k, mean = subtract_mean(one.key, visibility.visible_keys(1, one.key.device))
    q = one.query.float()
    shift = q @ mean.transpose(-1, -2)
    if quantized:
        q_int = quantize_int(q, 8, query_groups(q.shape[2], "thread", "wgmma", q.device))
        k_int = quantize_int(k, 8, key_groups(k.shape[2], "thread", "wgmma", k.device))
        q, k = (x.values.float() * x.scale[..., None] for x in (q_int, k_int))
    scores = ((q @ k.transpose(-1, -2) + shift) * one.scale)[0, 0]
    band = visibility.band(0, scores.shape[0], 0, scores.shape[1], scores.device)
    for seen in (band, None if one.attn_mask is None else one.attn_mask[0, 0]):
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf) if seen.dtype == torch.bool else scores + seen
    return scores


# The method as its paper has it: nothing rotated, exponents as they are; INT4 has no others.
INT4, INT8 = "qk_int4_pv_fp8:rotate=none", "qk_int8_pv_fp8:rotate=none,exp=exact"
METHODS: dict[str, Method] = {
    **{f"{recipe} after SmoothQuant": functools.partial(move_scales, recipe=recipe) for recipe in (INT8, INT4)},
    f"{INT8} after Outlier Suppression+": functools.partial(shift_channels, recipe=f"{INT8},smooth=none"),
    f"{INT4} after Outlier Suppression+": functools.partial(shift_channels, recipe=f"{INT4},smooth=q"),
    "INT8 P and V (INT-FlashAttention)": functools.partial(round_weights, to="int8", by_tile=False),
    "INT8 P and V, ranges of P by tile": functools.partial(round_weights, to="int8", by_tile=True),
    "E4M3 P and V, ranges of P by tile (BAPS)": functools.partial(round_weights, to="e4m3", by_tile=True),
    "qk_int8_pv_fp8 under Softpick": softpick,
}
