"""NVIDIA cards by name: which chip one has, what its tensor cores do in a clock, and in which type sums are fastest.

Chips of one compute capability differ: GeForce sums FP16 and FP8 products in fp32 at half the rate, workstation and
data-centre cards at the full one. What a card does is known from its name alone. cards.json is the table; a card that
is not in it gets safe defaults. Standard library only.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_patch.errors import SagePatchError
from sage_patch.recipes import nearest

TABLE = Path(__file__).with_name("cards.json")


class CardError(SagePatchError, ValueError):
    """No card of the table has this name."""


@dataclass(frozen=True)
class Card:
    """One row of the table.

    chip: its name in the table. capability: compute capability. fp16_sums: the types of P V that are summed in fp16.
    rates: multiply-adds a clock and SM by input and sum, empty where no kernel runs or nothing is published.
    shared_kib: shared memory of an SM. sms, boost_ghz, l2_mib, dram_gbs: 0 in a row that stands for several cards.
    exact_tops: published speed of exact attention, head_dim 128; 0: taken from the tensor cores' rate.
    """

    name: str
    match: str
    chip: str
    capability: tuple[int, int]
    fp16_sums: tuple[str, ...] = ()
    rates: Mapping[str, float] | None = None
    shared_kib: int = 0
    sms: int = 0
    boost_ghz: float = 0.0
    l2_mib: float = 0.0
    dram_gbs: float = 0.0
    exact_tops: float = 0.0


@functools.cache
def table() -> dict[str, Any]:
    """cards.json as it is."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


@functools.cache
def cards() -> tuple[Card, ...]:
    """All rows; of several that match a name the first one counts."""
    chips, rows = table()["chips"], []
    for row in table()["cards"]:
        chip = chips[row["chip"]]
        major, minor = chip["capability"].split(".")
        rows.append(
            Card(
                **row,
                capability=(int(major), int(minor)),
                fp16_sums=tuple(chip.get("fp16_sums", ())),
                rates=chip.get("rates"),
                shared_kib=chip.get("shared_kib", 0),
            )  # fmt: skip
        )
    return tuple(rows)


@functools.cache
def find(name: str) -> Card | None:
    """The row of a device by the name that its driver gives ("NVIDIA GeForce RTX 4090"), or by a shorter one."""
    short = re.sub(r"\b(NVIDIA|GeForce|Tesla|Quadro|Laptop GPU)\b", " ", name, flags=re.IGNORECASE)
    short = " ".join(short.split())
    laptop = "laptop" in name.lower()  # of the same chips, with other clocks and fewer SMs
    for card in cards():
        if re.fullmatch(card.match, short, re.IGNORECASE):
            if not laptop:
                return card
            return Card(name, card.match, card.chip, card.capability, card.fp16_sums, card.rates, card.shared_kib)
    return None


def named(name: str) -> Card:
    """The row of a card that a person names. Raises CardError with the nearest names."""
    card = find(name) or next((c for c in cards() if c.name.lower() == name.strip().lower()), None)
    if card is None:
        raise CardError(f"unknown card {name!r}{nearest(name, [c.name for c in cards()])}")
    return card


_said: set[str] = set()


def unknown_once(name: str) -> str | None:
    """What to say of a device that the table does not hold: the first time only, and None for one that it holds."""
    if find(name) is not None or name in _said:
        return None
    _said.add(name)
    return (
        f"sage_patch knows no card {name!r}: it runs with safe settings (sums in fp32, and lengths from which "
        "quantizing pays that were measured on another card); sage-patch bench --crossover measures this one"
    )
