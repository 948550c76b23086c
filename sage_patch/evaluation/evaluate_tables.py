"""Results of an evaluation -> tables: quality and speed in one row, the needle test, the sites, the targets."""

from __future__ import annotations

from typing import Any

from sage_patch.evaluation.tables import Table, by_site, calls_text, grouped, heads_text, targets_tables

# metric -> (heading, how it is written)
_TEXT = {
    "kl": ("mean KL", "{:.5f}"),
    "top1": ("top-1", "{:.4f}"),
    "ppl": ("ppl", "{:.3f}"),
    "ppl_change": ("change", "{:+.2%}"),
    "agreement": ("greedy", "{:.3f}"),
}
_PICTURES = {
    "psnr": ("PSNR, dB", "{:.1f}"),
    "worst_psnr": ("worst", "{:.1f}"),
    "ssim": ("SSIM", "{:.4f}"),
    "worst_ssim": ("worst", "{:.4f}"),
    "ms_ssim": ("MS-SSIM", "{:.4f}"),
    "temporal_error": ("temporal", "{:.4f}"),
    "lpips": ("LPIPS", "{:.4f}"),
    "clip_score": ("CLIP", "{:.2f}"),
    "fid": ("FID", "{:.3f}"),
}
_ONE = {"text": "window", "image": "picture", "video": "clip"}
_WORDS = {
    "text": "KL is KL(unpatched || patched) in nats a token; top-1 the share of tokens with the same likeliest "
    "successor; greedy the share of the prompts' continuations before the first different token.",
    "image": "Each picture against the unpatched one of the same seed, as the pipeline made them; mean and worst.",
    "video": "Each frame against the unpatched one of the same seed, as the pipeline made them; mean and worst. "
    "temporal: sum |(a' - a) - (e' - e)| / sum |e' - e| over neighbouring frames, a patched and e unpatched.",
}


def evaluation_tables(results: dict[str, Any]) -> list[Table]:
    """The tables of `sage-patch evaluate`, from its results or from results.json read back."""
    return [_quality(results), *_needle(results), _sites(results), *targets_tables(results)]


def _quality(results: dict[str, Any]) -> Table:
    wanted = _TEXT if results["kind"] == "text" else _PICTURES
    base = results["unpatched"]
    rows = [(_name(None), *(_figure(base, m, f) for m, (_, f) in wanted.items()), *_cost(base, unpatched=True))]
    for row in results["rows"]:
        rows.append((_name(row), *(_figure(row, m, f) for m, (_, f) in wanted.items()), *_cost(row, unpatched=False)))
    columns = (
        "<measured", *(head for head, _ in wanted.values()), "attention, s", "gain", "all, s", "gain", "peak GiB"
    )  # fmt: skip
    note = _WORDS[results["kind"]] + (
        f" Seconds are of the fastest {_ONE[results['kind']]}: inside attention, and from end to end; gain is the "
        "unpatched model's time over the patched one's."
    )
    reasons: dict[str, list[str]] = {}
    for row in results["rows"]:
        for metric, why in row["unavailable"].items():
            names = reasons.setdefault(why, [])
            if metric not in names:
                names.append(metric)
    note += "".join(f" Unavailable: {', '.join(names)} ({why})." for why, names in reasons.items())
    if results["kind"] == "text" and not any(_quantized(row["prompt_calls"]) for row in results["rows"]):
        note += " No call of the prompts was long enough to be quantized, so greedy tests nothing here."
    if any(c["backend"] == "reference" for row in results["rows"] for c in row["calls"]):
        note += (
            " The reference backend (plain PyTorch) computed the quantized calls: the same numerics as the kernels, "
            "slower than the unpatched model. Speed needs a GPU."
        )
    return Table("Quality and speed against the unpatched model", columns, tuple(rows), note)


def _quantized(calls: list[dict[str, Any]]) -> bool:
    return any(c["recipe"] != "exact" for c in calls)


def _name(row: dict[str, Any] | None) -> str:
    if row is None:
        return "unpatched"
    return row["recipe"] if row["name"] != "policy" else f"policy ({row['recipe']})"


def _figure(row: dict[str, Any], metric: str, form: str) -> str:
    if metric not in row["metrics"]:
        return ""
    value = row["metrics"][metric]
    return "inf" if value is None else form.format(value)  # of equal pictures, where JSON has null


def _cost(row: dict[str, Any], unpatched: bool) -> tuple[str, ...]:
    """Inside attention and in all, each with its gain over the unpatched model; and the memory."""
    cells = []
    for what in ("attention_seconds", "seconds"):
        seconds = row["fastest"][what]
        cells.append("" if seconds is None else f"{seconds:.3f}")
        cells.append("" if unpatched else _gain(row["baseline_fastest"][what], seconds))
    peak = row["peak_memory"]
    return *cells, "" if peak is None else f"{peak / 2**30:.2f}"


def _gain(base: float | None, seconds: float | None) -> str:
    return f"{base / seconds:.2f} x" if base and seconds else ""


def _needle(results: dict[str, Any]) -> list[Table]:
    if "needle" not in results:
        return []
    exact = results["needle"][0]
    rows = []
    for row in results["needle"]:
        agreement = "" if row is exact else f"{row['agreement']:.3f}"
        cells = "; ".join(
            f"{length}: {''.join('+' if c['right'] else '-' for c in row['cells'] if c['length'] == length)}"
            for length in dict.fromkeys(c["length"] for c in row["cells"])
        )
        rows.append(
            (row["name"], f"{row['right']:.2f}", f"{row['mrr']:.3f}", f"{row['log_likelihood']:.3f}", agreement, cells)
        )
    depths = ", ".join(f"{d:g}" for d in dict.fromkeys(c["depth"] for c in exact["cells"]))
    note = (
        "A number of six digits hidden in the task's text. right: share of greedy answers that are the number; MRR: "
        "mean of 1 / rank of its tokens; log p: their mean log likelihood in nats; same: share of answer tokens where "
        f"the unpatched model says the same. By length in tokens: found (+) or not (-) at the depths {depths}."
    )
    if exact["right"] == 0:
        note += " The unpatched model finds none itself, so only `same` tells something about the patch."
    note += "".join(
        f" {row['name']}: no call was long enough to be quantized, so this row tests nothing."
        for row in results["needle"][1:]
        if not _quantized(row["calls"])
    )
    return [Table("Needle test", ("<measured", "right", "MRR", "log p", "same", "<found"), tuple(rows), note)]


def _sites(results: dict[str, Any]) -> Table:
    calls = by_site(results["rows"][0]["calls"])
    errors = {row["site"]: row for row in results["sites"]}
    rows = [row | {"ran": calls_text(calls.get(row["name"], []))} for row in results["plan"]]
    shown = ("role", "heads", "kv_heads", "head_dim", "recipe", "steps", "reason", "ran")
    lines = []
    for names, count, row in grouped(rows, lambda r: tuple(r[k] for k in shown)):
        alike = [errors[r["name"]] for r in rows if all(r[k] == row[k] for k in shown)]
        worst = max(alike, key=lambda e: e.get("relative_l1", -1))
        what = (f"{worst['relative_l1']:.4f}", f"{worst['worst_row']:.3f}") if "relative_l1" in worst else ("", "")
        lines.append(
            (names, str(count), row["role"], heads_text(row), row["recipe"], row["steps"], row["reason"], row["ran"],
             *what)
        )  # fmt: skip
    columns = (
        "<sites", "count", "<role", "<heads", "<policy", "<at steps", "<reason", "<ran", "rel L1", "worst row"
    )  # fmt: skip
    note = (
        "Calls are for each site, of the policy's row above. rel L1 and worst row are the largest errors that one of "
        "these sites makes by itself, on the unpatched model's inputs."
    )
    if results["worst_site"] is not None:
        worst = errors[results["worst_site"]]
        at = "" if worst["step"] is None else f" at step {worst['step']}"
        note += f" Worst site: {worst['site']}{at}, rel L1 {worst['relative_l1']:.4f} under {worst['recipe']}."
    return Table("Sites under the policy", columns, tuple(lines), note)
