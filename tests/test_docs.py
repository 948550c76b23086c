"""What the documentation says is what the code and the recorded results say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from sage_patch.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("page", ["README.md", "docs/quantized_cache.md", "docs/policy.md"])
def test_tables_come_from_the_recorded_results_and_the_code(page):
    spec = importlib.util.spec_from_file_location("update_readme", ROOT / "scripts" / "update_readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (ROOT / page).read_text()
    assert ROOT / page in module.PAGES
    assert module.rewrite(text) == text, "stale: run python scripts/update_readme.py"


def test_every_recipe_is_documented():
    page = (ROOT / "docs" / "policy.md").read_text()
    for name in RECIPES:
        assert f"`{name}`" in page
