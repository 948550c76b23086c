"""The sections of a report on what a policy costs in the end, and what its speed costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sage_patch.evaluation.report.blocks import (
    Bar,
    Bars,
    Block,
    Cell,
    Grid,
    Node,
    Point,
    Scatter,
    Section,
    Traced,
    derived,
)
from sage_patch.evaluation.report.sections import full_grid, name_of, number_of, section, shapes_of, title_of
from sage_patch.figures import Figure, notes, of_kind

WAYS = {"sdpa_default": "torch", "fa3_bf16": "FA3", "qk_int8_pv_fp8": "INT8 / FP8", "qk_int8_pv_fp16": "INT8 / FP16"}

# what of a bench row is a whole call, in the same words
CALLS = {"sdpa_default": "torch", "fa3_bf16": "FA3", "sage2_op": "INT8 / FP8", "sage2_pv_fp16_op": "INT8 / FP16"}


def quality(runs: list[Node]) -> list[Section]:
    """What every measured recipe costs in the end, with its time beside it, in one table a run."""
    blocks: list[Any] = []
    charts: list[Block] = []
    for run in runs:
        rows, figures = list(run["rows"]), [f for f in of_kind(run["kind"].value) if f.overview]
        wanted = tuple(f for f in figures if any(r["metrics"].get(f.key) for r in rows))
        missing = {f.name: why for f in figures if (why := rows[0].value["unavailable"].get(f.key))}
        note = notes(wanted) + "".join(f" {name} is unavailable: {why}." for name, why in missing.items())
        # What the CPU backend takes says nothing about speed.
        times: Callable[[Node], tuple[Cell, ...]] = (lambda row: (None,) * 3) if is_on_reference(run) else _times
        lines: list[tuple[Cell, ...]] = [("unpatched", *[None] * len(wanted), *times(run["unpatched"]))]
        lines += [(name_of(row), *(figure(row, f) for f in wanted), *times(row)) for row in rows]
        columns = ("<measured", *(f.heading for f in wanted), "attention, s", "seconds", "time, to unpatched")
        blocks.append(full_grid(title_of(run), columns, lines, note))
        if run.get("needle"):
            blocks.append(_needle(run))
        main = figures[0]
        bars = tuple(
            Bar(name_of(row).replace("`", ""), row["recipe"].value, number)
            for row in rows
            if isinstance(number := figure(row, main), Traced)
        )
        what = f"{main.name}, {'more' if main.more else 'less'} is better"
        charts.append(Bars(f"{title_of(run)}: {what}", f" {main.unit}", bars))
    words = (
        "Each measured policy against the same model unpatched, with equal inputs and seeds. `policy` is the run's "
        "own; the others are one recipe at every site."
    )
    if any(is_on_reference(run) for run in runs):
        words += (
            " The quantized calls of these runs were computed by the reference backend in plain PyTorch: the numerics "
            "are the kernels', and their seconds, which say nothing about speed, are left out."
        )
    return [section("quality", "What each rung costs in quality", words, [charts, *blocks], runs)] if runs else []


def frontier(benches: list[Node], models: list[Node], runs: list[Node]) -> list[Section]:
    """Speed against error: of one call, of whole models, of runs on a GPU. Both figures of a point are of one run."""
    charts: list[Block] = []
    wholes: list[Block] = []
    for bench in benches:
        cases = [row for row in bench["rows"] if row.get("sdpa_default")]
        for head_dim, causal in sorted({(r["head_dim"].value, r["is_causal"].value) for r in cases}, reverse=True):
            same = [r for r in cases if (r["head_dim"].value, r["is_causal"].value) == (head_dim, causal)]
            row = max(same, key=lambda r: r["kv_len"].value)
            points = [
                Point(label, way, derived("ratio", ".2f", row[way], row["sdpa_default"]), error["rel_l1"].number(".4f"))
                for way, label in CALLS.items()
                if row.get(way) and row.get("errors") and (error := row["errors"].get(way))
            ]
            shape = f"head_dim {head_dim}, {'causal' if causal else 'full'}, {row['kv_len'].value} tokens"
            charts.append(Scatter(f"One call: {shape}", "speed, to torch", "relative L1", tuple(points), log_y=True))
    for file in models:
        for model in shapes_of(file):
            found = [
                Point(
                    label,
                    way,
                    derived("ratio", ".2f", model["sdpa_default"]["ms"], model[way]["ms"]),
                    model[way]["rel_l1"].number(".4f"),
                )
                for way, label in WAYS.items()
                if model.get(way) and model[way].get("ms")
            ]
            wholes.append(
                Scatter(f"Whole model: {model['model'].value}", "speed, to torch", "relative L1", tuple(found))
            )
    timed = {run: points for run in runs if (points := _speed_points(run))}
    for run, points in timed.items():
        wholes.append(
            Scatter(title_of(run), "speed, to unpatched", of_kind(run["kind"].value)[0].heading, tuple(points))
        )
    words = (
        "To the right is faster, lower is closer. Of one call: time from bf16 tensors to the output, pre-processing "
        "included, and the error of the output against float64, on normally distributed inputs. Of a whole model: one "
        "forward pass, and the error of its output against the unpatched one. INT8 / FP8 is `qk_int8_pv_fp8`, INT8 / "
        "FP16 `qk_int8_pv_fp16`, FA3 FlashAttention-3 in bf16. INT4 has no kernel on these cards, so it has no point."
    )
    rows = [row for row in (charts, wholes) if row]
    return [section("frontier", "Speed against error", words, rows, [*benches, *models, *timed])] if rows else []


def figure(row: Node, figure: Figure) -> Cell:
    return number_of(row["metrics"].get(figure.key), figure.spec)


def is_on_reference(run: Node) -> bool:
    return any(c["backend"] == "reference" for row in run["rows"] for c in row["calls"].value)


def _times(row: Node) -> tuple[Cell, Cell, Cell]:
    """Seconds inside attention, seconds in all, and the whole time relative to the unpatched model's.

    Of the fastest window or picture, because what else a machine does only adds to a time; files of an earlier release
    have the mean of all.
    """
    own = row.get("fastest") or row["mean"]
    attention, seconds = number_of(own.get("attention_seconds"), ".2f"), own["seconds"].number(".2f")
    return attention, seconds, number_of(row.get("slowdown"), ".2f")


def _needle(run: Node) -> Grid:
    """The needle test of an evaluation."""
    lines: list[tuple[Cell, ...]] = [
        (f"`{row['name'].value}`", row["right"].number(".2f"), row["mrr"].number(".3f"),
         row["agreement"].number(".3f"))
        for row in run["needle"]
    ]  # fmt: skip
    note = (
        "right: share of needles found by the model's likeliest next tokens. mrr: mean reciprocal rank of the right "
        "answer. agreement: share of the unpatched model's likeliest tokens that stay."
    )
    columns = ("<needle test", "right", "mrr", "agreement")
    return Grid(f"{title_of(run)}: finding a sentence in a long text", columns, tuple(lines), note)


def _speed_points(run: Node) -> list[Point]:
    """Speed against the first figure of each measured row; none where the reference backend computed, or untimed."""
    if is_on_reference(run):
        return []
    points = []
    for row in run["rows"]:
        own, base, y = row.get("fastest"), row.get("baseline_fastest"), figure(row, of_kind(run["kind"].value)[0])
        if own is not None and base is not None and isinstance(y, Traced):
            speed = derived("ratio", ".2f", base["seconds"], own["seconds"])
            points.append(Point(name_of(row).replace("`", ""), row["recipe"].value, speed, y))
    return points
