"""The sections of a report on what a policy costs in the end, and what its speed costs."""

from __future__ import annotations

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

# metric of a run, by its name in results.json -> (heading, how it is written)
METRICS = {
    "text": {
        "kl": ("mean KL, nats", ".4f"),
        "top1": ("top-1", ".2%"),
        "ppl_change": ("perplexity", "+.2%"),
        "agreement": ("greedy", ".2%"),
    },
    "pictures": {
        "psnr": ("PSNR, dB", ".1f"),
        "worst_psnr": ("worst, dB", ".1f"),
        "ssim": ("SSIM", ".4f"),
        "worst_ssim": ("worst", ".4f"),
        "ms_ssim": ("MS-SSIM", ".4f"),
        "temporal_error": ("temporal", ".4f"),
    },
}

METRIC_WORDS = {
    "kl": "mean KL: of the next-token distributions, unpatched against patched, in nats a token.",
    "top1": "top-1: tokens with the same likeliest successor.",
    "ppl_change": "perplexity: its relative change.",
    "agreement": "greedy: share of a greedy continuation before the first difference.",
    "psnr": "PSNR and SSIM of the raw frames against the unpatched ones from the same seeds: mean, and worst frame.",
    "temporal_error": "temporal: relative error of the change from frame to frame.",
}

WAYS = {"sdpa_default": "torch", "fa3_bf16": "FA3", "qk_int8_pv_fp8": "INT8 / FP8", "qk_int8_pv_fp16": "INT8 / FP16"}

# what of a bench row is a whole call, in the same words
CALLS = {"sdpa_default": "torch", "fa3_bf16": "FA3", "sage2_op": "INT8 / FP8", "sage2_pv_fp16_op": "INT8 / FP16"}


def quality(runs: list[Node]) -> list[Section]:
    """What every measured recipe costs in the end, with its time beside it, in one table a run."""
    blocks: list[Any] = []
    charts: list[Block] = []
    reference = False
    for run in runs:
        kind = "text" if run["kind"].value == "text" else "pictures"
        rows = _measured(run)
        wanted = {m: h for m, h in METRICS[kind].items() if any(isinstance(_value(r, m), float) for r in rows)}
        note = " ".join(METRIC_WORDS[m] for m in wanted if m in METRIC_WORDS)
        missing = {head: why for m, (head, _) in METRICS[kind].items() if (why := _why_not(rows[0], m))}
        note += "".join(f" {head} is unavailable: {why}." for head, why in missing.items())
        lines = [_unpatched(run, len(wanted))]
        for row in rows:
            figures = [number_of(_figure(row, metric), spec) for metric, (_, spec) in wanted.items()]
            lines.append((name_of(row), *figures, *_times(row)))
        columns = (
            "<measured", *(head for head, _ in wanted.values()), "attention, s", "seconds", "time, to unpatched"
        )  # fmt: skip
        reference |= any(c["backend"] == "reference" for row in rows for c in row["calls"].value)
        blocks.append(full_grid(title_of(run), columns, lines, note))
        if run.get("needle"):
            blocks.append(_needle(run))
        main, unit = ("kl", " nats") if kind == "text" else ("psnr", " dB")
        found = [(row, number_of(_figure(row, main), ".4f" if kind == "text" else ".1f")) for row in rows]
        bars = tuple(Bar(name_of(row).replace("`", ""), row["recipe"].value if row["name"].value == "policy" else
                         row["name"].value, n) for row, n in found if isinstance(n, Traced))  # fmt: skip
        what = "mean KL, less is better" if kind == "text" else "mean PSNR, more is better"
        charts.append(Bars(f"{title_of(run)}: {what}", unit, bars))
    words = (
        "Each measured policy against the same model unpatched, with equal inputs and seeds. `policy` is the run's "
        "own; the others are one recipe at every site."
    )
    if reference:
        words += (
            " The quantized calls of these runs were computed by the reference backend in plain PyTorch: the numerics "
            "are the kernels', but the seconds say nothing about speed."
        )
    return [section("quality", "What each rung costs in quality", words, [charts, *blocks], runs)] if runs else []


def frontier(benches: list[Node], models: list[Node], runs: list[Node]) -> list[Section]:
    """Speed against error: of one call, of whole models, of runs on a GPU. Both figures of a point are of one run."""
    charts: list[Block] = []
    wholes: list[Block] = []
    for bench in benches:
        cases = list(bench["rows"])
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
                    model[way]["relative_l1"].number(".4f"),
                )
                for way, label in WAYS.items()
                if model.get(way) and model[way].get("ms")
            ]
            wholes.append(
                Scatter(f"Whole model: {model['model'].value}", "speed, to torch", "relative L1", tuple(found))
            )
    timed = {run: points for run in runs if (points := _speed_points(run))}
    for run, points in timed.items():
        metric = "mean KL, nats" if run["kind"].value == "text" else "PSNR, dB"
        wholes.append(Scatter(title_of(run), "speed, to unpatched", metric, tuple(points)))
    words = (
        "To the right is faster, lower is closer. Of one call: time from bf16 tensors to the output, pre-processing "
        "included, and the error of the output against float64, on normally distributed inputs. Of a whole model: one "
        "forward pass, and the error of its output against the unpatched one. INT8 / FP8 is `qk_int8_pv_fp8`, INT8 / "
        "FP16 `qk_int8_pv_fp16`, FA3 FlashAttention-3 in bf16. INT4 has no kernel on these cards, so it has no point."
    )
    rows = [row for row in (charts, wholes) if row]
    return [section("frontier", "Speed against error", words, rows, [*benches, *models, *timed])] if rows else []


def _measured(run: Node) -> list[Node]:
    return list(run.get("rows") or run.get("quality") or [])


def _figure(row: Node, metric: str) -> Node | None:
    """A metric of a measured row, of `run` (flat, worst figures as psnr_worst) or `evaluate` (under metrics)."""
    found = row["metrics"].get(metric) if row.get("metrics") else row.get(metric)
    if found is None and metric.startswith("worst_"):
        found = row.get(f"{metric.removeprefix('worst_')}_worst")
    return found


def _value(row: Node, metric: str) -> Any:
    found = _figure(row, metric)
    return None if found is None else found.value


def _why_not(row: Node, metric: str) -> str:
    """Why a figure is not there, "" if it is there or nobody asked for it."""
    reason = row.value.get("unavailable", {}).get(metric) or _value(row, metric)
    return reason.removeprefix("unavailable: ") if isinstance(reason, str) else ""


def _times(row: Node) -> tuple[Cell, Cell, Cell]:
    """Seconds inside attention, seconds in all, and the whole time relative to the unpatched model's.

    Of the fastest window or picture where a file tells it: what else a machine does only adds to a time.
    """
    own, base = row.get("fastest") or row, row.get("baseline_fastest")
    attention = number_of(own.get("attention_seconds"), ".2f")
    if base is not None:
        return attention, own["seconds"].number(".2f"), derived("ratio", ".2f", own["seconds"], base["seconds"])
    if row.get("baseline_seconds"):
        return attention, row["seconds"].number(".2f"), derived("ratio", ".2f", row["seconds"], row["baseline_seconds"])
    seconds = row.get("seconds_per_window") or row.get("seconds")
    return attention, number_of(seconds, ".2f"), number_of(row.get("slowdown"), ".2f")


def _unpatched(run: Node, figures: int) -> tuple[Cell, ...]:
    """The row of the unpatched model: no errors, its times."""
    base = run.get("unpatched")
    base = base if base is None else base.get("fastest") or base
    attention = None if base is None else number_of(base.get("attention_seconds"), ".2f")
    seconds = run.get("exact_seconds_per_window") if base is None else base.get("seconds")
    return "unpatched", *[None] * figures, attention, number_of(seconds, ".2f"), None


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
    """Speed against the first metric of each measured row; none where the reference backend computed, or untimed."""
    rows = [r for r in _measured(run) if r.get("baseline_seconds")]
    if any(c["backend"] == "reference" for r in rows for c in r["calls"].value):
        return []
    main, spec = ("kl", ".4f") if run["kind"].value == "text" else ("psnr", ".1f")
    points = []
    for row in rows:
        own, base = row.get("fastest") or row, row.get("baseline_fastest")
        before = row["baseline_seconds"] if base is None else base["seconds"]
        speed, y = derived("ratio", ".2f", before, own["seconds"]), number_of(_figure(row, main), spec)
        if isinstance(y, Traced):
            points.append(Point(name_of(row).replace("`", ""), row["recipe"].value, speed, y))
    return points
