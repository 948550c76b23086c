"""Blocks of a report as inline SVG: colours from the page's CSS, so that they follow its scheme; no text below 10 px.

Drawn for the width of a phone, and never wider than it: a wide window shows several side by side.
"""

from __future__ import annotations

import base64
import io
import math
from html import escape

from sage_patch.evaluation.report.blocks import Bars, Channels, Maps, Scatter, Tile, Traced

WIDTH = 340
# Dark blue over grey to yellow, readable with any colour vision: from little attention to much.
PALETTE = ((0, 32, 77), (49, 68, 107), (102, 105, 112), (149, 143, 120), (203, 186, 105), (255, 234, 70))
MAP_FROM, MAP_TO = 1e-4, 1.0


def series(name: str) -> str:
    """The CSS class of a recipe or peer."""
    for mark, found in (
        ("smooth=none", "naive"), ("int4", "int4"), ("int8_pv_fp16", "fp16"), ("pv_fp16", "fp16"), ("int8", "fp8"),
        ("sage2", "fp8"), ("fa3", "peer"), ("cudnn_fp8", "peer"), ("chosen", "chosen"), ("mixture", "mixture"),
    ):  # fmt: skip
        if mark in name:
            return f"s-{found}"
    return "s-exact"


def traced(number: Traced, text: str | None = None) -> str:
    """The attributes that say where a mark's number comes from, for tests and for people who look."""
    shown = escape(str(number) if text is None else text)
    return f'data-from="{escape(" ".join(number.sources))}" data-rule="{number.rule}" data-shown="{shown}"'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from low to high."""
    step = 10 ** math.floor(math.log10(max(high - low, 1e-12) / count))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= count)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def along(value: float, low: float, high: float, start: float, end: float, log: bool = False) -> float:
    """Where a value lies between start and end; tests place marks by it."""
    if log:
        value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
    return round(start + (value - low) / (high - low) * (end - start), 1)


def scatter(chart: Scatter) -> str:
    """Points with their names beside them; the y axis from 0, or logarithmic over whole decades."""
    left, right, top, bottom = 46, WIDTH - 12, 24, 204
    xs, ys = [p.x.value for p in chart.points], [p.y.value for p in chart.points]
    span = max(max(xs) - min(xs), 0.05)
    low_x, high_x = min(xs) - 0.15 * span, max(xs) + 0.4 * span  # names stand to the right of their points
    if chart.log_y:
        low_y = 10 ** math.floor(math.log10(min(y for y in ys if y > 0)))
        high_y = 10 ** math.ceil(math.log10(max(ys)) + 1e-9)
        marks_y = [low_y * 10**i for i in range(round(math.log10(high_y / low_y)) + 1)]
    else:
        low_y, high_y = 0.0, max(ys) * 1.25 or 1.0
        marks_y = ticks(low_y, high_y)

    def at(x: float, y: float) -> tuple[float, float]:
        return along(x, low_x, high_x, left, right), along(y, low_y, high_y, bottom, top, chart.log_y)

    out = [f'<line class="axis" x1="{left}" y1="{bottom}" x2="{right}" y2="{bottom}"/>']
    for x in ticks(low_x, high_x):
        px = at(x, low_y)[0]
        out.append(f'<line class="grid" x1="{px}" y1="{top}" x2="{px}" y2="{bottom}"/>')
        out.append(f'<text class="tick" x="{px}" y="{bottom + 14}" text-anchor="middle">{x:g}</text>')
    for y in marks_y:
        py = at(low_x, y)[1]
        out.append(f'<line class="grid" x1="{left}" y1="{py}" x2="{right}" y2="{py}"/>')
        out.append(f'<text class="tick" x="{left - 5}" y="{py + 4}" text-anchor="end">{y:g}</text>')
    places = [at(p.x.value, p.y.value) for p in chart.points]
    placed = [(x - 6, y - 6, x + 6, y + 6) for x, y in places]  # what names keep clear of
    for point, (px, py) in zip(chart.points, places, strict=True):
        out.append(
            f'<circle class="{series(point.series)}" cx="{px}" cy="{py}" r="5" {traced(point.y)} '
            f'data-x-from="{escape(" ".join(point.x.sources))}">'
            f"<title>{escape(f'{point.label}: '.removeprefix(': '))}{point.x}, {point.y}</title></circle>"
        )
        if point.label:
            out.append(_label(point.label, px, py, (left, right, top, bottom), placed))
    out.append(
        f'<text class="name" x="{(left + right) / 2}" y="{bottom + 30}" text-anchor="middle">{chart.x_label}</text>'
    )
    out.append(f'<text class="name" x="{left - 40}" y="{top - 12}">{chart.y_label}</text>')
    return _svg(bottom + 36, out, f"{chart.title}: {chart.y_label} over {chart.x_label}")


def bars(chart: Bars) -> str:
    """Horizontal bars, each under its label, with its number at its end."""
    left, right, row = 8, WIDTH - 84, 38
    high = max([b.value.value for b in chart.bars] + [chart.reference or 0.0]) * 1.02
    out = []
    for i, bar in enumerate(chart.bars):
        y = 8 + i * row
        length = along(bar.value.value, 0, high, 0, right - left)
        out.append(f'<text class="bar-name" x="{left}" y="{y + 10}">{escape(bar.label)}</text>')
        out.append(
            f'<rect class="{series(bar.series)}" x="{left}" y="{y + 15}" width="{length}" height="13" '
            f"{traced(bar.value)}/>"
        )
        out.append(f'<text class="number" x="{left + length + 5}" y="{y + 26}">{bar.value}{chart.unit}</text>')
    height = 8 + len(chart.bars) * row
    if chart.reference is not None:
        x = left + along(chart.reference, 0, high, 0, right - left)
        lines = "".join(f"M{x} {8 + i * row + 13}v17" for i in range(len(chart.bars)))
        out.append(f'<path class="reference" d="{lines}"/>')
    return _svg(height, out, chart.title)


def channels(chart: Channels) -> str:
    """Step lines over channel numbers, from 0."""
    left, right, top, bottom = 40, WIDTH - 8, 18, 150
    count = len(chart.lines[0][2].value)
    high = max(max(node.value) for _, _, node in chart.lines) * 1.05 or 1.0
    width = (right - left) / count
    out = [f'<line class="axis" x1="{left}" y1="{bottom}" x2="{right}" y2="{bottom}"/>']
    for y in ticks(0, high, 4):
        py = along(y, 0, high, bottom, top)
        out.append(f'<line class="grid" x1="{left}" y1="{py}" x2="{right}" y2="{py}"/>')
        out.append(f'<text class="tick" x="{left - 5}" y="{py + 4}" text-anchor="end">{y:g}</text>')
    for x in (0, count // 4, count // 2, 3 * count // 4, count - 1):
        px = left + (x + 0.5) * width
        out.append(f'<text class="tick" x="{px:.1f}" y="{bottom + 14}" text-anchor="middle">{x}</text>')
    for number, (label, name, node) in enumerate(chart.lines):
        steps = "".join(
            f"{'M' if i == 0 else 'L'}{left + i * width:.1f} {along(v, 0, high, bottom, top)}h{width:.2f}"
            for i, v in enumerate(node.value)
        )
        out.append(f'<path class="line {series(name)}" d="{steps}" data-from="{escape(node.place)}" data-rule="list"/>')
        x = left + 4 + number * 150
        out.append(f'<path class="line {series(name)}" d="M{x} {bottom + 36}h16"/>')
        out.append(f'<text class="bar-name" x="{x + 21}" y="{bottom + 40}">{escape(label)}</text>')
    out.append(f'<text class="name" x="{left - 34}" y="{top - 6}">{chart.y_label}</text>')
    out.append(f'<text class="name" x="{right}" y="{bottom + 27}" text-anchor="end">channel</text>')
    return _svg(bottom + 48, out, chart.title)


def attention_map(chart: Maps, label: str, rows: list[list[int]], place: str) -> str:
    """One map: queries downward, keys to the right, with a frame and the lengths as ticks."""
    side, left, top = 132, 36, 6
    image = (
        f'<image x="{left}" y="{top}" width="{side}" height="{side}" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{png(rows, chart.unit)}" data-from="{escape(place)}" data-rule="map"/>'
    )
    frame = f'<rect class="frame" x="{left}" y="{top}" width="{side}" height="{side}"/>'
    texts = [
        f'<text class="tick small" x="{left - 4}" y="{top + 9}" text-anchor="end">0</text>',
        f'<text class="tick small" x="{left - 4}" y="{top + side}" text-anchor="end">{chart.q_len}</text>',
        f'<text class="tick small" transform="translate({left - 8} {top + side / 2}) rotate(-90)" '
        'text-anchor="middle">query</text>',
        f'<text class="tick small" x="{left}" y="{top + side + 12}">0</text>',
        f'<text class="tick small" x="{left + side}" y="{top + side + 12}" text-anchor="end">{chart.kv_len}</text>',
        f'<text class="tick small" x="{left + side / 2}" y="{top + side + 12}" text-anchor="middle">key</text>',
    ]
    return _svg(top + side + 18, [image, frame, *texts], f"Attention map, {label}", width=left + side + 4)


def map_scale() -> str:
    """The colour bar of the maps."""
    stops = "".join(
        f'<stop offset="{i / (len(PALETTE) - 1):.2f}" stop-color="rgb{color}"/>' for i, color in enumerate(PALETTE)
    )
    left, right = 12, WIDTH - 12
    out = [f'<defs><linearGradient id="attention">{stops}</linearGradient></defs>']
    out.append(f'<rect x="{left}" y="4" width="{right - left}" height="10" fill="url(#attention)"/>')
    for value in (1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        x = along(value, MAP_FROM, MAP_TO, left, right, log=True)
        anchor = "start" if value == MAP_FROM else "end" if value == MAP_TO else "middle"
        out.append(f'<text class="tick" x="{x}" y="27" text-anchor="{anchor}">{value:g}</text>')
    return _svg(32, out, "Colours of the maps: share of a query's attention, logarithmic")


def tile(chart: Tile) -> str:
    """A square a token, with its group's number; equal colours are equal groups as far as colours go."""
    size, out = 21, []
    for token, group in enumerate(chart.groups.value):
        x, y = 2 + token % 16 * size, 2 + token // 16 * size
        shade = group % chart.colours
        out.append(f'<rect class="cell g{shade}" x="{x}" y="{y}" width="{size - 1}" height="{size - 1}"/>')
        out.append(f'<text class="cell-text" x="{x + size / 2 - 0.5}" y="{y + 14}" text-anchor="middle">{group}</text>')
    lines = math.ceil(len(chart.groups.value) / 16)
    source = f'<g data-from="{escape(chart.groups.place)}" data-rule="list">{"".join(out)}</g>'
    return _svg(4 + lines * size, [source], chart.title)


def png(rows: list[list[int]], unit: float) -> str:
    """A map as a PNG in base64, a pixel an entry; `shade` is its colour."""
    from PIL import Image

    image = Image.new("P", (len(rows[0]), len(rows)))
    image.putpalette([c for i in range(256) for c in shade(i)])
    image.putdata([level(value * unit) for row in rows for value in row])
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def level(share: float) -> int:
    """0 to 255 along the logarithmic scale of the maps."""
    return round(along(min(max(share, MAP_FROM), MAP_TO), MAP_FROM, MAP_TO, 0, 255, log=True))


def shade(number: int) -> tuple[int, int, int]:
    """The colour of a level, between the palette's fixed ones."""
    place = number / 255 * (len(PALETTE) - 1)
    i = min(int(place), len(PALETTE) - 2)
    a, b = PALETTE[i], PALETTE[i + 1]
    red, green, blue = (round(p + (q - p) * (place - i)) for p, q in zip(a, b, strict=True))
    return red, green, blue


def _label(
    text: str,
    x: float,
    y: float,
    box: tuple[float, float, float, float],
    placed: list[tuple[float, float, float, float]],
) -> str:
    """A point's name where no other stands yet: right or left of it, above it, below it."""
    left, right, top, bottom = box
    width = 6.1 * len(text)
    for dx, dy in ((9, 4), (-9 - width, 4), (-width / 2, -10), (-width / 2, 19), (-width / 2, -23), (-width / 2, 32)):
        x0 = min(max(x + dx, left + 2), right - width)
        y0 = y + dy
        here = (x0, y0 - 10, x0 + width, y0 + 2)
        free = all(here[2] < p[0] or here[0] > p[2] or here[3] < p[1] or here[1] > p[3] for p in placed)
        if free and top - 6 < here[1] and here[3] < bottom:
            break
    placed.append(here)
    return f'<text class="bar-name" x="{x0:.1f}" y="{y0:.1f}">{escape(text)}</text>'


def _svg(height: float, parts: list[str], label: str, width: float = WIDTH) -> str:
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
