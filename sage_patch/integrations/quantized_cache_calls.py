"""Keys and values that stay in a quantized cache: tensors without data, and how attention reads the pages instead.

From its second update on a cache returns these in place of tensors. The attention function registered as "sage2" finds
the pages in them. Any other code that computes with one gets the tensor it expects, dequantized and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sage_patch.args import PageArgs, scale_for
from sage_patch.dispatch import UnsupportedCall, attend_pages, tick
from sage_patch.integrations.masks import MaskPattern, pattern_of
from sage_patch.integrations.static_cache_calls import StaticReading
from sage_patch.integrations.tags import SiteTag
from sage_patch.kernels.torch_private import tree_map_only
from sage_patch.pages import Pages


class Reading:
    """Tokens first .. length - 1 of a store, as one update left them.

    site: the counter key of code that computes with the tensors by itself.
    """

    def __init__(self, pages: Pages, first: int, site: str):
        self.pages, self.first, self.site = pages, first, site
        self.kv_len = pages.length - first
        self._version = pages.version
        self._dequantized: tuple[Tensor, Tensor] | None = None

    @torch.compiler.disable
    def tensors(self, counted: bool = False) -> tuple[Tensor, Tensor]:
        """(key, value) [batch, num_kv_heads, kv_len, head_dim]; dequantized once. counted: the caller has no reason of
        its own to count. Raises RuntimeError if the cache has changed since."""
        self.check()
        if self._dequantized is None:
            if counted:
                tick("cache_materialized", self.site)
            self._dequantized = self.pages.dequantize(self.first)
        return self._dequantized

    def check(self) -> None:
        """Raise RuntimeError if the cache has changed since: the pages would answer for other tokens."""
        if self._version != self.pages.version:
            raise RuntimeError("keys and values of a QuantizedCache were kept beyond its next change; copy them first")

    def handles(self) -> tuple[Tensor, Tensor]:
        """The pair that stands for the key and the value."""
        return CachedTensor(self, 0), CachedTensor(self, 1)


class CachedTensor(Tensor):
    """A key or value of a Reading: shape, dtype and device of the tensor, and its data only when computed with."""

    reading: Reading
    which: int

    @staticmethod
    def __new__(cls, reading: Reading, which: int) -> CachedTensor:
        pages = reading.pages
        shape = (pages.batch, pages.num_kv_heads, reading.kv_len, pages.head_dim)
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=pages.dtype, device=pages.k_mean.device)
        self.reading, self.which = reading, which
        return self

    def __init__(self, reading: Reading, which: int):
        pass  # torch has made the tensor already

    def __repr__(self) -> str:  # type: ignore[override]
        kind = "value" if self.which else "key"
        return f"CachedTensor({kind}, shape={list(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda x: x.reading.tensors(counted=True)[x.which], (args, kwargs or {}))
        return func(*args, **kwargs)


def reading_of(key: Any) -> Reading | StaticReading | None:
    """What a key that may have come from a quantized cache stands for; None for any other tensor."""
    if isinstance(key, StaticReading):
        return key
    return key.reading if isinstance(key, CachedTensor) else None


def why_exact(
    tag: SiteTag,
    reading: Reading | StaticReading,
    query: Tensor,
    attention_mask: Tensor | None,
    refusals: dict[str, bool],
) -> str:
    """Why this call is computed exactly, on the dequantized cache, or "" if it attends over the pages.

    refusals: what else the call asks for that pages cannot do, by the reason to count. Raises UnsupportedCall where
    the site's policy makes such a call an error.
    """
    if tag.recipe.is_exact:
        return tag.exact_reason
    reason = next((name for name, asked in refusals.items() if asked), "")
    if not reason and not reading.pages.can_attend:
        reason = f"no_kernel_for_{query.device.type}"
    if not reason and torch.is_grad_enabled() and query.requires_grad:
        reason = "needs_grad"
    if not reason and attention_mask is not None and attention_mask.dtype != torch.bool:
        reason = "mask_float"
    if not reason and attention_mask is not None and attention_mask.shape[-1] != reading.kv_len:
        reason = "mask_shape"
    if not reason and query.shape[0] != reading.pages.batch:
        reason = "batch"
    if reason and tag.on_unsupported == "error":
        raise UnsupportedCall(
            f"attention over a QuantizedCache cannot run this call at {tag.key.partition('/')[2]}: {reason}; "
            'use on_unsupported "exact", or the recipe "exact" here'
        )
    return reason


@torch.compiler.disable
def attend_cached(
    reading: Reading,
    query: Tensor,
    attention_mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    sinks: Tensor | None,
    site: str,
) -> Tensor:
    """Attention of query [B, Hq, q_len, D] over the pages; out [B, q_len, Hq, D] contiguous.

    is_causal: what more than one row without a mask means. window: that of such rows, or None.
    """
    reading.check()
    pages, q_len = reading.pages, query.shape[2]
    left, causal, starts, mask = -1, True, None, attention_mask
    pattern = pattern_of(attention_mask)
    if attention_mask is None and q_len > 1:
        causal = is_causal
        left = window - 1 if causal and window is not None else -1
    elif pattern is not None and pattern.right == 0 and not pattern.top_left:
        known, starts = _starts_of(pattern, reading)
        if known:
            left, mask = pattern.left, None
    if mask is None and pages.first_key(q_len, left) < reading.first:
        # The store holds more than the model means to show, as a window's does at its old end.
        if q_len == 1:
            left = reading.kv_len - 1
        else:
            starts = _at_least(starts, reading)
    if mask is not None:
        causal, mask = False, mask.expand(-1, -1, q_len, -1)
    args = PageArgs(scale_for(scale, query.shape[-1]), left, causal, starts, mask, softcap, sinks)
    out = attend_pages(pages, query, args, site)
    return out.transpose(1, 2).contiguous()


def _at_least(starts: Tensor | None, reading: Reading) -> Tensor:
    """kv_starts that also leave out what comes before the reading."""
    if starts is not None:
        return starts.clamp_min(reading.first)
    return torch.full((reading.pages.batch,), reading.first, dtype=torch.int32, device=reading.pages.device)


def _starts_of(pattern: MaskPattern, reading: Reading) -> tuple[bool, Tensor | None]:
    """(whether the real tokens of every item come last, int32 [B] position of the first of each or None if all are
    real)."""
    if pattern.kv_end != reading.kv_len:
        return False, None
    if pattern.key_mask is None:
        return True, None
    if pattern.kv_lens is None:  # not one run each, or runs that end before the last key
        return False, None
    starts = pattern.kv_starts
    return True, starts + reading.first if starts is not None and reading.first else starts
