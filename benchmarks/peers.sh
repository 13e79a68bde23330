#!/usr/bin/env bash
# Plain decoding and drafts beside llama.cpp, on the widened target, the demo and SmolLM2-135M-Instruct.
#
#     bash benchmarks/peers.sh FOLDER
#
# `python -m benchmarks.gguf_files FOLDER` writes what is measured: the checkpoints, and the same weights as GGUF.
# llama-cpp-python must be installed, and llama-server on the PATH. Results go to benchmarks/results/peers_*.json.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$root
cd "$1"
bench() { # NAME KIND ARGUMENTS
  name=$1 kind=$2
  shift 2
  python -m specdec bench "$kind" --ignore-eos --max-tokens 64 --output "$root/benchmarks/results/peers_$name.json" "$@"
}
llama() { echo "--peer llama.cpp:gguf=gguf/$1-bf16.gguf --peer llama.cpp:gguf=gguf/$1-f16.gguf"; }
server() { echo "--peer llama-server:gguf/$1-eagle3-$2.gguf:gguf=gguf/$1-$2.gguf,tokens=3"; }
chain=adaptive_drafts=false,depth=3,branching=1,nodes=3,min_reach=0

# shellcheck disable=SC2046
bench wide latency --model wide/target --draft wide/eagle3 --draft wide/eagle3:adaptive_drafts=false \
  --draft wide/eagle3:$chain $(llama wide) $(server wide bf16) $(server wide f16) --num-prompts 3 --rounds 2
# shellcheck disable=SC2046
bench wide_batch8 throughput --model wide/target --draft wide/eagle3 $(llama wide) --num-prompts 4 --rounds 2
# shellcheck disable=SC2046
bench demo latency --draft eagle --draft eagle:adaptive_drafts=false $(llama demo) $(server demo bf16) \
  --num-prompts 8 --rounds 5
# shellcheck disable=SC2046
bench demo_batch8 throughput --draft eagle $(llama demo) --num-prompts 4 --rounds 5
# shellcheck disable=SC2046
bench smollm2 latency --model smollm2 --draft ngram $(llama smollm2) --num-prompts 3 --rounds 2
# shellcheck disable=SC2046
bench smollm2_batch8 throughput --model smollm2 $(llama smollm2) --num-prompts 4 --rounds 2
# Time to the first token of prompts of 512 tokens.
cp "$root/benchmarks/prompts/gsm8k-512.jsonl" .
# shellcheck disable=SC2046
bench wide_first latency --model wide/target --dataset gsm8k-512.jsonl --max-tokens 2 \
  $(llama wide) --num-prompts 4 --rounds 3
# With n-gram drafts on both sides; then in float32, as on processors that do not multiply bfloat16.
q4_1="--model smollm2-q4_1.gguf --draft ngram --num-prompts 4 --rounds 2"
q4_1_peers="--peer llama.cpp:gguf=smollm2-q4_1.gguf --peer llama.cpp:ngram:gguf=smollm2-q4_1.gguf"
# shellcheck disable=SC2086
bench smollm2_q4_1 latency $q4_1 $q4_1_peers
# shellcheck disable=SC2086
bench smollm2_q4_1_float32 latency --dtype float32 $q4_1 $q4_1_peers
