"""transformers models under "sage2": every situation of the interface is right, quantized or exact with a reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sage_patch
from sage_patch.attention import UnsupportedCall
from sage_patch.policy import Policy
from tiny import EVERYTHING, EXACT, logits, relative_l1, scaled_difference, text_model, tokens

IDS = tokens(3, 48)
LEFT_PADDING = torch.ones_like(IDS)
LEFT_PADDING[0, :5] = 0
LEFT_PADDING[1, :47] = 0
RIGHT_PADDING = torch.ones_like(IDS)
RIGHT_PADDING[0, 30:] = 0

# (family, overrides): one row per attention feature of decoder models. Every expert runs for every token, so that
# a small difference cannot flip a routing choice.
FEATURES = [
    pytest.param("llama", {}, id="grouped-heads"),
    pytest.param("mistral", {"sliding_window": 9}, id="sliding-window"),
    pytest.param("gemma2", {"sliding_window": 9, "attn_logit_softcapping": 2.0}, id="softcap-and-window"),
    pytest.param("gpt_oss", {"sliding_window": 9, "num_local_experts": 2, "num_experts_per_tok": 2}, id="sinks"),
    pytest.param(
        "deepseek_v3",
        {
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
            "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1,
            "topk_group": 1, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
        },
        id="value-head-dim-differs",
    ),
    pytest.param("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}, id="no-rope"),
]  # fmt: skip


def strengthen_sinks(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            with torch.no_grad():
                parameter.fill_(3.0)
    return model


def eager_twin(kind: str, overrides: dict) -> nn.Module:
    return strengthen_sinks(text_model(kind, "eager", **overrides))


@pytest.mark.parametrize("kind, overrides", FEATURES)
@pytest.mark.parametrize("mask", [None, LEFT_PADDING, RIGHT_PADDING], ids=["no-mask", "left-padding", "right-padding"])
def test_exact_policy_equals_eager(kind, overrides, mask):
    model = eager_twin(kind, overrides)
    expected = logits(model, IDS, attention_mask=mask)
    with sage_patch.applied(model, EXACT):
        got = logits(model, IDS, attention_mask=mask)
    real = mask.bool() if mask is not None else torch.ones_like(IDS, dtype=torch.bool)
    assert torch.isfinite(got).all()
    assert scaled_difference(got[real], expected[real]) < 1e-5


@pytest.mark.parametrize("kind, overrides", FEATURES)
@pytest.mark.parametrize("mask", [None, LEFT_PADDING, RIGHT_PADDING], ids=["no-mask", "left-padding", "right-padding"])
def test_quantized_stays_close_and_is_counted(kind, overrides, mask):
    model = eager_twin(kind, overrides)
    expected = logits(model, IDS, attention_mask=mask)
    with sage_patch.applied(model, EVERYTHING) as handle:
        got = logits(model, IDS, attention_mask=mask)
        assert {(r["recipe"], r["calls"]) for r in handle.rows()} == {("qk_int8_pv_fp8", 1)}
    real = mask.bool() if mask is not None else torch.ones_like(IDS, dtype=torch.bool)
    assert torch.isfinite(got).all()
    assert relative_l1(got[real], expected[real]) < 0.10


def test_left_padded_rows_equal_the_unpadded_run():
    model = text_model()
    alone = logits(model, IDS[:1, 5:])
    with sage_patch.applied(model, EXACT):
        padded = logits(model, IDS, attention_mask=LEFT_PADDING)
    assert scaled_difference(padded[:1, 5:], alone) < 1e-4
    with sage_patch.applied(model, EVERYTHING):
        quantized = logits(model, IDS[:1, 5:])
        padded = logits(model, IDS, attention_mask=LEFT_PADDING)
    assert relative_l1(padded[:1, 5:], quantized) < 0.10  # other groups share a scale, no more


def test_sink_is_not_lost():
    """A dropped sink leaves the cosine at 0.9999: look at the norm."""
    model = eager_twin("gpt_oss", dict(num_local_experts=2, num_experts_per_tok=2))
    outputs: list[torch.Tensor] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda m, a, out: outputs.append(out[0]))
    logits(model, IDS)
    with sage_patch.applied(model, EVERYTHING):
        logits(model, IDS)
    assert abs(float(outputs[1].norm() / outputs[0].norm()) - 1) < 0.03


def generated(model: nn.Module, ids: torch.Tensor, **options) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, **options)


GENERATION = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "chunked": {"prefill_chunk_size": 16},
    "prompt-lookup": {"prompt_lookup_num_tokens": 3},
    "beams": {"num_beams": 2},
}


@pytest.mark.parametrize("way", GENERATION)
@pytest.mark.parametrize(
    "kind, overrides", [("llama", {}), ("mistral", {"sliding_window": 9})], ids=["llama", "window"]
)
def test_generation_is_the_same_under_the_exact_policy(way, kind, overrides):
    model = text_model(kind, **overrides)
    ids, options = IDS[:1], GENERATION[way]
    expected = generated(model, ids, **options)
    with sage_patch.applied(model, EXACT) as handle:
        assert torch.equal(generated(model, ids, **options), expected)
        assert handle.rows()
    assert torch.equal(generated(model, ids, **options), expected)


@pytest.mark.parametrize("way", GENERATION)
def test_quantized_generation_runs_prefill_and_says_why_decode_is_exact(way):
    model = text_model()
    policy = Policy(quantize_fp32=True, min_q_len=2, min_kv_len=1)
    with sage_patch.applied(model, policy) as handle:
        generated(model, IDS[:1], **GENERATION[way])
        seen = {(r["recipe"], r["reason"]) for r in handle.rows()}
    assert ("qk_int8_pv_fp8", "") in seen
    assert seen <= {("qk_int8_pv_fp8", ""), ("exact", "decode")}
    assert way == "prompt-lookup" or ("exact", "decode") in seen


def test_padded_batch_generation_equals_unpatched():
    model = text_model()
    expected = generated(model, IDS, attention_mask=LEFT_PADDING)
    with sage_patch.applied(model, EXACT):
        assert torch.equal(generated(model, IDS, attention_mask=LEFT_PADDING), expected)


def test_packed_rows_do_not_see_each_other():
    model = text_model()
    positions = torch.cat([torch.arange(20), torch.arange(28)])[None]
    changed = IDS[:1].clone()
    changed[0, :20] = 5
    for policy in (EXACT, EVERYTHING):
        with sage_patch.applied(model, policy):
            first = logits(model, IDS[:1], position_ids=positions, use_cache=False)
            second = logits(model, changed, position_ids=positions, use_cache=False)
        # the mean over all keys and the shared scales move with the other document; the attention must not
        assert relative_l1(second[:, 20:], first[:, 20:]) < (1e-6 if policy is EXACT else 0.10)
        alone = logits(model, IDS[:1, 20:])
        assert relative_l1(first[:, 20:], alone) < (1e-5 if policy is EXACT else 0.10)


def test_cross_attention_and_learned_position_bias():
    from transformers import AutoModelForSeq2SeqLM, BartConfig, T5Config

    torch.manual_seed(0)
    small = dict(vocab_size=99, d_model=64, decoder_start_token_id=0, pad_token_id=0)
    t5 = T5Config(d_kv=16, d_ff=96, num_layers=2, num_heads=4, **small)
    bart = BartConfig(
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
        decoder_ffn_dim=96, **small,
    )  # fmt: skip
    for config, sites in ((t5, 6), (bart, 6)):
        model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
        inputs = dict(input_ids=IDS, attention_mask=RIGHT_PADDING, decoder_input_ids=IDS[:, :20])
        with torch.no_grad():
            expected = model(**inputs).logits
            with sage_patch.applied(model, EXACT):
                assert scaled_difference(model(**inputs).logits, expected) < 1e-5
            with sage_patch.applied(model, EVERYTHING) as handle:
                assert relative_l1(model(**inputs).logits, expected) < 0.10
                assert sorted(s.role for s in handle.plan.sites) == ["cross"] * 2 + ["self"] * 4
                assert len(handle.rows()) == sites
                assert {r["recipe"] for r in handle.rows()} == {"qk_int8_pv_fp8"}


def test_output_attentions_returns_the_weights_of_eager():
    model = text_model(attn_implementation="eager")
    with torch.no_grad():
        expected = model(IDS, attention_mask=LEFT_PADDING, output_attentions=True).attentions
        with sage_patch.applied(model, EVERYTHING) as handle:
            got = model(IDS, attention_mask=LEFT_PADDING, output_attentions=True).attentions
            assert {r["reason"] for r in handle.rows()} == {"output_attentions"}
    assert len(got) == len(expected) == 2
    assert torch.allclose(got[0][:1, :, 5:], expected[0][:1, :, 5:], atol=1e-6)


def test_autocast_mixed_dtypes_follow_autocast():
    model = text_model()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(IDS, use_cache=False).logits
        with sage_patch.applied(model, Policy(min_q_len=1, min_kv_len=1)) as handle:
            got = model(IDS, use_cache=False).logits
            assert {(r["recipe"], r["reason"]) for r in handle.rows()} == {("qk_int8_pv_fp8", "")}
    assert got.dtype == expected.dtype
    assert relative_l1(got.float(), expected.float()) < 0.10


def test_float32_is_exact_unless_asked_and_the_report_says_so():
    model = text_model()
    expected = logits(model, IDS)
    with sage_patch.applied(model, Policy(min_q_len=1, min_kv_len=1)) as handle:
        for _ in range(5):
            assert torch.equal(logits(model, IDS), expected)
        assert {(r["reason"], r["calls"]) for r in handle.rows()} == {("dtype_float32", 5)}


def test_short_calls_go_exact_by_default():
    model = text_model()
    short, long = tokens(1, 77), tokens(1, 200)
    expected = logits(model, short)
    with sage_patch.applied(model, Policy(quantize_fp32=True)) as handle:
        assert torch.equal(logits(model, short), expected)
        logits(model, long)
        assert {(r["recipe"], r["reason"]) for r in handle.rows()} == {
            ("exact", "short_kv"),
            ("qk_int8_pv_fp8", ""),
        }


def test_strict_policy_raises_naming_the_reason():
    model = text_model()
    with sage_patch.applied(model, Policy(on_unsupported="error", min_q_len=1, min_kv_len=1)):
        with pytest.raises(UnsupportedCall, match="dtype_float32"):
            logits(model, IDS)


# ---- training


@pytest.mark.parametrize("kind, overrides", FEATURES[:5])
def test_gradients_are_those_of_the_unpatched_model(kind, overrides):
    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        model.zero_grad()
        labels = IDS.masked_fill(RIGHT_PADDING == 0, -100)  # what a row of padding attends to is nobody's business
        model(input_ids=IDS, attention_mask=RIGHT_PADDING, labels=labels).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    model = eager_twin(kind, overrides)
    expected = gradients(model)
    with sage_patch.applied(model, EVERYTHING) as handle:
        got = gradients(model)
        assert {r["reason"] for r in handle.rows()} == {"needs_grad"}
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(got[name], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max() + 1)), name


def test_dropout_in_training_is_kept():
    model = text_model(attention_dropout=0.5)
    model.train()
    with torch.no_grad(), sage_patch.applied(model, EVERYTHING) as handle:
        first, second = model(IDS).logits, model(IDS).logits
        assert {r["reason"] for r in handle.rows()} == {"dropout"}
    assert not torch.equal(first, second)
