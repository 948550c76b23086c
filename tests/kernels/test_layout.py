"""What Python packs is read back in C by its name: every field of both structs, every number. Needs gcc."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sage_patch.kernels import build, library, pages
from sage_patch.kernels.structs import CStruct

STRUCTS = {
    "Sage2Args": ("sage2.h", (library.FACTS, library.POINTERS), library.SIZE),
    "Sage2Pages": ("sage2_pages.h", (pages.CALL, pages.PLACE), pages.SIZE),
}


def fields_of(struct: str, header: str) -> list[tuple[str, int]]:
    """(name, elements) of every field of a C struct, in order."""
    text = re.sub(r"/\*.*?\*/", "", (build.source_dir() / header).read_text(), flags=re.S)
    body = re.search(rf"typedef struct {struct} \{{(.*?)\}} {struct};", text, re.S)
    assert body is not None
    found = [re.search(r"(\w+)\s*(?:\[(\d+)\])?\s*$", part) for line in body[1].split(";") for part in line.split(",")]
    return [(m[1], int(m[2] or 1)) for m in found if m is not None]


def run_c(folder: Path, source: str, *arguments: Path) -> list[list[str]]:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (folder / "main.c").write_text("#include <stdio.h>\n" + source)
    command = [compiler, "-I", build.source_dir(), "main.c", "-o", "main"]
    subprocess.run(command, cwd=folder, check=True)  # type: ignore[arg-type]
    done = subprocess.run([folder / "main", *arguments], capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


def values(packs: tuple[CStruct, ...]) -> list[dict[str, Any]]:
    """A value of its own for every field and element."""
    number, found = 100, []
    for pack in packs:
        found.append({})
        for name, code in pack.fields.items():
            count, kind = int(code[:-1] or 1), code[-1]
            made = [float(number + i) + 0.5 if kind == "f" else number + i for i in range(count)]
            number += count
            found[-1][name] = tuple(made) if count > 1 else made[0]
    return found


@pytest.mark.parametrize("struct", STRUCTS)
def test_every_packed_field_is_read_back_by_its_name(struct: str, tmp_path: Path) -> None:
    header, packs, size = STRUCTS[struct]
    given = values(packs)
    data = b"".join(pack.pack(**fields) for pack, fields in zip(packs, given, strict=True))
    assert len(data) == size
    (tmp_path / "data").write_bytes(data)
    fields = fields_of(struct, header)
    reads = [f"{n}[{i}]" if count > 1 else n for n, count in fields for i in range(count)]
    prints = "".join(f'printf("{name} %.1f\\n", (double)NUMBER(s.{name}));' for name in reads)
    read = run_c(
        tmp_path,
        f'#include "{header}"\n'
        "static double of_pointer(const void *p) { return (double)(size_t)p; }\n"
        "#define NUMBER(x) _Generic((x), float: (x), uint32_t: (x), int32_t: (x), int64_t: (x), size_t: (x),"
        " default: 0) + _Generic((x), float: 0, uint32_t: 0, int32_t: 0, int64_t: 0, size_t: 0, default: POINTER(x))\n"
        "#define POINTER(x) of_pointer(*(void *const *)&(x))\n"
        f'int main(int n, char **a) {{ {struct} s; FILE *f = fopen(a[1], "rb");'
        f" if (fread(&s, 1, sizeof s, f) != sizeof s) return 1; {prints} return 0; }}",
        tmp_path / "data",
    )
    expected = {}
    for part in given:
        for name, value in part.items():
            each = {f"{name}[{i}]": v for i, v in enumerate(value)} if isinstance(value, tuple) else {name: value}
            expected |= {n: float(v) for n, v in each.items()}
    assert {name: float(value) for name, value in read} == expected
    assert [pack.unpack(pack.pack(**fields)) for pack, fields in zip(packs, given, strict=True)] == given


def test_every_number_of_the_header_is_the_packages(tmp_path: Path) -> None:
    kinds = ("BOOL", "FP16", "BF16", "FP32")
    expected = {f"SAGE2_{name}": value for name, value in library.FLAGS.items()}
    expected |= {f"SAGE2_ERR_{name}": value for name, value in library.ERRORS.items()}
    expected |= {f"SAGE2_MASK_{n}": v for n, v in zip(kinds, library.MASK_KINDS.values(), strict=True)}
    expected |= {f"SAGE2_{n}": v for n, v in zip(("FP16", "BF16"), library.DTYPES.values(), strict=True)}
    expected |= {f"SAGE2_PV_{name.upper()}": value for name, value in library.PV.items()}
    expected |= {"SAGE2_VERSION": library.VERSION, "SAGE2_OK": 0, "SAGE2_MASK_NONE": 0}
    header = (build.source_dir() / "sage2.h").read_text()
    named = set(re.findall(r"\b(SAGE2_[A-Z0-9_]+)(?:\s*=\s*\d+|(?= \d+$))", header, re.MULTILINE))
    assert named == set(expected)
    prints = "".join(f'printf("{name} %d\\n", {name});' for name in expected)
    read = run_c(tmp_path, f'#include "sage2.h"\nint main(void) {{ {prints} return 0; }}')
    assert {name: int(value) for name, value in read} == expected
