"""Results of an image or video run -> tables: what ran where, what each recipe costs, the targets."""

from __future__ import annotations

from typing import Any

from sage_patch.evaluation.tables import Table, by_site, calls_text, grouped, heads_text, targets_tables


def picture_tables(results: dict[str, Any]) -> list[Table]:
    """The tables of an image or video run."""
    return [_ran(results), _quality(results), *_each(results), *targets_tables(results)]


def _ran(results: dict[str, Any]) -> Table:
    policy = results["quality"][0]
    calls = by_site(policy["calls"])
    rows = [row | {"ran": calls_text(calls.get(row["name"], []))} for row in results["plan"]]
    shown = ("role", "heads", "kv_heads", "head_dim", "recipe", "steps", "reason", "ran")
    lines = [
        (names, str(count), row["role"], heads_text(row), row["recipe"], row["steps"], row["reason"], row["ran"])
        for names, count, row in grouped(rows, lambda r: tuple(r[k] for k in shown))
    ]
    note = "Calls are for each site, over all pictures and steps. Exact calls carry their reason."
    if any(c["backend"] == "reference" for c in policy["calls"]):
        note += (
            " The reference backend (plain PyTorch) computed the quantized calls: the same numerics as the kernels, "
            "slower than the unpatched model. Speed needs a GPU."
        )
    columns = ("<sites", "count", "<role", "<heads", "<policy", "<at steps", "<reason", "<ran")
    return Table("What ran where, under the policy", columns, tuple(lines), note)


def _quality(results: dict[str, Any]) -> Table:
    base = results["unpatched"]
    rows = [("unpatched", *[""] * 5, *_cost(base), "")]
    for q in results["quality"]:
        name = q["recipe"] if q["name"] != "policy" else f"policy ({q['recipe']})"
        worst = (_dB(q["psnr_worst"]), _share(q["ssim_worst"]))
        figures = (_dB(q["psnr"]), worst[0], _share(q["ssim"]), worst[1], _share(q["ms_ssim"]))
        rows.append((name, *figures, *_cost(q), f"{q['slowdown']:.2f} x"))
    columns = (
        "<measured", "PSNR, dB", "worst", "SSIM", "worst", "MS-SSIM", "s a step", "s a picture", "peak GiB", "time"
    )  # fmt: skip
    frames = results["pictures"][0]["frames"]
    what = "clips" if results["kind"] == "video" else "pictures"
    height, width = results["pictures"][0]["size"]
    note = (
        f"{len(results['pictures'])} {what} of {f'{frames} frames of ' if frames > 1 else ''}{width} x {height} px, "
        f"steps: {results['config']['task']['steps']}, each against the unpatched one of the same seed, as the "
        "pipeline made them; mean and worst frame. Identical frames have an infinite PSNR."
    )
    for figure in ("ssim", "ms_ssim"):
        value = results["quality"][0][figure]
        if isinstance(value, str):
            note += f" {figure.upper().replace('_', '-')} is {value}."
    if isinstance(base["peak_memory_bytes"], str):
        note += f" Peak memory is {base['peak_memory_bytes']}."
    return Table("Quality against the unpatched model", columns, tuple(rows), note)


def _each(results: dict[str, Any]) -> list[Table]:
    """PSNR of every picture under everything measured."""
    heads = ("<picture", "seed", *(q["name"] for q in results["quality"]))
    rows = [
        (str(p["prompt"]), str(p["seed"]), *(_dB(q["pictures"][i]["psnr"]) for q in results["quality"]))
        for i, p in enumerate(results["pictures"])
    ]
    return [Table("PSNR of each, dB", heads, tuple(rows))]


def _cost(cost: dict[str, Any]) -> tuple[str, str, str]:
    step, peak = cost["seconds_per_step"], cost["peak_memory_bytes"]
    return (
        "" if step is None else f"{step:.3f}",
        f"{cost['seconds']:.2f}",
        "" if isinstance(peak, str) else f"{peak / 2**30:.2f}",
    )


def _dB(value: float | str) -> str:
    return "" if isinstance(value, str) else f"{value:.1f}"


def _share(value: float | str) -> str:
    return "" if isinstance(value, str) else f"{value:.4f}"
