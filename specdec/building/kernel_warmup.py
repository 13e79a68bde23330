"""Warm-up: dummy requests at start compile a GPU's kernels, so that no user's request waits for a compilation."""

from collections.abc import Sequence

from specdec.cache.block_moves import BlockMove
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.drafting.chains import ChainRates
from specdec.draft_heads.drafting.predicted_text import PredictedText
from specdec.engine.engine import LLMEngine
from specdec.text.detokenizer import Detokenizer
from specdec.verify.sampling import Sampling

# They take different kernels, or the same with scores of another type.
PLAIN = (Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.7, top_p=0.9))
# They draft without graphs, level by level, and the number of levels follows from the tokens that are left.
EDITED = (Sampling(repetition_penalty=1.1), Sampling(temperature=0.7, repetition_penalty=1.1))
# Tokens of a prompt, and steps: the prompt's, one whose trees are drafted before it, and two for trees drafted ahead.
PROMPT, STEPS = 4, 4


def dummy_request(name: str, prompt: int, sampling: Sampling, longest: int, predicted: int) -> Request:
    """Return a request for warm-up and memory profiling.

    Args:
        prompt: its number of tokens.
        longest: limit of the request's tokens.
        predicted: tokens of a predicted text, of which chains are verified; 0 for none.
    """
    return Request(
        request_id=name,
        token_ids=[0] * prompt,
        num_prompt=prompt,
        params=SamplingParams(seed=0),
        sampling=sampling,
        max_length=longest,
        end_tokens=frozenset(),
        detokenizer=Detokenizer(None, ()),
        # No request shares the prefix of another.
        cache_salt=name,
        chain_sources=[PredictedText([0] * predicted, prompt, ChainRates())] if predicted else [],
    )


def warmup_kinds(depth: int) -> list[tuple[Sampling, int]]:
    """Return the sampling and the number of new tokens of each warm-up request.

    Args:
        depth: levels of draft trees.
    """
    kinds = [(sampling, STEPS * (1 + depth)) for sampling in PLAIN]
    # A token after the prompt, the levels, and the target's own behind them.
    return kinds + [(sampling, levels + 2) for levels in range(1, depth + 1) for sampling in EDITED]


def run_warmup(
    engine: LLMEngine, kinds: Sequence[tuple[Sampling, int]], longest: int, entries: int, predicted: int
) -> None:
    """Decode a request of each kind, one at a time; other requests find none of what that leaves in the cache.

    Kernels are compiled at their first launch, of each type of scores anew, which takes seconds where a vocabulary is
    large. Larger batches take no others.

    Args:
        engine: an idle one, which is not used afterwards. On several ranks all run the same.
        kinds: of `warmup_kinds`.
        longest: limit of a request's tokens.
        entries: cache entries of a request's drafts.
        predicted: see `dummy_request`.
    """
    cache = engine.worker.cache
    cache.apply_moves([BlockMove(cache.null_block, cache.null_block)])
    room = min(longest, cache.num_blocks * cache.block_size // 2 - entries)
    for number, (sampling, tokens) in enumerate(kinds):
        limit = min(PROMPT + tokens, room)
        if limit < PROMPT + 2:
            continue
        request = dummy_request(f"warmup-{number}", PROMPT, sampling, limit, predicted)
        engine.add_request(request)
        for _ in range(STEPS):
            if engine.has_unfinished:
                engine.step()
        engine.abort(request)
