"""The benchmark without a GPU: its shapes, rows, errors, tables and files, with the clock and the kernels replaced."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from sage_patch import cli
from sage_patch.evaluation.bench import measure as bench
from sage_patch.evaluation.bench import peers
from sage_patch.evaluation.bench import tables as bench_tables
from sage_patch.kernels import build, crossover

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
NEEDS_NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can run the benchmark itself")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two short shapes: a candidate that is torch's SDPA in 1 ms (2 ms short of 512 tokens), and peers that fail."""

    def candidates(query: Any, key: Any, value: Any, is_causal: bool, plan: bench.Plan) -> Any:
        def whole() -> torch.Tensor:
            whole.tokens = query.shape[2]  # type: ignore[attr-defined]
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)

        def broken() -> torch.Tensor:
            raise RuntimeError("no plan found")

        found = {"sage2_op": whole, "sage2_prepare": whole, "sdpa_cudnn": lambda: whole(), "fa3_bf16": broken}
        return found, {"cudnn_fp8_kernel": "PeerMissing: not installed"}

    def clock(candidate: Any, flush: Any, budget: float) -> float:
        short = getattr(candidate, "tokens", 512) < 512
        return 3.0 if short else 1.0 if hasattr(candidate, "tokens") else 2.0

    monkeypatch.setattr(bench, "_candidates", candidates)
    monkeypatch.setattr(bench, "median_ms", clock)
    shapes = bench.shapes([64], [256, 512], ["causal"], batch=1, num_heads=4, num_kv_heads=2)
    plan = bench.Plan(shapes)
    rows = [bench.measure(shape, plan, torch.empty(0), "cpu") for shape in shapes]
    facts = {
        "device": "NVIDIA Test", "driver": "1", "power_limit": "700 W", "cuda": "13.0", "date": "2026-01-01",
        "packages": {"torch": "2", "fa3-fwd": None},
    }  # fmt: skip
    return {"environment": facts, "host_us_per_call": {"operator": 9.0}, "rows": rows}


def test_a_row_holds_speed_errors_and_reasons(result: dict[str, Any]) -> None:
    row = result["rows"][1]
    assert {k: row[k] for k in ("head_dim", "is_causal", "q_len", "kv_len", "batch", "num_heads", "num_kv_heads")} == {
        "head_dim": 64, "is_causal": True, "q_len": 512, "kv_len": 512, "batch": 1, "num_heads": 4, "num_kv_heads": 2,
    }  # fmt: skip
    assert row["sage2_op"] == pytest.approx(4 * 4 * 512 * 512 * 64 / 2 / 1e-3 / 1e12)
    assert row["sdpa_cudnn"] == pytest.approx(row["sage2_op"] / 2)
    assert row["sage2_prepare_us"] == pytest.approx(1000)
    assert row["fa3_bf16"] is None and row["cudnn_fp8_kernel"] is None
    assert row["why_null"] == {
        "fa3_bf16": "RuntimeError: no plan found", "cudnn_fp8_kernel": "PeerMissing: not installed"
    }  # fmt: skip
    assert set(row["errors"]) == {"sage2_op", "sdpa_cudnn"}
    assert 0 < row["errors"]["sage2_op"]["rel_l1"] < 0.01 and row["errors"]["sage2_op"]["cosine"] > 0.9999


def test_crossover_lengths_come_from_the_rows(result: dict[str, Any]) -> None:
    name, card = bench.crossover_card(result)
    assert name == "NVIDIA Test" and "torch 2" in card["measured"]
    # 2/3 as fast at 256 tokens, twice as fast at 512: even at 305, rounded up
    assert crossover.look_up(card, 64, True) == (("qk_int8_pv_fp8", 512),)
    assert "512" in bench_tables.crossover_table(name, card).markdown()
    with pytest.raises(bench.BenchError, match="both quantized and exact"):
        bench.crossover_card(result | {"rows": []})


def test_files_and_tables(result: dict[str, Any], tmp_path: Path) -> None:
    files = bench_tables.write_bench(tmp_path, result | {"cut_short": "3 of 5 shapes left out"}, plot=HAS_MATPLOTLIB)
    assert [f.name for f in files] == ["bench.json", "bench.md", "bench.png"][: 2 + HAS_MATPLOTLIB]
    assert json.loads(files[0].read_text())["rows"][0]["q_len"] == 256
    text = files[1].read_text()
    assert all(word in text for word in ("64 causal 512", "PeerMissing", "operator", "3 of 5", "NVIDIA Test"))


@pytest.mark.skipif(HAS_MATPLOTLIB, reason="matplotlib is installed")
def test_a_plot_without_matplotlib_is_one_message(result: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(bench_tables.PlotError, match="sage-patch\\[bench\\].*--no-plot"):
        bench_tables.write_bench(tmp_path, result)
    assert (tmp_path / "bench.json").is_file()


def test_the_batch_keeps_the_work_in_bounds() -> None:
    found = {s.length: s.columns()["batch"] for s in bench.shapes([128], bench.LENGTHS, ["full"])}
    assert found == {1024: 4, 2048: 4, 4096: 4, 8192: 4, 16384: 2, 32768: 1}
    assert bench.Shape(128, False, 512, num_heads=9).columns()["batch"] == 14
    assert bench.Shape(128, False, 512, batch=3).columns()["batch"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head-dims", "64,300"], "head_dims: 300 cannot be measured; the kernels take 1 to 256"),
        (["--lengths", "1K"], "--lengths must be whole numbers"),
        (["--lengths", "0"], "lengths: 0 cannot be measured"),
        (["--masks", "window"], "the kernels take full and causal"),
        (["--recipes", "exact"], "'exact' has no compiled kernel"),
        (["--heads", "9", "--kv-heads", "2"], "9 query heads are no multiple of 2"),
        pytest.param([], "needs a CUDA device", marks=NEEDS_NO_GPU),
        pytest.param(["--crossover"], "needs a CUDA device", marks=NEEDS_NO_GPU),
    ],
)
def test_what_cannot_be_measured_is_one_message(arguments: list[str], message: str) -> None:
    done = invoke("bench", *arguments)
    assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.output


def test_peers_that_are_not_installed_say_so() -> None:
    q = torch.randn(1, 2, 16, 64)
    for name, package in (("fa3_bf16", "fa3_fwd_interface"), ("cudnn_fp8_kernel", "cudnn")):
        if importlib.util.find_spec(package) is None:
            with pytest.raises(peers.PeerMissing, match="pip install"):
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
