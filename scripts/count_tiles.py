#!/usr/bin/env python3
"""What one warp of the mma.sync kernels executes for a tile of 64 keys, read from their machine code.

python scripts/count_tiles.py --out sage_patch/cards/tile_counts.json        needs nvcc, cuobjdump and nvdisasm, no card

Compiles the dense INT8 kernels for each architecture, takes the loop over keys that all rows see, and sorts its
instructions by the unit that they keep busy. What the loop skips while no row maximum moves (the rescaling of O) is
left out. sage_patch/cards/model.py reads the file; Hopper's mma.sync (90a) is there to compare the model with what was
measured on an H200. Run it after a change of these kernels, then scripts/update_cards.py.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kernels")]

import test_mma_machine_code as machine_code  # noqa: E402

from sage_patch.kernels import build  # noqa: E402

UNIT = "fwd_mma"
PRODUCTS = {
    machine_code.FP16: ("fp16", "fp32"),
    machine_code.SPLIT: ("fp16", "fp16"),
    machine_code.FP8: ("fp8", "fp32"),
    machine_code.FP8_SPLIT: ("fp8", "fp16"),
}
FP32 = ("FFMA", "FADD", "FMUL", "HADD2", "HFMA2", "FHADD", "IMAD")
# On some architectures MUFU's unit converts, too; packed conversions (F2FP) are ALU work.
MUFU = ("MUFU", "I2F", "F2F")
ALU = (
    "IMNMX", "VIMNMX", "LOP3", "IADD", "F2FP", "PRMT", "SEL", "FSEL", "ISETP", "FSETP", "FMNMX", "SHF", "LEA", "MOV",
    "I2FP", "VIADD",
)  # fmt: skip


def unit_of(operation: str) -> str:
    if machine_code.tensor_core(operation):
        return "tensor"
    if operation.startswith(ALU):  # before MUFU: F2FP is no F2F
        return "alu"
    if operation.startswith(MUFU):
        return "mufu"
    if operation.startswith(FP32):
        return "fp32"
    return next((unit for unit in ("ldsm", "nop") if operation.startswith(unit.upper())), "other")


def registers(log: str) -> dict[tuple[int, int], int]:
    """(dim, product) -> registers of a thread, from the compiler's words."""
    found = {}
    for part in log.split("Compiling entry function")[1:]:
        name, used = re.search(machine_code.KERNEL, part), re.search(r"Used (\d+) registers", part)
        if name and used:
            found[int(name[1]), int(name[2])] = int(used[1])
    return found


def shared_bytes(dim: int, product: int, threads: int) -> int:
    """MmaConfig::bytes of mma_tile.cuh: Q, two stages of 64 keys, scales, and what a warp notes."""
    stage = 64 * dim + 64 * min(dim, 128) * (1 if product >= machine_code.FP8 else 2)
    return 128 * dim + 2 * stage + 4 * 128 + threads // 32 * 16


def count(
    architecture: str, dim: int, product: int, code: list[machine_code.Instruction], registers: int
) -> dict[str, Any] | None:
    """One row of the file; None for a kernel that is not compiled for this architecture."""
    if not any(machine_code.tensor_core(operation) for _, operation, _ in code):
        return None
    pv, sums = PRODUCTS[product]
    fragments = machine_code.fragments_of(architecture, dim, product, machine_code.DENSE)
    body = [operation for _, operation, _ in machine_code.loop(code)]
    units = Counter(unit_of(operation) for operation in body)
    if product == machine_code.FP16:  # O times factors, where a maximum moved
        skipped = fragments * min(dim, 128) // 2
        if Counter(x.split(".")[0] for x in body)["FMUL"] < skipped:
            raise SystemExit(f"head_dim {dim}, {pv}: the loop does not hold the {skipped} products that it may skip")
        units["fp32"] -= skipped
    tensor = Counter(kind for operation in body if (kind := machine_code.tensor_core(operation)))
    return {
        "head_dim": dim, "bits": 8, "pv": pv, "sums": sums, "rows": 16 * fragments, "warps": 8 // fragments,
        "registers": registers, "shared_bytes": shared_bytes(dim, product, 256 // fragments),
        "tensor": dict(sorted(tensor.items())),
        **{unit: units[unit] for unit in ("mufu", "fp32", "alu", "ldsm", "nop", "other")},
    }  # fmt: skip


def count_one(architecture: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of one architecture, compiled in `folder`."""
    used = registers(machine_code.compiled(UNIT, architecture, folder)[1])
    found = sorted(machine_code.kernels(UNIT, architecture, folder).items())
    rows = (count(architecture, dim, product, code, used[dim, product]) for (dim, product, _, _), code in found)
    return [row for row in rows if row is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "sage_patch" / "cards" / "tile_counts.json")
    out = parser.parse_args().out
    nvcc = build.find_nvcc()
    if nvcc is None:
        raise SystemExit("nvcc was not found")
    with tempfile.TemporaryDirectory() as folder:
        rows = {}
        for architecture in machine_code.ARCHITECTURES:
            print(f"sm_{architecture} ...", file=sys.stderr, flush=True)
            rows[architecture] = count_one(architecture, Path(folder))
    lines = json.dumps(
        {"about": __doc__.partition("\n")[0], "nvcc": build.nvcc_version(nvcc), "keys": 64, "kernels": rows}, indent=1
    )
    # One kernel a line.
    text = re.sub(r"\{\s+\"head_dim\"[^{}]*\{[^{}]*\}[^{}]*\}", lambda m: re.sub(r"\s+", " ", m[0]), lines)
    out.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
