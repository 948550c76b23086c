"""The operators of a quantized cache of fixed size: its tensors and nothing else, so that graphs hold and replay them.

How many tokens are stored is read where the tensors are, on the device: no call waits for it, and what a step launches
depends on the capacity alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sage_patch.args import PageArgs
from sage_patch.kernels import ops, shared
from sage_patch.reference import pages as reference
from sage_patch.reference.pages import PAGE_TOKENS


@dataclass(frozen=True)
class Held:
    """The tensors of sage_patch.static_pages.StaticPages, as the kernels and the reference take a store.

    max_length: how many tokens it has room for. tail: None where no token is written.
    """

    store: Tensor
    table: Tensor
    tail: Tensor | None
    k_mean: Tensor
    v_mean: Tensor
    held: Tensor
    max_length: int
    head_dim: int
    rotated: bool
    settled: bool = False
    first_slab: int = 0

    @property
    def length(self) -> int:
        """The tokens stored; on a GPU, where nobody may ask, the room for them."""
        return self.max_length if self.held.is_cuda else int(self.held[0])

    @property
    def num_kv_heads(self) -> int:
        return self.k_mean.shape[1]

    @property
    def dim(self) -> int:
        return self.k_mean.shape[2]

    @property
    def slab_pages(self) -> int:
        return self.store.shape[3]

    @property
    def slab_table(self) -> Tensor:
        return self.table

    @functools.cached_property
    def slabs(self) -> tuple[Tensor, ...]:
        return self.store.unbind(0)

    def records(self, first_page: int, end_page: int) -> Tensor:
        """The records of some pages, uint8 [batch, num_kv_heads, pages, record]."""
        return self.store.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, first_page:end_page]


_LIBRARY = shared.Operators()
_STORE = "Tensor{0} store, Tensor table, {1}Tensor{2} k_mean, Tensor{3} v_mean, Tensor{4} held, int max_length"
_LIBRARY.define(
    f"pages_append(Tensor key, Tensor value, {_STORE.format('(a!)', 'Tensor(b!) tail, ', '(c!)', '(d!)', '(e!)')}, "
    "bool rotated, bool settled) -> ()"
)
_LIBRARY.define(
    f"pages_attend(Tensor query, {_STORE.format('', '', '', '', '')}, bool rotated, Tensor? kv_starts, "
    "Tensor? attn_mask, Tensor? mask_until, Tensor? sinks, float scale, int left, bool is_causal, float softcap, "
    "str site) -> Tensor"
)
_LIBRARY.define(f"pages_dequantize({_STORE.format('', 'Tensor tail, ', '', '', '')}, bool rotated) -> (Tensor, Tensor)")
# A copy made by an operator: a compiler may read a view of `held` only after the next append has changed it.
_LIBRARY.define("pages_length(Tensor held) -> Tensor")


def _append(
    key: Tensor, value: Tensor, store: Tensor, table: Tensor, tail: Tensor, k_mean: Tensor, v_mean: Tensor,
    held: Tensor, max_length: int, rotated: bool, settled: bool,
) -> None:  # fmt: skip
    pages = Held(store, table, tail, k_mean, v_mean, held, max_length, key.shape[3], rotated, settled)
    kernels = ops.pages_kernels(key.device)
    if not held.is_cuda and pages.length + key.shape[2] > max_length:
        raise ValueError(
            f"the cache was made for {max_length} tokens; it holds {pages.length} and was given {key.shape[2]} more"
        )
    kernels.append(pages, key, value)
    if kernels is reference:
        held[0] += key.shape[2]


def _attend(
    query: Tensor, store: Tensor, table: Tensor, k_mean: Tensor, v_mean: Tensor, held: Tensor, max_length: int,
    is_rotated: bool, kv_starts: Tensor | None, attn_mask: Tensor | None, mask_until: Tensor | None,
    sinks: Tensor | None, scale: float, left: int, is_causal: bool, softcap: float, site: str,
) -> Tensor:  # fmt: skip
    ops.count_pages(site, is_rotated, query.device)
    pages = Held(store, table, None, k_mean, v_mean, held, max_length, query.shape[3], is_rotated)
    kernels = ops.pages_kernels(query.device)
    if kernels is reference and attn_mask is not None:
        attn_mask = attn_mask[..., : pages.length]
    args = PageArgs(scale, left, is_causal, kv_starts, attn_mask, softcap, sinks, False, mask_until)
    out, _ = kernels.attend(pages, query, args)
    return out.transpose(1, 2).contiguous()  # type: ignore[no-any-return]


def _attend_fake(query: Tensor, *_: Any) -> Tensor:
    batch, heads, q_len, head_dim = query.shape
    return query.new_empty((batch, q_len, heads, head_dim))


def _dequantize(
    store: Tensor, table: Tensor, tail: Tensor, k_mean: Tensor, v_mean: Tensor, held: Tensor, max_length: int,
    is_rotated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pages = Held(store, table, tail, k_mean, v_mean, held, max_length, tail.shape[4], is_rotated)
    records = pages.records(0, -(-max_length // PAGE_TOKENS))
    there = torch.arange(max_length, device=held.device)[:, None] < held[0]
    key, value = (
        torch.where(there, x[:, :, :max_length, : tail.shape[4]], 0.0)
        for x in reference.dequantize(records, k_mean, v_mean, tail.dtype, is_rotated)
    )
    return key, value


def _dequantize_fake(
    store: Tensor, table: Tensor, tail: Tensor, k_mean: Tensor, v_mean: Tensor, held: Tensor, max_length: int,
    is_rotated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _, batch, heads, _, head_dim = tail.shape
    key, value = (tail.new_empty((batch, heads, max_length, head_dim)) for _ in range(2))
    return key, value


def _length(held: Tensor) -> Tensor:
    return held[0].clone()


def _length_fake(held: Tensor) -> Tensor:
    return held.new_empty(())


_BODIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "pages_append": (_append, lambda *_: None),
    "pages_attend": (_attend, _attend_fake),
    "pages_dequantize": (_dequantize, _dequantize_fake),
    "pages_length": (_length, _length_fake),
}
for _name, (_body, _fake) in _BODIES.items():
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _body, _device)
    _LIBRARY.fake(_name, _fake)

append = torch.ops.sage_patch.pages_append.default
attend = torch.ops.sage_patch.pages_attend.default
length = torch.ops.sage_patch.pages_length.default
dequantize = torch.ops.sage_patch.pages_dequantize.default
