"""The pattern noted on a mask says the same as the mask, and is dropped when the mask is written to."""

from __future__ import annotations

import pytest
import torch
from transformers import masking_utils

from sage_patch.dispatch import Options
from sage_patch.integrations.masks import MaskPattern, classify, pattern_of
from sage_patch.integrations.transformers import register
from sage_patch.kernels.plain import visibility_of, with_run
from tiny import text_config


def build(
    kind: str,
    batch: int,
    q_len: int,
    past: int,
    padding: torch.Tensor | None,
    window: int = 5,
    static: bool = False,
):
    from transformers import DynamicCache, StaticCache
    from transformers.masking_utils import (
        create_bidirectional_mask,
        create_bidirectional_sliding_window_mask,
        create_causal_mask,
        create_sliding_window_causal_mask,
    )

    register()
    config = text_config("mistral", sliding_window=window if "window" in kind else None)
    config._attn_implementation = "sage2"
    cache = StaticCache(config, max_cache_len=40) if static else None
    if past:
        cache = cache or DynamicCache()
        cache.update(torch.zeros(batch, 2, past, 16), torch.zeros(batch, 2, past, 16), 0)
    embeds = torch.zeros(batch, q_len, 64)
    if kind.startswith("bidirectional"):
        make = create_bidirectional_sliding_window_mask if "window" in kind else create_bidirectional_mask
        return make(config=config, inputs_embeds=embeds, attention_mask=padding)
    make = create_causal_mask if kind == "causal" else create_sliding_window_causal_mask
    return make(config=config, inputs_embeds=embeds, attention_mask=padding, past_key_values=cache)


def padded(batch: int, length: int, where: str) -> torch.Tensor:
    """Item 0 is padded, the last one is not; with "both" another item holds nothing but padding."""
    mask = torch.ones(batch, length, dtype=torch.long)
    if where in ("left", "both"):
        mask[0, : length // 3] = 0
    if where in ("right", "both"):
        mask[0, length - length // 4 :] = 0
    if where == "both":
        mask[1] = 0
    if where == "hole":
        mask[0, 1:3] = 0
    return mask


def kernel_reading(options: Options, q_len: int, kv_len: int, batch: int) -> torch.Tensor:
    """What the Hopper kernel sees of these options, bool [B, 1, q_len, kv_len], in the words of sage2.h: an item's keys
    are counted from its own first one on, and the diagonal ends at its own last one unless top_left."""
    starts = torch.zeros(batch, dtype=torch.int32) if options.kv_starts is None else options.kv_starts
    lens = torch.full((batch,), kv_len, dtype=torch.int32) if options.kv_lens is None else options.kv_lens
    seen = torch.zeros(batch, 1, q_len, kv_len, dtype=torch.bool)
    for b, (start, keys) in enumerate(zip(starts.tolist(), lens.tolist(), strict=True)):
        offset = -start if options.top_left else keys - q_len
        distance = torch.arange(keys) - torch.arange(q_len)[:, None] - offset
        own = torch.ones_like(distance, dtype=torch.bool)
        if options.left >= 0:
            own &= distance >= -options.left
        if options.right >= 0:
            own &= distance <= options.right
        seen[b, 0, :, start : start + keys] = own
    return seen if options.attn_mask is None else seen & options.attn_mask


@pytest.mark.parametrize("kind", ["causal", "window", "bidirectional", "bidirectional window"])
@pytest.mark.parametrize("q_len, past", [(12, 0), (12, 9), (4, 20)])
@pytest.mark.parametrize("padding", ["none", "left", "right", "both", "hole"])
def test_pattern_composes_to_the_dense_mask(kind, q_len, past, padding):
    past = 0 if kind.startswith("bidirectional") else past
    pad = None if padding == "none" else padded(3, q_len + past, padding)
    mask = build(kind, 3, q_len, past, pad)
    if mask is None:  # nothing is hidden beyond plain causality
        assert padding == "none" and past == 0 and ("window" not in kind or q_len < 5)
        return
    check(mask, q_len, expect_run=padding != "hole")


@pytest.mark.parametrize("kind", ["causal", "window"])
@pytest.mark.parametrize("q_len, past", [(12, 0), (12, 9), (7, 20)])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_slots_of_a_static_cache_that_hold_nothing_are_cut_off(kind, q_len, past, padding):
    pad = padded(3, q_len + past, "none" if padding == "none" else padding)
    mask = build(kind, 3, q_len, past, pad, static=True, window=40)
    if mask is None:
        assert padding == "none" and past == 0
        return
    assert mask.shape[-1] > q_len + past
    pattern = check(mask, q_len, expect_run=True)
    assert pattern.kv_end == q_len + past and not (pattern.top_left and padding == "left")


def check(mask: torch.Tensor, q_len: int, expect_run: bool) -> MaskPattern:
    """The pattern, read as the kernel and as the reference read it, is the mask."""
    pattern = pattern_of(mask)
    assert pattern is not None, "not recognised"
    assert not mask[..., pattern.kv_end :].any()
    batch, kv_len = mask.shape[0], pattern.kv_end
    options = pattern.instead_of_mask(Options())
    if not expect_run:
        assert options.kv_lens is None
    assert options.kv_lens is None or options.attn_mask is None
    assert torch.equal(kernel_reading(options, q_len, kv_len, batch), mask[..., :kv_len])
    keys = with_run(options.attn_mask, options.kv_starts, options.kv_lens, kv_len)
    seen = visibility_of(q_len, kv_len, keys, options.left, options.right, options.top_left)
    band = seen.band(0, q_len, 0, kv_len, mask.device)
    composed = torch.ones(batch, 1, q_len, kv_len, dtype=torch.bool)
    composed &= band if band is not None else True
    composed &= keys if keys is not None else True
    assert torch.equal(composed, mask[..., :kv_len])
    return pattern


def test_left_padding_is_told_as_starts_and_costs_no_mask():
    pattern = pattern_of(build("causal", 3, 12, 9, padded(3, 21, "left")))
    assert pattern is not None and pattern.kv_starts is not None and pattern.kv_lens is not None
    assert pattern.kv_starts.tolist() == [7, 0, 0] and pattern.kv_lens.tolist() == [14, 21, 21]
    assert not pattern.top_left
    assert pattern.instead_of_mask(Options()).attn_mask is None


@pytest.mark.parametrize("static", [False, True])
def test_values_are_read_back_once_a_mask(static, monkeypatch):
    """On a GPU every read waits for the device."""
    reads = []
    for name in ("tolist", "item", "__bool__", "__int__"):
        original = getattr(torch.Tensor, name)

        def spy(self, *args, original=original, name=name):
            reads.append(name)
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, spy)
    mask = torch.ones(2, 1, 6, 20, dtype=torch.bool)
    offset = torch.tensor(4) if static else 14
    padding = torch.ones(2, 10 if static else 20, dtype=torch.bool)
    padding[0, :3] = False
    classify(mask, 6, 20, offset, 0, masking_utils.causal_mask_function, padding)
    assert pattern_of(mask) is not None and reads == ["tolist"]


def test_a_pattern_is_for_its_own_batch_and_keys():
    pattern = pattern_of(build("causal", 3, 12, 0, padded(3, 12, "left")))
    assert pattern is not None
    key = torch.zeros(3, 2, 12, 8)
    assert pattern.fits(key, key)
    assert not pattern.fits(key[:2], key[:2]) and not pattern.fits(key, key[:, :, :11])


def test_written_mask_loses_its_pattern():
    mask = build("causal", 2, 12, 0, padded(2, 12, "left")).clone()
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
