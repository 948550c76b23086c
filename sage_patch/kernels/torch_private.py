"""The names of torch that are not public, in one place: tests/test_torch_private.py says which version renamed what.

Those of CUDA are missing from a torch built without it; they are only reached with a CUDA tensor at hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_map_only

__all__ = [
    "allocate", "current_device", "current_stream", "dispatch_modes_in_force", "forward_mode_is_on", "free",
    "function_modes", "is_seen", "stays_where_it_is", "torch_functions_in_force", "tree_map_only",
]  # fmt: skip


def stays_where_it_is(tensor: torch.Tensor) -> None:
    """Tells a compiler that a tensor is read and written in place, by CUDA graphs too."""
    torch._dynamo.mark_static_address(tensor)


def _of_cuda(name: str) -> Any:
    def missing(*_: Any) -> Any:
        raise RuntimeError(f"this torch {torch.__version__} was built without CUDA: torch._C.{name} is missing")

    return getattr(torch._C, name, missing)


current_device = _of_cuda("_cuda_getDevice")  # () -> index
current_stream = _of_cuda("_cuda_getCurrentRawStream")  # (device index) -> cudaStream_t
# From torch's caching allocator without the cost of a tensor: (bytes, stream) -> address; a block that is given back
# is reused in its stream's order only.
allocate = _of_cuda("_cuda_cudaCachingAllocator_raw_alloc")
free = _of_cuda("_cuda_cudaCachingAllocator_raw_delete")

function_modes = _get_current_function_mode_stack
torch_functions_in_force = torch._C._len_torch_function_stack
dispatch_modes_in_force = torch._C._len_torch_dispatch_stack
forward_mode_is_on = torch._C._is_fwd_grad_enabled  # off inside of an autograd function's forward
_transforms = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state
_profiled = torch.autograd._profiler_enabled


def is_seen() -> bool:
    """Does anybody watch operators: a dispatch mode, a transform, a tracer, a profiler?"""
    return bool(dispatch_modes_in_force()) or _transforms() is not None or _tracing() is not None or _profiled()
