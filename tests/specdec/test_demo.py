"""The built-in model and head on real prompts: parity with transformers, and invisible speculation."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec import LLM, DraftShape, SamplingParams
from specdec.config import DEMO
from tests.fakes import RandomDrafter
from tests.profiles import IS_NIGHTLY

pytestmark = pytest.mark.slow

# Conversations of each kind.
EACH = 10 if IS_NIGHTLY else 4
PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts"


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(draft=None, dtype="float64")


@pytest.fixture(scope="module")
def eagle() -> LLM:
    return LLM(draft="eagle", dtype="float64", adaptive_drafts=False)


@pytest.fixture(scope="module")
def prompts(plain: LLM) -> list[list[int]]:
    """Some conversations of each kind."""
    chosen = []
    for name in ("sgd-eval", "gsm8k-eval"):
        lines = (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        chosen += [plain.chat_prompt(json.loads(line)["messages"]) for line in lines[:EACH]]
    return chosen


def test_greedy_tokens_and_logits_equal_transformers(plain: LLM, eagle: LLM, prompts: list[list[int]]) -> None:
    """64 tokens after real prompts in float64, without drafts and with the head's."""
    reference = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float64).eval()
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    ours = [output.token_ids for output in plain.generate(prompts, params)]
    drafted = eagle.generate(prompts, params)
    for prompt, tokens, output in zip(prompts, ours, drafted, strict=True):
        # The reference's greedy choice after every prefix of our tokens; if all agree, it would generate the same.
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert len(tokens) == 64
        assert tokens == logits.argmax(-1).tolist()
        assert output.token_ids == tokens
    # The drafts must have mattered for this to mean anything.
    assert sum(o.stats.tokens for o in drafted) > 1.8 * sum(o.stats.steps for o in drafted)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_head_none_and_random_drafts_agree(
    plain: LLM, eagle: LLM, prompts: list[list[int]], temperature: float
) -> None:
    """Alone and in a batch of eight prompts of different lengths."""
    chosen = sorted(prompts, key=len)[:: len(prompts) // 8][:8]
    assert len({len(prompt) for prompt in chosen}) > 4
    params = [
        SamplingParams(temperature=temperature, seed=11 + i, max_tokens=16, ignore_eos=True) for i in range(len(chosen))
    ]
    random = LLM(draft="eagle", dtype="float64", shape=DraftShape(4, 4, 24), adaptive_drafts=False)
    random.engine.worker.drafter = RandomDrafter(random.model.config.vocab_size, seed=1)
    want = [output.token_ids for output in plain.generate(chosen, params)]
    for llm in (eagle, random):
        assert [output.token_ids for output in llm.generate(chosen, params)] == want
    for prompt, own, tokens in zip(chosen[:4], params, want, strict=False):
        assert eagle.generate([prompt], own)[0].token_ids == tokens


def test_the_answer_is_readable(eagle: LLM) -> None:
    """A complete sentence of known words, ended by the model itself."""
    chat = [{"role": "user", "content": "I would like to find a restaurant in San Jose."}]
    output = eagle.chat(chat, SamplingParams(temperature=0, max_tokens=64))[0]
    assert output.finish_reason == "stop"
    assert output.text[0].isupper()
    assert output.text[-1] in ".?!"
    assert len(output.text.split()) >= 3


def test_both_fit_the_package() -> None:
    files = [file for file in DEMO.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 40 * 2**20
    for part in ("target", "eagle", "eagle3", "dspark"):
        card = (DEMO / part / "README.md").read_text(encoding="utf-8")
        for named in ("CC BY-SA 4.0", "GSM8K", "MIT", "PSF"):
            assert named in card


@pytest.mark.long
def test_the_first_command_shows_accepted_drafts_every_time(eagle: LLM) -> None:
    """Adaptive trees have nothing to learn from yet, so the first ones are those of fixed trees, whatever they cost."""
    prompt = [{"role": "user", "content": "I would like to find a restaurant in San Jose."}]
    params = SamplingParams(temperature=0, max_tokens=64)
    fixed = eagle.chat(prompt, params)[0]
    # Small, because what is measured at its start takes a while.
    with LLM(draft="eagle", dtype="float64", max_num_seqs=1, max_model_len=128) as adaptive:
        found = adaptive.chat(prompt, params)[0]
    assert found.stats == fixed.stats
    assert sum(found.outputs[0].accepted) >= 5
