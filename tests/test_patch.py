"""The life of a patch: what apply() changes, what revert() puts back, and what is never touched."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import sage_patch
from sage_patch.patch import PatchError
from sage_patch.policy import Policy, PolicyError, Rule, Span
from tiny import EVERYTHING, EXACT, logits, text_model, tokens

IDS = tokens(2, 40)


def snapshot(model: nn.Module) -> dict[str, object]:
    """Everything about a model that a patch could change, by identity where identity matters."""
    return {
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "attributes": {n: {k: id(v) for k, v in m.__dict__.items()} for n, m in model.named_modules()},
        "forwards": [type(m).forward for m in model.modules()],
        "implementation": model.config._attn_implementation,
        "config": model.config.to_dict(),
        "state": list(model.state_dict()),
    }


def registry_snapshot() -> dict[str, object]:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    tables = {"attention": AttentionInterface._global_mapping, "mask": AttentionMaskInterface._global_mapping}
    kept: dict[str, object] = {
        t: {k: id(v) for k, v in table.items() if not k.startswith("sage2")} for t, table in tables.items()
    }
    kept["sdpa"] = id(torch.nn.functional.scaled_dot_product_attention)
    return kept


def test_revert_restores_identity_and_bits():
    model = text_model()
    reference, before, registries = logits(model, IDS), snapshot(model), registry_snapshot()
    for _ in range(3):  # patch, revert, patch, revert: nothing may accumulate
        handle = sage_patch.apply(model, EVERYTHING)
        assert not torch.equal(logits(model, IDS), reference)
        handle.revert()
        assert snapshot(model) == before
        assert torch.equal(logits(model, IDS), reference)
    assert registry_snapshot() == registries
    handle.revert()  # a second revert is harmless


def test_names_and_state_dict_do_not_change_while_patched():
    model = text_model()
    before = snapshot(model)
    with sage_patch.applied(model, EVERYTHING):
        during = snapshot(model)
        assert during["modules"] == before["modules"]
        assert during["state"] == before["state"]
        assert during["forwards"] == before["forwards"]


def test_exception_inside_the_context_reverts():
    model = text_model()
    reference, before = logits(model, IDS), snapshot(model)
    with pytest.raises(RuntimeError, match="boom"), sage_patch.applied(model, EVERYTHING):
        logits(model, IDS)
        raise RuntimeError("boom")
    assert snapshot(model) == before
    assert torch.equal(logits(model, IDS), reference)


def test_second_model_is_never_touched():
    patched, other = text_model(seed=0), text_model(seed=1)
    padding = torch.ones_like(IDS)
    padding[0, :7] = 0
    reference = logits(other, IDS), logits(other, IDS, attention_mask=padding)
    with sage_patch.applied(patched, EVERYTHING):
        for _ in range(2):
            logits(patched, IDS)
            assert torch.equal(logits(other, IDS), reference[0])
            assert torch.equal(logits(other, IDS, attention_mask=padding), reference[1])


def test_models_that_share_one_config_object_stay_independent():
    from transformers import LlamaForCausalLM

    first = text_model()
    torch.manual_seed(3)
    second = LlamaForCausalLM(first.config).eval()
    assert second.config is first.config
    reference = logits(second, IDS)
    with sage_patch.applied(first, EVERYTHING) as handle:
        assert torch.equal(logits(second, IDS), reference)
        logits(first, IDS)
        assert sum(row["calls"] for row in handle.rows()) == 2
    assert second.config is first.config


def test_two_handles_count_apart():
    first, second = text_model(seed=0), text_model(seed=1)
    with sage_patch.applied(first, EVERYTHING) as one, sage_patch.applied(second, EVERYTHING) as two:
        logits(first, IDS)
        logits(first, IDS)
        logits(second, IDS)
        assert [sum(r["calls"] for r in h.rows()) for h in (one, two)] == [4, 2]


def test_applying_twice_is_an_error_with_the_remedy():
    model = text_model()
    with sage_patch.applied(model, EVERYTHING):
        with pytest.raises(PatchError, match=r"already patched.*revert\(\)"):
            sage_patch.apply(model)
    sage_patch.apply(model).revert()


def test_compiled_model_is_refused_with_the_remedy():
    model = torch.compile(text_model(), backend="eager")
    with pytest.raises(PatchError, match="apply sage_patch first"):
        sage_patch.apply(model)


def test_nothing_to_patch_is_an_error():
    with pytest.raises(PatchError, match="nothing to patch"):
        sage_patch.apply(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(PatchError, match="takes a torch.nn.Module"):
        sage_patch.apply("model")  # type: ignore[arg-type]


def test_policy_error_leaves_the_model_unchanged():
    model = text_model()
    before = snapshot(model)
    policy = Policy(rules=[Rule(match="*.attn2.*", recipe="exact")])
    with pytest.raises(PolicyError, match="matched no site"):
        sage_patch.apply(model, policy)
    assert snapshot(model) == before


def test_report_names_every_site_and_says_when_unused():
    model = text_model()
    policy = Policy(
        quantize_fp32=True,
        min_q_len=1,
        min_kv_len=1,
        rules=[Rule(layers=Span.parse(-1), recipe="exact", reason="last block")],
    )
    with sage_patch.applied(model, policy) as handle:
        assert "patched but unused" in handle.report()
        logits(model, IDS)
        report = handle.report()
        assert "patched but unused" not in report
        assert "model.layers.0.self_attn" in report and "model.layers.1.self_attn" in report
        assert [(r["site"], r["recipe"], r["reason"], r["calls"]) for r in handle.rows()] == [
            ("model.layers.0.self_attn", "qk_int8_pv_fp8", "", 1),
            ("model.layers.1.self_attn", "exact", "policy", 1),
        ]
        assert "reference backend" in report
    assert sum(r["calls"] for r in handle.rows()) == 2  # counts stay readable after revert


def test_skipped_layers_are_bit_equal_to_the_original():
    model = text_model(num_hidden_layers=4)
    captured: dict[int, torch.Tensor] = {}

    def keep(index: int):
        return lambda module, args, out: captured.__setitem__(index, out[0].clone())

    hooks = [layer.self_attn.register_forward_hook(keep(i)) for i, layer in enumerate(model.model.layers)]
    logits(model, IDS)
    original = dict(captured)
    policy = Policy(
        quantize_fp32=True,
        min_q_len=1,
        min_kv_len=1,
        rules=[Rule(layers=Span.parse({"first": 2}), recipe="exact")],
    )
    with sage_patch.applied(model, policy):
        logits(model, IDS)
    for hook in hooks:
        hook.remove()
    assert torch.equal(captured[0], original[0]) and torch.equal(captured[1], original[1])
    assert not torch.equal(captured[2], original[2])


def test_deepcopy_of_a_patched_model_is_independent():
    model = text_model()
    with sage_patch.applied(model, EVERYTHING) as handle:
        twin = copy.deepcopy(model)
        assert torch.equal(logits(twin, IDS), logits(model, IDS))
        calls = sum(r["calls"] for r in handle.rows())
        with torch.no_grad():
            twin.model.layers[0].self_attn.q_proj.weight.mul_(-1)
        changed = logits(twin, IDS)
        assert not torch.equal(changed, logits(model, IDS))
        assert sum(r["calls"] for r in handle.rows()) == calls + 2  # the twin does not count here
    assert torch.equal(logits(twin, IDS), changed)  # reverting the original leaves the copy patched


def test_pickle_round_trip_keeps_the_plan():
    model = text_model()
    with sage_patch.applied(model, EVERYTHING):
        data, patched = pickle.dumps(model), logits(model, IDS)
    again = pickle.loads(data)
    assert torch.equal(logits(again, IDS), patched)


def test_save_pretrained_writes_an_ordinary_model(tmp_path):
    from transformers import AutoModelForCausalLM

    model = text_model()
    reference = logits(model, IDS)
    with sage_patch.applied(model, EVERYTHING):
        model.save_pretrained(tmp_path)
    assert "sage" not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config._attn_implementation == "sdpa"
    assert torch.equal(logits(again, IDS), reference)


def test_lora_adapters_before_and_after():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(text_model(), lora).eval()
    reference = logits(wrapped, IDS)
    with sage_patch.applied(wrapped, EVERYTHING) as handle:
        assert [s.name for s in handle.plan.sites] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
        assert not torch.equal(logits(wrapped, IDS), reference)
        assert all(r["recipe"] == "qk_int8_pv_fp8" for r in handle.rows())
    assert torch.equal(logits(wrapped, IDS), reference)

    model = text_model()
    with sage_patch.applied(model, EVERYTHING) as handle:
        late = peft.get_peft_model(model, lora).eval()
        logits(late, IDS)
        assert sum(r["calls"] for r in handle.rows()) == 2


def test_accelerate_offload_keeps_working():
    from accelerate import cpu_offload

    model = text_model()
    with sage_patch.applied(model, EVERYTHING):
        reference = logits(model, IDS)
    offloaded = cpu_offload(text_model(), execution_device=torch.device("cpu"))
    with sage_patch.applied(offloaded, EVERYTHING) as handle:
        assert torch.equal(logits(offloaded, IDS), reference)
        assert sum(r["calls"] for r in handle.rows()) == 2


def test_foreign_patch_of_sdpa_survives_in_either_order(monkeypatch):
    original = torch.nn.functional.scaled_dot_product_attention
    calls = []

    def foreign(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    model = text_model()
    handle = sage_patch.apply(model, EXACT)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", foreign)
    handle.revert()
    assert torch.nn.functional.scaled_dot_product_attention is foreign
    with sage_patch.applied(model, EVERYTHING):
        logits(model, IDS)
    assert torch.nn.functional.scaled_dot_product_attention is foreign
    logits(model, IDS)
    assert calls


def test_plan_needs_no_weights():
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text_model().config)
    rows = sage_patch.plan(model, Policy(rules=[Rule(layers=Span.parse(0), recipe="exact")])).rows()
    assert [(r["name"], r["heads"], r["kv_heads"], r["head_dim"], r["recipe"]) for r in rows] == [
        ("model.layers.0.self_attn", 4, 2, 16, "exact"),
        ("model.layers.1.self_attn", 4, 2, 16, "sage2"),
    ]


def test_compiled_after_apply_still_counts():
    model = text_model()
    with sage_patch.applied(model, EVERYTHING) as handle:
        reference = logits(model, IDS)
        eager_calls = sum(r["calls"] for r in handle.rows())
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(3):
            assert torch.allclose(logits(compiled, IDS, use_cache=False), reference, atol=1e-5)
        assert sum(r["calls"] for r in handle.rows()) == eager_calls + 6
        assert {r["site"] for r in handle.rows()} >= {"*"}


def test_missing_kernels_are_found_at_apply_with_the_model_untouched(monkeypatch):
    from sage_patch.kernels import library, ops
    from sage_patch.kernels.build import BuildError

    def no_library(index):
        raise BuildError("no nvcc was found")

    model = text_model()
    before, registries = snapshot(model), registry_snapshot()
    monkeypatch.setattr(ops, "backend_for", lambda device: "sm90")
    monkeypatch.setattr(library, "prepare", no_library)
    with pytest.raises(BuildError, match="no nvcc"):
        sage_patch.apply(model)
    assert snapshot(model) == before and registry_snapshot() == registries


def test_a_card_without_kernels_is_said_once_at_apply(monkeypatch):
    from sage_patch.kernels import ops

    model = text_model()
    monkeypatch.setattr(torch.nn.Parameter, "device", torch.device("cuda:0"), raising=False)
    monkeypatch.setattr(ops, "backend_for", lambda device: "none")
    monkeypatch.setattr(ops, "prepare", lambda device: None)
    with pytest.warns(UserWarning, match="no quantized kernels for this GPU: every call will run exact"):
        handle = sage_patch.apply(model)
    monkeypatch.undo()
    handle.revert()
