"""Engines over several ranks, which are threads of the test process, and what they say to requests of many kinds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from specdec import LLM, DraftShape, SamplingParams
from specdec.execution.step_order import StepOutcome
from tests.specdec.parallel.thread_ranks import thread_ranks
from tests.specdec.world import World

# Requests that share a prefix, greedy and sampled. One is forked, the last four need all logits, and the last repeats
# itself, so that n-grams draft for it.
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14 + i] for i in range(7)]
PARAMS = [
    SamplingParams(temperature=float(i % 2), seed=i, max_tokens=24, ignore_eos=True, **more)
    for i, more in enumerate(
        [
            {},
            {"n": 2},
            {},
            {"top_k": 5, "top_p": 0.9},
            {"repetition_penalty": 1.5, "bad_words": ["a"]},
            {"logprobs": 2},
            {"allowed_token_ids": [5, 6, 7]},
        ]
    )
]

# A prompt whose logits are compared.
PROMPT = list(range(3, 40))


@contextmanager
def engine(world: World, drafter: str, ranks: int = 1, **settings: Any) -> Iterator[LLM]:
    with thread_ranks():
        llm = LLM(
            world.folder / "target",
            "ngram" if drafter == "ngram" else world.draft(drafter),
            shape=DraftShape(3, 3, 8),
            prefill_stretch=0,
            max_model_len=64,
            block_size=8,
            tensor_parallel_size=ranks,
            **{"dtype": "float64", "adaptive_drafts": False, **settings},
        )
    with llm:
        yield llm


def texts(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


def check_with_little_memory(llm: LLM, expected: list[list[int]], *, drafts: bool) -> None:
    """Check the texts of requests that are preempted and meet each other's prefixes, and that they were."""
    assert texts(llm) == expected
    stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert (stats.drafts_verified > 0) == drafts


def prompt_logits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return the logits after each token of `PROMPT`."""
    outcomes: list[StepOutcome] = []
    collect = llm.engine.executor.collect

    def kept() -> StepOutcome:
        outcomes.append(collect())
        return outcomes[-1]

    monkeypatch.setattr(llm.engine.executor, "collect", kept)
    llm.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert outcomes[0].logits is not None
    return outcomes[0].logits.clone()
