"""The "sage2" name in transformers' registries: causality, arguments, masks, the flag, and refusals by name."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn

import sage_patch
from sage_patch.attention import UnsupportedCall
from sage_patch.integrations.transformers import (
    NAMES,
    OwnAttentionError,
    sage2_attention_forward,
)
from tiny import EVERYTHING, logits, text_config, text_model, tokens

IDS = tokens(3, 48)
LEFT_PADDING = torch.ones_like(IDS)
LEFT_PADDING[0, :5] = 0
LEFT_PADDING[1, :47] = 0


@pytest.mark.parametrize("attribute", ["missing", True, False])
@pytest.mark.parametrize("q_len", [1, 6])
@pytest.mark.parametrize("masked", [False, True])
def test_causality_is_resolved_as_transformers_does(attribute, q_len, masked):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = nn.Module()
    if attribute != "missing":
        module.is_causal = attribute
    query, key, value = torch.randn(1, 2, q_len, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    mask = torch.rand(1, 1, q_len, 6) > 0.3 if masked else None
    expected, _ = sdpa_attention_forward(module, query, key, value, mask)
    got, _ = sage2_attention_forward(module, query, key, value, mask)
    assert torch.equal(got, expected)


def test_unknown_argument_reaches_the_original_function(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    received = {}

    def original(module, query, key, value, attention_mask, **kwargs):
        received.update(kwargs)
        return query.transpose(1, 2), None

    monkeypatch.setitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, "sdpa", original)
    model = text_model()
    with sage_patch.applied(model, EVERYTHING) as handle:
        logits(model, IDS, foo=1)
        assert {(r["recipe"], r["reason"]) for r in handle.rows()} == {("exact", "argument_foo")}
    assert received["foo"] == 1 and received["scaling"] == 0.25


@pytest.mark.parametrize("name", ["block_indices", "read_index"])
def test_arguments_that_choose_keys_are_refused(name):
    model = text_model()
    with sage_patch.applied(model, EVERYTHING), pytest.raises(UnsupportedCall, match=name):
        logits(model, IDS, **{name: torch.zeros(1, dtype=torch.long)})


def test_mask_of_the_custom_name_equals_sdpa():
    from transformers.masking_utils import create_causal_mask

    masks = {}
    for name in ("sdpa", "sage2"):
        config = text_config()
        config._attn_implementation = name
        masks[name] = create_causal_mask(
            config=config,
            inputs_embeds=torch.zeros(3, 48, 64),
            attention_mask=LEFT_PADDING,
            past_key_values=None,
        )
    assert masks["sage2"] is not None
    assert torch.equal(masks["sage2"], masks["sdpa"])


def test_flag_at_load_and_set_later_without_apply():
    model = text_model(attn_implementation="sage2")
    reference = logits(text_model(), IDS)
    assert torch.equal(logits(model, IDS), reference)  # float32: exact, counted
    assert {(r["site"], r["reason"]) for r in sage_patch.rows()} == {
        ("LlamaAttention.0", "dtype_float32"),
        ("LlamaAttention.1", "dtype_float32"),
    }
    later = text_model()
    later.set_attn_implementation("sage2")
    long = tokens(1, 300)
    later.to(torch.bfloat16)
    logits(later, long)
    assert ("qk_int8_pv_fp8", "") in {(r["recipe"], r["reason"]) for r in sage_patch.rows()}


def test_import_is_light_and_the_flag_works_in_a_fresh_process(tmp_path):
    text_model().save_pretrained(tmp_path)
    code = inspect.cleandoc(f"""
        import sys, sage_patch
        assert not {{"torch", "transformers"}} & set(sys.modules)
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, attn_implementation="sage2")
        assert model.config._attn_implementation == "sage2"
    """)
    subprocess.run([sys.executable, "-c", code], check=True)


OWN_ATTENTION = [
    "bloom",
    "falcon",
    "gptj",
    "mpt",
    "codegen",
    "xglm",
    "gpt_neo",
    "rembert",
    "megatron-bert",
    "openai-gpt",
]


@pytest.mark.parametrize("kind", OWN_ATTENTION)
def test_own_attention_families_are_refused_by_name_and_unchanged(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind)
    for name, value in dict(
        num_hidden_layers=1, n_layer=1, n_layers=1, num_layers=1, hidden_size=32, n_embd=32, d_model=32, vocab_size=99,
        num_attention_heads=4, n_head=4, n_heads=4, attention_heads=4, ffn_dim=32, intermediate_size=32, rotary_dim=8,
        attention_types=[[["global"], 1]], attention_layers=["global"],
        input_embedding_size=32, output_embedding_size=32,
    ).items():  # fmt: skip
        if hasattr(config, name):
            setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config).eval()
    before = {n: dict(m.__dict__) for n, m in model.named_modules()}
    with pytest.raises(OwnAttentionError, match="own code"):
        sage_patch.apply(model)
    assert {n: dict(m.__dict__) for n, m in model.named_modules()} == before


@pytest.mark.parametrize("kind", ["bloom", "codegen", "xglm", "rembert"])
def test_flag_on_own_attention_raises_instead_of_wrong_logits(kind):
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from sage_patch.integrations.transformers import refuse_own_attention

    config_type = type(AutoConfig.for_model(kind))
    MODEL_FOR_CAUSAL_LM_MAPPING[config_type]  # loads the modeling file, as any model does
    with pytest.raises(OwnAttentionError, match="own code"):
        refuse_own_attention(config_type)


def test_module_with_no_attributes_at_all_works():
    query = torch.randn(1, 4, 5, 8)
    key = torch.randn(1, 2, 5, 8)
    out, weights = sage2_attention_forward(nn.Module(), query, key, key, None)
    assert out.shape == (1, 5, 4, 8) and out.is_contiguous() and weights is None


def test_registered_signature_names_match_transformers():
    parameters = list(inspect.signature(sage2_attention_forward).parameters)
    assert parameters[:5] == ["module", "query", "key", "value", "attention_mask"]
    assert NAMES["implicit"] == "sage2"


def test_flag_survives_full_graph_compile_with_masks():
    """No graph break on the way to the operator, with and without padding; compiled calls are counted."""
    model = text_model(attn_implementation="sage2").to(torch.bfloat16)
    ids = tokens(2, 160)
    padding = torch.ones_like(ids)
    padding[0, :9] = 0
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for mask in (None, padding):
        eager = logits(model, ids, attention_mask=mask, use_cache=False)
        assert torch.equal(logits(compiled, ids, attention_mask=mask, use_cache=False), eager)
    assert {(r["site"], r["recipe"], r["calls"]) for r in sage_patch.rows()} >= {("*", "qk_int8_pv_fp8", 4)}
