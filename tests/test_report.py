"""The report page: every number is found again in its file, and the page opens anywhere."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shutil
import subprocess
import sys
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from sage_patch.cli import app

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
FILES = [
    RESULTS / f"{name}.json"
    for name in ("quickstart_cpu", "quickstart_image_cpu", "kernels_h200", "models_h200", "ablation", "anatomy")
]
CALIBRATION = {
    "schema": 1, "kind": "calibrate", "task": "image", "date": "2026-01-02T03:04:05+00:00", "command": "sage-patch x",
    "environment": {"packages": {"torch": "9.9"}, "cpu": {"name": "a processor", "cores": 3}},
    "config": {"model": {"path": "some/where/pipe"}}, "model": {"class": "Pipe", "device": "cpu"},
    "targets": [{"target": "psnr>=30", "value": 31.25, "met": True}],
    "cost_model": {"card": "ada", "relative": {}, "source": "a measurement"},
    "buckets": [{"name": "first", "steps": [0]}, {"name": "middle", "steps": [1, 2]}],
    "groups": [
        {"site": "blocks.0.attn", "bucket": b, "recipe": r, "scores": {"qk_int4_pv_fp8": {"rel_l1": e},
         "qk_int8_pv_fp8": {"rel_l1": e / 7}}}
        for b, r, e in (("first", "qk_int8_pv_fp8", 0.1234), ("middle", "exact", 0.2345))
    ],
    "runs": [
        {"name": "qk_int4_pv_fp8 everywhere", "cost": 0.34, "met": False, "metrics": {"psnr": 22.8}},
        {"name": "3 of 8 upgrades", "cost": 0.377, "met": True, "metrics": {"psnr": 34.03, "worst_psnr": 31.91}},
    ],
    "chosen": {"name": "3 of 8 upgrades"},
    "plan": [{"name": "blocks.0.attn", "role": "joint", "heads": 2, "kv_heads": 2, "head_dim": 128,
              "recipe": "exact", "steps": "first 1: qk_int8_pv_fp8", "reason": "large keys | a bar"}],
}  # fmt: skip
EVALUATION = {
    "schema": 2, "what": "evaluate", "complete": True, "kind": "text", "date": "2026-01-02T03:04:05+00:00",
    "command": "sage-patch y", "environment": CALIBRATION["environment"], "config": {"model": {"path": "some/lm"}},
    "model": {"class": "LM", "device": "cpu"}, "plan": CALIBRATION["plan"],
    "rows": [
        {"name": "policy", "recipe": "qk_int8_pv_fp8", "metrics": {"kl": 0.00123, "top1": 0.98, "ppl_change": -0.0021,
         "agreement": 0.75}, "unavailable": {"peak_memory": "no GPU"}, "seconds": 3.5, "baseline_seconds": 2.5,
         "attention_seconds": 1.25, "peak_memory": None, "calls": [{"backend": "sm90"}],
         "fastest": {"seconds": 0.35, "attention_seconds": 0.125},
         "baseline_fastest": {"seconds": 0.25, "attention_seconds": 0.225}, "slowdown": 1.4},
    ],
    "unpatched": {"metrics": {"ppl": 12.5}, "fastest": {"seconds": 4.25, "attention_seconds": 2.75}},
    "needle": [{"name": "unpatched", "right": 0.75, "mrr": 0.875, "agreement": 1.0},
               {"name": "policy", "right": 0.5, "mrr": 0.625, "agreement": 0.9375}],
    "sites": [{"site": "blocks.0.attn", "recipe": "qk_int8_pv_fp8", "rel_l1": 0.0456},
              {"site": "blocks.1.attn", "recipe": "exact"}],
}  # fmt: skip
POLICY = """version: 1
recipe: qk_int8_pv_fp8
rules:
  - layers: {first: 2}
    recipe: exact
    reason: <b>large</b> keys
    score: {rel_l1: 0.0321}
"""


class Page(HTMLParser):
    """Elements that name a source, and table cells, with their text."""

    def __init__(self, text: str):
        super().__init__()
        self.marks: list[tuple[str, dict[str, str], str]] = []
        self.cells: list[tuple[dict[str, str], str, bool]] = []  # attributes, text, whether a source stands inside
        self.svgs: list[list[tuple[str, dict[str, str]]]] = []
        self._cell: list[Any] | None = None
        self._span: list[Any] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {k: v or "" for k, v in attrs}
        if tag == "svg":
            self.svgs.append([])
        if tag == "td":
            self._cell = [given, "", False]
        if "data-from" in given:
            if tag == "span":
                self._span = [tag, given, ""]
                if self._cell:
                    self._cell[2] = True
            else:
                self.marks.append((tag, given, given.get("data-shown", "")))
                self.svgs[-1].append((tag, given))

    def handle_data(self, data: str) -> None:
        if self._span:
            self._span[2] += data
        if self._cell:
            self._cell[1] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "span" and self._span:
            self.marks.append(tuple(self._span))
            self._span = None
        if tag == "td" and self._cell:
            self.cells.append(tuple(self._cell))
            self._cell = None


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Page]:
    """(folder, contents by file name, the parsed page) of a report of every kind of file."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "calibrate.json").write_text(json.dumps(CALIBRATION))
    (folder / "evaluated.json").write_text(json.dumps(EVALUATION))
    (folder / "policy.yaml").write_text(POLICY)
    sheet = RESULTS / "quickstart_image_cpu.png"
    files = [*FILES, sheet, folder / "calibrate.json", folder / "evaluated.json", folder / "policy.yaml"]
    done = CliRunner().invoke(app, ["report", *map(str, files), "--out", str(folder)])
    assert done.exit_code == 0, done.output
    contents = {p.name: json.loads(p.read_text()) for p in files if p.suffix == ".json"}
    contents["policy.yaml"] = {"rules": [{"score": {"rel_l1": 0.0321}}]}
    return folder, contents, Page((folder / "index.html").read_text())


def looked_up(contents: dict[str, Any], place: str) -> Any:
    """The value at "file#/a/0/b"."""
    name, _, pointer = place.partition("#")
    value = contents[name]
    for step in pointer.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        value = value[int(step)] if isinstance(value, list) else value[step]
    return value


def places(mark: dict[str, str], contents: dict[str, Any], key: str = "data-from") -> list[Any]:
    """The values that a mark names. File names hold no blank, but keys do: a new place begins with a file's name."""
    names = "|".join(map(re.escape, contents))
    return [looked_up(contents, p) for p in re.split(rf" (?=(?:{names})#)", mark[key])]


def shown(text: str) -> tuple[float, float]:
    """A number as it is printed, and half a unit of its last digit."""
    digits = text.strip().rstrip("%").replace(",", "")
    mantissa, _, power = digits.partition("e")
    slack = 0.5 * 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
    scale = 0.01 if text.strip().endswith("%") else 1.0
    return float(digits) * scale, slack * scale


def test_every_number_is_recomputed_from_its_file(made):
    _, contents, page = made
    checked = 0
    for _, mark, text in page.marks:
        if mark["data-rule"] in ("list", "map"):
            continue
        v = places(mark, contents)
        if mark["data-rule"] == "value":
            (expected,) = v
        elif mark["data-rule"] == "ratio":
            expected = v[0] / v[1]
        else:
            assert mark["data-rule"] == "implied_share"
            ours_ms, exact_ms, ours_op, exact_op = v
            expected = (1 - ours_ms / exact_ms) / (1 - exact_op / ours_op)
        value, slack = shown(text)
        assert abs(value - expected) <= max(1.01 * slack, 1e-3 * abs(expected)), mark
        checked += 1
    assert checked > 300
    assert {m["data-rule"] for _, m, _ in page.marks} == {"value", "ratio", "implied_share", "list", "map"}


def test_no_cell_holds_a_number_without_a_source(made):
    for attributes, text, has_source in made[2].cells:
        if "number" in attributes["class"].split() and not has_source:
            assert not re.search(r"\d", text), text


def test_the_page_opens_with_what_a_person_can_repeat(made):
    """Gain, cost and card first, pictures next; what takes long to read is folded; a CPU's seconds are no speed."""
    folder, contents, _ = made
    text = (folder / "index.html").read_text()
    order = re.findall(r'<section id="(\w+)">', text)
    assert order[:3] == ["summary", "pictures", "accounting"], order
    folded = [
        name
        for name, body in re.findall(r'<section id="(\w+)">(.*?)</section>', text, re.DOTALL)
        if "<details>" in body
    ]
    assert folded == order[order.index("quality") :]
    head = text[text.index('id="summary"') : text.index('id="pictures"')]
    wan = next(v for v in contents["models_h200.json"].values() if isinstance(v, dict) and "Wan" in v.get("model", ""))
    gain = wan["sdpa_default"]["ms"] / wan["qk_int8_pv_fp8"]["ms"]
    assert f">{gain:.2f}<" in head and "NVIDIA H200" in head and "SmolLM2" in head
    assert '<img class="sheet"' in text and "data:image/png;base64," in text
    tables = text[text.index('id="quality"') :]
    quick = tables[tables.index("SmolLM2") :]
    assert "time, to unpatched" not in quick[: quick.index("</table>")]


def test_accounting_tells_kernel_call_and_model_apart(made):
    _, contents, page = made
    wan = contents["models_h200.json"]["wan"]
    row = next(r for r in contents["kernels_h200.json"]["rows"]
               if (r["head_dim"], r["is_causal"], r["kv_len"]) == (128, False, 32768))  # fmt: skip
    expected = [
        row["sage2_kernel"] / row["sdpa_default"],
        row["sage2_op"] / row["sdpa_default"],
        wan["sdpa_default"]["ms"] / wan["qk_int8_pv_fp8"]["ms"],
    ]
    charts = [[m for t, m in svg if t == "rect"] for svg in page.svgs]
    ours = [[m["data-shown"] for m in c] for c in charts if len(c) == 3 and "/wan/" in c[2]["data-from"]]
    assert ours == [[f"{v:.2f}" for v in expected]]


def test_marks_stand_where_their_values_say(made):
    """Bars are proportional, points of one chart keep their order, steps of a line are linear in their values."""
    _, contents, page = made
    bars = points = lines = 0
    for svg in page.svgs:
        rects = [(places(m, contents), float(m["width"])) for t, m in svg if t == "rect"]
        for v, width in rects:
            largest = max(rects, key=lambda r: r[1])
            value, top = (x[0] / x[1] if len(x) == 2 else x[0] for x in (v, largest[0]))
            assert width == pytest.approx(largest[1] * value / top, abs=0.2)
            bars += 1
        circles = [(places(m, contents)[0], float(m["cy"])) for t, m in svg if t == "circle"]
        assert [c for _, c in sorted(circles)] == sorted((c for _, c in circles), reverse=True)
        across = [(v[0] / v[-1] if len(v) > 1 else v[0], float(m["cx"]))
                  for t, m in svg if t == "circle" for v in [places(m, contents, "data-x-from")]]  # fmt: skip
        assert [x for _, x in sorted(across)] == sorted(x for _, x in across)
        points += len(circles)
        for tag, mark in svg:
            if tag == "path" and mark["data-rule"] == "list":
                (values,) = places(mark, contents)
                heights = [float(y) for y in re.findall(r" ([\d.]+)h", mark["d"])]
                assert len(heights) == len(values)
                low, high = values.index(min(values)), values.index(max(values))
                slope = (heights[high] - heights[low]) / (values[high] - values[low])
                for value, height in zip(values, heights, strict=True):
                    assert height == pytest.approx(heights[low] + slope * (value - values[low]), abs=0.15)
                lines += 1
    assert bars > 8 and points > 15 and lines >= 4


def test_maps_are_the_stored_numbers(made):
    _, contents, page = made
    maps = [m for t, m, _ in page.marks if t == "image"]
    assert len(maps) >= 8
    for mark in maps:
        rows = [[int(v) for v in line.split()] for line in looked_up(contents, mark["data-from"])]
        image = Image.open(io.BytesIO(base64.b64decode(mark["href"].partition(",")[2])))
        assert image.size == (len(rows[0]), len(rows))
        levels = list(image.getdata())
        for value, level in zip((v for row in rows for v in row), levels, strict=True):
            share = min(max(value * 1e-5, 1e-4), 1.0)
            assert abs(level - 255 * (math.log10(share) + 4) / 4) <= 1


def test_the_page_needs_no_network_and_runs_no_script(made):
    folder, _, _ = made
    text = (folder / "index.html").read_text()
    assert not re.search(r"<script|<link|<iframe|@import|https?://|url\((?!#)", text)
    assert "@media print" in text and "prefers-color-scheme: dark" in text
    assert "<b>large</b>" not in text and "&lt;b&gt;large&lt;/b&gt; keys" in text
    assert len(text) < 1_500_000


def test_the_markdown_twin_holds_the_same_tables(made):
    folder, _, page = made
    twin = (folder / "report.md").read_text()
    for tag, _, text in page.marks:
        if tag == "span":
            assert text in twin
    assert "large keys \\| a bar" in twin


def test_a_report_needs_no_torch():
    code = (
        "import sys, sage_patch.evaluation.report; assert not {'torch', 'transformers', 'diffusers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("text, said", [
    ("{", "is neither JSON nor"), ("[1]", "holds a list"), ('{"surprise": 1}', "is nothing that a report knows"),
    ('{"what": "evaluate", "kind": "text", "plan": [], "complete": false}', "is of an evaluation that was stopped"),
    ('{"schema": 1, "kind": "text", "plan": [], "quality": []}', "has the keys of an earlier release; python scripts"),
])  # fmt: skip
def test_a_file_that_is_no_result_is_refused(tmp_path, text, said):
    (tmp_path / "x.json").write_text(text)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "x.json"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2 and said in done.output and not (tmp_path / "out").exists()


def test_a_missing_file_and_one_given_twice_are_refused(tmp_path):
    for files, said in ((["absent.json"], "No such file"), ([str(FILES[2])] * 2, "is given twice")):
        done = CliRunner().invoke(app, ["report", *files, "--out", str(tmp_path)])
        assert done.exit_code == 2 and said in done.output


def test_the_committed_page_is_of_the_committed_results():
    """Stale: run `bash scripts/report.sh`."""
    page = Page((ROOT / "docs/report/index.html").read_text())
    sources = [(t, page.cells[i + 2][1]) for i, (_, t, _) in enumerate(page.cells) if re.match(r"(docs|configs)/", t)]
    assert len(sources) > 4
    for name, digest in sources:
        assert sha256((ROOT / name).read_bytes()).hexdigest().startswith(digest), (
            f"{name} changed: run bash scripts/report.sh"
        )


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_nothing_is_wider_than_a_phone_or_a_desktop_window(made, tmp_path):
    """In headless Chromium: the page itself never scrolls sideways, and text is never below 8 px."""
    probe = """<script>addEventListener("load", () => {
      const small = [...document.querySelectorAll("svg text")].filter(t => t.getBoundingClientRect().height < 8.5);
      document.body.innerHTML = `width ${document.documentElement.scrollWidth} of ${innerWidth}, small ${small.length}`;
    })</script>"""
    text = (made[0] / "index.html").read_text()
    for width in (390, 1280):
        # headless windows have a smallest width of their own, so the page stands in a frame of the wanted one
        inner = text.replace("</body>", probe + "</body>")
        (tmp_path / "inner.html").write_text(inner)
        frame = f'<iframe style="border:0;width:{width}px;height:900px" src="inner.html" onload="setTimeout(() => {{' \
                'document.title = frames[0].document.body.innerText }, 50)"></iframe>'  # fmt: skip
        (tmp_path / "outer.html").write_text(f"<title>none</title><body style='margin:0'>{frame}</body>")
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
                   "--virtual-time-budget=3000", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
                   str(tmp_path / "outer.html")]  # fmt: skip
        dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        found = re.search(r"width (\d+) of (\d+), small (\d+)", dom)
        assert found, dom[:300]
        assert int(found[1]) <= int(found[2]) == width and int(found[3]) == 0
