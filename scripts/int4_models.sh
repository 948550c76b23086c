#!/usr/bin/env bash
# INT4 recipes on the models that come along, with and without smoothing and rotation, in the paper's order: the records
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
for pair in tiny:int4_lm_tiny_cpu quickstart_image:int4_flux_cpu; do
  sage-patch run "configs/${pair%%:*}.yaml" --set "targets={}" --set "compare=[${ways%,}]" --output "runs/${pair##*:}"
  cp "runs/${pair##*:}/results.json" "docs/results/${pair##*:}.json"
done
