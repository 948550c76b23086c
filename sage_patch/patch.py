"""apply, applied, plan and Handle: the only file that changes a model.

What apply() changes, all of it on the model itself and all of it put back by revert():
  1. transformers: every configuration object that the model's modules hold is replaced by a copy whose attention
     implementation is "sage2" (a copy, because other models may share the original);
  2. elsewhere: every object whose own code attends, a module or its processor, gets a subclass of its own class;
  3. every attention site gets one private attribute, its tag;
  4. if the policy has rules by denoising step, the pipeline's scheduler gets a subclass of its own class.
No class, function or registry default of another package is replaced; names, parameters and state-dict keys stay.
All checks come first: an error leaves the model as it was.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from sage_patch.fingerprint import hash_of, why_stale
from sage_patch.integrations.configurations import config_copies, mask_styles
from sage_patch.integrations.diffusers import denoisers
from sage_patch.integrations.intercept import carriers_of, is_patched, patch, unpatch
from sage_patch.integrations.sites import Site, find_sites, tagged_modules, unwrapped
from sage_patch.integrations.source import MaskStyle
from sage_patch.integrations.steps import StepClock, StepSwitch, scheduler_problem, stepped_sites
from sage_patch.integrations.tags import TAG, SiteTag
from sage_patch.integrations.transformers import OwnAttentionError, register
from sage_patch.integrations.unreached import Unreached, unreached_modules
from sage_patch.kernels import ops
from sage_patch.policy import Plan, Policy, PolicyError, resolve
from sage_patch.recipes import parse_recipe

_HANDLE_NUMBERS = itertools.count(1)


class PatchError(ValueError):
    """The model cannot be patched as asked; nothing was changed."""


class Handle:
    """A patched model's way back, and its report.

    plan: what was decided for every site. The handle belongs to the model it was made for; deep copies of that
    model keep their plan but are not counted or reverted by it.
    """

    def __init__(self, plan: Plan, token: str, unreached: list[Unreached]):
        self.plan = plan
        self._token = token
        self._unreached = unreached
        self._configs: list[tuple[nn.Module, str, Any]] = []
        self._carriers: list[Any] = []
        self._tagged: list[nn.Module] = []
        self._switch: StepSwitch | None = None
        self._clock: StepClock | None = None
        self._final_counts: dict[ops.CallKey, int] | None = None

    @property
    def active(self) -> bool:
        """False once reverted."""
        return self._final_counts is None

    def stats(self) -> list[dict[str, Any]]:
        """Calls since apply(): one row per (site, recipe, backend, reason), sites in plan order.

        Calls from inside compiled graphs are counted for the whole model, under the site "*".
        """
        counts = self._final_counts if self._final_counts is not None else ops.counts(self._token)
        order = {site.name: i for i, site in enumerate(self.plan.sites)}
        rows = [
            {
                "site": key.site.removeprefix(self._token),
                "recipe": key.recipe,
                "backend": key.backend,
                "reason": key.reason,
                "calls": calls,
            }
            for key, calls in counts.items()
        ]
        return sorted(rows, key=lambda r: (order.get(r["site"], -1), r["recipe"], r["reason"]))

    def report(self) -> str:
        """What ran where: every site with its recipe, calls, and the reason of each exact call; plain text."""
        rows = self.stats()
        total = sum(r["calls"] for r in rows)
        quantized = sum(r["calls"] for r in rows if r["recipe"] != "exact")
        lines = [f"{len(self.plan.sites)} attention sites patched; {total} calls, {quantized} quantized"]
        if total == 0:
            lines.append("patched but unused: no call has reached a patched site yet")
        if any(r["backend"] == "reference" for r in rows):
            lines.append(
                "quantized calls ran on the reference backend (plain PyTorch): same numerics, slower than unpatched"
            )
        by_site: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_site.setdefault(row["site"], []).append(row)
        names = [s.name for s in self.plan.sites] + (["*"] if "*" in by_site else [])
        width = max(len(n) for n in names)
        steps = {row["name"]: f" [{row['steps']}]" for row in self.plan.rows() if row["steps"]}
        for name in names:
            parts = [
                f"{r['recipe']} x{r['calls']}" + (f" ({r['reason']})" if r["reason"] else "")
                for r in by_site.get(name, [])
            ]
            planned = self.plan.choice(name).recipe if name != "*" else "inside compiled graphs"
            planned += steps.get(name, "")
            lines.append(f"  {name:<{width}}  {planned}: {', '.join(parts) if parts else 'no calls'}")
        if self.active and self._clock is not None and not self._clock.in_place:
            lines.append(
                "  the pipeline's scheduler was replaced after apply(): rules by step need revert() and apply()"
            )
        lines += [f"  {name}: its processor was replaced after apply(); apply again" for name in self._replaced()]
        lines += [f"  {unreached}" for unreached in self._unreached]
        return "\n".join(lines)

    def _replaced(self) -> list[str]:
        """Sites of an active patch whose processor object is no longer the one that was patched."""
        if not self.active:
            return []
        return [
            module.__dict__[TAG].key.removeprefix(self._token)
            for module in self._tagged
            if hasattr(module, "processor") and not is_patched(module.processor)
        ]

    def step(self, step: int, num_steps: int) -> None:
        """Say which denoising step comes next in a loop of your own: `step` of `num_steps`, from 0.

        It holds until the next call, or until the scheduler of a patched pipeline begins a request. A policy without
        rules by step takes it and changes nothing. Raises PolicyError if the rules give too many plans for
        `num_steps`, ValueError for a step outside of the request, PatchError after revert().
        """
        if not self.active:
            raise PatchError("the patch was reverted; apply it again before handle.step()")
        if not 0 <= step < num_steps:
            raise ValueError(f"step must be from 0 to num_steps - 1; got step {step} of {num_steps}")
        if self._switch is not None:
            self._switch.enter(step, num_steps)
        if self._clock is not None:
            self._clock.ignore_request()

    def revert(self) -> None:
        """Put back exactly what was there. Safe to call again. Counts so far stay readable."""
        if not self.active:
            return
        if self._clock is not None:
            self._clock.detach()
        for module in self._tagged:
            module.__dict__.pop(TAG, None)
        for module, attribute, original in self._configs:
            module.__dict__[attribute] = original
        for carrier in [*self._carriers, *(c for module in self._tagged for c in carriers_of(module))]:
            unpatch(carrier)  # also those that diffusers made anew from a patched one's class
        self._final_counts = ops.counts(self._token)
        ops.reset_counts(self._token)

    def __repr__(self) -> str:
        state = "active" if self.active else "reverted"
        return f"<sage_patch.Handle: {len(self.plan.sites)} sites, {state}>"


def apply(model: Any, policy: Policy | None = None) -> Handle:
    """Patch a model in place so that its attention runs under `policy`.

    model: a transformers model, a diffusers transformer or UNet, or a diffusers pipeline, of which the denoising
    models are patched. Everything is checked before anything changes. Raises PatchError if the model is compiled,
    already patched or has nothing to patch, OwnAttentionError if it attends in its own code, PolicyError if the policy
    does not fit or was calibrated on another model, and kernels.build.BuildError if the model is on a GPU whose kernels
    can neither be found nor compiled.
    """
    found = _inspect(model)
    policy = policy if policy is not None else Policy()
    plan = _resolve(model, policy, found)
    for device in {parameter.device for root in found.roots for parameter in root.parameters()}:
        ops.prepare(device)  # a missing compiler or library is found here, with the model untouched
    token = f"h{next(_HANDLE_NUMBERS)}/"
    handle = Handle(plan, token, found.unreached)
    styles = mask_styles([(s.site, s.module) for s in found.routed]) if found.routed else {}
    replacements = [r for root in found.roots for r in config_copies(root, styles)] if found.routed else []
    tags = [(s.module, _tag(s, plan, policy, token, styles)) for s in found.sites]

    if found.routed:
        register()
    for module, attribute, original, replacement in replacements:
        module.__dict__[attribute] = replacement
        handle._configs.append((module, attribute, original))
    for carrier in (c for s in found.sites for c in s.carriers):
        if not is_patched(carrier):  # one processor may serve several sites
            patch(carrier)
            handle._carriers.append(carrier)
    for module, tag in tags:
        module.__dict__[TAG] = tag
        handle._tagged.append(module)
    _follow_steps(model, handle, {s.name: (s.module, s.module.__dict__[TAG]) for s in found.sites})
    return handle


@contextlib.contextmanager
def applied(model: Any, policy: Policy | None = None) -> Iterator[Handle]:
    """apply() for the length of a with-block; reverts on exit, exceptions included."""
    handle = apply(model, policy)
    try:
        yield handle
    finally:
        handle.revert()


def plan(model: Any, policy: Policy | None = None) -> Plan:
    """What apply() would decide, without changing the model; works on meta-device weights. Raises as apply()."""
    return _resolve(model, policy if policy is not None else Policy(), _inspect(model))


def model_hash(model: Any) -> str:
    """The hash by which a calibrated policy knows its model or pipeline. Raises as apply()."""
    return hash_of(_inspect(model).parts)


def stats() -> list[dict[str, Any]]:
    """Calls of models that use attn_implementation="sage2" without apply(), and of direct sage_attention calls."""
    rows = []
    for key, calls in ops.counts().items():
        owner, _, name = key.site.rpartition("/") if key.site else ("", "", "sage_attention")
        if owner in ("", "flag", "copy"):
            rows.append(
                {
                    "site": name,
                    "recipe": key.recipe,
                    "backend": key.backend,
                    "reason": key.reason,
                    "calls": calls,
                }
            )
    return rows


@dataclass(frozen=True)
class _Found:
    """What _inspect saw. parts: what gets patched, by the prefix of its sites' names."""

    parts: dict[str, nn.Module]
    sites: list[Site]
    unreached: list[Unreached]

    @property
    def roots(self) -> list[nn.Module]:
        return list(self.parts.values())

    @property
    def routed(self) -> list[Site]:
        return [site for site in self.sites if site.is_routed]


def _inspect(model: Any) -> _Found:
    """The sites of a model or pipeline; raises if it must not be patched."""
    parts = {f"{n}.": m for n, m in denoisers(model).items()}
    if not parts:
        if not isinstance(model, nn.Module):
            raise PatchError(f"apply() takes a torch.nn.Module or a diffusers pipeline; got {type(model).__name__}")
        parts = {"": model}
    sites, unreached = [], []
    for prefix, root in parts.items():
        if hasattr(root, "_orig_mod"):
            raise PatchError("the model is already compiled: apply sage_patch first, then torch.compile(model)")
        tagged = [name for name, _ in tagged_modules(root)]
        if tagged:
            raise PatchError(
                f"{type(root).__name__} is already patched ({len(tagged)} sites, first {tagged[0]!r}); "
                "call revert() on its handle first"
            )
        inner = unwrapped(root)
        here = find_sites(inner, prefix)
        sites += here
        unreached += unreached_modules(inner, here, prefix)
    if not sites:
        name = type(model).__name__
        if unreached:
            first = unreached[0]
            where = f"{first.class_name} at {first.name!r}" + (f": {first.why}" if first.calls else "")
            raise OwnAttentionError(
                f"{name} computes attention in its own code ({where}), "
                "which sage_patch does not reach; the model is unchanged"
            )
        raise PatchError(f"{name} has no attention site that sage_patch knows; nothing to patch")
    return _Found(parts, sites, unreached)


def _resolve(model: Any, policy: Policy, found: _Found) -> Plan:
    """The checked plan. PolicyError if the policy was calibrated on another model, PatchError if it has rules by step
    and the pipeline's scheduler cannot be followed."""
    stale = why_stale(policy.calibration, found.parts) if policy.calibration is not None else None
    if stale:
        raise PolicyError(stale)
    plan = resolve(policy, [s.site for s in found.sites], has_steps=not found.routed)
    scheduler = _scheduler_of(model)
    problem = scheduler_problem(model, scheduler) if scheduler is not None and stepped_sites(plan) else None
    if problem:
        raise PatchError(f"the policy has rules by denoising step, which cannot be followed here: {problem}")
    return plan


def _scheduler_of(model: Any) -> Any:
    """The scheduler of a pipeline, or None: then only handle.step tells the denoising step."""
    return model.components.get("scheduler") if denoisers(model) else None


def _follow_steps(model: Any, handle: Handle, tagged: dict[str, tuple[nn.Module, SiteTag]]) -> None:
    """Where sites have rules by step: refuse their calls until a step is known, and learn it from the scheduler."""
    stepped = stepped_sites(handle.plan)
    if not stepped:
        return
    handle._switch = StepSwitch(handle.plan, [(name, *tagged[name]) for name in stepped])
    handle._switch.leave()
    scheduler = _scheduler_of(model)
    if scheduler is not None:
        handle._clock = StepClock(model, scheduler, handle._switch)
        handle._clock.attach()


def _tag(site: Site, plan: Plan, policy: Policy, token: str, styles: dict[int, MaskStyle]) -> SiteTag:
    choice = plan.choice(site.name)
    config = getattr(site.module, "config", None)
    return SiteTag(
        key=token + site.name,
        group=token + "*",
        recipe=parse_recipe(choice.recipe),
        on_unsupported=choice.on_unsupported,
        limits=policy.limits,
        original=getattr(config, "_attn_implementation", None) or "",
        style=styles.get(id(config), "implicit"),
    )
