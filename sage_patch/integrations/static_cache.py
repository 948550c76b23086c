"""StaticQuantizedCache: a quantized cache of fixed size, for CUDA graphs and compiled models.

The static counterpart of QuantizedCache as transformers.StaticCache is that of DynamicCache; imported, like it, only
when its name is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from sage_patch.dispatch import unify
from sage_patch.integrations.quantized_cache import shape_of, windows_of
from sage_patch.integrations.static_cache_calls import StaticReading
from sage_patch.kernels.torch_private import stays_where_it_is
from sage_patch.static_pages import StaticPages


class StaticQuantizedCache(Cache):
    """A QuantizedCache whose memory is allocated once and whose length is on the device.

    Give it to `model.generate(..., past_key_values=sage_patch.StaticQuantizedCache(model.config, 4096))` for a model
    patched by sage_patch: on a GPU generate compiles its decoding steps with it, as with transformers.StaticCache. The
    prompt is attended to as without a cache; every later token over the pages, in the bits of a QuantizedCache whose
    keys are cut the same way. An unpatched model is refused.

    config: the model's. max_cache_len: how many tokens it has room for, in every layer, also those with a window.
    rotated: as in QuantizedCache. Raises TypeError for what is no configuration, ValueError for models whose layers it
    cannot hold and for a max_cache_len that is no number of tokens.
    """

    layers: list[StaticQuantizedCacheLayer]  # type: ignore[assignment]

    def __init__(self, config: PretrainedConfig, max_cache_len: int, rotated: bool = True):
        windows = windows_of(config, "StaticQuantizedCache")
        if type(max_cache_len) is not int or max_cache_len < 1:
            raise ValueError(f"max_cache_len must be a number of tokens; got {max_cache_len!r}")
        layers: list[Any] = [
            StaticQuantizedCacheLayer(i, max_cache_len, window, rotated) for i, window in enumerate(windows)
        ]
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held by all layers."""
        return sum(layer.pages.nbytes for layer in self.layers if layer.pages is not None)


class StaticQuantizedCacheLayer(CacheLayerMixin):
    """One layer of a StaticQuantizedCache. pages: its store, from the first update on, or `early_initialization`.

    is_filled: something was stored. Of a compiled step it is part of what the graph was compiled for, like everything
    that is known here on the host; how much is stored is not.
    """

    is_compileable = True
    is_croppable = False

    def __init__(self, layer_idx: int, max_cache_len: int, window: int | None = None, rotated: bool = True):
        super().__init__()
        self.layer_idx, self.max_cache_len, self.window, self.rotated = layer_idx, max_cache_len, window, rotated
        self.is_sliding = window is not None
        self.pages: StaticPages | None = None
        self.is_filled = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the store for tensors like these. Raises ValueError for those it cannot hold."""
        batch, num_kv_heads, head_dim = shape_of(key_states, value_states, self.layer_idx)
        self.pages = StaticPages(
            batch, num_kv_heads, head_dim, key_states.dtype, key_states.device, self.max_cache_len, self.rotated
        )
        for tensor in self.pages.tensors:  # CUDA graphs of a compiled model read and write them where they are
            stays_where_it_is(tensor)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store the tokens; returns what their queries attend to.

        With nothing stored before, those are the tensors given, so that a prompt is attended to as without a cache;
        afterwards a StaticReading for both. Raises RuntimeError where the first update is being compiled and the
        cache was not made with `early_initialization`, ValueError where gradients would be lost, and what
        StaticPages.append raises.
        """
        if self.is_filled and torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError(
                "StaticQuantizedCache keeps no gradients, and these keys and values need them: run under "
                "torch.no_grad(), or use transformers.StaticCache"
            )
        _, key, value = unify(key_states, key_states, value_states)  # what autocast would make of them
        if self.pages is None:
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    "a StaticQuantizedCache that is first filled in a compiled call must exist before it: call "
                    "cache.early_initialization(batch_size, num_heads, head_dim, dtype, device)"
                )
            self.lazy_initialization(key, value)
        assert self.pages is not None
        self.pages.append(key, value)
        if self.is_filled:
            reading = StaticReading(self.pages, self.window)
            return reading, reading
        self.is_filled = True
        return key_states, value_states

    def get_seq_length(self) -> Any:
        """How many tokens are stored: on the device, once there is a store."""
        return self.pages.length if self.pages is not None else 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    def get_max_cache_shape(self) -> int:
        """The same by its older name."""
        return self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of keys that the next queries' masks are over, position of the first)."""
        return (self.max_cache_len if self.is_filled else query_length), 0

    def reset(self) -> None:
        self.is_filled = False
        if self.pages is not None:
            self.pages.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.pages is not None:
            self.pages.select(beam_idx)
