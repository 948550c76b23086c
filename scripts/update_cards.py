#!/usr/bin/env python3
"""Writes what docs/cards.md and sage_patch/cards/cards.json take from other files.

python scripts/update_cards.py            writes both; --check only says whether they are up to date

cards.json: "measured", the gains of Hopper cards, from docs/results/kernels_h200.json. docs/cards.md: the tables
between its marks, from cards.json, tile_counts.json and docs/results/mma_h200.json.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sage_patch.cards import model as card_model  # noqa: E402
from sage_patch.cards import table as cards  # noqa: E402
from sage_patch.evaluation import card_tables  # noqa: E402
from sage_patch.kernels import crossover  # noqa: E402
from sage_patch.recipes import RECIPES  # noqa: E402

RESULTS = ROOT / "docs" / "results"
DOCS = ROOT / "docs" / "cards.md"
SHOWN = (2048, 8192, 32768)
TORCH = ("sdpa_cudnn", "sdpa_fa2", "sdpa_default")  # the backends that torch itself may choose
# mma.sync of an H200: multiply-adds a clock and SM, measured with independent chains of each instruction.
H200_RATES = {"s8": 2468.0, "f16": 1190.0, "f16_fp16": 1190.0}
H200_SHARED_KIB, H200_SMS, H200_GHZ = 228, 132, 1.98
INT8 = {pv: RECIPES[f"qk_int8_pv_{pv}"] for pv in ("fp8", "fp16")}


def measured() -> dict[str, Any]:
    """Speed of whole calls over the faster of torch's own backends, no mask, by head_dim, recipe and length."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    result = json.loads((RESULTS / "kernels_h200.json").read_text())
    for row in result["rows"]:
        exact = max((row.get(peer) or 0.0 for peer in TORCH), default=0.0)
        for recipe, op in crossover.OPS.items():
            if not row["is_causal"] and row.get(op) and exact:
                by_length = found.setdefault(str(row["head_dim"]), {}).setdefault(recipe, {})
                by_length[str(row["q_len"])] = round(row[op] / exact, 3)
    return {"card": "H200", "source": "docs/results/kernels_h200.json", "gain": found}


def with_measured() -> str:
    """cards.json with "measured" as its last line."""
    text = cards.TABLE.read_text(encoding="utf-8").rstrip()
    text = re.sub(r',\n "measured": .*\n\}$', "\n}", text)
    return text.removesuffix("\n}") + f',\n "measured": {json.dumps(measured())}\n}}\n'


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def header(*cells: str) -> list[str]:
    return [line(*cells), line(*["---"] * len(cells))]


def span(low: float, likely: float, high: float) -> str:
    return f"{likely:.0f} ({low:.0f}-{high:.0f})"


def table_of_cards() -> list[str]:
    rows = header(
        "card", "capability", "default recipe", "sums of P V", *(f"gain at {n // 1024}K" for n in SHOWN),
        "quantized from",
    )  # fmt: skip
    for card in cards.cards():
        backend = card_tables.backends.find("cuda", card.capability)
        capability = ".".join(map(str, card.capability))
        if backend == "none":
            rows.append(line(card.name, capability, "exact: no kernels", *[""] * (len(SHOWN) + 2)))
            continue
        recipe = card_tables.backends.of_device(card_tables.parse_recipe("sage2"), backend)
        given = card_tables.gains(card, recipe, 128)
        length = card_tables.from_length(card, recipe.name, 128)
        reason = card_tables.why_not(card, recipe, 128)
        sums = (
            ""
            if card.capability == (9, 0)
            else ", ".join(f"{pv} in {card_tables.sums_of(card, pv)}" for pv in card_tables._pv_of(backend))
        )
        by_length = given.by_length if given else {}
        rows.append(
            line(card.name, capability, recipe.name, sums, *(by_length.get(n, "") for n in SHOWN),
                 f"exact: {reason}" if reason else length)
        )  # fmt: skip
    return rows


def table_of_h200() -> list[str]:
    """The model of mma.sync on an H200 beside what was measured there."""
    rows = header("head_dim", "P V", "sums", "predicted TOPS", "measured", "latency that fits")
    result = json.loads((RESULTS / "mma_h200.json").read_text())
    for row in result["rows"]:
        if row.get("backend") not in ("mma", "mma_split") or "TOPS" not in row or row["causal"]:
            continue
        recipe, sums = RECIPES[row["recipe"]], "fp16" if row["backend"] == "mma_split" else "fp32"
        if recipe.qk_bits != 8:
            continue
        kernel = card_model.find_kernel("90a", row["dim"], recipe, sums)
        assert kernel is not None
        work = 4 * 16 * 128 * row["dim"] * H200_SMS * 4 * H200_GHZ / 1e3
        found = [
            card_model.tile_clocks(kernel, H200_RATES, H200_SHARED_KIB, "90a", latency)
            for latency in (*card_model.LATENCIES, 0)
        ]
        alone = found[3]["one warp"]  # without latency; the rest grows in proportion to it
        fits = (work / row["TOPS"] - alone) / (found[1]["one warp"] - alone) * card_model.LATENCIES[1]
        predicted = span(*(work / found[i]["tile"] for i in range(3)))
        rows.append(line(row["dim"], recipe.pv, sums, predicted, f"{row['TOPS']:.0f}", f"{fits:.1f}"))
    return rows


def table_of_published() -> list[str]:
    rows = header("card", "kernel", "predicted TOPS, ours", "published TOPS, theirs")
    for name, figures in cards.table()["published"].items():
        if name == "about":
            continue
        card = cards.named(name)
        exact = card_model.exact_tops(card, 128)
        rows.append(line(name, "exact, 16 bits", f"{exact:.0f}", f"{figures['fa2']:.0f}"))
        for kernel, tops in figures.items():
            if kernel != "fa2":
                pv, sums = kernel.split("/")
                found = card_model.tops(card, 128, INT8[pv], sums)
                assert found is not None
                words = f"INT8, {pv} P V, sums in {sums}"
                rows.append(line(name, words, span(found.low, found.likely, found.high), tops))
    return rows


def table_of_tiles() -> list[str]:
    units = ("mufu", "fp32", "alu", "ldsm", "nop", "other")
    rows = header(
        "architecture", "P V", "sums", "rows", "tensor cores", *units, "registers", "shared bytes", "warps a scheduler"
    )
    for architecture, kernels in card_model.kernels().items():
        shared = 164 if architecture == "80" else 228 if architecture in ("100", "110") else 100
        for k in kernels:
            if k["bits"] == 8 and k["head_dim"] == 128 and architecture != "90a":
                tensor = ", ".join(f"{n} {kind}" for kind, n in k["tensor"].items())
                warps = card_model.warps_a_scheduler(k, shared, architecture)
                counts = (k[unit] for unit in units)
                rows.append(
                    line(f"sm_{architecture}", k["pv"], k["sums"], k["rows"], tensor, *counts, k["registers"],
                         k["shared_bytes"], f"{warps:g}")
                )  # fmt: skip
    return rows


TABLES = {"cards": table_of_cards, "h200": table_of_h200, "published": table_of_published, "tiles": table_of_tiles}


def docs() -> str:
    text = DOCS.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n\n")
        _, end, after = rest.partition("\n\n<!-- end -->")
        assert begin and end, name
        text = before + begin + "\n".join(table()) + end + after
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for path, make in ((cards.TABLE, with_measured), (DOCS, docs)):
        text = make()
        if text != path.read_text(encoding="utf-8"):
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(text, encoding="utf-8")
                cards.table.cache_clear()
    print(f"{'stale' if check else 'wrote'}: {', '.join(stale)}" if stale else "up to date")
    sys.exit(bool(stale) and check)


if __name__ == "__main__":
    main()
