"""Build a tiny random model and read its outputs."""

import re

import torch

from .shrink import tiny_config

_RULED_OUT = 1e30
_FILTERS = (torch.nn.Conv1d, torch.nn.ConvTranspose1d)


def build(family, attn_implementation: str = "eager") -> torch.nn.Module:
    """A tiny random model in eval mode and float32; the weights do not depend on the implementation."""
    config = tiny_config(family.name, dict(family.overrides), family.config_class)
    torch.manual_seed(0)
    model = family.model_class._from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    _randomise(model)
    return model.eval()


@torch.no_grad()
def _randomise(model: torch.nn.Module) -> None:
    """Weights large enough that attention matters: default initialisation nearly averages over all keys.

    Matrices keep the size of what passes through them, biases and attention sinks become non-zero, gates and
    layer scales that start closed are opened; norms and the filters of audio codecs stay as they are.
    """
    generator = torch.Generator().manual_seed(0)
    done: set[int] = set()
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in done and parameter.is_floating_point() and not isinstance(module, _FILTERS):
                _randomise_one(f"{module_name}.{leaf}", parameter, generator)
            done.add(id(parameter))


def _randomise_one(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    leaf = name.rsplit(".", 1)[-1]
    if "parametrizations" in name:
        return
    if "sink" in leaf:
        parameter.normal_(0, 1, generator=generator)
    elif leaf.endswith("bias") and parameter.dim() == 1:
        parameter.normal_(0, 0.1, generator=generator)
    elif sum(size > 1 for size in parameter.shape) >= 2:
        parameter.normal_(0, _fan_in(parameter) ** -0.5, generator=generator)
    elif "norm" not in name and parameter.numel() and _is_closed(parameter):
        parameter.fill_(0.5)


def _fan_in(weight: torch.Tensor) -> int:
    """Inputs summed into one output: all but the first dimension, or the last one of stacked expert weights."""
    return weight[0].numel() if weight.dim() != 3 else weight.shape[-1]


def _is_closed(parameter: torch.Tensor) -> bool:
    return bool((parameter == parameter.flatten()[0]).all()) and abs(float(parameter.flatten()[0])) < 0.2


@torch.no_grad()
def outputs(model: torch.nn.Module, inputs: dict) -> list[torch.Tensor]:
    """The float tensors a forward pass returns, in order; padded positions and ruled-out logits are set to zero."""
    torch.manual_seed(0)
    tensors = _float_tensors("", model(**inputs))
    return [
        _without_padding(name, torch.where(tensor.abs() >= _RULED_OUT, 0.0, tensor), inputs) for name, tensor in tensors
    ]


_STATE = re.compile(r"past_\w+|(\w+_)?hidden_states|(\w+_)?attentions|loss|cache_params|state|mems|buckets")


def _float_tensors(name: str, value) -> list[tuple[str, torch.Tensor]]:
    """Named tensors, depth first; caches and intermediate states are left out."""
    if isinstance(value, torch.Tensor):
        return [(name, value)] if value.is_floating_point() else []
    if isinstance(value, dict) or hasattr(value, "to_tuple"):
        return [pair for key, item in value.items() if not _STATE.fullmatch(key) for pair in _float_tensors(key, item)]
    if isinstance(value, (list, tuple)):
        return [pair for item in value for pair in _float_tensors(name, item)]
    return []


def _without_padding(name: str, tensor: torch.Tensor, inputs: dict) -> torch.Tensor:
    of_decoder = "decoder_input_ids" in inputs and not name.startswith("encoder")
    mask = inputs.get("decoder_attention_mask" if of_decoder else "attention_mask")
    if mask is None or tensor.dim() < 3 or tensor.shape[:2] != mask.shape:
        return tensor
    return torch.where(mask.bool().view(*mask.shape, *[1] * (tensor.dim() - 2)), tensor, 0.0)
