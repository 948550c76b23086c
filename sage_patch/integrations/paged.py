"""The function registered with transformers under "paged|sage2": attention of a step of continuous batching.

`generate_batch` lays the new tokens of all its requests end to end and keeps their keys in a paged cache of its own,
which gives back each request's keys, old and new, end to end as well. That is a packed call: as such it runs
quantized. Exact, it runs under a mask, as transformers' own "paged|sdpa" does, so that nothing waits for the lengths.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from sage_patch.dispatch import Options, UnsupportedCall, attend, choose, describe, unify

# What continuous batching passes to model.forward beside what is read here.
PASSING_THROUGH = frozenset({"logits_indices", "logits_processor_args", "max_length_q", "max_length_k"})


def attend_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tag: Any,
    site: str,
    *,
    cache: Any,
    read_index: list[Tensor],
    write_index: list[Tensor],
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor | dict[str, Tensor],
    max_seqlen_q: int,
    max_seqlen_k: int | dict[str, int],
    scale: float | None,
    window: int | None,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """query [1, Hq, tokens, D], key and value [1, Hkv, tokens, D or Dv] of the new tokens -> out [1, tokens, Hq, Dv].

    The cache stores the new keys and returns those of every request. cu_seq_lens_q, cu_seq_lens_k: int [requests + 1];
    by layer type where the model has two. window: keys that a token sees, its own included, or None. tag: of the site
    (tags.py). Raises UnsupportedCall where the policy refuses what cannot run quantized.
    """
    layer_type = "sliding_attention" if window else "full_attention"
    if isinstance(cu_seq_lens_k, dict):
        cu_seq_lens_k = cu_seq_lens_k[layer_type]
    if isinstance(max_seqlen_k, dict):
        max_seqlen_k = max_seqlen_k[layer_type]
    stored = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, read_index=read_index, write_index=write_index
    )
    key, value = (x.transpose(0, 1).unsqueeze(0) for x in stored)  # [1, Hkv, tokens of all requests, D]
    query, key, value = unify(query, key, value)
    options = Options(
        scale=scale,
        left=window - 1 if window else -1,
        right=0,
        softcap=softcap,
        sinks=sinks,
        cu_seqlens_q=cu_seq_lens_q.to(torch.int32),
        cu_seqlens_k=cu_seq_lens_k.to(torch.int32),
        max_q_len=max_seqlen_q,
        max_kv_len=max_seqlen_k,
        out_layout="NHD",
        guard_rows=False,
        training=module.training,
    )
    call = describe(query, key, value, options)
    recipe, reason = choose(tag.recipe, call, tag.limits, tag.on_unsupported, tag.exact_reason, site)
    if recipe.is_exact:
        mask = seen_keys(cu_seq_lens_q, cu_seq_lens_k, query.shape[2], key.shape[2], window)
        options = replace(options, attn_mask=mask, cu_seqlens_q=None, cu_seqlens_k=None, left=-1, right=-1)
    out, _ = attend(query, key, value, options, call, recipe, reason, site)
    return out.transpose(1, 2)


def seen_keys(cu_q: Tensor, cu_k: Tensor, q_len: int, kv_len: int, window: int | None) -> Tensor:
    """bool [1, 1, q_len, kv_len]: the keys of its own request that each row sees, up to its own token.

    A row behind the last request, which is padding, sees the first key, for its output to be finite.
    """
    rows = torch.arange(q_len, device=cu_q.device)
    keys = torch.arange(kv_len, device=cu_q.device)
    last = len(cu_q) - 2
    request = torch.searchsorted(cu_q[1:].contiguous(), rows, right=True)
    padding = request > last
    request = request.clamp(max=last)
    own = rows - cu_q[request + 1] + cu_k[request + 1]  # the place of the row's own key: both end together
    first = cu_k[request]
    if window:
        first = torch.maximum(first, own - window + 1)
    first, own = torch.where(padding, 0, first), torch.where(padding, 0, own)
    return ((keys >= first[:, None]) & (keys <= own[:, None]))[None, None]


def refuse_standard_forward(name: str) -> NoReturn:
    """Raise for a call under a paged name that brings no paged cache."""
    raise UnsupportedCall(
        f'"paged|{name}" is for generate_batch (continuous batching), which brings a paged cache; this call has none: '
        f"use {name!r} for model(...) and model.generate"
    )
