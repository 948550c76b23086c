"""From scores to recipes: what each rung costs on a card, which upgrade buys most, and the rules a person can read.

A choice gives every group (a site in a bucket of steps) a rung. The path starts with every group at its cheapest rung
and upgrades one group at a time, always the one whose local error falls most for what it costs, until all is exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sage_patch.backends import named
from sage_patch.cards import model as card_model
from sage_patch.cards import table as cards
from sage_patch.errors import SagePatchError
from sage_patch.evaluation.calibration.score import ALL, Bucket, Group
from sage_patch.kernels import ops
from sage_patch.policy import AttentionSite, Plan, Policy, Rule, Span
from sage_patch.recipes import LADDER, RECIPES, nearest

EXACT = "exact"
Choice = dict[tuple[str, str], str]  # (site, bucket) -> rung


class ChoiceError(SagePatchError, ValueError):
    """An unknown card, or a choice that cannot be written as rules."""


@dataclass(frozen=True)
class CostModel:
    """Attention time of each rung relative to exact attention on a card, pre-processing included. source: of what."""

    card: str
    relative: Mapping[str, float]
    source: str

    @property
    def ladder(self) -> tuple[str, ...]:
        """The rungs that pay on this card, cheapest first; one no faster than a more precise rung is left out."""
        kept: list[str] = []
        for rung in reversed(LADDER):
            if rung in self.relative and (not kept or self.relative[rung] < self.relative[kept[0]]):
                kept.insert(0, rung)
        return tuple(kept)


_SOURCES = {
    "hopper": "docs/results/kernels_h200.json: whole calls on one H200, median from 8,192 tokens up, against torch's "
    "SDPA",
    "ada": "speeds that SageAttention's authors publish for their kernels on an RTX 4090 (485, 423, 322 and, for "
    "FlashAttention-2, 164 TOPS; head_dim 128, 8,192 tokens, no mask), not measured here",
}
COST_MODELS = {
    card: CostModel(card, {name: r.cost[card] for name, r in reversed(RECIPES.items()) if card in r.cost}, source)
    for card, source in _SOURCES.items()
}


def cost_model(card: str, device: torch.device) -> CostModel:
    """The cost model of a card by name: one of COST_MODELS, or any card of the table (cards/), whose is predicted.

    "auto" is that of the GPU the model runs on, and "hopper", which is measured, on a CPU and on cards without a
    prediction. Raises ChoiceError for an unknown card.
    """
    if card == "auto":
        row = named(ops.backend_for(device))
        if row is not None and row.card:
            card = row.card
        elif device.type == "cuda" and row is not None:
            found = cards.find(torch.cuda.get_device_name(device))
            return (predicted(found) if found is not None else None) or COST_MODELS["hopper"]
        else:
            card = "hopper"
    if card in COST_MODELS:
        return COST_MODELS[card]
    found = cards.find(card)
    if found is None:
        raise ChoiceError(f"--card {card}: unknown{nearest(card, [*COST_MODELS, *(c.name for c in cards.cards())])}")
    model = COST_MODELS["hopper"] if found.capability == (9, 0) else predicted(found)
    if model is None:
        raise ChoiceError(
            f"--card {card}: no kernels run on a {found.name}, or nothing is predicted for it (sage-patch plan --card)"
        )
    return model


def predicted(card: cards.Card) -> CostModel | None:
    """By the card model, for head_dim 128 and 16,384 tokens; None for a card that it does not know. Recipes that gain
    nothing there stay off the ladder by their cost; INT4 is not predicted."""
    found = {name: card_model.gain(card, 128, recipe, 16384) for name, recipe in RECIPES.items()}
    relative = {name: round(1 / gain.likely, 3) for name, gain in reversed(found.items()) if gain is not None}
    if not relative:
        return None
    source = f"predicted for a {card.name} by sage_patch's card model, never timed on this card (docs/cards.md)"
    return CostModel(card.name, relative | {EXACT: 1.0}, source)


def cost(groups: Iterable[Group], choice: Choice, model: CostModel) -> float:
    """Attention time of a whole choice relative to exact attention, by each group's share of the work."""
    return sum(g.share * model.relative[choice[g.site, g.bucket]] for g in groups)


def error(groups: Iterable[Group], choice: Choice) -> float:
    """The sum of the groups' local errors: in proportion to the damage of the end metric if they are independent."""
    return sum(g.error(choice[g.site, g.bucket]) for g in groups)


def everywhere(groups: Iterable[Group], rung: str) -> Choice:
    """One rung for all groups that can run one."""
    return {(g.site, g.bucket): EXACT if g.exact_because else rung for g in groups}


def upgrade_path(groups: Sequence[Group], model: CostModel) -> list[Choice]:
    """Choices of rising cost, from every group at the cheapest rung to every group exact, one upgrade apart.

    The next upgrade is the one with the largest fall of the local error for its rise in cost; a group may skip a rung.
    """
    ladder = model.ladder
    choice = everywhere(groups, ladder[0])
    path = [dict(choice)]
    free = [g for g in groups if not g.exact_because]
    level = dict.fromkeys(choice, 0)
    while True:
        best = None
        for g in free:
            here = level[g.site, g.bucket]
            for higher in range(here + 1, len(ladder)):
                gained = g.error(ladder[here]) - g.error(ladder[higher])
                paid = g.share * (model.relative[ladder[higher]] - model.relative[ladder[here]])
                value = gained / max(paid, 1e-12)
                if best is None or value > best[0]:
                    best = value, (g.site, g.bucket), higher
        if best is None:
            return path
        _, key, level[key] = best
        choice[key] = ladder[level[key]]
        path.append(dict(choice))


def as_policy(
    choice: Choice,
    groups: Sequence[Group],
    sites: Sequence[AttentionSite],
    buckets: Sequence[Bucket],
    base: Policy,
    ladder: Sequence[str],
) -> Policy:
    """The policy that says a choice, in few rules: one for everything, then layers that differ, then steps that differ.

    base: gives everything but recipe and rules. Raises ChoiceError if the rules do not say what was chosen.
    """
    by_key = {(g.site, g.bucket): g for g in groups}
    middle = next(b for b in buckets if b.written is None).name
    usual = _most_work(choice, [g for g in groups if not g.exact_because and g.bucket == middle])
    families: dict[str, list[AttentionSite]] = {}
    for site in sites:
        families.setdefault(_family(site), []).append(site)

    rules = [_rule("*", None, None, usual, [g for k, g in by_key.items() if choice[k] == usual], ladder)]
    for bucket in sorted(buckets, key=lambda b: b.written is not None):
        steps = None if bucket.written is None else Span.parse(dict([bucket.written]))
        said = {s.name: usual if steps is None else choice[s.name, middle] for s in sites}
        wanted = {s.name: choice[s.name, bucket.name] for s in sites}
        alike = len(set(wanted.values())) == 1
        for glob, members in {"*": sites}.items() if alike else families.items():
            for rung in reversed(LADDER):
                changed = [s for s in members if wanted[s.name] == rung != said[s.name]]
                if changed:
                    layers = None if alike else _layers(changed, members)
                    covered = [by_key[s.name, bucket.name] for s in (members if alike else changed)]
                    rules.append(_rule(glob, layers, steps, rung, covered, ladder))
    policy = replace(base, recipe=usual, rules=tuple(rules), calibration=None)
    _check(policy, choice, sites, buckets)
    return policy


def _most_work(choice: Choice, groups: Sequence[Group]) -> str:
    """The rung with the most work; the policy's own recipe, so that most sites need no rule."""
    work = {rung: sum(g.share for g in groups if choice[g.site, g.bucket] == rung) for rung in LADDER}
    return max(work, key=lambda rung: work[rung])


def _family(site: AttentionSite) -> str:
    """A glob for the sites that differ in their block's number only: "model.layers.*.self_attn"."""
    if site.index is None:
        return site.name
    return re.sub(rf"^({re.escape(site.stack)}\.){site.index}(?=\.|$)", r"\g<1>*", site.name)


def _layers(changed: Sequence[AttentionSite], members: Sequence[AttentionSite]) -> Span | None:
    """The blocks of `changed` in the shortest form; None if they are the whole family."""
    if len(changed) == len(members):
        return None
    places = sorted(s.index for s in changed if s.index is not None)
    if len(places) > 1 and places[-1] - places[0] + 1 == len(places):
        return Span.parse(f"{places[0]}-{places[-1]}")
    return Span.parse(places if len(places) > 1 else places[0])


def _rule(
    match: str, layers: Span | None, steps: Span | None, rung: str, covered: Sequence[Group], ladder: Sequence[str]
) -> Rule:
    scores = [g.scores[rung] for g in covered if rung in g.scores]
    score = None
    if scores:
        worst = {n: (min if n in ("cosine", "quality") else max)(s[n] for s in scores) for n in scores[0]}
        score = {name: float(f"{value:.4g}") for name, value in worst.items()}
    return Rule(
        match=match, layers=layers, steps=steps, recipe=rung, reason=_reason(rung, covered, ladder), score=score
    )


def _reason(rung: str, covered: Sequence[Group], ladder: Sequence[str]) -> str:
    free = [g for g in covered if not g.exact_because]
    if not free:
        return "; ".join(dict.fromkeys(g.exact_because for g in covered))
    if rung == ladder[0]:
        errs = max((g.scores[rung]["rel_l1"] for g in free if rung in g.scores), default=0.0)
        return f"the cheapest rung errs by up to {errs:.2g} here (rel. L1), little enough for the target"
    cheaper = ladder[ladder.index(rung) - 1] if rung in ladder else ladder[0]
    worse = max(g.scores[cheaper]["rel_l1"] for g in free)
    now = max((g.scores[rung]["rel_l1"] for g in free if rung in g.scores), default=0.0)
    return f"{cheaper} would err by up to {worse:.2g} here (rel. L1), this rung by {now:.2g}"


def _check(policy: Policy, choice: Choice, sites: Sequence[AttentionSite], buckets: Sequence[Bucket]) -> None:
    """Rules are grouped by name and position: make sure that they say for every site what was chosen for it."""
    matches = {s.name: tuple(i for i, r in enumerate(policy.rules) if r.covers(s)) for s in sites}
    plan = Plan(policy, tuple(sites), matches=matches)
    total = sum(len(b.steps) for b in buckets)
    for bucket in buckets:
        for step in bucket.steps:
            for site in sites:
                at = (None, None) if bucket.name == ALL else (step, total)
                found, meant = plan.choice(site.name, *at).recipe, choice[site.name, bucket.name]
                if found != meant:
                    raise ChoiceError(
                        f"the rules say {found} for {site.name} at step {step}, and {meant} was chosen; please report "
                        "this with the plan of the model (sage-patch plan)"
                    )
