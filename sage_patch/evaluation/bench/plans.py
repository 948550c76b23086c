"""What one run of the benchmark measures: the command line's words to a plan, and what of it fits into the time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sage_patch.evaluation.bench.peers import BURST_ONLY, PEERS
from sage_patch.evaluation.bench.shapes import (
    CROSSOVER_LENGTHS,
    LENGTHS,
    BenchError,
    Shape,
    crossover,
    grid,
    preset,
)
from sage_patch.evaluation.bench.timing import Timing
from sage_patch.recipes import RECIPES as ALL_RECIPES
from sage_patch.recipes import parse_recipe

# recipe -> how its columns begin, the cheapest first
RECIPES = {recipe.name: recipe.column for recipe in reversed(ALL_RECIPES.values()) if recipe.column}
CROSSOVER_TIMING = Timing(rest=0.15, longest=0.2, sustained=0.0)
CROSSOVER_PEERS = ("sdpa_cudnn", "sdpa_fa2", "fa3_bf16")
_ROW_SECONDS = 1.0  # of making and checking one row's tensors, about


@dataclass(frozen=True)
class Plan:
    """What to measure. recipes: names, with variants. seconds: shapes are left out, the last ones first, so that the
    rest takes no longer; of a crossover, no shape is begun later. is_crossover: whole calls alone, and from where on
    quantizing cannot pay shorter sequences are not looked at."""

    shapes: Sequence[Shape]
    recipes: Sequence[str] = tuple(RECIPES)
    peers: Sequence[str] = tuple(PEERS)
    seconds: float = 300.0
    timing: Timing = Timing()
    is_crossover: bool = False
    note: dict[str, Any] = field(default_factory=dict)


def plan(
    *,
    preset_name: str,
    head_dims: Sequence[int],
    lengths: Sequence[int],
    masks: Sequence[str],
    heads: dict[str, int],
    recipes: Sequence[str],
    peers: Sequence[str],
    is_crossover: bool,
    seconds: float,
    note: dict[str, Any],
) -> Plan:
    """A checked Plan: of a preset, or, where a length, head_dim, mask or heads are given, of every combination.

    Empty head_dims, lengths, masks and peers, and heads of 0, stand for the usual ones. Raises BenchError naming what
    cannot be measured and what can.
    """
    for name in recipes:
        column_of(name)
    for name in peers:
        if name not in PEERS and name != "none":
            raise BenchError(f"peers: {name!r} is none; there are {', '.join(PEERS)}")
    given = {name: n for name, n in heads.items() if n}
    num_heads, num_kv_heads = heads["num_heads"] or 32, heads["num_kv_heads"] or heads["num_heads"] or 32
    if num_heads % num_kv_heads:
        raise BenchError(f"heads: {num_heads} query heads are no multiple of {num_kv_heads} key and value heads")
    chosen = [name for name in (peers or (CROSSOVER_PEERS if is_crossover else PEERS)) if name != "none"]
    rest: dict[str, Any] = {"recipes": tuple(recipes), "peers": tuple(chosen), "seconds": seconds, "note": note}
    masks = list(masks) or ["full", "causal"]
    if is_crossover:
        if given:
            raise BenchError("heads: break-even lengths are measured with 32 heads, of one item and of four")
        found = crossover(list(head_dims) or [128, 64], list(lengths) or CROSSOVER_LENGTHS, masks)
        return Plan(found, timing=CROSSOVER_TIMING, is_crossover=True, **rest)
    if not (head_dims or lengths or given) and len(masks) == 2:
        return Plan(preset(preset_name or "kernels"), **rest)
    if preset_name:
        raise BenchError("preset: it has its own lengths, head_dims, masks and heads; give either it or those")
    return Plan(grid(list(head_dims) or (128, 64), list(lengths) or LENGTHS, masks, **given), **rest)


def column_of(name: str) -> str:
    """How the columns of a recipe begin: "sage2", and "sage2_exp_chord" of a variant. Raises BenchError."""
    try:
        recipe = parse_recipe(name)
    except ValueError as error:
        raise BenchError(f"recipes: {error}") from None
    if not recipe.column:
        raise BenchError(f"recipes: {name!r} has no compiled kernel; there are {', '.join(RECIPES)} and their variants")
    tail = name.partition(":")[2]
    return "_".join([recipe.column, *re.findall(r"\w+", tail)])


def numbers(option: str, text: str) -> list[int]:
    """The whole numbers of "128,64", none of "". Raises BenchError naming the option."""
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise BenchError(f"{option} must be whole numbers with commas, such as 128,64; got {text!r}") from None


def names(text: str) -> list[str]:
    """The recipes of "qk_int8_pv_fp8,qk_int8_pv_fp8:smooth=none,smooth_v=off", which are two."""
    found: list[str] = []
    for part in text.split(","):
        if found and "=" in part and ":" not in part:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def fitting(plan: Plan) -> tuple[list[Shape], list[Shape]]:
    """(the shapes that fit into the plan's seconds, the rest), by an estimate: the first ones are the important ones.
    A crossover's are all kept, as which of them it needs is seen on the way."""
    if plan.is_crossover:
        return list(plan.shapes), []
    total, kept, left_out = 0.0, list[Shape](), list[Shape]()
    for shape in plan.shapes:
        seconds = expected_seconds(shape, plan)
        if total + seconds <= plan.seconds:
            total += seconds
            kept.append(shape)
        else:
            left_out.append(shape)
    return kept, left_out


def expected_seconds(shape: Shape, plan: Plan) -> float:
    """Of one row, about: calls of a second and more take longer."""
    recipes, peers = wanted(shape, plan)
    whole = len(recipes) * (1 if plan.is_crossover else 2) + sum(name not in BURST_ONLY for name in peers)
    bursts = sum(name in BURST_ONLY for name in peers) + (0 if plan.is_crossover else 1)
    return _ROW_SECONDS * (0.2 if plan.is_crossover else 1) + (
        whole * plan.timing.seconds() + bursts * plan.timing.seconds(is_sustained=False)
    )


def wanted(shape: Shape, plan: Plan) -> tuple[list[str], list[str]]:
    """The recipes and peers that are timed at a shape."""
    recipes = list(plan.recipes)
    if shape.recipes is not None:
        recipes = [r for name in shape.recipes for r in [r for r in recipes if r.partition(":")[0] == name][:2]]
    return recipes, [p for p in plan.peers if shape.peers is None or p in shape.peers]
