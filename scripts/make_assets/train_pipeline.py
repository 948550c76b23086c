"""Train a small diffusers pipeline with head_dim 128 and store it as INT8, as tests/assets holds two of them.

    python scripts/make_assets/train_pipeline.py flux clipart.npz OUT [--minutes 5]
    python scripts/make_assets/train_pipeline.py wan clips.npz OUT [--minutes 5]

Rectified flow straight on the pixels, with a learned prompt for each class and one for none. Five minutes on an H200.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

TOKENS, WIDTH = 16, 128  # of a prompt; one more token is Flux's pooled prompt
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def transformer(kind: str) -> Any:
    from diffusers import FluxTransformer2DModel, WanTransformer3DModel

    heads: dict[str, int] = {"num_attention_heads": 2, "attention_head_dim": 128}
    if kind == "flux":
        return FluxTransformer2DModel(
            patch_size=1, in_channels=12, num_layers=2, num_single_layers=4, joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH, guidance_embeds=False, axes_dims_rope=(16, 56, 56), **heads,
        )  # fmt: skip
    return WanTransformer3DModel(
        patch_size=(1, 4, 4), in_channels=3, out_channels=3, text_dim=WIDTH, freq_dim=256, ffn_dim=768, num_layers=6,
        cross_attn_norm=True, eps=1e-6, rope_max_seq_len=64, **heads,
    )  # fmt: skip


def loss(kind: str, model: nn.Module, prompts: nn.Embedding, pixels: Tensor, classes: Tensor) -> Tensor:
    """Mean squared error of the velocity at a random time; a tenth of the prompts are left out."""
    from diffusers import FluxPipeline

    batch, none = len(classes), prompts.num_embeddings - 1
    pixels = pixels.to(DEVICE).float().movedim(-1, 1) / 127.5 - 1  # [B, 3, ...]
    dropped = torch.rand(batch, device=DEVICE) < 0.1
    prompt = prompts(torch.where(dropped, none, classes.to(DEVICE))).view(batch, TOKENS + 1, WIDTH)
    when = torch.randn(batch, device=DEVICE).sigmoid()
    share, noise = when.view(-1, *[1] * (pixels.dim() - 1)), torch.randn_like(pixels)
    noisy, velocity = (1 - share) * pixels + share * noise, noise - pixels
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        if kind == "flux":
            noisy, velocity = (FluxPipeline._pack_latents(x, batch, *x.shape[1:]) for x in (noisy, velocity))
            side = pixels.shape[-1] // 2
            found = model(
                hidden_states=noisy, timestep=when, encoder_hidden_states=prompt[:, :TOKENS],
                pooled_projections=prompt[:, TOKENS], txt_ids=torch.zeros(TOKENS, 3, device=DEVICE),
                img_ids=FluxPipeline._prepare_latent_image_ids(batch, side, side, DEVICE, torch.float32),
            )[0]  # fmt: skip
        else:
            found = model(hidden_states=noisy, timestep=when * 1000, encoder_hidden_states=prompt[:, :TOKENS])[0]
    return F.mse_loss(found.float(), velocity)


def train(parameters: list[nn.Parameter], draw_loss: Any, minutes: float, rate: float = 1e-3) -> None:
    """AdamW with warm-up, then flat, then down over the last 40 % of the time; leaves the average of the weights."""
    groups = [[p for p in parameters if (p.dim() > 1) == matrix] for matrix in (True, False)]
    decays = zip(groups, (0.1, 0.0), strict=True)
    optimizer = torch.optim.AdamW([{"params": g, "weight_decay": d} for g, d in decays], lr=rate, betas=(0.9, 0.95))
    average, start, step = [p.detach().clone() for p in parameters], time.time(), 0
    while (spent := (time.time() - start) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 200) * min(1, max(0.02, (1 - spent) / 0.4))
        value = draw_loss()
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        kept = min(0.999, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - kept)
        if step % 200 == 1:
            print(f"step {step}, {100 * spent:.0f} % of the time, loss {value.item():.4f}", flush=True)
    torch._foreach_copy_([p.data for p in parameters], average)


def save(kind: str, model: Any, prompts: nn.Embedding, names: list[str], out: Path) -> None:
    """A pipeline's folder whose matrices are INT8 with one scale a row, and the table of its prompts."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, WanPipeline

    made = FluxPipeline if kind == "flux" else WanPipeline
    absent = ["vae", "text_encoder", "tokenizer"] + (["text_encoder_2", "tokenizer_2"] if kind == "flux" else [])
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    made(scheduler=scheduler, transformer=model, **dict.fromkeys(absent)).save_pretrained(out)
    stored: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        stored[name] = weight.half().contiguous().cpu()
        if weight.dim() > 1:
            scale = weight.abs().amax(tuple(range(1, weight.dim())), keepdim=True).clamp(min=1e-12) / 127
            stored[name] = (weight / scale).round().to(torch.int8).contiguous().cpu()
            stored[f"{name}.scale"] = scale.flatten().cpu()
    save_file(stored, out / "transformer" / "weights_int8.safetensors")
    (out / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    rows = prompts.weight.detach().half().view(-1, TOKENS + 1, WIDTH).cpu()
    table = {"prompt_embeds": rows[:, :TOKENS].contiguous()}
    table |= {"pooled_prompt_embeds": rows[:, TOKENS].contiguous()} if kind == "flux" else {}
    save_file(table, out / "prompt_embeds.safetensors", metadata={"names": json.dumps(names)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("flux", "wan"))
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward failed at head_dim 128 on an H200 (torch 2.11)
    data = np.load(options.data)
    pixels, classes, names = torch.from_numpy(data["x"]), torch.from_numpy(data["y"]).long(), data["names"].tolist()
    model = transformer(options.kind).to(DEVICE)
    prompts = nn.Embedding(len(names) + 1, (TOKENS + 1) * WIDTH).to(DEVICE)

    def draw_loss() -> Tensor:
        chosen = torch.randint(len(pixels), (options.batch,))
        return loss(options.kind, model, prompts, pixels[chosen], classes[chosen])

    train([*model.parameters(), *prompts.parameters()], draw_loss, options.minutes)
    save(options.kind, model.eval(), prompts, names, options.out)


if __name__ == "__main__":
    main()
