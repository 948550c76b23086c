"""Tiny random pipelines that denoise in steps, how they are run, and how the tests see what each step ran.

No pipeline has a text encoder or an autoencoder: prompts, images and results are embeddings and latents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from sage_patch.patch import Handle, applied
from sage_patch.policy import Policy, Rule, Span

INT8 = "qk_int8_pv_fp8"  # what a step runs that no rule names


def policy(*rules: tuple[object, str], match: str = "*") -> Policy:
    """INT8 for calls of every length, and one rule for each (steps, recipe) at the sites that match."""
    by_step = [Rule(match=match, steps=Span.parse(steps), recipe=recipe) for steps, recipe in rules]
    return Policy(recipe=INT8, quantize_fp32=True, min_q_len=1, min_kv_len=1, rules=by_step)


FIRST_TWO = policy(({"first": 2}, "exact"))
ENDS = policy(({"first": 1}, "exact"), ({"last": 1}, "qk_int8_pv_fp16"))  # three plans: both ends and the middle


def counts(handle: Handle, prefix: str = "") -> dict[str, int]:
    """Calls by recipe at each of the sites under the prefix: all of them ran the same, and exact only by policy."""
    by_site: dict[str, dict[str, int]] = {s.name: {} for s in handle.plan.sites if s.name.startswith(prefix)}
    for row in handle.rows():
        if row["site"].startswith(prefix):
            assert row["reason"] == ("policy" if row["recipe"] == "exact" else ""), row
            by_site[row["site"]][row["recipe"]] = row["calls"]
    first, *others = by_site.values()
    assert all(other == first for other in others), by_site
    return first


def exact_calls(
    modules: Sequence[nn.Module], rules: Policy, pipeline: Any, run: Callable[[], object]
) -> list[list[bool]]:
    """For each module, which calls of a patched run gave bit for bit what it gives unpatched for their inputs."""
    calls: list[list[tuple[Any, Any, Any]]] = [[] for _ in modules]

    def recorder(seen: list[tuple[Any, Any, Any]]) -> Callable[..., None]:
        return lambda _, args, kwargs, out: seen.append((args, kwargs, out))

    with applied(pipeline, rules):
        hooks = [
            module.register_forward_hook(recorder(seen), with_kwargs=True)
            for module, seen in zip(modules, calls, strict=True)
        ]
        run()
        for hook in hooks:
            hook.remove()
    with torch.no_grad():
        return [
            [_same_bits(module(*args, **kwargs), out) for args, kwargs, out in seen]
            for module, seen in zip(modules, calls, strict=True)
        ]


def _same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return len(a) == len(b) and all(_same_bits(x, y) for x, y in zip(a, b, strict=True))


def quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def flux(blocks: tuple[int, int] = (1, 1), from_image: bool = False) -> Any:
    """A FluxPipeline, or one from an image; blocks: double and single ones, one site each."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxImg2ImgPipeline, FluxPipeline, FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=blocks[0], num_single_layers=blocks[1], attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    kind = FluxImg2ImgPipeline if from_image else FluxPipeline
    return quiet(
        kind(
            scheduler=FlowMatchEulerDiscreteScheduler(), vae=None, text_encoder=None, tokenizer=None,
            text_encoder_2=None, tokenizer_2=None, transformer=model.eval(),
        )
    )  # fmt: skip


def run_flux(
    pipeline: Any,
    num_steps: int,
    strength: float | None = None,
    callback_on_step_end: Callable[[Any, int, Any, dict], dict] | None = None,
) -> torch.Tensor:
    """Latents [1, 16, 64] of a request, the same for the same pipeline; strength: of a pipeline from an image."""
    image = {} if strength is None else {"image": _random(1, 16, 8, 8, seed=1), "strength": strength}
    return pipeline(
        prompt_embeds=_random(1, 7, 16), pooled_prompt_embeds=_random(1, 16), height=64, width=64,
        num_inference_steps=num_steps, callback_on_step_end=callback_on_step_end, output_type="latent",
        generator=torch.Generator().manual_seed(0), return_dict=False, **image,
    )[0]  # fmt: skip


def flux_inputs() -> dict[str, torch.Tensor]:
    """One call of the transformer of flux(), as the pipeline makes it."""
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    places = torch.stack([torch.zeros(16), rows.flatten(), columns.flatten()], dim=-1)
    return dict(
        hidden_states=_random(1, 16, 64), encoder_hidden_states=_random(1, 7, 16), pooled_projections=_random(1, 16),
        timestep=torch.tensor([0.5]), img_ids=places, txt_ids=torch.zeros(7, 3),
    )  # fmt: skip


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=8, block_out_channels=(16,), layers_per_block=1, in_channels=4, out_channels=4,
        down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",), cross_attention_dim=16,
        attention_head_dim=2, norm_num_groups=8,  # two heads of 8: this argument counts heads
    )  # fmt: skip
    return model.eval()


def stable_diffusion(scheduler: Any, from_image: bool = False) -> Any:
    """A StableDiffusionPipeline, or one from an image, with the scheduler."""
    from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline

    kind = StableDiffusionImg2ImgPipeline if from_image else StableDiffusionPipeline
    return quiet(
        kind(
            vae=None, text_encoder=None, tokenizer=None, unet=_unet(), scheduler=scheduler, safety_checker=None,
            feature_extractor=None, requires_safety_checker=False,
        )
    )  # fmt: skip


def run_stable_diffusion(pipeline: Any, num_steps: int, strength: float | None = None) -> torch.Tensor:
    """Latents [1, 4, 8, 8] of a request whose guidance is one call of two batch rows."""
    size: dict[str, Any] = {"height": 64, "width": 64}
    if strength is not None:
        size = {"image": _random(1, 4, 8, 8, seed=1), "strength": strength}
    return pipeline(
        prompt_embeds=_random(1, 7, 16), negative_prompt_embeds=_random(1, 7, 16, seed=2),
        num_inference_steps=num_steps, output_type="latent", generator=torch.Generator().manual_seed(0),
        return_dict=False, **size,
    )[0]  # fmt: skip


def wan(two_experts: bool = False) -> Any:
    """A WanPipeline; with two experts, the second takes the later half of the timesteps."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    torch.manual_seed(0)
    first, second = (
        WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
            text_dim=16, freq_dim=32, ffn_dim=32, num_layers=1, rope_max_seq_len=32,
        ).eval()
        for _ in range(2)
    )  # fmt: skip
    experts = {"transformer_2": second, "boundary_ratio": 0.5} if two_experts else {}
    return quiet(
        WanPipeline(
            tokenizer=None, text_encoder=None, vae=None, scheduler=FlowMatchEulerDiscreteScheduler(),
            transformer=first, **experts,
        )
    )  # fmt: skip


def run_wan(pipeline: Any, num_steps: int) -> torch.Tensor:
    """Latents [1, 4, 2, 8, 8] of a request whose guidance is two calls."""
    return pipeline(
        prompt_embeds=_random(1, 7, 16), negative_prompt_embeds=_random(1, 7, 16, seed=2), height=64, width=64,
        num_frames=5, num_inference_steps=num_steps, output_type="latent",
        generator=torch.Generator().manual_seed(0), return_dict=False,
    )[0]  # fmt: skip


def own_pipeline(scheduler: Any) -> Any:
    """A pipeline with a loop of its own: pipeline(num_steps, cut, twice).

    cut: run only so many of the timesteps, and say so before the loop. twice: take each step for its prediction, wind
    the scheduler back and take the step again.
    """
    from diffusers import DiffusionPipeline

    class OwnPipeline(DiffusionPipeline):
        def __init__(self, unet: nn.Module, scheduler: Any):
            super().__init__()
            self.register_modules(unet=unet, scheduler=scheduler)

        def denoise(self, latents: torch.Tensor, timestep: Any) -> torch.Tensor:
            return self.unet(latents, timestep, encoder_hidden_states=_random(1, 7, 16), return_dict=False)[0]

        @torch.no_grad()
        def __call__(self, num_steps: int, cut: int | None = None, twice: bool = False) -> torch.Tensor:
            self.scheduler.set_timesteps(num_steps)
            timesteps = self.scheduler.timesteps[:cut]
            self._num_timesteps = len(timesteps)
            latents = _random(1, 4, 8, 8) * self.scheduler.init_noise_sigma
            for t in timesteps:
                noise = self.denoise(self.scheduler.scale_model_input(latents, t), t)
                if twice:
                    self.scheduler.step(noise, t, latents)
                    self.scheduler._step_index -= 1
                latents = self.scheduler.step(noise, t, latents, return_dict=False)[0]
            return latents

    return OwnPipeline(_unet(), scheduler)
