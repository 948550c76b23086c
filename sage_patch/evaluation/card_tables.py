"""What `sage-patch plan --card` prints: what runs on a card that need not be here, from which length, and the gain.

Gains of the mma.sync kernels are predictions of cards/model.py, those of Hopper the H200's measurements (cards.json).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sage_patch import backends, reasons
from sage_patch.cards import model as card_model
from sage_patch.cards import table as cards
from sage_patch.cards.table import Card
from sage_patch.evaluation.tables import Table, plan_table
from sage_patch.kernels import build, crossover
from sage_patch.recipes import AUTO, RECIPES, Call, Recipe, parse_recipe

HEAD_DIMS = (64, 128, 256)
NEVER_TIMED = "predicted, never timed on this card"
NO_GAIN = "never faster"  # in the place of a reason: exact attention is, at any length
_LONG = 1 << 20  # tokens: no call is too short


@dataclass(frozen=True)
class Gains:
    """Gains over exact attention by length, as text. label: where they are from."""

    label: str
    by_length: Mapping[int, str]


def entry_of(card: Card) -> crossover.Card:
    """The break-even lengths that the product would use on a card: measured where some device of this name was."""
    packaged = crossover.read(build.HERE / "crossover.json")
    for table in (crossover.read(crossover.user_table()), packaged):
        for name, entry in table.items():
            if (found := cards.find(name)) is not None and found.name == card.name:
                return entry
    return card_model.break_even_lengths(card.name) or packaged["default"]


def why_not(card: Card, recipe: Recipe, head_dim: int) -> str | None:
    """Why a long bf16 call of this head_dim runs exact on a card; None if it is quantized."""
    backend = backends.find("cuda", card.capability)
    call = Call(
        backend, "cuda", "bfloat16", head_dim, head_dim, 32, 32, _LONG, _LONG,
        crossover=crossover.look_up(entry_of(card), head_dim, False) if backend != "none" else (),
    )  # fmt: skip
    reason = backends.why_not(recipe, call)
    return NO_GAIN if reason == "short" else reason  # at this length: at any


def runs(card: Card, text: str, head_dim: int | None) -> str:
    """The recipe that a site with this recipe's name runs on a card: "qk_int8_pv_fp16", or "exact (no_fp8)"."""
    recipe = backends.as_run(parse_recipe(text), backends.find("cuda", card.capability), head_dim or 64)
    if recipe.is_exact:
        return recipe.name
    reason = why_not(card, recipe, head_dim or 64)
    return recipe.name if reason is None else f"exact ({reason})"


def from_length(card: Card, text: str, head_dim: int) -> str:
    """The length from which the product quantizes such calls on a card, without a mask; "" if it does not."""
    name = runs(card, text, head_dim)
    found: Any = dict(crossover.look_up(entry_of(card), head_dim, False)).get(name.partition(":")[0])
    if isinstance(found, tuple):  # (batch x heads, length), the most heads first
        found = found[0][1]
    return "" if name.startswith("exact") or found is None else str(found)


def gains(card: Card, recipe: Recipe, head_dim: int) -> Gains | None:
    """Measured on Hopper, else predicted; None where nothing is known or the recipe does not run."""
    measured = cards.table()["measured"]
    if card.capability == (9, 0):
        by_length = measured["gain"].get(str(head_dim), {}).get(recipe.name)
        label = "measured" if card.name == measured["card"] else f"measured on an {measured['card']}, {NEVER_TIMED}"
        return by_length and Gains(label, {int(length): f"{gain:.2f}" for length, gain in by_length.items()})
    found = {length: card_model.gain(card, head_dim, recipe, length) for length in card_model.LENGTHS}
    if any(gain is None for gain in found.values()):
        return None
    return Gains(NEVER_TIMED, {n: f"{g.likely:.1f} ({g.low:.1f}-{g.high:.1f})" for n, g in found.items() if g})


def card_tables(card: Card) -> list[Table]:
    """All that is known of a card."""
    backend = backends.find("cuda", card.capability)
    if backend == "none":
        major, minor = card.capability
        note = (
            f"There are no kernels for compute capability {major}.{minor}: every call runs exact. "
            f"Kernels exist for {backends.capabilities()}."
        )
        return [Table(f"{card.name}: every call runs exact", ("<what", "<value"), tuple(_facts(card)), note)]
    entry = entry_of(card)
    tables = [Table(card.name, ("<what", "<value"), tuple([*_facts(card), ("break-even lengths", entry["measured"])]))]
    rows, words = [], set()
    for recipe in RECIPES.values():
        if recipe.is_exact:
            continue
        cells = []
        for dim in HEAD_DIMS:
            reason = why_not(card, recipe, dim)
            length = from_length(card, recipe.name, dim)
            words |= {reason} if reason else set()
            cells.append(f"exact ({reason})" if reason else f"from {length} tokens" if length else "at any length")
        rows.append((recipe.name, *cells))
    columns = ("<recipe", *(f"<head_dim {dim}" for dim in HEAD_DIMS))
    note = f"Calls that are shorter run exact. INT4 runs only where it is asked for. {_legend(words)}".strip()
    tables.append(Table("What each recipe runs, without a mask", columns, tuple(rows), note))
    return [*tables, *_gain_tables(card)]


def _legend(words: set[str]) -> str:
    lines = reasons.legend(words - {NO_GAIN})
    if NO_GAIN in words:
        lines.append(f"{NO_GAIN}: exact attention is, at any length, as measured or predicted")
    return " ".join(f"{line}." for line in lines)


def _facts(card: Card) -> list[tuple[str, str]]:
    major, minor = card.capability
    backend = backends.find("cuda", card.capability)
    facts = [("chip", f"{card.chip}, compute capability {major}.{minor}"), ("kernels", backend)]
    if backend != "none":
        facts.append(("default recipe", backends.as_run(parse_recipe(AUTO), backend, 128).name))
    if backends.BACKENDS.get(backend) and backends.BACKENDS[backend].has_fp16_sums:
        facts.append(("sums of P V", ", ".join(f"{pv} in {sums_of(card, pv)}" for pv in _pv_of(backend))))
    if card.sms:
        size = f"{card.sms} SMs at {card.boost_ghz:g} GHz, L2 {card.l2_mib:g} MiB, DRAM {card.dram_gbs:g} GB/s"
        facts.append(("data sheet", size))
    return facts


def _pv_of(backend: str) -> Sequence[str]:
    return ("fp8", "fp16") if backends.BACKENDS[backend].has_fp8 else ("fp16",)


def sums_of(card: Card, pv: str) -> str:
    return "fp16" if pv in card.fp16_sums else "fp32"


def _gain_tables(card: Card, head_dims: Sequence[int] = (64, 128)) -> list[Table]:
    found = [
        (f"{recipe.name}, {dim}", given)
        for recipe in RECIPES.values()
        for dim in head_dims
        if not recipe.is_exact and (given := gains(card, recipe, dim))
    ]
    if not found:
        return []
    lengths = sorted({length for _, given in found for length in given.by_length})
    rows = [(name, *(given.by_length.get(n, "") for n in lengths)) for name, given in found]
    label = found[0][1].label
    note = "Time of exact attention over the time of the whole quantized call. docs/cards.md says how it is predicted."
    columns = ("<recipe, head_dim", *(_tokens(n) for n in lengths))
    return [Table(f"Gain by length: {label}", columns, tuple(rows), note)]


def _tokens(length: int) -> str:
    return f"{length // 1024}K"


def plan_on(card: Card, rows: list[dict[str, Any]]) -> list[Table]:
    """The plan's table with what each site runs on a card, and the gains at the head_dims that it has."""
    there, lengths, words = [], {}, set()
    for row in rows:
        found = runs(card, row["recipe"], row["head_dim"])
        there.append(row | {"recipe": row["recipe"] if found == row["recipe"] else f"{row['recipe']}: {found}"})
        words |= set(re.findall(r"exact \((.*)\)", found))
        if row["head_dim"] and (length := from_length(card, row["recipe"], row["head_dim"])):
            lengths[row["head_dim"]] = f"head_dim {row['head_dim']}: quantized from {length} tokens."
    table = plan_table(there)
    note = " ".join([*lengths.values(), _legend(words)])
    held = {next((dim for dim in HEAD_DIMS if dim >= row["head_dim"]), 256) for row in rows if row["head_dim"]}
    return [Table(f"{table.title}, on {card.name}", table.columns, table.rows, note), *_gain_tables(card, sorted(held))]
