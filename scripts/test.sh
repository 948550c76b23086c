#!/usr/bin/env bash
# Makes .venv and passes the tests: lint, format, types, then pytest. Options go to pytest.
# The exit status is pytest's, or 1 if only a check before it failed.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/make_venv.sh

make_venv test,quickstart,media
status=0
ruff check . || status=1
ruff format --check . || status=1
mypy || status=1
# One thread a process: two processes already fill a small machine.
OMP_NUM_THREADS=1 python -m pytest -n 2 "$@" || status=$?
exit "$status"
