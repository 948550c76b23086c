"""A benchmark's result -> bench.json, tables for the terminal and bench.md, and a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sage_patch.errors import SagePatchError
from sage_patch.evaluation.bench.gate import describe
from sage_patch.evaluation.tables import Table, plain, write_whole
from sage_patch.kernels.crossover import NEVER, PARTS, Card, look_up

# Column of a row -> (heading, what the plot calls it). Variants of our recipes stand behind their own, by their column.
COLUMNS = {
    "sage2_op": ("ours, op", "FP8 PV, whole call"),
    "sage2_kernel": ("kernel", "FP8 PV, kernel"),
    "sage2_pv_fp16_op": ("FP16 PV, op", "FP16 PV, whole call"),
    "sage2_pv_fp16_kernel": ("FP16 PV, kernel", "FP16 PV, kernel"),
    "fa3_fp8_kernel": ("FA3 FP8 kernel", "FA3 FP8, kernel"),
    "cudnn_fp8_kernel": ("cuDNN FP8 kernel", "cuDNN FP8, kernel"),
    "sage_upstream": ("SageAttention, its authors'", "SageAttention, its authors'"),
    "fa3_bf16": ("FA3 bf16", "FA3 bf16"),
    "sdpa_cudnn": ("SDPA cuDNN", "SDPA cuDNN"),
    "sdpa_fa2": ("SDPA FA2", "SDPA FA2"),
    "sdpa_efficient": ("SDPA efficient", "SDPA efficient"),
    "sdpa_default": ("SDPA default", "SDPA default"),
}


class PlotError(SagePatchError, ValueError):
    """The plot cannot be drawn; the message says what to install."""


def columns_of(result: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """COLUMNS with the variants of our recipes that were measured."""
    found = {name for row in result["rows"] for name in (*row, *row.get("burst", {}))}
    ours = {c for c in found if c.startswith("sage2") and c.endswith(("_op", "_kernel"))} - set(COLUMNS)
    variants = {c: (c.removeprefix("sage2_").replace("_", " "),) * 2 for c in sorted(ours)}
    ends = list(COLUMNS).index("fa3_fp8_kernel")
    items = list(COLUMNS.items())
    return dict([*items[:ends], *variants.items(), *items[ends:]])


def bench_tables(result: dict[str, Any]) -> list[Table]:
    """TOPS by shape, errors, clock and power, the host's cost of a call, and what could not run."""
    rows, columns = sorted(result["rows"], key=_order), columns_of(result)
    facts = result["environment"]
    how = "Sustained / burst: the second half of 1.5 s of calls, and 20 calls after half a second of rest"
    if all("burst" not in row for row in rows):
        how = "Recorded in short blocks that followed one another"
    note = (
        f"{facts['device']}, driver {facts['driver']}, {facts['power_limit']}, CUDA {facts['cuda']}; "
        + ", ".join(f"{name} {v}" for name, v in facts["packages"].items() if v)
        + f"; {facts['date']}. {how}. op: the whole call from bf16 tensors to the output; kernel: the attention launch "
        "alone, on inputs that are already quantized."
    )
    if result.get("cut_short"):
        note += f" Cut short by --budget: {result['cut_short']}."
    heads = ("<D, mask, tokens", *(h for h, _ in columns.values()))
    lines = tuple((_shape(row), *(speed(row, c) for c in columns)) for row in rows)
    found = [Table("TOPS = 4 B H q kv D / t, halved for causal", heads, lines, note)]
    wrong = tuple((_shape(row), *(error(row, c) for c in columns)) for row in rows)
    found.append(Table("Relative L1 error against float64", heads, wrong))
    if any(_card(row, c) for row in rows for c in columns):
        read = tuple((_shape(row), *(_card(row, c) for c in columns)) for row in rows)
        found.append(Table("Clock and power while sustained, MHz / W", heads, read))
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
        (head_dim, mask, recipe, backend, str(heads), "never" if length == NEVER else str(length))
        for backend, part in PARTS.items()
        if part in card
        for head_dim in card[part]
        for mask in ("full", "causal")
        for recipe, points in look_up(card, int(head_dim), mask == "causal", backend)  # type: ignore[arg-type]
        for heads, length in points
    ]
    columns = ("head_dim", "<mask", "<recipe", "<exact backend", "batch x heads", "tokens")
    return Table(f"Break-even lengths of {name}", columns, tuple(lines))


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
        for color, (column, (_, label)) in enumerate(columns_of(result).items()):
            # of several rows of one length the first: the most important one
            by_length = {
                r["kv_len"]: r[column]
                for r in reversed(result["rows"])
                if (r["head_dim"], r["is_causal"]) == (head_dim, causal) and r.get(column)
            }
            points = sorted(by_length.items())
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


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    """Shapes of a table that differ in their length alone stand together."""
    heads = row["num_heads"], row["num_kv_heads"], row["batch"] if "burst" in row else 0
    return row.get("name", ""), -row["head_dim"], row["is_causal"], *heads, row["q_len"]


def _shape(row: dict[str, Any]) -> str:
    """With the heads, but for rows recorded before there were several of a length."""
    return describe(row) if "burst" in row else describe(row).partition(",")[0]


def speed(row: dict[str, Any], column: str) -> str:
    """ "885 / 924": sustained and as a burst, of whichever there is."""
    sustained, burst = row.get(column), row.get("burst", {}).get(column)
    if burst is None:
        return "" if sustained is None else f"{sustained:.0f}"
    return f"{'-' if sustained is None else f'{sustained:.0f}'} / {burst:.0f}"


def _card(row: dict[str, Any], column: str) -> str:
    read = (row.get("card", {}).get(column) or {}).get("sustained")
    return f"{read['clock_mhz']:.0f} / {read['power_w']:.0f}" if read else ""


def error(row: dict[str, Any], column: str) -> str:
    found = row.get("errors", {}).get(column)
    return f"{found['rel_l1']:.4f}" if found else ""
