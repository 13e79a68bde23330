#!/usr/bin/env bash
# The demo's three heads side by side: speed over plain decoding beside the demo and the widened target.
#
#     bash benchmarks/heads.sh FOLDER [NAME]
#
# `python -m benchmarks.widen FOLDER` writes the widened checkpoints. Results go to benchmarks/results/NAME_*.json;
# NAME is "heads", or another one for another processor.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(realpath "$1")
wide=$(basename "$folder")
results=${2:-heads}
export PYTHONPATH=$root
# Results name checkpoints by these paths, so they are relative.
cd "$folder/.."
bench() { # PART KIND ARGUMENTS
  part=$1 kind=$2
  shift 2
  python -m specdec bench "$kind" --ignore-eos --max-tokens 64 --output "$root/benchmarks/results/${results}_$part.json" "$@"
}
widened="--model $wide/target --draft $wide/eagle3 --draft $wide/dspark --draft $wide/eagle"

# shellcheck disable=SC2086
bench wide latency $widened --num-prompts 3 --rounds 3
# shellcheck disable=SC2086
bench wide_temperature_1 latency $widened --temperature 1 --num-prompts 3 --rounds 2
# shellcheck disable=SC2086
bench wide_batch8 throughput $widened --num-prompts 4 --rounds 2

cd "$root"
demo="--draft eagle --draft dspark --draft specdec/demo/eagle"
# shellcheck disable=SC2086
bench demo latency $demo --num-prompts 8 --rounds 5
# shellcheck disable=SC2086
bench demo_batch8 throughput $demo --num-prompts 8 --rounds 5
