"""The README as a demanding newcomer reads it: what the first screen must hold, and that its examples run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import sage_patch
from sage_patch.policy import Policy

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_SCREEN = "\n".join(README.splitlines()[:40])


def test_the_first_screen_names_cards_install_an_example_and_a_gain_with_its_cost() -> None:
    for card in ("H100", "H200", "RTX 40", "RTX 50", "RTX 30", "A100", "L40S", "B200"):
        assert card in FIRST_SCREEN, card
    assert re.search(r"^pip install ", FIRST_SCREEN, re.MULTILINE)
    assert "sage_patch.apply(" in FIRST_SCREEN and "from_pretrained(" in FIRST_SCREEN
    assert re.search(r"\d\.\d\d x", FIRST_SCREEN) and "rel. L1" in FIRST_SCREEN


def test_the_gains_of_the_first_screen_are_those_of_the_recorded_run() -> None:
    """No gain is claimed that the table below it contradicts."""
    table = README[README.index("<!-- table: models -->") :]
    claimed = dict(re.findall(r"(Wan-14B|CogVideoX-5B|Flux) (\d\.\d\d) x", FIRST_SCREEN))
    assert claimed
    for model, gain in claimed.items():
        row = next(line for line in table.splitlines() if line.startswith("|") and model.split("-")[0] in line)
        assert f"| {gain} x |" in row, (model, gain, row)


def test_pages_that_the_readme_links_to_are_there() -> None:
    for page in re.findall(r"\]\(([\w./-]+)\)", README):
        assert (ROOT / page).exists(), page


def snippets() -> list[str]:
    return [s for s in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "import sage_patch" in s]


def test_examples_are_six_lines_and_are_python() -> None:
    assert len(snippets()) >= 3
    for snippet in snippets():
        assert len(snippet.strip().splitlines()) <= 7
        compile(snippet, "README.md", "exec")


@pytest.mark.parametrize("kind", ["wan", "flux"])
def test_the_policies_that_the_examples_name_are_there(kind: str) -> None:
    assert f'"{kind}"' in README
    assert isinstance(sage_patch.load_policy(kind), Policy)


def test_the_language_models_example_runs_on_a_tiny_model(tmp_path, monkeypatch) -> None:
    """With a tiny model in the hub's place, on whatever device there is."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tiny import text_model

    snippet = next(s for s in snippets() if "AutoModelForCausalLM" in s)
    text_model("llama").save_pretrained(tmp_path / "model")

    class Tokens(dict):
        def to(self, device: str) -> dict:
            return dict(self)

    real = AutoModelForCausalLM.from_pretrained
    wanted: dict = {}

    def load(name: str, **options: object) -> torch.nn.Module:
        wanted.update(options)
        options.pop("device_map")
        return real(tmp_path / "model", **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    ids = torch.randint(3, 99, (1, 300))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: lambda text, **_: Tokens(input_ids=ids))
    (tmp_path / "long.txt").write_text("a text")
    monkeypatch.chdir(tmp_path)
    before = sage_patch.stats()["calls"]
    exec(snippet, {})
    assert wanted["attn_implementation"] == "sage2" and sage_patch.stats()["calls"] > before


def test_the_quickstart_that_the_table_is_of_is_the_full_one() -> None:
    run = json.loads((ROOT / "docs" / "results" / "quickstart_cpu.json").read_text())
    assert run["config"]["task"]["windows"] == 16 and len(run["rows"]) >= 4
    script = (ROOT / "scripts" / "quickstart.sh").read_text()
    assert "--full" in script and "--full" in README
