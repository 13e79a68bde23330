#!/usr/bin/env bash
# Train the built-in demo model and its heads: runs/demo.sh DATA [OUT]
#
# DATA holds sgd-train.jsonl and gsm8k-train.jsonl, one object with `messages` per line. The sources of Python's standard
# library come from the Python that runs this. The same command resumes a killed stage.
set -euo pipefail
data=$(realpath "${1:?usage: runs/demo.sh DATA [OUT]}")
out=$(realpath -m "${2:-$(dirname "$0")/../build/demo}")
target=$out/target
cd "$(dirname "$0")/.."

python runs/train_demo_target.py --data "$data" --out "$target" --compile

python -m specdec.train_eagle.regenerate --model "$target" --limit 9000 --temperature 0 0 1 \
  --data "$data/sgd-train.jsonl" --out "$out/answers-sgd.jsonl"
python -m specdec.train_eagle.regenerate --model "$target" --limit 8000 --temperature 0 0 1 \
  --data "$data/gsm8k-train.jsonl" --out "$out/answers-gsm8k.jsonl"
python -m specdec.train_eagle.prepare --model "$target" --max-length 1024 \
  --data "$out/answers-sgd.jsonl" "$out/answers-gsm8k.jsonl" --out "$out/prepared"

for kind in eagle eagle3 dspark; do
  head=$out/$kind
  python -m specdec.train_eagle.train --config "runs/demo-$kind.yaml" \
    --model "$target" --data "$out/prepared" --out "$head"
  # Further runs with their own learning rate schedules, each from the weights of the one before.
  runs=("--epochs 1 --lr 0.0008 --seed 7")
  notes=runs/demo-data.md
  if [ "$kind" = dspark ]; then
    rnn="--markov-kind rnn"
    runs=("--epochs 2 --lr 0.001 --seed 7" "$rnn --epochs 3 --lr 0.0012 --seed 11" "$rnn --epochs 1 --lr 0.0006 --seed 12")
    notes=runs/demo-dspark-data.md
  fi
  for more in "${runs[@]}"; do
    # shellcheck disable=SC2086
    python -m specdec.train_eagle.train --config "runs/demo-$kind.yaml" \
      --model "$target" --data "$out/prepared" --out "$head-more" --start "$head/run" $more
    head=$head-more
  done
  python -m specdec.train_eagle.evaluate --model "$target" --draft "$head" --out "$head/evaluation" \
    --data sgd=benchmarks/prompts/sgd-eval.jsonl gsm8k=benchmarks/prompts/gsm8k-eval.jsonl
  python -m specdec.train_eagle.export --model "$target" --draft "$head" --out "$out/export/$kind" \
    --evaluation "$head/evaluation/evaluation.json" --notes "$notes" \
    --base-model specdec/demo/target --licence cc-by-sa-4.0
done

echo "Ship: copy config, tokenizer and safetensors files of $target and of a head in $out/export to specdec/demo/,"
echo "of eagle without embed_tokens.weight, which is the target's"
