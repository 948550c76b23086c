"""The functional face: `sage_attention` checks a user's call, words its errors, and runs it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sage_patch.dispatch import Layout, Options, UnsupportedCall, attend, choose, describe, unify
from sage_patch.recipes import AUTO, NO_LIMITS, Limits, parse_recipe

__all__ = ["UnsupportedCall", "sage_attention"]


def sage_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    tensor_layout: Layout = "HND",
    causal_align: Literal["bottom_right", "top_left"] = "bottom_right",
    window: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool = False,
    recipe: str = AUTO,
    on_unsupported: Literal["exact", "error"] = "exact",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with SDPA's arguments and meaning, quantized where the recipe can.

    query [B, Hq, q_len, D], key [B, Hkv, kv_len, D], value [B, Hkv, kv_len, Dv] ("HND"), or heads and tokens
    swapped ("NHD"); with cu_seqlens, packed [total, H, D]. Any strides; inputs are never written.

    attn_mask: bool (True = may attend) or float (added to the scaled scores), broadcastable to
        [B, Hq, q_len, kv_len]. It composes with is_causal and window. Integer masks are refused.
    is_causal: key j is seen by query i if j <= i + kv_len - q_len ("bottom_right", right for a KV cache), or
        j <= i ("top_left", torch SDPA's corner). The two agree when the lengths do.
    scale: default 1 / sqrt(D). enable_gqa: Hq may be a multiple of Hkv.
    window: an int W lets a query see the W keys ending with its own (with is_causal; both sides without);
        (left, right) counts keys on each side, -1 for no limit. None, 0 or negative: no window.
    softcap: scores become softcap * tanh(scores / softcap). sinks: float [Hq], one extra logit a head in the
        denominator. cu_seqlens_q, cu_seqlens_k: int [n + 1] cumulative lengths of packed sequences.
    return_lse: also return the natural-log sum of exponentials (sink included) of the true scaled scores,
        float32 [B, Hq, q_len] (packed: [Hq, total]).
    recipe: "sage2" (the device's default; short and one-row calls go exact), "exact", or a rung such as
        "qk_int8_pv_fp8" by name, which then runs at any length. on_unsupported: "exact" runs what the recipe
        cannot do on the exact path and counts why; "error" raises UnsupportedCall instead.

    Returns the output in query's dtype and layout, contiguous; a row that sees no key is 0 with lse -inf.
    Calls that need gradients or dropout run exact. Raises ValueError or TypeError naming the argument.
    """
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if packed:
        query, key, value = _check_packed(query, key, value, attn_mask, cu_seqlens_q, cu_seqlens_k)
    else:
        if tensor_layout not in ("HND", "NHD"):
            raise ValueError(f'tensor_layout must be "HND" or "NHD"; got {tensor_layout!r}')
        _check_rank(query, key, value)
        if tensor_layout == "NHD":
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    _check_shapes(query, key, value, enable_gqa)
    _check_types(query, key, value)
    if causal_align not in ("bottom_right", "top_left"):
        raise ValueError(f'causal_align must be "bottom_right" or "top_left"; got {causal_align!r}')
    if on_unsupported not in ("exact", "error"):
        raise ValueError(f'on_unsupported must be "exact" or "error"; got {on_unsupported!r}')
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1); got {dropout_p}")
    if softcap is not None and softcap < 0:
        raise ValueError(f"softcap must be positive or None; got {softcap}")
    mask = _check_mask(attn_mask, query, key)
    if sinks is not None and (sinks.shape != (query.shape[1],) or not sinks.is_floating_point()):
        raise ValueError(f"sinks must be float [{query.shape[1]}]; got {sinks.dtype} {list(sinks.shape)}")
    left, right = _band(window, is_causal)

    options = Options(
        attn_mask=mask,
        scale=scale,
        left=left,
        right=right,
        top_left=causal_align == "top_left",
        softcap=softcap or 0.0,
        sinks=sinks,
        dropout_p=dropout_p,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        return_lse=return_lse,
        out_layout="NHD" if packed else tensor_layout,
    )
    query, key, value = unify(query, key, value)
    call = describe(query, key, value, options)
    limits = Limits() if recipe == AUTO else NO_LIMITS
    chosen, reason = choose(parse_recipe(recipe), call, limits, on_unsupported)
    out, lse = attend(query, key, value, options, call, chosen, reason)
    if packed:
        out = out[0].transpose(0, 1)
        lse = lse[0] if lse is not None else None
    elif tensor_layout == "NHD":
        out = out.transpose(1, 2)
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def _band(window: int | tuple[int, int] | None, is_causal: bool) -> tuple[int, int]:
    """(left, right) with -1 for no limit."""
    if window is None or isinstance(window, int):
        left = right = window - 1 if window is not None and window > 0 else -1
    else:
        left, right = (w if w >= 0 else -1 for w in window)
    return left, 0 if is_causal else right


def _check_rank(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions [batch, heads, tokens, head_dim] (or NHD); got {list(x.shape)}; "
                "packed [tokens, heads, head_dim] needs cu_seqlens_q and cu_seqlens_k"
            )


def _check_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if cu_q is None or cu_k is None:
        raise ValueError("cu_seqlens_q and cu_seqlens_k come together; one of them is missing")
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu.dim() != 1 or cu.numel() < 2 or cu.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64 [sequences + 1]; got {cu.dtype} {list(cu.shape)}")
    if cu_q.numel() != cu_k.numel():
        raise ValueError(f"cu_seqlens_q has {cu_q.numel() - 1} sequences, cu_seqlens_k {cu_k.numel() - 1}")
    if attn_mask is not None:
        raise ValueError("attn_mask cannot be combined with cu_seqlens; write the documents into one of them")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise ValueError(f"with cu_seqlens, {name} must be packed [tokens, heads, head_dim]; got {list(x.shape)}")
    return tuple(x.transpose(0, 1)[None] for x in (query, key, value))  # type: ignore[return-value]


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)} as [B, H, N, D]"
    if query.shape[0] != key.shape[0] or key.shape[0] != value.shape[0]:
        raise ValueError(f"batch sizes differ: {shapes}")
    if key.shape[2] != value.shape[2]:
        raise ValueError(f"key and value lengths differ: {shapes}")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query and key head_dim differ: {shapes}")
    heads, kv_heads = query.shape[1], key.shape[1]
    if kv_heads != value.shape[1]:
        raise ValueError(f"key and value head counts differ: {shapes}")
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"num_heads {heads} must be a positive multiple of num_kv_heads {kv_heads}: {shapes}")
    if heads != kv_heads and not enable_gqa:
        raise ValueError(
            f"num_heads {heads} differs from num_kv_heads {kv_heads}: pass enable_gqa=True, or check "
            f"tensor_layout: {shapes}"
        )


def _check_types(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating point; got {x.dtype}")
        if x.device != query.device:
            raise ValueError(f"query is on {query.device} but {name} is on {x.device}")


def _check_mask(attn_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as a 4-D broadcastable tensor. Strides are free: it is only ever read by position."""
    if attn_mask is None:
        return None
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise ValueError(
            f"attn_mask is {attn_mask.dtype}: a 0/1 mask must be bool (True = may attend), an additive one float"
        )
    if attn_mask.device != query.device:
        raise ValueError(f"query is on {query.device} but attn_mask is on {attn_mask.device}")
    if not 2 <= attn_mask.dim() <= 4:
        raise ValueError(f"attn_mask must have 2 to 4 dimensions; got {list(attn_mask.shape)}")
    mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if any(m not in (1, f) for m, f in zip(mask.shape, full, strict=True)):
        raise ValueError(
            f"attn_mask {list(attn_mask.shape)} does not broadcast to [B, Hq, q_len, kv_len] = {list(full)}"
        )
    return mask
