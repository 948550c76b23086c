"""NVRTC in the place of nvcc, as far as a machine without a card goes: it is found, compiles the files as they stand,
and its kernels are those of the library. tests/kernels/test_gpu_late_kernels.py runs them."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import pytest

from sage_patch.kernels import build, nvrtc
from zoo import machine_code

NVRTC = nvrtc.find_library()
NEEDS_NVRTC = pytest.mark.skipif(NVRTC is None, reason="no NVRTC: pip install nvidia-cuda-nvrtc")
UNITS = [unit for unit in build.units() if nvrtc.has_kernels(build.source_dir() / unit)]


@pytest.fixture
def compiler() -> Path:
    assert NVRTC is not None
    return NVRTC


@pytest.mark.parametrize(
    "place",
    ("nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "torch/lib/libnvrtc-1ea278b5.so.12"),
)
def test_it_is_found_where_torch_has_it(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nowhere"), str(tmp_path)])
    assert nvrtc.find_library() is None
    (tmp_path / place).parent.mkdir(parents=True)
    for name in ("libnvrtc-builtins.so.13.0", "libnvrtc-builtins-07fb3db5.so.12.8", "libnvrtc.alt.so.13"):
        (tmp_path / place).with_name(name).touch()
    assert nvrtc.find_library() is None
    (tmp_path / place).touch()
    assert nvrtc.find_library() == tmp_path / place


def test_units_of_host_code_are_left_out() -> None:
    host = set(build.units()) - set(UNITS)
    assert host >= {"api.cu", "backends.cu", "late_kernels.cu", "pages_api.cu"} and "fwd_mma.cu" in UNITS


def test_a_launch_is_read_as_its_kernel() -> None:
    """However it is written; nothing else of the text changes."""
    read = nvrtc._for_kernels("if (a) (b ? f<1> : f<2>)<<<dim3(x, y),\n  g(z) * 2, 0, s>>>(p, q);\nint i = 1 << 2;")
    assert read == "if (a) (b ? f<1> : f<2>) * ignored(p, q);\nint i = 1 << 2;"


@NEEDS_NVRTC
@pytest.mark.parametrize("unit", UNITS)
def test_it_reads_every_file(unit: str, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the end of the front end; whole files take as long as with nvcc."""
    mark = build.units()[unit]
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "--fdevice-syntax-only"))
    nvrtc.compile_unit(compiler, build.source_dir() / unit, "90a" if "90a" in mark else "120")


@NEEDS_NVRTC
@pytest.mark.nvcc
@pytest.mark.parametrize("unit", ("mask_prepare.cu", "fwd_mma_masked.cu"))
def test_its_kernels_are_the_librarys(unit: str, compiler: Path, tmp_path: Path) -> None:
    """The same kernels under the same names, but for a number of the file's; without spills."""
    image, log = nvrtc.compile_unit(compiler, build.source_dir() / unit, "89")
    assert build.check_log(log) == [] and "0 bytes spill stores" in log
    path = tmp_path / "image.cubin"
    path.write_bytes(image)

    def names(of: Path) -> list[str]:
        """late_kernels.cu compares these parts."""
        parts = (re.fullmatch(r"_ZN5sage2(\d\d)(_GLOBAL__N__.*)", name) for name in machine_code.functions(of, "89"))
        split = [(m[2][: int(m[1])], m[2][int(m[1]) :]) for m in parts if m]
        files = [
            (re.fullmatch(r"_GLOBAL__N__[0-9a-f]{8}_(\d+_\w+)_cu_[0-9a-f]{8}(_\d+)?", file), rest)
            for file, rest in split
        ]
        stem = f"{len(unit)}_{unit.removesuffix('.cu')}"
        return sorted(rest for file, rest in files if file is not None and file[1] == stem)

    assert names(path) == names(machine_code.wheel_library()) != []


@NEEDS_NVRTC
def test_a_build_is_whole_or_not_at_all(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the library with the images beside it, once; of a file that does not compile, its errors and nothing
    else. A library for other cards and NVRTC take the place of a missing nvcc, and of nothing else."""
    monkeypatch.setenv("SAGE_PATCH_CACHE", str(tmp_path / "cache"))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "nvrtc_runtime.h").write_text((build.source_dir() / "nvrtc_runtime.h").read_text())
    (sources / "sage2.h").touch()
    kernel = "#include <cuda_runtime.h>\nnamespace { __global__ void f(int *x) { *x = 1; } }\n"
    host = "cudaError_t launch(int *x, cudaStream_t s) { f<<<1, 1, 0, s>>>(x); return cudaGetLastError(); }\n"
    (sources / "a.cu").write_text("// Architectures: 89\n" + kernel + host)
    (sources / "api.cu").write_text("// Architectures: all\nint no_kernel;\n")
    (sources / "b.cu").write_text("// Architectures: 120\n" + kernel + "not C++\n" + host)
    monkeypatch.setattr(build, "source_dir", lambda: sources)
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setattr(nvrtc, "find_library", lambda: compiler)
    with pytest.raises(build.BuildError, match="no nvcc was found"):  # and no library either
        build.find_library("89")
    (tmp_path / "libsage2-sm80.so").write_text("host code")
    path = build.find_library("89")
    assert path.parent == tmp_path / "cache" and path.read_text() == "host code"
    assert [p.name for p in path.with_suffix("").iterdir()] == ["a.cubin"]
    before = path.stat().st_mtime_ns
    assert build.find_library("89") == path and path.stat().st_mtime_ns == before
    with pytest.raises(build.BuildError, match=r"(?s)b.cu.*not C\+\+"):
        build.find_library("120")
    assert sorted(p.suffix for p in path.parent.iterdir()) == ["", ".lock", ".lock", ".so"]

    class Library:
        given: tuple = ()

        def sage2_load_kernels(self, images: ctypes.Array, count: int, architecture: int) -> int:
            self.given = (images[0][:4], count, architecture)
            return 0

    lib = Library()
    nvrtc.load_images(lib, path, "89")  # type: ignore[arg-type]
    assert lib.given == (b"\x7fELF", 1, 89)
