"""What a patch touches: its own model and nothing else, in every order, thread and failure."""

from __future__ import annotations

import threading

import pytest
import torch
from test_diffusers import build, processors, run
from torch import nn

import sage_patch
import zoo.diffusers_matrix as zoo
from sage_patch.integrations import diffusers, sdpa
from sage_patch.policy import Policy
from tiny import EVERYTHING


def test_cross_attention_over_short_text_stays_exact_by_default():
    """77 text keys are fewer than 128; self attention over 256 tokens is quantized."""
    model, inputs = build("unet")
    inputs["encoder_hidden_states"] = torch.randn(1, 77, 16)
    with sage_patch.applied(model, Policy(quantize_fp32=True)) as handle:
        run(model, inputs)
        role = {s.name: s.role for s in handle.plan.sites}
        found = {(role[r["site"]], r["recipe"], r["reason"]) for r in handle.rows()}
    assert ("cross", "exact", "short_kv") in found and ("self", "qk_int8_pv_fp8", "") in found
    assert not any(r == "cross" and recipe != "exact" for r, recipe, _ in found)


class Broken(Exception):
    pass


def test_an_exception_inside_leaves_nothing_behind():
    model, inputs = build("wan")
    reference, before = run(model, inputs), processors(model)

    def fail(*_):
        raise Broken

    with pytest.raises(Broken), sage_patch.applied(model, EVERYTHING):
        hook = model.blocks[1].attn1.norm_k.register_forward_hook(fail)
        run(model, inputs)
    hook.remove()
    assert sdpa.RUNNING.tag is None
    assert processors(model) == before
    assert torch.equal(run(model, inputs), reference)


def pipeline(name: str) -> tuple[object, dict]:
    from diffusers import DDIMScheduler, DiffusionPipeline

    class Pipeline(DiffusionPipeline):
        def __init__(self, unet, scheduler):
            super().__init__()
            self.register_modules(unet=unet, scheduler=scheduler)

    model, inputs = build(name)
    return Pipeline(model, DDIMScheduler()), inputs


def test_the_second_pipeline_is_bit_equal_while_the_first_one_runs():
    """Also called from inside a call of the patched one."""
    (patched, inputs), (other, _) = pipeline("unet"), pipeline("unet")
    reference = run(other.unet, inputs)
    inside = []

    def interleave(*_):
        inside.append(run(other.unet, inputs))

    with sage_patch.applied(patched, EVERYTHING):
        attention = next(m for m in patched.unet.modules() if hasattr(m, "processor"))
        with attention.to_k.register_forward_hook(interleave):  # between tag and attention of the patched one
            quantized = run(patched.unet, inputs)
        assert torch.equal(run(other.unet, inputs), reference)
        assert torch.equal(run(patched.unet, inputs), quantized)
    assert len(inside) == 1 and torch.equal(inside[0], reference)
    assert not torch.equal(quantized, reference)


def test_two_threads():
    (patched, inputs), (other, _) = pipeline("unet"), pipeline("unet")
    reference = run(other.unet, inputs)
    with sage_patch.applied(patched, EVERYTHING) as handle:
        quantized = run(patched.unet, inputs)
        results: dict[str, list[torch.Tensor]] = {"patched": [], "other": []}

        def work(name: str, model: nn.Module) -> None:
            results[name] += [run(model, inputs) for _ in range(10)]

        threads = [threading.Thread(target=work, args=a) for a in (("patched", patched.unet), ("other", other.unet))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(x, quantized) for x in results["patched"]) and len(results["patched"]) == 10
        assert all(torch.equal(x, reference) for x in results["other"]) and len(results["other"]) == 10
        assert {r["calls"] for r in handle.rows()} == {11}


@pytest.mark.parametrize(
    "name, roles",
    [
        (
            "LTX2VideoTransformer3DModel",
            {
                "attn1": "self",
                "attn2": "cross",
                "audio_attn1": "self",
                "audio_attn2": "cross",
                "audio_to_video_attn": "cross",
                "video_to_audio_attn": "cross",
            },
        ),
        ("MochiTransformer3DModel", {"attn1": "joint", "pooler": "self"}),
        ("StableAudio3DiTModel", {"self_attn": "self", "cross_attn": "cross"}),
        ("OmniGenTransformer2DModel", {"self_attn": "self"}),
        ("TransformerTemporalModel", {"attn1": "self", "attn2": "self"}),
        ("PixArtTransformer2DModel", {"attn1": "self", "attn2": "cross"}),
    ],
)
def test_roles_are_what_the_model_does(name, roles):
    """Policies by role rely on it; a second attention is not always a cross attention, nor the other way round."""
    model = zoo.build(next(d for d in zoo.denoisers() if d.name == name))
    assert {site.name.rsplit(".", 1)[-1]: site.role for site in sage_patch.plan(model).sites} == roles


@pytest.mark.parametrize("component", ["unet", "image_unet", "unconditional_transformer"])
def test_denoisers_are_found_by_what_they_are(component):
    """Some pipelines hold a second denoiser under a name of their own; one object under two names counts once."""
    model, _ = build("unet")

    class Pipeline:
        components = {component: model, "prior": model, "vae": nn.Linear(2, 2), "scheduler": object()}

    assert list(diffusers.denoisers(Pipeline())) == [component]
