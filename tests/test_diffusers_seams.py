"""What else is done to a diffusers model: compiling, offloading, adapters, casting, saving, hooks, other backends."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from test_diffusers import build, processors, run
from torch import nn

import sage_patch
import zoo.diffusers_matrix as zoo
from sage_patch.dispatch import UnsupportedCall
from sage_patch.integrations import intercept
from sage_patch.policy import Policy
from tiny import EVERYTHING, EXACT

ALL_ERROR = Policy(quantize_fp32=True, min_q_len=1, min_kv_len=1, on_unsupported="error")


def recipes(handle: sage_patch.Handle) -> set[tuple[str, str]]:
    return {(r["recipe"], r["reason"]) for r in handle.rows()}


ALL_QUANTIZED = {("qk_int8_pv_fp8", "")}


# --- modules, processors and registries of diffusers


def test_diffusers_finds_patched_processors_by_their_class():
    """PAG, layer skipping and the default processors look classes up in sets, registries and tuples."""
    from diffusers.hooks._helpers import AttentionProcessorRegistry

    model, inputs = build("unet")
    reference = run(model, inputs)
    original = type(next(iter(model.attn_processors.values())))
    with sage_patch.applied(model, EVERYTHING) as handle:
        processor = next(iter(model.attn_processors.values()))
        assert type(processor) is not original and isinstance(processor, original)
        assert type(processor).__name__ == original.__name__
        assert (
            processor.__class__ in (original,) and processor.__class__ in {original} and {original: 1}[type(processor)]
        )
        assert AttentionProcessorRegistry.get(processor.__class__) is AttentionProcessorRegistry.get(original)
        model.set_default_attn_processor()  # refuses unknown classes
        assert handle.report().count("its processor was replaced after apply()") == 8
    assert torch.allclose(run(model, inputs), reference, atol=1e-6)


def test_processors_made_anew_from_a_patched_class_are_reverted_too():
    """The motion UNet rebuilds processors with processor.__class__() when an IP-Adapter is unloaded."""
    model, inputs = build("wan")
    reference = run(model, inputs)
    with sage_patch.applied(model, EVERYTHING) as handle:
        for module in model.modules():
            if hasattr(module, "processor"):
                module.set_processor(module.processor.__class__())
        run(model, inputs)
        assert recipes(handle) == ALL_QUANTIZED
    assert not any(intercept.is_patched(m.processor) for m in model.modules() if hasattr(m, "processor"))
    assert torch.equal(run(model, inputs), reference)


def zoo_model(name: str) -> tuple[nn.Module, dict]:
    denoiser = next(d for d in zoo.denoisers() if d.name == name)
    model = zoo.build(denoiser)
    return model, zoo.inputs(denoiser, model)


@pytest.mark.parametrize("scores_only", [True, False])
def test_layer_skipping(scores_only):
    """Skipped scores (the perturbed guidance of STG) return values unattended: natively by catching the SDPA call."""
    from diffusers.hooks import LayerSkipConfig, apply_layer_skip

    config = LayerSkipConfig(
        indices=[0],
        fqn="transformer_blocks",
        skip_attention=not scores_only,
        skip_attention_scores=scores_only,
        skip_ff=False,
    )
    plain = zoo.outputs(*zoo_model("CogView4Transformer2DModel"))[0]
    outputs = {}
    for policy in (None, EXACT, EVERYTHING):
        model, fed = zoo_model("CogView4Transformer2DModel")
        handle = sage_patch.apply(model, policy) if policy is not None else None
        apply_layer_skip(model, config)
        outputs[policy] = zoo.outputs(model, fed)[0]
        if policy is EVERYTHING:
            assert recipes(handle) == ALL_QUANTIZED | ({("exact", "function_mode")} if scores_only else set())
    assert not torch.equal(outputs[None], plain)
    assert torch.equal(outputs[EXACT], outputs[None])
    assert not torch.equal(outputs[EVERYTHING], outputs[None])


def test_block_cache():
    from diffusers.hooks import FirstBlockCacheConfig, apply_first_block_cache

    outputs = {}
    for policy in (None, EXACT):
        model, inputs = build("flux")
        if policy is not None:
            sage_patch.apply(model, policy)
        apply_first_block_cache(model, FirstBlockCacheConfig(threshold=1e9))
        with model.cache_context("cond"):
            outputs[policy] = [run(model, inputs) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(outputs[None], outputs[EXACT], strict=True))


def test_a_module_that_attends_in_its_own_forward():
    """Mochi's pooler has no processor: the module itself is intercepted, and copies and pickles as itself."""
    model, fed = zoo_model("MochiTransformer3DModel")
    pooler = model.time_embed.pooler
    original, keys = type(pooler), list(model.state_dict())
    with sage_patch.applied(model, EVERYTHING) as handle:
        patched = zoo.outputs(model, fed)[0]
        assert "time_embed.pooler" in {r["site"] for r in handle.rows()}
        assert list(model.state_dict()) == keys
        assert torch.equal(zoo.outputs(copy.deepcopy(model), fed)[0], patched)
        assert torch.equal(zoo.outputs(pickle.loads(pickle.dumps(model)), fed)[0], patched)
    assert type(pooler) is original


def test_processors_with_weights_of_their_own():
    """IP-Adapter's processor is a module inside its attention and calls SDPA once for text and once for the image."""
    from diffusers.models.attention_processor import Attention, IPAdapterAttnProcessor2_0

    torch.manual_seed(0)
    processor = IPAdapterAttnProcessor2_0(hidden_size=64, cross_attention_dim=32, num_tokens=(4,), scale=1.0)
    attention = Attention(64, cross_attention_dim=32, heads=2, dim_head=32, processor=processor)
    inputs = dict(
        hidden_states=torch.randn(1, 40, 64), encoder_hidden_states=(torch.randn(1, 9, 32), [torch.randn(1, 1, 4, 32)])
    )
    with torch.no_grad():
        reference, keys = attention(**inputs), list(attention.state_dict())
        with sage_patch.applied(attention, EXACT) as handle:
            assert torch.equal(attention(**inputs), reference)
            assert [(r["site"], r["calls"]) for r in handle.rows()] == [("", 2)]
            assert list(attention.state_dict()) == keys
            assert torch.equal(copy.deepcopy(attention)(**inputs), reference)
        with sage_patch.applied(attention, EVERYTHING) as handle:
            attention(**inputs)
            assert recipes(handle) == ALL_QUANTIZED
    assert type(attention.processor) is IPAdapterAttnProcessor2_0


def test_fused_projections_before_apply():
    model, inputs = build("wan")
    model.fuse_qkv_projections()
    reference = run(model, inputs)
    with sage_patch.applied(model, EXACT) as handle:
        assert torch.equal(run(model, inputs), reference)
        assert len(handle.rows()) == 4
        model.unfuse_qkv_projections()
        assert torch.allclose(run(model, inputs), reference, atol=1e-5)
        assert sum(r["calls"] for r in handle.rows()) == 8


# --- other ways to choose a backend


def test_a_backend_chosen_in_diffusers_gives_way_while_patched():
    """The recipe rules, and neither the choice nor diffusers' process-wide default is touched."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry, attention_backend

    model, inputs = build("wan")
    model.set_attention_backend("_native_math")
    active = _AttentionBackendRegistry.get_active_backend()
    before = processors(model)
    try:
        with sage_patch.applied(model, EVERYTHING) as handle, attention_backend("flex"):
            run(model, inputs)
            assert recipes(handle) == ALL_QUANTIZED
            model.set_attention_backend("native")  # also later
            run(model, inputs)
            assert {r["calls"] for r in handle.rows()} == {2}
            model.set_attention_backend("_native_math")
        assert processors(model) == before
        assert _AttentionBackendRegistry.get_active_backend() == active
    finally:
        model.set_attention_backend("native")


def test_context_parallel_calls_go_to_the_dispatcher_with_their_reason():
    """Each rank holds part of the sequence, which our operator does not know; a strict policy refuses."""

    class Parallel:
        context_parallel_config = None  # the dispatcher fails on this, which shows that the call got there

    model, inputs = build("wan")
    expected = ((EVERYTHING, AttributeError, "ring_degree"), (ALL_ERROR, UnsupportedCall, "attn1: context_parallel"))
    for policy, error, message in expected:
        with sage_patch.applied(model, policy) as handle:
            model.blocks[0].attn1.processor._parallel_config = Parallel()
            with pytest.raises(error, match=message):
                run(model, inputs)
            if policy is EVERYTHING:
                assert recipes(handle) == {("exact", "context_parallel")}
            del model.blocks[0].attn1.processor._parallel_config


# --- adapters, offload, casting, saving


def lora() -> object:
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters(when):
    """LoRA before or after apply(): same numbers as unpatched, and taking either away leaves the other."""
    torch.manual_seed(0)
    model, inputs = build("wan")
    plain = run(model, inputs)
    if when == "before":
        model.add_adapter(lora())
    handle = sage_patch.apply(model, EXACT)
    if when == "after":
        model.add_adapter(lora())
    adapted = run(model, inputs)
    assert not torch.equal(adapted, plain)
    assert sum(r["calls"] for r in handle.rows()) == 4
    handle.revert()
    assert torch.equal(run(model, inputs), adapted)
    with sage_patch.applied(model, EVERYTHING) as handle:
        run(model, inputs)
        assert recipes(handle) == ALL_QUANTIZED
        model.delete_adapters("default")
        run(model, inputs)
    assert torch.equal(run(model, inputs), plain)


def test_hooks_of_accelerate():
    """Sequential offload and the CPU's weight hooks wrap forward of every module; the patch is inside."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    model, inputs = build("wan")
    reference = run(model, inputs)
    cpu_offload(model, execution_device=torch.device("cpu"))
    with sage_patch.applied(model, EXACT) as handle:
        assert torch.equal(run(model, inputs), reference)
        assert len(handle.rows()) == 4
    with sage_patch.applied(model, EVERYTHING):
        remove_hook_from_submodules(model)
        run(model, inputs)
    assert torch.equal(run(model, inputs), reference)


def test_offload_of_whole_models():
    """What enable_model_cpu_offload does to each component, with the CPU as both devices."""
    from accelerate import cpu_offload_with_hook

    model, inputs = build("wan")
    reference = run(model, inputs)
    with sage_patch.applied(model, EXACT) as handle:
        model, hook = cpu_offload_with_hook(model, execution_device=torch.device("cpu"))
        assert torch.equal(run(model, inputs), reference)
        hook.offload()
        assert torch.equal(run(model, inputs), reference)
        assert sum(r["calls"] for r in handle.rows()) == 8
    hook.remove()
    assert torch.equal(run(model, inputs), reference)


def test_group_offload_on_the_cpu():
    model, inputs = build("wan")
    reference = run(model, inputs)
    with sage_patch.applied(model, EXACT) as handle:
        cpu = torch.device("cpu")
        try:
            model.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
        except (RuntimeError, ValueError) as error:
            pytest.skip(f"group offload needs an accelerator here: {error}")
        assert torch.equal(run(model, inputs), reference)
        assert len(handle.rows()) == 4


def test_layerwise_casting():
    """Weights rest in FP8; attention sees the compute dtype."""
    outputs = {}
    for policy in (None, EXACT, EVERYTHING):
        model, inputs = build("wan")
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        handle = sage_patch.apply(model, policy) if policy is not None else None
        outputs[policy] = run(model, inputs)
        if policy is EVERYTHING:
            assert recipes(handle) == ALL_QUANTIZED
    assert torch.equal(outputs[EXACT], outputs[None])


def test_saved_files_know_nothing_of_the_patch(tmp_path):
    model, inputs = build("wan")
    reference = run(model, inputs)
    with sage_patch.applied(model, EVERYTHING):
        model.save_pretrained(tmp_path)
    assert all(b"sage" not in path.read_bytes().lower() for path in tmp_path.iterdir())
    loaded = type(model).from_pretrained(tmp_path)
    assert not any(intercept.is_patched(m.processor) for m in loaded.modules() if hasattr(m, "processor"))
    assert torch.allclose(run(loaded, inputs), reference, atol=1e-5)  # mapped memory is aligned differently


def test_training_with_gradient_checkpointing_runs_exact_and_gives_the_same_gradients():
    gradients = []
    for policy in (None, EVERYTHING):
        model, inputs = build("wan")
        handle = sage_patch.apply(model, policy) if policy is not None else None
        model.train()
        model.enable_gradient_checkpointing()
        model(**inputs, return_dict=False)[0].square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        if handle is not None:
            assert recipes(handle) == {("exact", "needs_grad")}
    assert torch.allclose(*gradients, atol=1e-6)
