"""The pre-processing's machine code, without a card: the loops over whole blocks read every row 16 bytes at a time,
write whole words and are no longer than they were. That nothing spills, the build says.
"""

from __future__ import annotations

import collections
import re

import pytest

from sage_patch.kernels import build
from zoo import machine_code

pytestmark = pytest.mark.nvcc

# (padded head_dim, FP16 V): instructions of a warp and a block of V, and of K, as they were plus 2 %.
BUDGET = {
    (64, 0): (410, 447), (64, 1): (373, 434), (128, 0): (780, 795), (128, 1): (745, 782),
    (256, 0): (780, 1343), (256, 1): (744, 1343),
}  # fmt: skip
PLAIN = (0, 1)  # Mode of quantize_head.cuh: fp16 and bf16


def test_loops() -> None:
    seen = set()
    for mangled, text in machine_code.functions(build.build(["90"]), "90a").items():
        name = re.search(r"8quantizeILi(\d+)ELb(\d)ELNS\w*?ModeE(\d)ELb(\d)", mangled)
        if name is None or int(name[3]) not in PLAIN or name[4] == "1":  # rotated keys have no budget yet
            continue
        dim, fp16 = int(name[1]), int(name[2])
        width = min(dim, 128)
        values, keys = loops(machine_code.instructions(text), width // 8)  # in this order
        stores = {"STG.E.128": width // 8} if fp16 else {"STS": width // 4}
        assert loads(values) == width // 8 and stores.items() <= values.items(), (dim, fp16, values)
        assert loads(keys) == dim // 8 and keys["STG.E.64"] == dim // 8 and keys["REDUX.MAX"] == 1, (dim, fp16, keys)
        assert values.total() <= BUDGET[dim, fp16][0] and keys.total() <= BUDGET[dim, fp16][1], (dim, fp16)
        seen.add((dim, fp16, int(name[3])))
    assert len(seen) == len(BUDGET) * len(PLAIN)


def loads(counts: collections.Counter[str]) -> int:
    return sum(n for operation, n in counts.items() if operation.startswith("LDG") and ".128" in operation)


def loops(code: list[machine_code.Instruction], rows: int) -> list[collections.Counter[str]]:
    """Counts of operations of each innermost loop that reads at least so many rows."""
    index = {address: i for i, (address, _, _) in enumerate(code)}
    found: dict[int, collections.Counter[str]] = {}  # by where it begins; the innermost ends first
    for i, (address, operation, operands) in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)", operands) if operation.startswith("BRA") else None
        if target and int(target[1], 16) < address and int(target[1], 16) in index:
            first = index[int(target[1], 16)]
            body = collections.Counter(x[1] for x in code[first : i + 1])
            if loads(body) >= rows and not any(inner >= first for inner in found):
                found[first] = body
    return list(found.values())
