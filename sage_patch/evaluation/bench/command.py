"""What `sage-patch bench` does with a result: show it, write it, and compare it with a recorded one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from sage_patch.evaluation.bench import gate, measure
from sage_patch.evaluation.bench.accumulators import measure_sums
from sage_patch.evaluation.bench.plans import Plan
from sage_patch.evaluation.bench.tables import bench_tables, crossover_table, write_bench
from sage_patch.evaluation.tables import show
from sage_patch.kernels import crossover

Say = Callable[[str], None]


def show_and_write(
    result: dict[str, Any],
    plan: Plan,
    console: Console,
    say: Say,
    folder: Path | None,
    table: Path | None,
    plot: bool,
) -> None:
    """folder: where the files go, None for none. table: where a crossover's lengths go, None for the user's own.

    Raises BenchError where a crossover timed too little, PlotError without matplotlib.
    """
    show(bench_tables(result), console)
    if plan.is_crossover:
        name, card = measure.crossover_card(result)
        path = table or crossover.user_table()
        crossover.write(path, name, card)
        show([crossover_table(name, card), *measure_sums(name, card["measured"], path)], console)
        say(f"wrote {path}")
    if folder is not None:
        say(f"wrote {', '.join(map(str, write_bench(folder, result, plot)))}")


def passes(result: dict[str, Any], recorded: dict[str, Any], percent: float, say: Say) -> bool:
    """Whether no ratio to a peer is more than so many percent lower than it was; those that are are said."""
    slower, compared = gate.slower(result, recorded, percent)
    say("\n".join([f"{compared} ratios compared, {len(slower)} lower by more than {percent:g} %", *slower]))
    return not slower
