"""A calibrated policy is used with the model it was measured on, and refused with any other."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import sage_patch
from sage_patch.config import load_policy, policy_to_yaml
from sage_patch.integrations.sites import TAG
from sage_patch.patch import model_hash
from sage_patch.policy import CALIBRATION_SCHEMA, Calibration, Policy, PolicyError, Rule, Span
from tiny import text_config, text_model


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return text_model()


def calibrated(model: nn.Module) -> Policy:
    record = Calibration(
        schema_version=CALIBRATION_SCHEMA,
        model_hash=model_hash(model),
        targets=("kl<=0.003",),
        achieved={"kl": 0.002, "worst_psnr": float("inf")},
        cost=0.5,
        card="ada",
        date="2026-01-01",
        command="sage-patch calibrate run.yaml --target 'kl<=0.003'",
        setting={"task": "2 windows"},
    )
    rule = Rule(layers=Span.parse(0), recipe="exact", reason="first", score={"rel_l1": 0.1})
    return Policy("qk_int8_pv_fp8", quantize_fp32=True, rules=(rule,), calibration=record)


def test_the_record_survives_the_file(model: nn.Module, tmp_path: Path) -> None:
    policy = calibrated(model)
    (tmp_path / "p.yaml").write_text(policy_to_yaml(policy))
    assert load_policy(tmp_path / "p.yaml") == policy


def test_it_fits_its_own_model_also_while_that_was_copied_or_patched_before(model: nn.Module) -> None:
    policy = calibrated(model)
    with sage_patch.applied(model):
        pass
    for same in (model, copy.deepcopy(model), text_model()):
        with sage_patch.applied(same, policy):
            pass


def test_other_weights_are_refused_and_the_model_stays_untouched(model: nn.Module) -> None:
    other = text_model(seed=1)
    with pytest.raises(
        PolicyError, match="the policy is stale: .* other weights, or another dtype, of the same"
    ) as caught:
        sage_patch.apply(other, calibrated(model))
    assert "calibrate again (sage-patch calibrate run.yaml --target 'kl<=0.003')" in str(caught.value)
    assert "delete the calibration section" in str(caught.value)
    assert not any(TAG in m.__dict__ for m in other.modules())


@pytest.mark.parametrize("other", [{"num_hidden_layers": 3}, {"vocab_size": 100}])
def test_another_architecture_is_refused(model: nn.Module, other: dict[str, int]) -> None:
    with pytest.raises(PolicyError, match="a model with other modules or shapes"):
        sage_patch.plan(text_model(**other), calibrated(model))


def test_another_dtype_is_another_model(model: nn.Module) -> None:
    with pytest.raises(PolicyError, match="other weights, or another dtype"):
        sage_patch.plan(text_model().bfloat16(), calibrated(model))


def test_another_schema_is_refused(model: nn.Module) -> None:
    policy = calibrated(model)
    assert policy.calibration is not None
    old = replace(policy, calibration=replace(policy.calibration, schema_version=0))
    with pytest.raises(PolicyError, match="calibrated under schema 0, and this release reads 1; calibrate again"):
        sage_patch.apply(model, old)


def test_without_weights_the_architecture_alone_is_compared(model: nn.Module) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        meta, other = (
            AutoModelForCausalLM.from_config(text_config(vocab_size=v), dtype=torch.float32) for v in (99, 98)
        )
    assert sage_patch.plan(meta, calibrated(model)).choice("model.layers.0.self_attn").recipe == "exact"
    with pytest.raises(PolicyError, match="stale"):
        sage_patch.plan(other, calibrated(model))


def test_a_policy_without_a_record_is_never_stale() -> None:
    for seed in (0, 1):
        sage_patch.plan(text_model(seed=seed), Policy())
