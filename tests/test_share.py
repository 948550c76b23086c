"""The file of `sage-patch bench --share`: it reads what it wrote, and refuses by name what cannot be true."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sage_patch.cli import app
from sage_patch.evaluation.bench import accumulators as sums
from sage_patch.evaluation.bench import share

ROW = {
    "head_dim": 128, "is_causal": False, "length": 4096, "num_heads": 32,
    "milliseconds": {"qk_int8_pv_fp8": 0.70, "qk_int8_pv_fp16": 0.95, "sdpa": 1.68},
    "ratios": {"qk_int8_pv_fp8/sdpa": 2.4, "qk_int8_pv_fp16/sdpa": 1.768},
    "rel_l1": {"qk_int8_pv_fp8": 0.037, "qk_int8_pv_fp16": 0.011, "sdpa": 0.002},
}  # fmt: skip
FILE: dict[str, Any] = {
    "schema_version": 1, "card": "NVIDIA GeForce RTX 4090", "capability": "8.9", "sms": 128, "driver": "580.65.06",
    "clocks_mhz": {"now": 2520, "max": 3105}, "power_limit_w": 450.0, "cuda": "13.0",
    "versions": {"torch": "2.11.0+cu130", "sageattention": None}, "sums": {"fp8": "fp16", "fp16": "fp16"},
    "date": "2026-11-30", "rows": [ROW],
}  # fmt: skip


def changed(**values: Any) -> dict[str, Any]:
    """FILE with other values; those of a row by its names."""
    found = copy.deepcopy(FILE)
    for name, value in values.items():
        (found if name in found else found["rows"][0])[name] = value
    return found


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    given = share.Share.model_validate(FILE)
    share.write(path, given)
    assert share.read(path) == given and path.stat().st_size < 4096
    assert share.default_path(given) == Path("sage-patch-NVIDIA-GeForce-RTX-4090.json")
    (line,) = share.share_table(given).rows
    assert line[0] == "128 full 4096" and "2.40" in line and "0.0370" in line
    done = CliRunner().invoke(app, ["bench", "--read", str(path)])
    assert done.exit_code == 0 and "qk_int8_pv_fp8/sdpa" in done.output and "driver 580.65.06" in done.output


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ratios": {"qk_int8_pv_fp8/sdpa": 3.4, "qk_int8_pv_fp16/sdpa": 1.768}}, "the ratios do not follow from"),
        ({"ratios": {"qk_int8_pv_fp8/sdpa": 2.4}}, "the ratios do not follow from the times"),
        ({"rel_l1": {"qk_int8_pv_fp8": 0.37}}, "qk_int8_pv_fp8 has an error of 0.37, which no right kernel has"),
        ({"milliseconds": {"sdpa": 0.01}, "ratios": {}}, "sdpa at 27488 TOPS is more than the"),
        ({"milliseconds": {"sdpa": -1.0}, "ratios": {}}, "rows.0.milliseconds.sdpa: Input should be greater than 0"),
        ({"capability": "9.0"}, "has compute capability (8, 9), the file says 9.0"),
        ({"card": "Tesla T4", "capability": "7.5"}, "capability 7.5: there are no kernels"),
        ({"card": "C:/a/card"}, "card: String should match pattern"),
        ({"versions": {"torch": "/opt/torch"}}, "versions.torch: String should match pattern"),
        ({"sms": "128"}, "sms: Input should be a valid integer"),
        ({"rows": []}, "rows: List should have at least 1 item"),
        ({"schema_version": 2}, "schema_version: Input should be 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps(changed(**values)))
    with pytest.raises(share.ShareError) as error:
        share.read(path)
    assert message in str(error.value) and f"{path} is no file of sage-patch bench --share" in str(error.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    for text in (json.dumps(FILE | {"host": "me"}), "not JSON", json.dumps([1])):
        path.write_text(text)
        done = CliRunner().invoke(app, ["bench", "--read", str(path)])
        assert done.exit_code == 2 and "is no file of sage-patch bench --share" in done.output
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(share.ShareError, match="not UTF-8|is no file"):
        share.read(path)
    assert CliRunner().invoke(app, ["bench", "--read", str(tmp_path / "none.json")]).exit_code == 2


def test_names_of_this_machine_cannot_get_in() -> None:
    assert share._word("NVIDIA/GeForce \\ user@host:~") == "NVIDIA GeForce   user host  "
    assert share._word(None) is None and share._number("[N/A]") is None and share._number("450.00") == 450


def test_without_a_card_it_says_so() -> None:
    done = CliRunner().invoke(app, ["bench", "--share"])
    assert done.exit_code == 2 and "needs a CUDA device" in done.output


def test_sums_are_chosen_by_what_is_clearly_faster() -> None:
    times = {
        "fp8": {"fp32": {64: 2.0, 128: 2.0}, "fp16": {64: 1.5, 128: 1.9}},
        "fp16": {"fp32": {64: 2.0, 128: 2.0}, "fp16": {64: 1.99, 128: 1.99}},
    }
    assert sums.choose(times) == {"fp8": "fp16", "fp16": "fp32"}
    assert [row[-1] for row in sums.sums_table("a card", times).rows] == ["fp16", "fp32"]
