"""A stand-in for the compiled library and its card: CPU tensors take the whole way of a CUDA call, and nothing is
computed. For tests of what is decided and packed, and for the time that Python takes."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any
from unittest import mock

from sage_patch.kernels import crossover, library, ops, torch_private
from sage_patch.kernels.plans import PLANS

INDEX = -1  # the device of CPU tensors, as torch counts
STREAM, WORKSPACE = 4096, 256


class Recorder:
    """Takes the library's calls and keeps the structs."""

    def __init__(self) -> None:
        self.packed: list[bytes] = []

    def sage2_workspace_bytes(self, packed: bytes, size: Any) -> int:
        facts = library.FACTS.unpack(packed)
        size._obj.value = 256 * facts["kv_len"] * facts["kv_heads"] + len(packed)
        return 0

    def sage2_prepare_and_forward(self, packed: bytes) -> int:
        self.packed.append(packed)
        return 0


class Silent(Recorder):
    """Costs what a call through ctypes costs: of a C function that finds no number in the struct, so returns 0."""

    def __init__(self) -> None:
        super().__init__()
        function = ctypes.CDLL(None).atoi
        function.argtypes = [ctypes.c_char_p]
        self.sage2_prepare_and_forward = function  # type: ignore[method-assign]


@contextlib.contextmanager
def in_place(stand_in: Recorder, crossover_length: int = 0) -> Iterator[None]:
    """CPU tensors are those of a Hopper card inside, whose kernels are the stand-in's."""
    break_even = {"qk_int8_pv_fp8": crossover_length}
    table = crossover.table_of({"head_dims": {"256": {"full": break_even, "causal": break_even}}})
    with contextlib.ExitStack() as stack:
        for owner, name, instead in (
            (torch_private, "current_device", lambda: INDEX),
            (torch_private, "current_stream", lambda index: STREAM),
            (torch_private, "allocate", lambda size, stream: WORKSPACE),
            (torch_private, "free", lambda address: None),
            (ops, "_cached_backend", lambda device, index: "sm90"),
            (crossover, "_cached_table", lambda index, exact_backend: table),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        stack.enter_context(mock.patch.dict(library._by_device, {INDEX: (stand_in, 90)}))
        PLANS.clear()
        stack.callback(PLANS.clear)
        yield
