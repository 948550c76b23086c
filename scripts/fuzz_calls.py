"""Random calls of `sage_attention` with fixed seeds, each judged: right beside float64, or refused by name.

    python scripts/fuzz_calls.py --calls 100000 --out docs/results/fuzz_calls.json

A call is either sound (random shapes, masks, windows, packed sequences, gradients, poison in hidden keys) and must give
the oracle's answer, or has one argument made wrong and must raise a TypeError or ValueError that names the argument.
Call n of a seed is always the same one, whatever ran before it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import oracle  # noqa: E402
from sage_patch.attention import sage_attention  # noqa: E402

SLOW_S = 5.0  # a call of these sizes that takes longer hangs
RECIPES = ("exact", "sage2", None, "qk_int8_pv_fp8", "qk_int8_pv_fp16", "qk_int4_pv_fp8", "qk_int4_pv_fp16")
# Largest relative L1 error. Of few rows and keys: several times what long sequences show.
LIMITS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}
QUANTIZED_LIMITS = {"qk_int8": 0.15, "qk_int4": 0.8, "sage2": 0.15}


def sound_call(rng: random.Random) -> dict[str, Any]:
    """Arguments of a call that must work."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    dtype = rng.choice((torch.float16, torch.bfloat16, torch.float32, torch.float32, torch.float64))
    kv_heads, groups = rng.choice((1, 2)), rng.choice((1, 1, 2))
    heads = kv_heads * groups
    dim, v_dim = rng.choice((1, 8, 16, 24)), rng.choice((1, 8, 16))
    lengths = (0, 1, 2, 5, 17, 33)
    call: dict[str, Any] = dict(recipe=rng.choice(RECIPES))
    if groups > 1 or rng.random() < 0.2:
        call["enable_gqa"] = True
    if rng.random() < 0.4:
        call["is_causal"] = True
    if rng.random() < 0.3:
        call["causal_align"] = "top_left"
    if rng.random() < 0.3:
        call["window"] = rng.choice((3, 0, -1, (2, 1), (-1, 2), [0, 0], np.int64(4), (np.int32(3), 1), 10**12))
    if rng.random() < 0.2:
        call["scale"] = rng.choice((0.3, -0.5, 0.0, 1, np.float32(0.25)))
    if rng.random() < 0.2:
        call["softcap"] = rng.choice((5.0, 1, 0.0, np.float64(3.0), None))
    if rng.random() < 0.2:
        call["sinks"] = normal(heads).to(rng.choice((torch.float32, dtype)))
    if rng.random() < 0.3:
        call["return_lse"] = True
    if rng.random() < 0.25:
        q_lens, k_lens = ([rng.choice(lengths) for _ in range(3)] for _ in range(2))
        before, after = rng.choice((0, 2)), rng.choice((0, 3))
        cu = [torch.tensor([before, *(before + sum(n[: i + 1]) for i in range(3))]) for n in (q_lens, k_lens)]
        kind = rng.choice((torch.int32, torch.int64))
        call |= dict(cu_seqlens_q=cu[0].to(kind), cu_seqlens_k=cu[1].to(kind))
        q_total, k_total = int(cu[0][-1]) + after, int(cu[1][-1]) + after
        tensors = [normal(q_total, heads, dim), normal(k_total, kv_heads, dim), normal(k_total, kv_heads, v_dim)]
    else:
        batch, q_len, kv_len = rng.choice((0, 1, 2)), rng.choice(lengths), rng.choice(lengths)
        tensors = [normal(batch, heads, q_len, dim)]
        tensors += [normal(batch, kv_heads, kv_len, d) for d in (dim, v_dim)]
        if rng.random() < 0.4:
            shape = [n if rng.random() < 0.6 else 1 for n in (batch, heads, q_len, kv_len)][rng.choice((0, 0, 1, 2)) :]
            seen = torch.rand(shape, generator=generator) < 0.7
            bias = normal(*shape).masked_fill(~seen, -math.inf)
            call["attn_mask"] = rng.choice((seen, seen, bias, bias.to(dtype)))
            if rng.random() < 0.3 and len(shape) == 4 and shape[:3] == [batch, 1, 1] and shape[3] == kv_len:
                call["poison"] = seen
        if rng.random() < 0.3:
            call["tensor_layout"] = "NHD"
    tensors = [x.to(dtype) for x in tensors]
    if (poison := call.pop("poison", None)) is not None:
        tensors[1:] = [x.masked_fill(~poison[:, 0, 0, None, :, None], math.nan) for x in tensors[1:]]
    if call.get("tensor_layout") == "NHD":
        tensors = [x.transpose(1, 2) for x in tensors]
    if rng.random() < 0.15:
        tensors = [x.requires_grad_(rng.random() < 0.7) for x in tensors]
    return dict(zip(("query", "key", "value"), tensors, strict=True)) | call


def expected(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The oracle's (out, lse), in the call's layout."""
    names = ("is_causal", "scale", "causal_align", "softcap", "sinks", "attn_mask")
    options = {n: call[n] for n in names if call.get(n) is not None}
    options = {n: float(x) if n in ("scale", "softcap") else x for n, x in options.items()}
    window = call.get("window")
    options["window"] = tuple(map(int, window)) if isinstance(window, (tuple, list)) else window and int(window)
    q, k, v = (call[n].detach() for n in ("query", "key", "value"))
    if "cu_seqlens_q" in call:
        return oracle.packed_attention(q, k, v, call["cu_seqlens_q"], call["cu_seqlens_k"], **options)
    if call.get("tensor_layout") == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    finite = [x.nan_to_num(0.0) for x in (k, v)]  # poison is in keys that no row sees only
    out, lse = oracle.attention(q, *finite, **options)
    return (out.transpose(1, 2) if call.get("tensor_layout") == "NHD" else out), lse


def wrong_value(call: dict[str, Any], result: Any) -> str:
    """What is wrong with a sound call's result; empty if nothing is."""
    out, lse = result if call.get("return_lse") else (result, None)
    want, want_lse = expected(call)
    if out.shape != want.shape or out.dtype != call["query"].dtype or not out.is_contiguous():
        return f"{list(out.shape)} {out.dtype} {out.stride()} for {list(want.shape)}"
    blind = torch.isneginf(want_lse)
    if lse is not None and not torch.equal(torch.isneginf(lse), blind):
        return "lse is not -inf at the rows that see no key"
    if not torch.isfinite(out).all():
        return "not finite"
    zero = (want == 0).all(dim=-1)
    if out[zero].any():
        return "a row that sees no key is not 0"
    name = call.get("recipe") or "sage2"
    limit, floor = LIMITS[call["query"].dtype], 0.05
    if name[:7] in QUANTIZED_LIMITS and not call["query"].requires_grad:
        # Values are N(0, 1) and rounded as such, while an output may be a small difference of them.
        limit, floor = max(limit, QUANTIZED_LIMITS[name[:7]]), 0.25
    error = (out.detach().double() - want).abs().sum() / want.abs().sum().clamp_min(floor * max(1, want.numel()))
    if error > limit:
        return f"relative L1 {float(error):.3g}"
    if out.requires_grad:
        out.float().sum().backward()
        if not all(torch.isfinite(call[n].grad).all() for n in ("query", "key", "value") if call[n].grad is not None):
            return "a gradient is not finite"
    return ""


def _junk_tensors(x: Tensor) -> list[Any]:
    return [
        None, [1.0], "x", 3, np.zeros((1, 2, 3, 4), np.float32), x.detach().long(), x.detach().bool(),
        x.detach().to(torch.complex64), x.detach().to(torch.float8_e4m3fn), x.detach().to_sparse(), x.detach()[0],
        x.detach()[None], x.detach().to("meta"), torch.zeros(0), torch.zeros(()),
    ]  # fmt: skip


def wrong_call(rng: random.Random) -> tuple[dict[str, Any], str]:
    """(a sound call with one argument made wrong, that argument's name)."""
    call = sound_call(rng)
    while not all(call[n].numel() for n in ("query", "key", "value")):
        call = sound_call(rng)
    packed = "cu_seqlens_q" in call
    tokens = call["query"].shape[0]
    words: tuple[Any, ...] = (None, 3, "warn", [], np.zeros(3), b"exact")
    numbers: tuple[Any, ...] = ("x", math.nan, math.inf, -math.inf, True, [1.0], 1j, torch.ones(2), 1e300, 10**400)
    lengths = [0, 3, tokens]
    by_name: dict[str, Callable[[], list[Any]]] = {
        "query": lambda: _junk_tensors(call["query"]),
        "key": lambda: _junk_tensors(call["key"]),
        "value": lambda: _junk_tensors(call["value"]),
        "attn_mask": lambda: [
            [1.0], "x", 1.0, torch.ones(3, 3).long(), torch.ones(3).bool(), torch.ones(97, 89).bool(),
            torch.ones(1, 1, 1, 1, 1).bool(), torch.ones(1, 1, 1, 1, device="meta"), torch.ones(3, 3).to_sparse(),
            torch.ones(1, 1, dtype=torch.float8_e5m2), torch.ones(1, 1, dtype=torch.complex64),
        ],
        "dropout_p": lambda: [None, 1.0, -0.1, 2, *numbers],
        "is_causal": lambda: [None, "no", 1, 0.0, [True]],
        "enable_gqa": lambda: [None, "yes", 1],
        "return_lse": lambda: [None, "x", 0],
        "scale": lambda: list(numbers),
        "softcap": lambda: [-1.0, *numbers],
        "window": lambda: ["x", 1.5, True, (None, 2), (1.5, 2), (1,), (1, 2, 3), [True, 1], {1: 2}, torch.ones(2)],
        "sinks": lambda: [[1.0], "x", torch.zeros(77), torch.zeros(1, 1), torch.zeros(2).long(), torch.zeros(())],
        "tensor_layout": lambda: ["BSHD", *words],
        "causal_align": lambda: ["lower", *words],
        "on_unsupported": lambda: list(words),
        "recipe": lambda: [3, "qk_int9", [], "exact:smooth=k", b"exact", "", "qk_int8_pv_fp8:granularity=row"],
        "cu_seqlens_q": lambda: [
            None, [0, 4], "x", torch.tensor([0.0, 3.0]), torch.tensor([0]), torch.tensor(3), torch.zeros(2, 2).int(),
            *(torch.tensor(n) for n in ([0, 1, 2, tokens + 1], [0, 3, 2, tokens], [-1, 0, 1, tokens], lengths[:2])),
            torch.tensor([0, 1, 2, 1 << 40]),
        ],
    }  # fmt: skip
    name = rng.choice([n for n in by_name if n != "cu_seqlens_q" or packed])
    call[name] = rng.choice(by_name[name]())
    return call, name


def is_named(name: str, message: str) -> bool:
    """Whether a message is about the argument: shapes concern query, key and value together."""
    tensors = ("query", "key", "value")
    return any(n in message for n in (tensors if name in tensors else (name,)))


def judge(n: int, seed: int) -> tuple[str, str]:
    """(verdict, detail) of call n."""
    rng = random.Random(f"{seed}/{n}")
    name = ""
    if rng.random() < 0.5:
        call = sound_call(rng)
    else:
        call, name = wrong_call(rng)
    start = time.perf_counter()
    try:
        result = sage_attention(**call)
    except (TypeError, ValueError) as e:
        if not name:
            return "a sound call refused", f"{type(e).__name__}: {e}"
        verdict = "refused by name" if is_named(name, str(e)) else "refused without the name"
        return verdict, f"{name}: {type(e).__name__}: {e}"
    except Exception as e:
        return "internal error", f"{name or 'sound'}: {type(e).__name__}: {e}"
    if time.perf_counter() - start > SLOW_S:
        return "slow", f"{time.perf_counter() - start:.1f} s"
    if name:
        return "a wrong call accepted", name
    detail = wrong_value(call, result)
    return ("a wrong value", detail) if detail else ("right", "")


GOOD = ("right", "refused by name")


def fuzz(calls: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """(calls by verdict, one line for each of the first calls that went wrong)."""
    counts: Counter[str] = Counter()
    wrong = []
    for n in range(calls):
        verdict, detail = judge(n, seed)
        counts[verdict] += 1
        if verdict not in GOOD and len(wrong) < 50:
            wrong.append(f"call {n} of seed {seed}: {verdict}: {detail[:300]}")
    return counts, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    counts, wrong = fuzz(options.calls, options.seed)
    result = dict(
        calls=options.calls, seed=options.seed, torch=torch.__version__, seconds=round(time.perf_counter() - start),
        verdicts=dict(sorted(counts.items())), wrong=wrong,
    )  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
