"""Chat templates read content as text or as parts, and no text is lost."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.models.tokenizer import Tokenizer
from tests.profiles import num_cases
from tests.specdec.tiny_checkpoints import Tiny

LOOP = "{% for p in CONTENT %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
EITHER = "{% if CONTENT is string %}{{ CONTENT }}{% else %}" + LOOP + "{% endif %}"
IN_MESSAGES = "{% for message in messages %}[{{ message.role }}]BODY{% endfor %}"
# Ways to read content: an expression or statements, with CONTENT for the content.
BODIES = {
    "text": "{{ CONTENT }}",
    "trimmed": "{{ CONTENT | trim }}",
    "added": "{{ '<' + CONTENT + '>' }}",
    "text only": "{% if CONTENT is string %}{{ CONTENT }}{% endif %}",
    "characters": "{% for line in CONTENT.split('#') %}{{ line }}{% endfor %}",
    "first part": "{{ CONTENT[0].text }}",
    "first part by key": "{{ CONTENT[0]['text'] | trim }}",
    "first filter": "{{ (CONTENT | first).text }}",
    "text or first part": "{% if CONTENT is string %}{{ CONTENT }}{% else %}{{ CONTENT[0]['text'] }}{% endif %}",
    "loop": LOOP,
    "text or loop": EITHER,
    "mapped": "{{ CONTENT | map(attribute='text') | join('|') }}",
    "selected": "{% for p in CONTENT | selectattr('type', 'equalto', 'text') %}{{ p['text'] }}{% endfor %}",
    "assigned": "{% set given = CONTENT %}" + LOOP.replace("CONTENT", "given"),
    "namespace": "{% set ns = namespace(c=CONTENT) %}" + LOOP.replace("CONTENT", "ns.c"),
    "alternative": LOOP.replace("CONTENT", "(CONTENT or [])"),
    "broken": "{% generation %}{% for p in CONTENT %}{{ p.text }}{% continue %}{% endfor %}{% endgeneration %}",
}
ACCESS = ("message.content", "message['content']", "message.get('content')")
MACRO = "{% macro show(c) %}" + EITHER.replace("CONTENT", "c") + "{% endmacro %}"
TEMPLATES = {
    **{
        f"{name}, {access}": IN_MESSAGES.replace("BODY", body.replace("CONTENT", access))
        for name, body in BODIES.items()
        for access in ACCESS
    },
    "macro": MACRO + IN_MESSAGES.replace("BODY", "{{ show(message.content) }}"),
    "by index": "{% for i in range(messages | length) %}"
    + LOOP.replace("CONTENT", "messages[i].content")
    + "{% endfor %}",
    # Content of users as parts, that of others as text.
    "by role": IN_MESSAGES.replace(
        "BODY",
        "{% if message.role == 'user' %}"
        + LOOP.replace("CONTENT", "message.content")
        + "{% else %}{{ '<' + message.content }}{% endif %}",
    ),
    # As Mistral's: the system message by index, and turns in order.
    "strict": (
        "{% if messages[0].role == 'system' %}{{ messages[0].content[0].text }}{% set messages = messages[1:] %}"
        "{% endif %}{% for message in messages %}{% if loop.index0 % 2 != (message.role != 'user') | int %}"
        "{{ raise_exception('turns') }}{% endif %}" + LOOP.replace("CONTENT", "message.content") + "{% endfor %}"
    ),
}
ROLES = ("system", "user", "assistant", "user")
WORDS = st.text("abcdefghij", min_size=1, max_size=5).map(lambda word: f"x{word}x")
PART = WORDS.flatmap(
    lambda word: st.sampled_from(
        [
            word,
            {"type": "text", "text": word},
            {"type": "input_text", "text": word},
            {"type": "output_text", "text": word},
            {"type": "refusal", "refusal": word},
        ]
    )
)
CONTENTS = WORDS | st.lists(PART, max_size=3)


@pytest.fixture(scope="module")
def tokenizer(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(tiny.target, folder)
    return Tokenizer(folder)


def words(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part if isinstance(part, str) else part.get("text") or part["refusal"] for part in content]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=num_cases(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.tuples(*[CONTENTS] * 4))
def test_no_text_is_lost_however_a_template_reads_content(tokenizer: Tokenizer, name: str, contents: Any) -> None:
    messages = [{"role": role, "content": content} for role, content in zip(ROLES, contents, strict=True)]
    arguments = {"chat_template": TEMPLATES[name]}
    text = tokenizer.chat_text(tokenizer.chat_messages(messages, **arguments), **arguments)
    place = 0
    for word in [word for content in contents for word in words(content)]:
        place = text.index(word, place) + len(word)
    assert "type" not in text


def test_parts_are_joined_as_vllm_joins_them(tokenizer: Tokenizer) -> None:
    """Templates that loop over content join parts themselves; for others, parts stand in lines of their own."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    found = {}
    for name in ("text", "first part", "text or first part", "loop", "text or loop", "mapped"):
        arguments = {"chat_template": TEMPLATES[f"{name}, message.content"]}
        found[name] = tokenizer.chat_text(tokenizer.chat_messages(messages, **arguments), **arguments)
    lines = dict.fromkeys(("text", "first part", "text or first part"), "[user]a\nb")
    assert found == {**lines, "loop": "[user]ab", "text or loop": "[user]ab", "mapped": "[user]a|b"}


def test_variables_of_one_request_do_not_decide_for_others(tokenizer: Tokenizer) -> None:
    template = "{% if not quiet %}" + TEMPLATES["loop, message.content"] + "{% endif %}"
    messages = [{"role": "user", "content": "a"}]
    for quiet, text in ((True, ""), (False, "[user]a"), (True, "")):
        arguments: dict[str, Any] = {"chat_template": template, "quiet": quiet}
        assert tokenizer.chat_text(tokenizer.chat_messages(messages, **arguments), **arguments) == text


# Ways to read an assistant's call: its arguments as an object, as text as in DeepSeek's templates, and either.
ARGUMENTS = {
    "object": "{{ call.arguments | tojson }}",
    "text": "{{ '' + call.arguments }}",
    "either": "{{ call.arguments if call.arguments is string else call.arguments | tojson }}",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_calls_are_shown_however_a_template_reads_their_arguments(tokenizer: Tokenizer, name: str) -> None:
    shown = "{{ message.content }}{% for each in message.tool_calls or () %}{% set call = each.function %}"
    body = shown + "{{ call.name }}" + ARGUMENTS[name] + "{% endfor %}"
    arguments = {"chat_template": IN_MESSAGES.replace("BODY", body)}
    call = {"id": "1", "type": "function", "function": {"name": "taxi", "arguments": '{"to": "Köln"}'}}
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "b"}]}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    text = tokenizer.chat_text(tokenizer.chat_messages(messages, **arguments), **arguments)
    assert text == '[user]a[assistant]taxi{"to": "Köln"}[tool]b'
