"""Gaps between an answer's tokens while a long prompt is computed: by another engine, and by the same one.

    python -m benchmarks.prefill_decode

Split: an engine of role `prefill` and one of role `decode`, each a process with one thread, with a folder that both
have. One engine: a process with both threads. An answer is streamed; after its first steps a prompt of 1,536 tokens
arrives. The mean gap between two steps of the answer is taken while the prompt is computed: until the prefill engine
has answered, or until the prompt's first token. The gap of the same engine without the prompt is measured in the same
round, and figures are medians over rounds.

Also measured: seconds until the prompt's first token, with the way through both engines. Each round has its own
`cache_salt`, so it finds nothing of an earlier one. Tokens of the prompt's answer must be those of one engine.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import finish, read_prompts
from specdec import AsyncLLM, SamplingParams
from specdec.config import DEMO, DEMO_HEAD

PROMPT, STEPS_BEFORE, STEPS = 1536, 8, 150
# Seconds for which tokens wait to be sent together, as in the server: the front end is a third process on two cores.
INTERVAL = 0.02
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class Measured(NamedTuple):
    """A stream, and the prompt beside it.

    Attributes:
        gap: mean seconds between two steps.
        steps: number of gaps.
        window: seconds in which the prompt was computed; 0 without one.
        first_token: seconds until the prompt's first token.
        tokens: of the prompt's answer.
    """

    gap: float
    steps: int
    window: float = 0.0
    first_token: float = 0.0
    tokens: tuple[int, ...] = ()


async def ask(llm: AsyncLLM, prompt: list[int], params: SamplingParams, salt: str) -> tuple[float, tuple[int, ...]]:
    """Return when the first token came, and all tokens."""
    first, tokens = 0.0, list[int]()
    async for state in llm.generate(prompt, params, cache_salt=salt):
        first = first or time.perf_counter()
        tokens = state.token_ids
    return first, tuple(tokens)


async def measured(
    llm: AsyncLLM, prompt: list[int], params: SamplingParams, beside: Callable[[], Awaitable[Measured]] | None = None
) -> Measured:
    """Stream an answer for `STEPS` steps, or until `beside`, called after the first ones, has ended.

    The steps that count are those of the `window` of `beside`, or else all after the first ones.
    """
    # When a state came, and the steps until then.
    seen, task, start = list[tuple[float, int]](), None, 0.0
    async with aclosing(llm.generate(prompt, params, interval=INTERVAL)) as states:
        async for state in states:
            steps = state.outputs[0].stats.steps
            if steps >= STEPS_BEFORE:
                seen.append((time.perf_counter(), steps))
                if beside is not None and task is None:
                    task, start = asyncio.ensure_future(beside()), time.perf_counter()
            if steps >= STEPS and (task is None or task.done()):
                break
    found, end = Measured(0.0, 0), seen[-1][0]
    if task is not None:
        assert task.done(), "the answer ended before that of the prompt"
        found = await task
        end = start + found.window
    (early, first), *_, (late, last) = [each for each in seen if each[0] <= end]
    return found._replace(gap=(late - early) / (last - first), steps=last - first)


@asynccontextmanager
async def engines(settings: dict[str, Any], folder: Path) -> AsyncIterator[tuple[AsyncLLM, AsyncLLM, AsyncLLM]]:
    """Start the prefill engine, the decode engine and the one that does both."""
    tier = {"type": "fs", "root_dir": str(folder)}
    config = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"secondary_tiers": [tier]}}
    half: dict[str, Any] = {**settings, "threads": 1, "kv_transfer_config": config}
    async with (
        AsyncLLM(**half, role="prefill") as prefill,
        AsyncLLM(**half, role="decode") as decode,
        AsyncLLM(**settings, threads=2) as both,
    ):
        yield prefill, decode, both


async def rounds(args: argparse.Namespace, folder: Path) -> dict[str, list[Measured]]:
    """Run all rounds."""
    settings = {"model": args.model, "draft": args.draft, "adaptive_drafts": False, "kv_cache_memory": 1 << 28}
    found: dict[str, list[Measured]] = {name: [] for name in ("split", "split, alone", "one", "one, alone")}
    async with engines(settings, folder) as (prefill, decode, both):
        conversations = read_prompts("sgd-eval")
        text = [token for messages in conversations for token in decode.chat_prompt(messages)]
        short, long = text[:100], text[-PROMPT:]
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        few = replace(params, max_tokens=8)

        async def through_both(salt: str) -> Measured:
            start = time.perf_counter()
            await ask(prefill, long, FIRST, salt)
            window = time.perf_counter() - start
            first, tokens = await ask(decode, long, few, salt)
            return Measured(0.0, 0, window, first - start, tokens)

        async def through_one(salt: str) -> Measured:
            start = time.perf_counter()
            first, tokens = await ask(both, long, few, salt)
            return Measured(0.0, 0, first - start, first - start, tokens)

        for number in range(args.rounds + 1):
            salt = str(number)
            one = {
                "split": await measured(decode, short, params, partial(through_both, salt)),
                "split, alone": await measured(decode, short, params),
                "one": await measured(both, short, params, partial(through_one, salt)),
                "one, alone": await measured(both, short, params),
            }
            assert one["split"].tokens == one["one"].tokens, "the split changed tokens"
            if number:
                # The first round warms up.
                for name, run in one.items():
                    found[name].append(run)
        loaded = (await decode.stats()).external_prefix_hits
        assert loaded == (args.rounds + 1) * (PROMPT - 1), f"{loaded} tokens were loaded; see the log"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO / "target")
    parser.add_argument("--draft", default=DEMO_HEAD)
    parser.add_argument("--folder", help="where the engines share a folder; default: the system's temporary one")
    parser.add_argument("--rounds", type=int, default=9, help="after one whose times do not count")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = asyncio.run(rounds(args, Path(folder)))
    rows = []
    for name in ("split", "one"):
        loaded, alone = found[name], found[f"{name}, alone"]
        ratios = [one.gap / other.gap for one, other in zip(loaded, alone, strict=True)]
        rows.append(
            {
                "engines": "prefill and decode" if name == "split" else "one for both",
                "gap_alone_ms": round(1000 * statistics.median(each.gap for each in alone), 2),
                "gap_beside_ms": round(1000 * statistics.median(each.gap for each in loaded), 2),
                "ratio": round(statistics.median(ratios), 2),
                "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
                "steps_beside": min(each.steps for each in loaded),
                "prompt_ms": round(1000 * statistics.median(each.window for each in loaded)),
                "first_token_ms": round(1000 * statistics.median(each.first_token for each in loaded)),
            }
        )
    finish("prefill_decode", {"prompt_tokens": PROMPT, "rounds": args.rounds}, rows)


if __name__ == "__main__":
    main()
