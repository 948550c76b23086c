"""Rules -> plan: which recipe runs at which attention site, at which denoising step.

Standard library only, so that a policy can be read, resolved and printed without torch.

A `Policy` is a default recipe and ordered rules; the last rule that matches a site wins. `resolve` checks the
whole policy against the sites of a model and gives a `Plan`; every error is found before anything changes.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Literal, get_args

from sage_patch.errors import SagePatchError
from sage_patch.names import grouped
from sage_patch.recipes import AUTO, ExactBackend, Limits, parse_recipe

Role = Literal["self", "cross", "joint"]
OnUnsupported = Literal["exact", "error"]

CALIBRATION_SCHEMA = 1  # of `Calibration` and of what its figures mean
MAX_VARIANTS = 3  # distinct plans over the steps of one request: each may cost a compiled model one recompile


class PolicyError(SagePatchError, ValueError):
    """A policy that does not fit the model. The message holds every error found, one a line."""


@dataclass(frozen=True)
class AttentionSite:
    """One place in a model where attention is computed.

    name: the module's name in the model ("model.layers.3.self_attn").
    stack: the block list it sits in ("model.layers"), "" if it sits in none; index: its block there, from 0;
    depth: the number of blocks there. Counts and head_dim are None where the module does not tell.
    """

    name: str
    stack: str = ""
    index: int | None = None
    depth: int | None = None
    role: Role = "self"
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None


@dataclass(frozen=True)
class Span:
    """A set of positions among `total` ones: layers of a stack or denoising steps of a request.

    Made by `Span.parse`; kind "list" holds positions, "range" the two inclusive ends, "first" and "last" a
    count or a fraction of the whole (rounded up). Negative positions count from the end.
    """

    kind: Literal["list", "range", "first", "last"]
    values: tuple[float, ...]

    @staticmethod
    def parse(value: object) -> Span:
        """The span behind its written form; ValueError says what is accepted.

        3, -1 | [0, 1, 2] | "0-3" (both included) | {first: 2} | {last: 0.1} | {from: 4, to: -1} (one may be
        left out)
        """
        if isinstance(value, Span):
            return value
        if _is_int(value):
            return Span("list", (value,))  # type: ignore[arg-type]
        if isinstance(value, (list, tuple)):
            if not value or not all(_is_int(v) for v in value):
                raise ValueError(f"a list must hold whole numbers; got {_show(value)}")
            return Span("list", tuple(value))
        if isinstance(value, str):
            ends = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", value)
            if not ends:
                raise ValueError(f'a text must be "a-b", both included; got {value!r}{_SPAN_HELP}')
            return _range(int(ends[1]), int(ends[2]))
        if isinstance(value, Mapping):
            return _parse_mapping(value)
        raise ValueError(f"cannot read {_show(value)}{_SPAN_HELP}")

    def contains(self, i: int, total: int | None) -> bool:
        """Is position i (from 0) of `total` in it? ValueError if the span counts from an unknown end."""
        if self.kind == "first":
            return i < self._count(total)
        if self.kind == "last":
            return i >= self._total(total) - self._count(total)
        places = [int(v) if v >= 0 else int(v) + self._total(total) for v in self.values]
        return places[0] <= i <= places[1] if self.kind == "range" else i in places

    def written(self) -> object:
        """The form that `Span.parse` reads: what a YAML file holds."""
        if self.kind == "list":
            return self.values[0] if len(self.values) == 1 else list(self.values)
        if self.kind == "range":
            first, last = self.values
            return f"{first}-{last}" if min(first, last) >= 0 else {"from": first, "to": last}
        return {self.kind: self.values[0]}

    def __str__(self) -> str:
        """The short form used in messages: "3", "0, 1, 5", "0-3", "4 to -1", "first 2", "last 10%"."""
        if self.kind == "list":
            return ", ".join(str(v) for v in self.values)
        if self.kind == "range":
            first, last = self.values
            return f"{first}-{last}" if min(first, last) >= 0 else f"{first} to {last}"
        size = self.values[0]
        return f"{self.kind} {size}" if isinstance(size, int) else f"{self.kind} {100 * size:.4g}%"

    def _count(self, total: int | None) -> int:
        size = self.values[0]
        # The slack keeps 0.07 of 100 at 7 although 0.07 * 100 > 7 in floating point.
        return size if isinstance(size, int) else math.ceil(size * self._total(total) - 1e-9)

    def _total(self, total: int | None) -> int:
        if total is None:
            raise ValueError(f'"{self}" counts from the end or from the whole, and the whole is not known')
        return total


@dataclass(frozen=True)
class Rule:
    """What changes at the sites that match all of `match`, `layers` and `role`, at the steps in `steps`.

    match: a glob on the site's whole name. layers: which blocks of the site's own block list; a site outside any block
    list does not match. layers and steps take a Span, or what `Span.parse` reads. recipe, on_unsupported: None leaves
    what was said before.
    reason: why, for people; it belongs to the rule's recipe. score: figures that a calibration measured.
    """

    match: str = "*"
    layers: Span | None = None
    role: Role | None = None
    steps: Span | None = None
    recipe: str | None = None
    on_unsupported: OnUnsupported | None = None
    reason: str | None = None
    score: Mapping[str, float] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        for name in ("layers", "steps"):
            value = getattr(self, name)
            if value is None or isinstance(value, Span):
                continue
            try:
                object.__setattr__(self, name, Span.parse(value))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None

    def covers(self, site: AttentionSite) -> bool:
        """Does the rule apply to the site at some step?"""
        if not fnmatch.fnmatchcase(site.name, self.match) or self.role not in (None, site.role):
            return False
        if self.layers is None:
            return True
        return site.index is not None and self.layers.contains(site.index, site.depth)

    def __str__(self) -> str:
        parts = [f'"{self.match}"']
        parts += [f"layers {self.layers}"] if self.layers else []
        parts += [f"role {self.role}"] if self.role else []
        parts += [f"steps {self.steps}"] if self.steps else []
        return f"({', '.join(parts)})"


@dataclass(frozen=True)
class Calibration:
    """What a calibrated policy was made for, and what it achieved there. A policy of another model is refused.

    model_hash: of `patch.model_hash`. targets: as they were asked for ("kl<=0.003"). achieved: the end metrics
    of the confirming run. cost: attention time relative to exact, predicted for `card`. setting: task, device, versions
    and whatever else says how it was measured, for people.
    """

    schema_version: int
    model_hash: str
    targets: tuple[str, ...]
    achieved: Mapping[str, float]
    cost: float
    card: str
    date: str
    command: str
    setting: Mapping[str, str]


@dataclass(frozen=True)
class Policy:
    """The recipe of every site: a default and rules, of which the last matching one wins.

    recipe: a name of `recipes.recipe_names()`, or a variant of one. on_unsupported: a call that the recipe
    cannot run goes "exact", counted with its reason, or is an "error". quantize_fp32: quantize float32 inputs
    too. min_q_len, min_kv_len: fewer query rows or keys go exact; None takes the values of `recipes.Limits`. With
    both None, calls that a card's measurements say are faster exact go exact too (reason "short"). exact_backend: what
    computes exact calls: "torch", bit for bit as in the unpatched model, or "fa3", FlashAttention-3 where it takes the
    call. calibration: which model the rules were measured on; a policy without one fits any model.
    """

    recipe: str = AUTO
    on_unsupported: OnUnsupported = "exact"
    quantize_fp32: bool = False
    min_q_len: int | None = None
    min_kv_len: int | None = None
    exact_backend: ExactBackend = "torch"
    rules: Sequence[Rule] = ()
    calibration: Calibration | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))

    @property
    def limits(self) -> Limits:
        """When a call is too short, or its inputs too precise, to be quantized."""
        given = {"min_q_len": self.min_q_len, "min_kv_len": self.min_kv_len}
        given = {k: v for k, v in given.items() if v is not None}
        return Limits(quantize_fp32=self.quantize_fp32, crossover=not given, **given)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Choice:
    """What a plan says about one site at one step.

    rule: the index in `Policy.rules` of the rule that gave the recipe, None for the policy's default.
    """

    recipe: str
    on_unsupported: OnUnsupported
    reason: str = ""
    rule: int | None = None


@dataclass(frozen=True)
class Variant:
    """The steps of a request, ascending, at which every site runs the same, and the choices by site name.

    The choices are those of the first step; only their rule and reason may differ at the others.
    """

    steps: tuple[int, ...]
    choices: Mapping[str, Choice] = field(hash=False)


@dataclass(frozen=True)
class Plan:
    """A policy resolved against the sites of one model. Made by `resolve`, which has checked it."""

    policy: Policy
    sites: tuple[AttentionSite, ...]
    has_steps: bool = False
    matches: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False, repr=False)  # site -> rules

    def choice(self, site_name: str, step: int | None = None, num_steps: int | None = None) -> Choice:
        """The choice at a site at a step (from 0) of `num_steps`; rules with steps need a step to match.

        KeyError for an unknown site; ValueError where a rule counts from the end and `num_steps` is None.
        """
        choice = Choice(self.policy.recipe, self.policy.on_unsupported)
        for i in self.matches[site_name]:
            rule = self.policy.rules[i]
            if rule.steps is None or (step is not None and rule.steps.contains(step, num_steps)):
                choice = _after(choice, rule, i)
        return choice

    def variants(self, num_steps: int) -> list[Variant]:
        """The distinct plans over a request of `num_steps` steps, in order of their first step.

        PolicyError if there are more than `MAX_VARIANTS`.
        """
        found: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for step in range(num_steps):
            choices = [self.choice(s.name, step, num_steps) for s in self.sites]
            found.setdefault(tuple((c.recipe, c.on_unsupported) for c in choices), []).append(step)
        if len(found) > MAX_VARIANTS:
            raise PolicyError(
                f"the rules give {len(found)} plans over {num_steps} steps; at most {MAX_VARIANTS} may be: "
                "each may recompile a compiled model, so let the rules share their step ranges"
            )
        return [
            Variant(tuple(steps), {s.name: self.choice(s.name, steps[0], num_steps) for s in self.sites})
            for steps in found.values()
        ]

    def rows(self) -> list[dict[str, object]]:
        """One row a site for tables: name, index, role, heads, kv_heads, head_dim, recipe, steps, reason.

        steps: the rules without which some steps would run another recipe ("first 2: exact"), "" if none. reason: that
        of the recipe, or, where it has none, those of the rules by step.
        """
        rows: list[dict[str, object]] = []
        felt: dict[tuple[int, ...], list[Rule]] = {}  # most sites share their rules with others
        for site in self.sites:
            base = self.choice(site.name)
            matching = self.matches[site.name]
            if matching not in felt:
                felt[matching] = _felt_rules([self.policy.rules[i] for i in matching], self.policy.recipe)
            stepped = felt[matching]
            rows.append(
                {
                    "name": site.name,
                    "index": site.index,
                    "role": site.role,
                    "heads": site.num_heads,
                    "kv_heads": site.num_kv_heads,
                    "head_dim": site.head_dim,
                    "recipe": base.recipe,
                    "steps": "; ".join(f"{r.steps}: {r.recipe}" for r in stepped),
                    "reason": base.reason or "; ".join(f"{r.steps}: {r.reason}" for r in stepped if r.reason),
                }
            )
        return rows

    def __str__(self) -> str:
        """One line for sites that differ in their number only: name, count, role, recipe, rules by step, reason."""
        rows, columns = self.rows(), ("role", "recipe", "steps", "reason")
        lines = [
            (names, f"x{count}", *(str(row[c]) for c in columns))
            for names, count, row in grouped(rows, lambda row: tuple(row[c] for c in columns))
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        cells = ("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
        return "\n".join([f"{len(rows)} attention sites, policy {self.policy.recipe}", *(f"  {c}" for c in cells)])


def resolve(policy: Policy, sites: Iterable[AttentionSite], has_steps: bool = False) -> Plan:
    """Check the policy against the sites of a model and bind the two.

    has_steps: the model denoises in steps, so rules may name them. Raises PolicyError with every error found:
    unknown recipes, rules that match no site, steps on a model without steps, rules that change nothing.
    """
    found = tuple(sites)
    problems = [_recipe_problem("the policy", policy.recipe)]
    if policy.exact_backend not in get_args(ExactBackend):
        known = " and ".join(map(repr, get_args(ExactBackend)))
        problems.append(f"the policy: exact_backend {policy.exact_backend!r} is none; there are {known}")
    for number, rule in enumerate(policy.rules, start=1):
        label = f"rule {number} {rule}"
        if rule.recipe is not None:
            problems.append(_recipe_problem(label, rule.recipe))
        elif rule.on_unsupported is None and rule.reason is None:
            problems.append(f"{label} changes nothing: give it a recipe, on_unsupported or a reason")
        if rule.steps is not None and not has_steps:
            problems.append(f"{label} names denoising steps, and this model has none")
        problems.append(_match_problem(label, rule, found))
    errors = [p for p in problems if p]
    if errors:
        raise PolicyError("\n".join(errors))
    matches = {s.name: tuple(i for i, r in enumerate(policy.rules) if r.covers(s)) for s in found}
    return Plan(policy, found, has_steps, matches)


def _after(choice: Choice, rule: Rule, index: int) -> Choice:
    """The choice once a later matching rule has spoken. A new recipe drops the reason of the old one."""
    return Choice(
        recipe=rule.recipe or choice.recipe,
        on_unsupported=rule.on_unsupported or choice.on_unsupported,
        reason=rule.reason or ("" if rule.recipe else choice.reason),
        rule=index if rule.recipe else choice.rule,
    )


def _felt_rules(rules: Sequence[Rule], default: str) -> list[Rule]:
    """Those rules by step without which some step of some request would run another recipe. Of rules that do the same
    the last is kept."""
    kept = [rule for rule in rules if rule.recipe]
    numbers = [int(v) for rule in kept if rule.steps for v in rule.steps.values]
    longest = 2 * max((abs(n) for n in numbers), default=0) + 2
    moments = [(step, total) for total in (1, 2, 3, 5, 10, 20, 50, longest) for step in _edges(kept, total)]

    def outcome(rules: Sequence[Rule]) -> list[str]:
        wins = [[r.recipe for r in rules if r.steps is None or r.steps.contains(*moment)] for moment in moments]
        return [recipes[-1] or default if recipes else default for recipes in wins]

    for rule in [rule for rule in kept if rule.steps]:
        others = [other for other in kept if other is not rule]
        if outcome(others) == outcome(kept):
            kept = others
    return [rule for rule in kept if rule.steps]


def _edges(rules: Sequence[Rule], total: int) -> list[int]:
    """The steps of a request of `total` steps at which some rule may begin or end to hold."""
    near: set[int] = {0, total - 1}
    for span in (rule.steps for rule in rules if rule.steps):
        ends = [int(v) if v >= 0 else int(v) + total for v in span.values]
        if span.kind in ("first", "last"):
            size = span._count(total)
            ends = [size, total - size]
        near.update(end + by for end in ends for by in (-1, 0, 1))
    return sorted(step for step in near if 0 <= step < total)


def _recipe_problem(where: str, recipe: str) -> str | None:
    try:
        parse_recipe(recipe)
    except ValueError as error:
        return f"{where}: {error}"
    return None


def _match_problem(label: str, rule: Rule, sites: Sequence[AttentionSite]) -> str | None:
    """Why the rule matches no site, with what would have matched, or None if it matches one."""
    if any(rule.covers(s) for s in sites):
        return None
    named = [s for s in sites if fnmatch.fnmatchcase(s.name, rule.match)]
    if not named:
        return f"{label} matched no site{_nearest_sites(rule.match, sites)}"
    roles = sorted({s.role for s in named})
    if rule.role is not None and rule.role not in roles:
        return f'{label} matched no site; the sites named "{rule.match}" have the role {", ".join(roles)}'
    stacks = sorted({f'"{s.stack}" has layers 0-{s.depth - 1}' for s in named if s.depth})
    return f"{label} matched no site; {', '.join(stacks) or 'the sites of that name are in no block list'}"


def _nearest_sites(glob: str, sites: Sequence[AttentionSite]) -> str:
    """`; nearest: "a", "b"`: the names that hold most of the glob's own letters, one a numbered family."""
    wanted = glob.strip("*.")[:200]

    def likeness(name: str) -> float:
        blocks = SequenceMatcher(None, wanted, name, autojunk=False).get_matching_blocks()
        return max((b.size for b in blocks), default=0) + sum(b.size for b in blocks) / 1000

    families: dict[str, str] = {}
    for site in sorted(sites, key=lambda s: -likeness(s.name)):
        families.setdefault(re.sub(r"\d+", "#", site.name), site.name)
    if not families:
        return "; the model has no attention sites"
    return "; nearest: " + ", ".join(f'"{name}"' for name in list(families.values())[:2])


_SPAN_HELP = '; write 3, [0, 1], "0-3", {first: 2}, {last: 0.1} or {from: 4, to: -1}'


def _parse_mapping(value: Mapping[object, object]) -> Span:
    keys = set(value)
    if keys in ({"first"}, {"last"}):
        kind, size = next(iter(value.items()))
        whole = _is_int(size) and size >= 1  # type: ignore[operator]
        part = isinstance(size, float) and 0 < size < 1
        if not (whole or part):
            raise ValueError(f"{kind} must be a count from 1 or a fraction between 0 and 1; got {_show(size)}")
        return Span(kind, (size,))  # type: ignore[arg-type]
    if keys and keys <= {"from", "to"}:
        first, last = value.get("from", 0), value.get("to", -1)
        if not (_is_int(first) and _is_int(last)):
            raise ValueError(f"from and to must be whole numbers; got {_show(first)} and {_show(last)}")
        return _range(first, last)  # type: ignore[arg-type]
    raise ValueError(f"unknown form {_show(dict(value))}{_SPAN_HELP}")


def _range(first: int, last: int) -> Span:
    if (first >= 0) == (last >= 0) and first > last:
        raise ValueError(f"the range {first} to {last} is empty; the first must not be after the last")
    return Span("range", (first, last))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: object) -> str:
    """A value as the YAML file would write it, as far as that is short."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_show(v)}" for k, v in value.items()) + "}"
    return repr(value)
