"""Find the cheapest policy that meets a target on the end metric, within a budget of time and full runs.

Scores of single sites say in which order to upgrade them, and how far it should be needed. What is written has always
been confirmed by a full run: the length of the upgrade list is bisected, led by the predictions.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sage_patch.errors import SagePatchError
from sage_patch.evaluation.calibration import choose
from sage_patch.evaluation.calibration.choose import EXACT, Choice, CostModel
from sage_patch.evaluation.calibration.score import Group, buckets_for, score_sites
from sage_patch.evaluation.calibration.state import NAME as STATE_NAME
from sage_patch.evaluation.calibration.state import State, choice_key, key_of, open_state
from sage_patch.evaluation.calibration.targets import Target, damage_ratio, exact_misses
from sage_patch.evaluation.calls import MAX_WORK
from sage_patch.evaluation.environment import environment, machine_name, record
from sage_patch.evaluation.judge import LADDER, Judge, Measured
from sage_patch.figures import FIGURES
from sage_patch.policy import CALIBRATION_SCHEMA, Calibration, Policy

__all__ = ["STATE_NAME", "CalibrationError", "Calibrated", "calibrate"]

INPUTS = 2  # windows or pictures that the sites are scored on
MAX_RUNS = 12  # full runs, those of the single rungs among them
MAX_PATHS = 4  # paths that are bisected, each with what the one before has shown
MIN_GAIN = 0.003  # of exact attention time: a smaller gain is worth no further run
_SLACK = 1.1  # of the longest run so far is what the next one is expected to take
_SAFETY = 0.9  # of the allowed damage is aimed at, because errors are not quite independent


class CalibrationError(SagePatchError, ValueError):
    """No policy can be written; the message says what was asked, how far it got and what to do."""


@dataclass(frozen=True)
class Calibrated:
    """A policy that met its targets in a full run, and everything that calibrate.json holds."""

    policy: Policy
    results: dict[str, Any]


@dataclass(frozen=True)
class _Trial:
    """One confirmed choice. k: its place on the path, None for a single rung everywhere."""

    run: Measured
    choice: Choice
    cost: float
    k: int | None
    met: bool
    ratio: float


def calibrate(
    judge: Judge,
    targets: tuple[Target, ...],
    base: Policy,
    model: CostModel,
    folder: Path,
    deadline: float,
    command: str,
) -> Calibrated:
    """The cheapest confirmed policy by the cost model.

    base: gives rotate, quantize_fp32 and the length limits; its recipe and rules are not used. folder: where the state
    is kept.
    deadline: on `time.monotonic()`'s clock; no run is begun that is not expected to end before it. Raises
    CalibrationError if a target cannot be met, nothing can be quantized, or time ran out before anything was confirmed;
    CheckpointError if the folder cannot be written.
    """
    return _Calibration(judge, targets, base, model, folder, deadline, command).run()


class _Calibration:
    def __init__(
        self, judge: Judge, targets: tuple[Target, ...], base: Policy, model: CostModel, folder: Path, deadline: float,
        command: str,
    ):  # fmt: skip
        self.judge, self.targets, self.model = judge, targets, model
        self.base = replace(base, recipe=EXACT, rules=(), calibration=None)
        self.deadline, self.command, self.started = deadline, command, time.monotonic()
        self.buckets, self.no_buckets = buckets_for(judge)
        self.hash = judge.model_hash
        self.state: State = open_state(folder, key_of(judge, self.base, self.buckets))
        self.trials: list[_Trial] = []
        self.full_runs = 0  # measured here, not taken from the state
        self.ended = ""
        self.groups: list[Group] = []

    def run(self) -> Calibrated:
        missed = exact_misses(self.targets)
        if missed is not None:
            exact = missed.shown(missed.figure.exact or 0.0)
            raise CalibrationError(f"target {missed.text!r} cannot be met: the unpatched model itself has {exact}")
        self._score()
        cheapest = self._cheapest()
        self._single_rungs(cheapest)
        path = self._search()
        met = [t for t in self.trials if t.met]
        if not met:
            raise CalibrationError(self._unreachable())
        best = min(met, key=self._order)
        policy = self._policy(best.choice)
        calibration = self._record(best)
        return Calibrated(replace(policy, calibration=calibration), self._results(best, policy, path))

    # What is measured, and what is taken from an earlier, interrupted calibration.

    def _score(self) -> None:
        if not self.state.groups:
            rungs = tuple(r for r in LADDER if r != EXACT)
            total = INPUTS * len(self.judge.plan(self.base).sites) * len(self.buckets)
            label = "scoring every rung at every site"
            self.judge.progress(label, 0, total)
            self.state.groups = score_sites(
                self.judge, rungs, self.buckets, self.base.limits, INPUTS,
                lambda done: self.judge.progress(label, min(done, total - 1), total), self.base.rotate,
            )  # fmt: skip
            self.state.save()
        self.groups = [replace(g) for g in self.state.groups]
        if all(g.exact_because for g in self.groups):
            raise CalibrationError(
                "nothing to calibrate: no attention call of this task can be quantized "
                f"({'; '.join(dict.fromkeys(g.exact_because for g in self.groups))}); take longer inputs, or lower "
                "policy.min_q_len and policy.min_kv_len"
            )

    def _try(self, name: str, choice: Choice, k: int | None) -> _Trial | None:
        """A full run of a choice, or None (and `ended`) where the budget does not hold another one."""
        key = choice_key(choice)
        tried = next((t for t in self.trials if choice_key(t.choice) == key), None)
        if tried is not None:
            return tried
        if key not in self.state.runs:
            if self.full_runs >= MAX_RUNS:
                self.ended = f"the {MAX_RUNS} full runs that a calibration may take are used up"
                return None
            if not self.state.baseline:
                begun = time.monotonic()
                facts = self.judge.baseline_facts()
                self.state.baseline = facts | {"took": time.monotonic() - begun}
            longest = max([self.state.baseline["took"], *(r.took for r in self.state.runs.values())])
            if time.monotonic() + _SLACK * longest > self.deadline:
                self.ended = "the budget of time is used up"
                return None
            self.full_runs += 1
            self.state.runs[key] = self._measure(name, choice)
            self.state.save()
        run = replace(self._with_speed(self.state.runs[key], choice), name=name)
        missing = [t for t in self.targets if not t.is_speed and math.isnan(t.value(run.metrics))]
        if missing:
            reason = run.unavailable.get(missing[0].figure.key, "it was not measured")
            raise CalibrationError(f"target {missing[0].text!r}: {missing[0].name} is unavailable here: {reason}")
        met = all(t.met_by(run.metrics) for t in self.targets)
        cost = choose.cost(self.groups, choice, self.model)
        trial = _Trial(run, choice, cost, k, met, damage_ratio(self.targets, run.metrics))
        self.trials.append(trial)
        return trial

    def _measure(self, name: str, choice: Choice) -> Measured:
        found = replace(self.judge.measure(name, self._policy(choice)), frames=[])
        quantized = any(row["recipe"] != EXACT for row in found.calls)
        if quantized and found.prompt_calls and all(row["recipe"] == EXACT for row in found.prompt_calls):
            found.metrics.pop("agreement", None)  # 1 by construction
            why = ", ".join(sorted({row["reason"] for row in found.prompt_calls}))
            found.unavailable["agreement"] = (
                f"every call of the continuations runs exact ({why}); give longer task.prompts"
            )
        return found

    def _with_speed(self, run: Measured, choice: Choice) -> Measured:
        """The run with its end-to-end speed: measured on a GPU; on a CPU, whose reference backend is slow by nature,
        predicted from the attention's share of the unpatched time."""
        if self.judge.device.type == "cuda":
            speed = run.baseline_seconds / run.seconds
        else:
            facts = self.state.baseline
            if not facts.get("attention_seconds"):
                if any(t.is_speed for t in self.targets):
                    raise CalibrationError("speed cannot be predicted: the time of the unpatched attention is unknown")
                return run
            share = min(1.0, facts["attention_seconds"] / facts["seconds"])
            speed = 1 / (1 - share + share * choose.cost(self.groups, choice, self.model))
        return replace(run, metrics=run.metrics | {"speed": speed})

    @property
    def speed_is(self) -> str:
        """How the metric `speed` of every run came to be."""
        if self.judge.device.type == "cuda":
            return "measured"
        return f"predicted for {self.model.card} from the attention's share of the unpatched time on this CPU"

    # The search.

    def _cheapest(self) -> _Trial:
        """All groups at the cheapest rung: the start of the path, and the run that shows which sites can quantize."""
        rung = self.model.ladder[0]
        trial = self._try(f"{rung} everywhere", choose.everywhere(self.groups, rung), 0)
        if trial is None:
            raise CalibrationError(self._out_of_budget())
        exact = trial.run.exact_sites
        for g in self.groups:
            if not g.exact_because and g.site in exact:
                g.exact_because = f"its calls ran exact ({exact[g.site]})"
        if all(g.exact_because for g in self.groups):
            reasons = ", ".join(dict.fromkeys(exact.values()))
            remedy = "".join(text for reason, text in _REMEDIES.items() if reason in exact.values())
            raise CalibrationError(f"nothing to calibrate: every attention call ran exact ({reasons}){remedy}")
        choice = choose.everywhere(self.groups, rung)  # sites that ran exact anyway are now called so
        if choice != trial.choice:
            self.state.runs[choice_key(choice)] = self.state.runs[choice_key(trial.choice)]
            cost = choose.cost(self.groups, choice, self.model)
            trial = replace(trial, choice=choice, cost=cost)
            self.trials = [trial]
        return trial

    @property
    def _asks_quality(self) -> bool:
        return any(not t.is_speed for t in self.targets)

    def _single_rungs(self, cheapest: _Trial) -> None:
        """Each dearer rung everywhere, until one meets the targets: what a calibration must beat, and its fallback."""
        if cheapest.met:
            return
        for rung in self.model.ladder[1:-1]:
            trial = self._try(f"{rung} everywhere", choose.everywhere(self.groups, rung), None)
            if trial is None or trial.met:
                return

    def _search(self) -> list[Choice]:
        """Bisect the path of upgrades; where the target hinged on one group, weigh it by that and bisect a new path."""
        for number in range(MAX_PATHS):
            path = choose.upgrade_path(self.groups, self.model)
            hinge = self._bisect(path, f", path {number + 1}" if number else "")
            if hinge is None or not self._reweigh(*hinge):
                break
        return path

    def _reweigh(self, below: _Trial, above: _Trial) -> bool:
        """Give the one group that tells two neighbours on the path apart the weight that their runs show, if that is
        more than twice what its local error said."""
        key = next(key for key in above.choice if above.choice[key] != below.choice[key])
        now = choose.error(self.groups, above.choice)
        expected = above.ratio * (choose.error(self.groups, below.choice) - now) / now if now else 0.0
        if not expected > 0 or below.ratio - above.ratio < 2 * expected:
            return False
        group = next(g for g in self.groups if (g.site, g.bucket) == key)
        group.sensitivity *= (below.ratio - above.ratio) / expected
        return True

    def _bisect(self, path: list[Choice], label: str) -> tuple[_Trial, _Trial] | None:
        """Shorten the bracket [lo, hi] on the path: lo is too cheap to meet the quality, hi too dear to be of use.
        Returns the runs at its two ends, where it ended between two neighbours that were both run."""
        runs = {0: self.trials[0]}
        costs = [choose.cost(self.groups, c, self.model) for c in path]
        errors = [choose.error(self.groups, c) for c in path]
        lo, hi = 0, len(path) - 1
        if self._asks_quality:
            best = min((t.cost for t in self.trials if t.met), default=math.inf)
            hi = next((k for k, c in enumerate(costs) if c >= best), hi)
        elif not self.trials[0].met:
            return None  # not even the cheapest choice is fast enough
        while hi - lo > 1 and costs[hi] - costs[lo] >= MIN_GAIN:
            k = self._next(errors, lo, hi) if self._asks_quality else (lo + hi) // 2
            trial = self._try(f"{k} of {len(path) - 1} upgrades{label}", path[k], k)
            if trial is None:
                return None
            runs[k] = trial
            good = trial.met if self._asks_quality else not trial.met
            fast = all(t.met_by(trial.run.metrics) for t in self.targets if t.is_speed)
            if good or (self._asks_quality and not fast):
                hi = k
            else:
                lo = k
        return (runs[lo], runs[hi]) if self._asks_quality and hi - lo == 1 and hi in runs else None

    def _next(self, errors: list[float], lo: int, hi: int) -> int:
        """The shortest part of the path that is predicted to meet the targets, kept off the ends of the bracket."""
        known = [(choose.error(self.groups, t.choice), t.ratio) for t in self.trials if t.ratio > 0]
        at, ratio = min(known, key=lambda point: abs(math.log(point[1])), default=(errors[lo], 1.0))
        wanted = _SAFETY * at / ratio
        k = next((k for k in range(lo + 1, hi) if errors[k] <= wanted), hi - 1)
        margin = max(1, (hi - lo) // 8)
        return min(max(k, lo + margin), hi - margin)

    def _order(self, trial: _Trial) -> tuple[float, float]:
        """Cheapest first; where only speed was asked for, the most precise first."""
        return (trial.cost, trial.ratio) if self._asks_quality else (-trial.cost, 0.0)

    # What is said.

    def _policy(self, choice: Choice) -> Policy:
        sites = self.judge.plan(self.base).sites
        return choose.as_policy(choice, self.groups, sites, self.buckets, self.base, self.model.ladder)

    def _tried(self) -> str:
        def shown(t: _Trial) -> str:
            return f"{t.run.name}: " + ", ".join(x.shown(x.value(t.run.metrics)) for x in self.targets)

        return "\n".join(f"  {shown(t)}" for t in sorted(self.trials, key=lambda t: t.cost))

    def _unreachable(self) -> str:
        asked = ", ".join(t.text for t in self.targets)
        ended = f" ({self.ended})" if self.ended else "; only exact attention is left" if self._asks_quality else ""
        return (
            f"{asked} was not reached with any attention quantized{ended}. Tried, cheapest first:\n{self._tried()}\n"
            f"Loosen the target; what was measured is kept in {self.state.path} and is used again"
        )

    def _out_of_budget(self) -> str:
        return (
            f"{self.ended} before any policy was measured; what was scored is kept in {self.state.path}: run the same "
            "command again to go on, or give it more with --budget-minutes"
        )

    def _record(self, best: _Trial) -> Calibration:
        key, device = self.state.key, str(self.judge.device)
        shown = [f.key for f in FIGURES if f.key != "speed" or any(t.is_speed for t in self.targets)]
        kept = {n: float(f"{v:.6g}") for n, v in best.run.metrics.items() if n in shown}
        task = key["task"]
        if self.judge.kind == "text":
            what = f"{task['windows']} windows of {task['window_tokens']} tokens, prompts: {len(task['prompts'])}"
        else:
            drawn = len(task["prompts"]) * len(task.get("seeds") or [0])
            what = f"{task['kind']}s: {drawn}, steps: {task['steps']}"
        return Calibration(
            schema_version=CALIBRATION_SCHEMA, model_hash=self.hash, targets=tuple(t.text for t in self.targets),
            achieved=kept, cost=float(f"{best.cost:.4g}"), card=self.model.card,
            date=datetime.now(UTC).date().isoformat(), command=self.command,
            setting={"model": self.judge.facts()["class"], "dtype": self.judge.facts()["dtype"], "task": what,
                     "device": f"{device}, {machine_name(environment(), device)}"}
            | ({"speed": self.speed_is} if "speed" in kept else {}) | key["versions"],
        )  # fmt: skip

    def _results(self, best: _Trial, policy: Policy, path: list[Choice]) -> dict[str, Any]:
        single = [t for t in self.trials if t.run.name.endswith(" everywhere") and t.met]
        best_single = min(single, key=lambda t: t.cost, default=None)
        below = {g.site for g in self.groups if best.choice[g.site, g.bucket] != EXACT}
        plan = self.judge.plan(policy)
        return record(self.command, self.judge.config) | {
            "kind": "calibrate",
            "task": self.judge.kind,
            "model": self.judge.facts() | {"hash": self.hash},
            "targets": [{"target": t.text, "value": t.value(best.run.metrics), "met": True} for t in self.targets],
            "cost_model": {"card": self.model.card, "relative": dict(self.model.relative), "source": self.model.source},
            "ladder": list(self.model.ladder),
            "scoring": {"inputs": INPUTS, "max_scores_of_a_call": MAX_WORK, "no_step_buckets": self.no_buckets},
            "buckets": [{"name": b.name, "steps": list(b.steps)} for b in self.buckets],
            "groups": [asdict(g) | {"recipe": best.choice[g.site, g.bucket]} for g in self.groups],
            "path": [
                {"upgrades": k, "cost": choose.cost(self.groups, c, self.model), "error": choose.error(self.groups, c)}
                for k, c in enumerate(path)
            ],
            "runs": [
                {"name": t.run.name, "upgrades": t.k, "cost": t.cost, "error": choose.error(self.groups, t.choice),
                 "met": t.met, "metrics": t.run.metrics, "seconds": t.run.seconds,
                 "attention_seconds": t.run.attention_seconds, "unavailable": t.run.unavailable}
                for t in self.trials
            ],
            "chosen": {"name": best.run.name, "cost": best.cost, "metrics": best.run.metrics,
                       "sites_below_exact": len(below), "sites": len(plan.sites), "each": best.run.each},
            "best_single_rung": None if best_single is None
            else {"name": best_single.run.name, "cost": best_single.cost, "metrics": best_single.run.metrics},
            "plan": plan.rows(),
            "speed": self.speed_is,
            "ended": self.ended,
            "unpatched": self.state.baseline,
            "reused": {"runs": self.state.reused, "seconds": self.state.reused_seconds},
            "seconds": time.monotonic() - self.started,
        }  # fmt: skip


_REMEDIES = {
    "dtype_float32": "; set policy.quantize_fp32: true",
    "short": "; take longer inputs, or set policy.min_kv_len, which overrules the card's break-even lengths",
}
