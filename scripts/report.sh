#!/usr/bin/env bash
# Makes docs/report from the results that this repository carries. Run it whenever one of them changes.
# Needs an environment with the package, such as the one of scripts/test.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
shopt -s nullglob
results=docs/results
exec sage-patch report \
    $results/quickstart_cpu.json $results/quickstart_video_cpu.json \
    $results/evaluate_*.json $results/calibrate_*.json \
    $results/kernels_h200.json $results/models_h200.json $results/ablation.json $results/anatomy.json \
    $results/quickstart_image_cpu.png docs/calibrated/*.yaml --out docs/report
