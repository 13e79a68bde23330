"""Programs as vLLM's basic offline examples are written, with another import alone; in our own words.

Each is what a user of vLLM would write: generate, chat, batches of chats, a choice among classes, samples, beams, a
shared prefix, metrics.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from specdec import LLM, BeamSearchParams, Counter, Metric, SamplingParams, StructuredOutputsParams, Vector
from specdec.config import DEMO, DEMO_HEAD

MODEL = str(DEMO / "target")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The demo model, as a program written for vLLM names its target and head."""
    config = {"method": "eagle3", "model": str(DEMO_HEAD), "num_speculative_tokens": 4}
    with LLM(
        model=MODEL,
        tokenizer=MODEL,
        trust_remote_code=False,
        dtype="float32",
        seed=0,
        tensor_parallel_size=1,
        max_model_len=512,
        max_num_seqs=16,
        enforce_eager=True,
        speculative_config=config,
        # Not vLLM's: nothing is measured at the start of this test.
        adaptive_drafts=False,
        prefill_stretch=0,
    ) as found:
        yield found


@pytest.mark.long
def test_basic_generation(llm: LLM) -> None:
    prompts = ["I would like to find", "The train to Cambridge", "My telephone number is"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12, seed=3))
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        generated = output.outputs[0]
        assert generated.text
        assert (generated.index, generated.finished()) == (0, True)
        assert generated.text == llm.get_tokenizer().decode(generated.token_ids, skip_special_tokens=True)


def test_default_parameters_that_a_program_changes(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature, params.ignore_eos = 6, 0.0, True
    (output,) = llm.generate("I would like to find", params)
    assert len(output.outputs[0].token_ids) == 6


def test_chat_and_batches_of_chats(llm: LLM) -> None:
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "You help with bookings."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "Hello, what can I do?"},
        {"role": "user", "content": "Book a table for two."},
    ]
    params = SamplingParams(temperature=0, max_tokens=16)
    (alone,) = llm.chat(conversation, params, use_tqdm=False)
    batch = llm.chat([conversation] * 4, params, use_tqdm=True)
    assert [output.outputs[0].text for output in batch] == [alone.outputs[0].text] * 4
    assert alone.outputs[0].text
    prompt = llm.get_tokenizer().apply_chat_template(
        [
            {**message, "content": "Hello"} if isinstance(message["content"], list) else message
            for message in conversation
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    ids = llm.get_tokenizer()(prompt, add_special_tokens=False)["input_ids"]
    assert alone.prompt_token_ids == ids


def test_a_class_by_a_structured_choice(llm: LLM) -> None:
    classes = ["Positive", "Negative"]
    params = SamplingParams(temperature=0, max_tokens=10, structured_outputs=StructuredOutputsParams(choice=classes))
    outputs = llm.generate(["This is a great place: ", "The food was cold: "], params)
    assert all(output.outputs[0].text in classes for output in outputs)


def test_several_samples_of_a_prompt(llm: LLM) -> None:
    (output,) = llm.generate("I would like", SamplingParams(n=4, temperature=1.0, max_tokens=8, logprobs=1, seed=3))
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(one.token_ids) for one in output.outputs}) > 1
    for one in output.outputs:
        assert one.logprobs is not None
        chosen = [entries[token].logprob for entries, token in zip(one.logprobs, one.token_ids, strict=True)]
        assert one.cumulative_logprob == pytest.approx(sum(chosen))


def test_beam_search(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    (output,) = llm.beam_search([{"prompt": "I would like"}], params)
    scores = [sequence.cum_logprob for sequence in output.sequences]
    assert len(scores) == 3
    assert all(sequence.text and sequence.text.startswith("I would like") for sequence in output.sequences)


@pytest.mark.long
def test_a_shared_prefix_is_computed_once(llm: LLM) -> None:
    prefix = "You book tables, trains, taxis and rooms for guests of this hotel. " * 6
    questions = ["Where is the bar?", "When does the train leave?", "How far is the museum?"]
    prompts = [prefix + question for question in questions]
    params = SamplingParams(temperature=0, max_tokens=8)
    first = llm.generate(prompts[0], params)
    rest = llm.generate(prompts[1:], params)
    assert first[0].num_cached_tokens == 0
    assert all(output.num_cached_tokens and output.num_cached_tokens >= 32 for output in rest)
    with LLM(
        MODEL, dtype="float32", enable_prefix_caching=False, adaptive_drafts=False, prefill_stretch=0, max_model_len=512
    ) as plain:
        alone = plain.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in [*first, *rest]] == [one.outputs[0].token_ids for one in alone]
    assert [output.num_cached_tokens for output in alone] == [0, 0, 0]


def test_metrics_of_speculation(llm: LLM) -> None:
    """Mean acceptance length, as vLLM's example of speculative decoding computes it."""

    def count(metrics: list[Metric], name: str) -> int:
        return sum(metric.value for metric in metrics if isinstance(metric, Counter) and metric.name == name)

    before = llm.get_metrics()
    (output,) = llm.generate("I would like to find a restaurant in", SamplingParams(temperature=0, max_tokens=48))
    after = llm.get_metrics()
    drafts, accepted = (
        count(after, f"vllm:spec_decode_num_{what}") - count(before, f"vllm:spec_decode_num_{what}")
        for what in ("drafts", "accepted_tokens")
    )
    assert drafts > 0
    assert accepted == sum(output.outputs[0].accepted)
    (by_depth,) = (metric.values for metric in after if isinstance(metric, Vector))
    assert sum(by_depth) == count(after, "vllm:spec_decode_num_accepted_tokens")
    assert 0 < len(by_depth) <= 4
    assert output.metrics is not None
    assert output.metrics.num_generation_tokens == len(output.outputs[0].token_ids)
