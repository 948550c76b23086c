"""Padded batches through the transformers adapter on the card: every call quantized, close to exact at real tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import sage_patch
from sage_patch.backends import as_run
from sage_patch.dispatch import Options, describe
from sage_patch.integrations import transformers as adapter
from sage_patch.policy import Policy
from sage_patch.recipes import parse_recipe
from tiny import logits, relative_l1, text_model, tokens
from zoo.gpu_cases import DEVICE, RECIPES, diagonal, poison, qkv, same
from zoo.kernel_calls import Extras

pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu

LENGTH = 300
LIMIT = 0.15  # the reference gives 0.07 to 0.11 on these random weights; a key too many or too few, far more
EVERYTHING = Policy(min_q_len=2, min_kv_len=1)  # lengths given: no crossover
EXACT = Policy(recipe="exact")
MODELS = {
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": 130},
    "gemma2": {"sliding_window": 130, "attn_logit_softcapping": 20.0},
    "gemma3_text": {"sliding_window": 130, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"sliding_window": 130, "num_local_experts": 2, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return tokens(3, LENGTH).cuda()


def model_of(kind: str) -> torch.nn.Module:
    size = dict(hidden_size=64, head_dim=64, max_position_embeddings=1024)
    return text_model(kind, "eager", **{**size, **MODELS[kind]}).cuda().bfloat16()


def padding(where: str) -> torch.Tensor:
    """Item 0 is padded, item 1 is not, item 2 holds one token next to the padding's end."""
    mask = torch.ones(3, LENGTH, dtype=torch.long, device="cuda")
    if where in ("left", "both"):
        mask[0, :131], mask[2, : LENGTH - 1] = 0, 0
    if where in ("right", "both"):
        mask[0, 200:] = 0
        mask[2, 1 if where == "right" else LENGTH :] = 0
    if where == "hole":
        mask[0, 50:180] = 0
    return mask


def counted() -> str:
    """The default recipe as the kernels under test count it."""
    return as_run(parse_recipe("qk_int8_pv_fp8"), "sm90", 64).name


def compare(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> None:
    with sage_patch.applied(model, EXACT):
        expected = logits(model, ids, attention_mask=mask)
    with sage_patch.applied(model, EVERYTHING) as handle:
        got = logits(model, ids, attention_mask=mask)
        assert {(r["recipe"], r["backend"]) for r in handle.rows()} == {(counted(), "sm90")}
    assert torch.isfinite(got).all()
    for item in range(3):
        real = mask[item].bool()
        assert relative_l1(got[item, real].float(), expected[item, real].float()) < LIMIT, f"item {item}"


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("where", ["none", "left", "right", "both", "hole"])
def test_padded_batches(kind: str, where: str, ids: torch.Tensor) -> None:
    compare(model_of(kind), ids, padding(where))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("where", ["left", "right"])
def test_padding_reaches_the_kernel_as_starts_and_lengths(
    kind: str, where: str, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Options] = []

    def spy(*tensors: Any) -> Any:
        seen.append(tensors[3])
        return describe(*tensors)

    monkeypatch.setattr(adapter, "describe", spy)
    model = model_of(kind)
    with sage_patch.applied(model, EVERYTHING):
        logits(model, ids, attention_mask=padding(where))
    assert all(options.attn_mask is None and options.kv_lens is not None for options in seen)
    assert {options.kv_starts is not None for options in seen} == {where == "left"}


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_second_chunk_of_a_padded_prompt(kind: str, cache: str, ids: torch.Tensor) -> None:
    """100 queries see 300 keys, or 300 of a longer buffer."""
    from transformers import DynamicCache, StaticCache

    model, mask = model_of(kind), padding("left")
    outputs = []
    for policy in (EXACT, EVERYTHING):
        past = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=512)
        with sage_patch.applied(model, policy) as handle:
            logits(model, ids[:, :200], attention_mask=mask[:, :200], past_key_values=past)
            outputs.append(logits(model, ids[:, 200:], attention_mask=mask, past_key_values=past))
            assert policy is EXACT or {r["recipe"] for r in handle.rows()} == {counted()}
    exact, quantized = outputs
    for item in range(3):
        real = mask[item, 200:].bool()
        assert relative_l1(quantized[item, real].float(), exact[item, real].float()) < LIMIT, f"item {item}"


def test_left_padded_generation_follows_exact_for_its_first_tokens(ids: torch.Tensor) -> None:
    model = model_of("llama")
    tokens_of = {}
    for name, policy in (("exact", EXACT), ("quantized", EVERYTHING)):
        with sage_patch.applied(model, policy) as handle:
            out = model.generate(
                ids, attention_mask=padding("left"), max_new_tokens=4, do_sample=False, eos_token_id=None
            )
            tokens_of[name] = out[:, LENGTH:]
            if name == "quantized":
                assert {(r["recipe"], r["reason"]) for r in handle.rows()} == {
                    (counted(), ""),
                    ("exact", "decode"),
                }
    # random weights decide by a hair: only say that most first tokens agree
    assert (tokens_of["exact"][:, 0] == tokens_of["quantized"][:, 0]).float().mean() >= 0.6


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("left,right,is_causal", ((-1, -1, False), (-1, -1, True), (70, -1, True), (70, 70, False)))
@pytest.mark.parametrize("softcap", (0.0, 20.0))
@pytest.mark.parametrize("sides", ("right", "both"))
def test_what_the_adapter_asks_of_the_kernel(
    recipe: str, left: int, right: int, is_causal: bool, softcap: float, sides: str
) -> None:
    """Keys that end before the buffer does: the diagonal starts at the first key there is, not at an item's own."""
    poison()
    q, k, v = qkv(3, 4, 2, 300, 300, 128)
    starts = torch.tensor([0, 50 if sides == "both" else 0, 300 if sides == "both" else 0], device=DEVICE)
    lens = torch.tensor([200, 130, 0], device=DEVICE)
    keys = torch.arange(300, device=DEVICE)
    gone = (keys < starts[:, None]) | (keys >= (starts + lens)[:, None])
    k, v = (x.masked_fill(gone[:, None, :, None], math.nan) for x in (k, v))
    at = diagonal(300, 300)
    band = torch.zeros_like(at, dtype=torch.bool)
    if left >= 0:
        band |= at < -left
    if is_causal or right >= 0:
        band |= at > (0 if is_causal else right)
    extras = Extras(kv_starts=starts.int() if sides == "both" else None, left=left, right=right, softcap=softcap)
    hidden = (gone[:, None, None] | band).expand(3, 4, -1, -1)
    same(recipe, q, k, v, extras, hidden, kv_lens=lens.int(), is_causal=is_causal, top_left=is_causal or right >= 0)
