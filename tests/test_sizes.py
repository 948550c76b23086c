"""What keeps the code readable: files of at most 500 lines, functions of at most 120, and nothing that only one
machine has.

What is longer for now stands below with its reason. The lists only shrink: an entry that is no longer needed fails.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES, MOST_FUNCTION_LINES = 500, 120
LONGER_FILES: dict[str, str] = {}
LONGER_FUNCTIONS = {
    "cuda_kernels/pages_append.cu:append": "a kernel of few phases over one scratch in shared memory",
}


def files(*suffixes: str) -> list[Path]:
    """Files of the repository: what git tracks, or everything of a copy without git but environments and runs."""
    told = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    names = told.stdout.splitlines() if told.returncode == 0 else []
    found = [ROOT / name for name in names] or [
        path
        for top in ("sage_patch", "cuda_kernels", "tests", "scripts", "docs", "configs")
        for path in ROOT.glob(f"{top}/**/*")
    ]
    return sorted(path for path in found if path.suffix in suffixes and path.is_file())


def python_functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function, decorators and docstring included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield node.name, (node.end_lineno or first) - first + 1


def cuda_functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function of a file as clang-format leaves it: from where its declaration starts a line to
    the brace that starts one."""
    head, first = "", 0
    for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("}"):
            told = re.sub(r"__launch_bounds__\(.*?\)(?=\s+\w+\()|__attribute__\(\(.*?\)\)|^template<.*?> ", "", head)
            name = re.search(r"(\w+)\(", told)
            if name and not re.match(r"(namespace|struct|enum|extern|union)\b", told):
                yield name[1], n - first + 1
            head = ""
        elif re.match(r"[A-Za-z_]", line):
            if not re.match(r"template<.*>$", head):  # a template's own line belongs to what follows
                head, first = "", n
            head = "" if line.endswith("}") else f"{head} {line}".strip()
        elif head and "{" not in head:
            head = f"{head} {line.strip()}"


def too_long() -> tuple[dict[str, int], dict[str, int]]:
    """Files and functions past their limit, with their lines."""
    long_files, long_functions = {}, {}
    for path in files(".py", ".cu", ".cuh", ".h"):
        shown, lines = path.relative_to(ROOT).as_posix(), len(path.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES:
            long_files[shown] = lines
        for name, length in python_functions(path) if path.suffix == ".py" else cuda_functions(path):
            if length > MOST_FUNCTION_LINES:
                long_functions[f"{shown}:{name}"] = length
    return long_files, long_functions


def test_files_and_functions_are_short() -> None:
    long_files, long_functions = too_long()
    assert set(long_files) == set(LONGER_FILES), f"files of more than {MOST_LINES} lines, or no longer: {long_files}"
    found, known = set(long_functions), set(LONGER_FUNCTIONS)
    assert found == known, f"functions of more than {MOST_FUNCTION_LINES} lines, or no longer: {long_functions}"


CUDA = """namespace n {
struct S {
  int a;
};
template<int D>
void f(int a,
       int b) {
  if (a) {
  }
}
__global__ void __launch_bounds__(most(8), 1)
    kernel(int a) {
  const int b = a;
}
int one(int a) { return a; }
}  // namespace n
"""


def test_lengths_are_found(tmp_path: Path) -> None:
    """The two readers count what they should."""
    (tmp_path / "a.py").write_text("@dec\ndef f():\n    def g():\n        pass\n\n    return g\n")
    assert sorted(python_functions(tmp_path / "a.py")) == [("f", 6), ("g", 2)]
    (tmp_path / "a.cu").write_text(CUDA)
    assert list(cuda_functions(tmp_path / "a.cu")) == [("f", 6), ("kernel", 4)]


def test_no_file_names_a_folder_of_one_machine() -> None:
    """Recorded results may say what their machine's environment was; nothing else depends on where it was written."""
    folders = re.compile(r"(?<![\w.~])/(?:work|root|home|Users|mnt|scratch)/\w+|(?<![\w.])/tmp/\w+")
    found = []
    for path in files(".py", ".md", ".yaml", ".toml", ".sh", ".cu", ".cuh", ".h"):
        for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if folders.search(line):
                found.append(f"{path.relative_to(ROOT)}:{n}: {line.strip()}")
    assert not found, found
