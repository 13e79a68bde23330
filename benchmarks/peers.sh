#!/usr/bin/env bash
# Plain decoding and drafts beside llama.cpp, OpenVINO and transformers: SmolLM2-135M-Instruct, the widened target and
# the demo.
#
#     bash benchmarks/peers.sh FOLDER SPEC_BENCH [NAME...]
#
# NAME: of results, to measure these alone.
# SPEC_BENCH is Spec-Bench's file. `python -m benchmarks.gguf_files FOLDER` writes the checkpoints, and the same weights
# as GGUF; optimum-intel exports FOLDER/{smollm2,smollm2-int8,smollm2-int4,wide,wide-eagle3}-ir as docs/benchmarks.md
# says. xllamacpp and openvino-genai must be installed, and llama-server, built on this machine, on the PATH. Results go
# to benchmarks/results/peers_*.json.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
usage="usage: benchmarks/peers.sh FOLDER SPEC_BENCH"
prompts=$(realpath "${2:?$usage}")
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
cd "${1:?$usage}"
# Results name files by these paths, so they are relative.
ln -sfn "$root/heads" heads
cp "$prompts" spec-bench.jsonl
cp "$root/benchmarks/prompts/gsm8k-512.jsonl" .
for kind in writing reasoning math coding translation qa math_reasoning extraction; do
  grep -m 1 "\"category\": \"$kind\"" spec-bench.jsonl
done > eight.jsonl
names=" ${*:3} "
bench() { # NAME KIND ARGUMENTS
  name=$1 kind=$2
  shift 2
  if [ "$names" != "  " ] && [[ $names != *" $name "* ]]; then return; fi
  python -m specdec bench "$kind" --ignore-eos --max-tokens 64 --output "$root/benchmarks/results/peers_$name.json" "$@"
}
llama() { echo "--peer llama-server:gguf=gguf/$1-bf16.gguf --peer llama-server:gguf=gguf/$1-f16.gguf"; }
server() { echo "--peer llama-server:gguf/$1-eagle3-$2.gguf:gguf=gguf/$1-$2.gguf,tokens=3"; }
head=heads/smollm2-135m-instruct-eagle3
chain=adaptive_drafts=false,depth=3,branching=1,nodes=3,min_reach=0

# shellcheck disable=SC2046
bench smollm2 latency --model smollm2 --draft $head,ngram --dataset spec-bench.jsonl --num-prompts 1 --rounds 2 \
  $(llama smollm2) --peer openvino:ir=smollm2-ir --peer openvino:ngram:ir=smollm2-ir --peer transformers
# shellcheck disable=SC2046
bench smollm2_batch8 throughput --model smollm2 --draft $head,ngram --dataset eight.jsonl --rounds 3 \
  $(llama smollm2) --peer openvino:ir=smollm2-ir --peer transformers
# The same weights in few bits, as GGUF, and as optimum-intel rounds them. llama.cpp of the source of llama-cpp-python
# 0.3.36, built for a processor with AMX, dies of its repacked form of such weights.
export LLAMA_ARG_REPACK=0
q8_0=smollm2-q8_0.gguf q4_1=smollm2-q4_1.gguf
bench smollm2_q8_0 latency --model $q8_0 --draft $head,ngram --dataset spec-bench.jsonl --num-prompts 1 --rounds 2 \
  --peer llama-server:gguf=$q8_0 --peer openvino:ir=smollm2-int8-ir
bench smollm2_q8_0_batch8 throughput --model $q8_0 --draft $head,ngram --dataset eight.jsonl --rounds 5 \
  --peer llama-server:gguf=$q8_0 --peer openvino:ir=smollm2-int8-ir
bench smollm2_q4_1 latency --model $q4_1 --draft $head,ngram --dataset spec-bench.jsonl --num-prompts 1 --rounds 2 \
  --peer llama-server:gguf=$q4_1 --peer xllamacpp:gguf=$q4_1 --peer openvino:ir=smollm2-int4-ir
bench smollm2_q4_1_batch8 throughput --model $q4_1 --draft $head,ngram --dataset eight.jsonl --rounds 5 \
  --peer llama-server:gguf=$q4_1 --peer openvino:ir=smollm2-int4-ir
unset LLAMA_ARG_REPACK
# shellcheck disable=SC2046
bench wide latency --model wide/target --draft wide/eagle3 --draft wide/eagle3:$chain \
  $(llama wide) $(server wide bf16) --peer openvino:ir=wide-ir --peer openvino:wide-eagle3-ir:ir=wide-ir,tokens=3 \
  --peer transformers --num-prompts 3 --rounds 2
# shellcheck disable=SC2046
bench wide_batch8 throughput --model wide/target --draft wide/eagle3 $(llama wide) --peer openvino:ir=wide-ir \
  --peer transformers --num-prompts 4 --rounds 2
# shellcheck disable=SC2046
bench demo latency --draft eagle $(llama demo) $(server demo bf16) --peer transformers --num-prompts 8 --rounds 5
# shellcheck disable=SC2046
bench demo_batch8 throughput --draft eagle $(llama demo) --peer transformers --num-prompts 4 --rounds 5
# Time to the first token of prompts of about 512 tokens.
first() { bench "$1_first" latency --dataset gsm8k-512.jsonl --max-tokens 2 --num-prompts 4 --rounds 3 "${@:2}"; }
# shellcheck disable=SC2046
first wide --model wide/target $(llama wide) --peer openvino:ir=wide-ir --peer transformers
# shellcheck disable=SC2046
first smollm2 --model smollm2 $(llama smollm2) --peer openvino:ir=smollm2-ir --peer transformers
export LLAMA_ARG_REPACK=0
first smollm2_q8_0 --model $q8_0 --peer llama-server:gguf=$q8_0 --peer openvino:ir=smollm2-int8-ir
first smollm2_q4_1 --model $q4_1 --peer llama-server:gguf=$q4_1 --peer openvino:ir=smollm2-int4-ir
