"""What a calibration has measured so far, in a file: an interrupted one goes on from there, as does another target."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sage_patch.evaluation.calibration.score import Bucket, Group
from sage_patch.evaluation.checkpoint import Checkpoint
from sage_patch.evaluation.environment import RESULTS_SCHEMA, environment, near
from sage_patch.evaluation.judge import Judge, Measured
from sage_patch.policy import CALIBRATION_SCHEMA, Policy

NAME = "calibrate_state.json"


@dataclass
class State:
    """Scores and full runs of one setting. runs: by what was chosen, see `choice_key`. reused: runs that were found."""

    checkpoint: Checkpoint
    groups: list[Group] = field(default_factory=list)
    runs: dict[str, Measured] = field(default_factory=dict)
    baseline: dict[str, Any] = field(default_factory=dict)
    reused: int = 0
    reused_seconds: float = 0.0  # that they took

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def key(self) -> dict[str, Any]:
        """Everything that scores and runs depend on."""
        return self.checkpoint.identity

    def save(self) -> None:
        """Write the file; it appears whole or not at all. Raises CheckpointError if it cannot be written."""
        runs = {choice: run.row() for choice, run in self.runs.items()}
        self.checkpoint.write({"baseline": self.baseline, "groups": [asdict(g) for g in self.groups], "runs": runs})


def open_state(folder: Path, key: dict[str, Any]) -> State:
    """The state in the folder if it is of the same setting; else an empty one, and the other is kept beside.

    It is written at once: a disk that is full or read-only is found before the work.
    """
    state = State(Checkpoint(folder / NAME, key, ours=True))
    found = state.checkpoint.found
    if found:
        state.baseline = found["baseline"]
        state.groups = [Group(**row) for row in found["groups"]]
        state.runs = {choice: Measured.of(row) for choice, row in found["runs"].items()}
        state.reused = len(state.runs)
        state.reused_seconds = sum(run.took for run in state.runs.values())
    state.save()
    return state


def key_of(judge: Judge, base: Policy, buckets: tuple[Bucket, ...]) -> dict[str, Any]:
    """What scores and runs depend on. Targets and the card do not count: others use the same runs."""
    config = judge.config.model_dump(mode="json", exclude_none=True)
    packages = environment()["packages"]
    library = "transformers" if judge.kind == "text" else "diffusers"
    return {
        "schema": [CALIBRATION_SCHEMA, RESULTS_SCHEMA],
        "model_hash": judge.model_hash,
        "weights": {n: near(config["model"][n]) for n in ("quantize", "adapters") if config["model"].get(n)},
        "task": near(config["task"]) | {"seed": config["seed"]},
        "base": {n: getattr(base, n) for n in ("rotate", "on_unsupported", "quantize_fp32", "min_q_len", "min_kv_len")},
        "buckets": [[b.name, list(b.steps)] for b in buckets],
        "device": str(judge.device),
        "versions": {n: packages[n] for n in ("sage-patch", "torch", library)},
    }


def choice_key(choice: dict[tuple[str, str], str]) -> str:
    """A choice as one text: the key of its run."""
    return ";".join(f"{site}@{bucket}={rung}" for (site, bucket), rung in choice.items())
