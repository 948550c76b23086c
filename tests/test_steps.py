"""Rules by denoising step: the step is that of the whole request, under guidance, on two experts, from an image, with
two-evaluation schedulers and over many requests, compiled or not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sage_patch
from sage_patch.dispatch import UnsupportedCall
from sage_patch.integrations.sites import TAG
from sage_patch.policy import Policy, Rule, Span
from stepping_pipelines import (
    ENDS,
    INT8,
    counts,
    exact_calls,
    flux,
    flux_inputs,
    own_pipeline,
    policy,
    quiet,
    run_flux,
    run_stable_diffusion,
    run_wan,
    stable_diffusion,
    wan,
)

SPANS = {
    "first": ({"first": 2}, [True, True, False, False, False, False]),
    "last part": ({"last": 0.1}, [False] * 5 + [True]),
    "list": ([0, 3], [True, False, False, True, False, False]),
}


@pytest.mark.parametrize("name", SPANS)
def test_exactly_the_named_steps_are_exact(name):
    """Flux, every form of `steps`: by the counts, and by the model's own outputs."""
    steps, expected = SPANS[name]
    pipeline = flux()
    reference = run_flux(pipeline, 6)
    rules = policy((steps, "exact"))
    assert exact_calls([pipeline.transformer], rules, pipeline, lambda: run_flux(pipeline, 6)) == [expected]
    with sage_patch.applied(pipeline, rules) as handle:
        patched = run_flux(pipeline, 6)
        assert counts(handle) == {"exact": sum(expected), INT8: 6 - sum(expected)}
        assert not torch.equal(patched, reference)
    assert torch.equal(run_flux(pipeline, 6), reference)


def test_o04_first_and_last_steps_and_blocks_are_skipped_exactly():
    """Of 8 blocks and 10 steps, exactly the skipped calls are bit-equal to the original."""
    pipeline = flux(blocks=(0, 8))
    layers = [Rule(layers=Span.parse([0, -1]), recipe="exact")]
    ends = [Rule(steps=Span.parse([0, -1]), recipe="exact")]
    rules = Policy(recipe=INT8, quantize_fp32=True, min_q_len=1, min_kv_len=1, rules=layers + ends)
    sites = [block.attn for block in pipeline.transformer.single_transformer_blocks]
    skipped = exact_calls(sites, rules, pipeline, lambda: run_flux(pipeline, 10))
    assert skipped == [[b in (0, 7) or s in (0, 9) for s in range(10)] for b in range(8)]


def schedulers() -> dict[str, tuple[Any, int, int]]:
    """(scheduler, evaluations of 6 steps, evaluations of the first step)"""
    from diffusers import DDIMScheduler, EulerDiscreteScheduler, HeunDiscreteScheduler, KDPM2DiscreteScheduler
    from diffusers import PNDMScheduler as PNDM

    return {
        "ddim": (DDIMScheduler(), 6, 1),
        "euler": (EulerDiscreteScheduler(), 6, 1),
        "heun": (HeunDiscreteScheduler(), 11, 2),
        "kdpm2": (KDPM2DiscreteScheduler(), 11, 2),
        "pndm": (PNDM(skip_prk_steps=True), 7, 1),
    }


@pytest.mark.parametrize("name", ["ddim", "euler", "heun", "kdpm2", "pndm"])
@pytest.mark.parametrize("from_image", [False, True])
def test_batched_guidance_and_every_kind_of_scheduler(name, from_image):
    """One call a step for both halves of the guidance; an image at strength 0.5 leaves the last half of the steps."""
    scheduler, evaluations, of_first = schedulers()[name]
    pipeline = stable_diffusion(scheduler, from_image)
    strength = {"strength": 0.5} if from_image else {}
    if from_image:
        evaluations -= 3 * of_first
    last = 1  # the last step of these schedulers is one evaluation
    expected = ["exact"] * of_first + [INT8] * (evaluations - of_first - last) + ["qk_int8_pv_fp16"] * last
    site = next(m for m in pipeline.unet.modules() if hasattr(m, "processor"))
    ran = []
    with sage_patch.applied(pipeline, ENDS) as handle:
        hook = pipeline.unet.register_forward_pre_hook(lambda *_: ran.append(site.__dict__[TAG].recipe.name))
        for _ in range(2):
            run_stable_diffusion(pipeline, 6, **strength)
        hook.remove()
        assert ran == expected * 2
        assert counts(handle) == {r: 2 * expected.count(r) for r in set(expected)}
    only = policy(({"first": 1}, "exact"))
    (equal,) = exact_calls(
        [pipeline.unet], only, pipeline, lambda: run_stable_diffusion(pipeline, 6, **strength)
    )  # fmt: skip
    assert equal == [recipe == "exact" for recipe in expected]


def test_from_an_image_only_the_steps_that_run_count():
    pipeline = flux(from_image=True)
    with sage_patch.applied(pipeline, policy(({"first": 2}, "exact"), ({"last": 0.2}, "qk_int8_pv_fp16"))) as handle:
        run_flux(pipeline, 10, strength=0.5)
        assert counts(handle) == {"exact": 2, INT8: 2, "qk_int8_pv_fp16": 1}
    with sage_patch.applied(pipeline, policy(({"last": 5}, "exact"))) as handle:
        run_flux(pipeline, 10, strength=0.5)
        assert counts(handle) == {"exact": 5}  # the very first call knows how many will run


def test_another_pipeline_with_the_same_parts_is_followed_too():
    """SD from an image with DDIM, whose scheduler has no begin index, after the patched pipeline ran a longer request:
    the length that it remembers is not taken for this one."""
    from diffusers import DDIMScheduler, StableDiffusionImg2ImgPipeline

    pipeline = stable_diffusion(DDIMScheduler())
    other = quiet(StableDiffusionImg2ImgPipeline(**pipeline.components, requires_safety_checker=False))
    with sage_patch.applied(pipeline, ENDS) as handle:
        run_stable_diffusion(pipeline, 4)
        assert counts(handle) == {"exact": 1, INT8: 2, "qk_int8_pv_fp16": 1}
        run_stable_diffusion(other, 10, strength=0.6)
        assert counts(handle) == {"exact": 2, INT8: 6, "qk_int8_pv_fp16": 2}
        assert pipeline.num_timesteps == 4
    assert type(pipeline._num_timesteps) is int


def test_a_pipeline_that_stops_early_has_its_last_step_where_it_stops():
    """As SDXL with denoising_end: the pipeline cuts its timesteps and says so before its loop."""
    from diffusers import EulerDiscreteScheduler

    pipeline = own_pipeline(EulerDiscreteScheduler())
    with sage_patch.applied(pipeline, policy(({"last": 1}, "exact"))) as handle:
        pipeline(10, cut=6)
        assert counts(handle) == {"exact": 1, INT8: 5}
        with pytest.raises(UnsupportedCall, match="has ended it"):
            pipeline.denoise(torch.zeros(1, 4, 8, 8), 1)


def test_a_pipeline_that_winds_back_and_steps_twice():
    """As Cosmos: the step is taken once for the prediction, wound back, and taken again."""
    from diffusers import EulerDiscreteScheduler

    pipeline = own_pipeline(EulerDiscreteScheduler())
    with sage_patch.applied(pipeline, ENDS) as handle:
        pipeline(6, twice=True)
        assert counts(handle) == {"exact": 1, INT8: 4, "qk_int8_pv_fp16": 1}


def test_guidance_in_two_calls():
    pipeline = wan()
    rules = policy(({"first": 2}, "exact"))
    expected = [s < 2 for s in range(5) for _ in range(2)]
    assert exact_calls([pipeline.transformer], rules, pipeline, lambda: run_wan(pipeline, 5)) == [expected]
    with sage_patch.applied(pipeline, rules) as handle:
        run_wan(pipeline, 5)
        assert counts(handle) == {"exact": 4, INT8: 6}


def test_two_experts_share_one_count():
    """Wan 2.2: the second expert takes over in the middle, and the count of steps goes on."""
    pipeline = wan(two_experts=True)
    with sage_patch.applied(pipeline, policy(([1, 5], "exact"))) as handle:
        run_wan(pipeline, 8)
        first, second = counts(handle, "transformer."), counts(handle, "transformer_2.")
        assert sum(first.values()) + sum(second.values()) == 16
        assert first["exact"] == second["exact"] == 2  # two guidance calls of step 1, and of step 5
    experts = [pipeline.transformer, pipeline.transformer_2]
    equal = exact_calls(experts, policy(([1, 5], "exact")), pipeline, lambda: run_wan(pipeline, 8))
    assert [e for expert in equal for e in expert] == [s in (1, 5) for s in range(8) for _ in range(2)]


def test_requests_of_different_lengths_and_one_that_fails():
    pipeline = flux()
    with sage_patch.applied(pipeline, ENDS) as handle:
        for steps in (3, 7, 4, 7):
            run_flux(pipeline, steps)
        assert counts(handle) == {"exact": 4, INT8: 1 + 5 + 2 + 5, "qk_int8_pv_fp16": 4}

        def stop(pipe: Any, i: int, t: Any, tensors: dict) -> dict:
            if i == 2:
                raise KeyboardInterrupt
            return tensors

        with pytest.raises(KeyboardInterrupt):
            run_flux(pipeline, 7, callback_on_step_end=stop)
        assert counts(handle) == {"exact": 5, INT8: 15, "qk_int8_pv_fp16": 4}
        run_flux(pipeline, 4)
        assert counts(handle) == {"exact": 6, INT8: 17, "qk_int8_pv_fp16": 5}


def test_tags_of_one_choice_are_the_same_objects_in_every_request():
    """What keeps a compiled graph valid: nothing that it looked at is replaced by an equal thing."""
    pipeline = flux()
    site = pipeline.transformer.transformer_blocks[0].attn
    with sage_patch.applied(pipeline, ENDS):
        tags: set[int] = set()
        hook = pipeline.transformer.register_forward_pre_hook(lambda *_: tags.add(id(site.__dict__[TAG])))
        for steps in (5, 9, 5):
            run_flux(pipeline, steps)
            assert len(tags) == 3
        hook.remove()


@pytest.mark.parametrize("regional", [False, True])
def test_compiled_models_recompile_once_a_plan_and_never_again(regional):
    def graphs_of(rules: Policy, lengths: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
        torch._dynamo.reset()
        pipeline = flux(blocks=(0, 2))
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        with sage_patch.applied(pipeline, rules) as handle:
            model = pipeline.transformer
            blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
            for part in blocks if regional else [model]:
                part.compile(backend=backend, fullgraph=True)
            seen, out = [], torch.empty(0)
            for length in lengths:
                out = run_flux(pipeline, length)
                seen.append(len(graphs))
            assert sum(r["calls"] for r in handle.rows()) == 2 * sum(lengths)
            if handle._clocks:
                with pytest.raises(torch._dynamo.exc.Unsupported, match="depends on the denoising step"):
                    model(**flux_inputs())
        return seen, out

    plain = graphs_of(policy(), (3,))[0][0] if regional else 1
    seen, out = graphs_of(ENDS, (3, 3, 7))
    assert seen[0] <= 3 * plain and seen[1:] == [seen[0]] * 2
    pipeline = flux(blocks=(0, 2))
    with sage_patch.applied(pipeline, ENDS):
        assert torch.allclose(out, run_flux(pipeline, 7), atol=1e-5)
