"""Results files -> the sections of a report. Each function takes the files of one kind and shows one thing.

Reads JSON only, never a model: what the page says is what the files hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sage_patch.evaluation.report.blocks import (
    Bar,
    Bars,
    Block,
    Cell,
    Grid,
    Node,
    Section,
    Traced,
    derived,
)
from sage_patch.names import grouped

HEAT = (1e-3, 1.0)  # relative L1 errors: nothing to see, and as large as the signal


def conditions(source: Node) -> str:
    """Card, versions, date and command of a file, as far as it tells."""
    facts = source.value.get("environment", {})
    if "device" in facts:
        machine = f"{facts['device']}, driver {facts['driver']}, {facts['power_limit']}, CUDA {facts['cuda']}"
    else:
        devices = facts.get("cuda", {}).get("devices") or []
        on_gpu = str(source.value.get("model", {}).get("device", "")).startswith("cuda") or "card" in source.value
        cpu = facts.get("cpu", {})
        machine = source.value.get("card") or (devices[0]["name"] if devices and on_gpu else "")
        machine = machine or f"{cpu.get('name', 'unknown')}, {cpu.get('cores', '?')} cores"
    packages = facts.get("packages", {})
    shown = [n for n in ("torch", "transformers", "diffusers", "fa3-fwd", "nvidia-cudnn-frontend") if packages.get(n)]
    versions = ", ".join(f"{n} {packages[n]}" for n in shown)
    date = str(source.value.get("date") or facts.get("date") or "")[:10]
    command = source.value.get("command") or facts.get("command") or "unknown command"
    return f"{source.file}: {', '.join(p for p in (machine, versions, date) if p)}; `{command}`."


def accounting(benches: list[Node], models: list[Node]) -> list[Section]:
    """From the kernel's gain over the whole call's to the whole model's: three numbers that are easily mistaken."""
    charts: list[Block] = []
    lines: list[tuple[Cell, ...]] = []
    for file in models:
        for model in shapes_of(file):
            attention, ours = model.get("attention"), model.get("qk_int8_pv_fp8")
            row = _nearest(benches, attention) if attention is not None else None
            if row is None or attention is None or ours is None or not ours.get("ms"):
                continue
            kernel = derived("ratio", ".2f", row["sage2_kernel"], row["sdpa_default"])
            call = derived("ratio", ".2f", row["sage2_op"], row["sdpa_default"])
            whole = derived("ratio", ".2f", model["sdpa_default"]["ms"], ours["ms"])
            share = derived(
                "implied_share", ".0%", ours["ms"], model["sdpa_default"]["ms"], row["sage2_op"], row["sdpa_default"]
            )
            bars = (
                Bar("kernel alone, inputs already quantized", "sage2", kernel),
                Bar("whole attention call, from bf16 to output", "sage2", call),
                Bar("whole model, one forward pass", "sage2", whole),
            )
            name = str(model["model"].value)
            charts.append(Bars(name, " x", bars, reference=1.0))
            figures = (kernel, call, whole, share, ours["rel_l1"].number(".4f"))
            lines.append((name, attention["tokens"].number(","), row["kv_len"].number(","), *figures))
    columns = (
        "<model", "tokens", "bench tokens", "kernel, x", "call, x", "model, x", "attention share", "relative L1"
    )  # fmt: skip
    note = (
        "All gains are over torch's default attention. bench tokens: the length at which kernel and call were timed, "
        "the nearest one with the same head_dim and mask. attention share: how much of the unpatched pass attention "
        "would have to be for the call's gain to become the model's (Amdahl); it is implied, not measured. relative "
        "L1: of the model's output, against the unpatched one."
    )
    words = (
        "A kernel's gain is not a call's, and a call's is not a model's: before the kernel stands the quantization, "
        "and around attention stands the rest of the model. Only the last bar is what a person waits for."
    )
    blocks = [charts, Grid("", columns, tuple(lines), note)]
    return (
        [section("accounting", "From kernel gain to end-to-end gain", words, blocks, [*benches, *models])]
        if lines
        else []
    )


def error_map(runs: list[Node], ablations: list[Node]) -> list[Section]:
    """Sites by rungs, by steps where the model has them."""
    blocks: list[Block] = []
    shown = []
    for file in ablations:
        for title, model in models_of(file):
            if model.get("sites"):
                pairs = [(r["site"].value, f"`{r['recipe'].value}`", r["rel_l1"].number(".4f")) for r in model["sites"]]
                blocks.append(_sites_by(title, pairs))
                shown.append(file)
    for run in runs:
        if run.get("groups"):
            blocks.append(_calibrated_sites(run))
            shown.append(run)
        elif run.get("sites"):
            pairs = [
                (s["site"].value, "under the policy", s["rel_l1"].number(".4f"))
                for s in run["sites"]
                if s.get("rel_l1")
            ]
            if pairs:
                blocks.append(_sites_by(title_of(run), pairs))
                shown.append(run)
        elif any(row.get("outputs") and row["outputs"].value for row in run["rows"]):
            pairs = [
                (s["site"].value, name_of(row), s["rel_l1"].number(".4f"))
                for row in run["rows"]
                for s in row["outputs"]
            ]
            blocks.append(_sites_by(f"{title_of(run)}, with what a site inherits from the layers before it", pairs))
            shown.append(run)
    words = (
        "Relative L1 error of a site's output under each rung: 0 is equal, 1 is as large as the signal; shaded on a "
        "logarithmic scale. Unless a table says otherwise a site is measured by itself, on the inputs that the exact "
        "model gives it, so its own error and nothing inherited."
    )
    return [section("errors", "Error by layer", words, blocks, shown)] if blocks else []


def sites(runs: list[Node], policies: list[Node]) -> list[Section]:
    """What each site runs, and why; the rules of the policies that were given."""
    blocks: list[Block] = []
    for run in runs:
        if not run.get("plan"):
            continue
        places = {row["name"]: i for i, row in enumerate(run["plan"].value)}
        keys = ("role", "heads", "kv_heads", "head_dim", "recipe", "steps", "reason")
        lines: list[tuple[Cell, ...]] = []
        for names, _, row in grouped(run["plan"].value, lambda r, keys=keys: tuple(r.get(k) for k in keys)):  # type: ignore[misc]
            node = run["plan"][places[row["name"]]]
            numbers: list[Cell] = [
                found.number("d") if (found := node.get(k)) else None for k in ("heads", "kv_heads", "head_dim")
            ]
            lines.append((f"`{names}`", row["role"], *numbers, f"`{row['recipe']}`", row["steps"], row["reason"]))
        columns = ("<sites", "<role", "heads", "kv heads", "head_dim", "<recipe", "<at steps", "<reason")
        blocks.append(full_grid(title_of(run), columns, lines))
    for policy in policies:
        scores = list(dict.fromkeys(k for rule in policy["rules"] for k in rule["score"].value))
        lines = []
        for rule in policy["rules"]:
            given = rule.value
            where = ", ".join(f"{k} {given[k]}" for k in ("match", "layers", "role", "steps") if given.get(k))
            measured = [number_of(rule["score"].get(k), ".4g") for k in scores]
            lines.append((f"`{where}`", f"`{given['recipe'] or 'as before'}`", given["reason"] or "", *measured))
        title = f"Rules of {policy.file} over `{policy['recipe'].value}`; the last that matches a site wins"
        blocks.append(full_grid(title, ("<where", "<recipe", "<reason", *scores), lines))
        if policy.get("calibration"):
            blocks.append(_calibrated(policy["calibration"]))
    words = "Which recipe every attention site runs under the policy, and the reason that stands in its rule."
    return [section("sites", "What runs where, and why", words, blocks, runs)] if blocks else []


def models_of(file: Node) -> list[tuple[str, Node]]:
    """(title, content) of the models of an ablation or anatomy file."""
    return [(title, file["models"][title]) for title in file["models"].value]


def section(name: str, title: str, words: str, blocks: list[Any], sources: Iterable[Node]) -> Section:
    """A section whose conditions are those of the files it shows."""
    told = dict.fromkeys(conditions(s) for s in sources)
    return Section(name, title, words, blocks, " ".join(told))


def title_of(run: Node) -> str:
    """What a file is about: the model's name as the configuration has it, and the task."""
    spec = run.value.get("config", {}).get("model", {})
    name = str(spec.get("gguf") or spec.get("path") or run["model"]["class"].value).rstrip("/").rpartition("/")[2]
    what = "calibrate" if run["kind"].value == "calibrate" else run.value.get("what")
    return f"{name}, {run.value.get('task', run['kind'].value)}" + (f", {what}" if what not in (None, "run") else "")


def name_of(row: Node) -> str:
    policy = row["name"].value == "policy"
    return f"policy (`{row['recipe'].value}`)" if policy else f"`{row['name'].value}`"


def number_of(node: Node | None, spec: str) -> Cell:
    if node is None:
        return None
    return node.value.partition(":")[0] if isinstance(node.value, str) else node.number(spec)


def full_grid(title: str, columns: tuple[str, ...], lines: list[tuple[Cell, ...]], note: str = "") -> Grid:
    """A table less the columns that are empty in every row."""
    kept = [i for i in range(len(columns)) if any(line[i] not in (None, "") for line in lines)]
    return Grid(title, tuple(columns[i] for i in kept), tuple(tuple(line[i] for i in kept) for line in lines), note)


def _calibrated_sites(run: Node) -> Grid:
    """Sites by rungs and buckets of steps, the chosen one of each bucket marked."""
    several = len(run["buckets"].value) > 1
    pairs, marked = [], set()
    for group in run["groups"]:
        for rung in group["scores"].value:
            column = f"`{rung}`" + (f", {group['bucket'].value} steps" if several else "")
            pairs.append((group["site"].value, column, group["scores"][rung]["rel_l1"].number(".4f")))
            if rung == group["recipe"].value:
                marked.add((group["site"].value, column))
    grid = _sites_by(f"{title_of(run)}; framed: what was chosen, exact where nothing is framed", pairs)
    rows = {row[0]: i for i, row in enumerate(grid.rows)}
    places = frozenset((rows[f"`{site}`"], grid.columns.index(column)) for site, column in marked)
    return replace(grid, marked=places)


def _sites_by(title: str, pairs: list[tuple[str, str, Traced]]) -> Grid:
    columns = list(dict.fromkeys(column for _, column, _ in pairs))
    found = {(site, column): number for site, column, number in pairs}
    lines: list[tuple[Cell, ...]] = [
        (f"`{site}`", *(found.get((site, c)) for c in columns)) for site in dict.fromkeys(s for s, _, _ in pairs)
    ]
    return Grid(title, ("<site", *columns), tuple(lines), heat=HEAT)


def shapes_of(file: Node) -> list[Node]:
    """The timed models of a file."""
    return [
        entry for key in file.value if isinstance(file.value[key], dict) and (entry := file[key]).get("sdpa_default")
    ]


def _nearest(benches: list[Node], attention: Node) -> Node | None:
    """The bench row with the same head_dim and mask whose length is nearest by ratio."""
    rows = [
        r
        for bench in benches
        for r in bench["rows"]
        if all(r[k].value == attention[k].value for k in ("head_dim", "is_causal"))
        and all(r.get(k) for k in ("sage2_kernel", "sage2_op", "sdpa_default"))
    ]
    wanted = attention["tokens"].value
    return min(rows, key=lambda r: max(r["kv_len"].value / wanted, wanted / r["kv_len"].value), default=None)


def _calibrated(record: Node) -> Grid:
    """What a calibrated policy was asked for and achieved."""
    achieved = [(name, record["achieved"][name].number(".4g")) for name in record["achieved"].value]
    cost = ("attention time, to exact, predicted", record["cost"].number(".3f"))
    told = record.value
    note = (
        f"Asked for: {', '.join(told['targets'])}. Cost predicted for {told['card']}. {told['date'][:10]}, "
        f"`{told['command']}`; " + ", ".join(f"{k} {v}" for k, v in told["setting"].items()) + "."
    )
    return Grid("Achieved by its calibration", ("<what", "value"), (*achieved, cost), note)
