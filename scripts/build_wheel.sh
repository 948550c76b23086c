#!/usr/bin/env bash
# Makes the Linux wheel, py3-none-manylinux_2_28_x86_64: the package with one compiled library for every card, which needs
# no compiler, and no torch or Python of one version. Then the wheel is unpacked and loaded without anything else.
#   bash scripts/build_wheel.sh [FOLDER] [PYTHON ...]     FOLDER: dist; PYTHON: more interpreters to load it with
# Needs nvcc, g++, binutils and the packages of this checkout (scripts/test.sh makes a .venv); four core-minutes where
# the library is not in the cache. `pip wheel --no-deps .` still makes the plain wheel, which compiles at the first call.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-dist}")
[ $# -gt 0 ] && shift
python=${PYTHON:-python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A copy, so that neither the library nor setuptools' folders stay in the checkout.
mkdir "$work/tree" "$work/wheel"
cp -r pyproject.toml README.md LICENSE sage_patch cuda_kernels configs "$work/tree"
rm -f "$work"/tree/sage_patch/kernels/*.so
"$python" scripts/wheel_library.py "$work/tree/sage_patch/kernels"
"$python" -m pip wheel -q --disable-pip-version-check --no-deps -w "$work/wheel" \
    --config-settings=--build-option=--plat-name=manylinux_2_28_x86_64 "$work/tree"
wheel=$(echo "$work"/wheel/*-py3-none-manylinux_2_28_x86_64.whl)

"$python" -m zipfile -e "$wheel" "$work/bare"
for each in "$python" "$@"; do
    "$each" -I -S scripts/load_library.py "$work"/bare/sage_patch/kernels/libsage2-*.so
done
mkdir -p "$out"
cp "$wheel" "$out"
echo "$out/$(basename "$wheel"): $(stat -c %s "$wheel") bytes"
