"""What the documentation says is what the code and the recorded results say."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from test_imports import MAY_IMPORT

from sage_patch.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]


_PAGES = ("speed", "quality", "quantized_cache", "policy", "results/kernels_h200", "results/targets_h200")


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{name}.md" for name in _PAGES)])
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


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading or mark of a page, without its head."""
    text = (ROOT / "docs" / page).read_text().split(heading, 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert lines is not None
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[0].splitlines()[2:]]


def test_the_floors_are_those_of_the_import_rules():
    floor: dict[str, int] = {}

    def of(part: str) -> int:
        if part not in floor:
            floor[part] = 1 + max((of(below) for below in MAY_IMPORT[part]), default=-1)
        return floor[part]

    shown = {
        part.rstrip("/"): int(number)
        for number, parts, _ in rows_of("architecture.md", "<!-- floors -->")
        for part in re.findall(r"`([^`]+)`", parts)
    }
    assert shown == {part: of(part) for part in MAY_IMPORT if part}


def defined_in(path: Path) -> set[str]:
    """The names that a file defines at its top level: of Python classes, functions and constants, of C functions."""
    text = path.read_text()
    if path.suffix != ".py":
        return set(re.findall(r"^[\w \*\"]+?\b(\w+)\([^;]*?\) \{", text, re.MULTILINE))
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


WHERE = rows_of("architecture.md", "## Where is ...?")


@pytest.mark.parametrize("what, file, name", WHERE, ids=[row[0] for row in WHERE])
def test_what_the_page_of_architecture_names_is_there(what, file, name):
    path = ROOT / file.strip("`")
    assert path.is_file(), f"{what}: {file} is not there"
    assert name.strip("`") in defined_in(path), f"{what}: {file} does not define {name}"


@pytest.mark.parametrize("page", ["architecture.md", "extending.md"])
def test_the_files_that_pages_for_developers_name_are_there(page):
    """By their path, or by the end of one where the page says the folder in words."""
    folders = ("sage_patch", "cuda_kernels", "scripts", "tests", "docs", "configs")
    known = [str(p.relative_to(ROOT)) for folder in folders for p in (ROOT / folder).rglob("*.*")] + ["CHANGELOG.md"]
    text = (ROOT / "docs" / page).read_text()
    named = set(re.findall(r"[\w/]+\.(?:py|cu|cuh|h|md)\b", text))
    assert len(named) > 20
    for name in named:
        assert "NAME" in name or any(f"/{path}".endswith(f"/{name}") for path in known), name


def test_the_page_of_architecture_answers_what_a_newcomer_asks():
    assert len(WHERE) >= 20
