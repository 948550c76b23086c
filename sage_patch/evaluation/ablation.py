"""Operator ablations on real tensors: what smoothing, scale granularity and the type of P and V buy, as the paper asks,
and what other methods would.

`sage-patch ablate` captures Q, K and V from a model that runs exact, computes each call under every variant and
compares it with the exact result. SageAttention2 (arXiv 2411.10958), tables 2 to 4 and 14 to 16.

Sinks and logit softcapping are left out of both sides: the variants differ in Q, K, P and V only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sage_patch.errors import SagePatchError
from sage_patch.evaluation.anatomy import anatomy
from sage_patch.evaluation.calls import MIN_KV_LEN, Capture, capturing, compute
from sage_patch.evaluation.environment import record
from sage_patch.evaluation.judge import LADDER, Progress, judge_for
from sage_patch.evaluation.methods import INT4, INT8, METHODS
from sage_patch.evaluation.metrics import errors
from sage_patch.evaluation.tables import plain, write_whole
from sage_patch.kernels import ops
from sage_patch.schema import RunConfig

# table -> recipes and METHODS; the first five in the order the paper expects from worst to best
TABLES: dict[str, tuple[str, ...]] = {
    "smoothing, INT4": tuple(f"{INT4},smooth={s}" for s in ("none", "k", "q", "qk")),
    "smoothing, INT8": tuple(f"{INT8},smooth={s}" for s in ("none", "k", "q", "qk")),
    "granularity, INT4": tuple(f"{INT4},granularity={g}" for g in ("tensor", "block", "warp", "thread", "token")),
    "granularity, INT8": tuple(f"{INT8},granularity={g}" for g in ("tensor", "block", "warp", "thread", "token")),
    "P and V, INT8 Q and K": (f"{INT8},smooth_v=off", INT8, "qk_int8_pv_fp16:rotate=none"),
    **{
        f"outlier channels, INT{bits}": (
            base,
            f"{base} after Outlier Suppression+",
            f"{base} after SmoothQuant",
            base.replace("rotate=none", "rotate=hadamard"),
        )
        for bits, base in ((4, INT4), (8, INT8))
    },
    "exponents": tuple(f"qk_int8_pv_fp8:exp={exp}" for exp in ("exact", "duo", "chord")),
    "rotation of the other recipes": tuple(
        f"{recipe}{how}" for recipe in ("qk_int4_pv_fp16", "qk_int8_pv_fp16") for how in (":rotate=none", "")
    ),
    "P and V of other methods, INT8 Q and K": (
        "INT8 P and V (INT-FlashAttention)",
        "INT8 P and V, ranges of P by tile",
        INT8,
        "E4M3 P and V, ranges of P by tile (BAPS)",
    ),
    "a softmax without sinks": (INT8, "qk_int8_pv_fp8 under Softpick"),
}
RUNGS = LADDER[:-1]  # scored site by site, cheapest first

Scores = dict[str, list[dict[str, float]]]  # recipe -> the metrics of every captured call


class AblationError(SagePatchError, ValueError):
    """Nothing to ablate; the message says what was seen and what to do."""


def score_calls(calls: list[ops.ObservedCall], progress: Progress = lambda label, done, total: None) -> Scores:
    """Every call under every recipe and method of TABLES and RUNGS."""
    recipes = list(dict.fromkeys([*(r for row in TABLES.values() for r in row), *RUNGS]))
    scores: Scores = {recipe: [] for recipe in recipes}
    for number, call in enumerate(calls):
        exact = compute(call, "exact")
        for i, recipe in enumerate(recipes):
            progress(
                f"variants, call {number + 1} of {len(calls)}", number * len(recipes) + i, len(calls) * len(recipes)
            )
            method = METHODS.get(recipe)
            scores[recipe].append(errors(compute(call, recipe), exact) if method is None else method(call))
    progress("variants", 1, 1)
    return scores


def tables(scores: Scores) -> dict[str, list[dict[str, Any]]]:
    """Every table of TABLES: one row a recipe or method with the average over calls and the worst call."""
    return {
        title: [{"recipe": recipe, **_summary(scores[recipe])} for recipe in recipes]
        for title, recipes in TABLES.items()
    }


def by_site(calls: list[ops.ObservedCall], scores: Scores) -> list[dict[str, Any]]:
    """One row a site and rung: site, recipe, calls, and what `tables` says of a recipe, over the site's calls alone."""
    rows = []
    for site in dict.fromkeys(c.site for c in calls):
        own = [i for i, c in enumerate(calls) if c.site == site]
        for recipe in RUNGS:
            found = [scores[recipe][i] for i in own]
            rows.append({"site": site, "recipe": recipe, "calls": len(own), **_summary(found)})
    return rows


def ablate_model(
    config: RunConfig,
    title: str,
    progress: Progress,
    jobs: int = 1,
    per_site: int = 4,
    site: str | None = None,
    head: int | None = None,
) -> dict[str, Any]:
    """{"ablation", "anatomy"} of the configured model at its own task, run exact.

    jobs: windows, pictures or clips that are run. per_site: calls kept of each site. site, head: what the anatomy
    shows, by default what INT4 without smoothing damages most. Raises ModelError, PatchError, AblationError or
    AnatomyError.
    """
    judge = judge_for(config, progress)
    with capturing(title, per_site) as kept:
        judge.run_exact(jobs)
    # The anatomy first: it is quick, and it may find that the site was misspelt.
    taken_apart = {"model": judge.facts(), **anatomy(kept.calls, site, head)} if kept.calls else {}
    return {"ablation": {"model": judge.facts(), **ablate(kept, progress)}, "anatomy": taken_apart}


def write_ablation(folder: Path, command: str, found: dict[str, dict[str, Any]]) -> list[Path]:
    """ablation.json, ablation.md and anatomy.json of the models by title; each appears whole or not at all."""
    head = record(command)
    ablation = head | {
        "kind": "ablation",
        "recipes": TABLES,
        "rungs": list(RUNGS),
        "models": {title: f["ablation"] for title, f in found.items()},
    }
    taken_apart = head | {"kind": "anatomy", "models": {title: f["anatomy"] for title, f in found.items()}}
    files = [folder / "ablation.json", folder / "ablation.md", folder / "anatomy.json"]
    write_whole(files[0], json.dumps(plain(ablation), indent=1, allow_nan=False) + "\n")
    write_whole(files[1], page(ablation))
    write_whole(files[2], json.dumps(plain(taken_apart), indent=1, allow_nan=False) + "\n")
    return files


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
    scores = score_calls(calls, progress)
    return {
        "calls": len(calls),
        "calls_seen": kept.seen,
        "calls_short": kept.short,
        "calls_over_limit": kept.over_limit,
        "tokens": max(c.key.shape[2] for c in calls),
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
            f"| `{r['recipe']}` | {100 * r['cosine']:.3f} % | {r['rel_l1']:.4f} | {100 * r['worst_cosine']:.3f} % "
            f"| {r['worst_rel_l1']:.4f} | {r['worst_row']:.4f} |"
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
tensor < block < warp <= thread with per-token close by, and FP16 P and V above E4M3. The tables after those are what \
other methods would do to the same tensors (`sage_patch/evaluation/methods.py`): a Hadamard rotation (QuaRot), \
channel scales moved from K to Q (SmoothQuant), the middle of a channel's range instead of its mean (Outlier \
Suppression+), INT8 P and V (INT-FlashAttention), a range of P for each tile (BAPS), and a softmax that needs no sink \
(Softpick; against its own exact result, since no model here was trained with it).

"""
    for title, model in models.items():
        left = f", of {model['calls_seen']} made" if model["calls_seen"] != model["calls"] else ""
        text += f"## {title}: {model['calls']} calls{left}\n\n{markdown(model['tables'])}\n"
    return text.rstrip() + "\n"


def _summary(scores: Iterable[dict[str, float]]) -> dict[str, float]:
    found = list(scores)

    def mean(key: str) -> float:
        return sum(s[key] for s in found) / len(found)

    return {
        "cosine": mean("cosine"),
        "rel_l1": mean("rel_l1"),
        "worst_cosine": min(s["cosine"] for s in found),
        "worst_rel_l1": max(s["rel_l1"] for s in found),
        "worst_row": max(s["worst_row"] for s in found),
    }
