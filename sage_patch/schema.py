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
from sage_patch.recipes import AUTO, ExactBackend, Rotate, parse_recipe

SCHEMA_VERSION = 1
PICTURES = ("image", "video")  # the kinds of tasks of pipelines


def _known_recipe(text: str) -> str:
    parse_recipe(text)
    return text


def _a_prompt(value: object) -> str | int:
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise ValueError(f"must be text, or a number in the model's prompt table; got {value!r}")


def _a_device_map(value: object) -> str | dict[str, int | str]:
    if isinstance(value, str):
        return value  # which names there are depends on the task
    given = value.items() if isinstance(value, dict) else ()
    found = {n: v for n, v in given if isinstance(n, str) and isinstance(v, int | str) and not isinstance(v, bool)}
    if not found or len(found) < len(given):
        raise ValueError(f"must be a name, or a mapping of modules to devices; got {value!r}")
    return found


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
    rotate: Rotate | None = None
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


# Types of weights by the library that holds them so. Those of a GGUF file are the file's own.
WEIGHT_TYPES = {"bitsandbytes": ("nf4", "fp4", "int8"), "torchao": ("int8", "int4", "float8"), "gguf": ()}
DEVICE_MAPS = {"text": ("auto", "balanced", "balanced_low_0", "sequential"), **dict.fromkeys(PICTURES, ("balanced",))}


class AdapterSpec(Section):
    """LoRA weights that are laid over the model before it is patched; attention sees what they make of Q, K and V.

    path: a folder or hub id. scale: 1 is as they were trained. Of a pipeline: weight_name, the file there; part, the
    denoising model that gets them where there are two.
    """

    path: str
    scale: float = 1.0
    revision: str | None = None
    weight_name: str | None = None
    part: Literal["transformer_2"] | None = None


class QuantizeSpec(Section):
    """Weights of fewer bits. Attention is quantized by the policy, whatever the weights are.

    type: one of WEIGHT_TYPES; with GGUF that of the file. components: those of a pipeline that get it; left out, its
    denoising models. files, with GGUF: a file by component, a path or owner/name/file.gguf on the hub.
    """

    library: Literal["bitsandbytes", "torchao", "gguf"]
    type: Literal["nf4", "fp4", "int8", "int4", "float8"] | None = None
    components: Annotated[list[str], Field(min_length=1)] | None = None
    files: Annotated[dict[str, str], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _type_of_the_library(self) -> QuantizeSpec:
        known = WEIGHT_TYPES[self.library]
        if self.library == "gguf":
            if self.files is None or self.type is not None or self.components is not None:
                raise ValueError(
                    "gguf needs files (a file by component) and takes no type or components: the files say"
                )
        elif self.type not in known or self.files is not None:
            raise ValueError(f"{self.library} needs type, one of {', '.join(known)}, and takes no files")
        return self


class ModelSpec(Section):
    """Which model or pipeline to load: a local folder or hub id (`path`), or weights that an installed package carries.

    package, gguf: an importable package's name and a GGUF file inside its folder; sha256 pins that file.
    revision: branch, tag or commit of a hub id. variant: of the weights' files, such as fp16.
    dtype "auto" is what a language model's config says, and for a pipeline bfloat16 on CUDA and float32 on a CPU.
    device "auto" is CUDA if there is one. meta: weightless, from the configs alone; enough for a plan.

    Of models larger than the card:
    offload: what of a pipeline is on `device` at a time, the rest waits in the CPU's memory: one component (model), one
    layer while the next is fetched (group), one layer (sequential). device_map: over which devices the weights are
    spread, by one of DEVICE_MAPS, or of a language model {module: device}; max_memory: how much on each, such as
    {0: 20GiB, cpu: 64GiB}. vae_tiling: pictures are decoded piece by piece.

    Of a pipeline without a text encoder or an autoencoder:
    prompt_table: a safetensors file in the model's folder. Each of its tensors is named as an argument of the pipeline
    and holds one row a prompt, the last of which is the unconditional one; `names` in its metadata, a JSON list, names
    the others. latents_are_pixels: the latents, from -1 to 1, are the picture.
    """

    path: str | None = None
    package: str | None = None
    gguf: str | None = None
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    revision: str | None = None
    variant: str | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    meta: bool = False
    offload: Literal["model", "group", "sequential"] | None = None
    device_map: Annotated[str | dict[str, int | str], PlainValidator(_a_device_map)] | None = None
    max_memory: dict[int | str, int | str] | None = None
    vae_tiling: bool = False
    quantize: QuantizeSpec | None = None
    adapters: list[AdapterSpec] = []
    prompt_table: str | None = None
    latents_are_pixels: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> ModelSpec:
        if (self.path is None) == (self.package is None) or (self.package is None) != (self.gguf is None):
            raise ValueError("needs either path, or package and gguf")
        return self

    @model_validator(mode="after")
    def _no_two_answers(self) -> ModelSpec:
        if self.device_map is not None and (self.offload is not None or self.device != "auto"):
            raise ValueError("device_map says where the weights are: leave out offload and device")
        if self.max_memory is not None and self.device_map is None:
            raise ValueError("max_memory is for a device_map")
        if self.package is not None and (self.revision, self.variant, self.quantize) != (None, None, None):
            raise ValueError("revision, variant and quantize are for a path: a package has one file, and that is read")
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


class CallbackSpec(Section):
    """A callback of diffusers.callbacks, called at the end of every step, such as SDXLCFGCutoffCallback: no guidance
    after `cutoff_step_ratio` of the steps (0.4), or after the step numbered `cutoff_step_index`."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9]+CFGCutoffCallback$")]  # others change the pipeline for good
    cutoff_step_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    cutoff_step_index: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _one_cutoff(self) -> CallbackSpec:
        if (self.cutoff_step_ratio is None) == (self.cutoff_step_index is None):
            raise ValueError("needs either cutoff_step_ratio or cutoff_step_index")
        return self


class PictureTask(Section):
    """Draw pictures or clips from prompts with equal seeds, unpatched and patched, and compare them pixel by pixel.

    Every prompt is drawn once for each seed; a prompt is text, or a name or number in the model's prompt table.
    seeds: the run's `seed` if left out. steps, guidance_scale, height, width and num_frames are the pipeline's own,
    with its defaults where left out; arguments: further ones of its call. callbacks: in order, at the end of every
    step. fps: frames a second of the written clips.
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
    callbacks: list[CallbackSpec] = []

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
