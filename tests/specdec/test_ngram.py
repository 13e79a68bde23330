"""The engine with drafts from the text itself."""

from pathlib import Path

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.draft_heads.drafting.draft_shape import DraftShape
from tests.fakes import save_random_llama

SHAPE = DraftShape(4, 3, 8)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ngram")
    save_random_llama(folder)
    return folder


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_tokens_are_those_of_plain_decoding(target: Path, temperature: float) -> None:
    """The batch has forks and chunked prompts; its texts have few distinct tokens and repeat themselves."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 9, (10 + 8 * i,), generator=generator).tolist() for i in range(4)]
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=30, ignore_eos=True, n=2 if temperature else 1,
        allowed_token_ids=list(range(5, 12)),
    )  # fmt: skip
    results = []
    for draft in (None, "ngram"):
        llm = LLM(
            target,
            draft,
            dtype="float64",
            shape=SHAPE,
            adaptive_drafts=False,
            max_num_seqs=8,
            max_num_batched_tokens=24,
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        results.append([[one.token_ids for one in output.outputs] for output in outputs])
        if draft:
            stats = llm.stats()
            assert stats.drafts_verified > stats.drafts_accepted > 0
    assert results[0] == results[1]


def test_a_text_that_goes_round_is_accepted_in_whole_trees(target: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, allowed_token_ids=[7])
    llm = LLM(target, "ngram", dtype="float64", shape=SHAPE, adaptive_drafts=False)
    (output,) = llm.generate([[7, 7, 7, 7, 7, 7]], params)
    assert output.token_ids == [7] * 40
    assert output.stats.steps <= 1 + 40 // 4


def test_it_goes_with_rejection_sampling(target: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens = [
        LLM(target, draft, dtype="float64", verify="rejection").generate([[5, 6, 5, 6, 5, 6]], params)[0].token_ids
        for draft in (None, "ngram")
    ]
    assert tokens[0] == tokens[1]
