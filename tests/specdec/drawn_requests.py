"""Requests of every kind, drawn at random, and their runs."""

import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hypothesis import strategies as st

from specdec import LLM, DraftShape, SamplingParams
from specdec.core.request import Request, RequestGroup
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.kernels.types.tree import DraftTree
from specdec.scheduling.integrity import check_scheduler
from tests.fakes import (
    RandomDrafter,
)
from tests.new_groups import new_group
from tests.specdec.world import EOS, VOCAB, WITH_DRAFT, World
from tests.strategies import speculations
from tests.trees import chain_of

tokens = st.integers(0, VOCAB - 1)
# The end token and a, b, c, d: a request of these alone often meets its bad words, stop strings and ends.
letters = st.sampled_from([EOS, 3, 4, 5, 6])
# Text of few letters, so that stop strings and bad words do occur.
words = st.text(alphabet="abc d", min_size=1, max_size=3)


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    """Everything a request can ask of the output, most of it off most of the time."""
    temperature = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7]))
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 14), st.integers(1, 14), st.integers(1, 14)))
    return SamplingParams(
        n=draw(st.sampled_from([1, 1, 2])) if temperature else 1,
        temperature=temperature,
        top_k=draw(st.sampled_from([0, 0, 1, 3, 20])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.3])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.5, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0, -0.8])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.6, -0.4])),
        logit_bias=draw(st.one_of(st.none(), st.dictionaries(tokens, st.sampled_from([-100.0, 3.0, 8.0]), max_size=3))),
        allowed_token_ids=draw(
            st.one_of(st.none(), st.lists(tokens, min_size=12, max_size=40), st.lists(letters, min_size=2, max_size=5))
        ),
        bad_words=draw(st.lists(words.filter(str.strip), max_size=2)),
        seed=draw(st.integers(0, 2**63 - 1)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(max_tokens or 6, 6))),
        stop=draw(st.one_of(st.none(), words, st.lists(words, max_size=3))),
        stop_token_ids=draw(st.lists(tokens, max_size=6)),
        include_stop_str_in_output=draw(st.booleans()),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0, 2])),
        skip_special_tokens=draw(st.booleans()),
        speculation=draw(speculations()),
    )


# Requests that score choices, whose letters are so few that they share beginnings.
scorings = st.lists(st.lists(letters, min_size=1, max_size=5), min_size=1, max_size=6).map(
    lambda choices: SamplingParams(choices=choices)
)


def cut(params: SamplingParams, most: int) -> SamplingParams:
    """Return the parameters with choices of no more nodes than a step has tokens for."""
    if params.choices is None:
        return params
    return replace(params, choices=[choice[: most + 1] for choice in params.choices])


class Arrival(NamedTuple):
    step: int
    prompt: list[int]
    params: SamplingParams
    adapter: int = 0


# A request's adapter, 0 for none.
adapters = st.sampled_from([0, 0, 1, 2, WITH_DRAFT])
requests = st.one_of(*[parameters()] * 4, scorings)
arrivals = st.lists(
    st.builds(Arrival, st.integers(0, 6), st.lists(tokens, min_size=1, max_size=40), requests, adapters),
    min_size=1,
    max_size=3,
)
shapes = st.builds(
    DraftShape,
    depth=st.integers(1, 5),
    branching=st.integers(1, 5),
    nodes=st.integers(1, 70),
    min_reach=st.sampled_from([0.0, 0.2]),
)


def run(
    llm: LLM, cases: list[Arrival], updates: Mapping[int, Path] | None = None, world: World | None = None
) -> list[RequestGroup]:
    """Requests run to their end, each added when its step has come.

    Args:
        updates: heads by the step before which they replace the one before.
        world: whose adapters the requests have; None for none.
    """
    groups: list[RequestGroup | None] = [None] * len(cases)
    step = 0
    while any(group is None or not group.finished for group in groups):
        for i, case in enumerate(cases):
            if groups[i] is None and case.step <= step:
                # While one of the draft model is loaded, no head can replace it.
                adapter = world.adapter(case.adapter, None if updates else llm.config.draft) if world else None
                group = groups[i] = new_group(llm, case.prompt, case.params, lora_request=adapter)
                for request in group.requests:
                    llm.engine.scheduler.add(request)
        if updates and step in updates:
            llm.update_draft(updates[step])
        before = {request: request.stats.drafted for group in groups if group for request in group.requests}
        for request in llm.engine.step():
            assert request.num_cached <= len(request.token_ids)
            check_bounds(request, before[request])
        check_scheduler(llm.engine.scheduler)
        step += 1
    assert llm.engine.scheduler.stats().kv_usage == 0
    return [group for group in groups if group is not None]


def check_bounds(request: Request, drafted_before: int) -> None:
    """Check the last step and the whole output against what the request asked of speculation."""
    asked, stats = request.params.speculation, request.stats
    assert stats.drafted - drafted_before <= (asked.max_nodes or sys.maxsize)
    assert len(stats.accepted_per_depth) <= (asked.max_depth or sys.maxsize)
    assert asked.enabled or stats.drafted == 0


class KnowingDrafter(RandomDrafter):
    """Drafts what will be said, end tokens and what would lie behind the end included, among random branches."""

    def __init__(self, seed: int, futures: dict[tuple[int, int], list[int]]) -> None:
        super().__init__(VOCAB, seed)
        self.futures = futures

    def tree(self, row: DraftRow) -> DraftTree:
        sampling, position = row.context.sampling, row.context.num_output
        future = self.futures[sampling.seed, sampling.sample_index][position:]
        chain = future[: min(row.num_nodes, row.max_depth, self.random.randint(0, 5))]
        if self.random.random() < 0.3:
            chain = [*chain[:1], EOS, EOS][: min(row.num_nodes, row.max_depth)]
        drafted = chain_of(chain)
        taken, nodes, parents = set(drafted.children), list(chain), list(drafted.parents)
        for _ in range(row.num_nodes - len(chain)):
            parent = self.random.randint(-1, len(chain) - 1)
            token = self.random.choice([EOS, *chain, self.random.randrange(VOCAB)])
            if (parent, token) not in taken and parent + 2 <= row.max_depth:
                taken.add((parent, token))
                nodes.append(token)
                parents.append(parent)
        return DraftTree(tuple(nodes), tuple(parents))


def edited(tokens: list[int], seed: int) -> list[int]:
    """A text with some tokens removed, replaced and inserted."""
    chance, text = random.Random(seed), list[int]()
    for token in tokens:
        kind = chance.randrange(8)
        text += [] if kind == 0 else [chance.randrange(VOCAB)] if kind == 1 else [EOS, token] if kind == 2 else [token]
    return text
