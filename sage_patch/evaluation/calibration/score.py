"""How well every rung of the ladder computes every attention site at every step: scored on the model's own tensors.

The model runs exact on a few real inputs. A call is scored where it stands and then dropped, so nothing of the run is
kept: memory is bounded by what one call needs, calls.MAX_WORK scores a matrix (32 MiB in float32) beside its K and V.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from sage_patch.evaluation.calls import compute, part_of, site_of
from sage_patch.evaluation.metrics import errors
from sage_patch.evaluation.steps import RunningStep, following
from sage_patch.kernels import ops
from sage_patch.patch import PatchError
from sage_patch.policy import Policy, Rule, Span
from sage_patch.recipes import Limits, Rotate, with_rotation

CALLS_PER_GROUP = 2  # of one input: with guidance, the two halves of a step
EDGE = 0.2  # share of the steps, rounded up, in the first and in the last bucket
ALL = "all"
_STEPS_PROBE = Policy(recipe="exact", rules=(Rule(steps=Span.parse({"first": 1}), recipe="exact", reason="probe"),))


@dataclass(frozen=True)
class Bucket:
    """Denoising steps that share their recipes. written: the span of a rule, None for steps that need no rule of their
    own. steps: the positions in this task's request."""

    name: str
    steps: tuple[int, ...]
    written: tuple[str, float] | None = None

    @property
    def middle(self) -> int:
        return self.steps[len(self.steps) // 2]


def buckets_of(num_steps: int | None) -> tuple[Bucket, ...]:
    """First, middle and last steps of a request, or all of them together where there are fewer than three.

    Three buckets give at most three distinct plans, which is what `policy.MAX_VARIANTS` allows.
    """
    if num_steps is None or num_steps < 3:
        return (Bucket(ALL, tuple(range(num_steps or 1))),)
    edge = -(-num_steps * int(100 * EDGE) // 100)
    steps = tuple(range(num_steps))
    return (
        Bucket("first", steps[:edge], ("first", EDGE)),
        Bucket("middle", steps[edge:-edge]),
        Bucket("last", steps[-edge:], ("last", EDGE)),
    )


def bucket_of(running: RunningStep, buckets: tuple[Bucket, ...]) -> Bucket:
    """The one of a task's buckets that the running step is in, as a rule's span has it: a request may have another
    length than the task says. Where no step is known, the last one."""
    if running.step is None or running.num_steps is None or len(buckets) == 1:
        return buckets[-1]
    own = buckets_of(running.num_steps)
    found = next(b for b in own if running.step in b.steps)
    return found if len(own) == len(buckets) else buckets[-1]


def buckets_for(judge: Any) -> tuple[tuple[Bucket, ...], str]:
    """The buckets of the task's steps, and why there is only one where steps cannot be told apart."""
    if not judge.has_steps:
        return buckets_of(None), "the model has no denoising steps"
    buckets = buckets_of(judge.num_steps)
    if len(buckets) == 1:
        return buckets, "fewer than three steps"
    problem = "" if getattr(judge.model, "scheduler", None) is not None else "the pipeline has no scheduler to follow"
    try:
        judge.plan(_STEPS_PROBE)
    except PatchError as error:  # the question is whether rules by step can be followed here
        problem = str(error)
    return (buckets, "") if not problem else ((Bucket(ALL, tuple(range(judge.num_steps or 1))),), problem)


@dataclass
class Group:
    """One site in one bucket of steps.

    share: of the attention work of the whole task, from 0 to 1. weight: share of the request's steps. scores: rung ->
    cosine, rel_l1, worst_row and quality = cosine * (1 - rel_l1), the worst of all scored calls. exact_because: why no
    rung can run here, "" if they can. sensitivity: how much more the end metric was measured to suffer from this group
    than its local error says.
    """

    site: str
    bucket: str
    weight: float
    share: float = 0.0
    calls: int = 0
    scored: int = 0
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    exact_because: str = ""
    sensitivity: float = 1.0

    def error(self, rung: str) -> float:
        """The local error's power, which adds up over sites and steps: relative L1 squared, times the steps' share."""
        power = self.scores[rung]["rel_l1"] ** 2 if rung in self.scores else 0.0
        return self.sensitivity * self.weight * power


def score_sites(
    judge: Any,
    rungs: tuple[str, ...],
    buckets: tuple[Bucket, ...],
    limits: Limits,
    inputs: int,
    tick: Callable,
    rotate: Rotate | None = None,
) -> list[Group]:
    """Every site in every bucket, in plan order, with its share of the work and the scores of every rung.

    judge: a `judge.Judge`. rungs: quantized recipes. limits: which calls are too short to be quantized. inputs: how
    many windows or pictures are run. rotate: of every rung. tick(calls seen) is called after every scored call.
    """
    names = [site.name for site in judge.plan(Policy(recipe="exact")).sites]
    total = sum(len(b.steps) for b in buckets)
    groups = {(n, b.name): Group(n, b.name, len(b.steps) / total) for n in names for b in buckets}
    work = dict.fromkeys(groups, 0.0)
    taken: Counter[tuple[str, str, int]] = Counter()
    long_enough: set[tuple[str, str]] = set()
    missed: set[tuple[str, str]] = set()  # of a second pass: groups without a call at the middle step of their bucket

    def observe(call: ops.ObservedCall) -> None:
        bucket = bucket_of(running, buckets)
        key = site_of(call), bucket.name
        if not missed:
            groups[key].calls += 1
            work[key] += _work(call)
        if call.query.shape[2] < limits.min_q_len or call.key.shape[2] < limits.min_kv_len:
            return
        long_enough.add(key)
        chosen = key in missed if missed else len(buckets) == 1 or running.step == bucket.middle
        sample = (*key, running.request)
        if chosen and taken[sample] < CALLS_PER_GROUP:
            taken[sample] += 1
            _score(groups[key], part_of(call), rungs, rotate)
            tick(len(taken))

    with following(judge.model) as running, ops.observe(observe), torch.no_grad():
        judge.run_exact(inputs)
        missed |= {key for key in long_enough if not groups[key].scored}  # such as one of two experts
        if missed:
            judge.run_exact(inputs)
    whole = sum(work.values()) or 1.0
    for key, group in groups.items():
        group.share = work[key] / whole
        if not group.scored:
            group.exact_because = "no call reached it" if not group.calls else _TOO_SHORT.format(limits)
    return list(groups.values())


_TOO_SHORT = "calls below {0.min_q_len} rows or {0.min_kv_len} keys"


def _score(group: Group, call: ops.ObservedCall, rungs: tuple[str, ...], rotate: Rotate | None) -> None:
    exact = compute(call, "exact")
    group.scored += 1
    for rung in rungs:
        found = errors(compute(call, with_rotation(rung, rotate)), exact)
        found["quality"] = found["cosine"] * (1 - found["rel_l1"])
        before = group.scores.get(rung, found)
        group.scores[rung] = {
            name: (min if name in ("cosine", "quality") else max)(value, before[name]) for name, value in found.items()
        }


def _work(call: ops.ObservedCall) -> float:
    """Multiplications of the two products; a causal call has half of them."""
    batch, heads, q_len, head_dim = call.query.shape
    work = float(batch * heads * q_len * call.key.shape[2] * (head_dim + call.value.shape[-1]))
    return work / 2 if call.right == 0 and q_len > 1 else work
