"""Small models for beam search, checked while they run, and compared with transformers."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from specdec import LLM, BeamSearchParams
from specdec.cache.kv_cache import entry_bytes
from specdec.core.outputs import BeamSearchOutput
from specdec.core.request import Request
from specdec.scheduling.integrity import check_scheduler

BLOCK = 8


class ExactTorch:
    """Torch, but what transformers' beam search wants in float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Tiny(NamedTuple):
    """A random model and a head on disk, and the model in transformers."""

    folder: Path
    head: Path
    reference: Any


def watched(llm: LLM) -> Iterator[LLM]:
    """The same, which checks itself after every step, and at the end that nothing is left behind."""
    engine = llm.engine
    scheduler, plain_step = engine.scheduler, engine.step

    def step() -> list[Request]:
        assert len(scheduler.running) <= scheduler.config.max_num_seqs
        news = plain_step()
        check_scheduler(scheduler)
        return news

    engine.step = step  # type: ignore[method-assign]
    yield llm
    assert not engine.has_unfinished
    assert scheduler.stats().kv_usage == 0
    check_scheduler(scheduler)


def cramped(tiny: Tiny, blocks: int, **settings: Any) -> LLM:
    """A model with little memory."""
    roomy = LLM(tiny.folder, draft=None, dtype="float64", kv_cache_memory=1 << 20)
    size = BLOCK * entry_bytes(roomy.model.config, None, torch.float64)
    settings = {"max_model_len": 32, **settings}
    return LLM(tiny.folder, draft=None, dtype="float64", block_size=BLOCK, kv_cache_memory=blocks * size, **settings)


def expect(
    reference: Any, prompt: list[int], params: BeamSearchParams, ends: Sequence[int]
) -> tuple[list[list[int]], list[float] | None]:
    """Generated tokens of transformers' sequences, best first, and their scores where it says any."""
    ids = torch.tensor([prompt])
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.generation.utils.torch", ExactTorch())
        found = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            do_sample=False,
            max_new_tokens=params.max_tokens,
            eos_token_id=list(ends) or None,
            pad_token_id=0,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            return_dict_in_generate=True,
            output_scores=True,
        )
    outputs = [tokens[len(prompt) :] for tokens in found.sequences.tolist()]
    # Everything after the first end token is padding.
    cuts = [next((i for i, token in enumerate(tokens, 1) if token in ends), len(tokens)) for tokens in outputs]
    tokens = [tokens[:cut] for tokens, cut in zip(outputs, cuts, strict=True)]
    scores = getattr(found, "sequences_scores", None)
    return tokens, None if scores is None else scores.tolist()


def check(
    reference: Any, prompt: list[int], params: BeamSearchParams, ends: Sequence[int], output: BeamSearchOutput
) -> None:
    tokens, scores = expect(reference, prompt, params, ends)
    assert [sequence.token_ids for sequence in output.sequences] == tokens
    if scores is not None:
        assert [sequence.score for sequence in output.sequences] == pytest.approx(scores, abs=1e-9)
    for sequence in output.sequences:
        count = len(sequence.token_ids)
        assert sequence.tokens == prompt + sequence.token_ids
        assert sequence.finish_reason == ("stop" if sequence.token_ids[-1] in ends else "length")
        with torch.inference_mode():
            log_probs = reference(torch.tensor([sequence.tokens])).logits[0].log_softmax(-1)
        own = log_probs[len(prompt) - 1 : -1].gather(1, torch.tensor(sequence.token_ids)[:, None])[:, 0].tolist()
        told = [entries[token].logprob for entries, token in zip(sequence.logprobs, sequence.token_ids, strict=True)]
        assert told == pytest.approx(own, abs=1e-9)
        assert sequence.cum_logprob == pytest.approx(sum(own), abs=1e-9)
        assert sequence.score == pytest.approx(sum(own) / count**params.length_penalty, abs=1e-9)


def tokens_of(outputs: Sequence[BeamSearchOutput]) -> list[list[list[int]]]:
    return [[sequence.tokens for sequence in output.sequences] for output in outputs]
