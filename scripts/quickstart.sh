#!/usr/bin/env bash
# Makes .venv, installs sage-patch and a real language model, and runs the main job on it:
# generate and measure SageAttention2's numerics beside the unpatched model. Options go to `sage-patch run`.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/make_venv.sh

make_venv quickstart
sage-patch run configs/quickstart.yaml "$@"
