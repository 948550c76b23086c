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
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sage_patch.cards import table as cards
from sage_patch.extras import needed_for
from sage_patch.fingerprint import hash_of, why_stale
from sage_patch.handle import LOCK, Handle, PatchError, row_of, summary
from sage_patch.integrations.configurations import config_copies, give_names_back, mask_styles
from sage_patch.integrations.diffusers import denoisers, scheduler_for
from sage_patch.integrations.intercept import carriers_of, is_patched, patch, unpatch
from sage_patch.integrations.sites import Site, find_sites, tagged_modules, unwrapped
from sage_patch.integrations.source import MaskStyle, is_routed
from sage_patch.integrations.steps import StepClock, StepSwitch, scheduler_problem, stepped_sites
from sage_patch.integrations.tags import TAG, SiteTag
from sage_patch.integrations.transformers import OwnAttentionError, register
from sage_patch.integrations.unreached import Unreached, unreached_modules
from sage_patch.kernels import fa3, ops
from sage_patch.policy import Plan, Policy, PolicyError, resolve
from sage_patch.recipes import ExactBackend, parse_recipe, recipe_names

_HANDLE_NUMBERS = itertools.count(1)
Given = Policy | str | os.PathLike | Mapping[str, Any] | None


def apply(model: Any, policy: Given = None, *, exact_backend: ExactBackend | None = None) -> Handle:
    """Patch a model in place so that its attention runs under `policy`.

    model: any nn.Module whose attention can be reached (docs/apply.md), or a diffusers pipeline, of which the denoising
    models are patched. policy: a Policy, the name of a recipe, the path of a policy file, a mapping of that form, or
    None for the default. exact_backend: in place of the policy's own, "torch" or "fa3": exact calls then run on
    FlashAttention-3 where it takes them. The handle reverts the patch, also as a context manager. Everything is checked
    before anything changes. Raises PatchError if the model is compiled, already patched or has nothing to patch,
    OwnAttentionError if it attends in its own code, PolicyError if the policy does not fit or was calibrated on another
    model, ConfigError for a wrong policy file, kernels.build.BuildError if the model is on a GPU whose kernels can
    neither be found nor compiled, and kernels.fa3.Fa3Missing if FlashAttention-3 is asked for and cannot be imported.
    """
    with LOCK:
        found = _inspect(model)
        policy = policy_of(policy)
        if exact_backend is not None:
            policy = replace(policy, exact_backend=exact_backend)
        plan = _resolve(model, policy, found)
        devices = {parameter.device for root in found.roots for parameter in root.parameters()}
        devices.add(device_of(model))  # under offload no weight is there yet
        for device in devices:
            ops.prepare(device)  # a missing compiler or library is found here, with the model untouched
        if policy.exact_backend == fa3.NAME:
            fa3.find()
        token = f"h{next(_HANDLE_NUMBERS)}/"
        handle = Handle(plan, token, found.parts, found.unreached)
        styles = mask_styles([(s.site, s.module) for s in found.routed]) if found.routed else {}
        replacements = [r for root in found.roots for r in config_copies(root, styles)] if found.routed else []
        tags = [(site, _tag(site, plan, policy, handle, styles)) for site in found.sites]

        if found.routed:
            register()
        for module, attribute, original, replacement in replacements:
            module.__dict__[attribute] = replacement
            handle._configs.append((weakref.ref(module), attribute, original))
        for carrier in (c for s in found.sites for c in s.carriers):
            if not is_patched(carrier):  # one processor may serve several sites
                patch(carrier)
                handle._carriers.append(weakref.ref(carrier))
        for site, tag in tags:
            site.module.__dict__[TAG] = tag
            handle._modules[site.name] = weakref.ref(site.module)
        if denoisers(model):
            handle._pipeline = weakref.ref(model)
        _follow_steps(model, handle, {s.name: (s.module, s.module.__dict__[TAG]) for s in found.sites})
    for message in _words_on_cards(devices):
        warnings.warn(message, stacklevel=2)
    return handle


@contextlib.contextmanager
def applied(model: Any, policy: Given = None, *, exact_backend: ExactBackend | None = None) -> Iterator[Handle]:
    """apply() for the length of a with-block; reverts on exit, exceptions included."""
    with apply(model, policy, exact_backend=exact_backend) as handle:
        yield handle


def revert(model: Any) -> None:
    """Take the patch off a model or pipeline whose handle is not at hand, also off a copy or a loaded one.

    Copies and loaded models have no handle: they get the attention implementations back that they had before apply().
    Raises PatchError if there is no patch on it.
    """
    with LOCK:
        roots = list(denoisers(model).values()) or ([model] if isinstance(model, nn.Module) else [])
        tagged = [module for root in roots for _, module in tagged_modules(root)]
        if not tagged:
            raise PatchError(f"this {type(model).__name__} is not patched")
        for handle in {id(h): h for m in tagged if (h := m.__dict__[TAG].handle) is not None}.values():
            handle.revert()
        alone = [module for module in tagged if TAG in module.__dict__]
        tags = [module.__dict__.pop(TAG) for module in alone]
        for carrier in (c for module in alone for c in carriers_of(module)):
            unpatch(carrier)
        routed = [(m, tag.original) for m, tag in zip(alone, tags, strict=True) if is_routed(type(m))]  # type: ignore[arg-type]
        if routed:
            originals = {id(getattr(module, "config", None)): name for module, name in routed}
            for root in roots:
                give_names_back(root, originals, routed[0][1])


def plan(model: Any, policy: Given = None) -> Plan:
    """What apply() would decide, without changing the model; works on meta-device weights. Raises as apply()."""
    return _resolve(model, policy_of(policy), _inspect(model))


def model_hash(model: Any) -> str:
    """The hash by which a calibrated policy knows its model or pipeline. Raises as apply()."""
    return hash_of(_inspect(model).parts)


def device_of(model: Any) -> torch.device:
    """Where a model or diffusers pipeline computes; under offload its weights rest elsewhere."""
    parts = [model] if isinstance(model, nn.Module) else list(denoisers(model).values())
    told = [getattr(model, "_execution_device", None)]  # by diffusers' pipelines; by the hooks of accelerate:
    told += [getattr(getattr(m, "_hf_hook", None), "execution_device", None) for part in parts for m in part.modules()]
    weights = (parameter.device for part in parts for parameter in part.parameters())
    return torch.device(next((device for device in (*told, *weights) if device is not None), "cpu"))


def policy_of(given: Given) -> Policy:
    """The policy that is meant: a Policy, None (the default), or what load_policy reads, that is a recipe's name, the
    name of a policy that comes with the package, a file's path or a mapping."""
    if given is None or isinstance(given, Policy):
        return given or Policy()
    if not isinstance(given, (str, os.PathLike, Mapping)):
        raise TypeError(
            "policy must be a Policy, a recipe's name, the path of a policy file or a mapping; "
            f"got {type(given).__name__}"
        )
    if isinstance(given, str) and given in recipe_names():
        return Policy(recipe=given)
    with needed_for("reading a policy"):
        from sage_patch.config import load_policy  # needs pydantic and PyYAML, which nothing above does
    return load_policy(given)


def rows() -> list[dict[str, Any]]:
    """Calls of models that use attn_implementation="sage2" without apply(), of copies of patched models, and of direct
    sage_attention calls: one row per (site, recipe, backend, reason)."""
    found = []
    for key, calls in ops.counts().items():
        owner, _, name = key.site.rpartition("/") if key.site else ("", "", "sage_attention")
        if owner in ("", "flag", "copy"):
            found.append(row_of(key, name, calls))
    return found


def stats() -> dict[str, Any]:
    """The calls of `rows()` summed up: calls, quantized, exact, reasons, sites; as Handle.stats()."""
    return summary(rows())


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
            where = f"{first.class_name} at {first.name!r}" + (f": {first.why}" if first.why else "")
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
    schedulers = [name for name, _ in _schedulers(model, stepped_sites(plan)) if name]
    problems = (scheduler_problem(model, model.components[name]) for name in schedulers)
    problem = next(filter(None, problems), None)
    if problem:
        raise PatchError(f"the policy has rules by denoising step, which cannot be followed here: {problem}")
    return plan


def _words_on_cards(devices: Iterable[torch.device]) -> Iterator[str]:
    """What to say of the GPUs that a model is on: those without kernels, and those that no table knows."""
    on_cuda = [device for device in devices if device.type == "cuda"]
    if any(ops.backend_for(device) == "none" for device in on_cuda):
        yield "sage_patch has no quantized kernels for this GPU: every call will run exact (no_kernel_for_cuda)"
        return
    for device in on_cuda:
        note = cards.unknown_once(torch.cuda.get_device_name(device))
        if note is not None:
            yield note


def _schedulers(model: Any, sites: list[str]) -> list[tuple[str, list[str]]]:
    """(component name of a scheduler, the sites that run in its steps); "" for those that only handle.step tells."""
    groups: dict[str, list[str]] = {}
    parts = denoisers(model)
    for site in sites:
        part = next((name for name in parts if site.startswith(name + ".")), "")
        groups.setdefault(scheduler_for(model, part) if part else "", []).append(site)
    return list(groups.items())


def _follow_steps(model: Any, handle: Handle, tagged: dict[str, tuple[nn.Module, SiteTag]]) -> None:
    """Where sites have rules by step: refuse their calls until a step is known, and learn it from the scheduler."""
    for name, sites in _schedulers(model, stepped_sites(handle.plan)):
        switch = StepSwitch(handle.plan, [(site, *tagged[site]) for site in sites])
        switch.leave()
        handle._switches.append(switch)
        if name:
            handle._clocks.append(StepClock(model, model.components[name], switch, name))
            handle._clocks[-1].attach()


def _tag(site: Site, plan: Plan, policy: Policy, handle: Handle, styles: dict[int, MaskStyle]) -> SiteTag:
    choice = plan.choice(site.name)
    config = getattr(site.module, "config", None)
    return SiteTag(
        key=handle._token + site.name,
        group=handle._token + "*",
        recipe=parse_recipe(plan.runs(choice.recipe)),
        on_unsupported=choice.on_unsupported,
        limits=policy.limits,
        original=getattr(config, "_attn_implementation", None) or "",
        style=styles.get(id(config), "implicit"),
        by_processor=len(site.carriers) > 1,
        exact_backend=policy.exact_backend,
        handle=handle,
    )
