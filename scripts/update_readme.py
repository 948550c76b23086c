"""Rewrite the tables of README.md and of the pages under docs/: figures from the JSON files under docs/results, reasons
from sage_patch/reasons.py, so that none is typed by hand.

    python scripts/update_readme.py [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. With --check nothing is changed, and a stale
file is a failure.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from sage_patch.evaluation.bench import tables
from sage_patch.evaluation.bench.targets import targets_tables
from sage_patch.reasons import REASONS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
_DOCS = ("speed", "quality", "quantized_cache", "policy", "results/kernels_h200", "results/targets_h200")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in _DOCS))


def quickstart() -> str:
    """Quality of every measured recipe on the quickstart's model."""
    run = _load("quickstart_cpu.json")
    lines = [
        "| recipe | mean KL, nats | top-1 agreement | perplexity change | NLL change, 2 s.e. |",
        "|---|---|---|---|---|",
    ]
    for row in run["rows"]:
        found = row["metrics"]
        lines.append(
            f"| `{row['recipe']}` | {found['kl']:.4f} | {100 * found['top1']:.2f} % "
            f"| {100 * found['ppl_change']:+.2f} % | {found['delta_nll']:+.4f} ± {found['delta_nll_2se']:.4f} |"
        )
    packages = run["environment"]["packages"]
    task = run["config"]["task"]
    lines += [
        "",
        f"SmolLM2-135M-Instruct, {task['windows']} windows of {task['window_tokens']} tokens, float32 on a CPU with "
        f"the reference backend, torch {packages['torch']}, transformers {packages['transformers']}; "
        "`sage-patch run configs/quickstart.yaml`, data in `docs/results/quickstart_cpu.json`.",
    ]
    return "\n".join(lines)


PIPELINES = {
    "image": "small Flux, trained on clip art, 64 px",
    "video": "small Wan, trained on rendered scenes, 64 px",
    "unet": "terrain UNet, 128 px",
}


def pictures() -> str:
    """Quality of every measured recipe on the pipelines of the quickstarts."""
    lines = ["| drawn by | recipe | PSNR, dB | worst frame | SSIM | worst frame |", "|---|---|---|---|---|---|"]
    runs = {kind: _load(f"quickstart_{kind}_cpu.json") for kind in PIPELINES}
    for kind, run in runs.items():
        frames = run["pictures"][0]["frames"]
        many = f"{len(run['pictures'])} {'clips' if kind == 'video' else 'pictures'}"
        size = f"{many}{f' of {frames} frames' if frames > 1 else ''}, steps: {run['config']['task']['steps']}"
        for i, row in enumerate(run["rows"]):
            found = row["metrics"]
            lines.append(
                f"| {f'{PIPELINES[kind]}; {size}' if i == 0 else ''} | `{row['recipe']}` | {found['psnr']:.1f} "
                f"| {found['worst_psnr']:.1f} | {found['ssim']:.4f} | {found['worst_ssim']:.4f} |"
            )
    packages = runs["image"]["environment"]["packages"]
    commands = ", ".join(f"`{run['command']}`" for run in runs.values())
    lines += [
        "",
        "Against the unpatched pipeline from the same seed, on the raw frames; float32 on a CPU with the reference "
        f"backend, torch {packages['torch']}, diffusers {packages['diffusers']}; {commands}, data in "
        "`docs/results/quickstart_{image,video,unet}_cpu.json`.",
    ]
    return "\n".join(lines)


def families() -> str:
    """How many transformers families run, and how."""
    record = _load("family_matrix.json")
    counts = record["counts"]
    return (
        f"Over {counts['built']} families of transformers {record['versions']['transformers']} built as tiny random "
        f"models ({counts['kinds']}): {counts['exact_equal']} of {counts['routed']} routed ones equal eager attention "
        f"within 1e-5 on the exact path, {counts['quantized_everywhere']} run every call quantized under the default "
        f"recipe and the rest say why not, and all {counts['refused']} with attention code of their own refuse. "
        "Data in `docs/results/family_matrix.json`, made by `python scripts/family_matrix.py`." + _diffusers_classes()
    )


def _diffusers_classes() -> str:
    record = _load("diffusers_matrix.json")
    counts = record["counts"]
    return (
        f"\n\nOf the {counts['classes']} transformer, UNet and ControlNet classes of diffusers "
        f"{record['versions']['diffusers']}, {counts['outcomes']['routed']} were run as tiny random models: "
        f"{counts['exact_bit_equal']} equal the unpatched model bit for bit on the exact path, "
        f"{counts['quantized_everywhere']} run every call quantized under the default recipe and the rest say why not; "
        f"{counts['outcomes']['refused']} refuse and {counts['outcomes']['built']} were planned but not run. Data in "
        "`docs/results/diffusers_matrix.json`, made by `python scripts/diffusers_matrix.py`."
    )


WAYS = {
    "sdpa_default": "torch default",
    "exact": "patched, all exact",
    "fa3_bf16": "FlashAttention-3",
    "qk_int8_pv_fp8": "`qk_int8_pv_fp8`",
    "chord": "with `exp=chord`",
    "qk_int8_pv_fp16": "`qk_int8_pv_fp16`",
}


def models() -> str:
    """End-to-end time of whole forward passes on a GPU, with the error and the all-exact control beside."""
    record = _load("models_h200.json")
    rows = [row for row in record.values() if isinstance(row, dict) and "ms" in row.get("sdpa_default", {})]
    ways = {way: title for way, title in WAYS.items() if any("ms" in row.get(way, {}) for row in rows)}
    lines = [
        "| one forward pass, bf16, random weights | "
        + " | ".join(f"{w}, ms" for w in ways.values())
        + " | gain | in a burst | rel. L1 |",
        "|---" * (len(ways) + 4) + "|",
    ]
    for row in rows:
        times = " | ".join(f"{row[w]['ms']:.1f}" if "ms" in row.get(w, {}) else "" for w in ways)
        ours, base = row["qk_int8_pv_fp8"], row["sdpa_default"]
        lines.append(
            f"| {row['model']} | {times} | {ours['speedup_over_default']:.2f} x "
            f"| {base['burst_ms'] / ours['burst_ms']:.2f} x | {ours['rel_l1']:.4f} |"
        )
    most = max(row[way]["peak_over_default"] for row in rows for way in ways if "ms" in row.get(way, {}))
    packages = record["environment"]["packages"]
    lines += [
        "",
        f"{record['card']} (driver, power limit), torch {packages['torch']}, diffusers {packages['diffusers']}; "
        f"`{record['command']}`; the ways take turns, each from rest: a burst is of the first passes, the other times "
        "of those that follow for a second; medians, all pre-processing included. Gain and rel. L1 (of the model's "
        "output against the unpatched one) are of `qk_int8_pv_fp8`. Peak memory grows by at most "
        f"{100 * (most - 1):.1f} %. Calls below the measured crossover stay exact, the cross-attention of Wan and all "
        "of Flux under FP16 PV among them.",
    ]
    return "\n".join(lines)


def packed() -> str:
    """What packed sequences and key masks cost, against the dense call for the same work."""
    record = _load("packed_h200.json")
    rows = {(r["batch"], r["tokens"], r["is_causal"], r["case"]): r for r in record["rows"]}
    cases = ("packed", "one key hidden", "2 % of the keys hidden", "window that hides nothing")
    lines = ["| batch x tokens | dense, ms | " + " | ".join(cases) + " |", "|---|---|---|---|---|---|"]
    for batch, tokens in sorted({key[:2] for key in rows}, key=lambda shape: shape[0] * shape[1]):
        if tokens < 4096:
            continue  # the time of a call from Python, not of the GPU
        for causal in (False, True):
            dense = rows[batch, tokens, causal, "dense"]
            cells = [
                f"{r['burst_to_dense']:.2f} / {r['sustained_to_dense']:.2f}"
                for r in (rows[batch, tokens, causal, case] for case in cases)
            ]
            mask = "causal" if causal else "full"
            lines.append(f"| {batch} x {tokens:,}, {mask} | {dense['burst_ms']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines) + (
        "\n\nTime over that of the dense call for the same work, as a burst / sustained: `sage_attention`, "
        f"`{rows[1, 6480, False, 'dense']['recipe']}`, 24 heads, head_dim 128, bf16, on one NVIDIA H200, torch "
        f"{record['environment']['packages']['torch']}; `{record['command']}`, every output checked against float64 "
        f"(rel. L1 at most {max(r['rel_l1'] for r in record['rows']):.4f})."
    )


def kernels() -> str:
    """Speed of the default recipe beside its peers, and its error, at the lengths that people ask about."""
    run = _load("kernels_h200.json")
    is_new = any("burst" in row for row in run["rows"])  # measured as bursts and sustained
    rows = [r for r in run["rows"] if r["kv_len"] in (4096, 8192, 32768) and r["head_dim"] in (64, 128)]
    rows = [r for r in rows if not is_new or r["batch"] * r["num_heads"] == 32]
    titles = {
        "sage2_op": "ours, whole call", "sage2_kernel": "ours, kernel alone",
        "sage2_exp_chord_op": "`exp=chord`, whole call", "sage2_exp_chord_kernel": "`exp=chord`, kernel alone",
        "fa3_fp8_kernel": "FA3 FP8, kernel alone", "cudnn_fp8_kernel": "cuDNN FP8, kernel alone",
        "fa3_bf16": "FA3 bf16", "sdpa_cudnn": "cuDNN bf16", "sdpa_default": "torch default",
    }  # fmt: skip
    if not is_new:
        del titles["sdpa_default"]
    columns = {c: title for c, title in titles.items() if any(tables.speed(row, c) for row in rows)}
    wrong = {"sage2_op": "rel. L1, ours", "sage2_exp_chord_op": "`exp=chord`", "fa3_fp8_kernel": "FA3 FP8"}
    wrong = {c: title for c, title in wrong.items() if c in columns}
    lines = [
        f"| head_dim, mask, tokens | {' | '.join(columns.values())} | {' | '.join(wrong.values())} |",
        "|---" * (1 + len(columns) + len(wrong)) + "|",
    ]
    for row in sorted(rows, key=lambda r: (-r["head_dim"], r["is_causal"], r["kv_len"])) if is_new else rows:
        cells = [tables.speed(row, c) for c in columns] + [tables.error(row, c) for c in wrong]
        mask = "causal" if row["is_causal"] else "full"
        lines.append(f"| {row['head_dim']} {mask} {row['kv_len']} | {' | '.join(cells)} |")
    facts, packages = run["environment"], run["environment"]["packages"]
    how = (
        "one item of 32 heads; sustained / in a burst of 20 calls after half a second of rest; `sage-patch bench`"
        if is_new
        else "`sage-patch bench`"
    )
    lines += [
        "",
        f"TOPS on one {facts['device']} ({facts['power_limit']}, driver {facts['driver']}), bf16 inputs, N(0,1), torch "
        f"{packages['torch']}, fa3-fwd {packages['fa3-fwd']}; {how}, every output checked against "
        "float64 in the same run. FP8 peers start from inputs that are already quantized, our whole call from bf16. "
        "All lengths: [docs/results/kernels_h200.md](docs/results/kernels_h200.md), what they were to reach: "
        "[docs/results/targets_h200.md](docs/results/targets_h200.md).",
    ]
    return "\n".join(lines)


# The benchmark's presets, of those that were recorded.
BENCHES = {
    "kernels_h200.json": "Kernels and their peers",
    "kernels_cudnn_fp8_h200.json": "Shapes for which NVIDIA publishes cuDNN's FP8 attention",
    "kernels_models_h200.json": "Self-attention as models call it",
}


def all_kernels() -> str:
    """Everything that the benchmark recorded."""
    parts = []
    for name, title in BENCHES.items():
        if (RESULTS / name).is_file():
            run = _load(name)
            shown = "\n".join("#" + table.markdown() for table in tables.bench_tables(run))
            parts.append(f"## {title}\n\n`{run['environment']['command']}`, data in `{name}`.\n\n{shown}".strip())
    return "\n\n".join(parts)


def targets() -> str:
    """What was to be reached, and what the recorded runs reach."""
    cards = json.loads((ROOT / "sage_patch" / "kernels" / "crossover.json").read_text())["cards"]
    bench, models = _load("kernels_h200.json"), _load("models_h200.json")
    found = targets_tables(bench, models, cards.get(bench["environment"]["device"]))
    return "\n".join(table.markdown() for table in found).strip()


def masks() -> str:
    """What masks and the like cost the default recipe, beside torch's attention with the same mask."""
    run = _load("masks_h200.json")
    rows = [row for row in run["rows"] if row["recipe"] == "qk_int8_pv_fp8"]
    lines = ["| 32,768 tokens | whole call, ms | torch, ms | rel. L1 |", "|---|---|---|---|"]
    for row in rows:
        torch_ms = f"{row['sdpa_ms']:.1f}" if "sdpa_ms" in row else "not in SDPA"
        lines.append(f"| {row['case']} | {row['op_ms']:.1f} | {torch_ms} | {row['rel_l1']:.4f} |")
    facts = run["environment"]
    lines += [
        "",
        f"`qk_int8_pv_fp8`, batch 1, {rows[0]['num_heads']} heads, head_dim {rows[0]['head_dim']}, bf16, on one "
        f"{facts['device']}, torch {facts['packages']['torch']}; `{run['command']}`. Added masks run no "
        "faster than in torch, so they stay exact unless lengths are set (reason `mask_float`).",
    ]
    return "\n".join(lines)


def decoding() -> str:
    """One decoding step over a long cache: pages beside 16-bit caches."""
    run = _load("decode_h200.json")
    lines = [
        "| batch x tokens | attention over pages, us | SDPA | FA3 "
        "| with the new token stored, us | SDPA | memory | rel. L1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in run["rows"]:
        t = row["microseconds"]
        lines.append(
            f"| {row['batch']} x {row['kv_len']:,} | {t['attend']:.0f} | {t['sdpa']:.0f} | {t['fa3_bf16']:.0f} "
            f"| {t['step']:.0f} | {t['sdpa'] + t['index_copy']:.0f} | {row['memory']:.2f} "
            f"| {row['errors']['attend']['rel_l1']:.4f} |"
        )
    facts, row = run["environment"], run["rows"][0]
    lines += [
        "",
        f"One layer of Llama-3-8B's shape ({row['num_heads']} query heads, {row['num_kv_heads']} kv heads, head_dim "
        f"{row['head_dim']}), one new token, bf16, N(0,1), on one {facts['device']}, torch "
        f"{facts['packages']['torch']}; `{run['command']}`. SDPA and FlashAttention-3 read a bf16 cache; memory is "
        "against that cache. Steps are replayed from CUDA graphs over caches far larger than the L2.",
    ]
    return "\n".join(lines)


GENERATION = {"generation_h200.json": "H200, bf16", "generation_cpu.json": "CPU, float32"}


def generation() -> str:
    """Whether patched models write the unpatched ones' text, over 16-bit caches and over quantized ones."""
    lines = [
        "| model, cache | texts | unpatched model's own | first different at a near-tie | elsewhere | mean KL, nats |",
        "|---|---|---|---|---|---|",
    ]
    for run, device in _generation_runs():
        for model in run["models"]:
            for cache in ("16-bit", "quantized"):
                ways = [w for w in model["ways"] if ("cache" in w) == (cache == "quantized") and "kl" in w]
                texts = sum(w["texts"] for w in ways)
                gaps = [d["gap"] for w in ways for d in w["differences"]]
                near = sum(gap <= run["near_tie"] for gap in gaps)
                kl = sum(w["kl"] * w["texts"] for w in ways) / texts
                lines.append(
                    f"| {model['model']} ({device}), {cache} | {texts} | {texts - len(gaps)} | {near} "
                    f"| {len(gaps) - near} | {kl:.4f} |"
                )
    commands = ", ".join(f"`{run['command']}`" for run, _ in _generation_runs())
    return "\n".join(lines) + (
        "\n\nGreedy texts in every way of generating but beam search, all attention calls quantized; a near-tie is a "
        f"gap of at most 0.25 nats in the unpatched model's logits. Way by way: "
        f"[docs/quantized_cache.md](docs/quantized_cache.md); {commands}."
    )


def generation_ways() -> str:
    """Every way of generating by itself."""
    parts = []
    for run, device in _generation_runs():
        for model in run["models"]:
            parts.append(
                f"{model['model']}, {device}; {model['prompts']} prompts ({model['drafted']} with drafts) of "
                f"{model['prompt_tokens']} tokens, {model['new_tokens']} new ones:\n\n{_ways(model)}"
            )
        packages = run["environment"]["packages"]
        parts.append(
            f"`{run['command']}`, torch {packages['torch']}, transformers {packages['transformers']}. {_unpatched(run)}"
        )
    return "\n\n".join(parts)


def _ways(model: Any) -> str:
    lines = [
        "| way | equal texts | same tokens before the first difference | gap there, nats | mean KL | change of gaps "
        "| calls: quantized, over pages, exact | bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way in model["ways"]:
        equal = f"{way['texts'] - len(way['differences'])} of {way['texts']}"
        gaps = ", ".join(f"{d['gap']:.2f}" for d in way["differences"] if "gap" in d)
        if "beams" in way:
            gaps = "scores " + ", ".join(f"{b['score'] - b['exact_score']:+.3f}" for b in way["beams"])
        kl = f"{way['kl']:.4f} | {way['gap_error']:.2f}, {way['gap_error_99']:.2f}" if "kl" in way else " | "
        calls = way["calls"]
        exact = ", ".join(f"{n} `{reason}`" for reason, n in calls["exact"].items()) or "0"
        ratio = f"{way['cache']['ratio']:.2f}" if "cache" in way else ""
        lines.append(
            f"| {way['way']} | {equal} | {100 * way['same_before']:.0f} % | {gaps} | {kl} "
            f"| {calls['quantized']}, {calls['over_cache']}, {exact} | {ratio} |"
        )
    return "\n".join(lines)


def _unpatched(run: Any) -> str:
    """How far the unpatched model's own ways are apart."""
    found = [way for model in run["models"] for way in model["unpatched"].values()]
    gaps = [d["gap"] for way in found for d in way["differences"]]
    if not gaps:
        return "The unpatched models write one text over dynamic and static caches, in chunks and from drafts."
    return (
        "The unpatched models' own ways (static cache, chunks, drafts) leave the text of the dynamic cache "
        f"{len(gaps)} times, at gaps of up to {max(gaps):.2f} nats and a mean KL of up to "
        f"{max(way['kl'] for way in found):.4f}: rounding alone does that."
    )


def _generation_runs() -> list[tuple[Any, str]]:
    """The recorded runs with the models that they could load."""
    runs = [(_load(name), device) for name, device in GENERATION.items() if (RESULTS / name).is_file()]
    for run, _ in runs:
        run["models"] = [model for model in run["models"] if "ways" in model]
    return runs


def reasons() -> str:
    """Every word that a call which ran exact is counted under."""
    lines = ["| reason | what it says | with `on_unsupported: error` |", "|---|---|---|"]
    for word, reason in REASONS.items():
        said = reason.sentence.replace("{}", "NAME")
        lines.append(f"| `{word.replace('*', 'NAME')}` | {said} | {'refused' if reason.is_error else 'exact'} |")
    return "\n".join(lines)


TABLES = {
    "all_kernels": all_kernels,
    "decoding": decoding,
    "kernels": kernels,
    "masks": masks,
    "quickstart": quickstart,
    "pictures": pictures,
    "families": families,
    "models": models,
    "packed": packed,
    "generation": generation,
    "generation_ways": generation_ways,
    "reasons": reasons,
    "targets": targets,
}


def _load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def rewrite(text: str) -> str:
    """The text with every table made anew. Raises KeyError for a table that no function here makes."""
    pattern = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    for page in PAGES:
        before = page.read_text()
        after = rewrite(before)
        if options.check and before != after:
            sys.exit(f"{page.name} is stale: run python scripts/update_readme.py")
        if not options.check:
            page.write_text(after)


if __name__ == "__main__":
    main()
