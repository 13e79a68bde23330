#!/usr/bin/env bash
# The first day on a GPU, in stages of at most nine minutes each (docs/gpu.md):
#
#   bash benchmarks/gpu_day.sh all               every stage, one after the other
#   bash benchmarks/gpu_day.sh 4                 one by its number, or by its name: equality
#   bash benchmarks/gpu_day.sh all --seconds 590 in ten minutes: the stages share them
#   bash benchmarks/gpu_day.sh all --rehearse    at tiny sizes on a CPU, in Triton's interpreter
#
# Environment: OUT is the folder for JSON and logs.tar, PYTHON the interpreter; others are in docs/gpu.md.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m benchmarks.gpu.day "$@"
