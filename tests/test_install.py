"""The plain wheel, installed into an environment of its own and taken out again: what comes is what goes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("sage_patch", "cuda_kernels", "configs", "pyproject.toml", "README.md", "LICENSE")


def run(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


def test_an_installed_package_is_whole_and_uninstalling_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    tree, environment = tmp_path / "tree", tmp_path / "environment"
    tree.mkdir()
    for name in PARTS:  # a copy: building writes into the tree
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, tree / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, tree)
    [wheel] = tmp_path.glob("sage_patch-*-py3-none-any.whl")
    venv.create(environment)
    before = files(environment)
    inside = (*pip, "--python", str(environment / "bin" / "python"))
    run(*inside, "install", "-q", "--no-deps", "--no-index", "--no-compile", wheel)
    [package] = environment.rglob("site-packages/sage_patch")
    there = {path.as_posix() for path in files(package)}
    wanted = {path.relative_to(ROOT / "sage_patch").as_posix() for path in (ROOT / "sage_patch").rglob("*.py")}
    wanted |= {f"policies/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    wanted |= {f"kernels/cuda_kernels/{path.name}" for path in (ROOT / "cuda_kernels").glob("*.cu*")}
    assert wanted <= there
    assert (environment / "bin" / "sage-patch").is_file()
    run(*inside, "uninstall", "-q", "-y", "sage-patch")
    assert files(environment) == before
