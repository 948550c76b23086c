"""QuantizedCache: a key/value cache for transformers' generate that holds INT8 keys and E4M3 values.

The only module with subclasses of transformers' classes, and so imported only when its name is asked for. What is
stored, and how, is in sage_patch/pages.py; what update returns is in cached.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, __version__

from sage_patch.dispatch import unify
from sage_patch.extras import MissingPackage
from sage_patch.integrations.quantized_cache_calls import Reading
from sage_patch.integrations.tags import FLAG_PREFIX
from sage_patch.pages import Pages

try:
    from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs
except ImportError as error:
    message = f"QuantizedCache needs transformers 5.17 or newer; {__version__} is installed"
    raise MissingPackage(message, name="transformers") from error

_WINDOWED = ("sliding_attention", "chunked_attention")
_USE_DYNAMIC = "use transformers.DynamicCache(config=model.config) for this model"


class QuantizedCache(Cache):
    """A cache that keeps keys in INT8 and values in FP8, and that a model patched by sage_patch attends to directly.

    Give it to `model.generate(..., past_key_values=sage_patch.QuantizedCache(model.config))`, a new one for every
    conversation. At head dimensions of 64 and 128 it takes about half the memory of a 16-bit cache; smaller heads are
    padded to 64, others to 128. An unpatched model works too, on dequantized keys and values; such uses are counted as
    "cache_materialized" in sage_patch.stats().

    config: the model's. max_cache_len: allocate the layers without a window for this many tokens at once, and refuse
    more; None: grow as needed. rotated: keys are held multiplied by a Hadamard matrix, which spreads large channels
    over all of them (docs/numerics.md). Of an encoder-decoder model, either half of an EncoderDecoderCache may be one.
    Raises TypeError for what is no configuration, ValueError for models whose layers it cannot hold.
    """

    layers: list[QuantizedCacheLayer]  # type: ignore[assignment]

    def __init__(self, config: PretrainedConfig, max_cache_len: int | None = None, rotated: bool = True):
        windows = windows_of(config, "QuantizedCache")
        if max_cache_len is not None and (type(max_cache_len) is not int or max_cache_len < 1):
            raise ValueError(f"max_cache_len must be a number of tokens or None; got {max_cache_len!r}")
        crosses = any(_has_encoder(c) for c in (config, config.get_text_config(decoder=True)))
        layers: list[Any] = [
            QuantizedCacheLayer(i, window, max_cache_len, crosses, rotated) for i, window in enumerate(windows)
        ]
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held by all layers."""
        return sum(layer.pages.nbytes for layer in self.layers if layer.pages is not None)

    @property
    def pages_reopened(self) -> int:
        """How often a crop went so far back that a page's tokens were dequantized to be quantized again."""
        return sum(layer.pages.pages_reopened for layer in self.layers if layer.pages is not None)


class QuantizedCacheLayer(CacheLayerMixin):
    """One layer of a QuantizedCache. pages: its store, from the first update on.

    may_cross: the model also attends to an encoder, and nothing says whether this layer holds the decoder's keys or
    the encoder's, to which the decoder's window means nothing. A second update, which only the decoder's have, tells;
    until then nothing is dropped.
    """

    is_compileable = False
    is_croppable = True

    def __init__(
        self,
        layer_idx: int,
        window: int | None = None,
        max_cache_len: int | None = None,
        may_cross: bool = False,
        rotated: bool = True,
    ):
        # Not the base's: it sets keys and values, which are read from the pages here.
        self.may_cross = may_cross and window is not None
        self._is_decoder = not self.may_cross
        self.layer_idx, self.window, self.max_cache_len, self.rotated = layer_idx, window, max_cache_len, rotated
        self.is_sliding = window is not None
        self.is_initialized = False
        self.record_past = False  # transformers switches it off by this name
        self.pages: Pages | None = None

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """The stored keys, dequantized when computed with; None before the first update."""
        return self._read(self._first_held()).handles()[0] if self.pages is not None else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self._read(self._first_held()).handles()[1] if self.pages is not None else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make an empty store for tensors like these. Raises ValueError for those it cannot hold."""
        batch, num_kv_heads, head_dim = shape_of(key_states, value_states, self.layer_idx)
        self.pages = Pages(
            batch, num_kv_heads, head_dim, key_states.dtype, key_states.device,
            window=self.window, max_length=self.max_cache_len, rotated=self.rotated,
        )  # fmt: skip
        self.is_initialized = True

    @torch.compiler.disable  # a compiled model keeps its graphs before and behind this
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the tokens; returns all keys and values that the new tokens' queries may see.

        With nothing stored before, those are the tensors given, so that a prompt is attended to as without a cache.
        Afterwards they are stand-ins (see cached.py). Raises ValueError where gradients would be lost, and what
        Pages.append raises.
        """
        first = self._first_seen()
        empty = self.get_seq_length() == 0
        if not empty and torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError(
                "QuantizedCache keeps no gradients, and these keys and values need them: "
                "run under torch.no_grad(), or use transformers.DynamicCache"
            )
        _, key, value = unify(key_states, key_states, value_states)  # what autocast would make of them
        dtype = torch.promote_types(key.dtype, value.dtype)
        key, value = key.to(dtype), value.to(dtype)
        if self.pages is None or (empty and not _fits(self.pages, key)):
            self.lazy_initialization(key, value)
        assert self.pages is not None
        if not empty:
            self._check_place(key)
            self._is_decoder = True
        self.pages.keep_past = self.record_past or not self._is_decoder
        self.pages.append(key, value)
        return (key_states, value_states) if empty else self._read(first).handles()

    def get_seq_length(self) -> int:
        return 0 if self.pages is None else self.pages.length

    def get_max_length(self) -> int:
        if self.window is not None:
            return self.window
        return -1 if self.max_cache_len is None else self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of keys that the next `query_length` queries may see, position of the first)."""
        first = self._first_seen()
        return self.get_seq_length() + query_length - first, first

    def reset(self) -> None:
        self._is_decoder = not self.may_cross
        if self.pages is not None:
            self.pages.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens; a positive number is the length to cut to, as transformers has it
        for old callers. See Pages.crop."""
        if self.pages is None:
            return
        self._is_decoder = True
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding counts on the device
        count = max(0, self.pages.length - tokens_to_remove) if tokens_to_remove > 0 else -tokens_to_remove
        self.pages.crop(count)

    def activate_past_recording(self) -> None:
        """From now on hold what leaves the window until the next `crop`."""
        self.record_past = True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.get_seq_length() and self.pages is not None:
            self.pages.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.get_seq_length() and self.pages is not None:
            self.pages.repeat(repeats)

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        if self.get_seq_length() and self.pages is not None:
            self.pages.select(indices)

    def offload(self) -> None:
        raise NotImplementedError("QuantizedCache cannot be offloaded; use transformers.DynamicCache(offloading=True)")

    def prefetch(self) -> None:
        raise NotImplementedError("QuantizedCache cannot be offloaded; use transformers.DynamicCache(offloading=True)")

    def _first_seen(self) -> int:
        """Position of the first token that the next token's query sees."""
        return 0 if self.window is None else max(0, self.get_seq_length() - self.window + 1)

    def _first_held(self) -> int:
        """Position of the first token that an attention which never adds any sees: all, or what the window holds."""
        return self._first_seen() if self._is_decoder else 0

    def _check_place(self, key: Tensor) -> None:
        """Raise ValueError for a dtype or device that is not that of what the layer holds."""
        assert self.pages is not None
        held, given = (self.pages.dtype, self.pages.tail.device), (key.dtype, key.device)
        if held != given:
            raise ValueError(
                f"layer {self.layer_idx} of this QuantizedCache holds {held[0]} tokens on {held[1]}, and was given "
                f"{given[0]} on {given[1]}: keep one dtype and device for a whole conversation (autocast for "
                "all of its calls, or for none), or begin it with a new cache, or use transformers.DynamicCache"
            )

    def _read(self, first: int) -> Reading:
        assert self.pages is not None
        return Reading(self.pages, first, f"{FLAG_PREFIX}QuantizedCache.{self.layer_idx}")


def windows_of(config: PretrainedConfig, name: str) -> list[int | None]:
    """How many tokens a query of each layer sees, its own included; None: all. name: of the cache that asks.

    Raises TypeError for what is no configuration, ValueError for models with layers that pages cannot hold.
    """
    if not isinstance(config, PretrainedConfig):
        raise TypeError(f"{name} takes a model's configuration: {name}(model.config); got {type(config).__name__}")
    layer_types, configs = _layers_of(config.get_text_config(decoder=True))
    others = sorted(set(layer_types) - {"full_attention", *_WINDOWED})
    if others:
        raise ValueError(f"{name} holds attention layers; this model has {', '.join(others)}: {_USE_DYNAMIC}")
    _check_heads(configs)
    return [_window_of(kind, c) for kind, c in zip(layer_types, configs, strict=True)]


def shape_of(key: Tensor, value: Tensor, layer_idx: int) -> tuple[int, int, int]:
    """(batch, num_kv_heads, head_dim) of a layer's first tokens. Raises ValueError for those that pages cannot hold."""
    if key.shape[-1] != value.shape[-1]:
        raise ValueError(
            f"QuantizedCache holds keys and values of one width; layer {layer_idx} has keys of "
            f"{key.shape[-1]} and values of {value.shape[-1]} channels: {_USE_DYNAMIC}"
        )
    batch, num_kv_heads, _, head_dim = key.shape
    if head_dim > 128:
        raise ValueError(
            f"QuantizedCache holds heads of up to 128 channels; layer {layer_idx} has {head_dim}: {_USE_DYNAMIC}"
        )
    return batch, num_kv_heads, head_dim


def _fits(pages: Pages, key: Tensor) -> bool:
    """Whether an empty store can take this key as its first."""
    found = (key.shape[0], key.shape[1], key.shape[3], key.dtype, key.device)
    return found == (pages.batch, pages.num_kv_heads, pages.head_dim, pages.dtype, pages.device)


def _layers_of(config: PretrainedConfig) -> tuple[list[str], list[PretrainedConfig]]:
    """(kind, configuration) of every layer that has keys of its own; layers may differ in any setting."""
    shared = copy.copy(config)
    shared.allow_global_per_layer_attribute_access = True  # for windows, which are asked of each layer below
    kinds, _ = get_layer_types_and_kwargs(shared)
    differ = getattr(config, "is_heterogeneous", False)
    return kinds, [config.per_layer_config[i] if differ else config for i in range(len(kinds))]


def _window_of(kind: str, config: PretrainedConfig) -> int | None:
    """How many tokens a query of the layer sees, its own included; None: all."""
    if kind not in _WINDOWED:
        return None
    return config.sliding_window if kind == "sliding_attention" else config.attention_chunk_size


def _has_encoder(config: PretrainedConfig) -> bool:
    names = ("is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size")
    return any(getattr(config, name, None) for name in names)


def _check_heads(configs: list[PretrainedConfig]) -> None:
    """Raise ValueError for heads that the layers' configurations already show to be too much."""
    if any(getattr(config, "kv_lora_rank", None) for config in configs):
        raise ValueError(f"QuantizedCache does not hold compressed (latent) keys and values: {_USE_DYNAMIC}")
    wide = sorted({width for config in configs if (width := _head_dim(config)) > 128})
    if wide:
        raise ValueError(
            "QuantizedCache holds heads of up to 128 channels; this model has "
            f"{' and '.join(map(str, wide))}: {_USE_DYNAMIC}"
        )


def _head_dim(config: PretrainedConfig) -> int:
    """0 where the configuration does not tell."""
    heads = getattr(config, "num_attention_heads", None)
    head_dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return head_dim if isinstance(head_dim, int) else 0
