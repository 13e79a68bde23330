"""Let the target answer the conversations itself: a head learns best from what it will have to predict.

    python -m specdec.train_eagle.regenerate --model MODEL --data a.jsonl --out answers.jsonl

The users' turns stay; every assistant turn is generated, in the context of those generated before it. A run
that was killed goes on behind the last conversation written.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.progress import track

from specdec.llm import LLM
from specdec.sampling_params import SamplingParams
from specdec.train_eagle.conversations import Message, read_conversations, write_conversations


def regenerate(
    llm: LLM, conversations: Sequence[Sequence[Message]], temperatures: Sequence[float], max_tokens: int, seed: int
) -> list[list[Message]]:
    """Answer all conversations, turn by turn, in one batch; one temperature each.

    A conversation ends before the first answer that would not fit the context, and after one that did not end.
    """
    answered: list[list[Message]] = [[] for _ in conversations]
    open_ids = [i for i, conversation in enumerate(conversations) if conversation]
    turn = 0
    while open_ids:
        asked = []
        for i in open_ids:
            rest = conversations[i][len(answered[i]) :]
            question = next((k for k, message in enumerate(rest) if message["role"] == "assistant"), None)
            if question is not None:
                prompt = llm.chat_prompt([*answered[i], *rest[:question]])
                if len(prompt) + max_tokens <= llm.max_model_len:
                    asked.append((i, prompt, rest[:question]))
        params = [
            SamplingParams(temperature=temperatures[i], max_tokens=max_tokens, seed=seed + i * 1000 + turn)
            for i, _, _ in asked
        ]
        outputs = llm.generate([prompt for _, prompt, _ in asked], params, use_tqdm=False)
        open_ids = []
        for (i, _, before), output in zip(asked, outputs, strict=True):
            if output.finish_reason == "stop":
                answered[i] += [*before, {"role": "assistant", "content": output.text}]
                open_ids.append(i)
        turn += 1
    return answered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder of the target")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="JSONL files with `messages`")
    parser.add_argument("--limit", type=int, help="conversations of each file")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="given in turn to conversations")
    parser.add_argument("--max-tokens", type=int, default=192, help="most tokens of an answer")
    parser.add_argument("--batch", type=int, default=128, help="conversations answered at once")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    conversations = read_conversations(args.data, args.limit)
    llm = LLM(args.model, max_num_seqs=args.batch)
    progress_file = args.out.with_suffix(".done")
    done = int(progress_file.read_text()) if progress_file.exists() else 0
    for start in track(range(done, len(conversations), args.batch), description="answering"):
        batch = conversations[start : start + args.batch]
        temperatures = [args.temperature[(start + i) % len(args.temperature)] for i in range(len(batch))]
        answered = regenerate(llm, batch, temperatures, args.max_tokens, args.seed + start * 1000)
        write_conversations(args.out, [messages for messages in answered if messages])
        progress_file.write_text(str(start + len(batch)))


if __name__ == "__main__":
    main()
