"""What apply() returns: the report of a patched model, and its way back.

A handle refers to the model weakly and is kept by the tags of the model's sites: `sage_patch.revert(model)` finds it
there, and a model that is dropped without revert() takes its handle and its counters along.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from torch import nn

from sage_patch import reasons
from sage_patch.errors import SagePatchError
from sage_patch.integrations.configurations import OUR_NAMES
from sage_patch.integrations.intercept import carriers_of, is_patched, unpatch
from sage_patch.integrations.sites import find_sites
from sage_patch.integrations.source import is_routed
from sage_patch.integrations.steps import StepClock, StepSwitch
from sage_patch.integrations.tags import TAG
from sage_patch.integrations.unreached import Unreached
from sage_patch.kernels import ops
from sage_patch.policy import Plan

# What to do about reasons that surprise people, by the reason's word.
LOCK = threading.RLock()  # one apply() or revert() at a time


class PatchError(SagePatchError, ValueError):
    """The model cannot be patched as asked; nothing was changed."""


class Handle:
    """A patched model's way back, and its report; as a context manager it reverts on exit.

    plan: what was decided for every site. The handle belongs to the model it was made for; deep copies of that
    model keep their plan but are not counted or reverted by it.
    """

    def __init__(self, plan: Plan, token: str, parts: Mapping[str, nn.Module], unreached: list[Unreached]):
        self.plan = plan
        self._token = token
        self._unreached = unreached
        self._parts = {prefix: weakref.ref(root) for prefix, root in parts.items()}
        self._pipeline: Callable[[], Any] = lambda: None
        self._configs: list[tuple[weakref.ref[nn.Module], str, Any]] = []
        self._carriers: list[weakref.ref[Any]] = []
        self._modules: dict[str, weakref.ref[nn.Module]] = {}
        self._switches: list[StepSwitch] = []
        self._clocks: list[StepClock] = []
        self._final_counts: dict[ops.CallKey, int] | None = None
        self._forget = weakref.finalize(self, ops.reset_counts, token)

    @property
    def active(self) -> bool:
        """False once reverted."""
        return self._final_counts is None

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.revert()

    def stats(self) -> dict[str, Any]:
        """Calls since apply(), summed up.

        calls, quantized, exact: numbers of calls. reasons: exact calls by reason. sites: the same four by the name of
        every site, with or without calls; calls from inside compiled graphs are counted for the whole model, under "*".
        """
        return summary(self.rows(), [site.name for site in self.plan.sites])

    def rows(self) -> list[dict[str, Any]]:
        """Calls since apply(): one row per (site, recipe, backend, reason) with its number, sites in plan order."""
        counts = self._final_counts if self._final_counts is not None else ops.counts(self._token)
        order = {site.name: i for i, site in enumerate(self.plan.sites)}
        found = [row_of(key, key.site.removeprefix(self._token), calls) for key, calls in counts.items()]
        return sorted(found, key=lambda r: (order.get(r["site"], -1), r["recipe"], r["reason"]))

    def report(self) -> str:
        """What ran where: every site with its recipe, calls, and the reason of each exact call; plain text."""
        rows, stats = self.rows(), self.stats()
        lines = [
            f"{len(self.plan.sites)} attention sites patched; {stats['calls']} calls, {stats['quantized']} quantized"
        ]
        if stats["calls"] == 0:
            lines.append("patched but unused: no call has reached a patched site yet")
        if any(r["backend"] == "reference" for r in rows):
            lines.append(
                "quantized calls ran on the reference backend (plain PyTorch): same numerics, slower than unpatched"
            )
        lines += self._sites(rows)
        lines += [f"  {line}" for line in (self._changes() if self.active else ())]
        lines += [f"  {unreached}" for unreached in self._unreached]
        lines += reasons.legend(r["reason"] for r in rows if r["recipe"] == "exact")
        return "\n".join(lines)

    def _sites(self, rows: list[dict[str, Any]]) -> list[str]:
        """A line for each run of neighbouring sites of which the same is planned and the same was seen."""
        by_site: dict[str, list[str]] = {}
        for r in rows:
            notes = [r["reason"]] if r["reason"] else []
            notes += [r["backend"]] if r["recipe"] == "exact" and r["backend"] != "exact" else []
            seen = f"{r['recipe']} x{r['calls']}" + (f" ({'; '.join(notes)})" if notes else "")
            by_site.setdefault(r["site"], []).append(seen)
        steps = {row["name"]: f" [{row['steps']}]" for row in self.plan.rows() if row["steps"]}
        runs: list[tuple[list[str], str]] = []
        for name in [s.name for s in self.plan.sites] + (["*"] if "*" in by_site else []):
            planned = self.plan.choice(name).recipe if name != "*" else "inside compiled graphs"
            said = f"{planned}{steps.get(name, '')}: {', '.join(by_site.get(name, ['no calls']))}"
            if runs and runs[-1][1] == said:
                runs[-1][0].append(name)
            else:
                runs.append(([name], said))
        names = [run[0] if len(run) == 1 else f"{run[0]} .. {run[-1]} ({len(run)} sites)" for run, _ in runs]
        width = max(map(len, names))
        return [f"  {name:<{width}}  {said}" for name, (_, said) in zip(names, runs, strict=True)]

    def _changes(self) -> Iterable[str]:
        """What was changed on the model since apply(), so that the patch no longer covers it."""
        for clock in self._clocks:
            if not clock.in_place:
                yield "the pipeline's scheduler was replaced after apply(): rules by step need revert() and apply()"
        pipeline = self._pipeline()
        for prefix, part in self._parts.items():
            if pipeline is not None and pipeline.components.get(prefix.rstrip(".")) is not part():
                yield f"the pipeline's {prefix.rstrip('.')} was replaced after apply(); revert and apply again"
        roots = [(prefix, root) for prefix, part in self._parts.items() if (root := part()) is not None]
        held = {module for _, root in roots for module in root.modules()}
        for name, ref in self._modules.items():
            module = ref()
            if module is None or module not in held:
                yield f"{name}: its module was replaced after apply(), and is no longer part of the model; apply again"
            elif module.__dict__[TAG].by_processor and not is_patched(getattr(module, "processor", None)):
                yield f"{name}: its processor was replaced after apply(); apply again"
        for site in (site for prefix, root in roots for site in find_sites(root, prefix)):
            if TAG not in site.module.__dict__:
                yield f"{site.name}: came into the model after apply() and is not patched; revert and apply again"
        yield from self._bypassed()

    def _bypassed(self) -> Iterable[str]:
        """Sites whose configuration no longer asks for ours: set_attn_implementation() was called since."""
        found: dict[str, list[str]] = {}
        for name, ref in self._modules.items():
            module = ref()
            if module is not None and is_routed(type(module)):  # type: ignore[arg-type]
                asked = getattr(getattr(module, "config", None), "_attn_implementation", None)
                if asked not in OUR_NAMES:
                    found.setdefault(str(asked), []).append(name)
        for asked, names in found.items():
            yield (
                f"{len(names)} sites from {names[0]} on ask for attn_implementation {asked!r} since apply()"
                " (set_attn_implementation?), and bypass the patch; revert and apply again"
            )

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
        for switch in self._switches:
            switch.enter(step, num_steps)
        for clock in self._clocks:
            clock.ignore_request()

    def revert(self) -> None:
        """Put back exactly what was there. Safe to call again. Counts so far stay readable."""
        with LOCK:
            if not self.active:
                return
            for clock in self._clocks:
                clock.detach()
            modules = [module for ref in self._modules.values() if (module := ref()) is not None]
            for module in modules:
                module.__dict__.pop(TAG, None)
            for ref, attribute, original in self._configs:
                module = ref()
                if module is not None:
                    module.__dict__[attribute] = original
            for carrier in [ref() for ref in self._carriers] + [c for module in modules for c in carriers_of(module)]:
                unpatch(carrier)  # also those that diffusers made anew from a patched one's class
            self._final_counts = ops.counts(self._token)
            ops.reset_counts(self._token)

    def __repr__(self) -> str:
        state = "active" if self.active else "reverted"
        return f"<sage_patch.Handle: {len(self.plan.sites)} sites, {state}>"


def row_of(key: ops.CallKey, site: str, calls: int) -> dict[str, Any]:
    return {"site": site, "recipe": key.recipe, "backend": key.backend, "reason": key.reason, "calls": calls}


def summary(rows: list[dict[str, Any]], sites: Iterable[str] = ()) -> dict[str, Any]:
    """The mapping of `Handle.stats` from its rows."""
    by_site: dict[str, list[dict[str, Any]]] = {site: [] for site in sites}
    for row in rows:
        by_site.setdefault(row["site"], []).append(row)
    return {**_sums(rows), "sites": {site: _sums(own) for site, own in by_site.items()}}


def _sums(rows: list[dict[str, Any]]) -> dict[str, Any]:
    reasons: dict[str, int] = {}
    for row in rows:
        if row["recipe"] == "exact":
            reasons[row["reason"]] = reasons.get(row["reason"], 0) + row["calls"]
    calls, exact = sum(row["calls"] for row in rows), sum(reasons.values())
    return {"calls": calls, "quantized": calls - exact, "exact": exact, "reasons": reasons}
