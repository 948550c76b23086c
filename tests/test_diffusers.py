"""diffusers models: every kind of processor is reached, exact is bit-equal, and revert puts back the very objects."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import sage_patch
from sage_patch.integrations.diffusers import denoisers
from sage_patch.policy import Policy, Rule
from tiny import EVERYTHING, EXACT, relative_l1


def wan() -> tuple[nn.Module, dict]:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=64, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )  # fmt: skip
    inputs = dict(
        hidden_states=torch.randn(1, 4, 3, 16, 16),
        timestep=torch.tensor([3.0]),
        encoder_hidden_states=torch.randn(1, 12, 16),
    )
    return model, inputs


def flux() -> tuple[nn.Module, dict]:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    inputs = dict(
        hidden_states=torch.randn(1, 36, 4), encoder_hidden_states=torch.randn(1, 7, 16),
        pooled_projections=torch.randn(1, 16), timestep=torch.tensor([0.5]), img_ids=torch.rand(36, 3),
        txt_ids=torch.zeros(7, 3),
    )  # fmt: skip
    return model, inputs


def sd3() -> tuple[nn.Module, dict]:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        caption_projection_dim=32, joint_attention_dim=16, pooled_projection_dim=16, out_channels=4,
    )  # fmt: skip
    inputs = dict(
        hidden_states=torch.randn(1, 4, 16, 16), encoder_hidden_states=torch.randn(1, 7, 16),
        pooled_projections=torch.randn(1, 16), timestep=torch.tensor([3.0]),
    )  # fmt: skip
    return model, inputs


def unet() -> tuple[nn.Module, dict]:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, in_channels=4, out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    return model, dict(sample=torch.randn(1, 4, 16, 16), timestep=3, encoder_hidden_states=torch.randn(1, 7, 16))


MODELS = {"wan": wan, "flux": flux, "sd3": sd3, "unet": unet}


def build(name: str) -> tuple[nn.Module, dict]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model.eval(), inputs


def run(model: nn.Module, inputs: dict) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


def processors(model: nn.Module) -> list[tuple[int, type, dict]]:
    found = [m.processor for m in model.modules() if hasattr(m, "processor")]
    return [(id(p), type(p), dict(p.__dict__)) for p in found]


@pytest.mark.parametrize("name", MODELS)
def test_exact_is_bit_equal_default_is_close_and_revert_restores_the_objects(name):
    model, inputs = build(name)
    reference, before = run(model, inputs), processors(model)
    with sage_patch.applied(model, EXACT) as handle:
        assert torch.equal(run(model, inputs), reference)
        assert len(handle.rows()) == len(handle.plan.sites) == len(before)
    with sage_patch.applied(model, EVERYTHING) as handle:
        patched = run(model, inputs)
        assert not torch.equal(patched, reference)
        assert relative_l1(patched, reference) < 0.03
        assert {(r["recipe"], r["calls"]) for r in handle.rows()} == {("qk_int8_pv_fp8", 1)}
    assert processors(model) == before
    assert torch.equal(run(model, inputs), reference)


def test_roles_are_told_apart():
    roles = {name: [s.role for s in sage_patch.plan(build(name)[0]).sites] for name in MODELS}
    assert roles["wan"] == ["self", "cross"] * 2
    assert roles["flux"] == ["joint", "self"]
    assert set(roles["sd3"]) == {"joint"}
    assert sorted(roles["unet"]) == ["cross"] * 4 + ["self"] * 4


def test_second_model_of_the_same_class_is_never_touched():
    (patched, inputs), (other, _) = build("wan"), build("wan")
    reference = run(other, inputs)
    with sage_patch.applied(patched, EVERYTHING):
        run(patched, inputs)
        assert torch.equal(run(other, inputs), reference)
        assert torch.equal(run(other, inputs), reference)


def test_one_processor_shared_by_all_layers_keeps_their_recipes():
    model, inputs = build("unet")
    from diffusers.models.attention_processor import AttnProcessor2_0

    model.set_attn_processor(AttnProcessor2_0())
    only_self = [Rule(role="self", recipe="qk_int8_pv_fp8")]
    policy = Policy(recipe="exact", quantize_fp32=True, min_q_len=1, min_kv_len=1, rules=only_self)
    with sage_patch.applied(model, policy) as handle:
        run(model, inputs)
        role = {s.name: s.role for s in handle.plan.sites}
        assert all(r["recipe"] == ("qk_int8_pv_fp8" if role[r["site"]] == "self" else "exact") for r in handle.rows())


def test_a_processor_set_later_is_reported_not_lost_silently():
    model, inputs = build("wan")
    with sage_patch.applied(model, EVERYTHING) as handle:
        attention = model.blocks[0].attn1
        attention.set_processor(type(attention.processor)._sage_patch_original())
        run(model, inputs)
        assert "blocks.0.attn1: its processor was replaced after apply()" in handle.report()


def test_fused_projections_keep_the_patch():
    model, inputs = build("wan")
    with sage_patch.applied(model, EVERYTHING) as handle:
        model.fuse_qkv_projections()
        run(model, inputs)
        assert {r["recipe"] for r in handle.rows()} == {"qk_int8_pv_fp8"}


def test_deepcopy_and_pickle():
    model, inputs = build("wan")
    with sage_patch.applied(model, EVERYTHING) as handle:
        patched = run(model, inputs)
        calls = sum(r["calls"] for r in handle.rows())
        assert torch.equal(run(copy.deepcopy(model), inputs), patched)
        assert torch.equal(run(pickle.loads(pickle.dumps(model)), inputs), patched)
        assert sum(r["calls"] for r in handle.rows()) == calls


def test_compiled_after_apply_is_one_graph_and_counts():
    model, inputs = build("sd3")
    with sage_patch.applied(model, EVERYTHING) as handle:
        reference = run(model, inputs)
        model.transformer_blocks[0].compile(backend="aot_eager", fullgraph=True)
        assert torch.allclose(run(model, inputs), reference, atol=1e-5)
        assert ("*", 1) in {(r["site"], r["calls"]) for r in handle.rows()}


def test_only_the_denoiser_of_a_pipeline_is_patched():
    from diffusers import AutoencoderKL, DDIMScheduler, DiffusionPipeline

    class Pipeline(DiffusionPipeline):
        def __init__(self, unet, vae, scheduler):
            super().__init__()
            self.register_modules(unet=unet, vae=vae, scheduler=scheduler)

    model, _ = build("unet")
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=2)
    pipeline = Pipeline(model, vae, DDIMScheduler())
    assert list(denoisers(pipeline)) == ["unet"]
    before = processors(vae)
    with sage_patch.applied(pipeline, EVERYTHING) as handle:
        assert all(s.name.startswith("unet.") for s in handle.plan.sites)
        assert processors(vae) == before
