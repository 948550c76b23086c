"""The published architectures that the family policies in configs/ are checked against.

One JSON file an architecture, read by tests/test_configs.py and scripts/update_families.py:
  family: the policy's file in configs/. checkpoint: a model that people load. library, class, config: how it is built.
  parts: the pipeline components of that class (two for a model of two experts), none for language models.
  steps: usual numbers of denoising steps. billions: its parameters; a wrong size in `config` would show here.
  sites: what apply() must find, by glob of module name without the component's prefix, and whether the family's policy
  is to leave those sites below exact. calls: the calls that its main sites make. source: where `config` comes from.
"""

from __future__ import annotations

import fnmatch
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Architecture:
    """One JSON file; see above for the fields."""

    name: str
    family: str
    checkpoint: str
    library: str
    class_name: str
    parts: list[str]
    steps: list[int]
    billions: float
    sites: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    source: str
    config: dict[str, Any]

    def build(self) -> nn.Module:
        """The model at full size on the meta device: no weights, no memory."""
        with torch.device("meta"):
            if self.library == "diffusers":
                import diffusers

                return getattr(diffusers, self.class_name).from_config(self.config)
            import transformers

            cls = getattr(transformers, self.class_name)
            return cls._from_config(cls.config_class(**self.config))

    def group_of(self, site_name: str) -> dict[str, Any]:
        """The entry of `sites` that holds a site; its name may carry the component's prefix. Exactly one glob must:
        entries of one glob differ in head_dim alone."""
        part, _, rest = site_name.partition(".")
        name = rest if part in self.parts else site_name
        (group,) = {g["match"]: g for g in self.sites if fnmatch.fnmatchcase(name, g["match"])}.values()
        return group


@functools.cache
def architectures() -> dict[str, Architecture]:
    """Every architecture by its file's name, in order of family."""
    found = []
    for file in FOLDER.glob("*.json"):
        record = json.loads(file.read_text(encoding="utf-8"))
        found.append(Architecture(name=file.stem, class_name=record.pop("class"), **record))
    return {a.name: a for a in sorted(found, key=lambda a: (a.library, a.family, a.name))}


def pipeline(parts: dict[str, nn.Module]) -> Any:
    """What apply() looks at in a diffusers pipeline: its components, with a text encoder and a VAE that attend too."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel

    text = CLIPTextConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    with torch.device("meta"):
        others = {"text_encoder": CLIPTextModel(text), "vae": AutoencoderKL()}
    return SimpleNamespace(components={**others, **parts})
