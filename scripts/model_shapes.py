"""Models of published shapes with random weights and few layers, whose forward passes gpu_models.py times.

Every block of a real model does the same work, so that a ratio over few layers is that over all of them, but for what
lies before and behind the blocks. A row gives the model, one function that runs a forward pass, and in words how many
of its layers there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Callable[[], Tensor]]


@dataclass(frozen=True)
class ModelShape:
    """title, how it is made on the default device in the default dtype, and the shape of its self-attention, by which a
    report finds the kernel's time."""

    title: str
    make: Callable[[], Made]
    tokens: int
    head_dim: int
    is_causal: bool = False


def _diffusers(model: nn.Module, **inputs: Any) -> Made:
    return model, lambda: model(**inputs, return_dict=False)[0]


def wan() -> Made:
    from diffusers import WanTransformer3DModel

    return _diffusers(
        WanTransformer3DModel(num_attention_heads=40, attention_head_dim=128, ffn_dim=13824, num_layers=3),
        hidden_states=torch.randn(1, 16, 21, 90, 160),  # 21 x 45 x 80 patches
        timestep=torch.tensor([500.0]),
        encoder_hidden_states=torch.randn(1, 512, 4096),
    )


def cogvideox() -> Made:
    from diffusers import CogVideoXTransformer3DModel

    return _diffusers(
        CogVideoXTransformer3DModel(
            num_attention_heads=48, attention_head_dim=64, num_layers=6, use_rotary_positional_embeddings=True
        ),
        hidden_states=torch.randn(1, 13, 16, 60, 90),  # 13 x 30 x 45 patches and 226 text tokens
        encoder_hidden_states=torch.randn(1, 226, 4096),
        timestep=torch.tensor([500]),
        image_rotary_emb=(torch.ones(17550, 64), torch.zeros(17550, 64)),
    )


def flux() -> Made:
    from diffusers import FluxTransformer2DModel

    return _diffusers(
        FluxTransformer2DModel(num_layers=4, num_single_layers=8, guidance_embeds=True),
        hidden_states=torch.randn(1, 4096, 64),
        encoder_hidden_states=torch.randn(1, 512, 4096),
        pooled_projections=torch.randn(1, 768),
        timestep=torch.tensor([0.5]),
        guidance=torch.tensor([3.5]),
        img_ids=torch.stack([torch.zeros(4096), torch.arange(4096.0) // 64, torch.arange(4096.0) % 64], 1),
        txt_ids=torch.zeros(512, 3),
    )


def qwen_image() -> Made:
    from diffusers import QwenImageTransformer2DModel

    return _diffusers(
        QwenImageTransformer2DModel(num_layers=6),
        hidden_states=torch.randn(1, 83 * 83, 64),  # 1328 px
        encoder_hidden_states=torch.randn(1, 256, 3584),
        timestep=torch.tensor([0.5]),
        img_shapes=[(1, 83, 83)],
    )


def hunyuan_video() -> Made:
    from diffusers import HunyuanVideoTransformer3DModel

    return _diffusers(
        HunyuanVideoTransformer3DModel(num_layers=1, num_single_layers=2),
        hidden_states=torch.randn(1, 16, 33, 90, 160),  # 33 x 45 x 80 patches
        encoder_hidden_states=torch.randn(1, 256, 4096),
        encoder_attention_mask=torch.ones(1, 256, dtype=torch.bool),
        pooled_projections=torch.randn(1, 768),
        timestep=torch.tensor([500]),
        guidance=torch.tensor([6000.0]),
    )


def ltx2() -> Made:
    from diffusers import LTX2VideoTransformer3DModel

    return _diffusers(
        LTX2VideoTransformer3DModel(num_layers=6, rope_type="split"),
        hidden_states=torch.randn(1, 16 * 16 * 24, 128),  # 768 x 512 pixels, 121 frames
        audio_hidden_states=torch.randn(1, 126, 128),
        encoder_hidden_states=torch.randn(1, 256, 3840),
        audio_encoder_hidden_states=torch.randn(1, 256, 3840),
        timestep=torch.tensor([500.0]),
        num_frames=16,
        height=16,
        width=24,
        audio_num_frames=126,
    )


def llama(length: int) -> Callable[[], Made]:
    """Reading a prompt: 4 of 32 layers, the logits of the last token alone."""

    def make() -> Made:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, vocab_size=128256, max_position_embeddings=131072,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        prompt = torch.randint(128256, (1, length))
        return model, lambda: model(input_ids=prompt, use_cache=False, logits_to_keep=1).logits

    return make


MODELS = {
    "wan": ModelShape("Wan-2.1-14B, 3 of 40 layers, 75,600 tokens", wan, 75600, 128),
    "cogvideox": ModelShape("CogVideoX-5B, 6 of 42 layers, 17,776 tokens", cogvideox, 17776, 64),
    "flux": ModelShape("Flux-dev, 4 + 8 of 19 + 38 layers, 4,608 tokens", flux, 4608, 128),
    "llama4k": ModelShape("Llama-3-8B, 4 of 32 layers, prompt of 4,096", llama(4096), 4096, 128, True),
    "llama8k": ModelShape("Llama-3-8B, 4 of 32 layers, prompt of 8,192", llama(8192), 8192, 128, True),
    "llama32k": ModelShape("Llama-3-8B, 4 of 32 layers, prompt of 32,768", llama(32768), 32768, 128, True),
    "llama128k": ModelShape("Llama-3-8B, 4 of 32 layers, prompt of 131,072", llama(131072), 131072, 128, True),
    "qwen_image": ModelShape("Qwen-Image, 6 of 60 layers, 7,145 tokens", qwen_image, 7145, 128),
    "ltx2": ModelShape("LTX-2, 6 of 48 layers, 6,144 tokens", ltx2, 6144, 128),
    "hunyuan_video": ModelShape("HunyuanVideo, 1 + 2 of 20 + 40 layers, 119,056 tokens", hunyuan_video, 119056, 128),
}
