"""The NVIDIA driver's version, asked of the driver itself, and the oldest one that a library can run on."""

from __future__ import annotations

import ctypes
import sys

from sage_patch.errors import SagePatchError

# By the major version of the toolkit that compiled a library, from its release notes: machine code runs on every driver
# of the same major version of CUDA.
OLDEST = {12: "525.60.13", 13: "580.65.06"}


class DriverError(SagePatchError, RuntimeError):
    """The NVIDIA driver is older than the compiled kernels need."""


def cuda_version() -> int | None:
    """The newest CUDA that the installed driver runs, such as 13000; None where there is no driver."""
    try:
        lib = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    found = ctypes.c_int()
    return found.value if lib.cuDriverGetVersion(ctypes.byref(found)) == 0 else None


def check(compiled_with: int) -> None:
    """Raise DriverError if the driver cannot run what a CUDA toolkit of this version, such as 13000, compiled."""
    has, major = cuda_version(), compiled_with // 1000
    if has is None or has // 1000 >= major:
        return
    raise DriverError(
        f"the CUDA kernels were compiled with CUDA {_words(compiled_with)}, which needs NVIDIA driver "
        f"{OLDEST.get(major, 'of that version')} or newer; this machine's driver runs CUDA {_words(has)} at most. "
        f"Update the driver, or compile the kernels with a CUDA {has // 1000} toolkit: sage-patch build"
    )


def _words(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
