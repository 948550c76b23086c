"""Compiles the kernels for one card with NVRTC, which torch brings along: no nvcc and no C++ compiler is needed.

Where a library came with the package but holds nothing for the card at hand, its host code still fits: checks,
workspace, launches. Only machine code is missing. NVRTC compiles the same .cu files into one image each; their host
code is read past, with `cuda_kernels/nvrtc_runtime.h` in the place of the system's headers. The images lie beside a
copy of the library in the cache, and `sage2_load_kernels` makes the copy launch them wherever it would launch its own
kernel of the same name. So there is one launch code, and no table of kernels to keep.

Each file is compiled in a process of its own (`python -m sage_patch.kernels.nvrtc`), all processors at once.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from sage_patch.kernels.toolchain import package_folders

SYSTEM_HEADERS = ("cuda_runtime.h", "stddef.h", "stdint.h", "stdio.h", "string.h", "algorithm", "type_traits")
OPTIONS = ("--std=c++17", "-default-device", "--ptxas-options=-v")
_LAUNCH = re.compile(r"<<<[^;{}]*?>>>", re.DOTALL)
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


def find_library() -> Path | None:
    """libnvrtc of the pip packages that CUDA builds of torch need, or of torch itself."""
    places = [(folder, "lib/libnvrtc.so.*") for folder in package_folders()]  # CUDA 13
    places += [(Path(e or "."), "nvidia/cuda_nvrtc/lib/libnvrtc.so.*") for e in sys.path]  # CUDA 12
    places += [(Path(e or "."), "torch/lib/libnvrtc-*.so*") for e in sys.path]  # torch's own index
    found = (p for folder, pattern in places for p in sorted(folder.glob(pattern)) if "builtins" not in p.name)
    return next((p for p in found if re.search(r"\.so(\.\d+)?$", p.name)), None)


class _Nvrtc:
    """The library's functions; a failed one raises RuntimeError with its name for the error."""

    def __init__(self, path: Path) -> None:
        for builtins in sorted(
            path.parent.glob("libnvrtc-builtins*.so*")
        ):  # it looks for them on the loader's path alone
            if ".alt." not in builtins.name:
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._lib = ctypes.CDLL(str(path))
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *args: object) -> None:
        code = getattr(self._lib, name)(*args)
        if code:
            raise RuntimeError(f"{name}: {self._lib.nvrtcGetErrorString(code).decode()}")

    def text(self, name: str, program: ctypes.c_void_p) -> bytes:
        """What the pair of functions nvrtcGet{name}Size and nvrtcGet{name} gives."""
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{name}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{name}", program, buffer)
        return buffer.raw


def version(path: Path) -> str:
    """Such as 13.0."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _Nvrtc(path).call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _for_kernels(text: str) -> str:
    """The source without launches, which belong to host code: the kernel is named, so that it is compiled."""
    return _LAUNCH.sub(" * ignored", text)


def compile_unit(nvrtc: Path, source: Path, architecture: str) -> tuple[bytes, str]:
    """(image, the compiler's log) of one .cu file. Raises RuntimeError with the log if it cannot be compiled."""
    for builtins in sorted(nvrtc.parent.glob("libnvrtc-builtins*.so*")):  # it looks for them on the loader's path alone
        if ".alt." not in builtins.name:
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    lib = _Nvrtc(nvrtc)
    headers = {p.name: p.read_text(encoding="utf-8") for p in source.parent.iterdir() if p.suffix in (".h", ".cuh")}
    runtime = headers.pop("nvrtc_runtime.h")
    headers |= dict.fromkeys(SYSTEM_HEADERS, runtime)
    texts = (ctypes.c_char_p * len(headers))(*(_for_kernels(t).encode() for t in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    options = (f"--gpu-architecture=sm_{architecture}", *OPTIONS)
    program = ctypes.c_void_p()
    text = _for_kernels(source.read_text(encoding="utf-8")).encode()
    lib.call("nvrtcCreateProgram", ctypes.byref(program), text, source.name.encode(), len(headers), texts, names)
    try:
        given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        lib.call("nvrtcCompileProgram", program, len(options), given)
        return lib.text("CUBIN", program), lib.text("ProgramLog", program).decode().rstrip("\0")
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n" + lib.text("ProgramLog", program).decode().rstrip("\0")) from None
    finally:
        lib.call("nvrtcDestroyProgram", ctypes.byref(program))


def has_kernels(source: Path) -> bool:
    """Whether the file, or one of this package that it includes, holds kernels: others are host code alone."""
    text = source.read_text(encoding="utf-8")
    return "__global__" in text or any(has_kernels(source.parent / name) for name in _INCLUDE.findall(text))


def compile_units(nvrtc: Path, sources: Sequence[Path], architecture: str, folder: Path) -> Iterator[str]:
    """Write UNIT.cubin for each into the folder, and give the log of each when it is done.

    Raises RuntimeError for one that cannot be compiled; the others are ended.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    running: list[subprocess.Popen[str]] = []

    def one(source: Path) -> str:
        command = [sys.executable, "-m", "sage_patch.kernels.nvrtc", nvrtc, source, architecture, folder]
        worker = subprocess.Popen(
            [str(c) for c in command], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        running.append(worker)
        out, err = worker.communicate()
        if worker.returncode:
            raise RuntimeError(f"{source.name}: {err[-3000:]}")
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = [pool.submit(one, source) for source in sources]
        try:
            for done in as_completed(waiting):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in running:
                worker.kill()
            raise


def load_images(lib: ctypes.CDLL, path: Path, architecture: str) -> None:
    """Have the library launch the images that lie beside it, if there are any. Raises RuntimeError."""
    images = [p.read_bytes() for p in sorted(path.with_suffix("").glob("*.cubin"))]
    if images and lib.sage2_load_kernels((ctypes.c_char_p * len(images))(*images), len(images), int(architecture)):
        raise RuntimeError(f"{path.with_suffix('')}: {lib.sage2_last_error().decode()}")


if __name__ == "__main__":
    _nvrtc, _source, _folder = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[4])
    try:
        _image, _log = compile_unit(_nvrtc, _source, sys.argv[3])
    except RuntimeError as _error:
        sys.exit(str(_error))
    _partial = _folder / f"{_source.stem}.{os.getpid()}"
    _partial.write_bytes(_image)
    os.replace(_partial, _folder / f"{_source.stem}.cubin")
    print(_log)
