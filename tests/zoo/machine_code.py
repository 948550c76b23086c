"""The library of the wheel, for every card: built once, and its machine code read architecture by architecture."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Instruction = tuple[int, str, str]  # address, operation, operands


@functools.cache
def wheel_library() -> Path:
    """Built by the script that builds the wheel's, which refuses spills, local memory and serialized instructions."""
    folder = tempfile.mkdtemp(prefix="sage2-wheel-")
    command = [sys.executable, str(ROOT / "scripts" / "wheel_library.py"), folder]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    return next(Path(folder).glob("libsage2-*.so"))


def tool(name: str) -> str | None:
    """cuobjdump or nvdisasm: of the PATH, or of the pip packages."""
    found = shutil.which(name)
    candidates = [p for entry in sys.path for p in Path(entry or ".").glob(f"nvidia/cu*/bin/{name}")]
    return found or next((str(p) for p in candidates), None)


def cuobjdump(path: Path, *options: str) -> str:
    """What it prints. Skips the test where it is not installed."""
    found, disassembler = tool("cuobjdump"), tool("nvdisasm")
    if found is None or disassembler is None:
        pytest.skip("no cuobjdump or no nvdisasm: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    beside = {"PATH": f"{Path(disassembler).parent}:/usr/bin:/bin"}  # it runs nvdisasm
    return subprocess.run([found, *options, str(path)], capture_output=True, text=True, check=True, env=beside).stdout


@functools.lru_cache(maxsize=2)  # some 40 MB each
def functions(path: Path, architecture: str) -> dict[str, str]:
    """Mangled name -> disassembly, of the kernels that a library or cubin holds for an architecture, such as "90a"."""
    parts = re.split(r"\n\s*Function : ", cuobjdump(path, "-sass", "-arch", f"sm_{architecture}"))[1:]
    return {part.split(maxsplit=1)[0]: part for part in parts}


def instructions(disassembly: str) -> list[Instruction]:
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9_.]+)\s*(.*?);", disassembly)
    return [(int(at, 16), operation, operands) for at, operation, operands in lines]
