"""Make the inputs of any tiny model from the names in its forward signature."""

import inspect

import torch

from .shrink import FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN
from .sizes import GRID, IMAGE, LENGTH, MELS, PATCH, SAMPLES
from .tables import INPUTS

_MEDIA = {
    "image": ("pixel_values", "image_token_id", "get_image_features"),
    "audio": ("input_features", "audio_token_id", "get_audio_features"),
    "speech": ("input_values", "audio_token_id", "get_audio_features"),
}
"""Media whose features replace placeholder tokens: the input, the placeholder's config field, the encoder method."""


def inputs(family, model, *, batch: int = 2, length: int = LENGTH, padding: str = "none") -> dict:
    """Keyword arguments of one forward pass, equal for every call with the same arguments.

    `padding` masks a quarter of the first row's text on the given side; it changes nothing for models without text.
    """
    made = _Feed(family, model, batch, length).make()
    mask, ids = made.get("attention_mask"), made.get("input_ids")
    if padding != "none" and mask is not None and ids is not None and mask.shape == ids.shape:
        mask[0, slice(0, length // 4) if padding == "left" else slice(-(length // 4), None)] = 0
    return made


class _Feed:
    """What one model accepts, and a tensor for each name.

    `special` is the family's row of the input table: a tuple is the shape of noise without its batch dimension,
    a tuple that starts with "ones", "ids" or "patches" is that kind of tensor instead, "length" stands for the text
    length, a list is a literal repeated for the batch, any other value is passed as it is. "only" replaces the list of
    inputs, "also" extends it, "never" cuts it, and `tokens` asks for that many placeholder tokens in each row.
    """

    def __init__(self, family, model, batch: int, length: int):
        self.family, self.model, self.batch, self.length = family, model, batch, length
        self.accepted = inspect.signature(model.forward).parameters
        self.special = INPUTS.get(family.name, {})
        self.generator = torch.Generator().manual_seed(1)

    def make(self) -> dict:
        made = {name: self._tensor(name) for name in self._wanted()}
        for medium in _MEDIA:
            self._place(medium, made)
        return made

    def _wanted(self) -> list[str]:
        if "only" in self.special:
            return self.special["only"].split()
        main = self.model.main_input_name
        wanted = [name for name in ([main] if isinstance(main, str) else main) if name in self.accepted]
        usual = ["input_ids", "attention_mask", "decoder_input_ids", "bbox"]
        if self.family.kind not in ("causal_lm", "encoder", "seq2seq"):
            usual += ["pixel_values", "input_features", "input_values"]
        if {"grid_thw", "image_grid_thw"} & set(self.accepted):
            usual += ["hidden_states", "grid_thw", "image_grid_thw"]
        usual += self.special.get("also", "").split()
        wanted += [name for name in usual if name in self.accepted and name not in wanted]
        if "input_ids" not in wanted and "attention_mask" in wanted:
            wanted.remove("attention_mask")
        return [name for name in wanted if name not in self.special.get("never", "").split()]

    def _tensor(self, name: str):
        if name in self.special:
            return self._special(self.special[name])
        if name.endswith("input_ids"):
            return self._ids(self.batch, self.length)
        if name in ("attention_mask", "decoder_attention_mask"):
            return torch.ones(self.batch, self.length, dtype=torch.long)
        if name == "bbox":
            return torch.tensor([1, 2, 30, 40]).expand(self.batch, self.length, 4).clone()
        if name.endswith("grid_thw"):
            return torch.tensor([[1, GRID, GRID]]).expand(self.batch, 3).clone()
        if name == "image_sizes":
            return torch.full((self.batch, 2), IMAGE)
        if name in ("pixel_values", "hidden_states") and {"grid_thw", "image_grid_thw"} & set(self.accepted):
            return self._patches()
        return self._noise(self.batch, *self._default_shape(name))

    def _special(self, value):
        if isinstance(value, tuple):
            shape = [self.length if size == "length" else size for size in value]
            if shape[0] == "ones":
                return torch.ones(self.batch, *shape[1:], dtype=torch.long)
            if shape[0] == "ids":
                return self._ids(self.batch, *shape[1:])
            if shape[0] == "patches":
                return self._noise(self.batch * GRID * GRID, *shape[1:])
            return self._noise(self.batch, *shape)
        if isinstance(value, list):
            literal = torch.tensor(value)
            return literal.expand(self.batch, *literal.shape).clone()
        return torch.full((self.batch,), value) if type(value) is int else value

    def _patches(self) -> torch.Tensor:
        """Images cut into flat patches, those of all rows behind each other."""
        volume = self._field("in_channels", "num_channels", default=3) * PATCH * PATCH
        volume *= self._field("temporal_patch_size", default=1)
        return self._noise(self.batch * GRID * GRID, volume)

    def _default_shape(self, name: str) -> tuple[int, ...]:
        if name == "pixel_values":
            return self._field("num_channels", "in_channels", "in_chans", default=3), IMAGE, IMAGE
        if name == "pixel_values_videos":
            return self._field("num_frames", "frames_per_clip", default=2), 3, IMAGE, IMAGE
        if name == "input_features":
            return MELS, 2 * self.length
        if name in ("input_values", "waveform"):
            return (SAMPLES,)
        raise KeyError(f"no rule for the input {name!r} of {self.family.name}")

    def _place(self, medium: str, made: dict) -> None:
        """Put a placeholder token into each row for every feature, behind the text that padding may hide."""
        source, token_field, method = _MEDIA[medium]
        token = getattr(self.model.config, token_field, None)
        if source not in made or "input_ids" not in made or not isinstance(token, int):
            return
        count = self.special.get("tokens") or self._count_features(method, made)
        ids = made["input_ids"]
        placeholders = torch.full((self.batch, count), token)
        before = self.length // 4
        made["input_ids"] = torch.cat([ids[:, :before], placeholders, ids[:, before:]], dim=1)
        made["attention_mask"] = torch.ones_like(made["input_ids"])
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in self.accepted:
                made[name] = (made["input_ids"] == token).long()

    def _count_features(self, method: str, made: dict) -> int:
        """Features per row."""
        owners = [owner for owner in (self.model.base_model, self.model) if hasattr(owner, method)]
        if not owners:
            return 0
        encode = getattr(owners[0], method)
        accepted = inspect.signature(encode).parameters
        with torch.no_grad():
            features = encode(**{name: value for name, value in made.items() if name in accepted})
        if hasattr(features, "last_hidden_state"):
            pooled = getattr(features, "pooler_output", None)
            features = features.last_hidden_state if pooled is None else pooled
        if isinstance(features, torch.Tensor):
            features = [features]
        return sum(item.numel() // item.shape[-1] for item in features) // self.batch

    def _field(self, *names: str, default=None):
        """The first of these fields found in the configuration or in one of its sub configurations."""
        configs = [self.model.config]
        for config in configs:
            configs += [c for c in vars(config).values() if hasattr(c, "model_type")]
        for config in configs:
            for name in names:
                if isinstance(getattr(config, name, None), int):
                    return getattr(config, name)
        return default

    def _ids(self, *shape: int) -> torch.Tensor:
        return torch.randint(FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN, shape, generator=self.generator)

    def _noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)
