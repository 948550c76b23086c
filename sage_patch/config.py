"""Configuration files: YAML text <-> `RunConfig` and `Policy`. Every configuration error is worded here.

Schema version 1. All errors of a file are found at once, each with its path and line; an unknown key is an
error that names the nearest known one. Paths in a file are relative to that file; paths given as overrides
are relative to the current folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)

from sage_patch.policy import OnUnsupported, Policy, Role, Rule, Span
from sage_patch.recipes import AUTO, nearest, parse_recipe
from sage_patch.yamltext import Document, Problem, read_scalar, read_yaml, write_yaml

SCHEMA_VERSION = 1


class ConfigError(ValueError):
    """A configuration that cannot be used. The message names the file and holds every error, one a line."""


def _known_recipe(text: str) -> str:
    parse_recipe(text)
    return text


RecipeName = Annotated[str, AfterValidator(_known_recipe)]
SpanField = Annotated[Span, PlainValidator(Span.parse), PlainSerializer(Span.written)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class RuleSpec(_Section):
    """The YAML form of `policy.Rule`."""

    match: str = "*"
    layers: SpanField | None = None
    role: Role | None = None
    steps: SpanField | None = None
    recipe: RecipeName | None = None
    on_unsupported: OnUnsupported | None = None
    reason: str | None = None
    score: dict[str, float] | None = None


class PolicySpec(_Section):
    """The YAML form of `policy.Policy`."""

    version: Literal[1] = 1
    recipe: RecipeName = AUTO
    on_unsupported: OnUnsupported = "exact"
    quantize_fp32: bool = False
    min_q_len: Annotated[int, Field(ge=1)] | None = None
    min_kv_len: Annotated[int, Field(ge=1)] | None = None
    rules: list[RuleSpec] = []

    def build(self) -> Policy:
        """The policy itself."""
        own = {name: getattr(self, name) for name in PolicySpec.model_fields if name not in ("version", "rules")}
        rules = [Rule(**{name: getattr(r, name) for name in RuleSpec.model_fields}) for r in self.rules]
        return Policy(rules=rules, **own)


class ModelSpec(_Section):
    """Which model to load: a local folder or hub id (`path`), or weights that an installed package carries.

    package, gguf: an importable package's name and a GGUF file inside its folder; sha256 pins that file.
    device "auto" is CUDA if there is one. meta: weightless, from config.json alone; enough for a plan.
    """

    path: str | None = None
    package: str | None = None
    gguf: str | None = None
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    meta: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> ModelSpec:
        if (self.path is None) == (self.package is None) or (self.package is None) != (self.gguf is None):
            raise ValueError("needs either path, or package and gguf")
        return self


class TextTask(_Section):
    """Generate from prompts, and compare next-token distributions over windows of real text.

    text: a UTF-8 file; `windows` pieces of `window_tokens` tokens each are taken from it, evenly spread.
    """

    kind: Literal["text"]
    prompts: Annotated[list[str], Field(min_length=1)]
    text: str
    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    windows: Annotated[int, Field(ge=2)] = 16
    window_tokens: Annotated[int, Field(ge=2)] = 1024


class TargetSpec(_Section):
    """Bounds that a measured recipe must keep; the run fails if one is missed.

    max_kl: nats a token. min_top1: share from 0 to 1. max_ppl_change: relative, either way (0.005 is 0.5 %).
    """

    max_kl: Annotated[float, Field(gt=0)] | None = None
    min_top1: Annotated[float, Field(ge=0, le=1)] | None = None
    max_ppl_change: Annotated[float, Field(gt=0)] | None = None


class RunConfig(_Section):
    """One run: a model, a policy, a task, the recipes measured beside the policy, and where results go.

    targets: bounds by what is measured, "policy" or an entry of `compare`.
    """

    version: Literal[1]
    model: ModelSpec
    task: TextTask
    policy: PolicySpec = PolicySpec()
    compare: list[RecipeName] = []
    targets: dict[str, TargetSpec] = {}
    seed: Annotated[int, Field(ge=0)] = 0
    output: str = "runs/latest"


SectionT = TypeVar("SectionT", bound=_Section)
_PATHS = (("model", "path"), ("task", "text"), ("output",))


def load_policy(source: str | Path | Mapping[str, Any]) -> Policy:
    """The policy in a YAML file, or in a mapping of that form. Raises ConfigError with every error found."""
    if isinstance(source, Mapping):
        document, name = Document(value=dict(source)), "policy"
    else:
        document, name = _read_policy(Path(source)), str(source)
    spec = _validate(PolicySpec, document)
    if spec is None or document.problems:
        raise _error(name, document)
    return spec.build()


def policy_to_yaml(policy: Policy) -> str:
    """YAML text that `load_policy` reads back to an equal policy; what is at its default is left out."""
    fields = [name for name in PolicySpec.model_fields if name not in ("version", "rules")]
    value: dict[str, Any] = {"version": SCHEMA_VERSION, "recipe": policy.recipe}
    value |= {n: getattr(policy, n) for n in fields if getattr(policy, n) != getattr(Policy(), n)}
    if policy.rules:
        value["rules"] = [_written(rule) for rule in policy.rules]
    return write_yaml(value)


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run in a YAML file, with overrides such as "task.windows=4" or "policy.recipe=exact" laid over it.

    `policy` may be a mapping or the path of a policy file. Raises ConfigError with every error found.
    """
    path = Path(path)
    document = _read(path)
    if isinstance(document.value, dict):
        base = path.resolve().parent
        document.value.setdefault("output", str(Path.cwd() / "runs" / path.stem))
        if any(text.startswith("policy.") for text in overrides):
            _inline_policy(document, base)
        changed = [_override(document, text) for text in overrides]
        _inline_policy(document, Path.cwd() if ("policy",) in changed else base)
        for where in _PATHS:
            _resolve_path(document, where, Path.cwd() if where in changed else base)
        _check_targets(document)
    config = _validate(RunConfig, document)
    if config is None or document.problems:
        raise _error(str(path), document)
    return config


def _read(path: Path) -> Document:
    try:
        return read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 text") from None


def _read_policy(path: Path) -> Document:
    """A policy file; unlike a policy inside a run's file it must state its schema version."""
    document = _read(path)
    if isinstance(document.value, dict) and "version" not in document.value:
        document.report(("version",), f"is missing; write version: {SCHEMA_VERSION}")
    return document


def _written(rule: Rule) -> dict[str, Any]:
    value = {name: getattr(rule, name) for name in RuleSpec.model_fields}
    value |= {name: span.written() for name, span in value.items() if isinstance(span, Span)}
    value["score"] = dict(rule.score) if rule.score is not None else None
    return {name: v for name, v in value.items() if v is not None and (name, v) != ("match", "*")}


def _get(value: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _override(document: Document, text: str) -> tuple[str | int, ...]:
    """Lay "a.b=c" over the document; c is read as YAML. Returns the path that was set."""
    key, equals, tail = text.partition("=")
    path: tuple[str | int, ...] = tuple(key.strip().split("."))
    origin = f"--set {text}"
    if not equals or not all(path):
        document.problems.append(Problem((), "an override is written a.b=value", origin))
        return ()
    target = document.value
    try:
        new = read_scalar(tail)
        for part in path[:-1]:
            target = target[int(part)] if isinstance(target, list) else target.setdefault(part, {})
        target[int(path[-1]) if isinstance(target, list) else path[-1]] = new
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        reason = str(error) if str(error).startswith("not YAML") else "there is nothing of that name to set"
        document.problems.append(Problem(path, reason, origin))
        return ()
    path = tuple(int(p) if str(p).isdigit() else p for p in path)
    document.origins = {p: o for p, o in document.origins.items() if p[: len(path)] != path} | {path: origin}
    return path


def _inline_policy(document: Document, base: Path) -> None:
    """Where `policy` is the path of a file, put what the file holds in its place."""
    name = document.value.get("policy")
    if not isinstance(name, str):
        return
    document.value["policy"] = {}
    try:
        inner = _read_policy(base / Path(name).expanduser())
    except ConfigError as error:
        return document.report(("policy",), str(error))
    document.value["policy"] = inner.value if inner.value is not None else {}
    document.origins |= {("policy", *p): f"{o} of {name}" for p, o in inner.origins.items()}
    document.problems += [Problem(("policy", *p.path), p.message, f"{p.origin} of {name}") for p in inner.problems]


def _resolve_path(document: Document, where: tuple[str, ...], base: Path) -> None:
    """Make a path absolute. A model's path that is no folder beside the file is left as a hub id."""
    name = _get(document.value, where)
    if not isinstance(name, str):
        return
    full = base / Path(name).expanduser()
    if where == ("model", "path") and not full.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            document.report(where, f"no such folder: {full.resolve()}")
        return
    if where == ("task", "text") and not full.is_file():
        document.report(where, f"no such file: {full.resolve()}")
    _get(document.value, where[:-1])[where[-1]] = str(full.resolve())


def _check_targets(document: Document) -> None:
    """Every target must be for something that is measured."""
    targets, compare = document.value.get("targets"), document.value.get("compare") or []
    if isinstance(targets, dict) and isinstance(compare, list):
        measured = ["policy", *map(str, compare)]
        for name in targets:
            if name not in measured:
                document.report(("targets", name), f"is not measured{nearest(str(name), measured)}")


def _validate(section: type[SectionT], document: Document) -> SectionT | None:
    """The section that the document's value describes, or None with the errors added to its problems."""
    if document.value is None and document.problems:
        return None  # not YAML at all
    try:
        return section.model_validate(document.value)
    except ValidationError as error:
        errors = error.errors()
    unknown_kind = any(e["loc"] == ("task", "kind") and e["type"] == "literal_error" for e in errors)
    for e in errors:
        if not (unknown_kind and e["loc"][0] == "task" and e["loc"] != ("task", "kind")):
            document.report(e["loc"], _wording(section, e))
    return None


_WORDS = {
    "missing": "is missing",
    "bool_type": "must be true or false; got {input}",
    "int_type": "must be a whole number; got {input}",
    "float_type": "must be a number; got {input}",
    "string_type": "must be text; got {input}",
    "list_type": "must be a list; got {input}",
    "dict_type": "must be a mapping of keys to values; got {input}",
    "model_type": "must be a mapping of keys to values; got {input}",
    "literal_error": "must be one of {known}; got {input}",
    "value_error": "{error}",
    "too_short": "must not be empty",
    "greater_than_equal": "must be at least {ge}; got {input}",
    "greater_than": "must be more than {gt}; got {input}",
    "less_than_equal": "must be at most {le}; got {input}",
}


def _wording(section: type[BaseModel], error: Any) -> str:
    """One pydantic error in our words."""
    loc, given, context = error["loc"], error["input"], error.get("ctx", {})
    if error["type"] == "extra_forbidden":
        return f'unknown key "{loc[-1]}"{nearest(str(loc[-1]), _known_keys(section, loc[:-1]))}'
    if loc == ("version",) and error["type"] == "literal_error":
        return f"this release reads schema version {SCHEMA_VERSION}; got {given!r}"
    known = str(context.get("expected", "")).replace("'", "").replace(" or ", ", ")
    template = _WORDS.get(error["type"], error["msg"] + "; got {input}")
    shown = "nothing" if given is None else repr(given)
    return template.format(**{**context, "input": shown, "known": known, "error": context.get("error", "")})


def _known_keys(section: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """The keys that the section at `path` below `section` knows."""
    for part in path:
        if isinstance(part, str) and part in section.model_fields:
            section = _section_in(section.model_fields[part].annotation) or section
    return list(section.model_fields)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section type inside list[X], dict[str, X] or X | None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((s for a in get_args(annotation) if (s := _section_in(a))), None)


def _error(name: str, document: Document) -> ConfigError:
    problems = document.problems
    if len(problems) == 1:
        return ConfigError(f"{name}: {problems[0]}")
    return ConfigError(f"{name}: {len(problems)} errors\n" + "\n".join(f"  {p}" for p in problems))
