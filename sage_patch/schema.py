"""What a configuration file may hold: one class a section, one field a key. Schema version 1.

Reading files, resolving paths and wording errors is the business of `config.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    create_model,
    model_validator,
)

from sage_patch.figures import BY_BOUND, Figure
from sage_patch.policy import Calibration, OnUnsupported, Policy, Role, Rule, Span
from sage_patch.recipes import AUTO, ExactBackend, parse_recipe

SCHEMA_VERSION = 1


def _known_recipe(text: str) -> str:
    parse_recipe(text)
    return text


def _a_prompt(value: object) -> str | int:
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise ValueError(f"must be text, or a number in the model's prompt table; got {value!r}")


RecipeName = Annotated[str, AfterValidator(_known_recipe)]
Prompt = Annotated[str | int, PlainValidator(_a_prompt)]
SpanField = Annotated[Span, PlainValidator(Span.parse), PlainSerializer(Span.written)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class RuleSpec(Section):
    """The YAML form of `policy.Rule`."""

    model_config = ConfigDict(allow_inf_nan=True)  # scores of equal outputs

    match: str = "*"
    layers: SpanField | None = None
    role: Role | None = None
    steps: SpanField | None = None
    recipe: RecipeName | None = None
    on_unsupported: OnUnsupported | None = None
    reason: str | None = None
    score: dict[str, float] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> RuleSpec:
        if self.recipe is None and self.on_unsupported is None and self.reason is None:
            raise ValueError("changes nothing: give it a recipe, on_unsupported or a reason")
        return self


class CalibrationSpec(Section):
    """The YAML form of `policy.Calibration`. Whether it fits a model is asked where the two meet."""

    model_config = ConfigDict(allow_inf_nan=True)  # PSNR of equal pictures

    schema_version: int
    model_hash: str
    targets: list[str]
    achieved: dict[str, float]
    cost: float
    card: str
    date: str
    command: str
    setting: dict[str, str] = {}

    def build(self) -> Calibration:
        """The record itself."""
        values = {name: getattr(self, name) for name in CalibrationSpec.model_fields}
        return Calibration(**values | {"targets": tuple(self.targets)})


class PolicySpec(Section):
    """The YAML form of `policy.Policy`."""

    version: Literal[1] = 1
    recipe: RecipeName = AUTO
    on_unsupported: OnUnsupported = "exact"
    quantize_fp32: bool = False
    min_q_len: Annotated[int, Field(ge=1)] | None = None
    min_kv_len: Annotated[int, Field(ge=1)] | None = None
    exact_backend: ExactBackend = "torch"
    rules: list[RuleSpec] = []
    calibration: CalibrationSpec | None = None

    def build(self) -> Policy:
        """The policy itself."""
        built = ("version", "rules", "calibration")
        own = {name: getattr(self, name) for name in PolicySpec.model_fields if name not in built}
        rules = [Rule(**{name: getattr(r, name) for name in RuleSpec.model_fields}) for r in self.rules]
        calibration = None if self.calibration is None else self.calibration.build()
        return Policy(rules=rules, calibration=calibration, **own)


class ModelSpec(Section):
    """Which model or pipeline to load: a local folder or hub id (`path`), or weights that an installed package carries.

    package, gguf: an importable package's name and a GGUF file inside its folder; sha256 pins that file.
    dtype "auto" is what a language model's config says, and for a pipeline bfloat16 on CUDA and float32 on a CPU.
    device "auto" is CUDA if there is one. meta: weightless, from the configs alone; enough for a plan.

    Of a pipeline without a text encoder or an autoencoder:
    prompt_table: a safetensors file in the model's folder. Each of its tensors is named as an argument of the pipeline
    and holds one row a prompt, the last of which is the unconditional one; `names` in its metadata, a JSON list, names
    the others. latents_are_pixels: the latents, from -1 to 1, are the picture.
    """

    path: str | None = None
    package: str | None = None
    gguf: str | None = None
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    meta: bool = False
    prompt_table: str | None = None
    latents_are_pixels: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> ModelSpec:
        if (self.path is None) == (self.package is None) or (self.package is None) != (self.gguf is None):
            raise ValueError("needs either path, or package and gguf")
        return self


class TextTask(Section):
    """Generate from prompts, and compare next-token distributions over windows of real text.

    text: a UTF-8 file; `windows` pieces of `window_tokens` tokens each are taken from it, evenly spread.
    """

    kind: Literal["text"]
    prompts: Annotated[list[str], Field(min_length=1)]
    text: str
    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    windows: Annotated[int, Field(ge=2)] = 16
    window_tokens: Annotated[int, Field(ge=2)] = 1024


class PictureTask(Section):
    """Draw pictures or clips from prompts with equal seeds, unpatched and patched, and compare them pixel by pixel.

    Every prompt is drawn once for each seed; a prompt is text, or a name or number in the model's prompt table.
    seeds: the run's `seed` if left out. steps, guidance_scale, height, width and num_frames are the pipeline's own,
    with its defaults where left out; arguments: further ones of its call. fps: frames a second of the written clips.
    """

    kind: Literal["image", "video"]
    prompts: Annotated[list[Prompt], Field(min_length=1)]
    negative_prompt: str | None = None
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    steps: Annotated[int, Field(ge=1)]
    guidance_scale: float | None = None
    height: Annotated[int, Field(ge=1)] | None = None
    width: Annotated[int, Field(ge=1)] | None = None
    num_frames: Annotated[int, Field(ge=1)] | None = None
    fps: Annotated[int, Field(ge=1)] | None = None
    arguments: dict[str, Any] = {}

    @model_validator(mode="after")
    def _frames_are_for_video(self) -> PictureTask:
        if self.kind == "image" and (self.num_frames or self.fps):
            raise ValueError("num_frames and fps are for kind: video")
        return self


TASKS: dict[str, type[Section]] = {"text": TextTask, "image": PictureTask, "video": PictureTask}


def _bound(figure: Figure) -> Any:
    """The type of a bound: a share from 0 to 1, anything else more than 0."""
    return Annotated[float, Field(ge=0, le=1) if figure.unit == "share" else Field(gt=0)] | None


if TYPE_CHECKING:
    TargetSpec = Section
else:  # bounds that a measured recipe must keep, a key for each of figures.BY_BOUND; a missed one fails the run
    TargetSpec = create_model(
        "TargetSpec", __base__=Section, **{key: (_bound(figure), None) for key, figure in BY_BOUND.items()}
    )
TARGETS = {kind: tuple(key for key, figure in BY_BOUND.items() if kind in figure.kinds) for kind in TASKS}


class EvaluateSpec(Section):
    """What `sage-patch evaluate` measures beside the task.

    needle_lengths: tokens of the needle test's texts, an empty list for none; left out, those of 256, 512 and 1024 that
    the model reads. needle_depths: where the needle lies in them, 0 at the front to 1 at the end. lpips, fid: a
    TorchScript file of the network; clip: a folder with a CLIPModel of transformers. Nothing is downloaded.
    """

    needle_lengths: list[Annotated[int, Field(ge=1)]] | None = None
    needle_depths: list[Annotated[float, Field(ge=0, le=1)]] = [0.0, 0.5, 1.0]
    lpips: str | None = None
    clip: str | None = None
    fid: str | None = None


class RunConfig(Section):
    """One run: a model, a policy, a task, the recipes measured beside the policy, and where results go.

    targets: bounds by what is measured, "policy" or an entry of `compare`.
    """

    version: Literal[1]
    model: ModelSpec
    task: Annotated[TextTask | PictureTask, Field(discriminator="kind")]
    policy: PolicySpec = PolicySpec()
    compare: list[RecipeName] = []
    targets: dict[str, TargetSpec] = {}
    evaluate: EvaluateSpec | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    output: str = "runs/latest"
