"""What a report is made of: values that know where they stand in a results file, and the blocks that hold them.

Nothing here knows HTML or a particular results file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

# How a shown number follows from the values it is made of; named on the page beside the number.
RULES: dict[str, Callable[..., float]] = {
    "value": lambda a: a,
    "ratio": lambda a, b: a / b,
    # Amdahl's law: the share f of the unpatched time for which op gain g and end-to-end gain e fit, 1/e = 1 - f + f/g
    "implied_share": lambda ours_ms, exact_ms, ours_op, exact_op: (1 - ours_ms / exact_ms) / (1 - exact_op / ours_op),
}


@dataclass(frozen=True)
class Traced:
    """A number as it is shown, and how it is found again: a rule of RULES over values at `sources` ("file#/a/0/b")."""

    value: float
    spec: str
    sources: tuple[str, ...]
    rule: str = "value"

    def __str__(self) -> str:
        return format(self.value, self.spec)


@dataclass(frozen=True, eq=False)
class Node:
    """A value inside a results file, with its place there as a JSON pointer."""

    file: str
    pointer: str
    value: Any

    def __getitem__(self, key: str | int) -> Node:
        step = str(key).replace("~", "~0").replace("/", "~1")
        return Node(self.file, f"{self.pointer}/{step}", self.value[key])

    def get(self, key: str) -> Node | None:
        """The entry, or None where it is missing or null."""
        return self[key] if isinstance(self.value, dict) and self.value.get(key) is not None else None

    def __iter__(self) -> Iterator[Node]:
        """The entries of a list, or of a mapping in its order."""
        return (self[key] for key in (self.value if isinstance(self.value, dict) else range(len(self.value))))

    @property
    def place(self) -> str:
        return f"{self.file}#{self.pointer}"

    def number(self, spec: str) -> Traced:
        return Traced(self.value, spec, (self.place,))


def derived(rule: str, spec: str, *nodes: Node) -> Traced:
    """A number that a rule makes of several values."""
    return Traced(RULES[rule](*(n.value for n in nodes)), spec, tuple(n.place for n in nodes), rule)


Cell = str | Traced | None  # None: nothing was measured


@dataclass(frozen=True)
class Grid:
    """A table. columns: "<" in front of those that hold text. heat: (from, to) of the logarithmic scale by which the
    numbers' cells are shaded, None for none. marked: (row, column) of cells with a frame. note: what the columns mean,
    with units."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    heat: tuple[float, float] | None = None
    marked: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Point:
    """label: "" for a point without a name. series: a recipe or peer, which decides the colour."""

    label: str
    series: str
    x: Traced
    y: Traced


@dataclass(frozen=True)
class Scatter:
    title: str
    x_label: str
    y_label: str
    points: tuple[Point, ...]
    log_y: bool = False


@dataclass(frozen=True)
class Bar:
    label: str
    series: str
    value: Traced


@dataclass(frozen=True)
class Bars:
    """Horizontal bars from 0. reference: where a thin line stands (1 for ratios)."""

    title: str
    unit: str
    bars: tuple[Bar, ...]
    reference: float | None = None


@dataclass(frozen=True)
class Channels:
    """Lines over channel numbers. lines: (label, series, the list of values)."""

    title: str
    y_label: str
    lines: tuple[tuple[str, str, Node], ...]


@dataclass(frozen=True)
class Maps:
    """Small pictures of attention. maps: (label, rows of whole numbers as text, in units of `unit`)."""

    q_len: int
    kv_len: int
    unit: float
    maps: tuple[tuple[str, Node], ...]


@dataclass(frozen=True)
class Tile:
    """The tokens of a tile, 16 a line, each with the number of its group. colours: how many repeat."""

    title: str
    groups: Node
    colours: int


@dataclass(frozen=True)
class Picture:
    """A PNG that the page carries. title: the name of its file."""

    title: str
    data: bytes


Block = str | Picture | Grid | Scatter | Bars | Channels | Maps | Tile


@dataclass(frozen=True)
class Section:
    """conditions: card, versions and command of what is shown. Blocks in a list of their own stand side by side.
    folded: closed until somebody opens it."""

    name: str
    title: str
    words: str
    blocks: Sequence[Block | Sequence[Block]] = field(default_factory=tuple)
    conditions: str = ""
    folded: bool = False
