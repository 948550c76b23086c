"""Configuration files: YAML text <-> `RunConfig` and `Policy`. Every configuration error is worded here.

All errors of a file are found at once, each with its path and line; an unknown key is an error that names the
nearest known one. Paths in a file are relative to that file; paths given as overrides are relative to the current
folder. What the keys are is in `schema.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from sage_patch.errors import SagePatchError
from sage_patch.policy import Policy, Rule, Span
from sage_patch.recipes import nearest, recipe_names
from sage_patch.schema import (
    DEVICE_MAPS,
    PICTURES,
    SCHEMA_VERSION,
    TARGETS,
    TASKS,
    PolicySpec,
    RuleSpec,
    RunConfig,
    Section,
)
from sage_patch.yamltext import MAX_CHARACTERS, Document, Problem, read_scalar, read_yaml, shown, write_yaml


class ConfigError(SagePatchError, ValueError):
    """A configuration that cannot be used. The message names the file and holds every error, one a line."""


SectionT = TypeVar("SectionT", bound=Section)
_WEIGHTS = (("evaluate", "lpips"), ("evaluate", "clip"), ("evaluate", "fid"))
_PATHS = (("model", "path"), ("task", "text"), ("output",), *_WEIGHTS)
_HERE = Path(__file__).resolve().parent
_SHIPPED = (_HERE / "policies", _HERE.parent / "configs")  # of an installed package, of a checkout
_MAX_ERRORS = 40  # of a message


def load_policy(source: str | os.PathLike[str] | Mapping[str, Any]) -> Policy:
    """The policy that a text, a path or a mapping describes.

    source: the path of a YAML file, the name of a policy that comes with the package ("wan"), the name of a recipe
    ("qk_int8_pv_fp8"), or what such a file holds, as a mapping. Raises ConfigError with every error found.
    """
    if isinstance(source, Mapping):
        document, name = Document(value=dict(source)), "policy"
    else:
        document, name = _policy_of(_text_of(source, "load_policy"), Path.cwd()), str(source)
    spec = _validate(PolicySpec, document)
    if spec is None or document.problems:
        raise _error(name, document)
    return spec.build()


def policy_to_yaml(policy: Policy) -> str:
    """YAML text that `load_policy` reads back to an equal policy; what is at its default is left out."""
    fields = [name for name in PolicySpec.model_fields if name not in ("version", "rules", "calibration")]
    value: dict[str, Any] = {"version": SCHEMA_VERSION, "recipe": policy.recipe}
    value |= {n: getattr(policy, n) for n in fields if getattr(policy, n) != getattr(Policy(), n)}
    if policy.rules:
        value["rules"] = [_written(rule) for rule in policy.rules]
    if policy.calibration is not None:
        record = {f.name: getattr(policy.calibration, f.name) for f in fields_of(policy.calibration)}
        value["calibration"] = {n: _plain(v) for n, v in record.items()}
    return write_yaml(value)


def load_run_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """The run in a YAML file, with overrides such as "task.windows=4" or "policy.recipe=exact" laid over it.

    `policy` may be a mapping, or whatever text `load_policy` takes. Raises ConfigError with every error found.
    """
    path = Path(_text_of(path, "load_run_config"))
    if isinstance(overrides, str) or not all(isinstance(text, str) for text in overrides):
        raise ConfigError(f"overrides must be a list of texts such as 'task.windows=4'; got {overrides!r:.100}")
    document = _read(path)
    if isinstance(document.value, dict):
        if _belongs_to(document.value, PolicySpec, RunConfig):
            raise ConfigError(
                f"{path}: this is a policy file, and a run file (model, task, ...) belongs here: "
                f"give a run file that says policy: {path.name}"
            )
        base = path.resolve().parent
        document.value.setdefault("output", str(Path.cwd() / "runs" / path.stem))
        if any(text.startswith("policy.") for text in overrides):
            _inline_policy(document, base)
        changed = [_override(document, text) for text in overrides]
        _inline_policy(document, Path.cwd() if ("policy",) in changed else base)
        for where in (*_PATHS, *_weights_of(document)):
            _resolve_path(document, where, Path.cwd() if where in changed else base)
        _check_kind(document)
        _check_targets(document)
    config = _validate(RunConfig, document)
    if config is None or document.problems:
        raise _error(str(path), document)
    return config


def _text_of(source: object, who: str) -> str:
    """A path as text. ConfigError for anything else."""
    text = os.fspath(source) if isinstance(source, os.PathLike) else source
    if not isinstance(text, str):
        also = " or a mapping" if who == "load_policy" else ""
        raise ConfigError(f"{who} takes the path of a YAML file{also}; got {type(source).__name__}")
    return text


def _read(path: Path, or_else: str = "") -> Document:
    """The YAML file at `path`. ConfigError if there is no text to read there, with `or_else` if there is no file."""
    try:
        with open(path, encoding="utf-8") as file:
            document = read_yaml(file.read(MAX_CHARACTERS + 1))
    except OSError as error:
        hint = or_else if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot read {shown(str(path))}: {error.strerror or error}{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {shown(str(path))}: it is not UTF-8 text") from None
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"cannot read {shown(str(path))}: {error}") from None
    if document.value is None and not document.problems:
        document.problems.append(Problem((), "is empty; it must be a mapping of keys to values, version: 1 at least"))
    elif isinstance(document.value, dict) and {"environment", "command"} <= set(document.value):
        raise ConfigError(f"{shown(str(path))}: this is a results file; a policy or run file (YAML) belongs here")
    return document


def _policy_of(name: str, base: Path) -> Document:
    """What a text stands for: a recipe, a policy file below `base`, or a policy that comes with the package."""
    if name.partition(":")[0] in recipe_names():
        return Document(value={"version": SCHEMA_VERSION, "recipe": name})
    try:
        path = base / Path(name).expanduser()
        if not path.suffix and path.name == name and not path.exists():
            path = _shipped_policy(name)
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, no such user
        raise ConfigError(f"cannot read {shown(name)}: {error}") from None
    document = _read(
        path, or_else="; give a file's path, a recipe's name, a shipped policy's name or a sage_patch.Policy"
    )
    if isinstance(document.value, dict) and _belongs_to(document.value, RunConfig, PolicySpec):
        raise ConfigError(
            f"{shown(name)}: this is a run file, and a policy file belongs here: "
            "give what its `policy` names, or a file of that part alone"
        )
    # Unlike a policy inside a run's file, one of its own must state its schema version.
    if isinstance(document.value, dict) and "version" not in document.value:
        document.report(("version",), f"is missing; write version: {SCHEMA_VERSION}")
    return document


def _shipped_policy(name: str) -> Path:
    folder = next((path for path in _SHIPPED if path.is_dir()), _SHIPPED[0])
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in names:
        known = nearest(name, [*recipe_names(), *names])
        raise ConfigError(f"{shown(name)} is no file, no recipe and no policy that comes with the package{known}")
    return folder / f"{name}.yaml"


def _belongs_to(value: dict[Any, Any], section: type[Section], other: type[Section]) -> bool:
    """Whether the keys of a file are those of `section` and not of `other`."""
    own, foreign = set(section.model_fields), set(other.model_fields)
    return bool((own - foreign) & set(value)) and not (foreign - own) & set(value)


def _written(rule: Rule) -> dict[str, Any]:
    value = {name: getattr(rule, name) for name in RuleSpec.model_fields}
    value |= {name: span.written() for name, span in value.items() if isinstance(span, Span)}
    value["score"] = dict(rule.score) if rule.score is not None else None
    return {name: v for name, v in value.items() if v is not None and (name, v) != ("match", "*")}


def _plain(value: Any) -> Any:
    """A mapping or tuple as YAML holds it."""
    return dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value


def _get(value: Any, path: Sequence[str | int]) -> Any:
    for part in path:
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value


def _weights_of(document: Document) -> list[tuple[str | int, ...]]:
    """Where adapters and files of quantized weights are named."""
    adapters, files = (_get(document.value, ("model", *part)) for part in (("adapters",), ("quantize", "files")))
    places: list[tuple[str | int, ...]] = []
    if isinstance(adapters, list):
        places += [("model", "adapters", i, "path") for i in range(len(adapters))]
    if isinstance(files, dict):
        places += [("model", "quantize", "files", name) for name in files]
    return places


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
        path = tuple(int(p) if str(p).isdecimal() else p for p in path)
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        reason = str(error) if str(error).startswith("not ") else "there is nothing of that name to set"
        document.problems.append(Problem(path, reason, origin))
        return ()
    document.origins = {p: o for p, o in document.origins.items() if p[: len(path)] != path} | {path: origin}
    return path


def _inline_policy(document: Document, base: Path) -> None:
    """Where `policy` is a text, put what it stands for in its place."""
    name = document.value.get("policy")
    if not isinstance(name, str):
        return
    document.value["policy"] = {}
    try:
        inner = _policy_of(name, base)
    except ConfigError as error:
        return document.report(("policy",), str(error))
    if not inner.problems:
        document.value["policy"] = inner.value
    document.origins |= {("policy", *p): f"{o} of {name}" for p, o in inner.origins.items()}
    document.problems += [Problem(("policy", *p.path), p.message, _of(p.origin, name)) for p in inner.problems]


def _of(origin: str, name: str) -> str:
    return f"{origin} of {name}" if origin else name


def _resolve_path(document: Document, where: tuple[str | int, ...], base: Path) -> None:
    """Make a path absolute. What the model's weights are read from and is not beside the file is left as a hub id."""
    name = _get(document.value, where)
    if not isinstance(name, str):
        return
    try:
        full = base / Path(name).expanduser()
        is_file = where[:3] == ("model", "quantize", "files")
        if where[0] == "model" and not (full.is_file() if is_file else full.is_dir()):
            parts = 2 if is_file else 1  # of owner/name/file, of owner/name
            if name.startswith((".", "/", "~")) or (name.count("/") < parts if is_file else name.count("/") > parts):
                document.report(where, f"no such {'file' if is_file else 'folder'}: {full.resolve()}")
            return
        if where in _WEIGHTS and not full.exists():
            document.report(where, f"no such file or folder: {full.resolve()}")
        if where == ("task", "text") and not full.is_file():
            document.report(where, f"no such file: {full.resolve()}")
        _get(document.value, where[:-1])[where[-1]] = str(full.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, no such user
        document.report(where, f"cannot be a path: {error}")


# Keys of `model` that one kind of task has no use for, and what to do instead.
_FOR_TEXT = {key: "; name a diffusers pipeline by model.path" for key in ("package", "gguf", "sha256")}
_FOR_PICTURES = {
    **dict.fromkeys(("prompt_table", "latents_are_pixels", "vae_tiling"), ""),
    "offload": "; a language model larger than the card takes device_map: auto",
}


def _check_kind(document: Document) -> None:
    """Keys of `model` that the kind of task has no use for."""
    kind, model = _get(document.value, ("task", "kind")), _get(document.value, ("model",))
    if not isinstance(kind, str) or kind not in TASKS or not isinstance(model, dict):
        return
    wrong: list[tuple[tuple[str | int, ...], str]] = []
    if kind in PICTURES:
        wrong += [((key,), f"is for text tasks{instead}") for key, instead in _FOR_TEXT.items()]
    else:
        wrong += [((key,), f"is for image and video tasks{instead}") for key, instead in _FOR_PICTURES.items()]
        wrong += [(("quantize", key), "is for image and video tasks") for key in ("components", "files")]
        many = model.get("adapters") if isinstance(model.get("adapters"), list) else []
        inner = [("adapters", i, key) for i in range(len(many or ())) for key in ("weight_name", "part")]
        wrong += [(place, "is for image and video tasks; a language model's adapter is a folder") for place in inner]
        if _get(model, ("quantize", "library")) == "gguf":
            document.report(
                ("model", "quantize", "library"),
                "gguf is for image and video tasks; a language model's GGUF file is model.package and model.gguf",
            )
    for place, message in wrong:
        if _get(model, place) is not None:
            document.report(("model", *place), message)
    device_map, known = model.get("device_map"), DEVICE_MAPS[kind]
    if isinstance(device_map, str) and device_map not in known:
        document.report(("model", "device_map"), f"of {kind} tasks is one of {', '.join(known)}; got {device_map!r}")
    elif isinstance(device_map, dict) and kind in PICTURES:
        document.report(("model", "device_map"), f"of {kind} tasks is {known[0]}, a mapping is for language models")


def _check_targets(document: Document) -> None:
    """Every target must be for something that is measured, and of a figure that this kind of task gives."""
    targets, compare = document.value.get("targets"), document.value.get("compare") or []
    if not isinstance(targets, dict) or not isinstance(compare, list):
        return
    kind = _get(document.value, ("task", "kind"))
    known = TARGETS.get(kind, ()) if isinstance(kind, str) else ()
    others = {figure for figures in TARGETS.values() for figure in figures} - set(known) if known else set()
    measured = ["policy", *map(str, compare)]
    for name, bounds in targets.items():
        if name not in measured:
            document.report(("targets", name), f"is not measured{nearest(str(name), measured)}")
        for figure in sorted(others.intersection(bounds if isinstance(bounds, dict) else ())):
            what = f"is not a figure of {kind} tasks; theirs are {', '.join(known)}"
            document.report(("targets", name, figure), what)


def _validate(section: type[SectionT], document: Document) -> SectionT | None:
    """The section that the document's value describes, or None with the errors added to its problems."""
    if document.value is None and document.problems:
        return None  # not YAML at all
    try:
        return section.model_validate(document.value)
    except ValidationError as error:
        errors = error.errors()
    for e in errors:
        document.report(_place(e), _wording(section, e))
    return None


def _place(error: Any) -> tuple[str | int, ...]:
    """Where in the file the error is. pydantic puts the kind of task into the path; the file has it under `kind`."""
    loc = tuple(part for part in error["loc"] if part != "[key]")
    if loc == ("task",) and error["type"].startswith("union_tag"):
        return ("task", "kind")
    return ("task", *loc[2:]) if loc[0:1] == ("task",) and loc[1:2] and loc[1] in TASKS else loc


_WORDS = {
    "missing": "is missing",
    "bool_type": "must be true or false; got {input}",
    "int_type": "must be a whole number; got {input}",
    "float_type": "must be a number; got {input}",
    "string_type": "must be text; got {input}",
    "list_type": "must be a list; got {input}",
    "dict_type": "must be a mapping of keys to values; got {input}",
    "model_type": "must be a mapping of keys to values; got {input}",
    "union_tag_not_found": "is missing",
    "union_tag_invalid": "must be one of {known}; got '{tag}'",
    "literal_error": "must be one of {known}; got {input}",
    "value_error": "{error}",
    "too_short": "must not be empty",
    "greater_than_equal": "must be at least {ge}; got {input}",
    "greater_than": "must be more than {gt}; got {input}",
    "less_than_equal": "must be at most {le}; got {input}",
    "finite_number": "must be a finite number; got {input}",
    "invalid_key": "a key must be text; got {input}",
    "string_pattern_mismatch": "must match {pattern}; got {input}",
}

# What people write for a key of ours.
_MEANT = {
    **dict.fromkeys(("blocks", "block", "layer", "layer_range"), "layers"),
    **dict.fromkeys(("name", "names", "site", "sites", "pattern", "glob", "module", "modules"), "match"),
    **dict.fromkeys(("default", "precision", "quantization", "default_recipe"), "recipe"),
    **dict.fromkeys(("skip", "exclude"), "recipe: exact"),
    **dict.fromkeys(("step", "timesteps", "step_range"), "steps"),
}


def _wording(section: type[BaseModel], error: Any) -> str:
    """One pydantic error in our words."""
    loc, given, context = error["loc"], error["input"], error.get("ctx", {})
    if error["type"] == "extra_forbidden":
        known_keys = _known_keys(section, loc[:-1])
        meant = _MEANT.get(str(loc[-1]), "")
        hint = f'; nearest: "{meant}"' if meant.partition(":")[0] in known_keys else nearest(str(loc[-1]), known_keys)
        return f'unknown key "{shown(str(loc[-1]), 60)}"{hint}'
    got = "nothing" if given is None else shown(repr(given), 200)
    if loc == ("version",) and error["type"] == "literal_error":
        return f"this release reads schema version {SCHEMA_VERSION}; got {got}"
    if error["type"] not in _WORDS:
        return f"{error['msg']}; got {got}"
    known = str(context.get("expected", context.get("expected_tags", ""))).replace("'", "").replace(" or ", ", ")
    words = {**context, "input": got, "known": known, "error": context.get("error", "")}
    return _WORDS[error["type"]].format(**{name: shown(str(value)) for name, value in words.items()})


def _known_keys(section: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """The keys that the section at `path` below `section` knows."""
    if path[0:1] == ["task"] or path[0:1] == ("task",):
        section, path = TASKS[str(path[1])], path[2:]
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
    problems, name = document.problems, shown(name)
    if len(problems) == 1:
        return ConfigError(f"{name}: {problems[0]}")
    lines = [f"  {problem}" for problem in problems[:_MAX_ERRORS]]
    lines += [f"  and {len(problems) - _MAX_ERRORS} more"] if len(problems) > _MAX_ERRORS else []
    return ConfigError("\n".join([f"{name}: {len(problems)} errors", *lines]))
