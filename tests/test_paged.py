"""Continuous batching: generate_batch under "paged|sage2", over transformers' own pages."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import sage_patch
from sage_patch.dispatch import UnsupportedCall
from sage_patch.integrations.paged import seen_keys
from tiny import EVERYTHING, logits, text_model, tokens

# Unequal prompts, the first and the last with one beginning, in steps that cut the longest in pieces.
PROMPTS = [tokens(1, n, seed=n)[0].tolist() for n in (33, 7, 1, 90, 18)]
PROMPTS.append(PROMPTS[0][:30] + [5, 6, 7])
GREEDY = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
SMALL_STEPS = ContinuousBatchingConfig(block_size=32, num_blocks=16, max_batch_tokens=48)


def batch_tokens(model) -> list[list[int]]:
    results = model.generate_batch(PROMPTS, generation_config=GREEDY, continuous_batching_config=SMALL_STEPS)
    return [results[f"req_{i}"].generated_tokens for i in range(len(PROMPTS))]


def models() -> dict[str, torch.nn.Module]:
    window = dict(sliding_window=24)
    return {"llama": text_model("llama"), "mistral": text_model("mistral", **window)}


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_exact_gives_the_tokens_of_transformers_own_function(family):
    model = models()[family]
    unpatched = copy.deepcopy(model)
    unpatched.set_attn_implementation("paged|sdpa")
    wanted = batch_tokens(unpatched)
    with sage_patch.applied(model, "exact") as handle:
        assert batch_tokens(model) == wanted
        stats = handle.stats()
        assert stats["calls"] and stats["quantized"] == 0
        assert model.config._attn_implementation == "sage2"


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_quantized_steps_stay_near_the_exact_model(family):
    """Every token is one that the exact model, given the text so far, likes about as well as its own choice."""
    model = models()[family]
    with sage_patch.applied(model, EVERYTHING) as handle:
        texts = batch_tokens(model)
        stats = handle.stats()
    assert stats["quantized"] > 0 and stats["exact"] == 0, stats
    for prompt, text in zip(PROMPTS, texts, strict=True):
        exact = logits(model, torch.tensor([prompt + text]))[0, len(prompt) - 1 : -1]
        lost = exact.max(-1).values - exact[torch.arange(len(text)), torch.tensor(text)]
        assert float((lost / exact.std(-1)).max()) < 0.4


def batch_tokens_unpatched(model) -> list[list[int]]:
    model = copy.deepcopy(model)
    model.set_attn_implementation("paged|sdpa")
    return batch_tokens(model)


def test_the_flag_alone_runs_and_gives_the_name_back():
    model = text_model("llama", "sage2")
    before = sage_patch.stats()["calls"]
    assert batch_tokens(model) == batch_tokens_unpatched(text_model("llama"))
    assert sage_patch.stats()["calls"] > before
    assert model.config._attn_implementation == "sage2"


def test_a_paged_name_without_a_paged_cache_is_refused():
    model = text_model("llama")
    model.set_attn_implementation("paged|sage2")
    with pytest.raises(UnsupportedCall, match="generate_batch"):
        logits(model, tokens(1, 8))


@pytest.mark.parametrize("window", [None, 1, 3])
def test_seen_keys_are_those_of_the_rows_own_request(window):
    q, k = [2, 1, 4], [2, 5, 6]
    cu_q = torch.tensor([0, 2, 3, 7])
    cu_k = torch.tensor([0, 2, 7, 13])
    got = seen_keys(cu_q, cu_k, 9, 15, window)[0, 0]
    for request in range(3):
        for row in range(q[request]):
            own = int(cu_k[request]) + k[request] - q[request] + row
            first = max(int(cu_k[request]), own - window + 1 if window else 0)
            assert got[int(cu_q[request]) + row].nonzero().flatten().tolist() == list(range(first, own + 1))
    assert got[7:].sum(-1).tolist() == [1, 1]  # padding rows see one key, so that nothing is NaN
