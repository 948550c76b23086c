"""Runs one function in several processes of a gloo group, on a CPU: what the tests of split models stand on.

A worker is a function of a test module, called as worker(rank, world, *arguments); each rank returns a result.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run(worker: Callable[..., Any], world: int, folder: Path, *arguments: Any) -> list[Any]:
    """worker's results by rank. An error in any rank is raised with its text."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    paths = [str(Path(__file__).parent), *sys.path]
    called = (worker.__module__, worker.__name__)
    processes = [
        context.Process(target=_rank, args=(paths, called, rank, world, str(folder / "store"), results, arguments))
        for rank in range(world)
    ]
    for p in processes:
        p.start()
    found: dict[int, Any] = {}
    try:
        for _ in processes:
            rank, error, value = results.get(timeout=120)
            assert not error, f"rank {rank}: {error}"
            found[rank] = value
    finally:
        for p in processes:
            p.join(timeout=10)
            if p.is_alive():
                p.terminate()
    return [found[rank] for rank in range(world)]


def _rank(
    paths: list[str], called: tuple[str, str], rank: int, world: int, store: str, results: Any, arguments: tuple
) -> None:
    sys.path[:] = paths
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))  # as torchrun has them
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        value = getattr(importlib.import_module(called[0]), called[1])(rank, world, *arguments)
        dist.barrier()
        dist.destroy_process_group()
        results.put((rank, "", value))
    except BaseException:
        import traceback

        results.put((rank, traceback.format_exc(), None))


class Wire:
    """Counts the bytes that this rank sends to others, by torch.distributed's function, while it is entered."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()

    def __enter__(self) -> Wire:
        self._before = dist.all_to_all_single, dist.batch_isend_irecv

        def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, **rest):
            mine = input_split_sizes[dist.get_rank(group)] if input_split_sizes else 0
            self.sent["all_to_all"] += (input.numel() - mine) * input.element_size()
            return self._before[0](output, input, output_split_sizes, input_split_sizes, group=group, **rest)

        def batch_isend_irecv(operations):
            for x in operations:
                self.sent["ring"] += x.tensor.nbytes if x.op is dist.isend else 0
            return self._before[1](operations)

        dist.all_to_all_single, dist.batch_isend_irecv = all_to_all_single, batch_isend_irecv
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single, dist.batch_isend_irecv = self._before
