"""Many short requests of every kind on a cache too small for them: nothing is lost, no block leaks."""

import random

import pytest

from benchmarks.soak import soak
from specdec import LLM
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = pytest.mark.slow

BLOCK_SIZE = 8
# Numbers of all that target and head keep of a token: two layers and one, of two keys and two values of 8, a feature.
ENTRY_BYTES = 4 * (3 * 4 * 8 + 32)


@pytest.mark.long
def test_nothing_is_lost_in_500_requests(tiny: Tiny) -> None:
    llm = LLM(
        tiny.target,
        tiny.head,
        dtype="float32",
        max_num_seqs=32,
        max_num_batched_tokens=64,
        scheduling_policy="priority",
        watermark=0.0,
        adaptive_drafts=False,
        max_model_len=128,
        block_size=BLOCK_SIZE,
        kv_cache_memory=24 * BLOCK_SIZE * ENTRY_BYTES,
    )
    assert llm.engine.worker.cache.num_blocks == 24
    chance = random.Random(0)
    texts = [[chance.randrange(llm.model.config.vocab_size) for _ in range(60)] for _ in range(8)]
    report = soak(llm, texts, num_requests=500, seed=0, sample_every=50)
    stats = report.stats
    assert stats.queued >= 500
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert report.aborted_within > 0
    assert stats.drafts_accepted > 0
    assert set(report.reasons) == {"stop", "length", "abort"}
    assert stats.kv_usage == stats.running == stats.waiting == 0
