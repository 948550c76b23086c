"""The debug build that writes the kernel's stages: nothing of it reaches the product build, and it compiles."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sage_patch.kernels import build

SOURCES = build.source_dir()


def test_hooks_are_no_tokens_in_the_product_build(tmp_path: Path) -> None:
    """Same tokens, same machine code: the header is empty and the hook macro drops what it is given."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "hook.cpp").write_text(f'#include "{SOURCES / "dump.cuh"}"\nSAGE2_DUMP_ONLY(int a, b; f(a, b);)\n')
    out = subprocess.run([compiler, "-E", "-P", "hook.cpp"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not out.stdout.strip()


def test_everything_of_the_dump_is_behind_the_hook() -> None:
    for path in SOURCES.iterdir():
        if path.suffix in (".cu", ".cuh", ".h") and path.name != "dump.cuh":
            nested = r"[^()]*"
            for _ in range(4):
                nested = rf"(?:[^()]|\({nested}\))*"
            text = re.sub(rf'#include "dump\.cuh"|SAGE2_DUMP_ONLY\({nested}\)', "", path.read_text())
            for line in text.splitlines():
                assert "dump" not in line.lower(), f"{path.name}: {line}"


@pytest.mark.nvcc
@pytest.mark.parametrize(
    "unit",  # all units include the same code; one of them says most, and each takes long
    [
        pytest.param(unit, marks=[] if unit == "fwd_sm90.cu" else pytest.mark.slow)
        for unit in build.units()
        if unit.startswith("fwd_")
    ],
)
def test_debug_build_compiles(tmp_path: Path, unit: str) -> None:
    """Each unit exports its own function that sets where its kernels write."""
    nvcc = build.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc")
    target, hook = "-gencode=arch=compute_90a,code=sm_90a", "-DSAGE2_DUMP=sage2_set_dump_here"
    command = [nvcc, "-c", target, "-O1", "-std=c++17", hook, SOURCES / unit, "-o", tmp_path / "x.o"]
    subprocess.run(command, check=True, capture_output=True)
    assert b"sage2_set_dump_here" in (tmp_path / "x.o").read_bytes()
