"""The functions registered with transformers under "sage2", one for attention and one for masks.

Both registrations are needed: an attention name that the mask registry does not know gets no mask at all, which
drops padding and windows without a word. Each call is run quantized, or exact with a counted reason, or refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sage_patch.dispatch import (
    Options,
    UnsupportedCall,
    attend,
    attend_with_weights,
    choose,
    describe,
    is_training,
    tick,
    unify,
)
from sage_patch.errors import SagePatchError
from sage_patch.integrations.configurations import NAME, NAMES, PACKED_NAMES, PAGED_NAMES
from sage_patch.integrations.float_masks import with_bool_mask
from sage_patch.integrations.masks import classify, pattern_of
from sage_patch.integrations.paged import PASSING_THROUGH as _PASSING_THROUGH_PAGED
from sage_patch.integrations.paged import attend_paged, refuse_standard_forward
from sage_patch.integrations.quantized_cache_calls import attend_cached, reading_of, why_exact
from sage_patch.integrations.source import (
    STRICTEST_LAST,
    MaskStyle,
    has_own_attention,
    mask_style,
    modeling_file_of,
)
from sage_patch.integrations.static_cache_calls import StaticReading, attend_static
from sage_patch.integrations.tags import FLAG_PREFIX, TAG, SiteTag
from sage_patch.recipes import AUTO, EXACT, Limits, parse_recipe

# Arguments of model.forward that transformers passes down to every attention function and that no implementation
# reads: positions are already in the rotated keys and the mask, the rest concerns other parts of the model.
_PASSING_THROUGH = frozenset(
    """position_ids cache_position use_cache output_hidden_states output_router_logits return_dict logits_to_keep
    num_items_in_batch token_type_ids mm_token_type_ids deterministic inputs_embeds
    position_embeddings past_key_values labels layer_idx is_first_iteration encoder_attention_mask
    encoder_hidden_states input_ids interpolate_pos_encoding pixel_values return_loss""".split()
)
# Selects keys by block in a layout of its own; the model expects the function to drop the others.
_KEY_SELECTION = ("block_indices",)
# Arguments of continuous batching, whose keys live in a paged cache.
_PAGED = ("cache", "read_index", "write_index", "block_table")


class OwnAttentionError(SagePatchError, ValueError):
    """The model computes attention in its own code, which "sage2" cannot reach."""


def sage2_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface: query [B, Hq, q_len, D], key and value [B, Hkv, kv_len, D or Dv].

    Returns (output [B, q_len, Hq, Dv] contiguous, weights [B, Hq, q_len, kv_len] if output_attentions else None).
    Causality without a mask follows transformers' "sdpa" (the keyword, else the module's `is_causal`, else True; for
    more than one query row, aligned to the first key), unless the model's masks are always written out. Raises
    UnsupportedCall for arguments that select keys or belong to a paged cache.
    """
    tag, site = _tag_and_site(module)
    reading = reading_of(key)
    unknown = [name for name, v in kwargs.items() if v is not None and name not in _PASSING_THROUGH]
    if unknown:
        _refuse_known_hazards(unknown, module)
        tick(f"argument_{unknown[0]}", site)
        everything = dict(
            dropout=dropout, scaling=scaling, is_causal=is_causal, position_bias=position_bias,
            sliding_window=sliding_window, softcap=softcap, s_aux=s_aux, output_attentions=output_attentions,
            cu_seq_lens_q=cu_seq_lens_q, cu_seq_lens_k=cu_seq_lens_k, max_length_q=max_length_q,
            max_length_k=max_length_k, indices=indices,
        )  # fmt: skip
        given = {name: v for name, v in everything.items() if v is not None}
        if reading is not None:
            key, value = reading.tensors()
        return _original(tag, module)(module, query, key, value, attention_mask, **given, **kwargs)

    if reading is not None:
        refusals = dict(
            training=is_training(module.training), output_attentions=bool(output_attentions),
            position_bias=position_bias is not None, indices=indices is not None,
            varlen=attention_mask is None and cu_seq_lens_q is not None, dropout=dropout > 0,
        )  # fmt: skip
        exact_reason = why_exact(tag, reading, query, attention_mask, refusals)
        if not exact_reason:
            query, _, _ = unify(query, query, query)
            run: Any = attend_static if isinstance(reading, StaticReading) else attend_cached
            out = run(
                reading, query, attention_mask,
                is_causal=_causal_without_mask(module, is_causal, tag.style), scale=scaling,
                window=sliding_window, softcap=softcap or 0.0, sinks=s_aux, site=site,
            )  # fmt: skip
            return out, None
        tag = replace(tag, recipe=EXACT, exact_reason=exact_reason)
        key, value = reading.tensors()
    query, key, value = unify(query, key, value)
    if query.shape[0] != key.shape[0]:  # learned queries come once for the whole batch
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (x.expand(batch, -1, -1, -1) for x in (query, key, value))
    if indices is not None:
        attention_mask = _with_selection(attention_mask, indices, key.shape[2])
    q_len = query.shape[2]
    causal = attention_mask is None and q_len > 1 and _causal_without_mask(module, is_causal, tag.style)
    if causal and key.shape[2] > q_len:
        # Prefill into an empty static cache: the slots behind the prompt hold nothing yet.
        key, value = key[:, :, :q_len], value[:, :, :q_len]
        position_bias = position_bias[..., :q_len] if position_bias is not None else None
    packed = attention_mask is None and cu_seq_lens_q is not None and cu_seq_lens_k is not None
    if packed and query.shape[0] != 1:
        raise UnsupportedCall(f"cu_seq_lens needs one packed row; got a batch of {query.shape[0]} without a mask")
    reached = causal and isinstance(sliding_window, int) and 0 < sliding_window < key.shape[2]
    options = Options(
        attn_mask=_with_bias(attention_mask, position_bias),
        scale=scaling,
        left=sliding_window - 1 if reached and sliding_window is not None else -1,
        right=0 if causal else -1,
        top_left=causal and key.shape[2] < q_len,
        softcap=softcap or 0.0,
        sinks=s_aux,
        dropout_p=dropout,
        cu_seqlens_q=cu_seq_lens_q if packed else None,
        cu_seqlens_k=cu_seq_lens_k if packed else None,
        max_q_len=max_length_q if isinstance(max_length_q, int) else 0,
        max_kv_len=max_length_k if isinstance(max_length_k, int) else 0,
        out_layout="NHD",
        guard_rows=False,
        training=module.training,
        exact_backend=tag.exact_backend,
    )
    if output_attentions:
        out, weights = attend_with_weights(query, key, value, options, site)
        return out.transpose(1, 2).contiguous(), weights

    # A mask of a known pattern costs a kernel less than a dense one; on the exact path the dense mask exists already.
    pattern = pattern_of(attention_mask) if position_bias is None else None
    quick, seen_key, seen_value = options, key, value
    if pattern is not None and pattern.fits(query, key):
        quick = pattern.instead_of_mask(options)
        seen_key, seen_value = key[:, :, : pattern.kv_end], value[:, :, : pattern.kv_end]
    call = describe(query, seen_key, seen_value, quick)
    quick, call = with_bool_mask(quick, call, tag.recipe, tag.limits)
    recipe, reason = choose(tag.recipe, call, tag.limits, tag.on_unsupported, tag.exact_reason, site)
    if not recipe.is_exact:
        key, value, options = seen_key, seen_value, quick
    out, _ = attend(query, key, value, options, call, recipe, reason, site)
    return out.transpose(1, 2), None


def sage2_paged_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    read_index: list[Tensor] | None = None,
    write_index: list[Tensor] | None = None,
    block_table: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | dict[str, Tensor] | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int | dict[str, int] = 0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The same for a step of continuous batching (paged.py): query [1, Hq, tokens, D] of all requests end to end.

    Raises UnsupportedCall for a forward pass that brings no paged cache, and for arguments that it cannot honour.
    """
    if cache is None or read_index is None or write_index is None or cu_seq_lens_q is None or cu_seq_lens_k is None:
        refuse_standard_forward(NAME)
    tag, site = _tag_and_site(module)
    known = _PASSING_THROUGH | _PASSING_THROUGH_PAGED
    unknown = [name for name, v in kwargs.items() if v is not None and name not in known]
    given = [("attention_mask", attention_mask), ("block_table", block_table), ("dropout", dropout or None)]
    unknown += [name for name, v in given if v is not None]
    if unknown or is_causal is False:
        raise UnsupportedCall(
            f"{type(module).__name__} passes {', '.join(unknown) or 'is_causal=False'} in continuous batching, which "
            f'"paged|{NAME}" does not compute; use "paged|sdpa" for this model'
        )
    window = sliding_window if sliding_window is not None else getattr(module, "sliding_window", None)
    out = attend_paged(
        module, query, key, value, tag, site,
        cache=cache, read_index=read_index, write_index=write_index, cu_seq_lens_q=cu_seq_lens_q,
        cu_seq_lens_k=cu_seq_lens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, scale=scaling,
        window=window if isinstance(window, int) and window > 0 else None, softcap=softcap or 0.0, sinks=s_aux,
    )  # fmt: skip
    return out, None


def _tag_and_site(module: nn.Module) -> tuple[SiteTag, str]:
    """What apply() noted on the module, or the default policy's, and the key under which its calls are counted."""
    tag = getattr(module, TAG, None)
    if tag is None:
        if getattr(getattr(module, "config", None), "_attn_implementation", NAME) in PACKED_NAMES.values():
            raise UnsupportedCall(f"this name is set by sage_patch.apply(); load the model with {NAME!r} instead")
        tag = _FLAG_TAGS[_style_of_file(type(module).__module__)]
    return tag, tag.group if torch.compiler.is_compiling() else tag.key or _flag_site(module)


def sage2_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    style: MaskStyle | None = None,
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask that the model needs (see MaskStyle), with its pattern noted on it (see masks.py).

    style: given by the registered name that apply() chose; None reads it off the model's file. cache_position: the
    queries' positions, in place of q_length and q_offset until transformers 5.3. Raises
    OwnAttentionError for models that build masks through transformers but attend in their own code: they would
    read this mask as something else and compute wrong logits.
    """
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

    config = kwargs.get("config")
    if style is None:
        style = _style_of_config(type(config)) if config is not None else "implicit"
    function = mask_function if mask_function is not None else causal_mask_function
    if style != "implicit":
        kwargs["allow_is_causal_skip"] = False
    queries: dict[str, Any] = {"q_length": q_length, "q_offset": q_offset}
    if cache_position is not None:
        queries = {"cache_position": cache_position}
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    build: Callable = eager_mask if style == "float" else sdpa_mask
    mask = build(
        batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=function,
        attention_mask=attention_mask, **queries, **kwargs,
    )  # fmt: skip
    if mask is None:
        return None
    assert q_length is not None
    return classify(mask, q_length, kv_length, q_offset, kv_offset, function, attention_mask)


@torch.compiler.assume_constant_result
def _style_of_config(config_type: type) -> MaskStyle:
    refuse_own_attention(config_type)
    return mask_style(modeling_file_of(config_type))


def refuse_own_attention(config_type: type) -> None:
    """Raise if the modeling file beside this configuration class attends in its own code."""
    modeling = modeling_file_of(config_type)
    if has_own_attention(modeling):
        raise OwnAttentionError(
            f"{config_type.__name__.removesuffix('Config')} models compute attention in their own code "
            f"({modeling}), which attn_implementation={NAME!r} does not reach; load with "
            'attn_implementation="eager" or "sdpa"'
        )


def register() -> None:
    """Make "sage2" and its mask styles known to transformers' registries. Safe to call again."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    for style, name in (*NAMES.items(), *PACKED_NAMES.items()):
        AttentionInterface.register(name, sage2_attention_forward)
        build: Callable = sage2_mask if name == NAME else functools.partial(sage2_mask, style=style)
        AttentionMaskInterface.register(name, build)
    for name in PAGED_NAMES:
        AttentionInterface.register(name, sage2_paged_forward)


# Tags of modules that were never given one: the default policy, for each mask style. Plain module-level objects,
# because a compiler can follow those.
_FLAG_TAGS: dict[MaskStyle, SiteTag] = {
    style: SiteTag(
        key="",
        group=FLAG_PREFIX + "*",
        recipe=parse_recipe(AUTO),
        on_unsupported="exact",
        limits=Limits(),
        original="",
        style=style,
    )
    for style in STRICTEST_LAST
}


def _flag_site(module: nn.Module) -> str:
    """The counter key of a module without a tag: its class and, where it has one, its layer index."""
    layer_idx = getattr(module, "layer_idx", None)
    name = type(module).__name__
    return FLAG_PREFIX + (name if layer_idx is None else f"{name}.{layer_idx}")


@torch.compiler.assume_constant_result
def _style_of_file(modeling_file: str) -> MaskStyle:
    return mask_style(modeling_file)


def _causal_without_mask(module: nn.Module, is_causal: bool | None, style: MaskStyle) -> bool:
    """Whether a call without a mask is causal. Where masks are written out, only the keyword can say so."""
    if style == "float":
        return False
    if style == "bool":
        return is_causal is True
    return bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))


def _with_bias(mask: Tensor | None, position_bias: Tensor | None) -> Tensor | None:
    """One additive mask from a mask and a learned position bias [1 or B, H, q_len, kv_len]."""
    if position_bias is None:
        return mask
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return torch.where(mask, position_bias, float("-inf"))
    return position_bias + mask


def _with_selection(mask: Tensor | None, indices: Tensor, kv_len: int) -> Tensor:
    """The mask that also hides every key not selected: indices [B, q_len, k], one selection for all heads.

    Models with an indexer fold it into the mask for "eager" and "sdpa" only, and pass it on for any other name.
    """
    chosen = torch.zeros(*indices.shape[:2], kv_len, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True)[:, None]
    if mask is None:
        return chosen
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, float("-inf"))


def _refuse_known_hazards(unknown: list[str], module: nn.Module) -> None:
    for name in _KEY_SELECTION:
        if name in unknown:
            raise UnsupportedCall(
                f"{type(module).__name__} passes {name!r} (sparse key selection), which {NAME!r} does not compute; "
                'use attn_implementation="eager" for this model'
            )
    if any(name in unknown for name in _PAGED):
        raise UnsupportedCall(
            f"{NAME!r} does not run on a paged cache (continuous batching passes {', '.join(unknown)}); "
            f'use attn_implementation="paged|{NAME}" for it'
        )


def _original(tag: SiteTag, module: nn.Module) -> Callable:
    """What the module would call without sage_patch: for arguments that only that function may understand."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = tag.original or "sdpa"
    if name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise UnsupportedCall(f"{type(module).__name__} has no eager attention to fall back to")
    return functools.partial(_eager_with_float_mask, eager)


def _eager_with_float_mask(
    eager: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Eager functions add their mask and know no implicit causality: give them both as floats."""
    causal = kwargs.get("is_causal")
    causal = causal if causal is not None else getattr(module, "is_causal", True)
    if mask is None and causal and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    return eager(module, query, key, value, mask, **kwargs)
