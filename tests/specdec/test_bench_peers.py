"""Adapters of other engines: transformers itself on a tiny checkpoint, vLLM as far as a stand-in goes."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec import LLM, SamplingParams
from specdec.bench.peers import PeerSetup, load_peer
from specdec.bench.timed_run import EngineContender, TimedRun
from tests.fakes import save_shallow_llama
from tests.specdec.tiny_checkpoints import Tiny

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 8, 9, 10, 11, 8, 9], [12], [13, 14]]


def setup(tiny: Tiny, draft: str | None = None, ends: tuple[int, ...] = (), **settings: str) -> PeerSetup:
    return PeerSetup("peer", tiny.target, "float64", 64, 8, frozenset(ends), draft, settings)


@pytest.fixture(scope="module")
def own(tiny: Tiny) -> TimedRun:
    """The same prompts on this engine."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return EngineContender(LLM(tiny.target, draft=None, dtype="float64", device="cpu"), params).run(PROMPTS)


def check_times(run: TimedRun) -> None:
    assert all(0 < sample.first <= sample.seconds <= run.seconds for sample in run.samples)


def test_transformers_gives_the_same_tokens_in_padded_batches(tiny: Tiny, own: TimedRun) -> None:
    run = load_peer("transformers", setup(tiny, batch="3")).run(PROMPTS)
    assert [sample.token_ids for sample in run.samples] == [sample.token_ids for sample in own.samples]
    check_times(run)
    assert run.samples[3].first > run.samples[0].seconds
    assert {(sample.stats.steps, sample.stats.tau) for sample in run.samples} == {(7, 1.0)}


def test_transformers_stops_at_end_tokens(tiny: Tiny, own: TimedRun) -> None:
    end = own.samples[0].token_ids[2]
    run = load_peer("transformers", setup(tiny, ends=(end,))).run(PROMPTS)
    for sample, whole in zip(run.samples, own.samples, strict=True):
        length = whole.token_ids.index(end) + 1 if end in whole.token_ids else 8
        assert sample.token_ids == whole.token_ids[:length]
    check_times(run)


def test_transformers_with_prompt_lookup(tiny: Tiny, own: TimedRun) -> None:
    run = load_peer("transformers", setup(tiny, "ngram", tokens="4")).run(PROMPTS)
    assert [sample.token_ids for sample in run.samples] == [sample.token_ids for sample in own.samples]
    check_times(run)
    assert all(sample.stats.steps <= sample.stats.tokens <= 7 for sample in run.samples)


@pytest.mark.long
def test_transformers_with_an_assistant(tiny: Tiny, own: TimedRun, tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.float64)
    save_shallow_llama(tmp_path, target)
    run = load_peer("transformers", setup(tiny, str(tmp_path))).run(PROMPTS)
    assert [sample.token_ids for sample in run.samples] == [sample.token_ids for sample in own.samples]
    assert sum(sample.stats.steps for sample in run.samples) < 28
    assert sum(sum(sample.stats.accepted_per_depth) for sample in run.samples) > 0


class FakeVllm:
    """The part of vLLM that `specdec.bench.vllm_peer` uses, by its documentation."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.runs, self.calls = settings, 0, []  # type: ignore[var-annotated]

    def generate(self, prompts: list[dict[str, list[int]]], params: Any, use_tqdm: bool) -> list[Any]:
        self.calls.append((prompts, params, use_tqdm))
        self.runs += 1
        clock = SimpleNamespace(first_token_latency=0.25, first_token_ts=100.0, last_token_ts=101.5)
        completions = [SimpleNamespace(token_ids=(1, 2, 3))]
        return [SimpleNamespace(outputs=completions, metrics=clock) for _ in prompts]

    def get_metrics(self) -> list[Any]:
        return [
            SimpleNamespace(name="vllm:spec_decode_num_drafts", value=10 * self.runs),
            SimpleNamespace(name="vllm:spec_decode_num_draft_tokens", value=30 * self.runs),
            SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[6 * self.runs, 4 * self.runs]),
            SimpleNamespace(name="vllm:num_requests_running", value=0),
        ]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = FakeVllm, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    yield
    sys.modules.pop("specdec.bench.vllm_peer", None)


@pytest.mark.usefixtures("vllm")
def test_vllm_plain(tiny: Tiny) -> None:
    peer: Any = load_peer("vllm", setup(tiny, ends=(2, 7)))
    run = peer.run(PROMPTS[:2])
    ((prompts, params, use_tqdm),) = peer._llm.calls
    assert "speculative_config" not in peer._llm.settings
    assert (peer._llm.settings["model"], peer._llm.settings["dtype"]) == (str(tiny.target), "float64")
    assert peer._llm.settings["enable_prefix_caching"] is False
    assert prompts == [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]]
    assert (params.temperature, params.max_tokens, params.ignore_eos, params.stop_token_ids) == (0, 8, False, [2, 7])
    assert use_tqdm is False
    assert [(sample.token_ids, sample.first, sample.seconds) for sample in run.samples] == [([1, 2, 3], 0.25, 1.75)] * 2
    assert run.samples[0].stats.steps == 0


@pytest.mark.usefixtures("vllm")
def test_vllm_with_drafts(tiny: Tiny) -> None:
    peer: Any = load_peer("vllm", setup(tiny, "path/to/head", tokens="2"))
    assert peer._llm.settings["speculative_config"] == {
        "method": "eagle3",
        "model": "path/to/head",
        "num_speculative_tokens": 2,
    }
    assert load_peer("vllm", setup(tiny, "ngram"))._llm.settings["speculative_config"]["method"] == "ngram"  # type: ignore[attr-defined]
    for _ in range(2):
        stats = peer.run(PROMPTS[:2]).samples[0].stats
        assert (stats.steps, stats.drafted, stats.accepted_per_depth, stats.tau) == (10, 30, [6, 4], 2.0)
