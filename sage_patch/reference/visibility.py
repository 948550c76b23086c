"""Which key a query row sees, and with what additive bias.

One truth for the exact path and the quantized path: causal corner, sliding window, boolean and additive
masks. It stands apart from both because they tile it differently and must never disagree.

Shapes: query [B, Hq, q_len, D], key [B, Hkv, kv_len, D]. Masks broadcast to [B, Hq, q_len, kv_len].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# An additive bias at or below this hides a key for the purpose of means and scales (pipelines write -10000
# for "masked"); the score itself still gets exactly the bias that was given.
HIDING_BIAS = -1e4


@dataclass(frozen=True)
class Visibility:
    """The pattern of one call.

    attn_mask: None, bool (True = seen) or float (added to the scaled scores), 4-D, broadcastable.
    left, right: how far from its diagonal a row sees, in keys; None means without limit. Causal is right=0.
    offset: key index of row 0's diagonal; kv_len - q_len puts the last row on the last key (bottom right),
        0 puts the first row on the first key (top left).
    """

    q_len: int
    kv_len: int
    attn_mask: Tensor | None = None
    left: int | None = None
    right: int | None = None
    offset: int = 0

    @property
    def has_band(self) -> bool:
        """The causal corner or the window hides at least one key from at least one row."""
        hides_right = self.right is not None and self.offset + self.right < self.kv_len - 1
        hides_left = self.left is not None and self.q_len - 1 + self.offset - self.left > 0
        return hides_right or hides_left

    def live_rows(self) -> tuple[int, int]:
        """First and one-past-last row to which causality and window leave a key. The mask is not asked."""
        first = 0 if self.right is None else max(0, -(self.offset + self.right))
        last = self.q_len if self.left is None else min(self.q_len, self.kv_len - self.offset + self.left)
        if self.kv_len == 0:
            return 0, 0
        first = min(first, self.q_len)
        return first, max(first, last)

    def of_rows(self, row0: int, row1: int) -> Visibility:
        """The pattern of rows row0..row1-1 as a call of its own."""
        mask = self.mask_tile(row0, row1, 0, self.kv_len)
        return replace(self, q_len=row1 - row0, attn_mask=mask, offset=self.offset + row0)

    def key_range(self, row0: int, row1: int) -> tuple[int, int]:
        """First and one-past-last key that any of rows row0..row1-1 may see by causality and window."""
        lo = 0 if self.left is None else max(0, row0 + self.offset - self.left)
        hi = self.kv_len if self.right is None else min(self.kv_len, row1 - 1 + self.offset + self.right + 1)
        return min(lo, self.kv_len), max(hi, 0)

    def band(self, row0: int, row1: int, col0: int, col1: int, device: torch.device) -> Tensor | None:
        """Boolean [rows, cols] of causality and window, or None where this tile is fully visible."""
        first_diag, last_diag = row0 + self.offset, row1 - 1 + self.offset
        full_right = self.right is None or col1 - 1 <= first_diag + self.right
        full_left = self.left is None or col0 >= last_diag - self.left
        if full_right and full_left:
            return None
        diag = torch.arange(row0, row1, device=device)[:, None] + self.offset
        col = torch.arange(col0, col1, device=device)[None, :]
        seen = torch.ones(row1 - row0, col1 - col0, dtype=torch.bool, device=device)
        if self.right is not None:
            seen &= col <= diag + self.right
        if self.left is not None:
            seen &= col >= diag - self.left
        return seen

    def mask_tile(self, row0: int, row1: int, col0: int, col1: int) -> Tensor | None:
        """The user's mask for this tile, broadcast dimensions kept at size 1."""
        if self.attn_mask is None:
            return None
        rows = slice(row0, row1) if self.attn_mask.shape[-2] != 1 else slice(None)
        cols = slice(col0, col1) if self.attn_mask.shape[-1] != 1 else slice(None)
        return self.attn_mask[..., rows, cols]

    def visible_keys(self, num_kv_heads: int, device: torch.device, rows_per_step: int = 1024) -> Tensor | None:
        """Boolean [B or 1, Hkv or 1, kv_len]: keys that at least one row sees; None if all are seen.

        Means, scales and products are taken over these keys only, so that whatever lies in hidden keys
        (padding, unused cache slots, NaN) cannot reach the output.
        """
        if self.attn_mask is None:
            lo, hi = self.key_range(0, self.q_len)
            if lo == 0 and hi == self.kv_len:
                return None
            col = torch.arange(self.kv_len, device=device)
            return ((col >= lo) & (col < hi))[None, None]
        mask = self.attn_mask
        heads = mask.shape[1]
        seen = torch.zeros(mask.shape[0], heads, self.kv_len, dtype=torch.bool, device=device)
        for row0 in range(0, self.q_len, rows_per_step):
            row1 = min(row0 + rows_per_step, self.q_len)
            tile = self.mask_tile(row0, row1, 0, self.kv_len)
            assert tile is not None
            tile = tile if tile.dtype == torch.bool else _unhidden(tile)
            band = self.band(row0, row1, 0, self.kv_len, device)
            if band is not None:
                tile = tile & band
            seen |= tile.any(dim=-2)
            if band is None and mask.shape[-2] == 1:
                break  # every further row has the same mask
        if heads > 1 and heads != num_kv_heads:
            seen = seen.view(seen.shape[0], num_kv_heads, heads // num_kv_heads, self.kv_len).any(dim=2)
        return seen

    def blind_rows(self, device: torch.device, rows_per_step: int = 1024) -> Tensor | None:
        """Boolean [B or 1, Hq or 1, q_len or 1, 1]: rows to which mask, causality and window together leave no key.
        None without a mask: `live_rows` tells then."""
        if self.attn_mask is None:
            return None
        if not self.has_band:
            return ~_seen_by(self.attn_mask).any(dim=-1, keepdim=True)
        blind = []
        for row0 in range(0, self.q_len, rows_per_step):
            row1 = min(row0 + rows_per_step, self.q_len)
            tile = self.mask_tile(row0, row1, 0, self.kv_len)
            band = self.band(row0, row1, 0, self.kv_len, device)
            assert tile is not None
            tile = _seen_by(tile) if band is None else _seen_by(tile) & band
            blind.append(~tile.any(dim=-1, keepdim=True).expand(-1, -1, row1 - row0, -1))
        return torch.cat(blind, dim=-2)


def _seen_by(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else ~torch.isneginf(mask)


def _unhidden(bias: Tensor) -> Tensor:
    """Keys an additive mask leaves in play: above the hiding bias, or finite in a row that is all hidden."""
    above = bias > HIDING_BIAS
    alive = above.any(dim=-1, keepdim=True)
    return torch.where(alive, above, bias > float("-inf"))
