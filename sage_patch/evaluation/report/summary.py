"""The head of a report: what was gained, at what cost, on which card, in one table; and what was drawn."""

from __future__ import annotations

from sage_patch.evaluation.report.blocks import Cell, Grid, Node, Picture, Section, derived
from sage_patch.evaluation.report.quality import figure, is_on_reference
from sage_patch.evaluation.report.sections import name_of, section, shapes_of, title_of
from sage_patch.figures import of_kind

DEFAULT = "qk_int8_pv_fp8"


def summary(models: list[Node], runs: list[Node]) -> list[Section]:
    """A line for each model that was timed on a card, and one for each whose output was measured."""
    lines: list[tuple[Cell, ...]] = []
    for file in models:
        for model in shapes_of(file):
            ours = model.get(DEFAULT)
            if ours is not None and ours.get("ms"):
                gain = derived("ratio", ".2f", model["sdpa_default"]["ms"], ours["ms"])
                card = str(file.value["environment"].get("device", ""))
                cost = ours["rel_l1"].number(".4f")
                lines.append((str(model["model"].value), f"`{DEFAULT}`", gain, cost, "relative L1 of its output", card))
    for run in runs:
        wanted = next(f for f in of_kind(run["kind"].value) if f.overview)
        row = next((r for r in run["rows"] if r["name"].value == "policy"), None)
        if row is not None:
            device = "the CPU backend, which computes the kernels' numerics" if is_on_reference(run) else "as timed"
            lines.append(
                (title_of(run), name_of(row), None, figure(row, wanted), f"{wanted.name} {wanted.unit}", device)
            )
    if not lines:
        return []
    words = (
        "What a whole model gains under the default recipe, and what its output loses. Gains were timed on the card "
        "named, the unpatched model in turns with the patched one; every other figure of this page stands below."
    )
    columns = ("<model", "<recipe", "gain, x", "cost", "<cost is", "<on")
    return [section("summary", "In short", words, [Grid("", columns, tuple(lines))], [*models, *runs])]


def drawn(pictures: list[tuple[str, bytes]]) -> list[Section]:
    """The sheets that `sage-patch run` writes: pictures side by side with their differences."""
    if not pictures:
        return []
    words = "Drawn by the unpatched pipeline and under each recipe, from the same seeds. Differences are brightened."
    return [Section("pictures", "Side by side", words, [Picture(name, data) for name, data in pictures])]
