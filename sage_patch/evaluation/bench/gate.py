"""Whether a run is slower than a recorded one: ratios to a peer of the same run are compared, as clocks differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sage_patch.evaluation.bench.shapes import BenchError

SHAPE = ("head_dim", "is_causal", "q_len", "kv_len", "batch", "num_heads", "num_kv_heads")
WAYS = ("sustained", "burst")
# Of whole calls and of kernels alone: the first that both runs have.
PEERS = {
    "op": ("fa3_bf16", "sdpa_default", "sdpa_cudnn"),
    "kernel": ("fa3_fp8_kernel", "fa3_bf16", "sdpa_default", "sdpa_cudnn"),
}


def read(path: Path) -> dict[str, Any]:
    """A recorded bench.json. Raises BenchError where it is none."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        result["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"gate: {path} is no bench.json ({type(error).__name__}: {error})") from None
    return result


def speeds(row: Mapping[str, Any], way: str) -> Mapping[str, Any]:
    """TOPS by column, of a way of measuring. Rows recorded without bursts were measured in neither."""
    if "burst" not in row:
        return {}
    return row["burst"] if way == "burst" else row


def slower(result: dict[str, Any], committed: dict[str, Any], percent: float) -> tuple[list[str], int]:
    """(a line for each ratio that fell by more than so many percent, the number of ratios compared).

    Raises BenchError where the two have nothing in common.
    """
    found = list(_ratios(result, committed))
    if not found:
        raise BenchError(
            "gate: the run and the recorded file have no shape with one of our columns and a peer in common"
        )
    lines = [
        f"{shape}: {column} is {now:.3f} x {peer}, was {before:.3f} ({100 * (now / before - 1):+.1f} %, {way})"
        for shape, column, peer, way, now, before in found
        if now < before * (1 - percent / 100)
    ]
    return lines, len(found)


def _ratios(result: dict[str, Any], committed: dict[str, Any]) -> Iterator[tuple[str, str, str, str, float, float]]:
    """(shape, column, peer, way, ratio now, ratio then) wherever both runs have all of it."""
    then = {tuple(row[name] for name in SHAPE): row for row in committed["rows"]}
    for row in result["rows"]:
        key = tuple(row[name] for name in SHAPE)
        for way in WAYS:
            new, old = speeds(row, way), speeds(then.get(key, {}), way)
            for column in [c for c in old if c.startswith("sage2") and c.endswith(tuple(f"_{end}" for end in PEERS))]:
                peers = PEERS[column.rpartition("_")[2]]
                peer = next((p for p in peers if new.get(p) and old.get(p)), None)
                if peer and new.get(column) and old[column]:
                    yield describe(row), column, peer, way, new[column] / new[peer], old[column] / old[peer]


def describe(row: Mapping[str, Any]) -> str:
    """A row's shape in words: "128 causal 8192, 1 x 32 heads"."""
    heads = str(row["num_heads"])
    heads += f":{row['num_kv_heads']}" if row["num_kv_heads"] != row["num_heads"] else ""
    mask = "causal" if row["is_causal"] else "full"
    name = f"{row['name']}: " if row.get("name") else ""
    return f"{name}{row['head_dim']} {mask} {row['q_len']}, {row['batch']} x {heads} heads"
