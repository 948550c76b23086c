"""`sage-patch ablate`: the operator ablations and one head's anatomy on the model of a run configuration."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sage_patch.evaluation.ablation import RUNGS, TABLES, Progress, ablate, capture_task, page
from sage_patch.evaluation.anatomy import anatomy
from sage_patch.evaluation.environment import environment
from sage_patch.evaluation.judge import judge_for
from sage_patch.evaluation.tables import plain, write_whole
from sage_patch.schema import RunConfig


def ablate_model(
    config: RunConfig,
    title: str,
    progress: Progress,
    jobs: int = 1,
    per_site: int = 4,
    site: str | None = None,
    head: int | None = None,
) -> dict[str, Any]:
    """{"ablation", "anatomy"} of the configured model at its own task, run exact.

    jobs: windows, pictures or clips that are run. per_site: calls kept of each site. site, head: what the anatomy
    shows, by default what INT4 without smoothing damages most. Raises ModelError, PatchError, AblationError or
    AnatomyError.
    """
    judge = judge_for(config, progress)
    kept = capture_task(judge, title, jobs, per_site)
    calls = kept.calls
    # The anatomy first: it is quick, and it may find that the site was misspelt.
    taken_apart = {"model": judge.facts(), **anatomy(calls, site, head)} if calls else {}
    return {"ablation": {"model": judge.facts(), **ablate(kept, progress)}, "anatomy": taken_apart}


def write_ablation(folder: Path, command: str, found: dict[str, dict[str, Any]]) -> list[Path]:
    """ablation.json, ablation.md and anatomy.json of the models by title; each appears whole or not at all."""
    head = {
        "schema": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "environment": environment(),
    }
    ablation = head | {
        "kind": "ablation",
        "recipes": TABLES,
        "rungs": list(RUNGS),
        "models": {title: f["ablation"] for title, f in found.items()},
    }
    taken_apart = head | {"kind": "anatomy", "models": {title: f["anatomy"] for title, f in found.items()}}
    files = [folder / "ablation.json", folder / "ablation.md", folder / "anatomy.json"]
    write_whole(files[0], json.dumps(plain(ablation), indent=1, allow_nan=False) + "\n")
    write_whole(files[1], page(ablation))
    write_whole(files[2], json.dumps(plain(taken_apart), indent=1, allow_nan=False) + "\n")
    return files
