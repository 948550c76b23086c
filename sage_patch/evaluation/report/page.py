"""Sections of a report -> one HTML page that needs no network and no script, and its Markdown twin."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template

from sage_patch.evaluation.report import charts
from sage_patch.evaluation.report.blocks import Bars, Block, Cell, Channels, Grid, Maps, Picture, Scatter, Section, Tile
from sage_patch.evaluation.tables import Table


def html_page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page. Every number of a results file carries data-from, its place there."""
    template = Template(
        resources.files("sage_patch.evaluation.report").joinpath("report.html").read_text(encoding="utf-8")
    )
    links = " ".join(f'<a href="#{s.name}">{escape(s.title)}</a>' for s in sections)
    body = "\n".join(_section(s) for s in sections)
    return template.substitute(title=escape(title), lead=_inline(lead), links=links, body=body)


def markdown_page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The same words and numbers; charts become the tables of their numbers."""
    parts = [f"# {title}", lead]
    for section in sections:
        parts += [f"## {section.title}", section.words]
        parts += [text for block in _flat(section.blocks) for text in [_in_markdown(block)] if text]
        parts += [section.conditions] if section.conditions else []
    return "\n\n".join(p.strip() for p in parts) + "\n"


def _section(section: Section) -> str:
    head, tail = f"<h2>{escape(section.title)}</h2>", "</section>"
    if section.folded:
        head, tail = f"<details><summary>{head}</summary>", "</details></section>"
    parts = [f'<section id="{section.name}">', head, f"<p>{_inline(section.words)}</p>"]
    for block in section.blocks:
        if isinstance(block, (list, tuple)):
            side_by_side = "row pairs" if len(block) == 4 else "row"
            parts.append(f'<div class="{side_by_side}">{"".join(_in_html(b) for b in block)}</div>')
        else:
            parts.append(_in_html(block))  # type: ignore[arg-type]
    parts += [f'<p class="conditions">{_inline(section.conditions)}</p>'] if section.conditions else []
    return "\n".join([*parts, tail])


def _in_html(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{_inline(block)}</p>"
    if isinstance(block, Grid):
        return _grid(block)
    if isinstance(block, Picture):
        data = base64.b64encode(block.data).decode()
        return (
            f"<figure><figcaption>{_inline(block.title)}</figcaption>"
            f'<img class="sheet" alt="{escape(block.title)}" src="data:image/png;base64,{data}"></figure>'
        )
    if isinstance(block, Maps):
        drawn = [
            f"<figure><figcaption>{escape(label)}</figcaption>"
            f"{charts.attention_map(block, label, _rows(node), node.place)}</figure>"
            for label, node in block.maps
        ]
        scale = f'<figure class="scale">{charts.map_scale()}</figure>'
        return f'<div class="maps">{"".join(drawn)}</div>{scale}'
    draw = {Scatter: charts.scatter, Bars: charts.bars, Channels: charts.channels, Tile: charts.tile}[type(block)]
    return f"<figure><figcaption>{_inline(block.title)}</figcaption>{draw(block)}</figure>"  # type: ignore[operator]


def _grid(grid: Grid) -> str:
    heads = "".join(
        f'<th class="{"text" if c.startswith("<") else "number"}">{_inline(c.lstrip("<"))}</th>' for c in grid.columns
    )
    lines = []
    for i, row in enumerate(grid.rows):
        columns = enumerate(zip(row, grid.columns, strict=True))
        cells = (_cell(cell, column, grid.heat, (i, j) in grid.marked) for j, (cell, column) in columns)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    caption = f'<p class="caption">{_inline(grid.title)}</p>' if grid.title else ""  # outside of what scrolls
    note = f'<p class="note">{_inline(grid.note)}</p>' if grid.note else ""
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="table">{caption}<div class="scroll">{table}</div>{note}</div>'


def _cell(cell: Cell, column: str, heat: tuple[float, float] | None, marked: bool) -> str:
    if cell is None:
        return '<td class="number none">–</td>'
    if isinstance(cell, str):
        return f'<td class="{"text" if column.startswith("<") else "number"}">{_inline(cell)}</td>'
    style = ""
    if heat is not None:
        style = f' style="--heat:{_heat(cell.value, heat)}%"'
    classes = f"number{' heat' if heat else ''}{' marked' if marked else ''}"
    return f'<td class="{classes}"{style}><span {charts.traced(cell)}>{cell}</span></td>'


def _heat(value: float, heat: tuple[float, float]) -> int:
    """0 to 80: how much of the warning colour a cell takes."""
    low, high = heat
    place = math.log(max(value, low) / low) / math.log(high / low)
    return round(80 * min(place, 1.0))


def _rows(node: object) -> list[list[int]]:
    return [[int(v) for v in line.split()] for line in node.value]  # type: ignore[attr-defined]


def _in_markdown(block: Block) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, Grid):
        return _markdown_table(block.title, block.columns, block.rows, block.note)
    if isinstance(block, Scatter):
        points = tuple((p.label, p.x, p.y) for p in block.points if p.label)
        return _markdown_table(block.title, ("<", block.x_label, block.y_label), points)
    if isinstance(block, Bars):
        bars = tuple((b.label, f"{b.value}{block.unit}") for b in block.bars)
        return _markdown_table(block.title, ("<", "measured"), bars)
    if isinstance(block, Channels):
        rows = tuple(
            (label, f"{max(n.value):.4g}", f"{sum(n.value) / len(n.value):.4g}") for label, _, n in block.lines
        )
        return _markdown_table(block.title, ("<", f"{block.y_label}, largest channel", "mean channel"), rows)
    return ""  # maps, tiles and sheets are pictures; their numbers stand in the tables beside them


def _markdown_table(title: str, columns: tuple[str, ...], rows: tuple[tuple[Cell, ...], ...], note: str = "") -> str:
    cells = tuple(tuple("" if c is None else str(c) for c in row) for row in rows)
    text = Table(title, columns, cells, note).markdown()
    return text.replace(f"## {title}\n", f"**{title}**\n" if title else "", 1)


def _flat(blocks: Sequence[Block | Sequence[Block]]) -> list[Block]:
    return [b for block in blocks for b in (block if isinstance(block, (list, tuple)) else [block])]  # type: ignore[misc]


def _inline(text: str) -> str:
    """Escaped, with `code` as in Markdown, which may break between the words of long names."""

    def code(found: re.Match[str]) -> str:
        return "<code>" + re.sub(r"([.:/,]|_(?=pv|[^\W_]{6,}))", r"\1<wbr>", found[1]) + "</code>"

    return re.sub(r"`([^`]+)`", code, escape(text, quote=False)).replace("\n", "<br>")
