"""`sage-patch report`: any number of results files and policies -> index.html and report.md.

One page that opens without a network, and its Markdown twin. Every number on it is found again in one of the files;
which ones, with their checksums, stands at its end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sage_patch.errors import SagePatchError
from sage_patch.evaluation.report import sections as show
from sage_patch.evaluation.report.anatomy import ablation, anatomy
from sage_patch.evaluation.report.blocks import Grid, Node, Section
from sage_patch.evaluation.report.calibration import calibration
from sage_patch.evaluation.report.page import html_page, markdown_page
from sage_patch.evaluation.report.quality import frontier, quality
from sage_patch.evaluation.report.summary import drawn, summary
from sage_patch.evaluation.tables import write_whole
from sage_patch.policy import Policy

KINDS = {
    "run": "results of run or evaluate",
    "calibrate": "calibrate.json",
    "ablation": "ablation.json",
    "anatomy": "anatomy.json",
    "bench": "bench.json",
    "models": "times of whole models",
    "policy": "a policy (YAML)",
    "picture": "a sheet of pictures (PNG)",
}


class ReportError(SagePatchError, ValueError):
    """A file that a report cannot be made of; the message says what was found and what is taken."""


def write_report(
    files: Sequence[Path], policies: Mapping[Path, Policy], folder: Path, title: str, command: str
) -> list[Path]:
    """index.html and report.md in the folder; each appears whole or not at all.

    files: JSON files of the kinds in KINDS. policies: by the files they were read from. Raises ReportError.
    """
    if not files and not policies:
        raise ReportError("no file was given; a report is made of results.json, ablation.json, bench.json and the like")
    sources = _sources(files, policies)
    sections = _sections(sources, command)
    folder.mkdir(parents=True, exist_ok=True)
    lead = "What quantized attention costs in quality and gains in time, and why each layer runs what it runs."
    written = [folder / "index.html", folder / "report.md"]
    write_whole(written[0], html_page(title, lead, sections))
    write_whole(written[1], markdown_page(title, lead, sections))
    return written


Source = tuple[str, Node, Path, str]  # kind, content, where it was read, checksum


def _sources(files: Sequence[Path], policies: Mapping[Path, Policy]) -> list[Source]:
    """What was given. Where two files share a name, the folder of the second is part of its name."""
    found: list[Source] = []
    names: set[str] = set()
    paths = [*files, *policies]
    twice = next((p for i, p in enumerate(paths) if p.resolve() in [q.resolve() for q in paths[:i]]), None)
    if twice is not None:
        raise ReportError(f"{twice} is given twice")
    for path in paths:
        raw = path.read_bytes()
        name = path.name if path.name not in names else f"{path.parent.name}/{path.name}"
        if name in names:
            raise ReportError(f"{path}: another file has this name in a folder of this name; rename one of them")
        names.add(name)
        is_picture = raw.startswith(b"\x89PNG\r\n")
        value = _plain(policies[path]) if path in policies else raw if is_picture else _json(path, raw)
        kind = "policy" if path in policies else "picture" if is_picture else _kind(path, value)
        found.append((kind, Node(name, "", value), path, hashlib.sha256(raw).hexdigest()))
    return found


def _json(path: Path, raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise ReportError(f"{path} is neither JSON nor a policy file (.yaml): {error}") from None


def _plain(policy: Policy) -> dict[str, Any]:
    """The policy as its file holds it, as far as a report shows it."""
    rules: list[dict[str, Any]] = []
    for rule in policy.rules:
        spans = {name: str(span) for name in ("layers", "steps") if (span := getattr(rule, name)) is not None}
        rules.append({"match": rule.match, "role": rule.role, "recipe": rule.recipe, "reason": rule.reason, **spans})
        rules[-1]["score"] = dict(rule.score or {})
    made_for = None if policy.calibration is None else asdict(policy.calibration)
    return {"recipe": policy.recipe, "rules": rules, "calibration": made_for}


def _kind(path: Path, value: Any) -> str:
    """A key of KINDS."""
    if not isinstance(value, dict):
        raise ReportError(f"{path} holds a {type(value).__name__}; taken are {', '.join(KINDS.values())}")
    task = value.get("kind") in ("text", "image", "video") and "plan" in value
    if '"relative_l1"' in json.dumps(value) or (task and value.get("complete", True) and value.get("schema", 1) < 2):
        remedy = f"python scripts/rewrite_results.py {path} brings it up to date"
        raise ReportError(f"{path} has the keys of an earlier release; {remedy}")
    if value.get("kind") in ("ablation", "anatomy", "calibrate"):
        return str(value["kind"])
    if value.get("what") == "evaluate" and not value.get("complete"):
        raise ReportError(f"{path} is of an evaluation that was stopped; run its command again, and it continues")
    if task:
        return "run"
    if "rows" in value and "device" in value.get("environment", {}):
        return "bench"
    if any(isinstance(v, dict) and "sdpa_default" in v for v in value.values()):
        return "models"
    known = ", ".join(KINDS.values())
    raise ReportError(
        f"{path} is nothing that a report knows: it holds {', '.join(list(value)[:8])}; taken are {known}"
    )


def _sections(sources: list[Source], command: str) -> list[Section]:
    of = {kind: [node for k, node, _, _ in sources if k == kind] for kind in KINDS}
    first = [
        *summary(of["models"], of["run"]),
        *drawn([(node.file, node.value) for node in of["picture"]]),
        *show.accounting(of["bench"], of["models"]),
        *frontier(of["bench"], of["models"], of["run"]),
    ]
    rest = [
        *quality(of["run"]),
        *calibration(of["calibrate"]),
        *show.error_map([*of["calibrate"], *of["run"]], of["ablation"]),
        *show.sites([*of["calibrate"], *of["run"]], of["policy"]),
        *anatomy(of["anatomy"]),
        *ablation(of["ablation"]),
    ]
    lines = tuple((f"`{path}`", KINDS[kind], f"`{digest[:16]}`") for kind, _, path, digest in sources)
    words = (
        "Every number above carries, in the page's source, the file and the place in it that it was taken from. "
        f"Made by `{command}`."
    )
    grid = Grid("", ("<file", "<what", "<sha256, begins"), lines)
    rest.append(Section("sources", "Where the numbers come from", words, [grid]))
    return [*first, *(replace(section, folded=bool(first)) for section in rest)]
