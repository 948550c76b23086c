"""Tables for people: in the terminal with colours, as Markdown everywhere else. And files that appear whole."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from sage_patch.names import grouped

_WIDEST_PADDED = 48  # a cell that is longer, such as a generated text, is not worth padding its column for


@dataclass(frozen=True)
class Table:
    """A title, one heading a column ("<" in front of those that hold text), the rows, and a note below.

    Columns that are empty in every row are left out.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        kept = [i for i in range(len(self.columns)) if not self.rows or any(row[i] for row in self.rows)]
        object.__setattr__(self, "columns", tuple(self.columns[i] for i in kept))
        object.__setattr__(self, "rows", tuple(tuple(row[i] for i in kept) for row in self.rows))

    def markdown(self, aligned: bool = False) -> str:
        """aligned: padded for eyes, as a pipe or a log wants it; files stay small without."""
        heads = [c.removeprefix("<") for c in self.columns]
        rules = ["---" if c.startswith("<") else "---:" for c in self.columns]
        cells = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in self.rows]
        table = [heads, rules, *cells]
        if aligned:
            widths = [min(_WIDEST_PADDED, max(map(len, column))) for column in zip(*table, strict=True)]
            left = [c.startswith("<") for c in self.columns]
            table = [
                [c.ljust(n) if on_left else c.rjust(n) for c, n, on_left in zip(line, widths, left, strict=True)]
                for line in table
            ]
        lines = [f"| {' | '.join(line)} |" for line in table]
        return "\n".join([f"## {self.title}", "", *lines, *(["", self.note] if self.note else []), ""])

    def rich(self, width: int) -> RichTable:
        """Drawn with few lines, for a terminal of `width` columns; words are broken only where they must be."""
        table = RichTable(
            title=self.title, caption=self.note or None, title_justify="left", caption_justify="left",
            title_style="bold", caption_style="dim", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False,
        )  # fmt: skip
        heads = [c.removeprefix("<") for c in self.columns]
        cells = [[heads[i], *(row[i] for row in self.rows)] for i in range(len(heads))]
        widths = _fit(cells, width - 2 * len(heads))
        for column, head, n in zip(self.columns, heads, widths, strict=True):
            table.add_column(head, justify="left" if column.startswith("<") else "right", width=n, overflow="fold")
        for row in self.rows:
            table.add_row(*(_at_dots(cell, n) for cell, n in zip(row, widths, strict=True)))
        return table


def _fit(columns: list[list[str]], width: int) -> list[int]:
    """A width for each column, `width` in all: the widest gives way first, and words are broken last."""
    wanted = [max(len(line) for cell in cells for line in cell.split("\n")) for cells in columns]
    words = [max((len(word) for cell in cells for word in cell.split()), default=1) for cells in columns]
    while sum(wanted) > width:
        loose = [i for i in range(len(wanted)) if wanted[i] > words[i]] or range(len(wanted))
        i = max(loose, key=lambda i: wanted[i])
        if wanted[i] <= 4:
            break  # no terminal is that narrow
        wanted[i] -= 1
    return wanted


def _at_dots(cell: str, width: int) -> str:
    """The cell with words that are too wide, such as names of sites, broken behind a dot where one is in reach."""

    def pieces(word: str) -> str:
        if len(word) <= width:
            return word
        cut = word.rfind(".", 1, width) + 1 or width
        return f"{word[:cut]}\n{pieces(word[cut:])}"

    return "\n".join(" ".join(pieces(word) for word in line.split(" ")) for line in cell.split("\n"))


def show(tables: Iterable[Table], console: Console) -> None:
    """Print tables: drawn on a terminal, as Markdown into a file or a pipe."""
    for table in tables:
        if console.is_terminal:
            console.print(table.rich(console.width))
            console.print()
        else:
            console.file.write(table.markdown(aligned=True) + "\n")
    console.file.flush()


def plan_table(rows: list[dict[str, Any]]) -> Table:
    """The plan, with sites that differ only in their number on one line, and reasons as numbered notes below."""
    columns = ("<sites", "count", "<role", "<heads", "<recipe", "<at steps", "<note")
    notes: dict[str, str] = {}
    lines = []
    for names, count, row in grouped(rows, lambda r: tuple(v for k, v in r.items() if k not in ("name", "index"))):
        reason = row["reason"]
        number = notes.setdefault(reason, str(len(notes) + 1)) if reason else ""
        lines.append((names, str(count), row["role"], heads_text(row), row["recipe"], row["steps"], number))
    note = "\n".join(f"{number}: {reason}" for reason, number in notes.items())
    return Table(f"Plan: {len(rows)} attention sites", columns, tuple(lines), note)


def calls_text(calls: list[dict[str, Any]]) -> str:
    """ "qk_int8_pv_fp8 x16, exact x46 (decode x45, short_q x1)": quantized calls first."""
    quantized: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for call in calls:
        (reasons if call["recipe"] == "exact" else quantized)[call["reason"] or call["recipe"]] += call["calls"]
    parts = [f"{recipe} x{n}" for recipe, n in quantized.items()]
    if reasons:
        parts.append(f"exact x{reasons.total()} ({', '.join(f'{r} x{n}' for r, n in sorted(reasons.items()))})")
    return ", ".join(parts) or "no calls"


def heads_text(row: dict[str, Any]) -> str:
    """ "9 q, 3 kv x 64": query heads, key and value heads if they are fewer, and head_dim."""
    heads, kv_heads, head_dim = row["heads"], row["kv_heads"], row["head_dim"]
    counts = f"{heads}" if kv_heads in (None, heads) else f"{heads} q, {kv_heads} kv"
    return f"{counts} x {head_dim}" if heads and head_dim else ""


def plain(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
