"""The pattern noted on a mask says the same as the mask, and is dropped when the mask is written to."""

from __future__ import annotations

import pytest
import torch

from sage_patch.integrations.masks import pattern_of
from sage_patch.integrations.transformers import register
from sage_patch.kernels.ops import visibility_of
from tiny import text_config


def build(kind: str, batch: int, q_len: int, past: int, padding: torch.Tensor | None, window: int = 5):
    from transformers import DynamicCache
    from transformers.masking_utils import (
        create_bidirectional_mask,
        create_causal_mask,
        create_sliding_window_causal_mask,
    )

    register()
    config = text_config("mistral", sliding_window=window)
    config._attn_implementation = "sage2"
    cache = None
    if past:
        cache = DynamicCache()
        cache.update(torch.zeros(batch, 2, past, 16), torch.zeros(batch, 2, past, 16), 0)
    embeds = torch.zeros(batch, q_len, 64)
    if kind == "bidirectional":
        return create_bidirectional_mask(config=config, inputs_embeds=embeds, attention_mask=padding)
    make = create_causal_mask if kind == "causal" else create_sliding_window_causal_mask
    return make(config=config, inputs_embeds=embeds, attention_mask=padding, past_key_values=cache)


def padded(batch: int, length: int, left: bool) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, : length // 3] = 0 if left else 1
    mask[0, length - length // 3 :] = 1 if left else 0
    return mask


@pytest.mark.parametrize("kind", ["causal", "window", "bidirectional"])
@pytest.mark.parametrize("q_len, past", [(12, 0), (12, 9), (4, 20)])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_pattern_composes_to_the_dense_mask(kind, q_len, past, padding):
    past = 0 if kind == "bidirectional" else past
    pad = None if padding == "none" else padded(2, q_len + past, padding == "left")
    mask = build(kind, 2, q_len, past, pad)
    if mask is None:  # nothing is hidden beyond plain causality
        assert padding == "none" and past == 0 and kind != "window"
        return
    pattern = pattern_of(mask)
    assert pattern is not None, f"{kind} {padding} was not recognised"
    kv_len = mask.shape[-1]
    key_mask = None if pattern.key_mask is None else pattern.key_mask[:, None, None, :]
    seen = visibility_of(q_len, kv_len, key_mask, pattern.left, pattern.right, pattern.top_left)
    band = seen.band(0, q_len, 0, kv_len, mask.device)
    composed = torch.ones(2, 1, q_len, kv_len, dtype=torch.bool)
    composed &= band if band is not None else True
    composed &= key_mask if key_mask is not None else True
    assert torch.equal(composed, mask.expand_as(composed))


def test_written_mask_loses_its_pattern():
    mask = build("causal", 2, 12, 0, padded(2, 12, True)).clone()
    assert pattern_of(mask) is None  # a new tensor
    mask = build("causal", 2, 12, 9, None)
    assert pattern_of(mask) is not None
    mask[0, 0, 0, 0] = False
    assert pattern_of(mask) is None


def test_unknown_mask_function_stays_dense():
    from transformers.masking_utils import create_causal_mask

    register()
    config = text_config()
    config._attn_implementation = "sage2"
    mask = create_causal_mask(
        config=config,
        inputs_embeds=torch.zeros(1, 8, 64),
        attention_mask=None,
        past_key_values=None,
        or_mask_function=lambda b, h, q, k: (q < 4) & (k < 4),
    )
    assert mask is not None and pattern_of(mask) is None
