"""Drafts whose own values overflow cost a step and nothing else."""

from pathlib import Path

import torch

from specdec import LLM, DraftShape, SamplingParams
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.kernels.types.tree import DraftTree
from tests.fakes import RandomDrafter, save_random_head, save_random_llama
from tests.trees import chain_of

BROKEN = 50


class BreakingDrafter(RandomDrafter):
    """Drafts a token for which the target has no finite value."""

    def tree(self, row: DraftRow) -> DraftTree:  # noqa: ARG002
        return chain_of([BROKEN])


def test_a_draft_of_nan_is_not_seen_in_the_output(tmp_path: Path) -> None:
    save_random_llama(tmp_path / "target")
    save_random_head(tmp_path / "head")
    prompts = [[5, 6, 7], [8, 9], [10]]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logit_bias={BROKEN: -100})
    results = []
    for draft in (None, tmp_path / "head"):
        llm = LLM(tmp_path / "target", draft, dtype="float64", shape=DraftShape(2, 2, 4), adaptive_drafts=False)
        llm.model.embed_tokens.weight[BROKEN] = torch.nan
        if draft:
            llm.engine.worker.drafter = BreakingDrafter(97, 0)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        results.append([(output.token_ids, output.finish_reason) for output in outputs])
    assert results[0] == results[1]
    assert all(len(tokens) == 12 for tokens, _ in results[0])
