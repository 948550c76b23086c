#!/usr/bin/env bash
# Makes docs/calibrated and the records of its runs in docs/results again, for the card that is named or, without one,
# hopper. About 15 minutes on two cores; what is measured is kept in runs/, so that an interrupted call goes on.
#   bash scripts/calibrate.sh [lm_tiny | flux | wan | smollm2 ...]     all four by default
set -euo pipefail
cd "$(dirname "$0")/.."
calibrate() { # NAME, run file without its ending, what sage-patch calibrate is given besides
  local name=$1 run_file=$2
  shift 2
  sage-patch calibrate "configs/$run_file.yaml" "$@" --out "docs/calibrated/$name.yaml"
  cp "runs/$run_file/calibrate.json" "docs/results/calibrate_$name.json"
}
for name in "${@:-lm_tiny flux wan smollm2}"; do
  for one in $name; do
    case $one in
      lm_tiny) calibrate lm_tiny tiny --target 'kl<=0.0016' ;;
      flux) calibrate flux quickstart_image --target 'psnr>=42' ;;
      wan) calibrate wan quickstart_video --target 'psnr>=53' --set 'task.prompts=[deathmatch]' ;;
      smollm2) calibrate smollm2 quickstart --target 'kl<=0.0012' --set task.windows=8 --set task.max_new_tokens=24 ;;
      *) echo "no calibrated policy is called $one" >&2 && exit 2 ;;
    esac
  done
done
