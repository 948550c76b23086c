"""Builds the library that the Linux wheel holds, for every card, and checks that it loads on any Linux of its tag.

    python scripts/wheel_library.py FOLDER

The tag manylinux_2_28 promises a C library no newer than 2.28. The linker of a newer system binds functions of pthread,
dl and rt to version 2.34, in which they moved into libc.so.6; each is still there under its old version, the same code
at the same address. So the library is linked against stand-ins of the three old libraries, which have nothing but those
names and versions, and at run time the real ones serve it, old or new.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from unittest import mock

from filelock import FileLock

from sage_patch.kernels.build import build_prebuilt, cache_dir

TAG = "manylinux_2_28_x86_64"
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}  # what the tag promises
MAY_NEED = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libstdc++.so.6", "libgcc_s.so.1",
            "ld-linux-x86-64.so.2"}  # fmt: skip
LARGEST = 25_000_000  # bytes of the library
_OLD_HOMES = {"pthread_": "libpthread.so.0", "sem_": "libpthread.so.0", "dl": "libdl.so.2", "shm_": "librt.so.1"}
_CHANGED = {"pthread_kill"}  # answers otherwise for a thread that has ended; CUDA's runtime is older than the change


def _run(*command: str | Path) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def stand_ins(folder: Path) -> list[Path]:
    """Libraries to link against, in `folder`: functions of libc.so.6 that moved, under their older version."""
    libc = Path(_run("gcc", "-print-file-name=libc.so.6").strip()).resolve()
    versions: dict[str, dict[str, str]] = defaultdict(dict)  # name -> version -> address
    for line in _run("objdump", "-T", libc).splitlines():
        found = re.match(r"([0-9a-f]{16}) .{6,8}F .* \(?GLIBC_([\d.]+)\)? +(\w+)$", line)
        if found:
            versions[found[3]][found[2]] = found[1]
    symbols: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))  # library -> version -> names
    for name, at in versions.items():
        newest = max(at, key=_number)
        old = [v for v in at if _number(v) <= NEWEST["GLIBC"] and (at[v] == at[newest] or name in _CHANGED)]
        home = next((library for prefix, library in _OLD_HOMES.items() if name.startswith(prefix)), None)
        if _number(newest) > NEWEST["GLIBC"] and old and home:
            symbols[home][max(old, key=_number)].append(name)
    made = []
    for library, by_version in sorted(symbols.items()):
        source, script, out = folder / f"{library}.c", folder / f"{library}.map", folder / library
        source.write_text("".join(f"void {n}(void) {{}}\n" for names in by_version.values() for n in names))
        script.write_text("".join(f"GLIBC_{v} {{ {'; '.join(names)}; }};\n" for v, names in by_version.items()))
        _run("gcc", "-shared", "-nostdlib", "-fno-builtin", f"-Wl,-soname,{library},--version-script={script}", source,
             "-o", out)  # fmt: skip
        made.append(out)
    return made


def problems(library: Path) -> list[str]:
    """Why the library does not fit the tag: libraries that it needs, versions of their functions, its size."""
    found = []
    for name in re.findall(r"\(NEEDED\).*\[(.+)\]", _run("readelf", "-d", library)):
        if name not in MAY_NEED:
            found.append(f"it needs {name}")
    for line in _run("objdump", "-T", library).splitlines():
        version = re.search(r"\(?(GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)\)? +(\S+)$", line)
        if version and _number(version[2]) > NEWEST[version[1]]:
            found.append(f"it needs {version[3]} of {version[1]}_{version[2]}")
    if library.stat().st_size > LARGEST:
        found.append(f"it has {library.stat().st_size} bytes, at most {LARGEST} are wanted")
    return found


def build(folder: Path) -> Path:
    """The library, built for every architecture (or found in the cache) and checked, in `folder`."""
    linked = cache_dir() / f"{TAG}-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]}"
    linked.mkdir(parents=True, exist_ok=True)
    with FileLock(linked / "lock"):
        flags = " ".join(f"-Xlinker={path}" for path in stand_ins(linked))
    with mock.patch.dict(os.environ, NVCC_PREPEND_FLAGS=flags):
        print(build_prebuilt([], folder), flush=True)
    (library,) = folder.glob("libsage2-*.so")
    wrong = problems(library)
    if wrong:
        raise SystemExit(f"{library} is not fit for {TAG}:\n" + "\n".join(wrong))
    return library


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    build(Path(sys.argv[1]))
