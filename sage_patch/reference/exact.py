"""The exact path: attention without quantization, with the full argument set.

Wherever torch's scaled_dot_product_attention computes the same thing it is used, in the form that leaves the
caller's result bit-equal to an unpatched call. What it cannot express (softcap, sinks, LSE) is computed here in
float32, in blocks of query rows so that memory stays bounded.

It is not transformers' own "sdpa" function, which drops softcap and sinks.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_patch.reference.quantize import hide
from sage_patch.reference.visibility import Visibility

_SCORES_PER_STEP = 1 << 26  # elements of the score matrix held at once by the blocked forms


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    guard_hidden: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """softmax(mask(softcap(scale * Q K^T))) V, differentiable.

    query [B, Hq, q_len, D], key [B, Hkv, kv_len, D], value [B, Hkv, kv_len, Dv]; sinks float [Hq]: one more
    logit per head in the denominator that has no value. Returns (out [B, Hq, q_len, Dv] in query's dtype,
    lse float32 [B, Hq, q_len] natural log of the denominator, or None). A row that sees no key gives 0 and -inf.
    guard_hidden: keys that no row sees are replaced by zeros first, so that NaN in them cannot leak.
    """
    out_dtype = query.dtype
    if not (query.dtype == key.dtype == value.dtype):
        common = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
        query, key, value = query.to(common), key.to(common), value.to(common)
    if guard_hidden and query.shape[-2] and key.shape[-2]:
        seen = visibility.visible_keys(key.shape[1], key.device)
        if seen is not None:
            key, value = hide(key, seen), hide(value, seen)
    if softcap or sinks is not None or return_lse or key.shape[-2] == 0:
        return _blocked(query, key, value, visibility, scale, softcap, sinks, dropout_p, return_lse, out_dtype)
    return _by_sdpa(query, key, value, visibility, scale, dropout_p).to(out_dtype), None


def exact_weights(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention weights themselves, float32 [B, Hq, q_len, kv_len]; sinks take their share and are dropped.
    A row that sees no key has weights of zero."""
    scores = _scores(query, _repeat(key, query), visibility, 0, query.shape[-2], scale, softcap)
    dead = torch.isneginf(scores).all(dim=-1, keepdim=True)
    scores = scores.masked_fill(dead, 0.0)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    return torch.softmax(scores, dim=-1)[..., : key.shape[-2]].masked_fill(dead, 0.0)


def _by_sdpa(
    query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, scale: float, dropout_p: float
) -> Tensor:
    q_len, kv_len = visibility.q_len, visibility.kv_len
    grouped = query.shape[1] != key.shape[1]
    if not visibility.has_band:
        return _sdpa(query, key, value, visibility.attn_mask, False, scale, dropout_p, grouped)
    plain_causal = visibility.attn_mask is None and visibility.right == 0 and visibility.left is None
    if plain_causal and visibility.offset == 0:
        return _sdpa(query, key, value, None, True, scale, dropout_p, grouped)  # torch's own corner
    batch, heads = query.shape[:2]
    mask_rows = visibility.attn_mask.shape[0] * visibility.attn_mask.shape[1] if visibility.attn_mask is not None else 1
    step = max(1, _SCORES_PER_STEP // max(1, kv_len * min(mask_rows, batch * heads)))
    blocks = []
    for row0 in range(0, q_len, step):
        row1 = min(row0 + step, q_len)
        band = visibility.band(row0, row1, 0, kv_len, query.device)
        mask = visibility.mask_tile(row0, row1, 0, kv_len)
        if band is not None:
            if mask is None:
                mask = band
            elif mask.dtype == torch.bool:
                mask = mask & band
            else:
                mask = torch.where(band, mask, float("-inf"))
        blocks.append(_sdpa(query[..., row0:row1, :], key, value, mask, False, scale, dropout_p, grouped))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-2)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    grouped: bool,
) -> Tensor:
    if mask is not None and mask.dtype != torch.bool and mask.dtype != query.dtype:
        mask = mask.to(query.dtype)
    if grouped and mask is not None:  # torch's fused kernels take either grouped heads or a mask
        key, value, grouped = _repeat(key, query), _repeat(value, query), False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


def _repeat(x: Tensor, query: Tensor) -> Tensor:
    groups = query.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _scores(
    query: Tensor, key: Tensor, visibility: Visibility, row0: int, row1: int, scale: float, softcap: float
) -> Tensor:
    """Masked scores of rows row0..row1, float32 or float64."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = torch.matmul(query[..., row0:row1, :].to(wide), key.to(wide).transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    mask = visibility.mask_tile(row0, row1, 0, visibility.kv_len)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.to(wide)
    band = visibility.band(row0, row1, 0, visibility.kv_len, query.device)
    return scores if band is None else scores.masked_fill(~band, float("-inf"))


def _blocked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    dropout_p: float,
    return_lse: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    batch, heads, q_len, _ = query.shape
    key, value = _repeat(key, query), _repeat(value, query)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    outs, lses = [], []
    step = max(1, _SCORES_PER_STEP // max(1, batch * heads * visibility.kv_len))
    for row0 in range(0, q_len, step):
        row1 = min(row0 + step, q_len)
        scores = _scores(query, key, visibility, row0, row1, scale, softcap)
        if visibility.kv_len:
            top = scores.amax(dim=-1, keepdim=True)
        else:
            top = scores.new_full((*scores.shape[:-1], 1), -math.inf)
        if sinks is not None:
            sink = sinks.to(wide)[None, :, None, None]
            top = torch.maximum(top, sink)
        top = torch.where(torch.isneginf(top), 0.0, top).detach()
        weights = torch.exp(scores - top)
        total = weights.sum(dim=-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sink - top)
        safe = torch.where(total == 0, 1.0, total)
        if dropout_p:
            weights = F.dropout(weights, dropout_p)
        out = torch.matmul(weights, value.to(wide)) / safe
        # A row that sees no key is zero by selection, whatever lies in its hidden values.
        dead = torch.isneginf(scores).all(dim=-1, keepdim=True)
        outs.append(torch.where(dead, 0.0, out).to(out_dtype))
        if return_lse:
            # safe, not total: the logarithm of zero would turn a dead row's gradient into NaN
            lses.append(torch.where(dead, -math.inf, torch.log(safe) + top)[..., 0].float())
    out = (
        outs[0]
        if len(outs) == 1
        else torch.cat(outs, dim=-2)
        if outs
        else value.new_zeros(batch, heads, 0, value.shape[-1], dtype=out_dtype)
    )
    if not return_lse:
        return out, None
    return out, torch.cat(lses, dim=-1) if lses else query.new_zeros(batch, heads, 0, dtype=torch.float32)
