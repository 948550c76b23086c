"""Keys and values that stay in a static quantized cache: what its update returns, and how attention reads the pages.

All of it can be traced: no tensor's values are looked at on the host, and the pages are reached by operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sage_patch.args import PageArgs, scale_for
from sage_patch.dispatch import UnsupportedCall
from sage_patch.integrations.masks import pattern_of
from sage_patch.kernels.plain import without_autocast
from sage_patch.static_pages import StaticPages


class StaticReading:
    """All keys or values of a store, with a slot for every token that there is room for.

    A plain object in a tensor's place, because a compiler follows it. The attention function registered as "sage2"
    finds the pages in it; other code is refused. kv_len: slots that masks have columns for. window: how many tokens a
    query of the layer sees, or None.
    """

    def __init__(self, pages: StaticPages, window: int | None):
        self.pages, self.window, self.kv_len = pages, window, pages.max_length

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.pages.batch, self.pages.num_kv_heads, self.kv_len, self.pages.head_dim))

    @property
    def dtype(self) -> torch.dtype:
        return self.pages.dtype

    @property
    def device(self) -> torch.device:
        return self.pages.tail.device

    def tensors(self) -> tuple[Tensor, Tensor]:
        """(key, value) [batch, num_kv_heads, kv_len, head_dim], dequantized; zeros where nothing is stored yet."""
        return self.pages.dequantize()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{_REFUSAL} (asked for {name!r})")

    def __getitem__(self, index: Any) -> Any:
        raise UnsupportedCall(f"{_REFUSAL} (in a subscript)")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedCall(f"{_REFUSAL} (in {getattr(func, '__name__', func)})")


_REFUSAL = (
    "keys and values of a StaticQuantizedCache are read by attention that sage_patch has patched (sage_patch.apply, or "
    'attn_implementation="sage2"), not by other code; use QuantizedCache or transformers.StaticCache here'
)


def attend_static(
    reading: StaticReading,
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
    q_len, mask = query.shape[2], attention_mask
    args = PageArgs(scale_for(scale, query.shape[-1]), softcap=softcap, sinks=sinks)
    pattern = pattern_of(mask)
    if mask is None:
        left = reading.window if q_len == 1 else window
        causal = q_len == 1 or is_causal
        args = args._replace(is_causal=causal, left=left - 1 if causal and left is not None else -1)
    elif pattern is not None and pattern.right == 0 and not pattern.top_left and _in_words(pattern):
        args = args._replace(left=pattern.left, kv_starts=pattern.kv_starts)
    else:
        if q_len == 1 and mask.shape[1] == 1:
            starts, until = run_of(mask)
            args = args._replace(kv_starts=starts, mask_until=until)
        args = args._replace(is_causal=False, attn_mask=mask.expand(-1, -1, q_len, -1))
    with without_autocast(query.device):
        return reading.pages.attend(query, args, site)


def run_of(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Of a bool mask [B, 1, 1, keys]: int32 [B], the first key seen, and the key behind the last one if all between
    are seen, else 0. Where the tokens end there, the mask says no more than its start does."""
    row = mask[:, 0, 0]
    index = torch.arange(1, row.shape[-1] + 1, dtype=torch.int32, device=mask.device)
    end = torch.where(row, index, 0).amax(-1)
    start = (torch.where(row, index, row.shape[-1] + 1).amin(-1) - 1).clamp_max(row.shape[-1])
    whole = row.sum(-1, dtype=torch.int32) == end - start
    start, end = start.expand(mask.shape[0]), torch.where(whole, end, 0).expand(mask.shape[0])
    return start.to(torch.int32).contiguous(), end.to(torch.int32).contiguous()


def _in_words(pattern: Any) -> bool:
    """Whether the pattern needs no mask: nothing is hidden but what comes before an item's first token."""
    return pattern.key_mask is None or pattern.kv_lens is not None
