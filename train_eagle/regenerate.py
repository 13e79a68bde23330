"""Have the target answer the conversations itself, since a head learns best from the text that it will predict.

    python -m specdec.train_eagle.regenerate --model MODEL --data a.jsonl --out answers.jsonl

The users' turns stay. Every assistant turn is generated, after the generated ones before it. Conversations that cannot
be answered are left out and counted. The same command resumes a killed run after the last conversation written.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.progress import track

from specdec.core.sampling_params import SamplingParams
from specdec.llm import LLM
from specdec.train_eagle.chat_mask import BadConversation, Message
from specdec.train_eagle.conversations import BadData, Source, open_source, read, write_conversations
from specdec.train_eagle.evaluate import chat_prompt


def answerable(llm: LLM, sources: Iterable[Source], limit: int | None, bad: BadData) -> list[list[Message]]:
    """Return the conversations, of at most `limit` entries per source, whose prompts the chat template can render.

    The others are counted in `bad`.

    Raises:
        ValueError: a model without a chat template; a bad conversation, if `bad` is strict.
    """
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise ValueError(f"{llm.config.model}: no chat template; add a chat_template.jinja to the folder")
    conversations = []
    for entry in read(sources, limit):
        try:
            messages = entry.messages()
            for i, message in enumerate(messages):
                if message["role"] == "assistant":
                    chat_prompt(llm, messages[:i])
            conversations.append(messages)
        except BadConversation as error:
            bad.add(error, entry.place)
    return conversations


def regenerate(
    llm: LLM, conversations: Sequence[Sequence[Message]], temperatures: Sequence[float], max_tokens: int, seed: int
) -> list[list[Message]]:
    """Answer all conversations, turn by turn in one batch, each at its own temperature.

    A conversation ends before the first answer that does not fit the context, or that reaches `max_tokens`.
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
    parser.add_argument("--model", type=Path, required=True, help="the target: a folder, or org/name on the hub")
    parser.add_argument("--data", nargs="+", required=True, help="JSONL files, JSON arrays, data sets as NAME:SPLIT")
    parser.add_argument("--limit", type=int, help="most entries of each source")
    parser.add_argument("--strict", action="store_true", help="refuse the first bad conversation")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="given in turn to conversations")
    parser.add_argument("--max-tokens", type=int, default=192, help="most tokens of an answer")
    parser.add_argument("--batch", type=int, default=128, help="conversations answered at once")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bad = BadData(args.strict)
    try:
        sources = [open_source(name) for name in args.data]
        llm = LLM(args.model, draft=None, max_num_seqs=args.batch)
        conversations = answerable(llm, sources, args.limit, bad)
    except ValueError as error:
        parser.exit(2, f"regenerate: {error}\n")
    progress_file = args.out.with_suffix(".done")
    done = int(progress_file.read_text()) if progress_file.exists() else 0
    for start in track(range(done, len(conversations), args.batch), description="answering"):
        batch = conversations[start : start + args.batch]
        temperatures = [args.temperature[(start + i) % len(args.temperature)] for i in range(len(batch))]
        answered = regenerate(llm, batch, temperatures, args.max_tokens, args.seed + start * 1000)
        write_conversations(args.out, [messages for messages in answered if messages])
        progress_file.write_text(str(start + len(batch)))
    if bad.counts:
        print(bad.table())


if __name__ == "__main__":
    main()
