"""Classify a transformers mask once per forward: causal or window band, key padding, or dense.

The mask function registered beside "sage2" builds the boolean mask that "sdpa" would get, and notes on it what
pattern it is. Every layer then hands the attention core a band and, for each item, where its keys start and how many
they are (or a [B, kv_len] key mask where they are not one run) instead of a dense [B, 1, q_len, kv_len] tensor, so that
a kernel can skip tiles. What is not recognised stays dense and is still right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_patch.dispatch import Options

_NOTE = "_sage_patch_pattern"


@dataclass(frozen=True)
class MaskPattern:
    """What a dense mask says, in fewer words.

    left, right: keys seen on each side of the diagonal, -1 for no limit. kv_end: no row sees a key from there on, so
    that keys and values may be cut there. top_left: the diagonal starts at the first key; otherwise it ends at the last
    one before kv_end. key_mask: bool [B, kv_end], True = a real token, or None.
    kv_starts, kv_lens: int32 [B], set instead where the real tokens of every item are one run that a kernel can be
    told: kv_lens[b] of them from kv_starts[b] on (None: from the first on).
    version: the tensor's version counter when it was classified; a mask that was written since is dense.
    """

    left: int
    right: int
    top_left: bool
    kv_end: int
    key_mask: Tensor | None
    kv_starts: Tensor | None
    kv_lens: Tensor | None
    version: int

    def fits(self, query: Tensor, key: Tensor) -> bool:
        """Whether the tensors have the batch and keys that the mask was made for."""
        items = self.key_mask.shape[0] if self.key_mask is not None else query.shape[0]
        return items == query.shape[0] and self.kv_end <= key.shape[2]

    def instead_of_mask(self, options: Options) -> Options:
        """The same call with the pattern in place of its dense mask, for keys and values cut at kv_end."""
        by_mask = self.key_mask is not None and self.kv_lens is None
        return replace(
            options,
            attn_mask=self.key_mask[:, None, None, :] if by_mask and self.key_mask is not None else None,
            kv_starts=self.kv_starts,
            kv_lens=self.kv_lens,
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
    of the first query and the first key. Reads values back at most once: where there is padding, or where a static
    cache holds q_offset on the device and there is more than one query.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return mask  # no place for a note: attributes and version counters do not survive there
    band = _band_of(mask_function)
    if band is None:
        return mask
    left, right = band
    if isinstance(q_offset, Tensor) and (q_len == 1 or band == (-1, -1)):
        if band != (-1, -1):
            return mask  # a compiled decoding step's mask: one row is exact, and its mask is there already
        q_offset = 0  # means nothing where everything is seen
    # Keys behind the last query's diagonal are slots that hold nothing yet.
    kv_end: int | Tensor = q_offset - kv_offset + q_len if right == 0 else kv_len
    diagonal: int | Tensor = q_offset - kv_offset
    key_mask = runs = None
    if padding is not None:
        key_mask = padding[:, kv_offset : kv_offset + kv_len].bool()
        if key_mask.shape[-1] < kv_len:
            key_mask = torch.nn.functional.pad(key_mask, (0, kv_len - key_mask.shape[-1]))
        runs = _runs(key_mask, kv_end)
        kv_end, diagonal = runs.kv_end, runs.kv_end - q_len if right == 0 else diagonal
        key_mask = None if runs.nothing_hidden else key_mask[:, :kv_end]
    elif isinstance(kv_end, Tensor):
        kv_end = int(kv_end)
        diagonal = kv_end - q_len
    if isinstance(diagonal, Tensor) or not 0 < kv_end <= kv_len:
        return mask
    top_left = False
    if band != (-1, -1):
        if diagonal not in (0, kv_end - q_len):
            return mask
        top_left = diagonal != kv_end - q_len
    kv_starts = kv_lens = None
    if runs is not None and runs.one_each and key_mask is not None:
        # Kernels measure the diagonal from the end of an item's own keys, or from the first key there is.
        if band == (-1, -1) or runs.end_at_end or diagonal == 0:
            kv_lens = runs.lens
            kv_starts = None if runs.start_at_start else runs.starts
            top_left = band != (-1, -1) and (top_left or not runs.end_at_end)
    pattern = MaskPattern(left, right, top_left, kv_end, key_mask, kv_starts, kv_lens, mask._version)
    setattr(mask, _NOTE, pattern)
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
    if not isinstance(parts, tuple) or len(parts) != 2:
        return None
    window = _closure(parts[0]).get("sliding_window")
    overlay = getattr(parts[0], "__qualname__", "").partition(".")[0]
    if not isinstance(window, int):
        return None
    if overlay == "sliding_window_overlay" and _is(parts[1], "causal_mask_function"):
        return window - 1, 0
    if overlay == "sliding_window_bidirectional_overlay" and _is(parts[1], "bidirectional_mask_function"):
        return window, window
    return None


def _is(function: Callable, name: str) -> bool:
    """Whether this is transformers' own mask function of that name."""
    return getattr(function, "__module__", "") == "transformers.masking_utils" and function.__name__ == name


class _Runs(NamedTuple):
    """Where the real tokens of each item are: lens[b] of them, the first at starts[b], both int32 [B].

    one_each: they are one run in every item. start_at_start, end_at_end: every run starts at 0, ends at kv_end.
    """

    starts: Tensor
    lens: Tensor
    kv_end: int
    one_each: bool
    start_at_start: bool
    end_at_end: bool

    @property
    def nothing_hidden(self) -> bool:
        return self.one_each and self.start_at_start and self.end_at_end


def _runs(key_mask: Tensor, kv_end: int | Tensor) -> _Runs:
    """Of the keys before kv_end. One look at the values, as "sdpa" takes too when it asks whether there is padding."""
    index = torch.arange(key_mask.shape[-1], device=key_mask.device)
    there = key_mask & (index < kv_end)
    lens = there.sum(dim=-1, dtype=torch.int32)
    starts = torch.where(lens > 0, there.to(torch.uint8).argmax(dim=-1), kv_end).int()
    run = (index >= starts[:, None]) & (index < (starts + lens)[:, None])
    facts = [(run == there).all(), ((starts == 0) | (lens == 0)).all(), (starts + lens == kv_end).all()]
    if isinstance(kv_end, Tensor):
        facts.append(kv_end.reshape(()))
    found = torch.stack([fact.long() for fact in facts]).tolist()
    end = found[3] if isinstance(kv_end, Tensor) else kv_end
    return _Runs(starts, lens, end, bool(found[0]), bool(found[1]), bool(found[2]))


def _closure(function: Callable) -> dict[str, Any]:
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=False)}
