"""The section of a report that shows a calibration: every run that it confirmed, cost against damage."""

from __future__ import annotations

from sage_patch.evaluation.report.blocks import Block, Cell, Grid, Node, Point, Scatter, Section, Traced
from sage_patch.evaluation.report.sections import conditions, title_of
from sage_patch.figures import FIGURES, Figure


def calibration(files: list[Node]) -> list[Section]:
    """What each calibration tried, what it chose, and what the best single rung would have cost."""
    charts: list[Block] = []
    tables: list[Block] = []
    for file in files:
        chosen = file["chosen"]["name"].value
        runs = sorted(file["runs"], key=lambda r: r["cost"].value)
        shown = [f for f in FIGURES if f.overview and any(r["metrics"].get(f.key) for r in runs)]
        lines: list[tuple[Cell, ...]] = []
        for run in runs:
            figures = [_value(run, figure) for figure in shown]
            verdict = "chosen" if run["name"].value == chosen else "met" if run["met"].value else "missed"
            lines.append((run["name"].value, run["cost"].number(".3f"), *figures, verdict))
        asked = ", ".join(t["target"].value for t in file["targets"])
        card = file["cost_model"]["card"].value
        columns = ("<run", "cost", *(f.heading for f in shown), "<targets")
        note = (
            f"cost: attention time, exact being 1, by the cost model of {card}: {file['cost_model']['source'].value}."
        )
        tables.append(Grid(f"{title_of(file)}: asked for {asked}", columns, tuple(lines), note))
        main = next((f for f in shown if f.target), shown[0])
        points = [
            Point(_label(run["name"].value, chosen), _series(run["name"].value, chosen), run["cost"].number(".2f"), y)
            for run in runs
            if isinstance(y := _value(run, main), Traced) and y.value > 0
        ]
        charts.append(
            Scatter(title_of(file), f"cost, exact = 1 ({card})", main.heading, tuple(points), log_y=main.unit == "nats")
        )
    words = (
        "Each point is a whole run against the unpatched model: to the left is cheaper. Runs of one recipe at every "
        "site bear its name; the others are mixtures that the calibration confirmed on its way. A choice is never made "
        "by the error of single sites: they only say what to try next."
    )
    told = " ".join(conditions(f) for f in files)
    return [Section("calibration", "What calibration chose", words, [charts, *tables], told)] if files else []


def _value(run: Node, figure: Figure) -> Cell:
    """A figure of a run, None where it has none or where it is infinite."""
    found = run["metrics"].get(figure.key)
    return None if found is None else found.number(figure.fine or figure.spec)


def _label(name: str, chosen: str) -> str:
    if name == chosen:
        return "chosen"
    return name.removesuffix(" everywhere") if name.endswith(" everywhere") else ""


def _series(name: str, chosen: str) -> str:
    return "chosen" if name == chosen else name if name.endswith(" everywhere") else "mixture"
