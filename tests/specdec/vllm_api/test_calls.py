"""vLLM's forms of prompts and conversations, the tokenizer and the metrics."""

import logging
import re
from typing import Any

import numpy as np
import pytest

from specdec import LLM, BeamSearchParams, Counter, Gauge, SamplingParams, Vector
from tests.specdec.tiny_checkpoints import Tiny

FREE = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
QUESTION = {"role": "user", "content": "ab"}


def test_prompts_in_dicts(llm: LLM) -> None:
    text, ids = llm.generate("abc", FREE)[0], llm.generate([9, 8, 7], FREE)[0]
    prompts: list[Any] = [
        {"prompt": "abc"},
        {"prompt_token_ids": [9, 8, 7]},
        {"prompt_token_ids": np.array([9, 8, 7]), "prompt": "their text", "multi_modal_data": None},
        "abc",
        [9, 8, 7],
    ]
    outputs = llm.generate(prompts, FREE, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["abc", None, "their text", "abc", None]
    for output, want in zip(outputs, [text, ids, ids, text, ids], strict=True):
        assert (output.prompt_token_ids, output.token_ids) == (want.prompt_token_ids, want.token_ids)
    assert llm.generate({"prompt": "abc"}, FREE)[0].token_ids == text.token_ids
    assert next(iter(llm.stream({"prompt": "abc"}, FREE))).prompt == "abc"


def test_a_salt_of_one_prompt(llm: LLM) -> None:
    prompt = [5 + token % 40 for token in range(33)]
    cached = []
    for salt in ("one", "one", "two"):
        cached += llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, FREE)
    assert [output.num_cached_tokens for output in cached] == [0, 32, 0]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({}, "a prompt has neither 'prompt' nor 'prompt_token_ids'; give one of them"),
        ({"prompts": "x"}, "a prompt has no 'prompts'; the nearest it has is 'prompt'"),
        ({"prompt": 5}, "the prompt is 5; it must be text"),
        ({"prompt_token_ids": "ab", "prompt": 3}, "the prompt is 3; it must be text"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "multi_modal_data is {'image': 1}, which is not supported"),
        ({"prompt_embeds": [0.5]}, "prompt_embeds is [0.5], which is not supported; prompts are text or token ids"),
        ({"prompt_token_ids": [10**6]}, "prompt token 1000000 is outside the vocabulary"),
    ],
)
def test_a_prompt_that_is_none_is_one_line(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        llm.generate([prompt], FREE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate("a", FREE, use_tqmd=False), "LLM.generate has no 'use_tqmd'; the nearest it has is"),
        (lambda llm: llm.generate(), "LLM.generate: missing a required argument: 'prompts'"),
        (lambda llm: llm.generate("a", {"n": 1}), "sampling_params is {'n': 1}; it must be SamplingParams"),
        (lambda llm: llm.generate(["a"], [None]), "sampling_params is None; it must be SamplingParams"),
        (lambda llm: llm.generate("a", lora_request="x"), "lora_request is 'x'; it must be a LoRARequest"),
        (lambda llm: llm.stream("a", params=FREE), "LLM.stream has no 'params'; the nearest it has is"),
        (lambda llm: llm.chat("hello"), "a message is 'h'; it must be a dict with role and content"),
        (lambda llm: llm.chat([QUESTION], FREE, tool=[]), "LLM.chat has no 'tool'; the nearest it has is 'tools'"),
        (
            lambda llm: llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            "a content part is of type 'image_url'; only text is supported",
        ),
        (lambda llm: llm.chat([{"role": "user", "content": [3]}]), "a content part is of type 3; only text"),
        (lambda llm: llm.chat([QUESTION], chat_template="{{ nothing.at.all }}"), "the chat template refuses"),
        (lambda llm: llm.beam_search("a", FREE), "params is SamplingParams("),
        (lambda llm: llm.beam_search("a", params=BeamSearchParams(2, 2), width=3), "LLM.beam_search has no 'width'"),
    ],
)
def test_calls_that_cannot_be_are_one_line(llm: LLM, call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
        call(llm)
    assert "\n" not in str(caught.value)


def test_parameters_of_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (2, 5)]
    outputs = llm.generate([{"prompt": "a"}, {"prompt": "b"}], params, use_tqdm=False, lora_request=None)
    assert [len(output.token_ids) for output in outputs] == [2, 5]
    outputs = llm.chat([[QUESTION], [QUESTION]], params, False)
    assert [len(output.token_ids) for output in outputs] == [2, 5]


def test_content_parts_are_text(llm: LLM) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "input_text", "text": "cd"}, "ef"]
    whole = llm.chat([{"role": "user", "content": "ab\ncd\nef"}], FREE)[0]
    assert llm.chat([{"role": "user", "content": parts}], FREE)[0].prompt_token_ids == whole.prompt_token_ids


def test_tools_that_the_template_does_not_read_are_warned_of_once(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(tiny.target, None, dtype="float64", adaptive_drafts=False, prefill_stretch=0)
    reads, tools = "{{ messages[0].content }}{% if tools %}{{ tools[0].name }}{% endif %}", [{"name": "x"}]
    with caplog.at_level(logging.WARNING, "specdec"):
        llm.chat([QUESTION], FREE)
        llm.chat([QUESTION], FREE, tools=[])
        llm.chat([QUESTION], FREE, tools=tools, chat_template=reads)
        assert "tools" not in caplog.text
        for _ in range(2):
            llm.chat([QUESTION], FREE, tools=tools)
    assert caplog.text.count("has tools, and the chat template does not read them") == 1


def test_templates_and_their_variables(llm: LLM) -> None:
    def prompt(**arguments: Any) -> str:
        ids = llm.chat([QUESTION, {"role": "assistant", "content": "cd"}], FREE, False, **arguments)[0].prompt_token_ids
        return llm.get_tokenizer().decode(ids)

    template = "{{ messages[0].content }}{{ mark }}{% if tools %}{{ tools[0].name }}{% endif %}"
    given: dict[str, Any] = {"tools": [{"name": "x"}], "chat_template_kwargs": {"mark": "!"}}
    assert prompt(chat_template=template, **given) == "ab!x"
    assert prompt(chat_template=template, chat_template_content_format="auto") == "ab"
    last = "{% for m in messages %}{{ m.content }}/{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    assert prompt(chat_template=last) == "ab/cd/>"
    assert prompt(chat_template=last, add_generation_prompt=False) == "ab/cd/"
    assert prompt(chat_template=last, add_generation_prompt=False, continue_final_message=True) == "ab/cd"


@pytest.mark.long
@pytest.mark.parametrize("content", ["ab", [{"type": "text", "text": "ab"}], ["ab"]], ids=str)
def test_no_text_is_lost_in_templates_that_read_parts(llm: LLM, content: Any) -> None:
    """Also of tools and of developers, whose arguments and role templates read in one way."""

    def prompt(template: str, *messages: Any, **arguments: Any) -> str:
        (output,) = llm.chat(list(messages), FREE, False, chat_template=template, **arguments)
        return str(llm.get_tokenizer().decode(output.prompt_token_ids))

    for body in (
        "{{ m.content[0].text }}",
        "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}",
        "{{ m.content }}",
    ):
        template = "{% for m in messages %}" + body + "/{% endfor %}"
        messages = {"role": "user", "content": content}, {"role": "assistant", "content": content}
        assert prompt(template, *messages) == "ab/ab/"
        goes_on: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
        assert prompt(template, *messages, **goes_on) == "ab/ab"
    function = {"name": "f", "arguments": '{"a": 1}'}
    call = {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}
    assert prompt("{{ messages[0].tool_calls[0].function.arguments | tojson }}", call) == '{"a": 1}'
    assert prompt("{{ messages[0].role }}", {"role": "developer", "content": content}) == "system"


def test_the_tokenizer_is_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True)["input_ids"]
    assert ids == llm.chat_prompt([QUESTION])
    assert llm.generate("ab", FREE)[0].text == tokenizer.decode(llm.generate("ab", FREE)[0].token_ids)


def test_settings_of_the_callers_tokenizer_change_no_request(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert len(tokenizer("abcdef", truncation=True, max_length=2)["input_ids"]) == 2
    tokenizer.backend_tokenizer.enable_truncation(2)
    assert len(llm.generate("abcdef", FREE)[0].prompt_token_ids) == 6
    assert llm.get_tokenizer() is tokenizer


def test_metrics_are_the_engines_counts(llm: LLM, tiny: Any) -> None:
    before = {metric.name: metric for metric in llm.get_metrics()}
    outputs = llm.generate(["ab", "cd"], FREE)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    stats = llm.stats()
    generated, old = metrics["vllm:generation_tokens"], before["vllm:generation_tokens"]
    assert isinstance(generated, Counter)
    assert isinstance(old, Counter)
    assert generated.value - old.value == sum(len(output.token_ids) for output in outputs)
    running, depths = metrics["vllm:num_requests_running"], metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(running, Gauge)
    assert isinstance(depths, Vector)
    assert (running.value, depths.values) == (0, stats.accepted_per_depth)
    drafts = metrics["vllm:spec_decode_num_drafts"]
    assert isinstance(drafts, Counter)
    assert drafts.value == stats.trees_verified > 0
    assert drafts.labels == {"model_name": str(tiny.target), "engine": "0"}
