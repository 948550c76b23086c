"""From which length a whole quantized call is at least as fast as exact attention: the measured table of each card.

The table is crossover.json beside this file; `sage-patch bench --crossover` measures a card and writes its entry into
the user's own file in the cache folder, which wins. Lengths are counted in tokens (q_len = kv_len), measured with
batch x heads = backends.CROSSOVER_HEADS and, in newer entries, with the heads of one item as well;
backends.breaks_even says what follows for other calls. "head_dims" compares with the backends that torch itself may
choose, "head_dims_fa3" with FlashAttention-3 too, for calls that would run on it (`exact_backend: fa3`).
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

from sage_patch.backends import CROSSOVER_HEADS
from sage_patch.cards import model as card_model
from sage_patch.errors import SagePatchError
from sage_patch.kernels import build
from sage_patch.recipes import RECIPES, ExactBackend

STEP = 256  # lengths are rounded up to a multiple
NEVER = 1 << 40  # the length of a recipe that was slower at every measured length (null in the file)
# The exact peers of a benchmark row: the backends that torch itself may choose, and what else a call may run on.
TORCH_PEERS = ("sdpa_cudnn", "sdpa_fa2", "sdpa_default")
EXACT_PEERS = (*TORCH_PEERS, "fa3_bf16")
OPS = {recipe.name: f"{recipe.column}_op" for recipe in RECIPES.values() if recipe.column}
# By what the exact call would run on: which part of a card's entry holds.
PARTS: dict[str, str] = {"torch": "head_dims", "fa3": "head_dims_fa3"}

# {"measured": how, PARTS: {"128": {"full" | "causal": {recipe: length or None, or {batch x heads: length or None}}}}}
Card = dict[str, Any]
Points = tuple[tuple[int, int], ...]  # (batch x heads, break-even length), the most heads first
Lengths = tuple[tuple[str, Points], ...]  # by recipe
Table = tuple[tuple[int, Lengths, Lengths], ...]  # (head_dim, without causality, with it), by rising head_dim


class TableError(SagePatchError, ValueError):
    """A table file that cannot be read; the message names the file and what to do."""


def user_table() -> Path:
    """The user's own table, written by `sage-patch bench --crossover`; it need not exist."""
    return build.cache_dir() / "crossover.json"


def lengths(index: int, head_dim: int, is_causal: bool, exact_backend: ExactBackend = "torch") -> Lengths:
    """(recipe, ((batch x heads, break-even length in tokens), ...)) on the CUDA device `index`, against what
    exact_backend says. The table is read once per process."""
    return _held_by(_table(index, exact_backend), head_dim, is_causal)


@torch.compiler.assume_constant_result
def _table(index: int, exact_backend: ExactBackend) -> Table:
    return _cached_table(index, exact_backend)  # apart: a compiler looks through a cache, past the mark above


@functools.cache
def _cached_table(index: int, exact_backend: ExactBackend) -> Table:
    return table_of(card_of(torch.cuda.get_device_name(index)), exact_backend)


def card_of(name: str) -> Card:
    """The entry of the card of this name: the user's measurement, else the packaged one, else what is predicted for it,
    else the generic one."""
    packaged = read(build.HERE / "crossover.json")
    return (
        read(user_table()).get(name) or packaged.get(name) or card_model.break_even_lengths(name) or packaged["default"]
    )


def table_of(card: Card, exact_backend: ExactBackend = "torch") -> Table:
    """A card's entry as a constant. Where nothing was measured against FlashAttention-3, torch's lengths stand."""
    measured = card["head_dims"] | card.get(PARTS[exact_backend], {})
    rows = {int(dim): (_as_lengths(found["full"]), _as_lengths(found["causal"])) for dim, found in measured.items()}
    return tuple((dim, *rows[dim]) for dim in sorted(rows))


def _as_lengths(found: Mapping[str, int | None | Mapping[str, int | None]]) -> Lengths:
    return tuple((recipe, _as_points(length)) for recipe, length in found.items())


def _as_points(length: int | None | Mapping[str, int | None]) -> Points:
    """A number alone was measured with CROSSOVER_HEADS."""
    measured = length if isinstance(length, Mapping) else {str(CROSSOVER_HEADS): length}
    return tuple(
        (int(heads), NEVER if n is None else n) for heads, n in sorted(measured.items(), key=lambda m: -int(m[0]))
    )


def look_up(card: Card, head_dim: int, is_causal: bool, exact_backend: ExactBackend = "torch") -> Lengths:
    """The lengths of the smallest measured head_dim that holds this one; empty beyond the largest."""
    return _held_by(table_of(card, exact_backend), head_dim, is_causal)


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


def points(ratios: Mapping[int, Mapping[int, float]]) -> int | None | dict[str, int | None]:
    """What the file holds of a recipe, from its ratios by batch x heads and length.

    A call may be quantized by any of the points, so none may promise what another measured as slower: more heads never
    need a longer sequence than fewer do, and half the length with four times the heads is no more work.
    """
    found = {heads: break_even(by_length) for heads, by_length in sorted(ratios.items())}
    if set(found) == {CROSSOVER_HEADS}:
        return found[CROSSOVER_HEADS]
    measured = found.get(CROSSOVER_HEADS, 0)
    for heads in (h for h in ratios if h < CROSSOVER_HEADS):
        few = found[heads]
        found[heads] = None if few is None or measured is None else max(few, measured)
        many = found.get(CROSSOVER_HEADS)
        if many is not None:
            same_work = max(ratios[heads]) if few is None else few * math.sqrt(heads / CROSSOVER_HEADS)
            found[CROSSOVER_HEADS] = max(many, math.ceil(same_work / STEP) * STEP)
    return {str(heads): length for heads, length in found.items()}


def from_rows(rows: Iterable[Mapping[str, Any]], measured: str) -> Card:
    """A card's entry from benchmark rows with q_len = kv_len, of all that is in PARTS.

    measured: how, for the reader of the file. Rows without an exact peer say nothing and are left out.
    """
    rows = list(rows)
    card: Card = {"measured": measured, PARTS["torch"]: _head_dims(rows, TORCH_PEERS)}
    if any(row.get("fa3_bf16") or row.get("burst", {}).get("fa3_bf16") for row in rows):
        card[PARTS["fa3"]] = _head_dims(rows, EXACT_PEERS)
    return card


def _head_dims(rows: Iterable[Mapping[str, Any]], peers: tuple[str, ...]) -> dict[str, Any]:
    ratios: dict[tuple[int, bool, str], dict[int, dict[int, float]]] = {}
    for row in rows:
        for recipe, op in OPS.items():
            gain = ratio_to_best(row, op, peers)
            if gain is not None:
                by_heads = ratios.setdefault((row["head_dim"], row["is_causal"], recipe), {})
                by_heads.setdefault(row.get("crossover_heads", CROSSOVER_HEADS), {})[row["kv_len"]] = gain
    head_dims: dict[str, Any] = {}
    for (head_dim, causal, recipe), found in sorted(ratios.items()):
        modes = head_dims.setdefault(str(head_dim), {"full": {}, "causal": {}})
        modes["causal" if causal else "full"][recipe] = points(found)
    return head_dims


def ratio_to_best(row: Mapping[str, Any], column: str, peers: Iterable[str]) -> float | None:
    """Speed over that of the fastest peer, in the row's bursts or sustained, whichever is less; None without either."""
    found = []
    for speeds in (row, row.get("burst", {})):
        best = max((speeds.get(peer) or 0.0 for peer in peers), default=0.0)
        if speeds.get(column) and best:
            found.append(speeds[column] / best)
    return min(found, default=None)


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
    old = cards.get(name, {})
    cards[name] = card | {part: old.get(part, {}) | card.get(part, {}) for part in PARTS.values() if part in card | old}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    whole = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    partial.write_text(json.dumps(whole | {"cards": cards}, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
