"""SageAttention's public functions, by its names and arguments, computed by sage_patch.

Same meaning, fewer limits: a CPU, any strides, any head_dim, masks, and every call counted (`sage_patch.stats()`). A
word that asks for coarser or less precise arithmetic gets what is computed here, which is at least as fine: scales a
thread for a warp's, a two-level float32 accumulator for a half-precision one. Anything else is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sage_patch import arguments
from sage_patch.attention import sage_attention
from sage_patch.dispatch import Layout, Options, attend, choose, describe, unify
from sage_patch.recipes import AUTO, NO_LIMITS, Limits, parse_recipe

__all__ = [
    "sageattn",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_varlen",
]
__version__ = "2.2.0+sage.patch"  # whose arguments these are, and whose arithmetic

_Out = Tensor | tuple[Tensor, Tensor]
_GRANULARITIES = ("per_thread", "per_warp")
_UNSMOOTHED = ":smooth=none"


def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: Layout = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = True,
    smooth_k: bool = True,
) -> _Out:
    """Attention under the device's default recipe, "sage2"; calls too short to gain run exact, counted with the reason.

    q [B, Hq, q_len, D], k and v [B, Hkv, kv_len, D] ("HND"), or heads and tokens swapped ("NHD"); Hq may be a multiple
    of Hkv. sm_scale: default 1 / sqrt(D); scale: another name of it. is_causal: for equal lengths only.
    attn_mask, dropout_p: as in torch's SDPA, so that this function may stand in its place; enable_gqa: nothing to
    enable. smooth_k: remove K's mean before quantization.

    Returns the output in q's dtype and layout, and with return_lse also the natural-log sum of exponentials of the
    scaled scores, float32 [B, Hq, q_len] in both layouts. Raises ValueError or TypeError naming the argument.
    """
    arguments.check_flag("enable_gqa", enable_gqa)
    if scale is not None and sm_scale is not None:
        raise ValueError(f"scale {scale} and sm_scale {sm_scale} are two names of one argument; give one")
    recipe = AUTO + _smoothing(smooth_k)
    return _attend(
        q, k, v, tensor_layout, is_causal, scale if sm_scale is None else sm_scale, return_lse, recipe, attn_mask,
        dropout_p,
    )  # fmt: skip


def sageattn_qk_int8_pv_fp16_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: Layout = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    *,
    attn_mask: Tensor | None = None,
) -> _Out:
    """The recipe "qk_int8_pv_fp16" at any length; arguments and results as `sageattn`.

    qk_quant_gran: "per_thread" or "per_warp", both with a scale a thread. pv_accum_dtype: "fp32", "fp16+fp32" or
    "fp16", all accumulated in float32. smooth_v: for accumulators in half precision, of which there are none.
    """
    arguments.check_word("pv_accum_dtype", pv_accum_dtype, ("fp32", "fp16+fp32", "fp16"))
    _check_precision(qk_quant_gran, smooth_v)
    recipe = "qk_int8_pv_fp16" + _smoothing(smooth_k)
    return _attend(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, recipe, attn_mask)


def sageattn_qk_int8_pv_fp16_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: Layout = "HND",
    quantization_backend: str = "triton",
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    return_lse: bool = False,
) -> _Out:
    """The recipe "qk_int8_pv_fp16" at any length; arguments and results as `sageattn`.

    quantization_backend: "triton" or "cuda"; neither decides what runs here. The scales are those of a thread, finer
    than a block's.
    """
    arguments.check_word("quantization_backend", quantization_backend, ("triton", "cuda"))
    recipe = "qk_int8_pv_fp16" + _smoothing(smooth_k)
    return _attend(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, recipe, attn_mask)


def sageattn_qk_int8_pv_fp8_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: Layout = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp16",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    *,
    attn_mask: Tensor | None = None,
) -> _Out:
    """The recipe "qk_int8_pv_fp8" at any length; arguments and results as `sageattn`.

    qk_quant_gran: "per_thread" or "per_warp", both with a scale a thread. pv_accum_dtype: "fp32+fp32", "fp32+fp16" or
    "fp32", all with the two-level float32 accumulator. smooth_v: V's mean is removed, and added back exactly, wherever
    it is large enough to matter, whatever is said.
    """
    arguments.check_word("pv_accum_dtype", pv_accum_dtype, ("fp32+fp32", "fp32+fp16", "fp32"))
    _check_precision(qk_quant_gran, smooth_v)
    recipe = "qk_int8_pv_fp8" + _smoothing(smooth_k)
    return _attend(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, recipe, attn_mask)


def sageattn_qk_int8_pv_fp8_cuda_sm90(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: Layout = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp32",
    smooth_k: bool = True,
    return_lse: bool = False,
    *,
    attn_mask: Tensor | None = None,
) -> _Out:
    """As `sageattn_qk_int8_pv_fp8_cuda`, on every device that computes the recipe, with no smooth_v."""
    return sageattn_qk_int8_pv_fp8_cuda(
        q, k, v, tensor_layout, is_causal, qk_quant_gran, sm_scale, pv_accum_dtype, smooth_k, False, return_lse,
        attn_mask=attn_mask,
    )  # fmt: skip


def sageattn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
) -> Tensor:
    """Attention within packed sequences under the device's default recipe: q [total, Hq, D], k and v [total, Hkv, D].

    cu_seqlens_q, cu_seqlens_k: int [sequences + 1], cumulative lengths. max_seqlen_q, max_seqlen_k: the longest of
    them; they decide what is too short to gain. is_causal: for equal lengths only, told by the two maxima; key j of a
    sequence is seen by its query i if j <= i. K's mean, where it is removed, is each sequence's own.

    Returns [total, Hq, D] in q's dtype; rows outside of every sequence are 0. Raises as `sageattn`.
    """
    arguments.check_tensors(q, k, v, {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k})
    arguments.check_flag("is_causal", is_causal)
    if sm_scale is not None:
        arguments.check_number("sm_scale", sm_scale, " or None")
    query, key, value, cu_q, cu_k = arguments.packed(q, k, v, None, cu_seqlens_q, cu_seqlens_k)
    arguments.check_shapes(query, key, value, enable_gqa=True)
    longest_q = _longest("max_seqlen_q", max_seqlen_q, cu_q)
    longest_k = _longest("max_seqlen_k", max_seqlen_k, cu_k)
    if is_causal and longest_q != longest_k:
        raise _corner(longest_q, longest_k)
    options = Options(
        scale=sm_scale,
        right=0 if is_causal else -1,
        top_left=bool(is_causal),
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_q_len=longest_q,
        max_kv_len=longest_k,
        out_layout="NHD",
    )
    query, key, value = unify(query, key, value)
    call = describe(query, key, value, options)
    smoothing = _smoothing(smooth_k)
    recipe, reason = choose(parse_recipe(AUTO + smoothing), call, NO_LIMITS if smoothing else Limits())
    out, _ = attend(query, key, value, options, call, recipe, reason)
    return out[0].transpose(0, 1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: Layout,
    is_causal: bool,
    sm_scale: float | None,
    return_lse: bool,
    recipe: str,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> _Out:
    arguments.check_word("tensor_layout", tensor_layout, ("HND", "NHD"))
    arguments.check_flag("is_causal", is_causal)
    if sm_scale is not None:
        arguments.check_number("sm_scale", sm_scale, " or None")
    if is_causal and isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == k.dim() == 4:
        tokens = 1 if tensor_layout == "NHD" else 2
        if q.shape[tokens] != k.shape[tokens]:
            raise _corner(q.shape[tokens], k.shape[tokens])
    return sage_attention(
        q, k, v, attn_mask, dropout_p, is_causal, sm_scale, True, tensor_layout=tensor_layout, return_lse=return_lse,
        recipe=recipe,
    )  # fmt: skip


def _smoothing(smooth_k: bool) -> str:
    """The variant of a recipe."""
    arguments.check_flag("smooth_k", smooth_k)
    return "" if smooth_k else _UNSMOOTHED


def _check_precision(qk_quant_gran: str, smooth_v: bool) -> None:
    arguments.check_word("qk_quant_gran", qk_quant_gran, _GRANULARITIES)
    arguments.check_flag("smooth_v", smooth_v)


def _longest(name: str, length: int, cu_seqlens: Tensor) -> int:
    """The length, checked; on a CPU, where values can be read, not below that of the longest sequence."""
    if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)) or length < 0:
        raise ValueError(f"{name} must be the length of the longest sequence, a whole number; got {length!r:.60}")
    if cu_seqlens.device.type == "cpu" and type(cu_seqlens) is Tensor and not torch.compiler.is_compiling():
        longest = int(cu_seqlens.diff().max())
        if length < longest:
            raise ValueError(f"{name} is {length}, but a sequence has {longest} tokens")
    return length


def _corner(q_len: int, kv_len: int) -> ValueError:
    return ValueError(
        f"is_causal with {q_len} queries and {kv_len} keys: SageAttention defines it for equal lengths only; call "
        'sage_patch.sage_attention with causal_align="bottom_right" (the last query sees all) or "top_left"'
    )
