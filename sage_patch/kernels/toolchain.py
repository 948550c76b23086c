"""Finds the CUDA compiler and what goes with it: those of the machine, or the pip packages of this Python.

`pip install 'sage-patch[build]'` brings nvcc and its parts into one folder, site-packages/nvidia/cu13, in which nvcc
finds headers by itself and the static runtime library with `link_flags`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

USUAL = Path("/usr/local/cuda")  # where NVIDIA's installers put the toolkit


def find_nvcc() -> Path | None:
    """nvcc of $CUDA_HOME, of the PATH, of the usual install location, or of the pip packages of this Python."""
    homes = [os.environ[v] for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    candidates = [Path(h) / "bin" / "nvcc" for h in homes]
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append(Path(on_path))
    candidates.append(USUAL / "bin" / "nvcc")
    for folder in package_folders():
        candidates.append(folder / "bin" / "nvcc")
    return next((c for c in candidates if c.is_file() and os.access(c, os.X_OK)), None)


def package_folders() -> list[Path]:
    """Where pip puts CUDA's packages, the newest release first: site-packages/nvidia/cu13."""
    return [f for entry in sys.path for f in sorted(Path(entry or ".").glob("nvidia/cu*[0-9]"), reverse=True)]


def link_flags(nvcc: Path) -> list[str]:
    """What the linker must be told to find the static runtime: pip's packages keep it where nvcc does not look."""
    folder = nvcc.parent.parent / "lib"
    return [f"-L{folder}"] if (folder / "libcudart_static.a").is_file() else []


def find_ninja() -> Path | None:
    """ninja of the PATH, or of the pip package."""
    found = shutil.which("ninja")
    if found:
        return Path(found)
    with contextlib.suppress(ImportError):
        import ninja

        path = Path(ninja.BIN_DIR) / "ninja"
        if path.is_file():
            return path
    return None


def nvcc_version(nvcc: Path) -> str:
    """Such as 13.0.88."""
    out = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", out)
    return found.group(1) if found else out.strip()
