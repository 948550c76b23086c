"""apply, applied, plan and Handle: the only file that changes a model.

What apply() changes, all of it on the model itself and all of it put back by revert():
  1. every configuration object that the model's modules hold is replaced by a copy whose attention implementation
     is "sage2" (a copy, because other models may share the original);
  2. every attention site gets one private attribute, its tag.
No class, function or registry default of another package is replaced; names, parameters and state-dict keys stay.
All checks come first: an error leaves the model as it was.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from torch import nn

from sage_patch.integrations import sites as site_finder
from sage_patch.integrations.sites import TAG, SiteTag
from sage_patch.integrations.source import MaskStyle
from sage_patch.integrations.transformers import OwnAttentionError, config_copies, mask_styles, register
from sage_patch.kernels import ops
from sage_patch.policy import AttentionSite, Plan, Policy, resolve
from sage_patch.recipes import parse_recipe

_HANDLE_NUMBERS = itertools.count(1)


class PatchError(ValueError):
    """The model cannot be patched as asked; nothing was changed."""


class Handle:
    """A patched model's way back, and its report.

    plan: what was decided for every site. The handle belongs to the model it was made for; deep copies of that
    model keep their plan but are not counted or reverted by it.
    """

    def __init__(self, model: nn.Module, plan: Plan, token: str, unrouted: list[tuple[str, str]]):
        self.plan = plan
        self._model = model
        self._token = token
        self._unrouted = unrouted
        self._configs: list[tuple[nn.Module, str, Any]] = []
        self._tagged: list[nn.Module] = []
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
        for name in names:
            parts = [
                f"{r['recipe']} x{r['calls']}" + (f" ({r['reason']})" if r["reason"] else "")
                for r in by_site.get(name, [])
            ]
            planned = self.plan.choice(name).recipe if name != "*" else "inside compiled graphs"
            lines.append(f"  {name:<{width}}  {planned}: {', '.join(parts) if parts else 'no calls'}")
        for name, class_name in self._unrouted:
            lines.append(f"  {name}: not patched, {class_name} computes attention in its own code")
        return "\n".join(lines)

    def revert(self) -> None:
        """Put back exactly what was there. Safe to call again. Counts so far stay readable."""
        if not self.active:
            return
        for module in self._tagged:
            module.__dict__.pop(TAG, None)
        for module, attribute, original in self._configs:
            module.__dict__[attribute] = original
        self._final_counts = ops.counts(self._token)
        ops.reset_counts(self._token)

    def __repr__(self) -> str:
        state = "active" if self.active else "reverted"
        return f"<sage_patch.Handle: {len(self.plan.sites)} sites, {state}>"


def apply(model: nn.Module, policy: Policy | None = None) -> Handle:
    """Patch a transformers model in place so that its attention runs under `policy`.

    Everything is checked before anything changes. Raises PatchError if the model is compiled, already patched or
    has nothing to patch, OwnAttentionError if it attends in its own code, PolicyError if the policy does not fit,
    and kernels.build.BuildError if the model is on a GPU whose kernels can neither be found nor compiled.
    """
    found, unrouted = _inspect(model)
    policy = policy if policy is not None else Policy()
    plan = resolve(policy, [site for site, _ in found])
    for device in {parameter.device for parameter in model.parameters()}:
        ops.prepare(device)  # a missing compiler or library is found here, with the model untouched
    token = f"h{next(_HANDLE_NUMBERS)}/"
    handle = Handle(model, plan, token, unrouted)
    styles = mask_styles(found)
    replacements = config_copies(model, styles)
    tags = [(module, _tag(site, module, plan, policy, token, styles)) for site, module in found]

    register()
    for module, attribute, original, replacement in replacements:
        module.__dict__[attribute] = replacement
        handle._configs.append((module, attribute, original))
    for module, tag in tags:
        module.__dict__[TAG] = tag
        handle._tagged.append(module)
    return handle


@contextlib.contextmanager
def applied(model: nn.Module, policy: Policy | None = None) -> Iterator[Handle]:
    """apply() for the length of a with-block; reverts on exit, exceptions included."""
    handle = apply(model, policy)
    try:
        yield handle
    finally:
        handle.revert()


def plan(model: nn.Module, policy: Policy | None = None) -> Plan:
    """What apply() would decide, without changing the model; works on meta-device weights. Raises as apply()."""
    found, _ = _inspect(model)
    return resolve(policy if policy is not None else Policy(), [site for site, _ in found])


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


def _inspect(model: nn.Module) -> tuple[list[tuple[AttentionSite, nn.Module]], list[tuple[str, str]]]:
    """(sites with their modules, unrouted attention modules); raises if the model must not be patched."""
    if not isinstance(model, nn.Module):
        hint = "; diffusers pipelines are not supported yet" if hasattr(model, "components") else ""
        raise PatchError(f"apply() takes a torch.nn.Module; got {type(model).__name__}{hint}")
    if hasattr(model, "_orig_mod"):
        raise PatchError("the model is already compiled: apply sage_patch first, then torch.compile(model)")
    tagged = [name for name, module in model.named_modules() if TAG in module.__dict__]
    if tagged:
        raise PatchError(
            f"{type(model).__name__} is already patched ({len(tagged)} sites, first {tagged[0]!r}); "
            "call revert() on its handle first"
        )
    inner = _without_adapters(model)
    found = site_finder.find_sites(inner)
    own = site_finder.own_attention_modules(inner)
    if not found:
        if own:
            name, module = own[0]
            raise OwnAttentionError(
                f"{type(model).__name__} computes attention in its own code ({type(module).__name__} at {name!r}), "
                "which sage_patch does not reach; the model is unchanged"
            )
        raise PatchError(f"{type(model).__name__} has no attention site that sage_patch knows; nothing to patch")
    return found, [(name, type(module).__name__) for name, module in own]


def _without_adapters(model: nn.Module) -> nn.Module:
    """The model inside a PEFT wrapper, so that site names are the model's own."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def _tag(
    site: AttentionSite, module: nn.Module, plan: Plan, policy: Policy, token: str, styles: dict[int, MaskStyle]
) -> SiteTag:
    choice = plan.choice(site.name)
    config = getattr(module, "config", None)
    return SiteTag(
        key=token + site.name,
        group=token + "*",
        recipe=parse_recipe(choice.recipe),
        on_unsupported=choice.on_unsupported,
        limits=policy.limits,
        original=getattr(config, "_attn_implementation", None) or "",
        style=styles[id(config)],
    )
