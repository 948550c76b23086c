"""The mma.sync kernels' machine code, without a card: nothing spills, the tensor cores do what they should, and the
loop over keys is no longer than it was.

It is that of the wheel's library. For Hopper cards, on which only tests run these kernels, they are compiled with
`-m slow`.
"""

from __future__ import annotations

import collections
import functools
import re
import subprocess
from pathlib import Path

import pytest

from sage_patch.cards.model import kernels as tile_kernels
from sage_patch.kernels import build
from zoo import machine_code
from zoo.machine_code import Instruction

pytestmark = pytest.mark.nvcc

ARCHITECTURES = ("80", "86", "89", "90a", "100", "110", "120")
UNITS = ("fwd_mma", "fwd_mma_masked", "fwd_mma_logits")
FP16, SPLIT, FP8, FP8_SPLIT = range(4)  # Product of mma_tile.cuh
DENSE, MASKED, ADJUSTED = 0, 2, 3  # Family of params.h
KERNEL = r"MmaConfigILi(\d+)ELNS\w*?ProductE(\d)ELNS\w*?FamilyE(\d)ELb([01])E"  # in a mangled name
COPIES = 2  # each kernel has two loops, or two branches of one, over keys
# Instructions of the dense loop, 64 keys of one warp: what they were, plus 2 %. FP8 on 90a is emulated, for tests.
BUDGET = {  # (dim, product): by architecture
    (64, FP16): {"80": 675, "86": 396, "89": 396, "90a": 652, "100": 652, "110": 681, "120": 430},
    (64, SPLIT): {"80": 460, "86": 460, "89": 460, "90a": 443, "100": 427, "110": 442, "120": 468},
    (64, FP8): {"89": 657, "120": 681},
    (128, FP16): {"80": 886, "86": 519, "89": 519, "90a": 858, "100": 861, "110": 890, "120": 582},
    (128, SPLIT): {"80": 635, "86": 635, "89": 635, "90a": 622, "100": 596, "110": 610, "120": 673},
    (128, FP8): {"89": 882, "120": 934},
    (128, FP8_SPLIT): {"89": 1003, "120": 1076},
    (64, FP8_SPLIT): {"89": 721, "120": 753},
    (256, FP16): {"80": 585, "86": 585, "89": 585, "90a": 572, "100": 567, "110": 588, "120": 672},
    (256, FP8): {"89": 599, "120": 648},
}
# The same of pages, without a mask or softcap: (dim, whether warps take turns on half pages).
PAGES_BUDGET = {
    (64, 0): {"80": 1194, "86": 1194, "89": 1194, "100": 1151, "110": 1179, "120": 1180},
    (64, 1): {"80": 1251, "86": 1251, "89": 1251, "100": 1173, "110": 1201, "120": 1214},
    (128, 0): {"80": 1643, "86": 1643, "89": 1643, "100": 1612, "110": 1640, "120": 1655},
    (128, 1): {"80": 1700, "86": 1707, "89": 1707, "100": 1616, "110": 1643, "120": 1681},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mma")


@functools.cache
def compiled(unit: str, architecture: str, folder: Path) -> tuple[Path, str]:
    """(the unit's machine code, the compiler's log) for one architecture."""
    out = folder / f"{unit}.{architecture}.cubin"
    command = [
        str(build.find_nvcc()), "-cubin", f"-gencode=arch=compute_{architecture},code=sm_{architecture}", "-O3",
        "-std=c++17", "-Xptxas=-v", str(build.source_dir() / f"{unit}.cu"), "-o", str(out),
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return out, run.stdout + run.stderr


@functools.cache
def kernels(unit: str, architecture: str, folder: Path) -> dict[tuple[int, int, int, bool], list[Instruction]]:
    """(dim, product, family, packed) -> its machine code."""
    held = architecture != "90a"
    path = machine_code.wheel_library() if held else compiled(unit, architecture, folder)[0]
    found: dict[tuple[int, int, int, bool], list[Instruction]] = {}
    for mangled, text in machine_code.functions(path, architecture).items():
        if f"{len(unit) + 3}_{unit}_cu_" not in mangled:
            continue
        name = re.search(KERNEL, mangled)
        assert name is not None, mangled
        found[int(name[1]), int(name[2]), int(name[3]), name[4] == "1"] = machine_code.instructions(text)
    return found


def runs_on(architecture: str, product: int, packed: bool) -> bool:
    """compiled_here of mma_tile.cuh."""
    number = int(architecture.rstrip("a"))
    return (product < FP8 or number in (89, 90) or number >= 120) and (not packed or number < 100)


def fragments_of(architecture: str, dim: int, product: int, family: int) -> int:
    """MmaConfig::fragments of mma_tile.cuh: of 16 rows, a warp."""
    if family == ADJUSTED or product == SPLIT or dim > 128:
        return 1
    is_small = architecture in ("86", "89", "120")  # SMs with 100 KB
    return 1 if (is_small and product == FP16) or (family == MASKED and product == FP8 and dim == 128) else 2


def expected(architecture: str, dim: int, product: int, family: int, packed: bool) -> dict[str, int]:
    """Tensor-core instructions of one warp and 64 keys, by kind."""
    fragments, channels = fragments_of(architecture, dim, product, family), min(dim, 128)
    steps = (dim // 2 if packed else dim) // 32
    scores = {("IMMA.16864.S4" if packed else "IMMA.16832.S8"): steps * 8 * fragments}
    weights = ("HMMA.16816.F32", "HMMA.16816.F16", "QMMA.16832.F32", "QMMA.16832.F16")[product]
    return scores | {weights: (2 if product >= FP8 else 4) * (channels // 8) * fragments}


def tensor_core(operation: str) -> str | None:
    found = re.match(r"(IMMA\.168\d\d\.S[48]|[HQO]MMA\.168\d\d\.F\d\d|[HIQO]MMA\.\w+)", operation)
    return found[1] if found else None


def loop(code: list[Instruction]) -> list[Instruction]:
    """The shortest loop with tensor-core instructions: keys that every row sees."""
    loops = []
    for at, operation, operands in code:
        target = re.search(r"0x([0-9a-f]+)", operands) if operation.startswith("BRA") else None
        if target and int(target[1], 16) < at:
            body = [x for x in code if int(target[1], 16) <= x[0] <= at]
            if any(tensor_core(x[1]) for x in body):
                loops.append(body)
    return min(loops, key=len)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    "architecture", [pytest.param(a, marks=pytest.mark.slow if a == "90a" else []) for a in ARCHITECTURES]
)
def test_tensor_cores_and_registers(unit: str, architecture: str, folder: Path) -> None:
    found = kernels(unit, architecture, folder)
    family = (DENSE, MASKED, ADJUSTED)[UNITS.index(unit)]
    assert {key[2] for key in found} == {family}
    for (dim, product, _, packed), code in found.items():
        counts = collections.Counter(kind for _, operation, _ in code if (kind := tensor_core(operation)))
        operations = collections.Counter(operation.split(".")[0] for _, operation, _ in code)
        assert operations["LDL"] == operations["STL"] == 0
        if not runs_on(architecture, product, packed):  # never the compiler's emulation
            assert not counts, (dim, product, packed, counts)
            continue
        want = {kind: COPIES * n for kind, n in expected(architecture, dim, product, family, packed).items()}
        if architecture == "90a" and (product >= FP8 or packed):  # emulated, for tests
            assert counts, (dim, product, packed)
            continue
        assert counts == want, (dim, product, packed)
        if family == DENSE:
            assert len(loop(code)) <= BUDGET[dim, product][architecture], (dim, product, len(loop(code)))


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a != "90a"])
def test_pages(architecture: str) -> None:
    """The quantized cache's kernels: one loop over half pages with all its products, INT8 and FP16, in registers."""
    seen = set()
    for mangled, text in machine_code.functions(machine_code.wheel_library(), architecture).items():
        if not re.search(r"_pages_(append|attend_mma|combine)_cu_", mangled):
            continue
        code = machine_code.instructions(text)
        operations = collections.Counter(operation.split(".")[0] for _, operation, _ in code)
        assert operations["LDL"] == operations["STL"] == 0, mangled
        if name := re.search(r"attend_mmaILi(\d+)ELb([01])ELb([01])E", mangled):
            dim, turns, extra = map(int, name.groups())
            counts = collections.Counter(kind for _, operation, _ in code if (kind := tensor_core(operation)))
            assert counts == {"IMMA.16832.S8": dim // 32 * 8, "HMMA.16816.F32": dim // 8 * 4}, mangled
            assert extra or len(loop(code)) <= PAGES_BUDGET[dim, turns][architecture], (dim, turns, len(loop(code)))
            seen.add((dim, turns, extra))
    assert len(seen) == 8


def test_the_counts_that_predictions_are_made_of_are_those_of_the_kernels(folder: Path) -> None:
    """Else: scripts/count_tiles.py, then scripts/update_cards.py."""
    kinds = [("fp16", "fp32"), ("fp16", "fp16"), ("fp8", "fp32"), ("fp8", "fp16")]  # by Product
    recorded = {(k["head_dim"], kinds.index((k["pv"], k["sums"]))): k for k in tile_kernels()["89"]}
    found = {(dim, product): loop(code) for (dim, product, _, _), code in kernels("fwd_mma", "89", folder).items()}
    assert set(found) == set(recorded)
    for key, body in found.items():
        row = recorded[key]
        assert collections.Counter(k for _, o, _ in body if (k := tensor_core(o))) == row["tensor"]
        skipped = row["rows"] // 16 * min(key[0], 128) // 2 if key[1] == FP16 else 0
        total = sum(row[unit] for unit in ("mufu", "fp32", "alu", "ldsm", "nop", "other")) + sum(row["tensor"].values())
        assert total == pytest.approx(len(body) - skipped, rel=0.03), key


@pytest.mark.slow
@pytest.mark.parametrize("unit", (*UNITS, "quantize"))
def test_nothing_spills_on_hopper(unit: str, folder: Path) -> None:
    """Of the others, the build of the library says so."""
    assert build.check_log(compiled(unit, "90a", folder)[1]) == []
