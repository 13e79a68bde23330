"""Drafts from earlier requests beside n-grams and a head, on workloads of the demo model; whether tokens are equal.

    python -m benchmarks.suffix

Requests come one after another, and each may profit from those before it:

- edits: an agent that asks again after a small change. Each dialogue is answered several times, each time with another
  word of the conversation replaced, as a tool's result would be;
- documents: questions about the same documents (RAG). A conversation is several dialogues long, and then a question of
  one of them is asked again;
- evaluation: the prompts of `prompts/` in their order, each once.

Tau is measured with fixed trees, speed with adaptive ones; drafts take turns, request by request. The demo writes
dialogues, not files, so *files* stands beside these without a model: an agent that writes whole files of this
repository again, each time with one edit more, from a prompt that holds the file before the edit. What the sources
draft for these texts is compared with them as the engine would, with the same fixed trees.
"""

import argparse
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import finish, parse_shape, read_prompts
from specdec import LLM, DraftShape, SamplingParams
from specdec.config import DEMO, EngineConfig
from specdec.core.outputs import SpeculationStats
from specdec.draft_heads.drafting.chains import ROOT, ChainNodes, ChainRates, ChainSource, ChainTree
from specdec.draft_heads.drafting.ngram_chains import NGramChains
from specdec.draft_heads.drafting.stored_chains import DraftStore, StoredText
from specdec.kernels.native.text_store import NativeTextStore
from specdec.models.tokenizer import Tokenizer

DRAFTS = ("none", "ngram", "suffix", "eagle", "eagle,ngram", "eagle,suffix")
Messages = list[dict[str, str]]


def edits(count: int) -> Iterator[Messages]:
    """Yield dialogues, each several times with another word of the conversation replaced."""
    chance = random.Random(0)
    for dialogue in read_prompts("sgd-eval")[:count]:
        for _ in range(4):
            place = chance.randrange(len(dialogue))
            words = dialogue[place]["content"].split()
            words[chance.randrange(len(words))] = chance.choice(["two", "Monday", "San Jose", "another", "cheap"])
            yield [{**turn, "content": " ".join(words)} if turn is dialogue[place] else turn for turn in dialogue]


def documents(count: int) -> Iterator[Messages]:
    """Yield conversations of three dialogues, with questions of these behind them."""
    dialogues = read_prompts("sgd-eval")[-3 * count :]
    for start in range(0, 3 * count, 3):
        texts = dialogues[start : start + 3]
        # Each dialogue ends with a user's turn, whose answer is not known.
        known = [turn for text in texts for turn in text[:-1]]
        questions = [turn for text in texts for turn in text if turn["role"] == "user"]
        yield from ([*known, question] for question in questions[::3])


def evaluation(count: int) -> Iterator[Messages]:
    """Yield prompts of both kinds."""
    for kind in ("sgd-eval", "gsm8k-eval"):
        yield from read_prompts(kind)[20 : 20 + 2 * count]


WORKLOADS = {"edits": edits, "documents": documents, "evaluation": evaluation}


def measure(name: str, prompts: list[list[int]], llms: dict[str, tuple[LLM, LLM]], args: argparse.Namespace) -> Any:
    """Return the figures of every draft on a workload."""
    stats: dict[str, list[SpeculationStats]] = {draft: [] for draft in llms}
    speeds: dict[str, list[float]] = {draft: [] for draft in llms}
    equal = dict.fromkeys(llms, True)
    for number, prompt in enumerate(prompts):
        params, expected = SamplingParams(temperature=args.temperature, seed=number, max_tokens=args.max_tokens), None
        # From request to request in the other order.
        for draft in list(llms)[:: -1 if number % 2 else 1]:
            fixed, adaptive = llms[draft]
            began = time.perf_counter()
            (timed,) = adaptive.generate([prompt], params, use_tqdm=False, cache_salt=name)
            speeds[draft].append(len(timed.token_ids) / (time.perf_counter() - began))
            (output,) = fixed.generate([prompt], params, use_tqdm=False, cache_salt=name)
            stats[draft].append(output.stats)
            expected = expected or output.token_ids
            equal[draft] &= timed.token_ids == output.token_ids == expected
    plain = speeds[next(iter(llms))]
    for draft in llms:
        total = SpeculationStats.total(stats[draft])
        ratios = [own / other for own, other in zip(speeds[draft], plain, strict=True)]
        yield {
            "workload": name,
            "draft": draft,
            "requests": len(prompts),
            "tau": round(total.tau, 3),
            "nodes_per_step": round(total.drafted / max(1, total.steps), 2),
            "tok_per_s": round(median(speeds[draft]), 1),
            "speed_over_first": round(median(ratios), 3),
            "tokens_equal": equal[draft],
        }


def sessions(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield prompts and answers of an agent that edits files: names are changed, comments dropped, lines added."""
    for file in files:
        text = file.read_text(encoding="utf-8")
        for turn in range(3):
            names = re.findall(r"\b[a-z_]{5,}\b", text)
            name = names[len(names) * turn // 3]
            after = re.sub(rf"\b{name}\b", f"{name}_{turn}", text)
            lines = after.splitlines(keepends=True)
            del lines[len(lines) // (turn + 2)]
            after = "".join(lines)
            yield f"Rename {name}, and drop a line. Answer with the whole file.\n{text}\n", after
            text = after


def replayed(source: ChainSource, prompt: list[int], answer: list[int], nodes: int) -> tuple[int, int]:
    """Return the tokens and steps of an answer with the chains of a source."""
    known, steps, stored = [*prompt, answer[0]], 0, source if isinstance(source, StoredText) else None
    while len(known) < len(prompt) + len(answer):
        if stored is not None:
            stored.follow(known, 0, ended=False)
        rest = answer[len(known) - len(prompt) :]
        tree = ChainTree(source.chains(known, min(nodes, len(rest))))
        taken = rest[: 1 + accepted(tree.best(nodes), rest)]
        tree.learn(taken)
        known += taken
        steps += 1
    if stored is not None:
        stored.follow(known, 0, ended=True)
    return len(answer) - 1, steps


def accepted(nodes: ChainNodes, rest: list[int]) -> int:
    """Return how many of the next tokens are a path of a tree."""
    children = {(parent, token): node for node, (token, parent) in enumerate(zip(*nodes, strict=True))}
    node, count = ROOT, 0
    while count < len(rest) and (node, rest[count]) in children:
        node, count = children[node, rest[count]], count + 1
    return count


def replay(shape: DraftShape) -> Iterator[dict[str, Any]]:
    """Yield tau of n-grams and of the store on edited files."""
    tokenizer = Tokenizer(DEMO / "target")
    files = sorted((Path(__file__).parents[1] / "draft_heads" / "drafting").glob("*.py"))
    pairs = [tuple(map(tokenizer.encode, pair)) for pair in sessions(files)]
    for draft in ("ngram", "suffix"):
        store = DraftStore(NativeTextStore(EngineConfig.draft_store_tokens), shape.branching)
        rates, tokens, steps = ChainRates(), 0, 0
        for prompt, answer in pairs:
            own: ChainSource = NGramChains(shape.branching, ChainRates(rates))
            source = store.open((), own) if draft == "suffix" else own
            new, more = replayed(source, prompt, answer, shape.nodes)
            tokens, steps = tokens + new, steps + more
        yield {"workload": "files", "draft": draft, "requests": len(pairs), "tau": round(tokens / steps, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="target folder; default: the demo model")
    parser.add_argument("--draft", nargs="+", default=list(DRAFTS), help="as for LLM; speeds are over the first")
    parser.add_argument(
        "--shape", type=parse_shape, default=DraftShape(6, 3, 8, 0.6), help="DEPTH,BRANCHING,NODES,REACH"
    )
    parser.add_argument("--size", type=int, default=10, help="dialogues and documents of a workload")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--name", default="suffix", help="of the JSON file under benchmarks/results/")
    args = parser.parse_args()
    llms = {
        draft: (
            LLM(args.model, draft, shape=args.shape, adaptive_drafts=False),
            LLM(args.model, draft, shape=args.shape),
        )
        for draft in args.draft
    }
    first = next(iter(llms.values()))[0]
    rows = []
    for name, make in WORKLOADS.items():
        prompts = [first.chat_prompt(messages) for messages in make(args.size)]
        rows += list(measure(name, prompts, llms, args))
        print(*rows[-len(llms) :], sep="\n", flush=True)
    rows += list(replay(args.shape))
    settings = {"dtype": first.config.dtype, "shape": vars(args.shape), "temperature": args.temperature}
    finish(args.name, {**settings, "max_tokens": args.max_tokens}, rows)


if __name__ == "__main__":
    main()
