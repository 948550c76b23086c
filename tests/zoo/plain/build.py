"""Make a model of each kind with random weights, call it, and say how many attention calls that takes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .gpt import GPT
from .picture import PictureModel
from .processors import Processed
from .video import VideoModel
from .vit import VisionTransformer

# kind -> (class, attention calls of a forward pass, inputs)
KINDS: dict[str, tuple[type[nn.Module], int, Callable[[], dict[str, Tensor]]]] = {
    "gpt": (GPT, 3, lambda: {"ids": torch.arange(2 * 40).remainder(50).view(2, 40)}),
    "vit": (VisionTransformer, 2, lambda: {"picture": torch.randn(2, 3, 32, 32)}),
    "video": (
        VideoModel,
        4,
        lambda: {
            "video": torch.randn(2, 4, 3, 8, 8),
            "context": torch.randn(2, 20, 64),
            "seq_lens": torch.tensor([48, 40]),
        },
    ),
    "picture": (PictureModel, 4, lambda: {"img": torch.randn(1, 36, 64), "txt": torch.randn(1, 9, 64)}),
    "processors": (Processed, 2, lambda: {"x": torch.randn(2, 33, 64)}),
}


def build(kind: str, seed: int = 0) -> tuple[Any, dict[str, Tensor]]:
    """(model, inputs): the same for the same seed."""
    torch.manual_seed(seed)
    cls, _, make = KINDS[kind]
    return cls().eval(), make()


def calls(kind: str) -> int:
    return KINDS[kind][1]


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**inputs)
