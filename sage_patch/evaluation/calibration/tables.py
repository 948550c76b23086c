"""A calibration for people: its tables, its files, and the lines at the head of the policy file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_patch.evaluation.calibration.state import NAME
from sage_patch.evaluation.checkpoint import write_kept
from sage_patch.evaluation.tables import Table, plain, plan_table
from sage_patch.figures import BY_KEY, BY_TARGET

if TYPE_CHECKING:
    from sage_patch.evaluation.calibration.search import Calibrated


def calibrate_tables(results: dict[str, Any]) -> list[Table]:
    """The runs, cheapest first, and the plan of the policy that was chosen."""
    chosen = results["chosen"]["name"]
    rows = []
    for run in sorted(results["runs"], key=lambda r: r["cost"]):
        figures = [f.text(run["metrics"][f.key]) if f.key in run["metrics"] else "" for f in BY_TARGET.values()]
        verdict = "chosen" if run["name"] == chosen else "met" if run["met"] else "missed"
        rows.append((run["name"], f"{run['cost']:.3f}", *figures, verdict))
    columns = ("<run", "cost", *(f.heading for f in BY_TARGET.values()), "<targets")
    model, single = results["cost_model"], results["best_single_rung"]
    note = f"Cost is attention time relative to exact, by the cost model of {model['card']} ({model['source']})."
    if single is not None:
        note += f" The best single rung that meets the targets costs {single['cost']:.3f}."
    if results["speed"] != "measured":
        note += f" Speed is end to end, {results['speed']}; it was not measured."
    if results["ended"]:
        note += f" The search ended early: {results['ended']}."
    asked = ", ".join(t["target"] for t in results["targets"])
    return [Table(f"Calibration for {asked}", columns, tuple(rows), note), plan_table(results["plan"])]


def write_calibration(folder: Path, policy: Path, found: Calibrated, tables: list[Table], rules: str) -> list[Path]:
    """calibrate.json and calibrate.md in the folder, and the policy file last; each appears whole or not at all.

    rules: the policy as YAML. Raises CheckpointError if one cannot be written.
    """
    results, state = found.results, folder / NAME
    kept = "a file of that name is as it was" + f"; what was measured before is kept in {state}" * state.is_file()
    head = f"# {results['model']['class']}\n\n{results['date']}, {results['seconds']:.0f} s, `{results['command']}`\n\n"
    texts = {
        folder / "calibrate.json": json.dumps(plain(results), indent=1, allow_nan=False) + "\n",
        folder / "calibrate.md": head + "\n".join(t.markdown() for t in tables),
        policy: header(found) + rules,
    }
    for path, text in texts.items():
        write_kept(path, text, kept)
    return list(texts)


def header(found: Calibrated) -> str:
    """Comment lines that say what the policy is before its first key."""
    record, results = found.policy.calibration, found.results
    assert record is not None
    chosen, single = results["chosen"], results["best_single_rung"]
    targets = ", ".join(record.targets)
    lines = [
        f"Calibrated for {targets} on {record.setting['model']}, {record.date}.",
        f"Achieved: {_figures(record.achieved)}.",
        f"Attention costs {record.cost:.3f} of exact on {record.card} by the cost model"
        + (f"; the best single rung that meets the target costs {single['cost']:.3f}." if single else "."),
        f"{chosen['sites_below_exact']} of {chosen['sites']} sites run below exact.",
        "A score is the worst of the rule's sites: cosine, relative L1, worst row, quality = cosine * (1 - rel_l1).",
    ]
    return "".join(f"# {line}\n" for line in lines)


def _figures(achieved: Any) -> str:
    shown = [BY_KEY[k] for k in achieved if k in BY_KEY and BY_KEY[k].target]
    return ", ".join(f"{f.heading} {f.text(achieved[f.key])}" for f in shown)
