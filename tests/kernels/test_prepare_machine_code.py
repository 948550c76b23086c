"""The pre-processing's machine code, without a card: nothing spills, and the loops over whole blocks read every row 16
bytes at a time, write whole words and are no longer than they were.

One architecture is compiled by default; all of them with `-m slow`.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
from pathlib import Path

import pytest

from kernels.test_mma_machine_code import ARCHITECTURES, compiled, tool
from sage_patch.kernels import build

pytestmark = pytest.mark.nvcc

# (padded head_dim, FP16 V): instructions of a warp and a block of V, and of K, as they were on 90a plus 2 %.
BUDGET = {
    (64, 0): (410, 445), (64, 1): (376, 440), (128, 0): (770, 820), (128, 1): (736, 786),
    (256, 0): (769, 1490), (256, 1): (736, 1490),
}  # fmt: skip
PLAIN = (0, 1)  # Mode of quantize_head.cuh: fp16 and bf16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepare")


@pytest.mark.parametrize(
    "architecture", [pytest.param(a, marks=[] if a == "90a" else pytest.mark.slow) for a in ARCHITECTURES]
)
def test_nothing_spills(architecture: str, folder: Path) -> None:
    assert build.check_log(compiled("quantize", architecture, folder)[1]) == []


def test_loops(folder: Path) -> None:
    disassembler = tool("cuobjdump")
    if disassembler is None or tool("nvdisasm") is None:
        pytest.skip("no cuobjdump or no nvdisasm: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    path = f"{Path(str(tool('nvdisasm'))).parent}{os.pathsep}{os.environ['PATH']}"
    cubin = compiled("quantize", "90a", folder)[0]
    sass = subprocess.run(
        [disassembler, "-sass", str(cubin)], capture_output=True, text=True, check=True, env={"PATH": path}
    ).stdout
    seen = set()
    for function in sass.split("Function : ")[1:]:
        name = re.search(r"quantizeILi(\d+)ELb(\d)ELNS\w*?ModeE(\d)", function[:300])
        if name is None or int(name[3]) not in PLAIN:
            continue
        dim, fp16 = int(name[1]), int(name[2])
        values, keys = loops(function)  # in this order
        width = min(dim, 128)
        stores = {"STG.E.128": width // 8} if fp16 else {"STS": width // 4}
        assert loads(values) == width // 8 and stores.items() <= values.items(), (dim, fp16, values)
        assert loads(keys) == dim // 8 and keys["STG.E.64"] == dim // 8 and keys["REDUX.MAX"] == 1, (dim, fp16, keys)
        assert values.total() <= BUDGET[dim, fp16][0] and keys.total() <= BUDGET[dim, fp16][1], (dim, fp16)
        seen.add((dim, fp16, int(name[3])))
    assert len(seen) == len(BUDGET) * len(PLAIN)


def loads(counts: collections.Counter[str]) -> int:
    return sum(n for operation, n in counts.items() if operation.startswith("LDG") and ".128" in operation)


def loops(function: str) -> list[collections.Counter[str]]:
    """Counts of operations of each loop that reads at least eight rows."""
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9_.]+)\s*(.*?);", function)
    index = {int(address, 16): i for i, (address, _, _) in enumerate(code)}
    found = []
    for i, (address, operation, operands) in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)", operands) if operation.startswith("BRA") else None
        if target and int(target[1], 16) < int(address, 16) and int(target[1], 16) in index:
            body = collections.Counter(x[1] for x in code[index[int(target[1], 16)] : i + 1])
            if loads(body) >= 8:
                found.append(body)
    return found
