"""YAML text <-> plain Python values, without YAML 1.1's surprises and with the line of every value.

`1e-3` is a number; only `true` and `false` are booleans (`on`, `off`, `yes`, `no` stay text); `010` is ten;
`1:30` and dates are text; a key given twice is a problem instead of a silent overwrite. Tags (`!!int`, `!name`) are
refused, and so is whatever would take long to read: see the limits below.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]  # where a value sits: ("rules", 2, "recipe")

MAX_CHARACTERS = 200_000  # of a text
MAX_DEPTH = 50  # of lists and mappings inside each other
MAX_VALUES = 20_000  # keys and values of a text, each alias counted with all that it stands for
MAX_DIGITS = 100  # of a whole number


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a text: the path of the value, what is wrong, and where it is written."""

    path: Path
    message: str
    origin: str = ""

    def __str__(self) -> str:
        dotted = ".".join(shown(str(part), 60) for part in self.path)
        parts = (
            f"{dotted}: " if dotted else "",
            shown(self.message),
            f" ({shown(self.origin)})" if self.origin else "",
        )
        return "".join(parts)


def shown(text: str, limit: int = 600) -> str:
    """The text as one line of a message: invisible characters escaped, the middle of a long one left out."""
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[-limit // 4 :]}"
    return text if text.isprintable() else repr(text)[1:-1]


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


class _Refused(yaml.MarkedYAMLError):
    """YAML, but not what is read here."""

    def __init__(self, problem: str, mark: Any):
        super().__init__(problem=problem, problem_mark=mark)


class _Loader(yaml.SafeLoader):
    """PyYAML's, with the limits above kept while nodes are made, so that nothing grows first."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}  # values in a whole node, depth of a whole node

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """The next node, or the one that an alias stands for. Raises _Refused for what is not read."""
        event = self.peek_event()
        tag = getattr(event, "tag", None)
        if tag is not None:
            tag = tag.replace("tag:yaml.org,2002:", "!!")
            raise _Refused(f"the tag {tag} is not read; write the value alone", event.start_mark)
        self._depth += 1
        self._limit(self._depth, MAX_DEPTH, "lists and mappings are nested more than {} deep", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        is_alias = isinstance(event, yaml.AliasEvent)
        if is_alias and node not in self._sizes:
            raise _Refused("a value refers to itself", event.start_mark)
        if node is not None and not is_alias:
            self._sizes[node] = self._measured(node, event)
        return node

    def _measured(self, node: yaml.Node, event: yaml.Event) -> tuple[int, int]:
        """(values in the node, its depth), aliases followed."""
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise _Refused("a key must be text", key.start_mark)
                inner += (key, value)
        elif not _is_text(node.value):
            raise _Refused("text with half of a character (a lone surrogate)", event.start_mark)
        sizes = [self._sizes[n] for n in inner]
        size, depth = 1 + sum(s for s, _ in sizes), 1 + max((d for _, d in sizes), default=0)
        self._limit(size, MAX_VALUES, "more than {} keys and values, aliases expanded", event)
        self._limit(depth, MAX_DEPTH, "aliases nest lists and mappings more than {} deep", event)
        return size, depth

    def _limit(self, found: int, limit: int, problem: str, event: yaml.Event) -> None:
        if found > limit:
            raise _Refused(problem.format(limit), event.start_mark)


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


def _is_text(value: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in value)


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if len(text) > MAX_DIGITS:
        raise _Refused(f"a number of {len(text)} digits", node.start_mark)
    return int(text, 10)


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def read_yaml(text: str) -> Document:
    """The value of a YAML text. What is wrong is in `problems`; what cannot be parsed has the value None."""
    document = Document()
    if len(text) > MAX_CHARACTERS:
        document.problems.append(Problem((), f"not read: the text has more than {MAX_CHARACTERS} characters"))
        return document
    unseen = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if unseen:
        line = text.count("\n", 0, unseen.start()) + 1
        document.problems.append(Problem((), f"not YAML: the character {unseen.group()!r}", f"line {line}"))
        return document
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is not None:
            _walk(node, (), document)
            document.value = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = ", ".join(part for part in (error.context, error.problem) if part)
        what = "not read" if isinstance(error, _Refused) else "not YAML"
        document.problems.append(Problem((), f"{what}: {message}", f"line {mark.line + 1}" if mark else ""))
    except (ValueError, OverflowError):  # PyYAML's scanner has no error of its own for "\\UFFFFFFFF"
        line = loader.get_mark().line + 1
        document.problems.append(Problem((), "not YAML: an escape names no character", f"line {line}"))
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


def _walk(node: yaml.Node, path: Path, document: Document) -> None:
    """Record the line of every value (of its key, in a mapping) and every key given twice."""
    document.origins.setdefault(path, f"line {node.start_mark.line + 1}")
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _walk(item, (*path, i), document)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner, origin = (*path, key.value), f"line {key.start_mark.line + 1}"
            if inner in document.origins and key.tag != "tag:yaml.org,2002:merge":
                message = f"given twice; the first is on {document.origins[inner]}"
                document.problems.append(Problem(inner, message, origin))
                continue
            document.origins[inner] = origin
            _walk(value, inner, document)
