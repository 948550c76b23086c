"""What the kernels are to reach on one H200, and whether recorded runs reach it: met, missed by how much, not measured.

A target on speed is a ratio within one run, as a burst and sustained alike; one on error is an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sage_patch.backends import CROSSOVER_HEADS
from sage_patch.evaluation.bench.gate import WAYS, describe, speeds
from sage_patch.evaluation.tables import Table
from sage_patch.kernels import crossover

CHORD = "sage2_exp_chord"
EXACT_EXPONENT, MOST_ERROR = "sage2_exp_exact_op", 1.02
EXACT_PEERS = ("fa3_bf16", "sdpa_default", "sdpa_cudnn")


@dataclass(frozen=True)
class Target:
    """At one item of 32 heads: column over the fastest of peers, or without peers TOPS, is to be at least `least`.

    most_error: relative L1 error of the column's output at most.
    """

    what: str
    column: str
    head_dim: int
    is_causal: bool
    length: int
    least: float
    peers: tuple[str, ...] = ()
    most_error: float | None = None


def _targets() -> list[Target]:
    fp8 = ("fa3_fp8_kernel",)
    found: list[Target] = []
    lengths = (32768, 8192, 4096)
    for head_dim, causal, kernel, call in (
        (128, False, (1.18, 1.15, 1.12), (1.14, 1.06, 0.98)),
        (128, True, (1.14, 1.08, 1.02), (1.10, 0.98, 0.88)),
        (64, False, (1.15, 1.15), (1.10, 1.08)),
    ):
        for part, column, leasts in (("kernel alone", "kernel", kernel), ("whole call", "op", call)):
            found += [
                Target(f"default, {part} over FA3 FP8's kernel", f"sage2_{column}", head_dim, causal, n, least, fp8)
                for n, least in zip(lengths, leasts, strict=False)
            ]
    chords = ((128, 32768, 1.28), (128, 8192, 1.22), (64, 8192, 1.32))
    what = "chord, kernel alone over FA3 FP8's kernel"
    found += [Target(what, f"{CHORD}_kernel", d, False, n, least, fp8) for d, n, least in chords]
    what = "default, whole call over the best exact peer"
    for n, least in ((2048, 1.00), (4096, 1.05), (8192, 1.20), (32768, 1.40)):
        found += [Target(what, "sage2_op", 128, causal, n, least, EXACT_PEERS) for causal in (False, True)]
    found.append(
        Target("FP16 P and V, kernel alone, TOPS", "sage2_pv_fp16_kernel", 128, False, 32768, 830.0, (), 0.012)
    )
    found += [Target("D = 256, whole call over torch's default", "sage2_op", 256, causal, 8192, 1.1, ("sdpa_default",))
              for causal in (False, True)]  # fmt: skip
    return found


TARGETS = _targets()
# Whole models over torch's default attention: part of models_h200.json -> (way -> least).
MODELS: dict[str, dict[str, float]] = {
    "wan": {"qk_int8_pv_fp8": 1.45, "chord": 1.50},
    "cogvideox": {"qk_int8_pv_fp8": 1.25, "chord": 1.29},
    "flux": {"qk_int8_pv_fp8": 1.04, "chord": 1.05},
    "llama4k": {"qk_int8_pv_fp8": 1.01},
    "llama8k": {"qk_int8_pv_fp8": 1.06},
    "llama32k": {"qk_int8_pv_fp8": 1.20},
    "llama128k": {"qk_int8_pv_fp8": 1.50},
}
LOWEST_WHERE_QUANTIZED = 0.98


def targets_tables(bench: dict[str, Any], models: dict[str, Any], table: Mapping[str, Any] | None) -> list[Table]:
    """Kernels and whole calls, whole models, and where the rule quantizes (table: the card's break-even lengths).

    bench, models: what the benchmark and scripts/gpu_models.py recorded.
    """
    rows = bench["rows"]
    found = [_line(t.what, _shape(t), t.least, [_found(t, rows, way) for way in WAYS], ".2f") for t in TARGETS]
    found += [_error_line(t, rows, t.most_error) for t in TARGETS if t.most_error is not None]
    found.append(_exponent_line(rows))
    heads = ("<what", "<shape", "target", "sustained", "burst", "<verdict")
    tables = [Table("Kernels and whole calls, one item of 32 heads", heads, tuple(found))]
    lines = []
    for part, ways in MODELS.items():
        timed = models.get(part, {})
        for way, least in ways.items():
            ratios = [_gain(timed, way, key) for key in ("ms", "burst_ms")]
            lines.append(_line(way, timed.get("model", part), least, ratios, ".3f"))
        control = [_gain(timed, "exact", key) for key in ("ms", "burst_ms")]
        shown = ["" if r is None else f"{r:.3f} x" for r in control]
        lines.append(("all exact (control)", timed.get("model", part), "", *shown, ""))
    tables.append(Table("Whole models over torch's default attention", heads, tuple(lines)))
    if table is not None:
        tables.append(_quantized_where(rows, table))
    return tables


def _line(what: str, shape: str, least: float, found: list[float | None], form: str) -> tuple[str, ...]:
    shown = ["" if f is None else (f"{f:.0f}" if least > 10 else f"{f:{form}} x") for f in found]
    known = [f for f in found if f is not None]
    verdict = "not measured" if len(known) < len(found) else _verdict(min(known) >= least, min(known) / least)
    return what, shape, f">= {least:g}" + ("" if least > 10 else " x"), *shown, verdict


def _error_line(target: Target, rows: Iterable[Mapping[str, Any]], most: float) -> tuple[str, ...]:
    row = _row(target, rows) or {}
    error = row.get("errors", {}).get(target.column, {}).get("rel_l1") if "burst" in row else None
    shown = "" if error is None else f"{error:.4f}"
    verdict = "not measured" if error is None else _verdict(error <= most, error / most)
    return f"{target.what}: rel L1", _shape(target), f"<= {most}", shown, shown, verdict


def _exponent_line(rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The default recipe's error beside that of the exact exponent, where a run timed `exp=exact` too."""
    target = next(t for t in TARGETS if t.column == "sage2_op" and (t.head_dim, t.length) == (128, 8192))
    errors = (_row(target, rows) or {}).get("errors", {})
    found = [errors.get(column, {}).get("rel_l1") for column in ("sage2_op", EXACT_EXPONENT)]
    ratio = found[0] / found[1] if all(found) else None
    shown = "" if ratio is None else f"{ratio:.3f} x"
    verdict = "not measured" if ratio is None else _verdict(ratio <= MOST_ERROR, ratio / MOST_ERROR)
    return "default, rel L1 over the exact exponent's", _shape(target), f"<= {MOST_ERROR} x", shown, shown, verdict


def _verdict(is_met: bool, ratio: float) -> str:
    return "met" if is_met else f"missed by {100 * abs(1 - ratio):.1f} %"


def _shape(target: Target) -> str:
    return f"D {target.head_dim}, {'causal' if target.is_causal else 'full'}, {target.length}"


def _row(target: Target, rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    wanted = (target.head_dim, target.is_causal, target.length, 1, 32, 32)
    names = ("head_dim", "is_causal", "kv_len", "batch", "num_heads", "num_kv_heads")
    return next((row for row in rows if tuple(row[n] for n in names) == wanted), None)


def _found(target: Target, rows: Iterable[Mapping[str, Any]], way: str) -> float | None:
    measured = speeds(_row(target, rows) or {}, way)
    ours = measured.get(target.column)
    if target.column.startswith(CHORD) and ours is None:  # with another variant beside it
        end = target.column.removeprefix(CHORD)
        ours = next((v for c, v in measured.items() if c.startswith(CHORD) and c.endswith(end)), None)
    best = max((measured.get(p) or 0.0 for p in target.peers), default=1.0)
    return ours / best if ours and best else None


def _gain(timed: Mapping[str, Any], way: str, key: str) -> float | None:
    ours, default = timed.get(way, {}).get(key), timed.get("sdpa_default", {}).get(key)
    return default / ours if ours and default else None


def _quantized_where(rows: Iterable[Mapping[str, Any]], table: Mapping[str, Any]) -> Table:
    """Every measured whole call that the rule quantizes, against what would run instead of it: never below 0.98."""
    lines = []
    for row in rows:
        for backend, peers in (("torch", crossover.TORCH_PEERS), ("fa3", crossover.EXACT_PEERS)):
            points = dict(crossover.look_up(dict(table), row["head_dim"], row["is_causal"], backend))  # type: ignore[arg-type]
            heads = row["batch"] * row["num_heads"]
            runs = any(
                row["kv_len"] >= length and heads * row["kv_len"] ** 2 >= of * length**2
                for of, length in points.get("qk_int8_pv_fp8", ((CROSSOVER_HEADS, crossover.NEVER),))
            )
            gain = crossover.ratio_to_best(row, "sage2_op", peers) if "burst" in row else None
            if runs and gain is not None:
                verdict = _verdict(gain >= LOWEST_WHERE_QUANTIZED, gain / LOWEST_WHERE_QUANTIZED)
                lines.append((describe(row), backend, f"{gain:.3f} x", verdict))
    columns = ("<shape", "<exact backend", "lower of burst and sustained", "<verdict")
    return Table(f"Where the rule quantizes: at least {LOWEST_WHERE_QUANTIZED} x", columns, tuple(lines))
