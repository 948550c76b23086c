"""Which of a transformers model's calls the Hopper kernels would take: the facts are gathered on the CPU, then asked
about as if the same call ran in bfloat16 on such a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sage_patch
import zoo.families as zoo
from sage_patch.attention import UnsupportedCall
from sage_patch.backends import why_not
from sage_patch.dispatch import Options, describe
from sage_patch.integrations import transformers as adapter
from sage_patch.integrations.configurations import PACKED_NAMES
from sage_patch.kernels import ops
from sage_patch.policy import Policy
from sage_patch.recipes import Call, Limits, parse_recipe
from tiny import EVERYTHING, EXACT, logits, relative_l1, scaled_difference, text_model, tokens

FAMILIES = {f.name: f for f in zoo.families()}
IDS = tokens(3, 48)
ALONE = IDS[:1]


class Calls(list):
    """(facts on Hopper, options) of every call so far."""

    def masks(self) -> set[str]:
        return {call.mask for call, _ in self}

    def reasons(self, limits: Limits) -> set[str]:
        """Why the calls would be exact, "" for those that would be quantized."""
        recipe = parse_recipe("sage2")
        return {why_not(recipe, call, limits) or "" for call, _ in self}


LONG_ENOUGH = Limits(min_q_len=1, min_kv_len=1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()

    def spy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options) -> Call:
        call = describe(query, key, value, options)
        found.append((call._replace(backend="sm90", device="cuda", dtype="bfloat16", crossover=()), options))
        return call

    monkeypatch.setattr(adapter, "describe", spy)
    return found


def padding(where: str) -> torch.Tensor:
    mask = torch.ones_like(IDS)
    if where in ("left", "both"):
        mask[0, :5] = 0
    if where in ("right", "both"):
        mask[0, 30:] = 0
    if where == "hole":
        mask[0, 9:12] = 0
    return mask


MLA = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, head_dim=8,
    num_key_value_heads=4, n_routed_experts=2, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32,
    n_shared_experts=1, first_k_dense_replace=1,
)  # fmt: skip
DECODERS = {
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": 9},
    "gemma2": {"sliding_window": 9, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"sliding_window": 9, "num_local_experts": 2, "num_experts_per_tok": 2},
    "deepseek_v3": MLA,
}


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("where", ["none", "left", "right", "both", "hole"])
def test_padded_decoders_run_quantized_without_a_dense_mask(kind, where, calls):
    """Windows, sinks, softcap, two masks a forward, V narrower than K; exact still equals eager at real tokens."""
    model = text_model(kind, "eager", **DECODERS[kind])
    mask = padding(where)
    expected = logits(model, IDS, attention_mask=mask)
    with sage_patch.applied(model, EXACT):
        got = logits(model, IDS, attention_mask=mask)
        assert scaled_difference(got[mask.bool()], expected[mask.bool()]) < 1e-5
    calls.clear()
    with sage_patch.applied(model, EVERYTHING) as handle:
        got = logits(model, IDS, attention_mask=mask)
        assert {r["recipe"] for r in handle.rows()} == {"qk_int8_pv_fp8"}
    assert relative_l1(got[mask.bool()], expected[mask.bool()]) < 0.10
    assert calls.reasons(LONG_ENOUGH) == {""}
    assert calls.masks() == {{"none": "none", "hole": "padding"}.get(where, "lengths")}
    for call, options in calls:
        assert call.is_causal and (options.kv_starts is not None) == (where in ("left", "both"))
    if "sliding_window" in DECODERS[kind]:
        assert any(call.window for call, _ in calls)
    assert all(call.softcap == (kind == "gemma2") and call.sinks == (kind == "gpt_oss") for call, _ in calls)
    assert all((call.v_head_dim < call.head_dim) == (kind == "deepseek_v3") for call, _ in calls)


def test_observers_see_the_padding_as_a_mask():
    """What captures calls for calibration gets which keys there are, although the kernel is told otherwise."""
    model, mask, seen = text_model(), padding("both"), []
    with sage_patch.applied(model, EVERYTHING), ops.observe(lambda call: seen.append(call.attn_mask)):
        logits(model, IDS, attention_mask=mask)
    assert len(seen) == 2 and all(torch.equal(keys[:, 0, 0], mask.bool()) for keys in seen)


def generate(model: nn.Module, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, **options)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("where", ["none", "left"])
@pytest.mark.parametrize("way", ["dynamic", "static", "chunked"])
def test_prefill_is_quantized_and_decoding_is_exact(kind, where, way, calls):
    """Chunks after the first see fewer queries than keys; a static cache is longer than what it holds."""
    given = {"dynamic": {}, "static": {"cache_implementation": "static"}, "chunked": {"prefill_chunk_size": 20}}[way]
    model = text_model(kind, **DECODERS[kind])
    mask = padding(where)
    expected = generate(model, IDS, attention_mask=mask, **given)
    with sage_patch.applied(model, Policy(recipe="exact")):
        assert torch.equal(generate(model, IDS, attention_mask=mask, **given), expected)
    calls.clear()
    with sage_patch.applied(model, Policy(quantize_fp32=True, min_q_len=2, min_kv_len=1)):
        generate(model, IDS, attention_mask=mask, **given)
    prefill = Calls(pair for pair in calls if pair[0].q_len > 1)
    assert prefill.reasons(LONG_ENOUGH) == {""}
    assert prefill.masks() - {"none"} == ({"lengths"} if where == "left" else set())  # a window may leave it behind
    assert {call.kv_len <= 48 for call, _ in prefill} == {True}  # not the whole buffer
    assert Calls(pair for pair in calls if pair[0].q_len == 1).reasons(Limits()) == {"decode"}
    if way == "chunked":
        assert any(call.q_len < call.kv_len and not call.top_left for call, _ in prefill)


def test_assisted_decoding_is_too_short_and_says_so(calls):
    model = text_model()
    with sage_patch.applied(model, Policy(quantize_fp32=True)):
        generate(model, ALONE, prompt_lookup_num_tokens=3)
    short = Calls(pair for pair in calls if 1 < pair[0].q_len < 16)
    assert short and short.reasons(Limits()) == {"short_q"}
    assert short.reasons(LONG_ENOUGH) == {""}


def test_chunked_attention_keeps_its_dense_mask_and_runs_quantized(calls):
    """Llama 4: local layers see only their own chunk, counted from each item's first real token."""
    family = FAMILIES["llama4_text"]
    model = zoo.build(family, "eager")
    model.config.attention_chunk_size = 16
    for mask in (None, padding("left")):
        real = torch.ones_like(IDS).bool() if mask is None else mask.bool()
        expected = logits(model, IDS, attention_mask=mask)
        with sage_patch.applied(model, EXACT):
            assert scaled_difference(logits(model, IDS, attention_mask=mask)[real], expected[real]) < 1e-5
        calls.clear()
        with sage_patch.applied(model, EVERYTHING):
            assert relative_l1(logits(model, IDS, attention_mask=mask)[real], expected[real]) < 0.10
        assert "bool" in calls.masks()
        assert calls.reasons(LONG_ENOUGH) == {""}


def test_packed_documents_run_quantized(calls):
    model = text_model()
    positions = torch.cat([torch.arange(20), torch.arange(28)])[None]
    expected = logits(model, ALONE, position_ids=positions, use_cache=False)
    with sage_patch.applied(model, EVERYTHING):
        got = logits(model, ALONE, position_ids=positions, use_cache=False)
    assert relative_l1(got, expected) < 0.10
    assert calls.masks() == {"bool"} and calls.reasons(LONG_ENOUGH) == {""}


def test_learned_position_bias_is_exact_on_hopper_for_its_added_mask(calls):
    model = zoo.build(FAMILIES["t5"], "eager")
    inputs = zoo.inputs(FAMILIES["t5"], model)
    with sage_patch.applied(model, EVERYTHING):
        zoo.outputs(model, inputs)
    assert "mask_float" in calls.reasons(LONG_ENOUGH)
    # with the crossover off, as a user may choose, the kernel adds it
    assert calls.reasons(Limits(min_q_len=1, min_kv_len=1, crossover=False)) == {""}


def test_whisper_runs_quantized_in_encoder_decoder_and_between(calls):
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=99, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=8, max_source_positions=60,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    sound = torch.randn(1, 8, 120, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), sage_patch.applied(model, EVERYTHING):
        model(input_features=sound, decoder_input_ids=IDS[:1, :20])
    assert len(calls) == 3 and calls.masks() == {"none"} and calls.reasons(LONG_ENOUGH) == {""}
    assert [(c.q_len, c.kv_len, c.is_causal) for c, _ in calls] == [(60, 60, False), (20, 20, True), (20, 60, False)]
    for given in ({}, {"cache_implementation": "static"}):
        expected = model.generate(sound, max_new_tokens=5, do_sample=False, **given)
        with sage_patch.applied(model, EXACT):
            assert torch.equal(model.generate(sound, max_new_tokens=5, do_sample=False, **given), expected)


PACKING = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl_vision", "glm4v_vision", "qwen3_asr_encoder"]


def implementations(model: nn.Module) -> set[str]:
    return {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}


@pytest.mark.parametrize("name", PACKING)
def test_towers_that_split_make_one_call_a_layer(name, calls):
    """Images and windows are sequences of one packed call; the numbers are those of the calls one by one."""
    model = zoo.build(FAMILIES[name], "eager")
    inputs = zoo.inputs(FAMILIES[name], model)
    before = implementations(model)
    expected = zoo.outputs(model, inputs)
    for policy, limit in ((EXACT, 1e-5), (EVERYTHING, 0.2)):
        with sage_patch.applied(model, policy) as handle:
            assert PACKED_NAMES["bool"] in implementations(model)
            got = zoo.outputs(model, inputs)
            assert all(row["calls"] == 1 for row in handle.rows())
        for a, b in zip(got, expected, strict=True):
            assert not a.numel() or scaled_difference(a, b) < limit
    packed = [(call, options) for call, options in calls if call.varlen]
    assert packed and calls.reasons(LONG_ENOUGH) == {""}
    for call, options in packed:
        lengths = options.cu_seqlens_q.diff()
        assert call.q_len == call.kv_len == int(lengths.max())
        assert call.batch == max(1, int(options.cu_seqlens_q[-1]) // call.q_len)
    assert implementations(model) == before
    assert zoo.outputs(model, inputs)[0].equal(expected[0])


def test_short_windows_stay_exact_in_one_call(calls):
    """The longest sequence decides, not the sum."""
    model = zoo.build(FAMILIES["qwen3_vl_vision"], "eager")
    inputs = zoo.inputs(FAMILIES["qwen3_vl_vision"], model)
    with sage_patch.applied(model, Policy(quantize_fp32=True, min_q_len=1)) as handle:
        zoo.outputs(model, inputs)
        assert {row["reason"] for row in handle.rows()} == {"short_kv"}
    assert all(call.varlen for call, _ in calls)


@pytest.mark.parametrize("name", ["pixtral", "siglip_vision_model", "llama", "kosmos-2.5"])
def test_the_packing_name_is_not_given_where_flash_means_more(name):
    """Pixtral drops its mask under "flash", Kosmos hands on a 2-D one; others never ask."""
    model = zoo.build(FAMILIES[name], "eager")
    with sage_patch.applied(model, EXACT):
        assert not any("flash" in found for found in implementations(model))


def test_the_packing_name_alone_is_refused():
    """transformers refuses to load it, as it knows no such flash kernel; written into a configuration, we do."""
    adapter.register()
    model = text_model()
    with pytest.raises(ValueError, match="flash attention implementation"):
        model.set_attn_implementation(PACKED_NAMES["bool"])
    model.config._attn_implementation_internal = PACKED_NAMES["bool"]
    with pytest.raises(UnsupportedCall, match=r"apply\(\)"):
        logits(model, ALONE)
