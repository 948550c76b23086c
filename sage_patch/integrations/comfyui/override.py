"""What ComfyUI calls in place of its own attention: the same call under a policy, or left to ComfyUI and counted.

ComfyUI tells an override the tensors and, in transformer_options, where in the model and at which noise level the call
is. It tells no module's name, so sites are named here: "double.3.attn1" is the attention of block 3 among the double
blocks over as many keys as queries, "attn2" over another number; "input.4.0.attn1" is in block 4 of a UNet's input.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sage_patch import reasons
from sage_patch.dispatch import Options, UnsupportedCall, attend, choose, describe, tick
from sage_patch.integrations.float_masks import with_bool_mask
from sage_patch.kernels import ops
from sage_patch.policy import AttentionSite, Choice, Plan, Policy, PolicyError
from sage_patch.recipes import parse_recipe

_NUMBERS = itertools.count(1)
# Keywords that are read here, or change nothing for us.
_READ = {"mask", "scale", "enable_gqa", "skip_reshape", "skip_output_reshape"}
_ABOUT = {"transformer_options", "_inside_attn_wrapper"}
_Where = tuple[int | None, int | None]  # step and number of steps, None where no rule asks


class Override:
    """One policy on one MODEL and its clones; called by ComfyUI for every attention of the denoiser.

    What it cannot or should not quantize goes to the function that ComfyUI would have called, untouched.
    """

    def __init__(self, policy: Policy):
        for recipe in filter(None, [policy.recipe, *(rule.recipe for rule in policy.rules)]):
            parse_recipe(recipe)  # ValueError for one that does not exist
        if policy.calibration is not None:
            raise PolicyError(
                "a calibrated policy belongs to the one diffusers or transformers model that it was measured on; "
                "give ComfyUI a policy without calibration"
            )
        self.policy = policy
        self._token = f"comfyui{next(_NUMBERS)}/"
        weakref.finalize(self, ops.reset_counts, self._token)
        self._plans: dict[str, Plan] = {}
        self._by_step = any(rule.steps is not None for rule in policy.rules)
        self._sigma: tuple[Tensor | None, _Where] = (None, (None, None))

    def __deepcopy__(self, memo: dict[int, Any]) -> Override:
        """Clones of a MODEL copy their options deeply; they count in the same place."""
        return self

    def __call__(
        self, original: Callable, q: Tensor, k: Tensor, v: Tensor, heads: int, *rest: Any, **kwargs: Any
    ) -> Any:
        """q, k, v [B, tokens, heads * D], or with skip_reshape [B, heads, tokens, D]; rest: mask, attn_precision, ...

        Returns what ComfyUI's functions do: [B, tokens, heads * D], or with skip_output_reshape [B, heads, tokens, D].
        """
        told = dict(
            zip(("mask", "attn_precision", "skip_reshape", "skip_output_reshape"), rest, strict=False), **kwargs
        )
        options = told.get("transformer_options") or {}
        query, key, value = (_split(x, heads, bool(told.get("skip_reshape"))) for x in (q, k, v))
        site = _site(options, query.shape[2] == key.shape[2])
        choice = self._choice(site, options)
        recipe = parse_recipe(choice.recipe)
        counted = self._token + ("*" if torch.compiler.is_compiling() else site.name)
        reason = _beyond(query, key, value, told)
        if not reason:
            asked = Options(
                attn_mask=_mask4(told.get("mask")), scale=told.get("scale"), out_layout="NHD", guard_rows=False
            )
            call = describe(query, key, value, asked)
            quick, call = with_bool_mask(asked, call, recipe, self.policy.limits)
            chosen, reason = choose(recipe, call, self.policy.limits, choice.on_unsupported, "policy", counted)
            if not chosen.is_exact:
                out, _ = attend(query, key, value, quick, call, chosen, reason, counted)
                return out if told.get("skip_output_reshape") else out.transpose(1, 2).flatten(2)
        elif choice.on_unsupported == "error" and not recipe.is_exact:
            raise UnsupportedCall(
                f"recipe {recipe.name!r} cannot run this call at {site.name}: {reason}; "
                'use on_unsupported "exact", or the recipe "exact" here'
            )
        tick(reason, counted)
        return original(q, k, v, heads, *rest, **kwargs)

    def report(self) -> str:
        """What ran where: every site with its calls and the reason of each that was left to ComfyUI; plain text."""
        rows: dict[str, list[str]] = {}
        words: set[str] = set()
        calls = quantized = 0
        for key, number in sorted(ops.counts(self._token).items(), key=lambda item: _in_order(item[0].site)):
            exact = key.recipe == "exact"
            calls, quantized = calls + number, quantized + (0 if exact else number)
            words.update([key.reason] if exact else [])
            said = f"{key.recipe} x{number}" + (f" ({key.reason})" if exact else f" on {key.backend}")
            rows.setdefault(key.site.removeprefix(self._token), []).append(said)
        lines = [f"policy {self.policy.recipe}, {len(self.policy.rules)} rules; {calls} calls, {quantized} quantized"]
        if not calls:
            lines.append("no call has reached it yet: is the sampler given this MODEL?")
        lines += [f"  {name}  {', '.join(said)}" for name, said in rows.items()]
        lines += [f"  {text}" for text in self._unfelt()] if calls else []
        return "\n".join([*lines, *reasons.legend(words)])

    def _unfelt(self) -> list[str]:
        """Rules that no site seen so far matches: their names may be those of diffusers."""
        felt = {rule for plan in list(self._plans.values()) for rules in plan.matches.values() for rule in rules}
        rules = enumerate(self.policy.rules)
        return [f"rule {i + 1} {rule} matched no site that was seen" for i, rule in rules if i not in felt]

    def _choice(self, site: AttentionSite, options: Mapping[str, Any]) -> Choice:
        plan = self._plans.get(site.name)
        if plan is None or plan.sites != (site,):
            plan = self._plan_for(site)
        step, num_steps = self._step(options, site) if self._by_step else (None, None)
        return plan.choice(site.name, step, num_steps)

    def _plan_for(self, site: AttentionSite) -> Plan:
        try:
            matches = {site.name: tuple(i for i, rule in enumerate(self.policy.rules) if rule.covers(site))}
        except ValueError as error:  # counted from an end that the model does not tell
            raise PolicyError(
                f"the policy names layers from the end, and {site.name} tells no number: {error}"
            ) from None
        plan = Plan(self.policy, (site,), True, matches)
        self._plans[site.name] = plan
        return plan

    def _step(self, options: Mapping[str, Any], site: AttentionSite) -> _Where:
        """Which denoising step of how many the noise level belongs to: the last that begins at it or above."""
        sigmas, schedule = options.get("sigmas"), options.get("sample_sigmas")
        if not isinstance(sigmas, Tensor) or not isinstance(schedule, Tensor) or len(schedule) < 2:
            raise PolicyError(
                f"the policy has rules by denoising step, and ComfyUI tells none at {site.name} (no sigmas or "
                "sample_sigmas in transformer_options): use a sampler that tells them, or a policy without `steps`"
            )
        seen, found = self._sigma
        if seen is sigmas:  # one tensor a step: its value is read once
            return found
        level, levels = float(sigmas.flatten()[0]), schedule.tolist()
        begun = [i for i, sigma in enumerate(levels[:-1]) if sigma >= level * (1 - 1e-4)]
        found = (begun[-1] if begun else 0, len(levels) - 1)
        self._sigma = (sigmas, found)
        return found


def _site(options: Mapping[str, Any], alike: bool) -> AttentionSite:
    """The site of a call. alike: there are as many keys as queries."""
    index, depth, block = options.get("block_index"), options.get("total_blocks"), options.get("block")
    stack = ".".join(map(str, block)) if isinstance(block, tuple) else str(options.get("block_type") or "blocks")
    name = "attn1" if alike else "attn2"
    role = "self" if alike else "cross"
    if index is None:
        return AttentionSite(name, role=role)  # type: ignore[arg-type]
    return AttentionSite(f"{stack}.{index}.{name}", stack, index, depth, role=role)  # type: ignore[arg-type]


def _beyond(query: Tensor, key: Tensor, value: Tensor, told: Mapping[str, Any]) -> str:
    """Why only ComfyUI's own function may take this call, "" if ours may too."""
    if not query.dim() == key.dim() == value.dim() == 4:
        return "rank"
    heads = (query.shape[1] == key.shape[1] or bool(told.get("enable_gqa"))) and key.shape[1] == value.shape[1]
    if not heads or not query.shape[0] == key.shape[0] == value.shape[0] or query.shape[3] != key.shape[3]:
        return "broadcast"
    mask = told.get("mask")
    if mask is not None and not (isinstance(mask, Tensor) and 2 <= mask.dim() <= 4 and _is_mask(mask)):
        return "argument_mask"
    if told.get("attn_precision") is not None:
        return "argument_attn_precision"
    if told.get("low_precision_attention", True) is False:
        return "argument_low_precision_attention"
    known = _READ | _ABOUT | {"attn_precision", "low_precision_attention"}
    other = next((name for name, value in told.items() if name not in known and value is not None), "")
    return f"argument_{other}" if other else ""


def _split(x: Tensor, heads: int, is_split: bool) -> Tensor:
    """[B, heads, tokens, D]."""
    return x if is_split else x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _is_mask(mask: Tensor) -> bool:
    return mask.dtype == torch.bool or mask.is_floating_point()


def _mask4(mask: Tensor | None) -> Tensor | None:
    """The mask with the dimensions that ComfyUI leaves out: [q_len, kv_len], or an item's [B, q_len, kv_len]."""
    if mask is None:
        return None
    if mask.dim() == 2:
        mask = mask[None]
    return mask[:, None] if mask.dim() == 3 else mask


def _in_order(site: str) -> list[tuple[int, str]]:
    """Blocks 2 and 10 in this order."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in site.split(".")]
