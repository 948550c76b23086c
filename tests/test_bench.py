"""The benchmark without a GPU: its shapes, rows, errors, tables and files, with the clock and the kernels replaced."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from sage_patch import cli
from sage_patch.evaluation.bench import gate, peers, plans, shapes, targets, timing
from sage_patch.evaluation.bench import measure as bench
from sage_patch.evaluation.bench import tables as bench_tables
from sage_patch.kernels import build, crossover
from sage_patch.recipes import Call
from zoo.architectures import architectures

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
NEEDS_NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can run the benchmark itself")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments))


class Clock:
    """A card whose calls take what they say: `ms` in a burst and `hot` times as long once sustained."""

    def __init__(self) -> None:
        self.now, self.rested = 1000.0, True

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def elapsed(run: Any, calls: int) -> float:
            out = [run() for _ in range(min(calls, 2))][-1]
            each = run.ms * (1.0 if self.rested else run.hot)
            self.rested = self.rested and calls <= 20
            self.now += each * calls / 1e3
            assert out is not None
            return each * calls

        def sleep(seconds: float) -> None:
            self.now, self.rested = self.now + seconds, True

        monkeypatch.setattr(timing, "_elapsed_ms", elapsed)
        monkeypatch.setattr(timing.time, "time", lambda: self.now)
        monkeypatch.setattr(timing.time, "sleep", sleep)


class Candidate:
    def __init__(self, out: Any, ms: float, hot: float = 1.0) -> None:
        self.out, self.ms, self.hot = out, ms, hot

    def __call__(self) -> torch.Tensor:
        return self.out()


def candidates(query: Any, key: Any, value: Any, shape: Any, plan: Any) -> Any:
    """Ours in 1 ms (3 ms short of 512 tokens), a tenth slower sustained; cuDNN in 2; one that fails and one missing."""

    def exact() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=shape.is_causal, enable_gqa=True)

    def broken() -> torch.Tensor:
        raise RuntimeError("no plan found")

    ours = 1.0 if shape.length >= 512 else 3.0
    found = {
        "sage2_op": Candidate(exact, ours, 1.1),
        "sage2_kernel": Candidate(exact, ours / 2, 1.1),
        "sage2_prepare": Candidate(exact, ours),
        "sage2_exp_chord_op": Candidate(exact, ours * 0.9),
        "sdpa_cudnn": Candidate(exact, 2.0),
        "sdpa_fa2": Candidate(exact, 4.0),
        "fa3_bf16": Candidate(broken, 1.0),
    }
    return found, {"cudnn_fp8_kernel": "PeerMissing: not installed"}


FACTS = {
    "device": "NVIDIA Test", "driver": "1", "power_limit": "700 W", "cuda": "13.0", "date": "2026-01-01",
    "packages": {"torch": "2", "fa3-fwd": None},
}  # fmt: skip


@pytest.fixture
def bench_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of `run` on the CPU: stand-ins for the card, its clock, the candidates and the library."""
    Clock().install(monkeypatch)
    monkeypatch.setattr(bench, "_candidates", candidates)
    monkeypatch.setattr(bench, "require_gpu", lambda: None)
    monkeypatch.setattr(bench.library, "prepare", lambda index: None)
    monkeypatch.setattr(bench, "gpu_environment", lambda: dict(FACTS))
    monkeypatch.setattr(bench, "host_cost", lambda: {"operator": 9.0})
    monkeypatch.setattr(timing, "device_id", lambda: "0")
    here = bench.measure_shape
    monkeypatch.setattr(bench, "measure_shape", lambda shape, plan: here(shape, plan, "cpu"))


@pytest.fixture
def result(bench_here: None) -> dict[str, Any]:
    """Two short shapes."""
    return bench.run(plans.Plan(shapes.grid([64], [256, 512], ["causal"], batch=1, num_heads=4, num_kv_heads=2)))


def test_a_row_holds_speed_errors_and_reasons(result: dict[str, Any]) -> None:
    row = result["rows"][1]
    assert {k: row[k] for k in ("head_dim", "is_causal", "q_len", "kv_len", "batch", "num_heads", "num_kv_heads")} == {
        "head_dim": 64, "is_causal": True, "q_len": 512, "kv_len": 512, "batch": 1, "num_heads": 4, "num_kv_heads": 2,
    }  # fmt: skip
    tops = 4 * 4 * 512 * 512 * 64 / 2 / 1e-3 / 1e12
    assert row["burst"]["sage2_op"] == pytest.approx(tops) and row["sage2_op"] == pytest.approx(tops / 1.1)
    assert row["sdpa_cudnn"] == pytest.approx(tops / 2) == row["burst"]["sdpa_cudnn"]
    assert row["burst"]["sdpa_fa2"] == pytest.approx(tops / 4) and "sdpa_fa2" not in row
    assert row["sage2_prepare_us"] == pytest.approx(1000) and "sage2_prepare" not in row["burst"]
    assert row["fa3_bf16"] is None and row["cudnn_fp8_kernel"] is None
    assert row["why_null"] == {
        "fa3_bf16": "RuntimeError: no plan found", "cudnn_fp8_kernel": "PeerMissing: not installed"
    }  # fmt: skip
    assert set(row["errors"]) == {"sage2_op", "sage2_kernel", "sage2_exp_chord_op", "sdpa_cudnn", "sdpa_fa2"}
    assert 0 < row["errors"]["sage2_op"]["rel_l1"] < 0.01 and row["errors"]["sage2_op"]["cosine"] > 0.9999
    assert set(row["card"]["sage2_op"]) == {"burst", "sustained"}


def test_a_figure_is_a_burst_from_rest_and_the_second_half_of_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    monkeypatch.setattr(timing, "_elapsed_ms", lambda run, calls: log.append(calls) or run.ms * calls)
    monkeypatch.setattr(timing.time, "sleep", lambda s: log.append(f"rest {s}"))
    figure = timing.measure(Candidate(None, 1.0), timing.Timing())
    assert log == [1, "rest 0.5", 20, 730, 750] and figure[:2] == (1.0, 1.0)
    log.clear()
    timing.measure(Candidate(None, 400.0), timing.Timing())  # a long call: fewer of them, but never one alone
    assert log == [1, "rest 0.5", 2, 2]
    log.clear()
    assert timing.measure(Candidate(None, 1.0), timing.Timing(), is_sustained=False).sustained_ms is None
    assert timing.measure(Candidate(None, 1.0), plans.CROSSOVER_TIMING).sustained_span is None
    assert log == [1, "rest 0.5", 20, 1, "rest 0.15", 20]


def test_clock_and_power_are_those_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a program in nvidia-smi's place that knows no power.draw.instant; and without one."""
    line = "2026/01/31 12:00:00.125, 1980, 693.4"
    at = timing.parse(line)
    assert at is not None and at[1:] == (1980, 693.4) and timing.parse("[N/A]") is None
    assert timing.parse("2026/01/31 12:00:00.125, 1980, [N/A]") is None
    (tmp_path / "nvidia-smi").write_text(
        f'#!/bin/sh\ncase "$*" in *instant*) echo bad field; exit 2;; esac\necho "{line}"\nexec sleep 5\n'
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(timing, "device_id", lambda: "0")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with timing.Monitor() as monitor:
        assert monitor.over((0, 1e12)) is None  # nothing is known before the end
    assert monitor.over((at[0] - 1, at[0] + 1)) == {"clock_mhz": 1980, "power_w": 693.4}
    assert monitor.over((at[0] + 1, at[0] + 2)) is None and monitor.over(None) is None
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with timing.Monitor() as monitor:
        pass
    assert monitor.samples == []


def test_the_least_important_shapes_are_left_out_and_named(bench_here: None) -> None:
    found = shapes.grid([64], [512, 256], ["full", "causal"], batch=1, num_heads=4)
    plan = plans.Plan(found, peers=("sdpa_cudnn",), seconds=30.0)
    each = plans.expected_seconds(found[0], plan)
    assert each == pytest.approx(1 + 5 * 2.1 + 0.6)
    assert plans.fitting(plan) == (found[:2], found[2:])
    said: list[str] = []
    result = bench.run(plan, say=said.append)
    assert len(result["rows"]) == 2
    assert said == [result["cut_short"]] and "30 seconds: D 64, full, 1 x 4 heads, 256 tokens; D 64, causal" in said[0]


def test_presets_and_what_is_timed_where() -> None:
    recipes = ["qk_int8_pv_fp8", "qk_int8_pv_fp16", "qk_int8_pv_fp8:smooth_v=off", "qk_int8_pv_fp8:smooth=none"]
    plan = plans.Plan(shapes.preset("kernels"), recipes)
    assert sum(plans.expected_seconds(s, plan) for s in plan.shapes) < 330
    assert sum(plans.expected_seconds(s, plans.Plan(plan.shapes)) for s in plan.shapes) < 300
    measured = [(t.head_dim, t.is_causal, t.length) for t in targets.TARGETS]
    fitted = plans.fitting(dataclasses.replace(plan, seconds=240.0))[0]  # all that a target asks for
    assert set(measured) <= {(s.head_dim, s.is_causal, s.length) for s in fitted if s.batch == 1}
    first, fourth = plan.shapes[0], plan.shapes[3]
    assert plans.wanted(first, plan) == (recipes, list(peers.PEERS))
    assert plans.wanted(fourth, plan)[0] == [recipes[0], recipes[2]] and "sdpa_fa2" not in plans.wanted(fourth, plan)[1]
    published = shapes.preset("cudnn_fp8")
    assert {(s.num_heads, s.num_kv_heads, s.head_dim) for s in published} == {(64, 8, 128)}
    assert {s.length for s in published} == {1024 << i for i in range(8)}
    assert {"Wan", "Llama", "Flux", "CogVideoX", "Qwen", "LTX", "HunyuanVideo", "MiniMax"} == {
        s.name.partition("-")[0].partition(",")[0] for s in shapes.preset("models")
    }
    with pytest.raises(shapes.BenchError, match="preset 'x' is none; there are kernels"):
        shapes.preset("x")


def test_model_shapes_are_those_of_the_recorded_architectures() -> None:
    names = {
        "Wan-2.1-14B": "wan21_t2v_14b", "Flux-dev": "flux_dev", "CogVideoX-5B": "cogvideox_5b",
        "Qwen-Image": "qwen_image", "LTX-2": "ltx2_19b", "HunyuanVideo": "hunyuan_video",
        "Llama-3-8B prefill": "llama31_8b",
    }  # fmt: skip
    for shape in shapes.preset("models"):
        name = names.get(shape.name.partition(",")[0])
        if name is None:
            continue
        architecture = architectures()[name]
        heads = architecture.config.get("num_attention_heads", shape.num_heads)
        assert shape.num_heads == heads, name
        assert shape.head_dim in {site["head_dim"] for site in architecture.sites}
        tokens = {call["q_len"] for call in architecture.calls}
        assert shape.length in tokens or shape.is_causal, (name, tokens)


def test_variants_have_columns_of_their_own() -> None:
    assert plans.names("a,b:x=1,y=2,c") == ["a", "b:x=1,y=2", "c"]
    assert plans.column_of("qk_int8_pv_fp8") == "sage2" == plans.column_of("sage2")
    assert plans.column_of("qk_int8_pv_fp8:smooth=none,smooth_v=off") == "sage2_smooth_none_smooth_v_off"
    with pytest.raises(shapes.BenchError, match="unknown variant 'nose'"):
        plans.column_of("qk_int8_pv_fp8:nose=1")


def test_what_the_kernels_do_not_compute_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant is asked about before it is timed: a kernel would run without it and nobody would see."""
    monkeypatch.setattr(bench.ops, "backend_for", lambda device: "sm90")
    monkeypatch.setattr(bench, "describe", lambda *tensors: Call("sm90", "cuda", "bfloat16", 64, 64, 2, 2, 64, 64))
    q = torch.randn(1, 2, 64, 64).bfloat16()
    plan = plans.Plan([], ["qk_int8_pv_fp8:granularity=block"], ["sdpa_default"])
    found, why_null = bench._candidates(q, q, q, shapes.Shape(64, False, 64), plan)
    assert list(found) == ["sdpa_default"]
    assert "variant" in why_null["sage2_granularity_block_op"] and "sage2_granularity_block_kernel" in why_null


def test_ours_are_the_whole_call_its_kernel_and_its_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each recipe under its own column, with its own flags; the preparation once."""
    ran: list[tuple[str, str]] = []

    class Call_:
        def __init__(self, query: Any, key: Any, value: Any, args: Any, recipe: Any) -> None:
            self.recipe, self.out = recipe.name, torch.zeros(1)

        def prepare(self) -> None:
            ran.append(("prepare", self.recipe))

        def forward(self) -> None:
            ran.append(("kernel", self.recipe))

    def forward(query: Any, key: Any, value: Any, args: Any, recipe: Any) -> Any:
        assert args.right == 0 and args.scale == 64**-0.5
        ran.append(("op", recipe.name))
        return torch.zeros(1), None

    monkeypatch.setattr(bench.library, "Call", Call_)
    monkeypatch.setattr(bench.library, "forward", forward)
    q = torch.randn(1, 2, 64, 64).bfloat16()
    names = ["qk_int8_pv_fp8", "qk_int8_pv_fp8:smooth_v=off", "qk_int8_pv_fp16"]
    plan = plans.Plan([], names, ["sdpa_default"])
    found, why_null = bench._candidates(q, q, q, shapes.Shape(64, True, 64, recipes=("qk_int8_pv_fp8",)), plan)
    columns = ["sage2_op", "sage2_kernel", "sage2_prepare", "sage2_smooth_v_off_op", "sage2_smooth_v_off_kernel"]
    assert list(found) == [*columns, "sdpa_default"] and not why_null
    ran.clear()
    for candidate in found.values():
        candidate()
    assert ran == [(c.rpartition("_")[2], names["smooth" in c]) for c in columns]
    whole, _ = bench._candidates(q, q, q, shapes.Shape(64, True, 64), plans.Plan([], names, [], is_crossover=True))
    assert list(whole) == ["sage2_op", "sage2_smooth_v_off_op", "sage2_pv_fp16_op"]


def test_a_crossover_looks_no_further_than_it_pays(bench_here: None) -> None:
    found = shapes.crossover([64], [128, 256, 512, 1024], ["full"])
    assert [(s.columns()["batch"], s.length) for s in found[:4]] == [(1, 1024), (1, 512), (1, 256), (1, 128)]
    plan = plans.plan(
        preset_name="", head_dims=[64], lengths=[128, 256, 512, 1024], masks=["full"], seconds=60, note={},
        heads={"batch": 0, "num_heads": 0, "num_kv_heads": 0}, recipes=["qk_int8_pv_fp8"], peers=[], is_crossover=True,
    )  # fmt: skip
    assert plan.peers == plans.CROSSOVER_PEERS and plan.timing.sustained == 0
    result = bench.run(plan)
    assert [(r["crossover_heads"], r["q_len"]) for r in result["rows"]] == [
        (heads, n) for heads in (32, 128) for n in (1024, 512, 256)
    ]
    name, card = bench.crossover_card(result)
    # 2/3 as fast at 256 tokens, twice as fast at 512: even at 305, rounded up
    assert crossover.look_up(card, 64, False) == (("qk_int8_pv_fp8", ((128, 512), (32, 512))),)
    assert name == "NVIDIA Test" and "torch 2" in card["measured"] and "bursts" in card["measured"]
    assert "512" in bench_tables.crossover_table(name, card).markdown()
    with pytest.raises(shapes.BenchError, match="both quantized and exact"):
        bench.crossover_card(result | {"rows": []})


def test_files_and_tables(result: dict[str, Any], tmp_path: Path) -> None:
    files = bench_tables.write_bench(tmp_path, result | {"cut_short": "3 of 5 shapes left out"}, plot=HAS_MATPLOTLIB)
    assert [f.name for f in files] == ["bench.json", "bench.md", "bench.png"][: 2 + HAS_MATPLOTLIB]
    assert json.loads(files[0].read_text())["rows"][0]["q_len"] == 256
    text = files[1].read_text()
    for word in ("64 causal 512, 1 x 4:2 heads", "PeerMissing", "operator", "3 of 5", "NVIDIA Test", "exp chord op"):
        assert word in text
    row = result["rows"][1]
    assert f"{row['sage2_op']:.0f} / {row['burst']['sage2_op']:.0f}" in text and "- / " in text


def test_the_gate_compares_ratios(result: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps(result))
    committed = gate.read(tmp_path / "b.json")
    assert gate.slower(result, committed, 5.0) == ([], 12)  # 3 of ours x 2 ways x 2 shapes
    for row in committed["rows"]:  # another card, twice as fast: the ratios are the same
        for speeds in (row, row["burst"]):
            speeds |= {c: 2 * v for c, v in speeds.items() if c.startswith(("sage2", "sdpa")) and isinstance(v, float)}
    assert gate.slower(result, committed, 5.0) == ([], 12)
    committed["rows"][1]["burst"]["sage2_op"] *= 1.1
    (line,), _ = gate.slower(result, committed, 5.0)
    assert line == "64 causal 512, 1 x 4:2 heads: sage2_op is 2.000 x sdpa_cudnn, was 2.200 (-9.1 %, burst)"
    assert gate.slower(result, committed, 10.0)[0] == []
    with pytest.raises(shapes.BenchError, match="no shape"):
        gate.slower(result, {"rows": []}, 5.0)
    with pytest.raises(shapes.BenchError, match="no bench.json"):
        gate.read(tmp_path / "nowhere.json")


def test_the_command_fails_at_the_gate(
    bench_here: None, result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b.json").write_text(json.dumps(result))
    arguments = ["--head-dims", "64", "--lengths", "256,512", "--masks", "causal", "--batch", "1", "--heads", "4"]
    arguments += ["--kv-heads", "2", "--no-plot", "--gate", str(tmp_path / "b.json")]
    done = invoke("bench", *arguments, "--out", str(tmp_path))
    assert done.exit_code == 0 and "12 ratios compared" in done.stderr, done.output
    result["rows"][0]["sage2_op"] *= 1.2
    (tmp_path / "b.json").write_text(json.dumps(result))
    done = invoke("bench", *arguments)
    assert done.exit_code == 1 and "1 lower by more than 5 %" in done.stderr and "was " in done.stderr


def test_targets_are_met_missed_or_not_measured() -> None:
    shape = dict(head_dim=128, is_causal=False, q_len=8192, kv_len=8192, batch=1, num_heads=32, num_kv_heads=32)
    row = shape | {"sage2_kernel": 1150.0, "sage2_op": 1000.0, "fa3_fp8_kernel": 1000.0, "fa3_bf16": 820.0}
    row |= {"burst": {"sage2_kernel": 1160.0, "sage2_op": 1100.0, "fa3_fp8_kernel": 1000.0, "fa3_bf16": 800.0}}
    timed = {"ms": 1.0, "burst_ms": 1.0}
    models = {"wan": {"model": "Wan", "sdpa_default": {"ms": 1.5, "burst_ms": 1.4}, "qk_int8_pv_fp8": timed}}
    modes = {"full": {"qk_int8_pv_fp8": 2048}, "causal": {"qk_int8_pv_fp8": None}}
    card = {"measured": "", "head_dims": {"128": modes}}
    calls, whole, quantized = targets.targets_tables({"rows": [row]}, models, card)
    verdicts = {line[0]: line[2:] for line in calls.rows if line[1] == "D 128, full, 8192"}
    assert verdicts["default, kernel alone over FA3 FP8's kernel"] == (">= 1.15 x", "1.15 x", "1.16 x", "met")
    assert verdicts["default, whole call over FA3 FP8's kernel"][-1] == "missed by 5.7 %"
    assert verdicts["default, whole call over the best exact peer"] == (">= 1.2 x", "1.22 x", "1.38 x", "met")
    assert all(line[-1] == "not measured" for line in calls.rows if line[1] == "D 64, full, 32768")
    assert whole.rows[0] == ("qk_int8_pv_fp8", "Wan", ">= 1.45 x", "1.500 x", "1.400 x", "missed by 3.4 %")
    assert quantized.rows == (("128 full 8192, 1 x 32 heads", "fa3", "1.220 x", "met"),)
    old = {"rows": [{k: v for k, v in row.items() if k != "burst"}]}  # recorded in blocks: says nothing of either
    assert {line[-1] for line in targets.targets_tables(old, {}, None)[0].rows} == {"not measured"}
    errors = {"sage2_op": {"rel_l1": 0.0384}, "sage2_exp_exact_op": {"rel_l1": 0.038}}
    line = targets.targets_tables({"rows": [row | {"errors": errors}]}, {}, None)[0].rows[-1]
    assert line[2:] == ("<= 1.02 x", "1.011 x", "1.011 x", "met")
    assert any(t.most_error for t in targets.TARGETS) and len(targets.TARGETS) == 30


@pytest.mark.skipif(HAS_MATPLOTLIB, reason="matplotlib is installed")
def test_a_plot_without_matplotlib_is_one_message(result: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(bench_tables.PlotError, match="sage-patch\\[bench\\].*--no-plot"):
        bench_tables.write_bench(tmp_path, result)
    assert (tmp_path / "bench.json").is_file()


def test_the_batch_keeps_the_work_in_bounds() -> None:
    found = {s.length: s.columns()["batch"] for s in shapes.grid([128], shapes.LENGTHS, ["full"])}
    assert found == {1024: 4, 2048: 4, 4096: 4, 8192: 4, 16384: 2, 32768: 1}
    assert shapes.Shape(128, False, 512, num_heads=9).columns()["batch"] == 14
    assert shapes.Shape(128, False, 512, batch=3).columns()["batch"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head-dims", "64,300"], "head_dims: 300 cannot be measured; the kernels take 1 to 256"),
        (["--lengths", "1K"], "--lengths must be whole numbers"),
        (["--lengths", "0"], "lengths: 0 cannot be measured"),
        (["--masks", "window"], "the kernels take full and causal"),
        (["--recipes", "exact"], "'exact' has no compiled kernel"),
        (["--recipes", "qk_int8_pv_fp8:nose=1"], "unknown variant 'nose'"),
        (["--heads", "9", "--kv-heads", "2"], "9 query heads are no multiple of 2"),
        (["--peers", "sdpa"], "peers: 'sdpa' is none; there are sdpa_default"),
        (["--preset", "x"], "preset 'x' is none"),
        (["--preset", "models", "--lengths", "512"], "give either it or those"),
        (["--crossover", "--heads", "8"], "break-even lengths are measured with 32 heads"),
        (["--gate", "nowhere.json"], "nowhere.json is no bench.json"),
        pytest.param([], "needs a CUDA device", marks=NEEDS_NO_GPU),
        pytest.param(["--crossover"], "needs a CUDA device", marks=NEEDS_NO_GPU),
    ],
)
def test_what_cannot_be_measured_is_one_message(arguments: list[str], message: str) -> None:
    done = invoke("bench", *arguments)
    assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.output


def test_peers_that_are_not_installed_say_so() -> None:
    q = torch.randn(1, 2, 16, 64)
    missing = {"fa3_bf16": "fa3_fwd_interface", "cudnn_fp8_kernel": "cudnn", "sage_upstream": "sageattention"}
    for name, package in missing.items():
        if importlib.util.find_spec(package) is None:
            with pytest.raises(peers.PeerMissing, match="is not installed"):
                peers.PEERS[name](q, q, q, False)
    assert torch.equal(
        peers.PEERS["sdpa_default"](q, q, q, True)(), F.scaled_dot_product_attention(q, q, q, is_causal=True)
    )


@pytest.mark.nvcc
def test_build_writes_a_library_and_says_what(tmp_path: Path) -> None:
    done = invoke("build", "--arch", "sm_90a", "--out", str(tmp_path))
    assert done.exit_code == 0 and (tmp_path / "libsage2-sm90.so").is_file()
    assert "for sm_90a" in done.stdout and " s\n" in done.stdout
    other = tmp_path / "other.so"
    assert invoke("build", "--arch", "90", "--out", str(other)).exit_code == 0 and other.is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "75"], "cannot build for architecture 75: kernels exist for sm_80, sm_86, sm_89, sm_90a, sm_100"),
        (["--out", "lib.dll"], "give a folder, or a file name that ends in .so"),
        (["--arch", "90", "--out", "x"], "no nvcc was found"),
    ],
)
def test_build_errors_are_one_message(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    done = invoke("build", *arguments)
    assert done.exit_code == 2 and message in done.stderr
