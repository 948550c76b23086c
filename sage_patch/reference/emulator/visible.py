"""Which keys the Hopper kernels see: those that exist for an item, those that a row sees, what 64 rows see of a tile.

For tests. Sources: visibility.cuh (limits), mask_prepare.cu (mask bits and tile classes, the index of keys that exist),
decode() of schedule.cuh (the diagonal). Keys are padded to whole tiles, n = 128 * tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_patch.reference.emulator import tile_image as ti

GROUP_ROWS = 64  # query rows of a consumer warpgroup, which walk the same tiles


@dataclass
class Pattern:
    """`heads` is 1 where all heads see the same."""

    visible: Tensor  # bool [batch, heads, q_len, n]: the row sees the key
    walked: Tensor  # bool [batch, heads, q_len, tiles]: a row of the same group of 64 sees some key of the tile
    whole: Tensor  # bool [batch, heads, q_len, tiles]: all rows of the group see all keys of the tile
    biased: Tensor  # bool [batch, heads, q_len, tiles]: an additive mask is added in this tile
    bias: Tensor | None  # float32 [batch, heads, q_len, n], natural units
    seen: Tensor | None  # bool [batch, kv_len]: some row sees the key; None where the kernel does not look (no mask)


def present(
    key: Tensor,
    value: Tensor,
    kv_lens: Sequence[int] | None,
    kv_starts: Sequence[int] | None,
    key_padding: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(key, value, count): the tokens that exist for each item, in order, at the front; how many, int64 [batch].

    key, value [batch, kv_heads, kv_len, head_dim]; key_padding bool [batch or 1, kv_len], False: no such key.
    """
    batch, kv_len = key.shape[0], key.shape[2]
    if key_padding is not None:
        exists = key_padding.cpu().expand(batch, kv_len)
    else:
        first = torch.tensor([0] * batch if kv_starts is None else list(kv_starts))[:, None]
        lens = torch.tensor([kv_len] * batch if kv_lens is None else list(kv_lens))[:, None].clamp(0, kv_len)
        token = torch.arange(kv_len)
        exists = (token >= first) & (token < first + lens)
    order = torch.sort((~exists).int(), dim=-1, stable=True).indices[:, None, :, None]
    key, value = (torch.gather(x, 2, order.expand_as(x)) for x in (key, value))
    return key, value, exists.sum(-1)


def pattern(
    q_len: int,
    kv_len: int,
    keys: Tensor,
    *,
    is_causal: bool,
    top_left: bool,
    kv_starts: Sequence[int] | None,
    left: int,
    right: int,
    attn_mask: Tensor | None,
) -> Pattern:
    """keys int64 [batch]: how many exist. The other arguments as in Args."""
    tiles = (kv_len + ti.TILE_TOKENS - 1) // ti.TILE_TOKENS
    column = torch.arange(tiles * ti.TILE_TOKENS)
    corner = torch.zeros_like(keys) if kv_starts is None else -torch.tensor(list(kv_starts))
    offset = corner if top_left else keys - q_len
    from_diagonal = column - (torch.arange(q_len)[:, None] + offset[:, None, None])
    visible = (column < keys[:, None, None]).expand_as(from_diagonal)
    if left >= 0:
        visible = visible & (from_diagonal >= -left)
    if is_causal or right >= 0:
        visible = visible & (from_diagonal <= (0 if is_causal else right))
    visible, bias, seen = visible[:, None], None, None
    plain = torch.ones_like(visible)
    if attn_mask is not None:
        mask = attn_mask.cpu().expand(*attn_mask.shape[:2], q_len, kv_len)
        shown = mask if mask.dtype == torch.bool else mask != -torch.inf
        behind = (0, len(column) - kv_len)
        visible = visible & torch.nn.functional.pad(shown, behind)
        seen = visible.any(2).any(1)[:, :kv_len]
        if mask.dtype != torch.bool:
            bias = torch.nn.functional.pad(mask.float(), behind)
            plain = bias == 0
    walked = _any_of_group(visible.unflatten(-1, (tiles, ti.TILE_TOKENS)).any(-1))
    whole = ~_any_of_group(~visible.unflatten(-1, (tiles, ti.TILE_TOKENS)).all(-1))
    biased = torch.zeros_like(walked)
    if bias is not None:  # a tile that all its rows see whole and to which only zeros are added keeps integer scores
        touched = ~(visible & plain)
        biased = walked & _any_of_group(touched.unflatten(-1, (tiles, ti.TILE_TOKENS)).any(-1))
    return Pattern(visible, walked, whole, biased, bias, seen)


def _any_of_group(x: Tensor) -> Tensor:
    """bool [.., q_len, tiles] -> whether any of the row's group of 64 rows has it."""
    q_len = x.shape[-2]
    groups = (q_len + GROUP_ROWS - 1) // GROUP_ROWS
    x = torch.nn.functional.pad(x, (0, 0, 0, groups * GROUP_ROWS - q_len)).unflatten(-2, (groups, GROUP_ROWS))
    return x.any(-2).repeat_interleave(GROUP_ROWS, dim=-2)[..., :q_len, :]
