"""From which length a whole quantized call is at least as fast as exact attention: the measured table of each card.

The table is crossover.json beside this file; `sage-patch bench --crossover` measures a card and writes its entry into
the user's own file in the cache folder, which wins. Lengths are counted in tokens (q_len = kv_len), measured with
batch x heads = backends.CROSSOVER_HEADS; backends.breaks_even says what follows for other calls.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from sage_patch.cards import model as card_model
from sage_patch.errors import SagePatchError
from sage_patch.kernels import build
from sage_patch.recipes import RECIPES

STEP = 256  # lengths are rounded up to a multiple
NEVER = 1 << 40  # the length of a recipe that was slower at every measured length (null in the file)
# The exact peers of a benchmark row: the backends that torch itself may choose.
EXACT_PEERS = ("sdpa_cudnn", "sdpa_fa2", "sdpa_default")
OPS = {recipe.name: f"{recipe.column}_op" for recipe in RECIPES.values() if recipe.column}

Card = dict[str, Any]  # {"measured": how, "head_dims": {"128": {"full" | "causal": {recipe: length or None}}}}
Lengths = tuple[tuple[str, int], ...]  # (recipe, break-even length)
Table = tuple[tuple[int, Lengths, Lengths], ...]  # (head_dim, without causality, with it), by rising head_dim


class TableError(SagePatchError, ValueError):
    """A table file that cannot be read; the message names the file and what to do."""


def user_table() -> Path:
    """The user's own table, written by `sage-patch bench --crossover`; it need not exist."""
    return build.cache_dir() / "crossover.json"


def lengths(index: int, head_dim: int, is_causal: bool) -> Lengths:
    """(recipe, break-even length in tokens) on the CUDA device `index`. The table is read once per process."""
    return _held_by(_table(index), head_dim, is_causal)


@torch.compiler.assume_constant_result
def _table(index: int) -> Table:
    return _cached_table(index)  # apart: a compiler looks through a cache, past the mark above


@functools.cache
def _cached_table(index: int) -> Table:
    return table_of(card_of(torch.cuda.get_device_name(index)))


def card_of(name: str) -> Card:
    """The entry of the card of this name: the user's measurement, else the packaged one, else what is predicted for it,
    else the generic one."""
    packaged = read(build.HERE / "crossover.json")
    return (
        read(user_table()).get(name) or packaged.get(name) or card_model.break_even_lengths(name) or packaged["default"]
    )


def table_of(card: Card) -> Table:
    """A card's entry as a constant."""
    rows = {
        int(dim): (_as_lengths(found["full"]), _as_lengths(found["causal"])) for dim, found in card["head_dims"].items()
    }
    return tuple((dim, *rows[dim]) for dim in sorted(rows))


def _as_lengths(found: Mapping[str, int | None]) -> Lengths:
    return tuple((recipe, NEVER if length is None else length) for recipe, length in found.items())


def look_up(card: Card, head_dim: int, is_causal: bool) -> Lengths:
    """The lengths of the smallest measured head_dim that holds this one; empty beyond the largest."""
    return _held_by(table_of(card), head_dim, is_causal)


def _held_by(table: Table, head_dim: int, is_causal: bool) -> Lengths:
    """`look_up`. head_dim is only compared: while a graph is traced it may be a symbol."""
    for measured, full, causal in table:
        if measured >= head_dim:
            return causal if is_causal else full
    return ()


def break_even(ratios: Mapping[int, float]) -> int | None:
    """The length from which a ratio (quantized speed over exact speed) stays at 1 or above; None if it ends below.

    ratios: by measured length. Between the last length below 1 and the next, the ratio is taken as linear in log2 of
    the length. It truly rises fastest at first, so this errs to the longer side; the result is rounded up to a
    multiple of STEP as well. A ratio that is never below 1 gives the shortest measured length.
    """
    points = sorted(ratios.items())
    below = [i for i, (_, ratio) in enumerate(points) if ratio < 1]
    if not below:
        return points[0][0]
    if below[-1] == len(points) - 1:
        return None
    (a, low), (b, high) = points[below[-1]], points[below[-1] + 1]
    length = a * (b / a) ** ((1 - low) / (high - low))
    return min(b, math.ceil(length / STEP) * STEP)


def from_rows(rows: Iterable[Mapping[str, Any]], measured: str) -> Card:
    """A card's entry from benchmark rows with q_len = kv_len. Speed against the faster of EXACT_PEERS.

    measured: how, for the reader of the file. Rows without an exact peer say nothing and are left out.
    """
    ratios: dict[tuple[int, bool, str], dict[int, float]] = {}
    for row in rows:
        exact = max((row.get(peer) or 0.0 for peer in EXACT_PEERS), default=0.0)
        for recipe, op in OPS.items():
            if row.get(op) and exact:
                key = (row["head_dim"], row["is_causal"], recipe)
                ratios.setdefault(key, {})[row["kv_len"]] = row[op] / exact
    head_dims: dict[str, Any] = {}
    for (head_dim, causal, recipe), found in sorted(ratios.items()):
        modes = head_dims.setdefault(str(head_dim), {"full": {}, "causal": {}})
        modes["causal" if causal else "full"][recipe] = break_even(found)
    return {"measured": measured, "head_dims": head_dims}


def read(path: Path) -> dict[str, Card]:
    """The cards of a table file; empty if there is no such file. Raises TableError for a file that is no table."""
    try:
        cards = json.loads(path.read_text(encoding="utf-8"))["cards"]
        for card in cards.values():
            for modes in card["head_dims"].values():
                modes["full"], modes["causal"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TableError(
            f"{path} is no table of break-even lengths ({type(error).__name__}: {error}); remove it, or measure again "
            "with sage-patch bench --crossover"
        ) from None
    return cards


def write(path: Path, name: str, card: Card) -> None:
    """Put a card's entry into a table file, made if need be; entries of other cards and head_dims stay."""
    cards = read(path)
    old = cards.get(name, {}).get("head_dims", {})
    cards[name] = card | {"head_dims": old | card["head_dims"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    whole = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    partial.write_text(json.dumps(whole | {"cards": cards}, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
