"""What a calibration has measured so far, in a file: an interrupted one goes on from there, as does another target."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sage_patch.errors import SagePatchError
from sage_patch.evaluation.calibration.score import Bucket, Group
from sage_patch.evaluation.environment import environment
from sage_patch.evaluation.judge import Judge
from sage_patch.evaluation.tables import write_whole
from sage_patch.evaluation.text import near
from sage_patch.policy import CALIBRATION_SCHEMA, Policy

NAME = "calibrate_state.json"
BEFORE = "calibrate_state.before.json"  # of the setting before this one


class StateError(SagePatchError, ValueError):
    """A file could not be written; the message says which, that nothing was lost, and what to do."""


@dataclass(frozen=True)
class Run:
    """One full run. metrics: `judge.Measured.metrics`, and speed. exact_sites: site -> why none of its calls ran
    quantized. took: seconds of the run with everything around it. each: the figures of every window or picture."""

    name: str
    metrics: dict[str, float]
    unavailable: dict[str, str]
    seconds: float
    baseline_seconds: float
    attention_seconds: float | None
    exact_sites: dict[str, str]
    took: float
    each: list[dict[str, Any]]


@dataclass
class State:
    """Scores and runs of one setting. key: everything that they depend on; another key starts afresh."""

    path: Path
    key: dict[str, Any]
    groups: list[Group] = field(default_factory=list)
    runs: dict[str, Run] = field(default_factory=dict)  # by what was chosen, see `choice_key`
    baseline: dict[str, Any] = field(default_factory=dict)
    reused: int = 0  # runs that were found here, and what they took
    reused_seconds: float = 0.0

    def save(self) -> None:
        """Write the file; it appears whole or not at all. Raises StateError if it cannot be written."""
        value = {
            "key": self.key,
            "baseline": self.baseline,
            "groups": [g.row() for g in self.groups],
            "runs": {choice: asdict(run) for choice, run in self.runs.items()},
        }
        write_kept(self.path, json.dumps(value, indent=1) + "\n", self.path)


def write_kept(path: Path, text: str, state: Path) -> None:
    """Write a whole file, or raise StateError, which says what is kept in `state`; an older file stays as it was."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        kept = f"; what was measured before is kept in {state}" if state.is_file() else ""
        raise StateError(
            f"{path} could not be written ({error.strerror or error}); a file of that name is as it was{kept}. "
            "Make room or name another place, and give the same command again: it goes on from there"
        ) from error


def open_state(folder: Path, key: dict[str, Any]) -> State:
    """The state in the folder if it is of the same setting. Else an empty one, and the other is kept under BEFORE.

    It is written at once: a disk that is full or read-only is found before the work.
    """
    state = State(folder / NAME, json.loads(json.dumps(key)))
    if state.path.is_file():
        found = _read(state.path)
        if found.get("key") == state.key:
            state.baseline = found["baseline"]
            state.groups = [Group(**row) for row in found["groups"]]
            state.runs = {choice: Run(**row) for choice, row in found["runs"].items()}
            state.reused = len(state.runs)
            state.reused_seconds = sum(run.took for run in state.runs.values())
        else:
            state.path.replace(folder / BEFORE)
    state.save()
    return state


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # cut off or written by hand: of no setting
        return {}
    return found if isinstance(found, dict) else {}


def key_of(judge: Judge, base: Policy, buckets: tuple[Bucket, ...]) -> dict[str, Any]:
    """What scores and runs depend on. Targets and the card do not count: others use the same runs."""
    config = judge.config.model_dump(mode="json", exclude_none=True)
    packages = environment()["packages"]
    library = "transformers" if judge.kind == "text" else "diffusers"
    return {
        "schema": CALIBRATION_SCHEMA,
        "model_hash": judge.model_hash,
        "task": near(config["task"]) | {"seed": config["seed"]},
        "base": {n: getattr(base, n) for n in ("on_unsupported", "quantize_fp32", "min_q_len", "min_kv_len")},
        "buckets": [[b.name, list(b.steps)] for b in buckets],
        "device": str(judge.device),
        "versions": {n: packages[n] for n in ("sage-patch", "torch", library)},
    }


def choice_key(choice: dict[tuple[str, str], str]) -> str:
    """A choice as one text: the key of its run."""
    return ";".join(f"{site}@{bucket}={rung}" for (site, bucket), rung in choice.items())
