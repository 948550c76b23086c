"""Sites that differ in a number only, on one line: tables and reports of models of many equal layers.

Standard library only, as policy.py, which prints plans with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def grouped(rows: list[dict[str, Any]], key: Callable[[dict[str, Any]], Any]) -> list[tuple[str, int, dict[str, Any]]]:
    """(names, count, first row) of the rows that share a key and a name up to its numbers, in first-seen order."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((re.sub(r"\d+", "#", row["name"]), key(row)), []).append(row)
    return [(_names([r["name"] for r in g]), len(g), g[0]) for g in groups.values()]


def _names(names: list[str]) -> str:
    """`model.layers.{0-29}.self_attn` for names that differ in one number, else the first and the last."""
    if len(names) == 1:
        return names[0]
    pieces = [re.split(r"(\d+)", n) for n in names]
    varying = [i for i, column in enumerate(zip(*pieces, strict=True)) if len(set(column)) > 1]
    if len(varying) != 1:
        return f"{names[0]} ... {names[-1]}"
    at = varying[0]
    return "".join([*pieces[0][:at], "{", _ranges([int(p[at]) for p in pieces]), "}", *pieces[0][at + 1 :]])


def _ranges(numbers: list[int]) -> str:
    """ "0-3,7" for ascending numbers 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
