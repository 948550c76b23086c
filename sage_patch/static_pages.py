"""The quantized store of one attention layer with a fixed capacity, whose length is on the device.

The same pages as pages.py keeps, in one tensor that is allocated once. Neither storing tokens nor attending to them
asks the host for the length, waits, or allocates what stays: a decoding step can be captured in a CUDA graph, and
torch.compile sees operators on tensors (page_ops.py). Nothing here knows of transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sage_patch import page_ops
from sage_patch.args import PageArgs
from sage_patch.kernels import ops
from sage_patch.pages import SLAB_PAGES, check_tokens
from sage_patch.reference.emulator.prepare import padded_dim
from sage_patch.reference.pages import PAGE_TOKENS, TAIL_TOKENS, record_of


class StaticPages:
    """Keys and values of up to max_length tokens.

    store: uint8 [slabs, batch, num_kv_heads, 8, record]; table: int64 [slabs], where each slab begins. held: int32 [2],
    the number of tokens and a word that the kernel counts in. tail, k_mean, v_mean, rotated, dim: as in pages.Pages.
    settled: the host knows that a whole page was stored, so that the means stay; it may stay False.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        max_length: int,
        rotated: bool = True,
    ):
        """An empty store. Raises ValueError for a head_dim above 128 or a dtype that it cannot hold."""
        self.device = torch.device(device)
        check_tokens(head_dim, dtype, self.device)
        self.batch, self.num_kv_heads, self.head_dim, self.rotated = batch, num_kv_heads, head_dim, rotated
        self.dtype, self.dim, self.max_length, self.settled = dtype, padded_dim(head_dim), max_length, False
        slabs = -(-max_length // (SLAB_PAGES * PAGE_TOKENS))
        heads = (batch, num_kv_heads)
        with torch.inference_mode(False):  # what inference mode makes cannot be written to outside of it
            shape = (slabs, *heads, SLAB_PAGES, record_of(self.dim).size)
            self.store = torch.zeros(shape, dtype=torch.uint8, device=self.device)
            self.tail = torch.zeros(2, *heads, TAIL_TOKENS, head_dim, dtype=dtype, device=self.device)
            self.k_mean = torch.zeros(*heads, self.dim, dtype=torch.float32, device=self.device)
            self.v_mean = torch.zeros_like(self.k_mean)
            self.held = torch.zeros(2, dtype=torch.int32, device=self.device)
            self.table = self._addresses()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is written to, and the table."""
        return self.store, self.table, self.tail, self.k_mean, self.v_mean, self.held

    @property
    def can_attend(self) -> bool:
        """Whether `attend` runs on this device; tokens can be stored and dequantized on any."""
        return ops.pages_module(self.device) is not None

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def length(self) -> Tensor:
        """How many tokens are stored, int32 on the device, as of now."""
        return page_ops.length(self.held)  # type: ignore[no-any-return]

    def _addresses(self) -> Tensor:
        at = torch.arange(self.store.shape[0], dtype=torch.int64) * self.store[0].nbytes
        return (at + self.store.data_ptr()).to(self.device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has a store of its own, and so another table."""
        self.__dict__.update(state)
        self.table = self._addresses()

    def append(self, key: Tensor, value: Tensor) -> None:
        """Store key and value [batch, num_kv_heads, n, head_dim] behind the tokens that are there.

        Raises ValueError for tensors of another shape, dtype or device, and, on a CPU, beyond max_length; a GPU stops
        there, as torch's does at an index out of range.
        """
        wanted = (self.batch, self.num_kv_heads, key.shape[2], self.head_dim)
        for name, x in (("key", key), ("value", value)):
            if (
                x.shape != wanted
                or x.dtype != self.dtype
                or x.device != self.tail.device
                or x.shape[2] > self.max_length
            ):
                raise ValueError(
                    f"{name}: the store holds {list(wanted)} of {self.dtype} on {self.tail.device}, of "
                    f"{self.max_length} tokens at most; got {list(x.shape)} of {x.dtype} on {x.device}"
                )
        page_ops.append(
            key.detach(), value.detach(), self.store, self.table, self.tail, self.k_mean, self.v_mean, self.held,
            self.max_length, self.rotated, self.settled,
        )  # fmt: skip
        if key.shape[2] >= PAGE_TOKENS:
            self.settled = True

    def attend(self, query: Tensor, args: PageArgs, site: str) -> Tensor:
        """Attention of the last q_len stored tokens' queries [batch, Hq, q_len, head_dim], counted as quantized with
        the note "cache".

        Returns [batch, q_len, Hq, head_dim] contiguous, in query's dtype. args.attn_mask: over slots 0 .. width - 1.
        """
        out: Tensor = page_ops.attend(
            query.to(self.dtype), self.store, self.table, self.k_mean, self.v_mean, self.held, self.max_length,
            self.rotated, args.kv_starts, args.attn_mask, args.mask_until, args.sinks, args.scale, args.left,
            args.is_causal, args.softcap, site,
        )  # fmt: skip
        return out.to(query.dtype)

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """(key, value) [batch, num_kv_heads, max_length, head_dim] in the tokens' dtype; zeros where nothing is yet."""
        key, value = page_ops.dequantize(*self.tensors, self.max_length, self.rotated)
        return key, value

    def reset(self) -> None:
        """Forget all tokens; the next `append` takes new means."""
        self.held.zero_()
        self.settled = False

    def select(self, index: Tensor) -> None:
        """Make batch item i what item index[i] was; index: int64 [batch]."""
        for x, dim in ((self.store, 1), (self.tail, 1), (self.k_mean, 0), (self.v_mean, 0)):
            x.copy_(x.index_select(dim, index.to(self.device)))
