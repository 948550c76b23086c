"""`sage-patch evaluate`: what a policy costs in quality and what it takes in time, against the unpatched model.

Made of parts (`parts.py`): one for the policy and one for each recipe of `compare`, for language models the needle test
of each, and the error of every site by itself.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sage_patch.evaluation import needle
from sage_patch.evaluation.ablation import Captured, score
from sage_patch.evaluation.bounds import check_bounds
from sage_patch.evaluation.environment import environment
from sage_patch.evaluation.judge import Judge, PictureJudge, TextJudge, judge_for
from sage_patch.evaluation.parts import Parts
from sage_patch.evaluation.picture_scores import PictureScores
from sage_patch.evaluation.text import POLICY, Progress, near
from sage_patch.kernels import ops
from sage_patch.patch import applied
from sage_patch.policy import Policy
from sage_patch.schema import EvaluateSpec, RunConfig

UNPATCHED = "unpatched"
Work = dict[str, Callable[[dict[str, Any]], None]]  # parts by name: each adds to the results that it is given
_NOT_FINITE = "not a number: the patched model's output is not finite"


def evaluate(
    config: RunConfig,
    command: str,
    folder: Path,
    progress: Progress,
    say: Callable[[str], None],
    fresh: bool = False,
) -> dict[str, Any]:
    """Run what is not in the folder's results.json yet, and return all that it holds.

    say: told once what was found in the folder. fresh: measure anew whatever is there. Raises ModelError, PatchError or
    OwnAttentionError if the model does not fit, PolicyError if the policy does not, PartsError if the disk is full.
    """
    judge = judge_for(config, progress)
    policy = config.policy.build()
    resolved = judge.plan(policy)  # an error here costs no computation
    trials = {POLICY: policy}
    trials |= {name: replace(policy, recipe=name, rules=(), calibration=None) for name in config.compare}
    for trial in trials.values():
        judge.plan(trial)
    work = _text_parts(judge, trials) if isinstance(judge, TextJudge) else _picture_parts(judge, trials)
    work["sites"] = functools.partial(_measure_sites, judge, policy)

    versions = environment()
    setting = near(config.model_dump(mode="json", exclude_none=True, exclude={"output", "targets"}))
    parts = Parts(
        folder,
        facts={
            "schema": 1,
            "what": "evaluate",
            "kind": judge.kind,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command,
            "environment": versions,
            "config": near(config.model_dump(mode="json", exclude_none=True)),
            "model": judge.facts() | {"hash": judge.model_hash},
            "plan": resolved.rows(),
        },
        identity={"configuration": setting, "model": judge.model_hash, "set of versions": versions["packages"]},
        fresh=fresh,
    )
    if parts.note:
        say(parts.note)
    parts.run(work, time.monotonic)
    results = parts.results
    results["targets"] = check_targets(config, results["rows"])
    results["passed"] = all(t["met"] for t in results["targets"])
    results["complete"] = True
    parts.write()
    return results


def check_targets(config: RunConfig, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The configuration's bounds against measured rows."""
    found = {row["name"]: row for row in rows}

    def figure(name: str, metric: str) -> float | str:
        row = found[name]
        return row["unavailable"].get(metric) or _number(row["metrics"][metric])

    return check_bounds(config, figure)


def _number(value: float | None) -> float:
    """JSON has no infinity: equal pictures have a PSNR of null there."""
    return math.inf if value is None else value


def _text_parts(judge: TextJudge, trials: dict[str, Policy]) -> Work:
    spec, task = judge.config.evaluate or EvaluateSpec(), judge.task
    longest = getattr(judge.model.config, "max_position_embeddings", None)
    text = Path(task.text).read_text(encoding="utf-8")
    made = needle.needles(judge.tokenizer, text, spec.needle_lengths, spec.needle_depths, judge.config.seed, longest)

    def measure(name: str, results: dict[str, Any]) -> None:
        measured = judge.measure(name, trials[name])
        _add(results, judge, _row(asdict(measured), trials[name]))

    def search(name: str, results: dict[str, Any]) -> None:
        def ask() -> list[needle.Found]:
            return needle.ask(judge.model, made, lambda n: judge.progress(f"needle, {name}", n, len(made)))

        rows, calls = results.setdefault("needle", []), []
        if name == UNPATCHED:
            found = exact = ask()
        else:
            exact = [needle.Found(**c | {"top": tuple(c["top"])}) for c in rows[0]["cells"]]
            with applied(judge.model, trials[name]) as handle:
                found = ask()
            calls = handle.rows()
        row = {"name": name, **needle.summary(found, exact), "cells": [asdict(f) for f in found], "calls": calls}
        rows.append(row)

    work: Work = {f"quality of {name}": functools.partial(measure, name) for name in trials}
    if made:
        work |= {f"needle of {name}": functools.partial(search, name) for name in (UNPATCHED, *trials)}
    return work


def _picture_parts(judge: Judge, trials: dict[str, Policy]) -> Work:
    assert isinstance(judge, PictureJudge)
    table = judge.config.model.prompt_table is not None
    prompts = None if table else [str(prompt) for prompt, _ in judge.jobs]
    scores = PictureScores(judge.config.evaluate or EvaluateSpec(), prompts, judge.device)

    def measure(name: str, results: dict[str, Any]) -> None:
        measured, frames = judge.measure_drawn(name, trials[name])
        figures, reasons = scores.compare(frames, judge.drawn_exact())
        row = asdict(measured)
        row["metrics"] |= figures
        row["unavailable"] |= reasons
        _add(results, judge, _row(row, trials[name]))

    return {f"quality of {name}": functools.partial(measure, name) for name in trials}


def _row(row: dict[str, Any], policy: Policy) -> dict[str, Any]:
    """A measured row with its recipe, where a figure that is not a number is unavailable."""
    lost = [name for name, value in row["metrics"].items() if math.isnan(value)]
    figures = {name: value for name, value in row["metrics"].items() if name not in lost}
    reasons = row["unavailable"] | dict.fromkeys(lost, _NOT_FINITE)
    return row | {"recipe": policy.recipe, "metrics": figures, "unavailable": reasons}


def _add(results: dict[str, Any], judge: Judge, row: dict[str, Any]) -> None:
    """The unpatched model's row is of the process that measured the first one."""
    results.setdefault(UNPATCHED, judge.baseline_facts())
    results.setdefault("rows", []).append(row)


def _measure_sites(judge: Judge, policy: Policy, results: dict[str, Any]) -> None:
    """The error that every site makes by itself, under what the policy runs there, on unpatched inputs.

    On one window, or on the first, middle and last call of a picture. What a site inherits does not count: the inputs
    are those of the exact model. A site that runs exact has none.
    """
    row = next(r for r in results["rows"] if r["name"] == POLICY)
    quantized = {c["site"] for c in row["calls"] if c["recipe"] != "exact"}
    jobs = len(row["each"])
    calls = {site: sum(c["calls"] for c in row["calls"] if c["site"] == site) // jobs for site in quantized}
    plan, seen = judge.plan(policy), dict.fromkeys(quantized, 0)
    errors: dict[str, list[dict[str, Any]]] = {}

    def look(call: ops.ObservedCall) -> None:
        site = call.site.partition("/")[2]
        if site not in quantized:
            return
        number, total = seen[site], calls[site]
        seen[site] += 1
        if number not in (0, total // 2, total - 1):
            return
        judge.progress("errors of the sites", sum(seen.values()), sum(calls.values()))
        step = None if judge.num_steps is None else min(number * judge.num_steps // total, judge.num_steps - 1)
        recipe = plan.choice(site, step, judge.num_steps).recipe
        if recipe != "exact":
            errors.setdefault(site, []).append({"step": step, "recipe": recipe, **score(Captured("", call), recipe)})

    with ops.observe(look):
        judge.run_exact(1)
    rows: list[dict[str, Any]] = []
    for site in plan.sites:
        found = errors.get(site.name, [])
        worst = max(found, key=lambda e: e["relative_l1"], default={"step": None, "recipe": "exact"})
        rows.append({"site": site.name, **worst, "calls": found})
    results["sites"] = rows
    measured = [r for r in rows if "relative_l1" in r]
    results["worst_site"] = max(measured, key=lambda r: r["relative_l1"])["site"] if measured else None
