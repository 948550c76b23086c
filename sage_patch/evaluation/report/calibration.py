"""The section of a report that shows a calibration: every run that it confirmed, cost against damage."""

from __future__ import annotations

from sage_patch.evaluation.report.blocks import Block, Cell, Grid, Node, Point, Scatter, Section, Traced
from sage_patch.evaluation.report.sections import conditions, title_of

# metric -> (heading, how it is written); of those that a calibration has, the first is what its chart shows
FIGURES = {
    "kl": ("mean KL, nats", ".4f"),
    "worst_psnr": ("worst PSNR, dB", ".2f"),
    "top1": ("top-1", ".2%"),
    "ppl_change": ("perplexity", "+.2%"),
    "agreement": ("greedy", ".0%"),
    "psnr": ("PSNR, dB", ".2f"),
    "worst_ssim": ("worst SSIM", ".4f"),
}


def calibration(files: list[Node]) -> list[Section]:
    """What each calibration tried, what it chose, and what the best single rung would have cost."""
    charts: list[Block] = []
    tables: list[Block] = []
    for file in files:
        chosen = file["chosen"]["name"].value
        runs = sorted(file["runs"], key=lambda r: r["cost"].value)
        shown = {m: h for m, h in FIGURES.items() if any(r["metrics"].get(m) for r in runs)}
        lines: list[tuple[Cell, ...]] = []
        for run in runs:
            figures = [figure(run, metric, spec) for metric, (_, spec) in shown.items()]
            verdict = "chosen" if run["name"].value == chosen else "met" if run["met"].value else "missed"
            lines.append((run["name"].value, run["cost"].number(".3f"), *figures, verdict))
        asked = ", ".join(t["target"].value for t in file["targets"])
        card = file["cost_model"]["card"].value
        columns = ("<run", "cost", *(head for head, _ in shown.values()), "<targets")
        note = (
            f"cost: attention time, exact being 1, by the cost model of {card}: {file['cost_model']['source'].value}."
        )
        tables.append(Grid(f"{title_of(file)}: asked for {asked}", columns, tuple(lines), note))
        main, (head, spec) = next(iter(shown.items()))
        points = [
            Point(_label(run["name"].value, chosen), _series(run["name"].value, chosen), run["cost"].number(".2f"), y)
            for run in runs
            if isinstance(y := figure(run, main, spec), Traced) and y.value > 0
        ]
        charts.append(Scatter(title_of(file), f"cost, exact = 1 ({card})", head, tuple(points), log_y=main == "kl"))
    words = (
        "Each point is a whole run against the unpatched model: to the left is cheaper. Runs of one recipe at every "
        "site bear its name; the others are mixtures that the calibration confirmed on its way. A choice is never made "
        "by the error of single sites: they only say what to try next."
    )
    told = " ".join(conditions(f) for f in files)
    return [Section("calibration", "What calibration chose", words, [charts, *tables], told)] if files else []


def figure(run: Node, metric: str, spec: str) -> Cell:
    """A metric of a run, None where it has none or where it is infinite."""
    found = run["metrics"].get(metric)
    return None if found is None else found.number(spec)


def _label(name: str, chosen: str) -> str:
    if name == chosen:
        return "chosen"
    return name.removesuffix(" everywhere") if name.endswith(" everywhere") else ""


def _series(name: str, chosen: str) -> str:
    return "chosen" if name == chosen else name if name.endswith(" everywhere") else "mixture"
