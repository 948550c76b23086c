"""Classify a transformers mask once per forward: causal or window band, key padding, or dense.

The mask function registered beside "sage2" builds the boolean mask that "sdpa" would get, and notes on it what
pattern it is. Every layer then hands the attention core a band and a [B, kv_len] key mask instead of a dense
[B, 1, q_len, kv_len] tensor, so that a kernel can skip tiles. What is not recognised stays dense and is still right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sage_patch.dispatch import Options

_NOTE = "_sage_patch_pattern"


@dataclass(frozen=True)
class MaskPattern:
    """What a dense boolean mask says, in fewer words.

    left, right: keys seen on each side of the diagonal, -1 for no limit. top_left: the diagonal starts at the
    first key; otherwise it ends at the last one. key_mask: bool [B, kv_len], True = a real token, or None.
    kv_lens: int32 [B], set where the real tokens of every item come first (right padding).
    version: the tensor's version counter when it was classified; a mask that was written since is dense.
    """

    left: int
    right: int
    top_left: bool
    key_mask: Tensor | None
    kv_lens: Tensor | None
    version: int

    def instead_of_mask(self, options: Options, device: torch.device) -> Options:
        """The same call with the pattern in place of its dense mask."""
        lengths = self.kv_lens is not None and device.type == "cuda"  # the kernels take lengths; the reference, masks
        key_mask = None if lengths or self.key_mask is None else self.key_mask[:, None, None, :]
        return replace(
            options,
            attn_mask=key_mask,
            kv_lens=self.kv_lens if lengths else None,
            left=self.left,
            right=self.right,
            top_left=self.top_left,
        )


def classify(
    mask: Tensor,
    q_len: int,
    kv_len: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Callable,
    padding: Tensor | None,
) -> Tensor:
    """Note the pattern on the mask tensor where it is recognised; the mask itself is returned unchanged.

    mask: bool or additive [B, 1, q_len, kv_len]; padding: bool [B, seen tokens] or None; offsets: absolute position
    of the first query and the first key.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return mask  # no place for a note: attributes and version counters do not survive there
    band = _band_of(mask_function)
    if band is None:
        return mask
    left, right = band
    top_left = False
    if band != (-1, -1):
        if isinstance(q_offset, Tensor):
            return mask  # a static cache keeps its position on the device; reading it would sync
        diagonal = q_offset - kv_offset
        if diagonal not in (0, kv_len - q_len):
            return mask
        top_left = diagonal != kv_len - q_len
    key_mask = kv_lens = None
    if padding is not None:
        key_mask = padding[:, kv_offset : kv_offset + kv_len].bool()
        if key_mask.shape[-1] != kv_len:
            return mask
        kv_lens = _lengths(key_mask)
    setattr(mask, _NOTE, MaskPattern(left, right, top_left, key_mask, kv_lens, mask._version))
    return mask


def pattern_of(mask: Tensor | None) -> MaskPattern | None:
    """The pattern noted on this very tensor, unless it was written to since."""
    if mask is None or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return None
    pattern = getattr(mask, _NOTE, None)
    return pattern if pattern is not None and pattern.version == mask._version else None


def _band_of(mask_function: Callable) -> tuple[int, int] | None:
    """(left, right) of a plain causal, bidirectional or sliding-window mask function of transformers.

    The window functions are closures; their window is read from them and anything else is left alone.
    """
    if _is(mask_function, "causal_mask_function"):
        return -1, 0
    if _is(mask_function, "bidirectional_mask_function"):
        return -1, -1
    parts = _closure(mask_function).get("mask_functions")
    if not isinstance(parts, tuple) or len(parts) != 2 or not _is(parts[1], "causal_mask_function"):
        return None
    window = _closure(parts[0]).get("sliding_window")
    overlay = getattr(parts[0], "__qualname__", "")
    if isinstance(window, int) and overlay.startswith("sliding_window_overlay"):
        return window - 1, 0
    return None


def _is(function: Callable, name: str) -> bool:
    """Whether this is transformers' own mask function of that name."""
    return getattr(function, "__module__", "") == "transformers.masking_utils" and function.__name__ == name


def _lengths(key_mask: Tensor) -> Tensor | None:
    """int32 [B] if the real tokens of every item come first. One look at the values a forward, as "sdpa" takes too
    when it asks whether there is any padding."""
    lengths = key_mask.sum(dim=-1, dtype=torch.int32)
    first = torch.arange(key_mask.shape[-1], device=key_mask.device) < lengths[:, None]
    return lengths if torch.equal(first, key_mask) else None


def _closure(function: Callable) -> dict[str, Any]:
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=False)}
