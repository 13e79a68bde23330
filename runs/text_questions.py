"""Ask for summaries of dialogues and explanations of code: prompts with a text in them, for training a model's heads.

    python runs/text_questions.py --dialogues sgd-train.jsonl --number 600 --out texts.jsonl

A head for a model that serves long prompts has to learn when an answer copies from them. Two thirds of the prompts hold
a dialogue of the file (lines with `messages`), one third a function of Python's standard library.

Writes one conversation per line, with an empty answer for `specdec.train_eagle.regenerate` to fill in.
"""

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

DIALOGUE_TASKS = (
    "Summarize the following conversation.",
    "Summarize:",
    "Write a short report of this conversation in your own words.",
    "What does the user of this conversation want, and what do they get?",
    "Answer from the text alone: what was decided in this conversation?",
)
CODE_TASKS = (
    "Explain what this Python function does.",
    "Write a docstring for this function.",
    "Rewrite this function with comments that explain every step.",
    "What are the inputs and outputs of this function?",
)
# Characters of a text. With an answer after it, a conversation stays within the 1,024 tokens of training.
LEAST, MOST = 200, 1800


def dialogues(path: Path) -> list[str]:
    """Return the dialogues of a file as text, a line for each turn."""
    with path.open(encoding="utf-8") as file:
        conversations = [json.loads(line)["messages"] for line in file]
    return ["\n".join(f"{turn['role'].title()}: {turn['content']}" for turn in turns) for turns in conversations]


def functions() -> Iterator[str]:
    """Yield the source of each function of the standard library's modules, in their order."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                yield dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dialogues", type=Path, required=True, help="JSONL file of conversations")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--number", type=int, default=600, help="prompts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    draw = random.Random(args.seed)
    about_code = args.number // 3
    with args.out.open("w", encoding="utf-8") as file:
        for texts, tasks, number in (
            (dialogues(args.dialogues), DIALOGUE_TASKS, args.number - about_code),
            (list(functions()), CODE_TASKS, about_code),
        ):
            fitting = [text for text in texts if LEAST <= len(text) <= MOST]
            for text in draw.sample(fitting, min(number, len(fitting))):
                question = f"{draw.choice(tasks)}\n\n{text}"
                turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "…"}]
                file.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
