#!/usr/bin/env bash
# Train draft heads for SmolLM2-135M-Instruct on a small machine without a GPU: runs/smollm2.sh DATA [OUT]
#
# DATA holds gsm8k-train.jsonl and sgd-train.jsonl, one object per line. The model comes as a Python
# package, and writes most of its questions to itself. The stages, run one by one and the heads side by side, took two
# cores two hours. The same command resumes a killed stage. benchmarks/smollm2_heads.sh measures the heads.
set -euo pipefail
data=$(realpath "${1:?usage: runs/smollm2.sh DATA [OUT]}")
out=$(realpath -m "${2:-$(dirname "$0")/../build/smollm2}")
target=$out/target
cd "$(dirname "$0")/.."
mkdir -p "$out"

python -m benchmarks.smollm2 "$target"
if [ ! -f "$out/prompts.jsonl" ]; then
  python runs/draw_questions.py --model "$target" --number 3000 --max-tokens 200 --out "$out/questions.jsonl"
  python runs/text_questions.py --dialogues "$data/sgd-train.jsonl" --number 484 --out "$out/texts.jsonl"
  { head -n 2130 "$out/questions.jsonl"; cat "$out/texts.jsonl"; head -n 524 "$data/gsm8k-train.jsonl"; } > "$out/drawn.jsonl"
  mv "$out/drawn.jsonl" "$out/prompts.jsonl"
fi

python -m specdec.train_eagle.regenerate --model "$target" --data "$out/prompts.jsonl" --out "$out/answers.jsonl" \
  --temperature 0 0 1 --keep-cut --max-tokens 384 --max-model-len 2048 --max-num-seqs 64
python -m specdec.train_eagle.prepare --model "$target" --max-length 1024 --data "$out/answers.jsonl" --out "$out/prepared"

for kind in eagle3 dspark; do
  head=$out/$kind
  python -m specdec.train_eagle.train --config "runs/smollm2-$kind.yaml" --model "$target" --data "$out/prepared" \
    --features "$out/features-$kind" --out "$head"
  python -m specdec.train_eagle.evaluate --model "$target" --draft "$head" --out "$head/evaluation" --limit 16 \
    --data gsm8k=benchmarks/prompts/gsm8k-eval.jsonl sgd=benchmarks/prompts/sgd-eval.jsonl
  python -m specdec.train_eagle.export --model "$target" --draft "$head" --out "$out/smollm2-135m-instruct-$kind" \
    --evaluation "$head/evaluation/evaluation.json" --notes runs/smollm2-data.md \
    --base-model HuggingFaceTB/SmolLM2-135M-Instruct --licence cc-by-sa-4.0
done
