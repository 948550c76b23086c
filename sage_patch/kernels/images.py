"""Keys and values quantized in one process and attended to in another: what pre-processing makes of them, as bytes.

On compiled kernels an image is the workspace that the pre-processing fills: INT8 keys, values, scales and means, about
half of 16 bits with E4M3 values. It says nothing about queries, and holds no address. On a CPU it is the reference's
(reference/images.py). Recipes that smooth Q need the keys themselves, and have none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sage_patch import args as call_args
from sage_patch.args import Args
from sage_patch.kernels import library, plain
from sage_patch.recipes import Recipe


class Kind(NamedTuple):
    """What of keys [B, Hkv, tokens, D] and values decides how their image is laid out. groups: query heads of each."""

    shape: tuple[int, int, int, int]
    v_head_dim: int
    groups: int
    dtype: torch.dtype
    device: torch.device
    recipe: Recipe

    @property
    def is_compiled(self) -> bool:
        return self.device.type == "cuda"

    def size(self) -> int:
        """Bytes of an image, a multiple of 256; 0 without tokens."""
        if not self.shape[2]:
            return 0
        if not self.is_compiled:
            return plain.image_size(self.shape, self.v_head_dim, self.dtype, self.recipe)
        plan = library.plan(self._queries(), *self._stand_ins(), call_args.plain(1.0), self.recipe)
        assert plan is not None, "stand-ins are readable"
        return plan.workspace_bytes

    def quantize(self, key: Tensor, value: Tensor) -> Tensor:
        """The image of keys and values of this kind, uint8 [size]."""
        if not self.shape[2]:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        if not self.is_compiled:
            return plain.quantize_kv(key, value, self.recipe)
        call = library.Call(self._queries(), key, value, call_args.plain(1.0), self.recipe)
        call.prepare()
        return call.workspace

    def attend(self, query: Tensor, image: Tensor, args: Args) -> tuple[Tensor, Tensor | None]:
        """Attention of query [B, Hq, q_len, D] over an image, without any mask; results are the operator's."""
        if not self.is_compiled:
            return plain.attend_image(query, image, self.shape, self.v_head_dim, args, self.recipe)
        # A copy: the kernel counts its tiles in its workspace, and the image may be on its way to the next rank.
        call = library.Call(query, *self._stand_ins(), args, self.recipe, image.clone())
        call.forward()
        return call.out, call.lse

    def _queries(self) -> Tensor:
        batch, heads, _, head_dim = self.shape
        return torch.empty((batch, heads * self.groups, 1, head_dim), dtype=self.dtype, device=self.device)

    def _stand_ins(self) -> tuple[Tensor, Tensor]:
        """Tensors of the keys' and values' shapes, which nobody reads."""
        key, value = (
            torch.empty((1, 1, 1, width), dtype=self.dtype, device=self.device).expand(*self.shape[:3], width)
            for width in (self.shape[3], self.v_head_dim)
        )
        return key, value
