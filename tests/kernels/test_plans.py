"""Plans of calls: a call that finds one does what it would do without. Most run with a stand-in for the library, which
computes nothing and keeps what it is told."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sage_patch import sage_attention
from sage_patch.args import plain
from sage_patch.kernels import first_use, library, ops
from sage_patch.kernels.plans import PLANS, PlanCache
from sage_patch.kernels.stopwatch import Stopwatch
from sage_patch.recipes import RECIPES
from zoo.plain_library import Recorder, in_place

RECIPE = "qk_int8_pv_fp8"


def tensors(device: str, dtype: torch.dtype, *sizes: int, layout: str = "HND") -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, kv_heads, q_len, kv_len, dim, width = sizes
    found = []
    for i, (h, n, d) in enumerate(((heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, width))):
        x = torch.randn(batch, h, n, d, generator=torch.Generator().manual_seed(i)).to(device, dtype)
        found.append(x if layout == "HND" else x.transpose(1, 2).contiguous())
    return found[0], found[1], found[2]


Case = tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], str]  # tensors, keywords, the state that is in force


def case(rng: random.Random, device: str) -> Case:
    """Any call of `sage_attention`: few values of each argument, so that calls differ in one thing often."""
    dtype = rng.choice([torch.float16, torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32])
    heads, kv_heads = rng.choice([(2, 2), (4, 2)])
    q_len, kv_len = rng.choice([(40, 40), (40, 160), (160, 160), (1, 160)])
    dim, width = rng.choice([(64, 64), (64, 64), (64, 32), (40, 40)])
    layout = rng.choice(["HND", "HND", "NHD"])
    batch = rng.choice([1, 2])
    q, k, v = tensors(device, dtype, batch, heads, kv_heads, q_len, kv_len, dim, width, layout=layout)
    options: dict[str, Any] = {"enable_gqa": rng.random() < 0.9, "is_causal": rng.choice([False, True, 1])}
    options["is_causal"] = rng.choice([False, True]) if rng.random() < 0.9 else options["is_causal"]
    if rng.random() < 0.3:
        options["scale"] = rng.choice([0.1, 0.1, 1.0, True, -0.1])
    if rng.random() < 0.2:
        options["window"] = rng.choice([9, (4, 5), (4, True), 0, (-1, 3)])
    if rng.random() < 0.2:
        options["softcap"] = rng.choice([5.0, 5.0, True])
    if rng.random() < 0.3:
        options["return_lse"] = True
    if rng.random() < 0.2:
        options["causal_align"] = "top_left"
    if rng.random() < 0.2:
        options["sinks"] = torch.zeros(heads, dtype=rng.choice([torch.float32, dtype]), device=device)
    options["recipe"] = rng.choice([RECIPE, RECIPE, "sage2", None, "exact", "qk_int4_pv_fp8", "qk_int8_pv_fp16"])
    options["on_unsupported"] = rng.choice(["exact", "exact", "exact", "error"])
    shape = rng.choice(["packed", "mask", "mask", "neither", "neither", "neither", "stretched"])
    if shape == "packed" and batch == 1 and q_len == kv_len:
        q, k, v = (x[0] if layout == "NHD" else x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        ends = torch.tensor(rng.choice([[0, 9, q_len], [0, q_len]]), dtype=rng.choice([torch.int32, torch.int64]))
        options |= {"cu_seqlens_q": ends.to(device), "cu_seqlens_k": ends.to(device)}
    else:
        options["tensor_layout"] = layout
        if shape == "mask":
            sizes = [(kv_len,), (1, kv_len), (1, 1, 1, kv_len), (batch, 1, 1, kv_len), (q_len, kv_len), (1, 1, 1, 1)]
            mask = torch.rand(rng.choice(sizes), generator=torch.Generator().manual_seed(3)) > 0.2
            if rng.random() < 0.3 and mask.dim() == 4:
                mask = mask.expand(batch, heads, q_len, -1)
            kinds = [torch.bool, torch.bool, torch.bool, dtype, torch.float64, torch.int32]
            mask = mask.to(rng.choice(kinds))
            options["attn_mask"] = mask.to(device)
        elif shape == "stretched":
            q = torch.stack((q, q), dim=-1)[..., 0]
    if rng.random() < 0.1:
        q = q.clone().requires_grad_()
    return (q, k, v), options, rng.choice(["none", "none", "no_grad", "inference", "autocast"])


STATES: dict[str, Callable[[str], contextlib.AbstractContextManager[Any]]] = {
    "none": lambda device: contextlib.nullcontext(),
    "no_grad": lambda device: torch.no_grad(),
    "inference": lambda device: torch.inference_mode(),
    "autocast": lambda device: torch.autocast(device, torch.bfloat16),
}


def outcome(given: Case, device: str) -> tuple[tuple[Tensor | None, ...] | str, dict[ops.CallKey, int]]:
    """(outputs or the error's words, what was counted)."""
    ops.reset_counts()
    qkv, options, state = given
    try:
        with STATES[state](device):
            got = sage_attention(*qkv, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}", ops.counts()
    return got if isinstance(got, tuple) else (got, None), ops.counts()


def told(packed: bytes, qkv: tuple[Tensor, ...], options: dict[str, Any]) -> dict[str, Any]:
    """A struct as the stand-in got it; addresses of what the call made itself are only asked whether they are there."""
    theirs = [x.data_ptr() for x in (*qkv, *options.values()) if isinstance(x, Tensor)]
    at = library.POINTERS.unpack(packed[library.FACTS.size :])
    found = {name: x if x in theirs else bool(x) for name, x in at.items()}
    return library.FACTS.unpack(packed) | found


def like(x: Tensor | None) -> Any:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)


def test_any_order_of_calls_is_decided_and_packed_as_without_plans() -> None:
    rng = random.Random(0)
    calls = [case(rng, "cpu") for _ in range(150)]
    found = {}
    for keeps in (True, False):
        recorder, order, results = Recorder(), random.Random(1), []
        with in_place(recorder, crossover_length=100):
            for i in (order.randrange(len(calls)) for _ in range(900)):
                if not keeps:
                    PLANS.clear()
                del recorder.packed[:]
                got, counted = outcome(calls[i], "cpu")
                structs = [told(packed, *calls[i][:2]) for packed in recorder.packed]
                results.append((got if isinstance(got, str) else [like(x) for x in got], structs, counted))
            assert keeps == (len(PLANS) > 50)
        found[keeps] = results
    assert sum(bool(structs) for _, structs, _ in found[True]) > 200
    assert sum(isinstance(got, str) for got, _, _ in found[True]) > 50
    for i, (kept, fresh) in enumerate(zip(found[True], found[False], strict=True)):
        assert kept == fresh, f"call {i}"


@pytest.mark.gpu
def test_any_order_of_calls_gives_the_same_bits_as_without_plans() -> None:
    rng = random.Random(0)
    calls = [case(rng, "cuda") for _ in range(150)]
    want = []
    for given in calls:
        PLANS.clear()
        want.append(outcome(given, "cuda"))
    for i in (rng.randrange(len(calls)) for _ in range(900)):
        (got, counted), (expected, expected_counts) = outcome(calls[i], "cuda"), want[i]
        assert counted == expected_counts, f"call {i}"
        if isinstance(got, str) or isinstance(expected, str):
            assert got == expected, f"call {i}"
            continue
        for a, b in zip(got, expected, strict=True):
            assert like(a) == like(b), f"call {i}"
            assert a is None or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), f"call {i}"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"is_causal": True}, {"is_causal": 1}),
        ({"scale": 1.0}, {"scale": True}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"window": (4, 1)}, {"window": (4, True)}),
        ({"window": 1}, {"window": True}),
        ({"dropout_p": 0.0}, {"dropout_p": False}),
        ({"window": 5}, {"window": [5]}),
        ({"window": (5, 5)}, {"window": (5,)}),
        ({"recipe": RECIPE}, {"recipe": ["x"]}),
    ],
)
def test_equal_values_of_other_types_find_no_plan(first: dict[str, Any], then: dict[str, Any]) -> None:
    q, k, v = tensors("cpu", torch.bfloat16, 1, 2, 2, 40, 40, 64, 64)
    with in_place(Recorder()):
        for _ in range(2):
            sage_attention(q, k, v, **{"recipe": RECIPE} | first)
        with pytest.raises(TypeError, match=f"{next(iter(then))} must be"):
            sage_attention(q, k, v, **{"recipe": RECIPE} | then)


def test_whoever_watches_is_shown_calls_that_have_a_plan() -> None:
    q, k, v = tensors("cpu", torch.bfloat16, 1, 2, 2, 40, 40, 64, 64)
    names: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with in_place(Recorder()) as _, torch.no_grad():
        for _ in range(2):
            sage_attention(q, k, v, recipe=RECIPE)
        observed: list[ops.ObservedCall] = []
        with ops.observe(observed.append):
            sage_attention(q, k, v, recipe=RECIPE)
        watch = Stopwatch()
        with ops.timed(watch):
            sage_attention(q, k, v, recipe=RECIPE)
        with Mode():
            sage_attention(q, k, v, recipe=RECIPE)
        with torch.profiler.profile() as profile:
            sage_attention(q, k, v, recipe=RECIPE)
    assert len(observed) == 1 and observed[0].query.data_ptr() == q.data_ptr()
    assert "sage_patch.attention.default" in names
    assert "sage_patch::attention" in {event.key for event in profile.key_averages()}
    assert sum(ops.counts().values()) == 6


def test_threads_never_get_each_others_addresses() -> None:
    recorder, errors = Recorder(), []
    inputs = [tensors("cpu", torch.bfloat16, 1, 2, 2, n, n, 64, 64) for n in (16, 24, 40, 56) for _ in range(2)]

    def work(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
        try:
            for i in range(300):
                if i % 100 == 50:
                    PLANS.clear()
                sage_attention(*qkv, recipe=RECIPE, is_causal=i % 2 == 0)
        except Exception as error:
            errors.append(error)

    with in_place(recorder):
        threads = [threading.Thread(target=work, args=(qkv,)) for qkv in inputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors and len(recorder.packed) == 300 * len(inputs)
    by_query = {q.data_ptr(): (k.data_ptr(), v.data_ptr(), q.shape[2]) for q, k, v in inputs}
    for packed in recorder.packed:
        facts, at = library.FACTS.unpack(packed), library.POINTERS.unpack(packed[library.FACTS.size :])
        assert by_query[at["q"]] == (at["k"], at["v"], facts["q_len"])
    assert sum(ops.counts().values()) == 300 * len(inputs)


def test_what_failed_its_first_use_leaves_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison's own calls make plans; those of a card that computes wrong numbers are forgotten with it."""
    args, made = plain(0.125, recipe=RECIPE), []

    def compare(backend: Any, run: Any, device: str) -> None:
        run(*tensors("cpu", torch.float16, 1, 4, 2, 300, 700, 64, 64), args, RECIPES[RECIPE])
        made.append(len(PLANS))
        raise first_use.WrongNumbersError("no")

    with in_place(Recorder()):
        monkeypatch.setattr(library, "load_for", lambda architecture: Recorder())
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA L4")
        monkeypatch.setattr(first_use, "compare", compare)
        for _ in range(2):
            with pytest.raises(first_use.WrongNumbersError):
                library.of_device(1)
        assert made == [1, 1] and len(PLANS) == 0 and 1 not in library._by_device


def test_a_full_cache_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PlanCache()
    for i in range(10_000):
        cache.put(i, -i)
        assert cache.get(i) == -i and len(cache) <= 4096
    q, k, v = tensors("cpu", torch.bfloat16, 1, 2, 2, 200, 200, 64, 64)
    with in_place(Recorder()):
        for n in range(16, 200):
            sage_attention(q[:, :, :n], k, v, recipe=RECIPE)
        assert len(PLANS) >= 184


def test_a_plan_holds_no_tensor() -> None:
    import gc
    import weakref

    q, k, v = tensors("cpu", torch.bfloat16, 1, 2, 2, 40, 40, 64, 64)
    mask = torch.ones(40, 40, dtype=torch.bool)
    seen = [weakref.ref(x) for x in (q, k, v, mask)]
    with in_place(Recorder()):
        for _ in range(2):
            sage_attention(q, k, v, attn_mask=mask, recipe=RECIPE)
        del q, k, v, mask
        gc.collect()
        assert [x() for x in seen] == [None] * 4
