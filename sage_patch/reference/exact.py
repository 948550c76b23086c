"""The exact path: attention without quantization, with the full argument set.

Wherever torch's scaled_dot_product_attention computes the same thing it is used, in the form that leaves the
caller's result bit-equal to an unpatched call. What it cannot express (softcap, sinks, LSE, a gradient for the mask
alone) is computed here in float32, in blocks of query rows so that memory stays bounded.

Torch says nothing about rows that see no key: some of its kernels return 0, some an average of V, some NaN. So such
rows never reach it when they are to be right (`guard_rows`).

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
_TORCH_SDPA = F.scaled_dot_product_attention  # torch's own, whoever puts another function into its place later
_LARGEST_GRID = 65535  # batch x heads that every one of torch's CUDA kernels can be launched with


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
    guard_rows: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """softmax(mask(softcap(scale * Q K^T))) V, differentiable.

    query [B, Hq, q_len, D], key [B, Hkv, kv_len, D], value [B, Hkv, kv_len, Dv]; sinks float [Hq]: one more
    logit per head in the denominator that has no value. Returns (out [B, Hq, q_len, Dv] in query's dtype,
    lse float32 [B, Hq, q_len] natural log of the denominator, or None).
    Keys that no row sees cannot leak, whatever they hold.
    guard_rows: a row that sees no key is 0 with lse -inf and has no gradient, whatever its query holds. Without it
    such rows are what torch's SDPA makes of them, bit for bit, so that a call stays the one that it stands for.
    """
    out_dtype = query.dtype
    if not (query.dtype == key.dtype == value.dtype):
        common = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
        query, key, value = query.to(common), key.to(common), value.to(common)
    if scale <= 0:  # some of torch's kernels take the largest product for the largest score
        query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)
    options = (scale, softcap, sinks, dropout_p, return_lse, out_dtype)
    if guard_rows:
        return _guarded(query, key, value, visibility, *options)
    # On a GPU looking through one row's mask would cost more than its attention.
    if query.shape[-2] and key.shape[-2] and (query.device.type == "cpu" or query.shape[-2] > 1):
        seen = visibility.visible_keys(key.shape[1], key.device)
        if seen is not None:  # a row without keys may be an average of V: its finite values stay
            key, value = hide(key, seen), torch.where(seen[..., None] | torch.isfinite(value), value, 0.0)
    return _attend(query, key, value, visibility, *options, False)


def _guarded(
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
    """`_attend` without rows that see no key. Those of causality and window are known from the shapes and cut off;
    those of a mask are found on the device. Hidden keys stay where they are, as zeros: kernels round by position."""
    q_len, (row0, row1) = visibility.q_len, visibility.live_rows()
    if row1 - row0 < q_len:
        query, visibility = query[..., row0:row1, :], visibility.of_rows(row0, row1)
    blind = None
    if row1 > row0:
        seen = visibility.visible_keys(key.shape[1], key.device)
        key, value = hide(key, seen), hide(value, seen)
        blind = visibility.blind_rows(query.device)
        query = query if blind is None else query.masked_fill(blind, 0.0)
    out, lse = _attend(
        query, key, value, visibility, scale, softcap, sinks, dropout_p, return_lse, out_dtype, True, blind
    )
    if blind is not None:
        out = out.masked_fill(blind, 0.0)
        lse = lse.masked_fill(blind[..., 0], -math.inf) if lse is not None else None
    before, after = row0, q_len - row1
    if before or after:
        out = F.pad(out, (0, 0, before, after))
        lse = F.pad(lse, (before, after), value=-math.inf) if lse is not None else None
    return out, lse


def _attend(
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
    aligns: bool,
    blind: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """By torch's SDPA where it can, else by the blocked form. aligns: a mask that some of torch's kernels cannot
    read is copied; else it is passed on as it is. blind: bool [B or 1, Hq or 1, q_len or 1, 1], rows that the mask
    leaves without a key; what they come to does not matter."""
    empty = 0 in query.shape or 0 in value.shape
    if softcap or sinks is not None or return_lse or empty or _only_mask_learns(query, key, value, visibility):
        return _blocked(query, key, value, visibility, scale, softcap, sinks, dropout_p, return_lse, out_dtype)
    out = _by_sdpa(query, key, value, visibility, scale, dropout_p, aligns, blind)
    return out if out.dtype == out_dtype else out.to(out_dtype), None


def _only_mask_learns(query: Tensor, key: Tensor, value: Tensor, visibility: Visibility) -> bool:
    """Torch's fused kernels keep what a backward pass needs only if query, key or value asks for it."""
    mask = visibility.attn_mask
    if mask is None or not (mask.requires_grad and torch.is_grad_enabled()):
        return False
    return not (query.requires_grad or key.requires_grad or value.requires_grad)


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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    scale: float,
    dropout_p: float,
    aligns: bool,
    blind: Tensor | None,
) -> Tensor:
    q_len, kv_len = visibility.q_len, visibility.kv_len
    if not visibility.has_band:
        mask = _opened(visibility.attn_mask, blind, query.dtype)
        return _sdpa(query, key, value, mask, False, scale, dropout_p, aligns)
    plain_causal = visibility.attn_mask is None and visibility.right == 0 and visibility.left is None
    if plain_causal and visibility.offset == 0:
        return _sdpa(query, key, value, None, True, scale, dropout_p, aligns)  # torch's own corner
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
        rows = blind[..., row0:row1, :] if blind is not None and blind.shape[-2] != 1 else blind
        mask = _opened(mask, rows, query.dtype)
        blocks.append(_sdpa(query[..., row0:row1, :], key, value, mask, False, scale, dropout_p, aligns))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-2)


def _opened(mask: Tensor | None, blind: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask with every key shown to blind rows, and in query's dtype without making -inf of what is finite."""
    if mask is None or blind is None:
        return mask
    if mask.dtype == torch.bool:
        return mask | blind
    limits = torch.finfo(dtype)
    if torch.finfo(mask.dtype).max > limits.max:
        mask = torch.where(torch.isneginf(mask), mask, mask.clamp(limits.min, limits.max)).to(dtype)
    return mask.masked_fill(blind, 0.0)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    aligns: bool,
) -> Tensor:
    """Torch's SDPA; a batch that is too large for a launch goes in parts."""
    batch, heads = query.shape[:2]
    if query.device.type != "cpu" and batch * heads > _LARGEST_GRID:
        return _in_parts(query, key, value, mask, is_causal, scale, dropout_p, aligns)
    grouped = heads != key.shape[1]
    if mask is not None and mask.dtype != torch.bool and mask.dtype != query.dtype:
        mask = mask.to(query.dtype)
    if aligns and mask is not None and query.device.type == "cuda":
        mask = _aligned(mask, key.shape[-2], query.dtype)
    if grouped and mask is not None:  # torch's fused kernels take either grouped heads or a mask
        key, value, grouped = _repeat(key, query), _repeat(value, query), False
    return _TORCH_SDPA(
        query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


def _aligned(mask: Tensor, kv_len: int, dtype: torch.dtype) -> Tensor:
    """The mask in rows of whole 16-byte pieces. cuDNN reads it so, whatever its strides are (an illegal access where
    they are others), and the memory-efficient kernel refuses keys that are not side by side."""
    each = 16 // dtype.itemsize
    strides = [s for s, n in zip(mask.stride()[:-1], mask.shape, strict=False) if n > 1]
    as_it_is = mask.shape[-1] == kv_len and mask.stride(-1) == 1 and kv_len % each == 0
    if as_it_is and (mask.dtype == torch.bool or not any(s % each for s in (*strides, mask.storage_offset()))):
        return mask
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)
    return F.pad(mask.expand(*mask.shape[:-1], kv_len), (0, -kv_len % each))[..., :kv_len]


def _in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    aligns: bool,
) -> Tensor:
    """`_sdpa` of equal parts of the batch, or of the heads of one item that has too many by itself."""
    dim = 0 if query.shape[0] > 1 else 1
    parts = -(-query.shape[0] * query.shape[1] // _LARGEST_GRID)
    size = -(-key.shape[dim] // parts)  # along kv heads, so that a group stays together
    if key.shape[dim] == 1:
        key, value = _repeat(key, query), _repeat(value, query)
        size = -(-key.shape[dim] // parts)
    groups = query.shape[dim] // key.shape[dim]
    outs = []
    for start in range(0, key.shape[dim], size):
        count = min(size, key.shape[dim] - start)
        some = mask
        if mask is not None and mask.shape[dim] != 1:
            some = mask.narrow(dim, start * groups, count * groups)
        outs.append(
            _sdpa(
                query.narrow(dim, start * groups, count * groups), key.narrow(dim, start, count),
                value.narrow(dim, start, count), some, is_causal, scale, dropout_p, aligns,
            )
        )  # fmt: skip
    return torch.cat(outs, dim=dim)


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
        hidden = ~mask if mask.dtype == torch.bool else torch.isneginf(mask)
        # by selection: a sum of NaN and -inf would be NaN
        scores = (scores if mask.dtype == torch.bool else scores + mask.to(wide)).masked_fill(hidden, float("-inf"))
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
    for row0 in range(0, max(1, q_len), step):  # at least once, so that an empty output has its gradient too
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
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-2)
    return out, torch.cat(lses, dim=-1) if return_lse else None
