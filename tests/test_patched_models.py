"""Whole models under the patch: what they generate, the masks and rules that reach their calls, what is refused, and
which layer a score finds.

Life cycle, mask patterns and the transformers interface have files of their own: test_patch.py, test_masks.py,
test_transformers.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sage_patch
from sage_patch.attention import UnsupportedCall
from sage_patch.config import load_run_config
from sage_patch.evaluation.calls import score
from sage_patch.evaluation.models import load_text_model
from sage_patch.kernels import ops
from sage_patch.policy import Policy, Rule, Span
from tiny import EVERYTHING, captured, logits, text_model, tokens

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def trained():
    """The shipped trained model with its tokenizer and four prompts of different lengths."""
    model, tokenizer = load_text_model(load_run_config(ROOT / "configs/tiny.yaml").model)
    text = (ROOT / "tests/assets/heldout.txt").read_text()
    ids = tokenizer(text[:9000], return_tensors="pt").input_ids[0]
    lengths = (200, 170, 141, 97)
    batch = torch.zeros(4, max(lengths), dtype=torch.long)
    mask = torch.zeros_like(batch)
    for row, length in enumerate(lengths):
        batch[row, -length:] = ids[row * 250 : row * 250 + length]
        mask[row, -length:] = 1
    return model, ids, batch, mask


def test_prefill_decode_and_padded_batches_keep_their_tokens(trained):
    """Perplexity can stay while generation breaks; look at prefill, greedy decode and a padded batch."""
    model, ids, batch, mask = trained
    window = ids[None, :512]
    greedy = dict(max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
    prefill = logits(model, window)
    single = model.generate(window[:, :200], **greedy)[0, 200:]
    padded = model.generate(batch, attention_mask=mask, **greedy)[:, batch.shape[1] :]
    with sage_patch.applied(model, Policy(recipe="qk_int8_pv_fp16", quantize_fp32=True)) as handle:
        assert (logits(model, window).argmax(-1) == prefill.argmax(-1)).float().mean() >= 0.95
        got_single = model.generate(window[:, :200], **greedy)[0, 200:]
        got_padded = model.generate(batch, attention_mask=mask, **greedy)[:, batch.shape[1] :]
        assert {r["reason"] for r in handle.rows()} == {"", "decode"}
    assert_same_up_to_a_near_tie(model, window[0, :200], got_single, single)
    for row in range(len(batch)):
        assert_same_up_to_a_near_tie(model, batch[row][mask[row] == 1], got_padded[row], padded[row])


def assert_same_up_to_a_near_tie(model, prompt, got, want) -> None:
    """Greedy texts are the same, or part where the unpatched model likes both tokens alike: within 0.25 nats."""
    if torch.equal(got, want):
        return
    at = int((got != want).nonzero()[0])
    scores = logits(model, torch.cat([prompt, want[:at]])[None])[0, -1].log_softmax(-1)
    gap = float(scores[want[at]] - scores[got[at]])
    assert gap <= 0.25, f"token {at}: {gap:.3f} nats"


def test_mask_reaches_the_core_as_the_model_made_it():
    """A patch adds no mask and removes none."""
    model, ids = text_model(), tokens(2, 40)
    padding = torch.ones_like(ids)
    padding[0, :9] = 0
    seen: list[torch.Tensor | None] = []
    with sage_patch.applied(model, Policy(recipe="exact")), ops.observe(lambda call: seen.append(call.attn_mask)):
        logits(model, ids)
        assert seen == [None, None]
        seen.clear()
        logits(model, ids, attention_mask=padding)
    assert all(mask is not None for mask in seen)
    visible = torch.ones(40, 40, dtype=torch.bool).tril() & padding[:, None, None].bool()
    assert torch.equal(seen[0], visible.expand(2, 1, 40, 40))


def test_policy_by_role_leaves_cross_attention_alone():
    """A backend meant for self-attention must not run in cross-attention."""
    from transformers import AutoModelForSeq2SeqLM, T5Config

    torch.manual_seed(0)
    config = T5Config(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=99, decoder_start_token_id=0)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    policy = Policy(
        recipe="exact",
        quantize_fp32=True,
        min_q_len=1,
        min_kv_len=1,
        rules=[Rule(role="self", recipe="qk_int8_pv_fp8")],
    )
    with torch.no_grad(), sage_patch.applied(model, policy) as handle:
        model(input_ids=tokens(2, 30), decoder_input_ids=tokens(2, 20))
        by_role = {s.name: s.role for s in handle.plan.sites}
        for row in handle.rows():
            assert row["recipe"] == ("exact" if by_role[row["site"]] == "cross" else "qk_int8_pv_fp8")


def test_strict_only_where_asked():
    """Strict on one layer raises there, and the other layers stay quietly counted."""
    model, ids = text_model(), tokens(1, 30)
    strict = Policy(min_q_len=1, min_kv_len=1, rules=[Rule(layers=Span.parse(1), on_unsupported="error")])
    with sage_patch.applied(model, strict) as handle:
        with pytest.raises(UnsupportedCall, match="layers.1.self_attn"):
            logits(model, ids)
        assert [(r["site"], r["reason"]) for r in handle.rows()] == [("model.layers.0.self_attn", "dtype_float32")]


def test_explicit_request_is_used_or_the_error_names_layer_and_reason():
    """An explicitly requested recipe is never quietly not used."""
    model, ids = text_model(), tokens(1, 30)
    policy = Policy(recipe="qk_int8_pv_fp8", on_unsupported="error", min_q_len=1, min_kv_len=1)
    with sage_patch.applied(model, policy):
        with pytest.raises(UnsupportedCall, match=r"model\.layers\.0\.self_attn.*dtype_float32"):
            logits(model, ids)


@pytest.mark.parametrize("recipe", ["qk_int8_pv_fp16", "qk_int8_pv_fp8", "qk_int4_pv_fp16", "qk_int4_pv_fp8"])
@pytest.mark.parametrize("smooth", ["none", "k", "q", "qk"])
@pytest.mark.parametrize("smooth_v", ["on", "off"])
def test_every_documented_combination_runs_quantized(recipe, smooth, smooth_v):
    """No combination of options fails inside and silently falls back."""
    model, ids = text_model(), tokens(1, 30)
    name = f"{recipe}:smooth={smooth},smooth_v={smooth_v}"
    with sage_patch.applied(model, Policy(recipe=name, quantize_fp32=True, min_q_len=1, min_kv_len=1)) as handle:
        assert torch.isfinite(logits(model, ids)).all()
        assert {r["recipe"] for r in handle.rows()} == {name}


def test_sinks_are_supported_not_refused_or_dropped():
    """A feature that other backends run as garbage is computed here, and the report shows it ran."""
    model = text_model("gpt_oss", num_local_experts=2, num_experts_per_tok=2)
    with sage_patch.applied(model, EVERYTHING) as handle:
        logits(model, tokens(1, 40))
        assert {r["recipe"] for r in handle.rows()} == {"qk_int8_pv_fp8"}


def test_a_planted_bad_layer_ranks_first():
    """Capture and score find the layer whose keys quantize badly."""
    model, ids = text_model(num_hidden_layers=4), tokens(1, 200)
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[5] *= 1000
    calls = captured(model, lambda: model(ids))
    errors = {c.site: score(c, "qk_int8_pv_fp8")["rel_l1"] for c in calls}
    assert max(errors, key=errors.__getitem__) == "model.layers.2.self_attn"
