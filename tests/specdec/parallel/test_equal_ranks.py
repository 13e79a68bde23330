"""Ranks that are told commands alone come to the same plans and outcomes, whatever their clocks and hashes say."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from specdec.core.commands import Abort, Add, EndSearches, Search
from specdec.core.errors import QueueFullError
from specdec.core.request import RequestGroup
from specdec.engine.beam_search import BeamSearch
from specdec.scheduling.integrity import check_scheduler
from tests.profiles import num_cases
from tests.specdec.drawn_requests import adapters, cut, requests, shapes, tokens
from tests.specdec.parallel.whole_ranks import Compare, WholeRanks, state_of, whole_ranks
from tests.specdec.world import World

pytestmark = pytest.mark.slow

TEXT = [3 + (7 * i + i * i // 3) % 90 for i in range(40)]
# Of all lengths, with beginnings in common.
prompts = st.builds(lambda size, rest: TEXT[:size] + rest, st.integers(0, 40), st.lists(tokens, min_size=1, max_size=4))
forms = st.sampled_from(["[a-d ]{3,9}", "(ab|ba)+", "[a-c]*d"]).map(
    lambda regex: SamplingParams(max_tokens=12, structured_outputs=StructuredOutputsParams(regex=regex))
)
# Without a seed, so that one is drawn.
seedless = st.builds(SamplingParams, temperature=st.sampled_from([0.5, 1.0]), max_tokens=st.integers(1, 30))
searches = st.builds(BeamSearchParams, beam_width=st.integers(1, 4), max_tokens=st.integers(1, 6))
which = st.integers(0, 99)
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), prompts, st.one_of(requests, forms, seedless), adapters),
        st.tuples(st.just("search"), st.lists(prompts, min_size=1, max_size=2), searches),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), which),
        st.tuples(st.just("unload"), st.integers(1, 3)),
        st.tuples(st.just("update")),
    ),
    min_size=1,
    max_size=14,
)
HOST = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 17}}


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeRanks]:
    process = WholeRanks(tmp_path_factory.mktemp("whole ranks"))
    yield process
    process.end()


def disk(folder: Path) -> dict[str, Any]:
    own = {"cpu_bytes_to_use": 1 << 17, "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}]}
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": own}


@settings(max_examples=num_cases(25))
@given(
    events=events,
    drafter=st.sampled_from(["none", "eagle", "eagle3", "dspark", "llama"]),
    text=st.sampled_from([None, "ngram", "suffix"]),
    rule=st.sampled_from(["coupled", "coupled", "rejection"]),
    shape=shapes,
    seats=st.integers(1, 6),
    chunk=st.integers(8, 40),
    blocks=st.integers(9, 24),
    queue=st.sampled_from([None, None, 2]),
    adaptive=st.booleans(),
    connector=st.sampled_from([None, "host", "disk"]),
)
def test_drawn_commands(
    world: World,
    tmp_path_factory: pytest.TempPathFactory,
    others: WholeRanks,
    events: list[Any],
    drafter: str,
    text: str | None,
    rule: str,
    shape: Any,
    seats: int,
    chunk: int,
    blocks: int,
    queue: int | None,
    adaptive: bool,
    connector: str | None,
) -> None:
    own = world.draft(drafter)
    sources = [*([str(own)] if own else []), *([text] if text else [])]
    kinds = {None: None, "host": HOST, "disk": disk(tmp_path_factory.mktemp("blocks"))}
    with whole_ranks(others):
        llm = LLM(
            world.folder / "target",
            ",".join(sources) or None,
            dtype="float64",
            tensor_parallel_size=2,
            verify=rule,
            shape=shape,
            max_num_seqs=seats,
            max_num_batched_tokens=chunk,
            adaptive_drafts=adaptive,
            max_model_len=64,
            block_size=8,
            kv_cache_memory=blocks * 8 * 3 * 2 * 16 * 8 * 2,
            max_queued_requests=queue,
            enable_lora=True,
            max_loras=2,
            # So small that it gives up texts.
            draft_store_tokens=1024,
            max_lora_rank=17,
            kv_transfer_config=kinds[connector],
        )
    with llm:
        carry_out(llm, world, drafter, events, chunk - seats)


def carry_out(llm: LLM, world: World, drafter: str, events: list[Any], most: int) -> None:
    engine, groups, begun = llm.engine, list[RequestGroup](), list[BeamSearch]()
    for kind, *drawn in events:
        # What cannot be carried out is refused by both.
        with suppress(ValueError, QueueFullError):
            if kind == "add":
                prompt, params, adapter = drawn
                add = llm.request_maker.add(prompt, cut(params, most))
                add.adapter = world.adapter(adapter)
                groups.append(engine.handle(add))
            elif kind == "search":
                # More beams than seats never run, and `LLM.beam_search` refuses them.
                params = replace(drawn[1], beam_width=min(drawn[1].beam_width, llm.config.scheduler.max_num_seqs))
                begun += engine.handle(Search([search_of(llm, prompt, params) for prompt in drawn[0]], params))
            elif kind == "step":
                for _ in range(drawn[0]):
                    engine.step()
            elif kind == "abort" and (groups or begun):
                place = drawn[0] % (len(groups) + len(begun))
                if place < len(groups):
                    engine.handle(Abort(groups[place].request_id))
                else:
                    engine.handle(EndSearches([begun[place - len(groups)].number]))
            elif kind == "unload":
                llm.remove_lora(drawn[0])
            elif kind == "update" and drafter.startswith("eagle"):
                llm.update_draft(world.other(drafter))
        check_alike(llm, groups)
    while engine.has_unfinished or not all(search.finished for search in begun):
        engine.step()
        check_scheduler(engine.scheduler)
    check_alike(llm, groups)


def search_of(llm: LLM, prompt: list[int], params: BeamSearchParams) -> Add:
    step = SamplingParams(temperature=0, max_tokens=params.max_tokens, logprobs=params.beam_width + 1)
    return llm.request_maker.add(prompt, step)


def check_alike(llm: LLM, groups: list[RequestGroup]) -> None:
    llm.engine.ranks.tell(Compare())
    own, other = llm.engine.ranks.share(state_of(llm.engine, groups))
    for name, value in own.items():
        assert other[name] == value, name
