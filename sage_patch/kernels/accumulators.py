"""In which type a card sums the products of P and V: measured there, else known of its name, else fp32.

Sums in fp16 run at twice the rate on GeForce and are no faster on other cards (cards/table.py). They stay within fp16's
range by construction: 64 keys at a time, with probabilities and values that are bounded accordingly (fwd_mma.cuh).
`sage-patch bench --crossover` measures a card and keeps what was faster in the user's own table, beside the break-even
lengths.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path

from sage_patch.cards import table as cards
from sage_patch.kernels import crossover

TYPES = ("fp8", "fp16")  # of P and V
KEY = "sums"  # of the user's table: {card: {"measured": how, "fp8": "fp16" or "fp32", "fp16": ...}}


@functools.cache
def in_fp16(name: str) -> tuple[str, ...]:
    """The types of P and V whose products are summed in fp16 on the card of this name. Looked up once a process."""
    measured = _read().get(name)
    if measured is not None:
        return tuple(pv for pv in TYPES if measured.get(pv) == "fp16")
    card = cards.find(name)
    return () if card is None else card.fp16_sums


def write(path: Path, name: str, sums: Mapping[str, str], measured: str) -> None:
    """Keep what was faster on a card. sums: {"fp8": "fp16" or "fp32", ...}; measured: how, for the reader."""
    whole = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cards": {}}
    whole[KEY] = whole.get(KEY, {}) | {name: {"measured": measured, **sums}}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
    in_fp16.cache_clear()


def _read() -> dict[str, dict[str, str]]:
    """Raises TableError for a file that is no table."""
    path = crossover.user_table()
    crossover.read(path)  # its errors are worded there
    return json.loads(path.read_text(encoding="utf-8")).get(KEY, {}) if path.exists() else {}
