"""Requests that are meant to slow a server down: long texts, long lists, large forms, streams that are cut off."""

from collections.abc import Callable
from typing import Any, NamedTuple

# Below the server's limit of a body.
BODY = (4 << 20) - 4096
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = "I would like to book a table for four, and it should be cheap. "


class Attack(NamedTuple):
    """Requests that are sent at once.

    Attributes:
        requests: paths and bodies.
        is_cut: whether the client closes each connection as soon as its answer begins.
    """

    requests: list[tuple[str, dict[str, Any]]]
    is_cut: bool = False


def _completion(prompt: Any = "hi", **fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": prompt, "max_tokens": 8, **fields}


def _chat(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}


def _structured(**form: Any) -> Attack:
    return Attack([_completion(structured_outputs=form)])


def _text(size: int) -> str:
    return (WORDS * (size // len(WORDS) + 1))[:size]


def _optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"prop_{i}": {"type": "string"} for i in range(count)}}


def _chain(count: int) -> str:
    rules = [f'r{i} ::= r{i + 1} | "property {i}" r{i + 1}' for i in range(count)]
    return "\n".join(["root ::= r0", *rules, f'r{count} ::= "."'])


def _endless(index: int) -> dict[str, Any]:
    return {"enum": ["a" * 40 + "!" * index], "pattern": "^(a+)+$"}


def _token_lists() -> Attack:
    return Attack(
        [
            _completion(["hi"] * 512, allowed_token_ids=list(range(4000)) * 80, max_tokens=1),
            _completion(logit_bias={str(token): 1 for token in range(200_000)}, max_tokens=1),
            _completion([5] * 1_200_000, max_tokens=1),
            ("/detokenize", {"tokens": [5] * 1_000_000}),
        ]
    )


_LONG = {"max_tokens": 64, "ignore_eos": True}
ATTACKS: dict[str, Callable[[], Attack]] = {
    "six prompts of 4 MB": lambda: Attack([_completion(_text(BODY))] * 6),
    "six conversations of 4 MB": lambda: Attack([_chat(_text(BODY))] * 6),
    "truncated prompts of 1 MB": lambda: Attack([_completion(_text(1 << 20), truncate_prompt_tokens=16)] * 6),
    "texts of 1 MB to tokenize": lambda: Attack([("/tokenize", {"prompt": _text(1 << 20)})] * 6),
    "predictions of 4 MB": lambda: Attack(
        [_chat("hi", prediction={"type": "content", "content": _text(BODY - 200)})] * 3
    ),
    "30,000 bad words": lambda: Attack([_completion(bad_words=[f"word{i}" for i in range(30_000)], **_LONG)] * 2),
    "128 bad words, 32 prompts": lambda: Attack(
        [_completion(["hi"] * 16, bad_words=[f"word{i}" for i in range(128)], **_LONG)] * 2
    ),
    "100,000 stop strings": lambda: Attack([_completion(stop=[f"no such text {i}" for i in range(100_000)], **_LONG)]),
    "64 stop strings, 32 prompts": lambda: Attack(
        [_completion(["hi"] * 16, stop=[f"{_text(110)} {i}" for i in range(64)], **_LONG)] * 2
    ),
    "a million wrong values": lambda: Attack([_completion(bad_words=[1] * 1_000_000)] * 2),
    "long lists of tokens": _token_lists,
    "2,000 optional properties": lambda: _structured(json=_optional(2000)),
    "a choice among 100,000 texts": lambda: _structured(choice=[f"choice number {i}" for i in range(100_000)]),
    "a grammar of 3,500 rules": lambda: _structured(grammar=_chain(3500)),
    "a pattern without end": lambda: _structured(json=_endless(1)),
    "500 long answers": lambda: Attack([_completion(max_tokens=1000, ignore_eos=True)] * 500),
    "500 prompts of 8,000 characters": lambda: Attack([_completion(_text(8000))] * 500),
    "100 patterns without end": lambda: Attack(
        [_completion(structured_outputs={"json": _endless(index)}) for index in range(1, 101)]
    ),
    "200 streams that are cut off": lambda: Attack([_completion(stream=True, **_LONG)] * 200, is_cut=True),
}
