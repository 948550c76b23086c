"""Training with the patch is training without it: the loss and every gradient, whatever is frozen or checkpointed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sage_patch
from oracle import qkv
from sage_patch.attention import sage_attention
from sage_patch.dispatch import UnsupportedCall
from sage_patch.kernels import ops
from sage_patch.policy import Policy
from tiny import EVERYTHING, text_model, tokens

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WINDOW = dict(sliding_window=64)
DECODERS = {"llama": {}, "mistral": WINDOW, "gemma2": WINDOW, "gpt_oss": WINDOW, "qwen3": {}}


def reasons() -> set[str]:
    return {key.reason for key in ops.counts()}


def upper_only(model: nn.Module) -> None:
    """As LoRA on the upper layers leaves a model: below, nothing needs a gradient."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("model.layers.1.", "model.norm", "lm_head")))


def step(model: nn.Module, device: str, policy: Policy | None, how: str) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, gradients by name) of one training step."""
    model = model.to(device).train()
    if how == "upper layers":
        upper_only(model)
    elif how != "plain":
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
        model.enable_input_require_grads()
    if policy is not None:
        sage_patch.apply(model, policy)
    ids = tokens(2, 150).to(device)
    padding = torch.ones_like(ids)
    padding[0, :20] = 0
    labels = ids.clone()
    labels[0, :21] = -100  # a padded row sees no key, and eager attention makes an average of that
    loss = model(input_ids=ids, labels=labels, attention_mask=padding).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["plain", "upper layers", "reentrant", "non-reentrant"])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in DECODERS), ("llama", torch.bfloat16), ("mistral", torch.bfloat16)],
)
def test_a_step_is_the_unpatched_step(family: str, how: str, device: str, dtype: torch.dtype) -> None:
    """No call of it is quantized, and each says why."""
    own = "eager" if family in ("gpt_oss", "gemma2") else "sdpa"  # these two have no "sdpa" that computes all they need
    model = text_model(family, own, **DECODERS[family]).to(dtype)
    patched = copy.deepcopy(model)  # held to the end: a handle's counters go with its model
    want_loss, want = step(model, device, None, how)
    loss, got = step(patched, device, EVERYTHING, how)
    assert {key.recipe for key in ops.counts()} == {"exact"} and sum(ops.counts().values()) >= 2
    assert reasons() == ({"needs_grad", "training"} if how in ("upper layers", "reentrant") else {"needs_grad"})
    assert got.keys() == want.keys()
    limit = 1e-4 if dtype == torch.float32 else 0.05
    assert abs(loss - want_loss) < limit
    if own == "sdpa" and device == "cpu":
        assert torch.equal(loss, want_loss)
    for name, gradient in got.items():
        error = (gradient.float() - want[name].float()).abs().sum() / want[name].float().abs().sum().clamp_min(1e-6)
        assert error < limit, (name, error)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_function_is_exact_both_times(device: str, use_reentrant: bool) -> None:
    """sage_attention under checkpointing, without any module: output and gradients are the exact ones."""
    results = []
    for recipe in ("qk_int8_pv_fp8", "exact"):
        leaves = [x.to(device).requires_grad_() for x in qkv(1, 2, 200, dim=64)]
        call = functools.partial(sage_attention, is_causal=True, recipe=recipe)
        out = checkpoint(call, *leaves, use_reentrant=use_reentrant)
        out.float().square().sum().backward()
        results.append([out, *(x.grad for x in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert {key.recipe for key in ops.counts()} == {"exact"}


def test_a_forward_inside_any_autograd_function_is_exact() -> None:
    """Engines that compute again have checkpoint functions of their own."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return sage_attention(x, x, x, recipe="qk_int8_pv_fp8")

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    Again.apply(qkv(1, 2, 200, dim=64)[0].requires_grad_())
    assert [(key.recipe, key.reason) for key in ops.counts()] == [("exact", "training")]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [False, True])
def test_inference_is_quantized_whatever_the_flag(mode: Callable, training: bool) -> None:
    """A model whose user never called eval() is quantized all the same where no gradient is asked for."""
    model = text_model("llama").train(training)
    sage_patch.apply(model, EVERYTHING)
    with mode():
        model(input_ids=tokens(1, 150))
    assert reasons() == {""}


def test_an_evaluation_within_training_is_quantized() -> None:
    """eval() and no_grad say that it is one; a frozen model in eval mode is one with gradients enabled too."""
    model = text_model("llama").requires_grad_(False)
    sage_patch.apply(model, EVERYTHING)
    model(input_ids=tokens(1, 150))
    assert reasons() == {""}
    ops.reset_counts()
    model.train()
    model(input_ids=tokens(1, 150))
    assert reasons() == {"training"}


def test_a_policy_may_refuse_training() -> None:
    """on_unsupported: error holds for the frozen part as for the rest."""
    model = text_model("llama").train().requires_grad_(False)
    sage_patch.apply(model, Policy(recipe="qk_int8_pv_fp8", quantize_fp32=True, min_kv_len=1, on_unsupported="error"))
    with pytest.raises(UnsupportedCall, match="training"):
        model(input_ids=tokens(1, 150))


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8, block_out_channels=(16,), layers_per_block=1, in_channels=4, out_channels=4,
        down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",), cross_attention_dim=16,
        attention_head_dim=2, norm_num_groups=8,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["plain", "frozen", "checkpointed"])
def test_a_denoiser_in_training(how: str, device: str) -> None:
    """The same for processors of diffusers, whose modules are not the ones that attend."""
    results = []
    for patched in (False, True):
        model = unet().to(device).train()
        if how == "frozen":
            model.requires_grad_(False)
            model.conv_out.requires_grad_(True)
        elif how == "checkpointed":
            model.enable_gradient_checkpointing()
        if patched:
            sage_patch.apply(model, EVERYTHING)
        generator = torch.Generator().manual_seed(0)
        latents = torch.randn(1, 4, 8, 8, generator=generator).to(device)
        text = torch.randn(1, 7, 16, generator=generator).to(device)
        out = model(latents, torch.tensor(3, device=device), text).sample
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*results, strict=True))
    assert {key.recipe for key in ops.counts()} == {"exact"}
    assert reasons() == ({"training"} if how == "frozen" else {"needs_grad"})


# --- what comes out -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("wants", [(True, True, True), (False, True, False), (False, False, True)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_outputs_are_contiguous(layout: str, wants: tuple[bool, ...], dropout_p: float) -> None:
    """In the layout asked for, whatever torch's kernel makes, grouped heads and strided inputs too."""
    some = torch.rand(33, 33) < 0.9
    for kv_heads, mask, dtype in ((4, None, torch.bfloat16), (2, None, torch.float32), (2, some, torch.float32)):
        shapes = ((2, 4, 33, 16), (2, kv_heads, 33, 16), (2, kv_heads, 33, 24))
        tensors = [
            torch.randn(b, n, h, d, dtype=dtype).transpose(1, 2).requires_grad_(grad)
            for (b, h, n, d), grad in zip(shapes, wants, strict=True)
        ]
        tensors = [x.transpose(1, 2) for x in tensors] if layout == "NHD" else tensors
        for options in ({}, dict(window=5), dict(return_lse=True), dict(is_causal=True)):
            out = sage_attention(*tensors, mask, dropout_p, enable_gqa=True, tensor_layout=layout, **options)
            assert (out[0] if isinstance(out, tuple) else out).is_contiguous()
