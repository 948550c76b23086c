"""The paper's operator ablations on real tensors: what smoothing, scale granularity and the type of P and V buy.

Q, K and V are captured from a model that runs exact; each captured call is then computed under every variant and
compared with the exact result. SageAttention2 (arXiv 2411.10958), tables 2 to 4 and 14 to 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sage_patch.evaluation.metrics import cosine, relative_l1, worst_row
from sage_patch.kernels import ops
from sage_patch.patch import applied
from sage_patch.policy import Policy
from sage_patch.recipes import parse_recipe
from sage_patch.reference.attention import quantized_attention
from sage_patch.reference.exact import exact_attention

# table -> recipes, in the order the paper expects from worst to best
TABLES: dict[str, tuple[str, ...]] = {
    "smoothing, INT4": tuple(f"qk_int4_pv_fp8:smooth={s}" for s in ("none", "k", "q", "qk")),
    "smoothing, INT8": tuple(f"qk_int8_pv_fp8:smooth={s}" for s in ("none", "k", "q", "qk")),
    "granularity, INT4": tuple(
        f"qk_int4_pv_fp8:granularity={g}" for g in ("tensor", "block", "warp", "thread", "token")
    ),
    "granularity, INT8": tuple(
        f"qk_int8_pv_fp8:granularity={g}" for g in ("tensor", "block", "warp", "thread", "token")
    ),
    "P and V, INT8 Q and K": ("qk_int8_pv_fp8:smooth_v=off", "qk_int8_pv_fp8", "qk_int8_pv_fp16"),
}


@dataclass(frozen=True)
class Captured:
    """One attention call of a real model: tensors on the CPU, and the band they were attended under."""

    source: str
    call: ops.ObservedCall


def capture(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    source: str,
    limit_bytes: int = 1 << 30,
    min_kv_len: int = 128,
) -> list[Captured]:
    """Q, K and V of every attention call while `run(model)` runs exact, until `limit_bytes` are kept."""
    kept: list[Captured] = []
    used = 0

    def keep(call: ops.ObservedCall) -> None:
        nonlocal used
        size = sum(t.numel() * t.element_size() for t in (call.query, call.key, call.value))
        if call.key.shape[2] < min_kv_len or call.query.shape[2] < 2 or used + size > limit_bytes:
            return
        used += size
        tensors = {n: getattr(call, n).detach().to("cpu", copy=True) for n in ("query", "key", "value")}
        kept.append(Captured(source, call._replace(site=call.site.rpartition("/")[2], **tensors)))

    with applied(model, Policy(recipe="exact")), ops.observe(keep), torch.no_grad():
        run(model)
    return kept


def score(captured: Captured, recipe: str) -> dict[str, float]:
    """Cosine, relative L1 and the relative L1 of the worst row of one call under a recipe, against exact attention."""
    call = captured.call
    visibility = ops.visibility_of(
        call.query.shape[2], call.key.shape[2], call.attn_mask, call.left, call.right, call.top_left
    )
    tensors = (call.query.float(), call.key.float(), call.value.float())
    exact, _ = exact_attention(*tensors, visibility, scale=call.scale)
    got, _ = quantized_attention(*tensors, visibility, parse_recipe(recipe), scale=call.scale)
    return _metrics(got, exact)


def tables(captured: Iterable[Captured]) -> dict[str, list[dict[str, Any]]]:
    """Every table of TABLES: one row a recipe with the average over calls and the worst call."""
    calls = list(captured)
    memo: dict[str, list[dict[str, float]]] = {}
    result: dict[str, list[dict[str, Any]]] = {}
    for title, recipes in TABLES.items():
        rows = []
        for recipe in recipes:
            if recipe not in memo:
                memo[recipe] = [score(c, recipe) for c in calls]
            rows.append({"recipe": recipe, **_summary(memo[recipe])})
        result[title] = rows
    return result


def markdown(result: dict[str, list[dict[str, Any]]]) -> str:
    """The tables as Markdown, cosine in percent."""
    lines: list[str] = []
    for title, rows in result.items():
        lines += [
            f"### {title}",
            "",
            "| variant | cosine, mean | rel. L1, mean | cosine, worst call | rel. L1, worst call | worst row |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| `{r['recipe']}` | {100 * r['cosine']:.3f} % | {r['relative_l1']:.4f} | {100 * r['cosine_worst']:.3f} % "
            f"| {r['relative_l1_worst']:.4f} | {r['worst_row']:.4f} |"
            for r in rows
        ]
        lines.append("")
    return "\n".join(lines)


def _metrics(got: Tensor, exact: Tensor) -> dict[str, float]:
    return {
        "cosine": cosine(got, exact),
        "relative_l1": relative_l1(got, exact),
        "worst_row": worst_row(got, exact),
    }


def _summary(scores: list[dict[str, float]]) -> dict[str, float]:
    def mean(key: str) -> float:
        return sum(s[key] for s in scores) / len(scores)

    return {
        "cosine": mean("cosine"),
        "relative_l1": mean("relative_l1"),
        "cosine_worst": min(s["cosine"] for s in scores),
        "relative_l1_worst": max(s["relative_l1"] for s in scores),
        "worst_row": max(s["worst_row"] for s in scores),
    }
