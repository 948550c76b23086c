"""`sage-patch evaluate`: what a policy costs in quality and what it takes in time, against the unpatched model.

Made of parts: one for the policy and one for each recipe of `compare`, for language models the needle test of each, and
the error of every site by itself. A finished part is written at once. `run.py` has the same results with fewer parts.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sage_patch.evaluation import needle
from sage_patch.evaluation.calls import score, site_of
from sage_patch.evaluation.checkpoint import Checkpoint
from sage_patch.evaluation.environment import record
from sage_patch.evaluation.judge import POLICY, UNPATCHED, Judge, Measured, PictureJudge, Progress, TextJudge, judge_for
from sage_patch.evaluation.picture_metrics import PictureScores
from sage_patch.evaluation.steps import following
from sage_patch.figures import BY_BOUND
from sage_patch.kernels import ops
from sage_patch.patch import applied
from sage_patch.policy import Policy
from sage_patch.schema import EvaluateSpec, RunConfig

Results = dict[str, Any]
Work = dict[str, Callable[[Results], None]]  # parts by name: each adds to the results that it is given


def evaluate(
    config: RunConfig,
    command: str,
    folder: Path,
    progress: Progress,
    say: Callable[[str], None],
    fresh: bool = False,
) -> Results:
    """Run what is not in the folder's results.json yet, and return all that it holds.

    say: told once what was found in the folder. fresh: measure anew whatever is there. Raises ModelError, PatchError or
    OwnAttentionError if the model does not fit, PolicyError if the policy does not, CheckpointError on a full disk.
    """
    judge = judge_for(config, progress)
    trials = trials_of(config, judge)
    work = _text_parts(judge, trials) if isinstance(judge, TextJudge) else _picture_parts(judge, trials)
    work["sites"] = functools.partial(_measure_sites, judge, trials[POLICY])

    results = begin("evaluate", config, command, judge)
    identity = {
        "schema": results["schema"],
        "configuration": {k: v for k, v in results["config"].items() if k not in ("output", "targets")},
        "model": judge.model_hash,
        "set of versions": results["environment"]["packages"],
    }
    checkpoint = Checkpoint(folder / "results.json", identity, fresh)
    old = checkpoint.found
    if old:
        done = f"holds {len(old['parts'])} finished parts of this run ({', '.join(old['parts'])}): continuing"
        done = "is complete: nothing is measured again (--fresh measures anew)" if old["complete"] else done
        say(f"{checkpoint.path} {done}")
        measured = {key: value for key, value in old.items() if key not in results}
        results = old if old["complete"] else results | measured | {"resumed": old["resumed"] + 1}
    elif checkpoint.note:
        say(checkpoint.note)
    results = Results(complete=False, parts=[], resumed=0, seconds=0.0) | results
    for name, part in work.items():
        if name not in results["parts"]:
            start, kept = time.monotonic(), f", with {len(results['parts'])} finished parts"
            part(results)
            results["parts"].append(name)
            results["seconds"] += time.monotonic() - start
            checkpoint.write(results, kept)
    results |= check_targets(config, results["rows"]) | {"complete": True}
    checkpoint.write(results)
    return results


def trials_of(config: RunConfig, judge: Judge) -> dict[str, Policy]:
    """The configuration's policy and the recipes of `compare`, each at every site. Raises PolicyError."""
    policy = config.policy.build()
    trials = {POLICY: policy}
    trials |= {name: replace(policy, recipe=name, rules=(), calibration=None) for name in config.compare}
    for trial in trials.values():
        judge.plan(trial)  # an error here costs no computation
    return trials


def begin(what: str, config: RunConfig, command: str, judge: Judge) -> Results:
    """What is known before anything is measured."""
    facts = {"what": what, "kind": judge.kind, "model": judge.facts() | {"hash": judge.model_hash}}
    return record(command, config) | facts | {"plan": judge.plan(config.policy.build()).rows()}


def add_row(results: Results, judge: Judge, measured: Measured) -> None:
    """The unpatched model's row is of the process that measured the first one."""
    if UNPATCHED not in results:
        results[UNPATCHED] = judge.baseline_facts()
    if isinstance(judge, PictureJudge):
        results["pictures"] = [
            {"prompt": prompt, "seed": seed, "frames": len(frames), "size": list(frames.shape[-2:])}
            for (prompt, seed), frames in zip(judge.jobs, judge.frames, strict=True)
        ]
    results.setdefault("rows", []).append(measured.row())


def check_targets(config: RunConfig, rows: list[Results]) -> Results:
    """The configuration's bounds against measured rows: one row a bound in `targets`, and whether all are met.

    value is what was measured, or as text why it was not; that meets nothing, and neither does NaN.
    """
    found = {row["name"]: row for row in rows}
    targets = []
    for name, target in config.targets.items():
        for key, bound in target.model_dump(exclude_none=True).items():
            figure, row = BY_BOUND[key], found[name]
            value: float | str | None = row["unavailable"].get(figure.key) or row["metrics"][figure.key]
            value = math.inf if value is None else value  # JSON has no infinity: equal pictures have a null there
            met = not isinstance(value, str) and figure.keeps(value, bound)
            what = f"{figure.name} {'>=' if figure.more else '<='}"
            targets.append({"name": name, "what": what, "bound": bound, "value": value, "met": met})
    return {"targets": targets, "passed": all(t["met"] for t in targets)}


def _text_parts(judge: TextJudge, trials: dict[str, Policy]) -> Work:
    spec, task = judge.config.evaluate or EvaluateSpec(), judge.task
    longest = getattr(judge.model.config, "max_position_embeddings", None)
    text = Path(task.text).read_text(encoding="utf-8")
    made = needle.needles(judge.tokenizer, text, spec.needle_lengths, spec.needle_depths, judge.config.seed, longest)

    def measure(name: str, results: Results) -> None:
        add_row(results, judge, judge.measure(name, trials[name]))

    def search(name: str, results: Results) -> None:
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

    def measure(name: str, results: Results) -> None:
        found = judge.measure(name, trials[name])
        figures, reasons = scores.compare(found.frames, judge.frames)
        scored = replace(found, metrics=found.metrics | figures, unavailable=found.unavailable | reasons)
        add_row(results, judge, scored)

    return {f"quality of {name}": functools.partial(measure, name) for name in trials}


def _measure_sites(judge: Judge, policy: Policy, results: Results) -> None:
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
        site = site_of(call)
        if site not in quantized:
            return
        number, total = seen[site], calls[site]
        seen[site] += 1
        if number not in (0, total // 2, total - 1):
            return
        judge.progress("errors of the sites", sum(seen.values()), sum(calls.values()))
        recipe = plan.choice(site, running.step, running.num_steps).recipe
        if recipe != "exact":
            errors.setdefault(site, []).append({"step": running.step, "recipe": recipe, **score(call, recipe)})

    with following(judge.model) as running, ops.observe(look):
        judge.run_exact(1)
    rows: list[dict[str, Any]] = []
    for site in plan.sites:
        found = errors.get(site.name, [])
        worst = max(found, key=lambda e: e["rel_l1"], default={"step": None, "recipe": "exact"})
        rows.append({"site": site.name, **worst, "calls": found})
    results["sites"] = rows
    measured = [r for r in rows if "rel_l1" in r]
    results["worst_site"] = max(measured, key=lambda r: r["rel_l1"])["site"] if measured else None
