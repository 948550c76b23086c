"""A benchmark's result -> bench.json, tables for the terminal and bench.md, and a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sage_patch.errors import SagePatchError
from sage_patch.evaluation.tables import Table, plain, write_whole
from sage_patch.kernels.crossover import Card

# Column of a row -> (heading, what the plot calls it).
COLUMNS = {
    "sage2_op": ("ours, op", "FP8 PV, whole call"),
    "sage2_kernel": ("kernel", "FP8 PV, kernel"),
    "sage2_pv_fp16_op": ("FP16 PV, op", "FP16 PV, whole call"),
    "sage2_pv_fp16_kernel": ("kernel ", "FP16 PV, kernel"),
    "fa3_fp8_kernel": ("FA3 FP8 kernel", "FA3 FP8, kernel"),
    "cudnn_fp8_kernel": ("cuDNN FP8 kernel", "cuDNN FP8, kernel"),
    "fa3_bf16": ("FA3 bf16", "FA3 bf16"),
    "sdpa_cudnn": ("SDPA cuDNN", "SDPA cuDNN"),
    "sdpa_fa2": ("SDPA FA2", "SDPA FA2"),
    "sdpa_default": ("SDPA default", "SDPA default"),
}
ERRORS = {"sage2_op": "rel L1", "sage2_pv_fp16_op": "rel L1, FP16 PV", "fa3_fp8_kernel": "rel L1, FA3 FP8"}


class PlotError(SagePatchError, ValueError):
    """The plot cannot be drawn; the message says what to install."""


def bench_tables(result: dict[str, Any]) -> list[Table]:
    """TOPS by shape, the host's cost of a call, and what could not run."""
    rows = sorted(result["rows"], key=lambda r: (-r["head_dim"], r["is_causal"], r["q_len"]))
    lines = [(_shape(row), *(_number(row.get(c)) for c in COLUMNS), *(_error(row, c) for c in ERRORS)) for row in rows]
    facts = result["environment"]
    note = (
        f"{facts['device']}, driver {facts['driver']}, {facts['power_limit']}, CUDA {facts['cuda']}; "
        + ", ".join(f"{name} {v}" for name, v in facts["packages"].items() if v)
        + f"; {facts['date']}. op: the whole call from bf16 tensors to the output; kernel: the attention launch alone, "
        "on inputs that are already quantized. rel L1: relative L1 error against float64."
    )
    if result.get("cut_short"):
        note += f" Cut short by --seconds: {result['cut_short']}."
    heads = ("<D, mask, tokens", *(h.strip() for h, _ in COLUMNS.values()), *ERRORS.values())
    found = [Table("TOPS = 4 B H q kv D / t, halved for causal", heads, tuple(lines), note)]
    cost = result.get("host_us_per_call") or {}
    if cost:
        cells = tuple((name, f"{us:.1f}") for name, us in cost.items())
        found.append(Table("Host microseconds of one small call", ("<what", "us"), cells))
    missing = {(name, why) for row in rows for name, why in row.get("why_null", {}).items()}
    if missing:
        found.append(Table("Not measured", ("<column", "<why"), tuple(sorted(missing))))
    return found


def crossover_table(name: str, card: Card) -> Table:
    """The break-even lengths of one card."""
    lines = [
        (head_dim, mask, recipe, "never" if length is None else str(length))
        for head_dim, modes in card["head_dims"].items()
        for mask, lengths in modes.items()
        for recipe, length in lengths.items()
    ]
    return Table(f"Break-even lengths of {name}", ("head_dim", "<mask", "<recipe", "tokens"), tuple(lines))


def write_bench(folder: Path, result: dict[str, Any], plot: bool = True) -> list[Path]:
    """bench.json, bench.md and bench.png in the folder. Raises PlotError, after the first two, without matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "bench.json", folder / "bench.md"]
    write_whole(files[0], json.dumps(plain(result), indent=1, allow_nan=False) + "\n")
    write_whole(files[1], "\n".join(t.markdown() for t in bench_tables(result)))
    if plot and result["rows"]:
        files.append(folder / "bench.png")
        draw(result, files[-1])
    return files


def draw(result: dict[str, Any], path: Path) -> None:
    """One panel for each head_dim and mask: TOPS over the sequence length; whole calls drawn, kernels alone dashed."""
    try:
        import matplotlib
    except ImportError:
        raise PlotError(
            f"{path.name} needs matplotlib: pip install 'sage-patch[bench]', or pass --no-plot; "
            f"the numbers are in {path.with_suffix('.json')}"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({(r["head_dim"], r["is_causal"]) for r in result["rows"]}, key=lambda p: (-p[0], p[1]))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4), squeeze=False, sharey=True)
    for axis, (head_dim, causal) in zip(axes[0], panels, strict=True):
        for color, (column, (_, label)) in enumerate(COLUMNS.items()):
            points = sorted(
                (r["kv_len"], r[column])
                for r in result["rows"]
                if (r["head_dim"], r["is_causal"]) == (head_dim, causal) and r.get(column)
            )
            if points:
                style = "--" if column.endswith("_kernel") else "-"
                axis.plot(*zip(*points, strict=True), style, color=f"C{color}", marker=".", label=label)
        lengths = sorted({r["kv_len"] for r in result["rows"]})
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths])
        axis.set_title(f"head_dim {head_dim}, {'causal' if causal else 'full'}")
        axis.set_xlabel("tokens")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("TOPS")
    axes[0][0].set_ylim(bottom=0)
    axes[0][-1].legend(fontsize=7)
    figure.suptitle(result["environment"]["device"])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _shape(row: dict[str, Any]) -> str:
    return f"{row['head_dim']} {'causal' if row['is_causal'] else 'full'} {row['q_len']}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _error(row: dict[str, Any], column: str) -> str:
    found = row.get("errors", {}).get(column)
    return f"{found['rel_l1']:.4f}" if found else ""
