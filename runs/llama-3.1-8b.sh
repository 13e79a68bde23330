#!/usr/bin/env bash
# Train an EAGLE-3 head for Llama-3.1-8B-Instruct on one GPU of 80 GB: runs/llama-3.1-8b.sh [OUT] [CONVERSATIONS]
#
# Not run by us as a whole: the stages are those of runs/demo.sh, the settings are from published recipes. It needs the
# network, access to the model on the Hugging Face hub (hf auth login), and about 50 GB of disk. CONVERSATIONS is the
# number taken from each data set. Generating the target's answers takes by far the longest. The same command resumes a
# killed stage.
set -euo pipefail
out=$(realpath -m "${1:-$(dirname "$0")/../build/llama-3.1-8b}")
conversations=${2:-200000}
target=$out/target
head=$out/eagle3
cd "$(dirname "$0")/.."
mkdir -p "$out"

hf download meta-llama/Llama-3.1-8B-Instruct --local-dir "$target" --exclude "original/*"

# As in the paper: ShareGPT and UltraChat, answered by the target.
python -m specdec.train_eagle.regenerate --model "$target" --limit "$conversations" --temperature 0 1 \
  --max-tokens 1024 --max-num-seqs 256 --data HuggingFaceH4/ultrachat_200k:train_sft --out "$out/answers-ultrachat.jsonl"
python -m specdec.train_eagle.regenerate --model "$target" --limit "$conversations" --temperature 0 1 \
  --max-tokens 1024 --max-num-seqs 256 --data Aeala/ShareGPT_Vicuna_unfiltered:train --out "$out/answers-sharegpt.jsonl"
python -m specdec.train_eagle.prepare --model "$target" --max-length 2048 \
  --data "$out/answers-ultrachat.jsonl" "$out/answers-sharegpt.jsonl" --out "$out/prepared"

python -m specdec.train_eagle.train --config runs/llama-3.1-8b-eagle3.yaml \
  --model "$target" --data "$out/prepared" --out "$head"
python -m specdec.train_eagle.evaluate --model "$target" --draft "$head" --out "$head/evaluation" --max-tokens 256 \
  --data sgd=benchmarks/prompts/sgd-eval.jsonl gsm8k=benchmarks/prompts/gsm8k-eval.jsonl
python -m specdec.train_eagle.export --model "$target" --draft "$head" --out "$out/export" \
  --evaluation "$head/evaluation/evaluation.json" \
  --base-model meta-llama/Llama-3.1-8B-Instruct --licence llama3.1
