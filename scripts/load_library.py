"""Loads a compiled library with nothing but Python, without a card, and prints what it answers.

    python -I -S scripts/load_library.py libsage2-sm80-90.so

No torch, no sage_patch, no site-packages: what the library promises is its C interface alone (cuda_kernels/sage2.h).
"""

import ctypes
import re
import struct
import sys


def answers(path: str) -> str:
    lib = ctypes.CDLL(path)
    found = (ctypes.c_int * 32)()
    held = list(found[: lib.sage2_architectures(found, 32)])
    lib.sage2_last_error.restype = ctypes.c_char_p
    # The head of struct Sage2Args: one call of 32 heads, 1,024 tokens, 128 channels, on each card; then zeros. How long
    # the struct is, the library says itself.
    size = 0
    for capability in (0, *held, 130):
        head = struct.pack("=2I11if", size, 0, 0, capability, 0, 1, 1, 32, 32, 1024, 1024, 128, 128, 0.1)
        args, need = head + bytes(2048), ctypes.c_size_t()
        code = lib.sage2_workspace_bytes(args, ctypes.byref(need))
        said = lib.sage2_last_error().decode()
        if not size:
            size = int(re.search(r"expects (\d+)", said)[1])
        elif code or need.value < 1 << 20:
            raise SystemExit(f"{path}, compute capability {capability}: error {code}, {said}")
    version = ".".join(map(str, sys.version_info[:3]))
    return f"Python {version}: version {lib.sage2_version()}, CUDA {lib.sage2_cuda_version()}, architectures {held}"


if __name__ == "__main__":
    print(answers(sys.argv[1]))
