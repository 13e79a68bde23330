#!/usr/bin/env bash
# The built-in demo model and its head, from the data: runs/demo.sh DATA [OUT]
#
# DATA holds sgd-train.jsonl and gsm8k-train.jsonl (`messages` a line); the Python standard library's sources come
# from the Python that runs this. About two hours on two cores. Killed, it goes on where it was.
set -euo pipefail
data=${1:?usage: runs/demo.sh DATA [OUT]}
out=${2:-build/demo}
cd "$(dirname "$0")/.."

python runs/train_demo_target.py --data "$data" --out "$out/target" --compile
python -m specdec.train_eagle.regenerate --model "$out/target" --limit 1800 --temperature 0 0 1 \
  --data "$data/sgd-train.jsonl" --out "$out/answers-sgd.jsonl"
python -m specdec.train_eagle.regenerate --model "$out/target" --limit 2944 --temperature 0 0 1 \
  --data "$data/gsm8k-train.jsonl" --out "$out/answers-gsm8k.jsonl"
python -m specdec.train_eagle.train --model "$out/target" --data "$out"/answers-*.jsonl \
  --features "$out/features" --out "$out/eagle" --epochs 11 --unroll 2 --token-weight 1

echo "Measure: python -m benchmarks.acceptance --model $out/target --draft $out/eagle"
echo "Ship:    copy config, tokenizer and safetensors files of both to specdec/demo/"
