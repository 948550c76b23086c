"""Bring results files of schema 1 up to date: results of run and evaluate, ablations, anatomies, calibrations, models.

    python scripts/rewrite_results.py FILE...

Figures stay as they are; what changes is their spelling and their place: `rel_l1`, `worst_x`, one row for a measured
policy with its `metrics`, and reasons in `unavailable`. Where a run of schema 1 told the mean time of a window or
picture, `mean` has it, and `fastest` is not there. A file that is up to date is left alone. Kept for one release.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

from sage_patch.evaluation.tables import plain

Row = dict[str, Any]
_UNAVAILABLE = "unavailable: "
_TEXT = ("kl", "kl_2se", "top1", "ppl", "ppl_exact", "ppl_change", "delta_nll", "delta_nll_2se", "logit_cosine",
         "logit_rel_l1")  # fmt: skip
_PICTURES = ("psnr", "psnr_worst", "ssim", "ssim_worst", "ms_ssim", "ms_ssim_worst")


def rewrite(value: Row) -> Row:
    """The file's content in schema 2."""
    value = _spelled(value)
    if value.get("schema") != 1:
        return value
    if value.get("kind") in ("text", "image", "video") and "plan" in value:
        value = _evaluation(value) if value.get("what") == "evaluate" else _run(value)
    elif value.get("kind") == "calibrate":
        value["chosen"]["each"] = [_picture(row) for row in value["chosen"]["each"]]
    return value | {"schema": 2}


def _spelled(value: Any) -> Any:
    """rel_l1 for relative_l1, worst_x for x_worst."""
    if isinstance(value, dict):
        return {_key(key): _spelled(v) for key, v in value.items()}
    return [_spelled(v) for v in value] if isinstance(value, list) else value


def _key(key: str) -> str:
    figure = key.removesuffix("_worst").replace("relative_l1", "rel_l1")
    worst = key.endswith("_worst") and figure in ("cosine", "rel_l1", "psnr", "ssim", "ms_ssim")
    return f"worst_{figure}" if worst else key.replace("relative_l1", "rel_l1")


def _apart(row: Row, keys: tuple[str, ...]) -> tuple[Row, Row]:
    """(figures, reasons) of keys, of which a reason may stand in a figure's place."""
    found = {key: row[key] for key in map(_key, keys) if key in row}
    reasons = {k: v.removeprefix(_UNAVAILABLE) for k, v in found.items() if isinstance(v, str)}
    return {k: v for k, v in found.items() if k not in reasons}, reasons


def _picture(row: Row) -> Row:
    """A picture's figures, which were lists with a value a frame, or a reason; a window's stay."""
    if "prompt" not in row:
        return row
    frames = {k: row[k] for k in ("psnr", "ssim", "ms_ssim") if isinstance(row.get(k), list)}
    figures: Row = {}
    for key, values in frames.items():
        known = [math.inf if v is None else v for v in values]  # JSON has null where equal frames are infinite
        figures |= {key: fmean(known), f"worst_{key}": min(known)}
    if isinstance(row.get("temporal_error"), float):
        figures["temporal_error"] = row["temporal_error"]
    return {"prompt": row["prompt"], "seed": row["seed"], "metrics": figures, "frames": frames}


def _evaluation(value: Row) -> Row:
    for row in value["rows"]:
        row["each"] = [_picture(each) for each in row["each"]]
        row |= {"slowdown": row["fastest"]["seconds"] / row["baseline_fastest"]["seconds"]}
        row |= {"prompt_calls": row.get("prompt_calls", []), "texts": [], "outputs": []}
    return value


def _run(value: Row) -> Row:
    text = value["kind"] == "text"
    count = value["text"]["windows"] if text else len(value["pictures"])
    base = {"seconds": value["exact_seconds_per_window"]} if text else value["unpatched"]
    unpatched = _timed(base, count) | {"metrics": {"ppl": value["quality"][0]["ppl_exact"]} if text else {}}
    rows = []
    for old in value["quality"]:
        figures, reasons = _apart(old, _TEXT if text else _PICTURES)
        timed = _timed({"seconds": old["seconds_per_window"]} if text else old, count)
        row = {"name": old["name"], "recipe": old["recipe"], "metrics": figures, **timed}
        row["unavailable"] = reasons | timed["unavailable"]
        row |= {"baseline_seconds": unpatched["seconds"], "baseline_mean": unpatched["mean"]}
        row |= {"slowdown": old["slowdown"], "calls": old["calls"], "prompt_calls": [], "texts": [], "each": []}
        row["outputs"] = [{"site": s.pop("name"), **s} for s in old.get("sites", [])]
        for job, each in zip(value.get("pictures", []), old.get("pictures", []), strict=True):
            metrics = _apart(each, _PICTURES)[0]
            row["each"].append({"prompt": job["prompt"], "seed": job["seed"], "metrics": metrics})
        rows.append(row)
    if text:
        generation = value["generation"]
        rows[0]["prompt_calls"] = generation["calls"]
        for prompt in generation["prompts"]:
            ours, exact = ({k: prompt[who][k] for k in ("text", "tokens", "seconds")} for who in ("policy", "exact"))
            rows[0]["texts"].append(ours | {"agreement": prompt["agreement"]})
            asked = {"prompt": prompt["prompt"], "prompt_tokens": prompt["prompt_tokens"]}
            unpatched.setdefault("texts", []).append(asked | exact)
    for target in value["targets"]:
        if isinstance(target["value"], str):
            target["value"] = target["value"].removeprefix(_UNAVAILABLE)
    kept = ("schema", "kind", "date", "command", "environment", "config", "model", "pictures", "plan")
    head = {key: value[key] for key in kept if key in value} | {"what": "run", "unpatched": unpatched, "rows": rows}
    return head | {key: value[key] for key in ("targets", "passed", "seconds")} | {"complete": True}


def _timed(row: Row, count: int) -> Row:
    """The times and the memory of a row; they were the mean of a window or picture."""
    peak = row.get("peak_memory_bytes")
    reasons = {"peak_memory": peak.removeprefix(_UNAVAILABLE)} if isinstance(peak, str) else {}
    found: Row = {"seconds": count * row["seconds"], "attention_seconds": None, "mean": {"seconds": row["seconds"]}}
    found["seconds_per_step"] = row.get("seconds_per_step")
    return found | {"peak_memory": None if reasons else peak, "unavailable": reasons}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    for path in parser.parse_args().files:
        found = json.loads(path.read_text(encoding="utf-8"))
        after = rewrite(copy.deepcopy(found))
        if after != found:
            path.write_text(json.dumps(plain(after), indent=1, allow_nan=False) + "\n", encoding="utf-8")
            print(f"rewrote {path}")


if __name__ == "__main__":
    main()
