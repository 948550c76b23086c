"""What pipelines of diffusers do to their parts after apply(), and how they cut or repeat a schedule: followed where
it can be, and counted or named in the report where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sage_patch
from sage_patch.dispatch import UnsupportedCall
from sage_patch.integrations.diffusers import denoisers, scheduler_for
from sage_patch.integrations.tags import TAG
from sage_patch.policy import Policy, Rule, Span
from stepping_pipelines import INT8
from tiny import EVERYTHING

FP16 = "qk_int8_pv_fp16"
STRICT = Policy(quantize_fp32=True, min_q_len=1, min_kv_len=1, on_unsupported="error")


def by_step(*rules: tuple[object, str], recipe: str = INT8) -> Policy:
    given = [Rule(steps=Span.parse(steps), recipe=name) for steps, name in rules]
    return Policy(recipe=recipe, quantize_fp32=True, min_q_len=1, min_kv_len=1, rules=given)


ENDS = by_step(({"first": 1}, "exact"), ({"last": 1}, FP16))


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unet_sd() -> nn.Module:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8, block_out_channels=(16,), layers_per_block=1, in_channels=4, out_channels=4,
        down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",), cross_attention_dim=16,
        attention_head_dim=2, norm_num_groups=8,
    ).eval()  # fmt: skip


def unet_xl() -> nn.Module:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16, attention_head_dim=(2, 4), norm_num_groups=8, transformer_layers_per_block=(1, 1),
        addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=8 * 6 + 16,
        use_linear_projection=True,
    ).eval()  # fmt: skip


PROMPT = dict(prompt_embeds=noise(1, 7, 16), negative_prompt_embeds=noise(1, 7, 16, seed=2))
PROMPT_XL = PROMPT | dict(
    pooled_prompt_embeds=noise(1, 16), negative_pooled_prompt_embeds=noise(1, 16, seed=3), height=64, width=64
)


def quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def ran(model: nn.Module, run: Any) -> list[str]:
    """The recipe that the first site of a model carries at each forward of the model."""
    site = next(m for m in model.modules() if TAG in m.__dict__)
    seen: list[str] = []
    hook = model.register_forward_pre_hook(
        lambda *_: seen.append("refused" if site.__dict__[TAG].refusal else site.__dict__[TAG].recipe.name)
    )
    run()
    hook.remove()
    return seen


# --- schedules


def modular() -> Any:
    from diffusers import EulerDiscreteScheduler
    from diffusers.modular_pipelines.stable_diffusion_xl import modular_blocks_stable_diffusion_xl as blocks

    pipeline = blocks.StableDiffusionXLCoreDenoiseStep().init_pipeline()
    pipeline.update_components(unet=unet_xl(), scheduler=EulerDiscreteScheduler())
    return quiet(pipeline)


def run_modular(pipeline: Any, **options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return pipeline(**PROMPT_XL, num_inference_steps=6, generator=generator, output="latents", **options)


def test_a_modular_pipeline_that_stops_early():
    """Its last step is the last that runs, and so are fractions of the steps; afterwards its loops are plain again."""
    pipeline = modular()
    with sage_patch.applied(pipeline, ENDS):
        for _ in range(2):
            assert ran(pipeline.unet, lambda: run_modular(pipeline))[::2] == ["exact"] + [INT8] * 4 + [FP16]
            cut = ran(pipeline.unet, lambda: run_modular(pipeline, denoising_end=0.5))
            assert cut[::2] == cut[1::2] == ["exact", INT8, FP16]
    with sage_patch.applied(pipeline, by_step(({"first": 0.5}, "exact"))):
        half = ran(pipeline.unet, lambda: run_modular(pipeline, denoising_end=0.5))
        assert half[::2] == ["exact", "exact", INT8]
    assert not any(hasattr(type(b), "_sage_patch_original") for b in pipeline._blocks.sub_blocks.values())


@pytest.mark.parametrize("name", ["DDIMScheduler", "EulerDiscreteScheduler", "PNDMScheduler"])
def test_several_views_a_step(name):
    """The panorama pipeline steps its scheduler once for each view, whose state it puts back from a copy."""
    import diffusers

    scheduler = getattr(diffusers, name)(**({"skip_prk_steps": True} if name == "PNDMScheduler" else {}))
    pipeline = quiet(
        diffusers.StableDiffusionPanoramaPipeline(
            vae=None, text_encoder=None, tokenizer=None, unet=unet_sd(), scheduler=scheduler, safety_checker=None,
            feature_extractor=None, requires_safety_checker=False,
        )
    )  # fmt: skip
    pipeline.vae_scale_factor = 8
    with sage_patch.applied(pipeline, ENDS):
        seen = ran(
            pipeline.unet,
            lambda: pipeline(**PROMPT, height=512, width=576, num_inference_steps=3, output_type="latent"),
        )
    if name == "PNDMScheduler":  # takes its second step twice, in evaluations of their own
        assert len(seen) == 8 and seen[:2] == ["exact"] * 2 and seen[-2:] == [FP16] * 2
    else:
        assert seen == ["exact"] * 2 + [INT8] * 2 + [FP16] * 2


class TwoSchedulers:
    """A prior and a decoder, each with a scheduler of its own, one after the other."""

    def __init__(self) -> None:
        from diffusers import DDIMScheduler

        self.components = {
            "prior_prior": unet_sd(), "decoder": unet_sd(), "scheduler": DDIMScheduler(),
            "prior_scheduler": DDIMScheduler(),
        }  # fmt: skip
        vars(self).update(self.components)

    def run(self) -> list[list[str]]:
        seen = []
        for scheduler, model, steps in (
            (self.components["prior_scheduler"], self.components["prior_prior"], 2),
            (self.components["scheduler"], self.components["decoder"], 3),
        ):
            scheduler.set_timesteps(steps)
            seen.append(ran(model, lambda s=scheduler, m=model: self.loop(s, m)))
        return seen

    def loop(self, scheduler: Any, model: nn.Module) -> None:
        latents = noise(1, 4, 8, 8)
        for t in scheduler.timesteps:
            with torch.no_grad():
                out = model(scheduler.scale_model_input(latents, t), t, encoder_hidden_states=noise(1, 7, 16)).sample
            latents = scheduler.step(out, t, latents).prev_sample


def test_two_denoisers_with_two_schedulers():
    pipeline = TwoSchedulers()
    assert [scheduler_for(pipeline, n) for n in denoisers(pipeline)] == ["prior_scheduler", "scheduler"]
    with sage_patch.applied(pipeline, ENDS) as handle:
        assert pipeline.run() == [["exact", FP16], ["exact", INT8, FP16]]
        handle.step(0, 2)
        pipeline.prior_scheduler = object()
        assert "scheduler was replaced after apply()" in handle.report()


# --- parts


def test_processors_of_one_request_are_counted_and_strict_policies_refuse_them():
    """PAG puts processors of its own on the chosen layers, and takes them away again."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPAGPipeline

    pipeline = quiet(
        StableDiffusionXLPAGPipeline(
            vae=None, text_encoder=None, text_encoder_2=None, tokenizer=None, tokenizer_2=None, unet=unet_xl(),
            scheduler=EulerDiscreteScheduler(), pag_applied_layers=["mid"],
        )
    )  # fmt: skip

    def go(**options: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return pipeline(
            **PROMPT_XL, num_inference_steps=4, pag_scale=3.0, output_type="latent", generator=generator,
            return_dict=False, **options,
        )[0]  # fmt: skip

    reference, during = go(), []
    with sage_patch.applied(pipeline, EVERYTHING) as handle:
        go(callback_on_step_end=lambda pipe, i, t, kw: during.append(handle.report()) or kw)
        stats = handle.stats()
        assert (stats["calls"], stats["reasons"]) == (32, {"processor_replaced": 4})
        assert "attn1: its processor was replaced" in during[0] and "attn1: its" not in handle.report()
        assert "processor_replaced: another processor than at apply()" in handle.report()
    assert torch.equal(go(), reference)
    with sage_patch.applied(pipeline, STRICT), pytest.raises(UnsupportedCall, match=r"attn1: processor_replaced"):
        go()


def test_modules_that_are_rebuilt_after_apply_are_named():
    model = nn.ModuleDict({"unet": unet_sd()})
    unet = model["unet"]
    with sage_patch.applied(unet, EVERYTHING) as handle:
        assert "apply again" not in handle.report()
        unet.mid_block.attentions[0] = unet_sd().mid_block.attentions[0]
        report = handle.report()
        name = "mid_block.attentions.0.transformer_blocks.0.attn1"
        assert f"{name}: its module was replaced after apply()" in report
        assert f"{name}: came into the model after apply() and is not patched" in report


def test_a_component_that_is_replaced_is_named():
    pipeline = TwoSchedulers()
    with sage_patch.applied(pipeline, EVERYTHING) as handle:
        pipeline.components["decoder"] = unet_sd()
        assert "the pipeline's decoder was replaced after apply()" in handle.report()


def test_a_container_of_weights_is_no_denoiser():
    from diffusers import MotionAdapter

    adapter = MotionAdapter(
        block_out_channels=(16, 16), motion_layers_per_block=1, motion_norm_num_groups=2, motion_num_attention_heads=2
    )
    pipeline = type("Pipeline", (), {"components": {"unet": unet_sd(), "motion_adapter": adapter}})()
    assert list(denoisers(pipeline)) == ["unet"]


def test_sliced_attention_is_refused_with_the_way_out():
    unet = unet_sd()
    unet.set_attention_slice("auto")
    with pytest.raises(ValueError, match=r"SlicedAttnProcessor; call disable_attention_slicing\(\) before apply\(\)"):
        sage_patch.apply(unet)
