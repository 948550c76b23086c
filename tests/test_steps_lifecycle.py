"""Rules by denoising step: a call without a known step is refused, a loop of one's own tells it, copies are plain, and
the scheduler is put back.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import sage_patch
from sage_patch.dispatch import UnsupportedCall
from sage_patch.integrations.sites import TAG
from sage_patch.patch import PatchError
from sage_patch.policy import Policy, PolicyError, Rule, Span
from stepping_pipelines import FIRST_TWO, INT8, counts, flux, flux_inputs, own_pipeline, policy, run_flux
from tiny import text_model


def test_calls_outside_a_request_are_refused_where_the_step_matters():
    pipeline = flux()
    rules = policy(({"first": 2}, "exact"), match="transformer.transformer_blocks.*")
    model, inputs = pipeline.transformer, flux_inputs()
    with sage_patch.applied(pipeline, rules) as handle:
        with pytest.raises(UnsupportedCall, match=r"transformer_blocks\.0\.attn.*handle\.step"):
            model(**inputs)
        run_flux(pipeline, 3)
        with pytest.raises(UnsupportedCall, match="no denoising step is known"):
            model(**inputs)
        handle.step(0, 4)
        model(**inputs)
    other = policy(({"first": 2}, "exact"), match="transformer.single_transformer_blocks.*")
    with sage_patch.applied(pipeline, other), torch.no_grad():
        site = model.transformer_blocks[0].attn
        site(torch.randn(1, 5, 32), encoder_hidden_states=torch.randn(1, 3, 32))  # no rule by step covers this one


def test_a_replaced_scheduler_is_an_error_and_is_reported():
    pipeline = flux()
    with sage_patch.applied(pipeline, FIRST_TWO) as handle:
        followed = pipeline.scheduler
        pipeline.scheduler = type(followed).from_config(followed.config)
        assert type(pipeline.scheduler) is type(followed).__mro__[1]  # a plain one
        assert "scheduler was replaced" in handle.report()
        with pytest.raises(UnsupportedCall, match="was replaced"):
            run_flux(pipeline, 3)
        pipeline.scheduler = followed
        run_flux(pipeline, 3)
        assert "scheduler was replaced" not in handle.report()
        pipeline.scheduler = type(followed).from_config(followed.config)
    with sage_patch.applied(pipeline, FIRST_TWO) as handle:  # as the error advises
        run_flux(pipeline, 3)
        assert counts(handle) == {"exact": 2, INT8: 1}


def test_copies_of_the_scheduler_are_plain_and_move_nothing():
    """Pipelines with sound copy their scheduler and step the copy too."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipeline = flux()
    with sage_patch.applied(pipeline, FIRST_TWO) as handle:
        run_flux(pipeline, 3)
        copies = [copy.deepcopy(pipeline.scheduler), copy.copy(pipeline.scheduler)]
        copies.append(pickle.loads(pickle.dumps(pipeline.scheduler)))
        for plain in copies:
            assert type(plain) is FlowMatchEulerDiscreteScheduler
            assert vars(plain).keys() == vars(pipeline.scheduler).keys()
            plain.set_timesteps(4)
        with pytest.raises(UnsupportedCall):
            pipeline.transformer(**flux_inputs())
        assert counts(handle) == {"exact": 2, INT8: 1}


def test_a_copy_of_a_patched_pipeline_is_not_told_the_step_and_says_so():
    pipeline = flux()
    with sage_patch.applied(pipeline, FIRST_TWO) as handle:
        handle.step(0, 4)
        with pytest.raises(UnsupportedCall, match="copy the model before apply"):
            copy.deepcopy(pipeline.transformer)(**flux_inputs())


def test_saving_a_patched_pipeline_writes_the_plain_scheduler(tmp_path):
    pipeline = flux()
    pipeline.scheduler.save_pretrained(tmp_path / "plain")
    with sage_patch.applied(pipeline, FIRST_TWO):
        pipeline.scheduler.save_pretrained(tmp_path / "followed")
    texts = [(tmp_path / n / "scheduler_config.json").read_text() for n in ("plain", "followed")]
    assert texts[0] == texts[1]


def test_a_loop_of_your_own_on_a_bare_model():
    model, inputs = flux().transformer, flux_inputs()
    reference = model(**inputs).sample.detach()
    with sage_patch.applied(model, policy(({"last": 0.5}, "exact"))) as handle, torch.no_grad():
        with pytest.raises(UnsupportedCall, match=r"call handle\.step"):
            model(**inputs)
        equal = []
        for step in range(4):
            handle.step(step, 4)
            equal.append(torch.equal(model(**inputs).sample, reference))
        assert equal == [False, False, True, True]
        with pytest.raises(ValueError, match="step 4 of 4"):
            handle.step(4, 4)
    with pytest.raises(PatchError, match="reverted"):
        handle.step(0, 4)


def test_steps_by_hand_win_until_the_next_request():
    pipeline, inputs = flux(), flux_inputs()
    with sage_patch.applied(pipeline, FIRST_TWO) as handle, torch.no_grad():
        pipeline.scheduler.set_timesteps(4)
        handle.step(3, 4)
        noise = pipeline.transformer(**inputs).sample
        pipeline.scheduler.step(noise, pipeline.scheduler.timesteps[0], noise)  # moves nothing
        pipeline.transformer(**inputs)
        assert counts(handle) == {INT8: 2}
        run_flux(pipeline, 3)
        assert counts(handle) == {"exact": 2, INT8: 3}


def test_more_than_three_plans_are_an_error_where_the_length_is_known():
    four = policy((0, "exact"), (1, "qk_int8_pv_fp16"), (2, "qk_int4_pv_fp8"))
    pipeline = flux()
    with sage_patch.applied(pipeline, four) as handle:
        with pytest.raises(UnsupportedCall, match="4 plans over 5 steps; at most 3"):
            run_flux(pipeline, 5)
        run_flux(pipeline, 3)
        assert counts(handle) == {"exact": 1, "qk_int8_pv_fp16": 1, "qk_int4_pv_fp8": 1}
        with pytest.raises(PolicyError, match="4 plans over 9 steps"):
            handle.step(0, 9)
        pipeline.scheduler.set_timesteps(1000)  # whoever else uses this scheduler is not disturbed


def test_one_scheduler_cannot_be_followed_for_two_pipelines():
    from diffusers import FluxPipeline

    pipeline, second = flux(), flux()
    second.scheduler = pipeline.scheduler
    assert isinstance(second, FluxPipeline)
    with sage_patch.applied(pipeline, FIRST_TWO) as handle:
        with pytest.raises(PatchError, match="followed for another patched pipeline"):
            sage_patch.apply(second, FIRST_TWO)
        assert not any(TAG in m.__dict__ for m in second.transformer.modules())
        reference = run_flux(second, 4)  # unpatched, it uses the scheduler as ever
        run_flux(pipeline, 4)
        assert counts(handle) == {"exact": 2, INT8: 2}
    assert torch.equal(run_flux(second, 4), reference)


def test_schedulers_are_put_back_and_errors_leave_them_alone(monkeypatch):
    pipeline = flux()
    original, state = type(pipeline.scheduler), dict(vars(pipeline.scheduler))
    with pytest.raises(RuntimeError), sage_patch.applied(pipeline, FIRST_TWO):
        assert type(pipeline.scheduler) is not original
        assert type(pipeline.scheduler).__name__ == original.__name__
        raise RuntimeError
    assert type(pipeline.scheduler) is original and vars(pipeline.scheduler) == state
    with pytest.raises(PolicyError, match="matched no site"):
        sage_patch.apply(pipeline, policy((0, "exact"), match="nowhere"))
    assert type(pipeline.scheduler) is original
    with sage_patch.applied(pipeline, policy()):  # without rules by step nothing is followed
        assert type(pipeline.scheduler) is original
    with sage_patch.applied(pipeline, Policy(rules=[Rule(steps=Span.parse(0), reason="only a remark")])):
        assert type(pipeline.scheduler) is original


def test_pipelines_that_cannot_be_followed_are_refused_before_any_change():
    from diffusers import EulerDiscreteScheduler, SkyReelsV2DiffusionForcingPipeline

    pipeline = own_pipeline(EulerDiscreteScheduler())
    pipeline.scheduler = nn.Identity()
    with pytest.raises(PatchError, match="Identity has no set_timesteps and no step"):
        sage_patch.apply(pipeline, FIRST_TWO)
    parts = {"transformer": flux().transformer, "scheduler": EulerDiscreteScheduler()}

    class Forcing(SkyReelsV2DiffusionForcingPipeline):
        components = parts

    with pytest.raises(PatchError, match="runs on copies of its scheduler"):
        sage_patch.plan(object.__new__(Forcing), FIRST_TWO)


def test_the_report_and_the_plan_show_steps():
    pipeline = flux()
    with sage_patch.applied(pipeline, FIRST_TWO) as handle:
        run_flux(pipeline, 5)
        line = next(x for x in handle.report().splitlines() if ".transformer_blocks.0.attn" in x)
        assert line.endswith("qk_int8_pv_fp8 [first 2: exact]: exact x2 (policy), qk_int8_pv_fp8 x3")
        assert handle.plan.rows()[0]["steps"] == "first 2: exact"


def test_models_without_steps_refuse_rules_by_step():
    with pytest.raises(PolicyError, match="names denoising steps, and this model has none"):
        sage_patch.apply(text_model(), FIRST_TWO)
