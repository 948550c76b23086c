"""How well every rung of the ladder computes every attention site at every step: scored on the model's own tensors.

The model runs exact on a few real inputs. A call is scored where it stands and then dropped, so nothing of the run is
kept: memory is bounded by what one call needs, MAX_WORK scores a matrix (32 MiB in float32) beside its K and V.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sage_patch.evaluation.ablation import attend
from sage_patch.evaluation.metrics import cosine, relative_l1, worst_row
from sage_patch.kernels import ops
from sage_patch.patch import PatchError
from sage_patch.policy import Policy, Rule, Span
from sage_patch.recipes import Limits

MAX_WORK = 1 << 23  # heads x query rows x keys that are scored of one call; of longer calls some rows and heads are
ROWS = 128  # query rows are taken in whole blocks of so many, because a block shares its smoothing
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

    def row(self) -> dict[str, Any]:
        """As results hold it."""
        return asdict(self)


def score_sites(
    judge: Any, rungs: tuple[str, ...], buckets: tuple[Bucket, ...], limits: Limits, inputs: int, tick: Callable
) -> list[Group]:
    """Every site in every bucket, in plan order, with its share of the work and the scores of every rung.

    judge: a `judge.Judge`. rungs: quantized recipes. limits: which calls are too short to be quantized. inputs: how
    many windows or pictures are run. tick(calls seen) is called after every scored call.
    """
    names = [site.name for site in judge.plan(Policy(recipe="exact")).sites]
    total = sum(len(b.steps) for b in buckets)
    groups = {(n, b.name): Group(n, b.name, len(b.steps) / total) for n in names for b in buckets}
    of_step = {step: bucket for bucket in buckets for step in bucket.steps}
    work = dict.fromkeys(groups, 0.0)
    steps = _Steps()
    taken: Counter[tuple[str, str, int]] = Counter()
    long_enough: set[tuple[str, str]] = set()
    missed: set[tuple[str, str]] = set()  # of a second pass: groups without a call at the middle step of their bucket

    def observe(call: ops.ObservedCall) -> None:
        bucket = of_step.get(steps.step, buckets[-1]) if len(buckets) > 1 else buckets[0]
        key = call.site.partition("/")[2], bucket.name
        if not missed:
            groups[key].calls += 1
            work[key] += _work(call)
        if call.query.shape[2] < limits.min_q_len or call.key.shape[2] < limits.min_kv_len:
            return
        long_enough.add(key)
        chosen = key in missed if missed else len(buckets) == 1 or steps.step == bucket.middle
        sample = (*key, steps.request)
        if chosen and taken[sample] < CALLS_PER_GROUP:
            taken[sample] += 1
            _score(groups[key], part_of(call), rungs)
            tick(len(taken))

    with _following(judge.model if judge.has_steps else None, steps), ops.observe(observe), torch.no_grad():
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


def part_of(call: ops.ObservedCall, max_work: int = MAX_WORK) -> ops.ObservedCall:
    """At most `max_work` scores of a call: its first batch item, whole blocks of query rows, then fewer heads.

    All keys stay, because smoothing and scales see them. Under a diagonal the rows next to its anchor are taken, which
    keeps it where it is; else the blocks are evenly spread.
    """
    heads, q_len, kv_heads, kv_len = *call.query.shape[1:3], *call.key.shape[1:3]
    groups = heads // kv_heads
    kept_kv = max(1, min(kv_heads, max_work // (groups * kv_len * min(q_len, 2 * ROWS))))
    blocks = max(1, max_work // (kept_kv * groups * kv_len * ROWS))
    kv = torch.arange(kept_kv) * kv_heads // kept_kv
    q = (kv[:, None] * groups + torch.arange(groups)).flatten()
    rows = _rows(q_len, blocks, call.left >= 0 or call.right >= 0, call.top_left)

    def picked(tensor: Tensor, chosen: Tensor, tokens: Tensor | None) -> Tensor:
        device = tensor.device
        tensor = tensor[:1] if tensor.shape[1] == 1 and len(chosen) > 1 else tensor[:1, chosen.to(device)]
        return tensor if tokens is None or tensor.shape[2] == 1 else tensor[:, :, tokens.to(device)]

    mask = None if call.attn_mask is None else picked(call.attn_mask, q, rows)
    query, key, value = picked(call.query, q, rows), picked(call.key, kv, None), picked(call.value, kv, None)
    return call._replace(query=query, key=key, value=value, attn_mask=mask)


def _rows(q_len: int, blocks: int, has_diagonal: bool, top_left: bool) -> Tensor:
    whole = -(-q_len // ROWS)
    if blocks >= whole:
        return torch.arange(q_len)
    if has_diagonal:
        return torch.arange(blocks * ROWS) if top_left else torch.arange(q_len - blocks * ROWS, q_len)
    chosen = torch.arange(blocks) * (q_len // ROWS) // blocks
    return (chosen[:, None] * ROWS + torch.arange(ROWS)).flatten()


def _score(group: Group, call: ops.ObservedCall, rungs: tuple[str, ...]) -> None:
    exact = attend(call, "exact")
    group.scored += 1
    for rung in rungs:
        got = attend(call, rung)
        found = {"cosine": cosine(got, exact), "rel_l1": relative_l1(got, exact), "worst_row": worst_row(got, exact)}
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


@dataclass
class _Steps:
    """Where the request stands: position of the running step, and how many requests have begun."""

    step: int = 0
    request: int = 0


@contextmanager
def _following(pipeline: Any, steps: _Steps) -> Iterator[None]:
    """Keep `steps` up to date from the scheduler of a pipeline, for as long as the block lasts."""
    scheduler = getattr(pipeline, "scheduler", None)
    if scheduler is None:
        yield
        return
    begin, advance, done = scheduler.set_timesteps, scheduler.step, 0

    @wraps(begin)
    def set_timesteps(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        done, steps.step = 0, 0
        steps.request += 1
        return begin(*args, **kwargs)

    @wraps(advance)
    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        done += 1
        steps.step = done // getattr(scheduler, "order", 1)
        return advance(*args, **kwargs)

    before = {name: vars(scheduler)[name] for name in ("set_timesteps", "step") if name in vars(scheduler)}
    vars(scheduler).update(set_timesteps=set_timesteps, step=step)
    try:
        yield
    finally:
        for name in ("set_timesteps", "step"):
            del vars(scheduler)[name]
        vars(scheduler).update(before)
