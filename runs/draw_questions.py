"""Let a chat model write questions to itself: prompts for training its draft heads, where no data set is at hand.

    python runs/draw_questions.py --model MODEL --number 4000 --out questions.jsonl

The chat template up to the place where a user's message begins is a prompt as any other; what a chat model samples
after it reads like what its users ask (Magpie, Xu et al. 2024, arXiv 2406.08464, section 2). Some of the prompts go on
with the first words of a kind of task, so that translations, summaries and questions for facts occur too.

Writes one conversation per line, with an empty answer for `specdec.train_eagle.regenerate` to fill in. Questions that
do not end within `--max-tokens`, that are short or that came before are left out.
"""

import argparse
import json
import random
from pathlib import Path

from specdec import LLM, SamplingParams
from specdec.models.tokenizer import load_pretrained

# The first words of a message and their share of the prompts; the rest begins freely. No space at their end: most
# tokens bring one along.
OPENINGS = {
    "Summarize:": 0.10,
    "Translate German to English:": 0.08,
    "Who": 0.04,
    "What": 0.05,
    "When": 0.03,
    "Where": 0.03,
    "Write": 0.06,
    "Explain": 0.04,
}
MARK = "<the user's message>"
LEAST_CHARACTERS = 12


def begun_prompts(model: Path, number: int, seed: int) -> list[tuple[str, str]]:
    """Return `number` pairs of a message's first words, or "", and the whole prompt up to them."""
    tokenizer = load_pretrained(model)
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    before, _, _ = str(text).partition(MARK)
    draw = random.Random(seed)
    shares = [*OPENINGS.values(), 1 - sum(OPENINGS.values())]
    return [(opening, before + opening) for opening in draw.choices([*OPENINGS, ""], shares, k=number)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a chat model")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--number", type=int, default=4000, help="questions to draw; some are left out")
    parser.add_argument("--max-tokens", type=int, default=256, help="most tokens of a question")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    llm = LLM(args.model, max_num_seqs=64, max_model_len=2048)
    assert llm.tokenizer is not None
    begun = begun_prompts(args.model, args.number, args.seed)
    params = [
        SamplingParams(temperature=1.0, top_p=0.95, max_tokens=args.max_tokens, seed=args.seed + number)
        for number in range(args.number)
    ]
    # The template writes the special tokens itself.
    outputs = llm.generate(
        [{"prompt_token_ids": llm.tokenizer.encode(prompt, add_special_tokens=False)} for _, prompt in begun], params
    )
    questions: dict[str, None] = {}
    for (opening, _), output in zip(begun, outputs, strict=True):
        question = (opening + output.outputs[0].text).strip()
        if output.outputs[0].finish_reason == "stop" and len(question) >= LEAST_CHARACTERS:
            questions[question] = None
    with args.out.open("w", encoding="utf-8") as file:
        for question in questions:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "…"}]
            file.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
    print(f"{len(questions):,} of {args.number:,} questions in {args.out}")


if __name__ == "__main__":
    main()
