"""YAML text <-> plain Python values, without YAML 1.1's surprises and with the line of every value.

`1e-3` is a number; only `true` and `false` are booleans (`on`, `off`, `yes`, `no` stay text); `010` is ten;
`1:30` and dates are text; a key given twice is a problem instead of a silent overwrite.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]  # where a value sits: ("rules", 2, "recipe")


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a text: the path of the value, what is wrong, and where it is written."""

    path: Path
    message: str
    origin: str = ""

    def __str__(self) -> str:
        dotted = ".".join(map(str, self.path))
        return (f"{dotted}: " if dotted else "") + self.message + (f" ({self.origin})" if self.origin else "")


@dataclass
class Document:
    """What a YAML text holds: its value, where each value in it is written ("line 3"), and what is wrong."""

    value: Any = None
    origins: dict[Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def report(self, path: Path, message: str) -> None:
        """Add a problem, with the origin of the value at `path` or of the nearest one around it."""
        written = next((path[:n] for n in range(len(path), -1, -1) if path[:n] in self.origins), None)
        self.problems.append(Problem(path, message, "" if written is None else self.origins[written]))


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """List items are indented below their key, as people write them."""
        super().increase_indent(flow, False)


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Texts with YAML's rarer line breaks or invisible characters are quoted and escaped; PyYAML would fold them."""
    visible = text.isprintable() or text.replace("\n", "").isprintable()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if visible else '"')


_Dumper.add_representer(str, _write_text)

_PLAIN = (
    ("null", r"(~|null|)$", ["~", "n", ""]),
    ("bool", r"(true|false)$", list("tf")),
    ("int", r"[-+]?[0-9]+$", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$", list("-+.0123456789")),
    ("float", r"[-+]?\.inf$|\.nan$", list("-+.")),
    ("merge", r"<<$", ["<"]),
)
for _tag, _pattern, _first in _PLAIN:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)), 10)


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def read_yaml(text: str) -> Document:
    """The value of a YAML text. What is wrong is in `problems`; what cannot be parsed has the value None."""
    loader = _Loader(text)
    document = Document()
    try:
        node = loader.get_single_node()
        if node is None:
            return document
        _walk(node, (), document)
        document.value = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = ", ".join(part for part in (error.context, error.problem) if part)
        document.problems.append(Problem((), f"not YAML: {message}", f"line {mark.line + 1}" if mark else ""))
    except yaml.YAMLError as error:
        document.problems.append(Problem((), f"not YAML: {error}"))
    finally:
        loader.dispose()
    return document


def read_scalar(text: str) -> Any:
    """The value of a short text such as `0.5`, `true`, `[1, 2]` or `words`; ValueError if it is not YAML."""
    document = read_yaml(text)
    if document.problems:
        raise ValueError(document.problems[0].message)
    return document.value


def write_yaml(value: Any) -> str:
    """YAML text that `read_yaml` reads back to the same value; the innermost collections on one line."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True)


def _walk(node: yaml.Node, path: Path, document: Document, above: tuple[yaml.Node, ...] = ()) -> None:
    """Record the line of every value (of its key, in a mapping) and every key given twice."""
    document.origins.setdefault(path, f"line {node.start_mark.line + 1}")
    if node in above:
        raise yaml.YAMLError("a value refers to itself")
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _walk(item, (*path, i), document, (*above, node))
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner, origin = (*path, str(key.value)), f"line {key.start_mark.line + 1}"
            if inner in document.origins and key.value != "<<":
                message = f"given twice; the first is on {document.origins[inner]}"
                document.problems.append(Problem(inner, message, origin))
                continue
            document.origins[inner] = origin
            _walk(value, inner, document, (*above, node))
