"""Forced tool calls through the engine: the same with drafts and without, valid under every acceptance rule."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from specdec.core.call_forms import HERMES, LLAMA3, CallForm
from specdec.core.call_grammar import forced_calls
from specdec.core.tool_choice import Function, ToolChoice
from tests.profiles import num_cases
from tests.specdec.structured.checkpoints import EOS, Bytes, load
from tests.strategies import seeds

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7]
# A special token, which stands for no text, as the opening tag; the closing one is spelled.
OPENING = 1
SPECIAL = {HERMES.opening: OPENING}
PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"type": "string", "maxLength": 3}, r'"([^"\\]|\\.|\\u[0-9a-fA-F]{4}){0,6}"'),
    "same": ({"enum": ["name", True]}, '("name"|true)'),
    "n": ({"type": "integer", "minimum": -3, "maximum": 12}, "-?[0-9]{1,2}"),
}


@pytest.fixture(scope="module")
def engines(bytes_model: Bytes) -> dict[tuple[str, bool], LLM]:
    """Engines by rule, with drafts and without."""
    rules = ["coupled", "rejection"]
    return {
        ("coupled", False): load(bytes_model, None),
        **{(rule, True): load(bytes_model, bytes_model.head, rule) for rule in rules},
    }


@pytest.mark.long
@settings(max_examples=num_cases(8))
@given(
    tools=st.dictionaries(
        st.sampled_from(["f", "name", "names"]), st.lists(st.sampled_from(sorted(PARTS)), unique=True), min_size=1
    ),
    form=st.sampled_from([HERMES, LLAMA3, None]),
    is_named=st.booleans(),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=seeds,
)
def test_drafts_change_no_call(
    engines: dict[tuple[str, bool], LLM],
    tools: dict[str, list[str]],
    form: CallForm | None,
    is_named: bool,
    temperature: float,
    seed: int,
) -> None:
    functions = [
        Function(name, {"type": "object", "properties": {key: PARTS[key][0] for key in keys}, "required": keys})
        for name, keys in tools.items()
    ][: 1 if is_named else None]
    choice = ToolChoice("named", [functions[0].name]) if is_named else ToolChoice("required")
    structure = forced_calls(choice, functions, form, SPECIAL, is_single=False)
    # A model without chance may write calls for ever, so a penalty ends them.
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=150, structured_outputs=structure, presence_penalty=0.1
    )
    found = {key: llm.generate([PROMPT], params, use_tqdm=False)[0] for key, llm in engines.items()}
    assert found["coupled", True].token_ids == found["coupled", False].token_ids
    for output in found.values():
        one = output.outputs[0]
        if one.finish_reason == "stop":
            assert re.fullmatch(_pattern(form, functions, is_named), one.text), one.text
        if form is HERMES:
            assert one.token_ids[0] == OPENING
    assert sum(found["coupled", True].outputs[0].accepted) > 0


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("one", "two")
]
ALLOWED: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "two"}]}
SHOWN = "{{ messages[0].content }}{% for tool in tools or [] %} {{ tool.function.name }}{% endfor %}"


@pytest.mark.long
def test_a_chat_of_the_python_api_forces_calls(engines: dict[tuple[str, bool], LLM]) -> None:
    llm, talk = engines["coupled", True], [{"role": "user", "content": "a"}]
    # A likely end, for the model has no sense of it.
    params = SamplingParams(temperature=1.0, max_tokens=200, seed=1, logit_bias={EOS: 3.0})

    def chat(template: str, choice: Any, given: SamplingParams | list[SamplingParams] = params) -> RequestOutput:
        shown: dict[str, Any] = {"chat_template": template, "tools": TOOLS, "tool_choice": choice}
        return llm.chat([talk] if isinstance(given, list) else talk, given, use_tqdm=False, **shown)[0]

    call = r'<tool_call>\n\{"name": "(one|two)", "arguments": \{\}\}\n</tool_call>'
    assert re.fullmatch(rf"{call}(\n{call})*", chat(SHOWN + HERMES.opening, "required").text)
    assert chat(SHOWN, {"type": "function", "function": {"name": "one"}}, [params]).text == "{}"
    assert set(re.findall('"name": "(.+?)"', chat(SHOWN, ALLOWED).text)) == {"two"}
    # What the model chooses, and no tools.
    plain = chat(SHOWN, None)
    assert plain.token_ids == chat(SHOWN, "auto").token_ids
    (bare,) = llm.chat(talk, params, use_tqdm=False, chat_template=SHOWN)
    assert plain.prompt_token_ids != bare.prompt_token_ids == chat(SHOWN, "none").prompt_token_ids
    with pytest.raises(ValueError, match="the request offers no function"):
        llm.chat(talk, params, chat_template=SHOWN, tool_choice="required")
    for tools in (TOOLS[0], "one", [TOOLS]):
        with pytest.raises(ValueError, match="it must be a list of OpenAI's descriptions of functions"):
            llm.chat(talk, params, chat_template=SHOWN, tools=tools)
    form = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(ValueError, match="structured_outputs and a tool_choice that forces calls exclude each other"):
        chat(SHOWN, "required", form)


def _pattern(form: CallForm | None, functions: list[Function], is_named: bool) -> str:
    """The expression that an output matches; special tokens are left out of its text."""

    def arguments(function: Function) -> str:
        return r"\{" + ", ".join(f'"{key}": {PARTS[key][1]}' for key in function.parameters["properties"]) + r"\}"

    if form is None and is_named:
        return arguments(functions[0])
    key = "arguments" if form is HERMES else "parameters"
    objects = "|".join(rf'\{{"name": "{each.name}", "{key}": {arguments(each)}\}}' for each in functions)
    call = rf"\n({objects})\n</tool_call>" if form is HERMES else f"({objects})"
    between = "\n" if form is HERMES else "; " if form is LLAMA3 else ", "
    calls = call if is_named else f"{call}({between}{call})*"
    return rf"\[{calls}\]" if form is None else calls
