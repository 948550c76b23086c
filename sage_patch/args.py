"""What attention is told beside its tensors, each list in one place: of a call, and of a call over a quantized cache.

Whoever passes a call on passes one of these: dispatch, the operator (its schema is made from `Args`), the backends.
"""

from __future__ import annotations

import math
from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor


class Args(NamedTuple):
    """What the operator `attention` is told beside query, key and value [B, H, tokens, D].

    attn_mask: 4-D, bool (True = seen) or float (added), broadcastable to [B, Hq, q_len, kv_len]. kv_starts, kv_lens:
    int32 [B], item b's keys are the kv_lens[b] from kv_starts[b] (None: 0) on. sinks: float [Hq], or None.
    cu_seqlens_q, cu_seqlens_k: int [sequences + 1], sequences laid end to end in one batch item; or both None.
    scale: of the softmax; None, in graphs alone, whose head_dim may be a symbol: that of head_dim (`scale_for`).
    left, right: keys seen on each side of the diagonal, -1 for no limit; causal is right 0. top_left: the diagonal
    starts at the first key instead of ending at the last. softcap 0: none. out_layout: "HND" or "NHD", the order in
    which the output's memory is contiguous. recipe: its name; reason: why it is "exact"; site: the counter key.
    guard_rows: of an exact call, see `reference.exact.exact_attention`. exact_backend: what computes exact calls,
    "torch" or, where it takes the call, "fa3" (`kernels.fa3`).
    """

    attn_mask: Tensor | None
    kv_starts: Tensor | None
    kv_lens: Tensor | None
    sinks: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    scale: float | None
    left: int
    right: int
    top_left: bool
    softcap: float
    return_lse: bool
    out_layout: str
    recipe: str
    reason: str
    site: str
    guard_rows: bool = True
    exact_backend: str = "torch"


def scale_for(scale: float | None, head_dim: int) -> float:
    """The softmax scale; None: SDPA's own expression of the true head_dim."""
    if scale is not None:
        return float(scale)
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0  # products of no channels are 0 whatever the scale


def plain(scale: float, is_causal: bool = False, recipe: str = "") -> Args:
    """The arguments of a call that has nothing but its tensors; `_replace` gives it more."""
    nothing = (None,) * 6
    return Args(*nothing, scale, -1, 0 if is_causal else -1, False, 0.0, False, "HND", recipe, "", "")


_SCHEMA_TYPES = {Tensor | None: "Tensor?", float | None: "float?", float: "float", int: "int", bool: "bool", str: "str"}


def schema() -> str:
    """The arguments as the operator's schema writes them: "Tensor? attn_mask, ..., bool guard_rows=True"."""
    given = Args._field_defaults
    return ", ".join(
        f"{_SCHEMA_TYPES[kind]} {name}" + (f"={given[name]!r}" if name in given else "")
        for name, kind in get_type_hints(Args).items()
    )


def key_padding(mask: Tensor | None) -> Tensor | None:
    """The bool [B or 1, kv_len] view (True = seen) behind a 4-D boolean mask that is the same for all heads and
    queries, or None for any other mask. Looks at sizes and strides, never at values."""
    if mask is None or mask.dtype != torch.bool or any(mask.shape[d] != 1 and mask.stride(d) != 0 for d in (1, 2)):
        return None
    return mask[:, 0, 0] if mask.shape[1] and mask.shape[2] else None


class PageArgs(NamedTuple):
    """What attention over the pages of a quantized cache is told beside query [B, Hq, q_len, D].

    scale: of the softmax. left: keys seen before a row's own position, -1 for no limit. is_causal: the queries are the
    last q_len tokens of the store, each sees the keys up to its own. kv_starts: int32 [B], position of the first key
    that exists. attn_mask: bool [B or 1, Hq or 1, q_len, width], True = seen, over the last `width` tokens; the ones
    before are not seen. softcap 0: none. sinks: float [Hq]. Of a store whose length is on the device the mask is over
    all slots, and mask_until, int32 [B], says of an item whose mask hides nothing but keys before kv_starts that it
    need not be read while the store holds no more tokens than this.
    """

    scale: float
    left: int = -1
    is_causal: bool = True
    kv_starts: Tensor | None = None
    attn_mask: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    return_lse: bool = False
    mask_until: Tensor | None = None
