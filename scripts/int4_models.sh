#!/usr/bin/env bash
# INT4 recipes on the small language model that comes along, with and without smoothing and rotation, in the paper's order: the record
# behind the table in docs/quality.md. Some minutes on two cores, in an environment with the package.
#   bash scripts/int4_models.sh
set -euo pipefail
cd "$(dirname "$0")/.."
ways=""
for base in qk_int4_pv_fp8 qk_int4_pv_fp16; do
  for rotate in none hadamard; do
    for smooth in none k q qk; do ways+="\"$base:smooth=$smooth,rotate=$rotate\","; done
  done
done
sage-patch run configs/tiny.yaml --set "compare=[${ways%,}]" --output runs/int4_lm_tiny_cpu
cp runs/int4_lm_tiny_cpu/results.json docs/results/int4_lm_tiny_cpu.json
