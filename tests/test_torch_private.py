"""The names of torch that are not public: each is there and does what we call it for, in this version of torch."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sage_patch.kernels import torch_private

PACKAGE = Path(torch_private.__file__).parents[1]
OF_CUDA = (
    "_cuda_getDevice",
    "_cuda_getCurrentRawStream",
    "_cuda_cudaCachingAllocator_raw_alloc",
    "_cuda_cudaCachingAllocator_raw_delete",
)


def test_they_are_used_through_one_file_only() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path != Path(torch_private.__file__):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
                if isinstance(node, ast.ImportFrom):
                    name = ".".join(f"{node.module}.{a.name}" for a in node.names)
                assert not re.match(r"torch\.(.+\.)?_[a-zA-Z]", name), f"{path}: {name}"


def test_who_watches_operators_is_seen() -> None:
    assert not torch_private.is_seen()
    with TorchDispatchMode():
        assert torch_private.is_seen()
    with torch.profiler.profile():
        assert torch_private.is_seen()
    seen = []
    torch.func.vmap(lambda x: seen.append(torch_private.is_seen()) or x)(torch.zeros(2))
    torch.jit.trace(lambda x: seen.append(torch_private.is_seen()) or x + 1, torch.zeros(2), check_trace=False)
    assert seen == [True, True] and not torch_private.is_seen()


def test_function_modes_are_seen() -> None:
    before = torch_private.torch_functions_in_force()
    with TorchFunctionMode() as mode:
        assert torch_private.torch_functions_in_force() == before + 1
        assert torch_private.function_modes()[-1] is mode


def test_the_forward_of_an_autograd_function_is_told() -> None:
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(torch_private.forward_mode_is_on())
            return x.clone()

    Function.apply(torch.zeros(1, requires_grad=True))
    with torch.no_grad():
        seen.append(torch_private.forward_mode_is_on())
    assert seen == [False, True]


def test_trees_are_mapped() -> None:
    assert torch_private.tree_map_only(int, lambda x: x + 1, (1, {"a": 2.5, "b": [3]})) == (2, {"a": 2.5, "b": [4]})


@pytest.mark.parametrize("name", OF_CUDA)
def test_the_allocator_and_the_stream_are_there(name: str) -> None:
    if not torch.backends.cuda.is_built():
        pytest.skip("this torch was built without CUDA")
    assert callable(getattr(torch._C, name))


def test_without_cuda_the_names_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, OF_CUDA[0], raising=False)
    with pytest.raises(RuntimeError, match=f"built without CUDA.*{OF_CUDA[0]}"):
        torch_private._of_cuda(OF_CUDA[0])()
