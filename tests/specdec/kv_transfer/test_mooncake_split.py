"""Prefill and decoding split over two engines with a Mooncake pool between them. Skipped where it is not installed."""

import asyncio
from pathlib import Path

import pytest

from specdec import SamplingParams
from specdec.kv_transfer import offloading_connector
from tests.specdec.async_engine.served import Served, states_of
from tests.specdec.kv_transfer.engines import DRAWN, GREEDY, PROMPT, SIZE, Computed, engine, flush, run
from tests.specdec.kv_transfer.mooncake import mooncake_master, needs_mooncake
from tests.specdec.world import World

pytestmark = needs_mooncake
PROMPTS = [PROMPT, PROMPT[1:], PROMPT[5:]]
# What a router sends to a prefill engine: the prompt, for one token.
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def alone(world: World, drafter: str, prompts: list[list[int]], params: SamplingParams) -> Computed:
    with engine(world, drafter, None) as llm:
        return run(llm, prompts, params)


@pytest.mark.parametrize(("drafter", "params"), [("eagle3", GREEDY), ("dspark", DRAWN)])
def test_tokens_are_those_of_one_engine(
    world: World, tmp_path: Path, drafter: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed or read twice. When the pool is gone, the decode engine goes on alone."""
    monkeypatch.setattr(offloading_connector, "FLUSH", 1)
    expected = alone(world, drafter, PROMPTS, params)
    with mooncake_master(tmp_path) as master:
        config = master.config(cache_prefix=drafter, load_timeout=2)
        with engine(world, drafter, config, role="decode") as decode:
            with engine(world, drafter, config, role="prefill") as prefill:
                run(prefill, PROMPTS, FIRST)
                flush(prefill)
                found = run(decode, PROMPTS, params)
            assert (found.tokens, found.tau) == (expected.tokens, expected.tau)
            assert found.loaded == sum(len(prompt) // SIZE * SIZE for prompt in PROMPTS)
            assert found.known == expected.known - found.loaded
            assert found.read == expected.read - found.loaded
            master.kill()
            other = [token + 1 for token in PROMPT]
            assert run(decode, [other], params).tokens == alone(world, drafter, [other], params).tokens


def test_engines_in_processes_of_their_own(world: World, tmp_path: Path) -> None:
    """The prefill engine answers once its blocks are in the pool, so the decode engine finds all of them."""
    expected = alone(world, "eagle", PROMPTS, DRAWN)
    with mooncake_master(tmp_path) as master:
        own = {"kv_transfer_config": master.config(), "block_size": SIZE, "max_model_len": 128}
        with (
            Served(world.folder, role="decode", **own) as decode,
            Served(world.folder, role="prefill", **own) as prefill,
        ):
            prefill.run(answers(prefill, FIRST))
            tokens = decode.run(answers(decode, DRAWN))
            stats = decode.run(decode.llm.stats())
    assert tokens == expected.tokens
    # One that finds no blocks would compute all of them.
    assert stats.external_prefix_hits + stats.prefix_hits >= sum(len(prompt) // SIZE * SIZE for prompt in PROMPTS)


async def answers(served: Served, params: SamplingParams) -> list[list[int]]:
    states = await asyncio.gather(*(states_of(served.llm, prompt, params) for prompt in PROMPTS))
    return [list(each[-1].outputs[0].token_ids) for each in states]
