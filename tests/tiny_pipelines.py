"""Tiny random pipelines in folders, as people have them: text to image with every part, and text to video with few."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn


def _spread(model: nn.Module) -> nn.Module:
    """Weights large enough that attention is peaked and its errors reach the picture."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(2)
    return model.eval()


def save_text_to_image(folder: Path) -> Path:
    """A StableDiffusionPipeline with a text encoder and an autoencoder; pictures of 32 x 32, 256 tokens."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=16,
        norm_num_groups=8,
    )
    vae = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        sample_size=32,
    )
    words = {"<|startoftext|>": 0, "<|endoftext|>": 1}
    for letter in "abcdefghijklmnopqrstuvwxyz":
        words |= {letter: len(words), f"{letter}</w>": len(words) + 1}
    encoder = CLIPTextModel(
        CLIPTextConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=len(words),
            max_position_embeddings=16,
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    StableDiffusionPipeline(
        vae=vae,
        text_encoder=encoder,
        tokenizer=CLIPTokenizer(vocab=words, merges=[], model_max_length=16),
        unet=_spread(unet),
        scheduler=DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    return folder


def save_class_to_image(folder: Path) -> Path:
    """A ConsistencyModelPipeline: class labels for prompts, one grey channel, and no callback at the end of a step."""
    from diffusers import CMStochasticIterativeScheduler, ConsistencyModelPipeline, UNet2DModel
    from safetensors.torch import save_file

    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=1,
        block_out_channels=(32,),
        layers_per_block=1,
        down_block_types=("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",),
        attention_head_dim=16,
        norm_num_groups=8,
        num_class_embeds=3,
    )
    ConsistencyModelPipeline(unet=_spread(unet), scheduler=CMStochasticIterativeScheduler()).save_pretrained(folder)
    save_file({"class_labels": torch.arange(4)}, folder / "table.safetensors")
    return folder


def save_text_to_video(folder: Path) -> Path:
    """A WanPipeline whose latents are pixels and whose prompts are a table; 5 frames of 18 x 16, 360 tokens."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
    from safetensors.torch import save_file

    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=3,
        out_channels=3,
        text_dim=16,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=32,
    )
    WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=_spread(transformer),
    ).save_pretrained(folder)
    rows = {"prompt_embeds": torch.randn(3, 4, 16)}
    save_file(rows, folder / "table.safetensors", metadata={"names": json.dumps(["walk", "run"])})
    return folder
