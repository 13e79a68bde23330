"""Promise 1: whatever drafts, however requests are batched, the tokens are those of the plain loop."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from specdec import LLM, DraftShape, SamplingParams
from specdec.request import Request
from tests.fakes import TINY, RandomDrafter, save_random_head, save_random_llama
from tests.specdec import oracle


class World(NamedTuple):
    folder: Path
    target: LlamaForCausalLM

    def logits(self, tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            return self.target(torch.tensor([tokens])).logits[0, -1]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    target = save_random_llama(folder / "target")
    save_random_head(folder / "head")
    return World(folder, target)


class Arrival(NamedTuple):
    step: int
    prompt: list[int]
    params: SamplingParams


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    vocab = TINY["vocab_size"]
    tokens = st.integers(0, vocab - 1)
    result = []
    for _ in range(draw(st.integers(1, 5))):
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7])),
            top_k=draw(st.sampled_from([0, 1, 3, 20])),
            top_p=draw(st.sampled_from([1.0, 0.9, 0.3])),
            seed=draw(st.integers(0, 2**63 - 1)),
            max_tokens=draw(st.integers(1, 14)),
            ignore_eos=draw(st.booleans()),
        )
        prompt = draw(st.lists(tokens, min_size=1, max_size=40))
        result.append(Arrival(draw(st.integers(0, 6)), prompt, params))
    return result


shapes = st.builds(DraftShape, depth=st.integers(1, 5), branching=st.integers(1, 5), nodes=st.integers(1, 70))


def run(llm: LLM, cases: list[Arrival]) -> list[list[int]]:
    """Tokens of each request, added when its step has come."""
    requests: list[Request | None] = [None] * len(cases)
    step = 0
    while any(request is None or not request.finished for request in requests):
        for i, case in enumerate(cases):
            if requests[i] is None and case.step <= step:
                request = llm.new_request(case.prompt, case.params)
                requests[i] = request
                llm.engine.add_request(request)
        llm.engine.step()
        llm.engine.scheduler.pool.check_integrity()
        step += 1
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_blocks
    return [request.token_ids[request.num_prompt :] for request in requests if request is not None]


@given(
    cases=arrivals(),
    shape=shapes,
    drafter=st.sampled_from(["none", "eagle", "random"]),
    seats=st.integers(1, 5),
    chunk=st.integers(5, 64),
    blocks=st.integers(20, 60),
    seed=st.integers(0, 1000),
)
def test_tokens_are_those_of_the_plain_loop(
    world: World,
    cases: list[Arrival],
    shape: DraftShape,
    drafter: str,
    seats: int,
    chunk: int,
    blocks: int,
    seed: int,
) -> None:
    head = world.folder / "head" if drafter != "none" else None
    llm = LLM(
        world.folder / "target",
        head,
        dtype="float64",
        shape=shape,
        max_num_seqs=seats,
        max_num_batched_tokens=chunk,
        max_model_len=64,
        kv_cache_memory=blocks * 8 * 3 * 2 * 16 * 8 * 2,
        block_size=8,
    )
    if drafter == "random":
        llm.engine.drafter = RandomDrafter(TINY["vocab_size"], seed)
    got = run(llm, cases)
    for case, tokens in zip(cases, got, strict=True):
        assert tokens == oracle.generate(world.logits, case.prompt, case.params, llm.end_tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alone_and_in_a_batch_of_eight(world: World, temperature: float) -> None:
    """The heads' drafts, random drafts and none give the same tokens, alone and together."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 97, (3 + 7 * i,), generator=generator).tolist() for i in range(8)]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=48, ignore_eos=True) for i in range(8)]
    results = []
    for draft in (None, world.folder / "head", "random"):
        folder = world.folder / "head" if draft == "random" else draft
        llm = LLM(world.folder / "target", folder, dtype="float64", shape=DraftShape(4, 4, 16))
        if draft == "random":
            llm.engine.drafter = RandomDrafter(97, 0)
        together = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        alone = [llm.generate([p], q)[0].token_ids for p, q in zip(prompts, params, strict=True)]
        assert together == alone
        results.append(together)
    assert results[0] == results[1] == results[2]


def test_a_perfect_drafter_is_accepted_to_the_end(world: World) -> None:
    """Losslessness must not come from accepting nothing: right drafts are all accepted, up to the tree's depth."""
    prompt = list(range(5, 15))
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=41, ignore_eos=True)
    known = oracle.generate(world.logits, prompt, params)

    class Oracle(RandomDrafter):
        def tree(self, row):  # type: ignore[no-untyped-def]
            from specdec.verify.tree import DraftTree

            return DraftTree.chain(known[row.position : row.position + min(4, row.max_depth)])

    llm = LLM(world.folder / "target", world.folder / "head", dtype="float64", shape=DraftShape(4, 1, 4))
    llm.engine.drafter = Oracle(97, 0)
    output = llm.generate([prompt], params)[0]
    assert output.token_ids == known
    assert output.stats.steps == 8
    assert output.stats.tau == 5.0
    assert output.stats.accepted_per_depth == [8, 8, 8, 8]
    assert sum(output.outputs[0].accepted) == 32
