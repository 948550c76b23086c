"""The quantized key/value store of one attention layer: pages of 128 tokens that attention reads as they are.

A page keeps INT8 keys and E4M3 values with their scales, half the bytes of 16-bit tokens (reference/pages.py has the
layout). The last tokens also stay in their own dtype, so that the page being filled is always quantized from what the
model computed. Nothing here knows of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_patch.args import PageArgs
from sage_patch.kernels import ops
from sage_patch.reference import pages as reference
from sage_patch.reference.emulator.prepare import padded_dim
from sage_patch.reference.pages import PAGE_TOKENS, TAIL_TOKENS, record_of

SLAB_PAGES = 8
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_tokens(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError for tokens that pages cannot hold on a device."""
    if head_dim > 128:
        raise ValueError(f"pages hold heads of up to 128 channels; got head_dim {head_dim}")
    if dtype not in DTYPES or (dtype == torch.float32 and device.type == "cuda"):
        raise ValueError(
            f"pages hold float16 and bfloat16 tokens, float32 on a CPU; got {dtype} on {device}: "
            "run the model in bfloat16"
        )


class Pages:
    """Keys and values of `length` tokens, which the host knows (static_pages.py: which the device knows).

    Slabs of some pages each are added as the store grows; nothing stored is copied for that.

    slab_pages: 8, and 1 where a window is so small that more would hold mostly tokens that have left it.
    slabs: uint8 [batch, num_kv_heads, slab_pages, record]. first_slab: how many before them were dropped, because no
        later query sees their tokens through the window.
    tail: [2, batch, num_kv_heads, 256, head_dim] in the tokens' dtype, keys and values; token i has slot i % 256.
        Tokens tail_start .. length - 1, of the last two pages, are in it.
    k_mean, v_mean: float32 [batch, num_kv_heads, dim], what pages hold keys and values less of. They are those of the
        tokens that came before the store first held a whole page, and stay from then on.
    dim: head_dim padded to 64 or 128. version: changes with everything stored. pages_reopened: how often `crop` had
        to fill the tail from a page, which gives that page's tokens a second rounding.
    window: a query sees this many tokens, its own included; None: all. keep_past: hold what has left the window, so
        that `crop` can go back (until the next `crop`).
    rotated: keys are held rotated (reference/rotation.py), and queries are rotated to meet them.
    max_length: how many tokens it can hold, allocated at once unless there is a window; None: no limit.
    """

    held: Tensor | None = None
    settled = False

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        window: int | None = None,
        max_length: int | None = None,
        rotated: bool = True,
    ):
        """An empty store. Raises ValueError for a head_dim above 128 or a dtype that it cannot hold."""
        self.device = torch.device(device)
        check_tokens(head_dim, dtype, self.device)
        self.batch, self.num_kv_heads, self.head_dim, self.rotated = batch, num_kv_heads, head_dim, rotated
        self.dim = padded_dim(head_dim)
        self.dtype = dtype
        self.window, self.max_length = window, max_length
        self.slab_pages = SLAB_PAGES if window is None or window > SLAB_PAGES * PAGE_TOKENS else 1
        self.keep_past = False
        heads = (batch, num_kv_heads)
        with torch.inference_mode(False):  # what inference mode makes cannot be written to outside of it
            self.k_mean = torch.zeros(*heads, self.dim, dtype=torch.float32, device=self.device)
            self.v_mean = torch.zeros_like(self.k_mean)
            self.tail = torch.zeros(2, *heads, TAIL_TOKENS, head_dim, dtype=dtype, device=self.device)
        self.slabs: list[Tensor] = []
        self.first_slab = 0
        self.length = 0
        self.tail_start = 0
        self.pages_reopened = 0
        self.version = 0
        self._slab_table: Tensor | None = None
        if self._is_static:
            self._grow(max_length or 0)

    @property
    def first_token(self) -> int:
        """Position of the first token that is still stored."""
        return self.first_slab * self._slab_tokens

    @property
    def can_attend(self) -> bool:
        """Whether `attend` runs on this device; tokens can be stored and dequantized on any."""
        return ops.pages_module(self.device) is not None

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return sum(t.nbytes for t in (*self.slabs, self.tail, self.k_mean, self.v_mean))

    @property
    def slab_table(self) -> Tensor:
        """int64 [slabs] on the device: where each slab's bytes begin."""
        if self._slab_table is None:
            self._slab_table = torch.tensor([s.data_ptr() for s in self.slabs], dtype=torch.int64).to(self.device)
        return self._slab_table

    def append(self, key: Tensor, value: Tensor) -> None:
        """Store key and value [batch, num_kv_heads, n, head_dim] behind the tokens that are there.

        Raises ValueError for tensors of another shape, dtype or device, and beyond max_length.
        """
        self._check(key, value)
        if key.shape[2] == 0:
            return
        held, end = self.length, self.length + key.shape[2]
        if self.max_length is not None and end > self.max_length:
            raise ValueError(
                f"the cache was made for {self.max_length} tokens; it holds {held} and was given {key.shape[2]} more"
            )
        if self.window is not None and not self.keep_past:
            # The new tokens' queries see back from the first of them; the first append has its own keys at hand.
            self._drop_before((held or end) - self.window + 1)
        self._grow(end)
        ops.pages_kernels(self.device).append(self, key.detach(), value.detach())
        self.length = end
        self.tail_start = max(self.tail_start, (end - 1) // PAGE_TOKENS * PAGE_TOKENS - PAGE_TOKENS)
        self.version += 1

    def attend(self, query: Tensor, args: PageArgs) -> tuple[Tensor, Tensor | None]:
        """Attention of the last q_len stored tokens' queries, [batch, Hq, q_len, head_dim], over the pages.

        Results are those of reference.pages.attend. Raises ValueError where a row would see tokens that have left the
        window.
        """
        first = self.first_key(query.shape[2], args.left, args.attn_mask)
        if first < self.first_token:
            raise ValueError(
                f"queries see back to token {first}, and the store has dropped what came before {self.first_token}"
            )
        return ops.pages_kernels(self.device).attend(self, query, args)

    def first_key(self, q_len: int, left: int, attn_mask: Tensor | None = None) -> int:
        """Position of the first key that any of the last q_len tokens' queries can see, by `attend`'s arguments."""
        return reference.first_key(self.length, q_len, left, attn_mask)

    def records(self, first_page: int, end_page: int) -> Tensor:
        """A copy of some pages' records, uint8 [batch, num_kv_heads, pages, record]."""
        parts = []
        while first_page < end_page:
            slab, page = divmod(first_page, self.slab_pages)
            stop = min(self.slab_pages, page + end_page - first_page)
            parts.append(self.slabs[slab - self.first_slab][:, :, page:stop])
            first_page += stop - page
        return torch.cat(parts, dim=2) if parts else self._new_slab(0)

    def dequantize(self, first: int = 0) -> tuple[Tensor, Tensor]:
        """(key, value) [batch, num_kv_heads, length - first, head_dim] in the tokens' dtype, from token `first` on, as
        the pages hold them. Raises ValueError for tokens that were dropped."""
        if first < self.first_token:
            raise ValueError(f"tokens before {self.first_token} have left the window; asked for {first}")
        first_page = first // PAGE_TOKENS
        records = self.records(first_page, (self.length + PAGE_TOKENS - 1) // PAGE_TOKENS)
        pair = reference.dequantize(records, self.k_mean, self.v_mean, self.dtype, self.rotated)
        there = slice(first - first_page * PAGE_TOKENS, self.length - first_page * PAGE_TOKENS)
        key, value = (x[:, :, there, : self.head_dim] for x in pair)
        return key, value

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens; with keep_past, then also what has left the window.

        The page that the store now ends in is written again by the next `append`. If its tokens have left the tail
        (128 tokens back, or more), they come from the page itself: see pages_reopened. Raises RuntimeError if the
        window's tokens before the new end were dropped.
        """
        end = self.length - min(count, self.length)
        if self.window is not None and max(0, end - self.window + 1) < self.first_token:
            raise RuntimeError(
                f"cannot go back to {end} tokens: the window of {self.window} needs tokens before {self.first_token}, "
                "which were dropped; call activate_past_recording() before the tokens that may be taken back"
            )
        page = end // PAGE_TOKENS * PAGE_TOKENS
        if page < self.tail_start:
            if page < end:
                self._reopen(page, end)
            self.tail_start = page
        self.length = end
        self.version += 1
        if self.window is not None:
            self._drop_before(end - self.window + 1)
        if not self._is_static:
            needed = -(-end // self._slab_tokens) - self.first_slab
            self._set_slabs(self.slabs[: max(needed, 0)])

    def reset(self) -> None:
        """Forget all tokens; the next `append` takes new means."""
        self.length = self.tail_start = self.first_slab = 0
        self.version += 1
        if not self._is_static:
            self._set_slabs([])

    def select(self, index: Tensor | Sequence[int]) -> None:
        """Make batch item i what item index[i] was. index: whole numbers, negative ones from the end, or a bool for
        each item: those that are True stay. Raises ValueError for anything else, and for numbers out of range, which
        are not looked at where they are on a GPU (torch stops there)."""
        found = self._batch_index(torch.as_tensor(index))
        self._change_batch(lambda x, dim: x.index_select(dim, found), len(found))

    def repeat(self, n: int) -> None:
        """Repeat every batch item n times, copies beside each other. Raises ValueError for n below 1."""
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"repeats must be a whole number from 1; got {n!r}")
        self._change_batch(lambda x, dim: x.repeat_interleave(n, dim=dim), self.batch * n)

    def _batch_index(self, index: Tensor) -> Tensor:
        """index as int64 from 0, on the store's device."""
        if index.dtype == torch.bool and index.shape == (self.batch,):
            return index.nonzero()[:, 0].to(self.device)
        if index.dim() != 1 or (index.numel() and index.dtype not in (torch.int64, torch.int32, torch.int16)):
            raise ValueError(
                f"batch indices must be a list of whole numbers (int64, int32), or {self.batch} booleans; "
                f"got {list(index.shape)} of {index.dtype}"
            )
        outside = [i for i in index.tolist() if not -self.batch <= i < self.batch] if index.device.type == "cpu" else []
        if outside:
            raise ValueError(f"batch index {outside[0]} is out of range: the cache holds {self.batch} items")
        index = index.to(self.device, torch.int64)
        return torch.where(index < 0, index + self.batch, index)

    @property
    def _slab_tokens(self) -> int:
        return self.slab_pages * PAGE_TOKENS

    @property
    def _is_static(self) -> bool:
        return self.max_length is not None and self.window is None

    def _check(self, key: Tensor, value: Tensor) -> None:
        wanted = (self.batch, self.num_kv_heads, key.shape[2], self.head_dim)
        for name, x in (("key", key), ("value", value)):
            if x.shape != wanted or x.dtype != self.dtype or x.device != self.tail.device:
                raise ValueError(
                    f"{name}: the store holds {list(wanted)} of {self.dtype} on {self.tail.device}; "
                    f"got {list(x.shape)} of {x.dtype} on {x.device}"
                )

    def _reopen(self, start: int, end: int) -> None:
        """Put tokens start .. end - 1, which one page holds, back into the tail."""
        slots = torch.arange(start, end, device=self.device) % TAIL_TOKENS
        for kept, x in zip(self.tail, self.dequantize(start), strict=True):
            kept[:, :, slots] = x[:, :, : end - start]
        self.pages_reopened += 1

    def _drop_before(self, token: int) -> None:
        """Drop the slabs whose tokens all come before `token`."""
        count = max(token, 0) // self._slab_tokens - self.first_slab
        if count > 0:
            self.first_slab += count
            self._set_slabs(self.slabs[count:])

    def _grow(self, length: int) -> None:
        missing = -(-length // self._slab_tokens) - self.first_slab - len(self.slabs)
        if missing > 0:
            self._set_slabs(self.slabs + [self._new_slab(self.slab_pages) for _ in range(missing)])

    def _new_slab(self, pages: int) -> Tensor:
        shape = (self.batch, self.num_kv_heads, pages, record_of(self.dim).size)
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=torch.uint8, device=self.device)

    def _set_slabs(self, slabs: list[Tensor]) -> None:
        self.slabs = slabs
        self._slab_table = None

    def _change_batch(self, change: Callable[[Tensor, int], Tensor], batch: int) -> None:
        self.batch = batch
        with torch.inference_mode(False):
            for i, slab in enumerate(self.slabs):  # one at a time, so that only one is held twice
                self.slabs[i] = change(slab, 0)
            self.k_mean, self.v_mean, self.tail = change(self.k_mean, 0), change(self.v_mean, 0), change(self.tail, 1)
        self._slab_table = None
        self.version += 1

    def __getstate__(self) -> dict[str, Any]:
        """A copy has slabs of its own, and so another table."""
        return {**self.__dict__, "_slab_table": None}
