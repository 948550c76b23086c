"""Results of `run` and `evaluate` -> tables and files, from what results.json holds: it can be read back and shown.

What ran where, quality and cost in one row, each picture, the needle test, the targets, and the texts side by side.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sage_patch.evaluation.environment import machine_name
from sage_patch.evaluation.tables import Table, calls_text, heads_text, plain, write_whole
from sage_patch.figures import BY_KEY, notes, of_kind
from sage_patch.names import grouped

Results = dict[str, Any]
_ONE = {"text": "window", "image": "picture", "video": "clip"}
_COSTS = {"attention_seconds": "Time inside attention", "peak_memory": "Peak memory"}  # that may be unavailable
_REFERENCE = (
    " The reference backend (plain PyTorch) computed the quantized calls: the same numerics as the kernels, slower "
    "than the unpatched model. Speed needs a GPU."
)


def results_tables(results: Results) -> list[Table]:
    """The tables of `run` and `evaluate`; each shows what was measured."""
    tables = [_ran(results), _quality(results), _each(results), _needle(results), _targets(results), _texts(results)]
    return [table for table in tables if table is not None]


def write_results(folder: Path, results: Results, tables: list[Table]) -> list[Path]:
    """results.json and results.md in the folder; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    packages, model = results["environment"]["packages"], results["model"]
    library = "transformers" if results["kind"] == "text" else "diffusers"
    head = (
        f"# {model['class']}, {model['parameters'] / 1e6:.1f} M parameters, {model['dtype']} on {model['device']}\n\n"
        f"{results['date']}, {results['seconds']:.0f} s, `{results['command']}`, "
        f"{machine_name(results['environment'], model['device'])}, torch {packages['torch']}, "
        f"{library} {packages[library]}\n\n"
    )
    files = [folder / "results.json", folder / "results.md"]
    write_whole(files[0], json.dumps(plain(results), indent=1, allow_nan=False) + "\n")
    write_whole(files[1], head + "\n".join(t.markdown() for t in tables))
    return files


def uses_reference(rows: list[Results]) -> bool:
    """Whether the reference backend computed quantized calls of measured rows."""
    return any(c["backend"] == "reference" for row in rows for c in row["calls"])


def _ran(results: Results) -> Table:
    """What every site did under the policy, with its errors."""
    policy, text = results["rows"][0], results["kind"] == "text"
    ran = {"windows" if text else "ran": policy["calls"], "prompts": policy["prompt_calls"]}
    outputs = {row["site"]: row["rel_l1"] for row in policy["outputs"]}
    alone = {row["site"]: row for row in results.get("sites", [])}
    rows = []
    for row in results["plan"]:
        told = {
            part: calls_text([c for c in calls if c["site"] == row["name"]]) for part, calls in ran.items() if calls
        }
        rows.append(row | dict.fromkeys(ran, "") | told)
    shown = ("role", "heads", "kv_heads", "head_dim", "recipe", "steps", "reason", *ran)
    lines = []
    for names, count, row in grouped(rows, lambda r: tuple(r[k] for k in shown)):
        alike = [r["name"] for r in rows if all(r[k] == row[k] for k in shown)]
        inherited = max((outputs[n] for n in alike if n in outputs), default=None)
        worst = max((alone.get(n, {}) for n in alike), key=lambda e: e.get("rel_l1", -1))
        errors = [inherited, worst.get("rel_l1"), worst.get("worst_row")]
        lines.append(
            (names, str(count), row["role"], heads_text(row), row["recipe"], row["steps"], row["reason"],
             *(row[k] for k in ran), *("" if e is None else f"{e:.4f}" for e in errors))
        )  # fmt: skip
    note = "Calls are for each site, over everything that was measured. Exact calls carry their reason."
    if text:
        note += (
            " decode is one new token against the cache, short_q and short_kv are calls too short to gain. rel L1 is "
            "the largest error of these sites' outputs on the first window, with what they inherit from the layers "
            "before them."
        )
    if alone:
        note += " own rel L1 and worst row: what one of these sites errs by itself, on the unpatched model's inputs."
    if results.get("worst_site") is not None:
        worst = alone[results["worst_site"]]
        at = "" if worst["step"] is None else f" at step {worst['step']}"
        note += f" Worst site: {worst['site']}{at}, rel L1 {worst['rel_l1']:.4f} under {worst['recipe']}."
    columns = (
        "<sites", "count", "<role", "<heads", "<policy", "<at steps", "<reason",
        "<ran on windows" if text else "<ran", "<ran on prompts", "rel L1", "own rel L1", "worst row",
    )  # fmt: skip
    note += _REFERENCE * uses_reference([policy])
    return Table("What ran where, under the policy", columns, tuple(lines), note)


def _quality(results: Results) -> Table:
    measured, base = results["rows"], results["unpatched"]
    figures = of_kind(results["kind"])
    lines = []
    for row in (base, *measured):
        name = "unpatched" if row is base else row["name"] if row["name"] != "policy" else f"policy ({row['recipe']})"
        values = [f.text(row["metrics"][f.key]) if f.key in row["metrics"] else "" for f in figures]
        site = max((s["rel_l1"] for s in row.get("outputs", [])), default=None)
        lines.append((name, *values, "" if site is None else f"{site:.4f}", *_cost(row)))
    columns = (
        "<measured", *(f.heading for f in figures), "site L1",
        "attention, s", "gain", "all, s", "gain", "s a step", "peak GiB",
    )  # fmt: skip
    task, one = results["config"]["task"], _ONE[results["kind"]]
    if results["kind"] == "text":
        size = f"Over {task['windows']} paired windows of {task['window_tokens']} tokens."
    else:
        size = f"Steps: {task['steps']}."
    if results.get("pictures"):
        pictures = results["pictures"]
        frames, (height, width) = pictures[0]["frames"], pictures[0]["size"]
        many = f"{len(pictures)} {one}s of {f'{frames} frames of ' if frames > 1 else ''}{width} x {height} px"
        size = f"{many}, steps: {task['steps']}."
    shown = tuple(f for f in figures if any(f.key in row["metrics"] for row in measured))
    note = (
        f"{size} {notes(shown)}{' site L1: of the worst site on the first window.' * (results['kind'] == 'text')} "
        f"Seconds are of the fastest {one}: inside attention, and from end to end; gain is the unpatched model's time "
        "over the patched one's."
    )
    names = {f.key: f.name for f in figures} | _COSTS
    missing = {key: why for row in measured for key, why in row["unavailable"].items()}
    note += "".join(f" {names[key]} is unavailable: {why}." for key, why in missing.items() if key in names)
    if results["kind"] == "text" and not any(_quantized(row["prompt_calls"]) for row in measured):
        note += " No call of the prompts was long enough to be quantized, so greedy tests nothing here."
    note += _REFERENCE * uses_reference(measured)
    return Table("Quality and speed against the unpatched model", columns, tuple(lines), note)


def _quantized(calls: list[Results]) -> bool:
    return any(c["recipe"] != "exact" for c in calls)


def _cost(row: Results) -> tuple[str, ...]:
    """Inside attention and in all, each with its gain over the unpatched model; a step; and the memory."""
    cells = []
    own, base = row.get("fastest") or row["mean"], row.get("baseline_fastest") or row.get("baseline_mean") or {}
    for what in ("attention_seconds", "seconds"):
        seconds, before = own.get(what), base.get(what)
        cells.append("" if seconds is None else f"{seconds:.3f}")
        cells.append(f"{before / seconds:.2f} x" if before and seconds else "")
    step, peak = row.get("seconds_per_step"), row.get("peak_memory")
    return *cells, "" if step is None else f"{step:.3f}", "" if peak is None else f"{peak / 2**30:.2f}"


def _each(results: Results) -> Table | None:
    """PSNR of every picture under everything measured."""
    if "pictures" not in results:
        return None
    figure = BY_KEY["psnr"]
    rows = [
        (str(p["prompt"]), str(p["seed"]),
         *(figure.text(row["each"][i]["metrics"]["psnr"]) for row in results["rows"]))
        for i, p in enumerate(results["pictures"])
    ]  # fmt: skip
    heads = ("<picture", "seed", *(row["name"] for row in results["rows"]))
    return Table(f"{figure.heading}, of each", heads, tuple(rows))


def _needle(results: Results) -> Table | None:
    if "needle" not in results:
        return None
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
    return Table("Needle test", ("<measured", "right", "MRR", "log p", "same", "<found"), tuple(rows), note)


def _targets(results: Results) -> Table | None:
    """The targets with their values, if the run has any."""
    if not results["targets"]:
        return None
    lines = [
        (t["name"], t["what"], f"{t['bound']:g}", _target_value(t["value"]), "met" if t["met"] else "MISSED")
        for t in results["targets"]
    ]  # fmt: skip
    return Table("Targets", ("<measured", "<what", "bound", "value", "<result"), tuple(lines))


def _target_value(value: float | str | None) -> str:
    """Read back from JSON, an infinite value is None."""
    return value if isinstance(value, str) else "inf" if value is None else f"{value:.5f}"


def _texts(results: Results) -> Table | None:
    texts = results["unpatched"].get("texts")
    if not texts:
        return None
    lines = []
    for exact, policy in zip(texts, results["rows"][0]["texts"], strict=True):
        prompt = exact["prompt"].strip()
        speeds = [row["tokens"] / row["seconds"] for row in (exact, policy)]
        lines.append(
            (prompt if len(prompt) <= 100 else f"{prompt[:80].rstrip()} ... ({exact['prompt_tokens']} tokens)",
             exact["text"].strip(), policy["text"].strip(), f"{policy['agreement']:.2f}",
             f"{speeds[0]:.1f} / {speeds[1]:.1f}")
        )  # fmt: skip
    columns = ("<prompt", "<unpatched", "<policy", "agreement", "tokens/s")
    note = "Greedy. Agreement is the share of tokens before the first difference."
    return Table("Generated text, side by side", columns, tuple(lines), note)
