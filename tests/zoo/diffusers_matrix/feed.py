"""Inputs of one forward pass, made from the argument names of a model's forward and its configuration."""

import inspect

import torch

from .input_overrides import INPUTS
from .sizes import BATCH, CHANNELS, FRAMES, GRID, SIDE, TEXT, TEXT_LENGTH, TOKENS


def inputs(denoiser, model) -> dict:
    """Keyword arguments of one forward pass, equal for every call."""
    special = INPUTS.get(denoiser.name, {})
    generator = torch.Generator().manual_seed(1)
    parameters = inspect.signature(model.forward).parameters
    made = {}
    for name, parameter in parameters.items():
        if name in special:
            if special[name] is not None:
                made[name] = _made(special[name], generator)
        elif name in ("args", "kwargs", "return_dict"):
            continue
        elif parameter.default is inspect.Parameter.empty or name in _USUAL:
            spec = _usual(name, denoiser, model)
            if spec is not None:
                made[name] = _made(spec, generator)
    if "return_dict" in parameters:
        made["return_dict"] = False
    return made


_USUAL = (
    "encoder_hidden_states timestep pooled_projections img_ids txt_ids encoder_attention_mask img_shapes "
    "encoder_hidden_states_mask"
).split()


def _made(spec, generator: torch.Generator):
    """The value behind a spec. A tuple of numbers is the shape of noise; a tuple that starts with a word is

    ids (top, *shape): whole numbers; mask (*shape): True but for the end of the last item; bools, ones (*shape);
    float (*shape): uniform in 0..1; tail (batch, length, n): True for the last n; arange (*arguments); aranges
    (*lengths): a list; lengths (*numbers); pair (*shape): two of noise; complex (*shape): on the unit circle; list,
    tuple (*specs); dict (specs by name). Everything else is itself.
    """
    if not isinstance(spec, tuple):
        return spec
    if not spec or not isinstance(spec[0], str):
        return torch.randn(spec, generator=generator)
    kind, *shape = spec
    if kind == "ids":
        return torch.randint(0, shape[0], tuple(shape[1:]), generator=generator)
    if kind == "list":
        return [_made(item, generator) for item in shape]
    if kind == "tuple":
        return tuple(_made(item, generator) for item in shape)
    if kind == "tail":
        return torch.arange(shape[1]).expand(*shape[:2]) >= shape[1] - shape[2]
    if kind == "dict":
        return {name: _made(item, generator) for name, item in shape[0].items()}
    if kind == "lengths":
        return torch.tensor(shape)
    if kind == "arange":
        return torch.arange(*shape)
    if kind == "aranges":
        return [torch.arange(n) for n in shape]
    if kind == "pair":
        return tuple(torch.randn(*shape, generator=generator) for _ in range(2))
    if kind == "complex":
        return torch.polar(torch.ones(*shape), torch.randn(*shape, generator=generator))
    if kind == "float":
        return torch.rand(tuple(shape), generator=generator)
    made = torch.ones(tuple(shape), dtype=torch.bool)
    if kind == "mask":
        made[-1, shape[-1] // 2 :] = False
    return made.float() if kind == "ones" else made


def _usual(name: str, denoiser, model):
    """The spec of an argument by its name alone."""
    config = getattr(model, "config", {})
    is_token_model = (
        "img_ids" in inspect.signature(model.forward).parameters
        or "img_shapes" in inspect.signature(model.forward).parameters
    )
    channels = next(
        (config[k] for k in ("in_channels", "in_visual_dim", "in_dim", "io_channels") if config.get(k)), CHANNELS
    )
    if name in ("hidden_states", "sample", "controlnet_cond", "x"):
        if is_token_model:
            return (BATCH, TOKENS, channels)
        if "3D" in denoiser.name:
            return (BATCH, channels, FRAMES, SIDE, SIDE)
        if "1D" in denoiser.name:
            return (BATCH, channels, TOKENS)
        return (BATCH, channels, SIDE, SIDE)
    if name in ("timestep", "timesteps", "t"):
        return ("float", BATCH)
    if name == "encoder_hidden_states":
        names = """text_dim text_embed_dim joint_attention_dim caption_channels encoder_hid_dim cross_attention_dim
        context_in_dim cap_feat_dim in_text_dim text_in_dim text_hidden_dim dit_text_dim""".split()
        width = next((config[k] for k in names if isinstance(config.get(k), int)), TEXT)
        return (BATCH, TEXT_LENGTH, width)
    if name in ("encoder_attention_mask", "encoder_hidden_states_mask", "encoder_mask"):
        return ("mask", BATCH, TEXT_LENGTH)
    if name == "pooled_projections":
        width = next((config[k] for k in ("pooled_projection_dim", "in_text_dim2") if config.get(k)), None)
        return (BATCH, width) if width else None
    if name == "img_ids":
        return ("float", TOKENS, 3)
    if name == "txt_ids":
        return ("float", TEXT_LENGTH, 3)
    if name == "img_shapes":
        return [[(1, GRID, GRID)]] * BATCH
    return None
