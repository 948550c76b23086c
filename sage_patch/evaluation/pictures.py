"""The image and video run: draw with and without the policy, from equal seeds, and compare pixel by pixel.

The unpatched pipeline draws everything first; then the policy and each recipe of `compare` draw the same.
"""

from __future__ import annotations

import resource
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

import torch

from sage_patch.evaluation import media, picture_metrics
from sage_patch.evaluation.bounds import check_bounds
from sage_patch.evaluation.drawing import Drawer, Drawn
from sage_patch.evaluation.environment import environment
from sage_patch.evaluation.media import Gallery
from sage_patch.evaluation.models import ModelError, load_pipeline
from sage_patch.evaluation.text import POLICY, Progress, near
from sage_patch.patch import applied, plan
from sage_patch.policy import Policy
from sage_patch.schema import PictureTask, RunConfig

UNPATCHED = "unpatched"
_FPS = 8  # of clips whose task does not say


@dataclass(frozen=True)
class _Variant:
    """All pictures under one policy. peak_memory: bytes, or why it is not known."""

    drawn: list[Drawn]
    peak_memory: int | str
    calls: list[dict[str, Any]]


def run_pictures(config: RunConfig, command: str, progress: Progress) -> tuple[dict[str, Any], Gallery]:
    """Run the configuration; returns everything that results.json holds, and the pictures.

    Raises ModelError if the pipeline does not fit or a library is missing, PolicyError or PatchError if the policy
    does not.
    """
    started = time.perf_counter()
    task = config.task
    assert isinstance(task, PictureTask)
    _require_libraries(task)
    if config.model.meta:
        raise ModelError("model.meta gives a model without weights, which only `plan` can use; a run needs weights")
    progress("loading the pipeline", 0, 1)
    pipeline = load_pipeline(config.model)
    policy = config.policy.build()
    resolved = plan(pipeline, policy)  # an error here costs no computation
    drawer = Drawer(pipeline, config.model, task)
    progress("loading the pipeline", 1, 1)

    jobs = [(prompt, seed) for prompt in task.prompts for seed in task.seeds or [config.seed]]
    trials = {POLICY: policy} | {name: replace(policy, recipe=name, rules=()) for name in config.compare}
    total = (1 + len(trials)) * len(jobs) * task.steps
    drawer.draw(*jobs[0], tick=lambda step: None, steps=1)  # the first call of a process is slower than the others
    exact = _draw(drawer, jobs, None, UNPATCHED, progress, 0, total)
    gallery = Gallery(_labels(jobs), {UNPATCHED: [d.frames for d in exact.drawn]}, _fps(task))
    quality = []
    for number, (name, trial) in enumerate(trials.items(), start=1):
        variant = _draw(drawer, jobs, trial, name, progress, number * len(jobs) * task.steps, total)
        gallery.drawn[name] = [d.frames for d in variant.drawn]
        quality.append(_quality(name, trial, variant, exact))

    targets = check_targets(config, quality)
    patched = {site.name.partition(".")[0] for site in resolved.sites}
    models = {name: part for name, part in pipeline.components.items() if name in patched}
    return {
        "schema": 1,
        "kind": task.kind,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "environment": environment(),
        "config": near(config.model_dump(mode="json", exclude_none=True)),
        "model": {
            "class": type(pipeline).__name__,
            "denoisers": {name: type(model).__name__ for name, model in models.items()},
            "parameters": sum(p.numel() for model in models.values() for p in model.parameters()),
            "dtype": str(pipeline.dtype).removeprefix("torch."),
            "device": str(pipeline.device),
        },
        "pictures": [
            {"prompt": prompt, "seed": seed, "frames": len(d.frames), "size": list(d.frames.shape[-2:])}
            for (prompt, seed), d in zip(jobs, exact.drawn, strict=True)
        ],
        "unpatched": _cost(exact),
        "plan": resolved.rows(),
        "quality": quality,
        "targets": targets,
        "passed": all(t["met"] for t in targets),
        "process_peak_memory_bytes": _process_peak(),
        "seconds": time.perf_counter() - started,
    }, gallery


def check_targets(config: RunConfig, quality: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The configuration's bounds against `_quality` rows, which call the worst of x x_worst."""
    found = {q["name"]: q for q in quality}
    return check_bounds(config, lambda name, metric: found[name][f"{metric.removeprefix('worst_')}_worst"])


def _require_libraries(task: PictureTask) -> None:
    """A missing library is found before the work, not after it."""
    missing = picture_metrics.missing_library() or (media.missing_writer() if task.kind == "video" else None)
    if missing is not None:
        raise ModelError(missing)


def _draw(
    drawer: Drawer,
    jobs: list[tuple[str | int, int]],
    policy: Policy | None,
    name: str,
    progress: Progress,
    done: int,
    total: int,
) -> _Variant:
    """Every picture, unpatched (policy None) or patched for as long as it takes."""
    on_gpu = drawer.pipeline.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(drawer.pipeline.device)

    drawn = []
    steps = drawer.task.steps
    with applied(drawer.pipeline, policy) if policy is not None else nullcontext() as handle:
        for number, (prompt, seed) in enumerate(jobs):
            label, before = f"{name}, picture {number + 1} of {len(jobs)}", done + number * steps
            progress(label, before, total)
            drawn.append(drawer.draw(prompt, seed, lambda n, label=label, at=before: progress(label, at + n, total)))  # type: ignore[misc]
        progress(name, done + len(jobs) * steps, total)
    calls = handle.rows() if handle is not None else []
    peak: int | str = "unavailable: only CUDA keeps a peak that a run can set back"
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(drawer.pipeline.device)
    return _Variant(drawn, peak, calls)


def _quality(name: str, policy: Policy, variant: _Variant, exact: _Variant) -> dict[str, Any]:
    pairs = zip(variant.drawn, exact.drawn, strict=True)
    compared = [picture_metrics.compare(a.frames, e.frames) for a, e in pairs]
    cost, base = _cost(variant), _cost(exact)
    timed = "seconds_per_step" if cost["seconds_per_step"] is not None else "seconds"
    return {
        "name": name,
        "recipe": policy.recipe,
        **picture_metrics.summary(compared),
        **cost,
        "slowdown": cost[timed] / base[timed],
        "calls": variant.calls,
        "pictures": [picture_metrics.summary([c]) for c in compared],
    }


def _cost(variant: _Variant) -> dict[str, Any]:
    """seconds (mean of a picture), seconds_per_step (median over all, None if the pipeline does not tell), memory."""
    steps = [s for d in variant.drawn for s in d.step_seconds]
    return {
        "seconds": fmean(d.seconds for d in variant.drawn),
        "seconds_per_step": median(steps) if steps else None,
        "peak_memory_bytes": variant.peak_memory,
    }


def _labels(jobs: list[tuple[str | int, int]]) -> list[str]:
    """The prompt, with its seed where a prompt is drawn from several."""
    several = len({seed for _, seed in jobs}) > 1
    shown = [str(prompt) if len(str(prompt)) <= 60 else f"{str(prompt)[:57]}..." for prompt, _ in jobs]
    return [f"{text} (seed {seed})" if several else text for text, (_, seed) in zip(shown, jobs, strict=True)]


def _fps(task: PictureTask) -> int | None:
    return (task.fps or _FPS) if task.kind == "video" else None


def _process_peak() -> int:
    """The most memory this process has held since it began, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
