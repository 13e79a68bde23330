"""Texts, names, bytes and places of tokens over HTTP, with a tokenizer that drops the space a text begins with."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from specdec import LLM
from specdec.async_engine.async_llm import AsyncLLM
from specdec.text.text_stream import REPLACEMENT
from tests.specdec.metaspace_llama import VOCAB, WORD_IDS, byte_ids, ids, save_metaspace
from tests.specdec.server.running import Served, engine_in_thread

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"dtype": "float64", "kv_cache_memory": 8 << 20}
WORLD = ids("▁world")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("metaspace") / "target"
    save_metaspace(folder, max_position_embeddings=1024)
    with (
        engine_in_thread(AsyncLLM(folder, None, **SETTINGS), LLM(folder, None, **SETTINGS)) as engine,
        engine.again(max_logprobs=VOCAB, enable_auto_tool_choice=True) as served,
    ):
        yield served


def answer(served: Served, path: str, **body: Any) -> dict[str, Any]:
    """Return the parts of an answer as one choice."""
    status, _, reply = served.send("POST", f"/v1/{path}", {"ignore_eos": True, "seed": 1, **body})
    assert status == 200, reply
    if not body.get("stream"):
        (choice,) = reply["choices"]
        return {**choice, "text": choice.get("text") or (choice.get("message") or {}).get("content")}
    lines = [line.removeprefix("data: ") for line in reply.decode().splitlines() if line.startswith("data: {")]
    parts = [choice for line in lines for choice in msgspec.json.decode(line)["choices"]]
    found: dict[str, Any] = {"text": "", "logprobs": {}}
    for part in parts:
        found["text"] += part.get("text") or (part.get("delta") or {}).get("content") or ""
        for name, values in (part.get("logprobs") or {}).items():
            found["logprobs"].setdefault(name, []).extend(values or ())
    return found


STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@STREAM
@pytest.mark.parametrize(
    ("prompt", "echoed"),
    [
        ("hello", "hello"),
        (ids("▁hello"), "hello"),
        (ids("<s>", "▁hello", "</s>"), "hello"),
        ([*ids("▁hello"), *byte_ids("€")[:2]], "hello"),
    ],
)
def test_echo_joins_prompt_and_output(served: Served, prompt: object, echoed: str, stream: bool) -> None:
    given: dict[str, Any] = {"prompt": prompt, "stream": stream, "allowed_token_ids": WORLD, "max_tokens": 2}
    assert answer(served, "completions", **given)["text"] == " world world"
    assert answer(served, "completions", echo=True, **given)["text"] == f"{echoed} world world"


@STREAM
def test_a_character_that_the_prompt_begins(served: Served, stream: bool) -> None:
    first, second, third = byte_ids("€")
    given: dict[str, Any] = {"prompt": [*ids("▁hello"), first, second], "allowed_token_ids": [third], "max_tokens": 1}
    assert answer(served, "completions", stream=stream, **given)["text"] == "€"
    assert answer(served, "completions", stream=stream, echo=True, **given)["text"] == "hello€"


@STREAM
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["hello the world", ids("<s>", "▁hello", "</s>", "▁x", "s")])
def test_tokens_lie_where_their_offsets_say(served: Served, prompt: object, echo: bool, stream: bool) -> None:
    allowed = [*WORD_IDS, *ids("</s>")]
    given: dict[str, Any] = {"prompt": prompt, "echo": echo, "logprobs": 3, "stream": stream}
    found = answer(served, "completions", allowed_token_ids=allowed, max_tokens=24, temperature=1.5, **given)
    logprobs = found["logprobs"]
    assert len(logprobs["tokens"]) >= 24
    for place, name in enumerate(logprobs["tokens"]):
        offset = logprobs["text_offset"][place]
        assert offset == len("".join(one for one in logprobs["tokens"][:place] if one not in ("<s>", "</s>")))
        assert name in ("<s>", "</s>") or found["text"][offset : offset + len(name)] == name
        if logprobs["top_logprobs"][place] is not None:
            assert logprobs["top_logprobs"][place][name] == logprobs["token_logprobs"][place]


@STREAM
def test_offsets_of_parts_of_a_character(served: Served, stream: bool) -> None:
    given: dict[str, Any] = {"prompt": [*ids("▁x"), *byte_ids("é€x")], "echo": True, "logprobs": 0, "stream": stream}
    logprobs = answer(served, "completions", allowed_token_ids=WORLD, max_tokens=1, **given)["logprobs"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 4]
    parts = [r"bytes:\xc3", r"bytes:\xa9", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac"]
    assert logprobs["tokens"] == ["x", *parts, "x", " world"]


@pytest.mark.parametrize("prompt", ["hello", ids("<s>")])
def test_every_probable_token_has_an_entry(served: Served, prompt: object) -> None:
    """Tokens whose texts are the same but for the space they begin with, single bytes, and two of one text."""
    found = answer(served, "completions", prompt=prompt, max_tokens=3, logprobs=VOCAB, echo=True)["logprobs"]
    for row in found["top_logprobs"][1:]:
        assert len(row) == VOCAB
        assert {" true", "true", r"bytes:\xe2", r"bytes:\x82", "</s>"} <= set(row)
        # The token of the byte and that of the letter.
        assert len({"x", f"token_id:{byte_ids('x')[0]}", f"token_id:{ids('x')[0]}"} & set(row)) == 2


@STREAM
def test_bytes_of_a_chats_tokens_are_their_own(served: Served, stream: bool) -> None:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 5}
    allowed = byte_ids("€")
    found = answer(served, "chat/completions", allowed_token_ids=allowed, max_tokens=12, stream=stream, **given)
    single = {name: [byte] for byte in range(256) if (name := bytes([byte]).decode(errors="ignore"))}
    for entry in found["logprobs"]["content"]:
        assert entry["bytes"] in ([0xE2], [0x82], [0xAC])
        for other in entry["top_logprobs"]:
            is_part = other["token"] == REPLACEMENT
            assert is_part == (len(other["bytes"]) == 1 and other["bytes"][0] >= 0x80)
            assert is_part or other["bytes"] == single.get(other["token"], list(other["token"].encode()))


@pytest.mark.long
@STREAM
@pytest.mark.parametrize("path", ["chat/completions"])
def test_a_message_that_is_continued(served: Served, path: str, stream: bool) -> None:
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "hello"}]
    given: dict[str, Any] = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    found = answer(served, path, allowed_token_ids=WORLD, max_tokens=1, stream=stream, **given)
    assert found["text"] == " world"
    # Behind the words of the template.
    fresh = answer(served, path, messages=messages[:1], allowed_token_ids=WORLD, max_tokens=1, stream=stream)
    assert fresh["text"] == " world"


@pytest.mark.long
@STREAM
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_pieces_of_a_trace_join_to_the_text(served: Served, path: str, stream: bool) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "prompt": "hello"}
    given = {name: value for name, value in body.items() if (name == "prompt") == (path == "completions")}
    status, _, reply = served.send(
        "POST", f"/v1/{path}", {**given, "trace": True, "max_tokens": 5, "allowed_token_ids": WORLD, "stream": stream}
    )
    assert status == 200
    lines = [line.removeprefix("data: ") for line in reply.decode().splitlines()] if stream else []
    bodies = [msgspec.json.decode(line) for line in lines if line.startswith("{")] if stream else [reply]
    steps = [step for part in bodies for choice in part["choices"] for step in choice.get("trace") or []]
    assert "".join(piece["text"] for step in steps for piece in step["pieces"]) == " world" * 5
