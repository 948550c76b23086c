"""What happens when one denoiser is patched: the record behind the tests and docs/results/diffusers_matrix.json."""

import collections

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import sage_patch
from sage_patch.integrations.sites import find_sites
from sage_patch.integrations.transformers import OwnAttentionError
from sage_patch.integrations.unreached import unreached_modules
from sage_patch.policy import Policy

from .build import build, outputs
from .feed import inputs
from .overrides import LEFT_OUT

EXACT = Policy(recipe="exact")
DEFAULT = Policy(quantize_fp32=True, min_q_len=1, min_kv_len=1)
SHIPPED = Policy(quantize_fp32=True)  # short calls stay exact


class CountSdpa(TorchFunctionMode):
    """Counts every call of torch's scaled_dot_product_attention: what an unpatched model really does."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def measure(denoiser) -> dict:
    """The record of one class. outcome is "routed", "refused" (attention of its own only) or "built" (not run).

    Differences are the largest absolute difference over the largest absolute output of the unpatched model.
    native_calls: SDPA calls of the unpatched model; calls: what the handle counted in the same forward pass.
    """
    model = build(denoiser)
    record: dict = {
        "kind": denoiser.kind,
        "unreached": dict(collections.Counter(u.class_name for u in unreached_modules(model, find_sites(model)))),
    }
    if denoiser.name in LEFT_OUT:
        roles = collections.Counter(site.role for site in sage_patch.plan(model).sites)
        return record | {"outcome": "built", "not_run": LEFT_OUT[denoiser.name], "roles": dict(roles)}
    fed = inputs(denoiser, model)
    with CountSdpa() as native:
        expected = outputs(model, fed)
    assert expected and all(torch.isfinite(e).all() for e in expected), "the unpatched model gives no finite output"
    record["native_calls"] = native.calls
    try:
        with sage_patch.applied(model, EXACT) as handle:
            record["exact_difference"] = difference(outputs(model, fed), expected)
            rows = handle.rows()
    except OwnAttentionError as error:
        return record | {"outcome": "refused", "refusal": str(error), "calls": 0}
    record["outcome"] = "routed"
    record["roles"] = dict(collections.Counter(site.role for site in handle.plan.sites))
    record["calls"] = sum(row["calls"] for row in rows)
    record["sites_without_call"] = len(handle.plan.sites) - len({row["site"] for row in rows})
    for name, policy in (("default", DEFAULT), ("shipped", SHIPPED)):
        with sage_patch.applied(model, policy) as handle:
            record[f"{name}_difference"] = difference(outputs(model, fed), expected)
            calls: collections.Counter = collections.Counter()
            for row in handle.rows():
                calls[" ".join(filter(None, (row["recipe"], row["reason"])))] += row["calls"]
            record[f"{name}_calls"] = dict(calls)
    record["revert_difference"] = difference(outputs(model, fed), expected)
    return record


def difference(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest difference over the largest magnitude, over all outputs; infinite if anything is not finite."""
    worst = 0.0
    for g, e in zip(got, expected, strict=True):
        if e.numel():
            gap = float((g - e).abs().max() / e.abs().max().clamp_min(1e-30))
            worst = max(worst, gap) if gap == gap else float("inf")
    return worst
