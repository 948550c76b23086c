"""Build a tiny random denoiser and read its outputs."""

import torch

from .overrides import CONFIG, OF_OTHERS
from .sizes import ROTARY_AXES, ROTARY_NAMES, TINY


def config(denoiser) -> dict:
    """Constructor arguments: what the name of an argument says, and the override table's last word."""
    values = {}
    for name, parameter in denoiser.parameters().items():
        default = parameter.default
        if name in ROTARY_NAMES and isinstance(default, (list, tuple)):
            values[name] = type(default)(ROTARY_AXES[len(default)])
        elif name in TINY and not isinstance(default, (bool, str, list, tuple)) and default is not None:
            values[name] = TINY[name]
    return values | CONFIG.get(denoiser.name, {})


def build(denoiser) -> torch.nn.Module:
    """A tiny random model in eval mode and float32."""
    torch.manual_seed(0)
    if denoiser.name in OF_OTHERS:
        from .catalog import denoisers

        name, count = OF_OTHERS[denoiser.name]
        inner = next(d for d in denoisers() if d.name == name)
        model = denoiser.model_class([build(inner) for _ in range(count)])
    else:
        model = denoiser.model_class(**config(denoiser))
    model = model.float()
    _randomise(model)
    return model.eval()


@torch.no_grad()
def _randomise(model: torch.nn.Module) -> None:
    """Weights large enough that attention matters; what starts at zero (gates, output layers) is opened."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or "norm" in name.rsplit(".", 2)[-2:][0]:
            continue
        if parameter.dim() >= 2:
            parameter.normal_(0, max(parameter[0].numel(), 1) ** -0.5, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(0, 0.1, generator=generator)


@torch.no_grad()
def outputs(model: torch.nn.Module, inputs: dict) -> list[torch.Tensor]:
    """The float tensors a forward pass returns, in order."""
    torch.manual_seed(0)
    return _float_tensors(model(**inputs))


def _float_tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    if hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    return [t for item in value for t in _float_tensors(item)] if isinstance(value, (list, tuple)) else []
