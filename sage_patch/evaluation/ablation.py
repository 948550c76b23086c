"""The paper's operator ablations on real tensors: what smoothing, scale granularity and the type of P and V buy.

Q, K and V are captured from a model that runs exact; each captured call is then computed under every variant and
compared with the exact result. SageAttention2 (arXiv 2411.10958), tables 2 to 4 and 14 to 16.

Sinks and logit softcapping are left out of both sides: the variants differ in Q, K, P and V only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sage_patch.errors import SagePatchError
from sage_patch.evaluation.judge import LADDER, Judge
from sage_patch.evaluation.metrics import cosine, relative_l1, worst_row
from sage_patch.kernels import ops
from sage_patch.kernels.plain import visibility_of
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
RUNGS = LADDER[:-1]  # scored site by site, cheapest first
MIN_KV_LEN = 128  # fewer keys are left out: they run exact under every policy that does not say otherwise

Progress = Callable[[str, int, int], None]
Scores = dict[str, list[dict[str, float]]]  # recipe -> the metrics of every captured call


class AblationError(SagePatchError, ValueError):
    """Nothing to ablate; the message says what was seen and what to do."""


@dataclass(frozen=True)
class Captured:
    """One attention call of a real model: tensors on the CPU, and the band they were attended under."""

    source: str
    call: ops.ObservedCall


@dataclass
class Capture:
    """Calls kept while a model ran, in bounded memory.

    At most `per_site` calls of a site, evenly spread over all that it made (None keeps all), and at most `limit_bytes`
    of tensors together. seen counts every call, short those with fewer than `MIN_KV_LEN` keys or with one query row,
    over_limit those that found no memory left.
    """

    source: str
    per_site: int | None = None
    limit_bytes: int = 1 << 30
    seen: int = 0
    short: int = 0
    over_limit: int = 0
    used: int = 0
    _sites: dict[str, list[Captured]] = field(default_factory=dict)
    _strides: dict[str, tuple[int, int]] = field(default_factory=dict)  # site -> (calls seen, every how many is kept)

    @property
    def calls(self) -> list[Captured]:
        """What was kept, by site in the order of their first calls."""
        return [c for kept in self._sites.values() for c in kept]

    def observe(self, call: ops.ObservedCall) -> None:
        """To be given to `ops.observe`."""
        self.seen += 1
        if call.key.shape[2] < MIN_KV_LEN or call.query.shape[2] < 2:
            self.short += 1
            return
        site = call.site.partition("/")[2]
        number, stride = self._strides.get(site, (0, 1))
        self._strides[site] = number + 1, stride
        if number % stride:
            return
        size = _bytes(call)
        if self.used + size > self.limit_bytes:
            self.over_limit += 1
            return
        self.used += size
        tensors = {n: getattr(call, n).detach().to("cpu", copy=True) for n in ("query", "key", "value")}
        mask = None if call.attn_mask is None else call.attn_mask.detach().cpu()
        kept = self._sites.setdefault(site, [])
        kept.append(Captured(self.source, call._replace(site=site, attn_mask=mask, **tensors)))
        if self.per_site is not None and len(kept) > self.per_site:
            self.used -= sum(_bytes(c.call) for c in kept[1::2])
            del kept[1::2]
            self._strides[site] = number + 1, 2 * stride


@contextmanager
def capturing(source: str, per_site: int | None = None, limit_bytes: int = 1 << 30) -> Iterator[Capture]:
    """Keep Q, K and V of the attention calls of patched models inside the with-block."""
    capture = Capture(source, per_site, limit_bytes)
    with ops.observe(capture.observe), torch.no_grad():
        yield capture


def capture(
    model: Any, run: Callable[[Any], Any], source: str, limit_bytes: int = 1 << 30, per_site: int | None = None
) -> list[Captured]:
    """Q, K and V of the attention calls while `run(model)` runs exact; `Capture` says which are kept."""
    with applied(model, Policy(recipe="exact")), capturing(source, per_site, limit_bytes) as kept:
        run(model)
    return kept.calls


def capture_task(judge: Judge, source: str, jobs: int = 1, per_site: int = 4) -> Capture:
    """Calls of the judge's task: its first `jobs` windows, pictures or clips, run exact."""
    with capturing(source, per_site) as kept:
        judge.run_exact(jobs)
    return kept


def score(captured: Captured, recipe: str) -> dict[str, float]:
    """Cosine, relative L1 and the relative L1 of the worst row of one call under a recipe, against exact attention."""
    return _metrics(attend(captured.call, recipe), attend(captured.call, "exact"))


def attend(call: ops.ObservedCall, recipe: str) -> Tensor:
    """The call's output [B, Hq, q_len, Dv] in float32 under a recipe of the reference backend."""
    visibility = visibility_of(
        call.query.shape[2], call.key.shape[2], call.attn_mask, call.left, call.right, call.top_left
    )
    tensors = (call.query.float(), call.key.float(), call.value.float())
    chosen = parse_recipe(recipe)
    if chosen.is_exact:
        return exact_attention(*tensors, visibility, scale=call.scale)[0]
    return quantized_attention(*tensors, visibility, chosen, scale=call.scale)[0]


def measure(calls: list[Captured], progress: Progress = lambda label, done, total: None) -> Scores:
    """Every call under every recipe of TABLES and RUNGS."""
    recipes = list(dict.fromkeys([*(r for row in TABLES.values() for r in row), *RUNGS]))
    scores: Scores = {recipe: [] for recipe in recipes}
    for number, captured in enumerate(calls):
        exact = attend(captured.call, "exact")
        for i, recipe in enumerate(recipes):
            progress(
                f"variants, call {number + 1} of {len(calls)}", number * len(recipes) + i, len(calls) * len(recipes)
            )
            scores[recipe].append(_metrics(attend(captured.call, recipe), exact))
    progress("variants", 1, 1)
    return scores


def tables(scores: Scores) -> dict[str, list[dict[str, Any]]]:
    """Every table of TABLES: one row a recipe with the average over calls and the worst call."""
    return {
        title: [{"recipe": recipe, **_summary(scores[recipe])} for recipe in recipes]
        for title, recipes in TABLES.items()
    }


def by_site(calls: list[Captured], scores: Scores) -> list[dict[str, Any]]:
    """One row a site and rung: site, recipe, calls, and what `tables` says of a recipe, over the site's calls alone."""
    rows = []
    for site in dict.fromkeys(c.call.site for c in calls):
        own = [i for i, c in enumerate(calls) if c.call.site == site]
        for recipe in RUNGS:
            found = [scores[recipe][i] for i in own]
            rows.append({"site": site, "recipe": recipe, "calls": len(own), **_summary(found)})
    return rows


def ablate(kept: Capture, progress: Progress = lambda label, done, total: None) -> dict[str, Any]:
    """What ablation.json holds of one model: its calls, the tables, and the rungs site by site.

    Raises AblationError if no call was kept.
    """
    calls = kept.calls
    if not calls:
        raise AblationError(
            f"{kept.source}: none of {kept.seen} attention calls can be ablated: {kept.short} have fewer than "
            f"{MIN_KV_LEN} keys or a single query row, {kept.over_limit} did not fit into "
            f"{kept.limit_bytes / 2**30:g} GiB; give longer windows, larger pictures, or fewer of them"
        )
    scores = measure(calls, progress)
    return {
        "calls": len(calls),
        "calls_seen": kept.seen,
        "calls_short": kept.short,
        "calls_over_limit": kept.over_limit,
        "tokens": max(c.call.key.shape[2] for c in calls),
        "tables": tables(scores),
        "sites": by_site(calls, scores),
    }


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


def page(record: dict[str, Any]) -> str:
    """ablation.md: every model's tables, with what they are and how they came about."""
    models = record["models"]
    tokens = ", ".join(f"{m['tokens']} in {title}" for title, m in models.items())
    text = f"""# Operator ablations on real tensors

Made by `{record["command"]}` on {record["environment"]["cpu"]["name"]}, torch \
{record["environment"]["packages"]["torch"]}; the numbers are in `ablation.json`.

Q, K and V are captured from trained models at work, at every site with at least {MIN_KV_LEN} keys; keys a call, at \
most: {tokens}. Each call is computed under every variant with the reference numerics and compared with the exact \
result in float32: cosine and relative L1 over the whole output of a call, and the relative L1 of its worst row. The \
paper (SageAttention2, arXiv 2411.10958, tables 2 to 4 and 14 to 16) finds: smoothing none < K < Q < Q+K, granularity \
tensor < block < warp <= thread with per-token close by, and FP16 P and V above E4M3.

"""
    for title, model in models.items():
        left = f", of {model['calls_seen']} made" if model["calls_seen"] != model["calls"] else ""
        text += f"## {title}: {model['calls']} calls{left}\n\n{markdown(model['tables'])}\n"
    return text.rstrip() + "\n"


def _bytes(call: ops.ObservedCall) -> int:
    return sum(t.numel() * t.element_size() for t in (call.query, call.key, call.value))


def _metrics(got: Tensor, exact: Tensor) -> dict[str, float]:
    return {
        "cosine": cosine(got, exact),
        "relative_l1": relative_l1(got, exact),
        "worst_row": worst_row(got, exact),
    }


def _summary(scores: Iterable[dict[str, float]]) -> dict[str, float]:
    found = list(scores)

    def mean(key: str) -> float:
        return sum(s[key] for s in found) / len(found)

    return {
        "cosine": mean("cosine"),
        "relative_l1": mean("relative_l1"),
        "cosine_worst": min(s["cosine"] for s in found),
        "relative_l1_worst": max(s["relative_l1"] for s in found),
        "worst_row": max(s["worst_row"] for s in found),
    }
