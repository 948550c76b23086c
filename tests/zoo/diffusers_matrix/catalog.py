"""Which denoising classes diffusers has: found by walking its packages, not by a list."""

import dataclasses
import functools
import importlib
import inspect
import pkgutil

KINDS = ("transformers", "unets", "controlnets")


@dataclasses.dataclass(frozen=True)
class Denoiser:
    """One ModelMixin subclass; `kind` is the package of diffusers.models it lives in."""

    name: str
    kind: str
    model_class: type

    def parameters(self) -> dict[str, inspect.Parameter]:
        """Constructor arguments by name."""
        return dict(list(inspect.signature(self.model_class.__init__).parameters.items())[1:])


@functools.cache
def denoisers() -> tuple[Denoiser, ...]:
    """Every model class of diffusers.models.{transformers,unets,controlnets}, by name."""
    from diffusers import ModelMixin

    found = {}
    for kind in KINDS:
        package = importlib.import_module(f"diffusers.models.{kind}")
        for info in pkgutil.iter_modules(package.__path__):
            if info.name.endswith("_flax"):
                continue
            module = importlib.import_module(f"{package.__name__}.{info.name}")
            for name, cls in vars(module).items():
                if inspect.isclass(cls) and issubclass(cls, ModelMixin) and cls.__module__ == module.__name__:
                    found[name] = Denoiser(name, kind, cls)
    return tuple(found[name] for name in sorted(found))
