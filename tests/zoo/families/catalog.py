"""Which model types exist, what kind each is, and which class stands for it."""

import contextlib
import dataclasses
import functools
import importlib

from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from .media_overrides import MEDIA_OVERRIDES
from .shrink import tiny_config
from .tables import CLASSES, KINDS, NO_ATTENTION, UNBUILDABLE
from .text_overrides import TEXT_OVERRIDES

_OVERRIDES = TEXT_OVERRIDES | MEDIA_OVERRIDES

_MAPPINGS = (
    ("multimodal", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"),
    ("audio", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"),
    ("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    ("encoder", "MODEL_FOR_MASKED_LM_MAPPING"),
    ("causal_lm", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    ("vision", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),
    ("vision", "MODEL_FOR_OBJECT_DETECTION_MAPPING"),
    ("vision", "MODEL_FOR_DEPTH_ESTIMATION_MAPPING"),
    ("audio", "MODEL_FOR_CTC_MAPPING"),
    ("", "MODEL_MAPPING"),
)
"""Auto mappings in the order in which they claim a model type. A bare model has its kind in a table."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One model type of transformers and the class that stands for it.

    `kind` is causal_lm, encoder, seq2seq, vision, audio or multimodal; `auto` is the mapping, or the class itself.
    """

    name: str
    kind: str
    auto: str
    overrides: tuple[tuple[str, object], ...] = dataclasses.field(default=(), hash=False)

    @property
    def config_class(self):
        return CONFIG_MAPPING[self.name]

    @property
    def model_class(self):
        return _model_class(self.name, self.auto)

    @functools.cached_property
    def own_attention(self) -> bool:
        """The library's own verdict on the class and on those of its parts: none asks for a registered function."""
        return not any(part._can_set_attn_implementation() for part in _parts(self))


def families() -> list[Family]:
    """Every model type with attention that can be built as a toy, in the library's order."""
    return list(_families())


@functools.cache
def _families() -> tuple[Family, ...]:
    found = []
    for name in CONFIG_MAPPING_NAMES:
        if name in UNBUILDABLE or name in NO_ATTENTION:
            continue
        for kind, mapping in _MAPPINGS:
            if name in CLASSES or name in getattr(modeling_auto, mapping + "_NAMES"):
                kind = KINDS.get(name, kind or "vision")
                found.append(Family(name, kind, CLASSES.get(name, mapping), tuple(_OVERRIDES.get(name, {}).items())))
                break
    return tuple(found)


def _parts(family: Family) -> list[type]:
    """The model class and the classes that the auto mapping knows for its sub configurations."""
    configs = [tiny_config(family.name, dict(family.overrides), family.config_class)]
    for config in configs:
        configs += [part for part in vars(config).values() if isinstance(part, PretrainedConfig)]
    found = [family.model_class]
    for config in configs[1:]:
        with contextlib.suppress(KeyError, ValueError):  # not every sub configuration has a class of its own
            part = modeling_auto.MODEL_MAPPING[type(config)]
            found += [part] if hasattr(part, "_can_set_attn_implementation") else []
    return found


def _model_class(name: str, auto: str):
    if auto.startswith("MODEL_"):
        choice = getattr(modeling_auto, auto)[CONFIG_MAPPING[name]]
        return choice[0] if isinstance(choice, tuple) else choice
    module = importlib.import_module(CONFIG_MAPPING[name].__module__.replace(".configuration_", ".modeling_"))
    return getattr(module, auto)
