"""200 clients at a time: random parameters, clients that leave, and requests that are none."""

import asyncio
import json
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from specdec import SamplingParams
from tests.profiles import num_cases
from tests.specdec.server.raw_client import events, exchange, post
from tests.specdec.server.running import Served

pytestmark = pytest.mark.slow

NUM_CLIENTS = 200
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LETTERS = "abcdefgh "
# Worlds of clients that are drawn, of about 10 s each.
NUM_WORLDS = num_cases(1)
MALFORMED: list[bytes] = [
    b"",
    b"[DONE]",
    b'{"prompt": "a", "messages": []',
    b'{"prompt": "\xff", "messages": [{"role": "user", "content": "\xff"}]}',
    b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": "9"}',
    b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "temperature": -1}',
    b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "model": "another"}',
    b'{"prompt": {}, "messages": {}}',
]


class Client(NamedTuple):
    """A client of which the answer is known.

    Attributes:
        params: sampling parameters by vLLM's names.
        prompt: text or token ids; for a chat, the user's message.
        leaves_after: bytes of the answer after which it goes away, None if it stays.
    """

    path: str
    params: dict[str, Any]
    prompt: str | list[int]
    is_streamed: bool
    leaves_after: int | None

    def request(self) -> bytes:
        body = {**self.params, "stream": self.is_streamed, "return_token_ids": True}
        if self.path == CHAT:
            return post(CHAT, {**body, "messages": [{"role": "user", "content": self.prompt}]})
        return post(COMPLETION, {**body, "prompt": self.prompt})

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(**{name: value for name, value in self.params.items() if name != "speculation"})

    def tokens(self, reply: bytes) -> list[list[int]]:
        """Return the tokens of each choice of an answer."""
        found: list[list[int]] = [[] for _ in range(self.params["n"])]
        parts = events(reply) if self.is_streamed else [json.loads(reply)]
        for choice in (choice for part in parts for choice in part["choices"]):
            found[choice["index"]] += choice.get("token_ids", [])
        return found


def draw_params(random: Random) -> dict[str, Any]:
    drawn = {
        "temperature": random.choice([0, 0.5, 1, 2]),
        "top_p": random.choice([1, 0.7]),
        "top_k": random.choice([0, 5]),
        "min_p": random.choice([0, 0.05]),
        "presence_penalty": random.choice([0, 1]),
        "repetition_penalty": random.choice([1, 1.3]),
        "max_tokens": random.randint(1, 24),
        "stop": random.choice([None, ["e"], ["ab", "q"]]),
        "ignore_eos": random.choice([False, True]),
        "seed": random.randrange(1000),
        "n": random.choice([1, 1, 2]),
        "speculation": random.choice([{}, {"enabled": False}, {"max_nodes": 2}]),
    }
    return drawn | ({"n": 1} if drawn["temperature"] == 0 else {})


def draw_client(random: Random) -> Client:
    path = random.choice([CHAT, COMPLETION])
    prompt: str | list[int] = "".join(random.choices(LETTERS, k=random.randint(1, 24)))
    if path == COMPLETION and random.random() < 0.3:
        prompt = random.choices(range(3, 90), k=random.randint(1, 24))
    # Before the answer, in its head, or in its body.
    leaves_after = random.choice([0, 1, 400]) if random.random() < 0.2 else None
    return Client(path, draw_params(random), prompt, random.random() < 0.6, leaves_after)


def expected(server: Served, clients: Sequence[Client]) -> list[list[list[int]]]:
    """Return the tokens of each choice of each client, from the offline API in one batch."""
    offline = server.offline
    prompts = [
        offline.chat_prompt([{"role": "user", "content": client.prompt}]) if client.path == CHAT else client.prompt
        for client in clients
    ]
    outputs = offline.generate(prompts, [client.sampling_params() for client in clients], use_tqdm=False)
    return [[list(output.token_ids) for output in each.outputs] for each in outputs]


# A smaller seed is no simpler world.
@settings(max_examples=NUM_WORLDS, phases=[Phase.generate])
@given(seed=st.integers(0, 2**32))
def test_every_client_gets_the_tokens_of_the_offline_api(server: Served, seed: int) -> None:
    """Other clients leave, or send what is no request. Nothing leaks."""
    random = Random(seed)
    clients = [draw_client(random) for _ in range(NUM_CLIENTS)]
    malformed = [post(random.choice([CHAT, COMPLETION]), body) for body in MALFORMED * 3]
    wanted = expected(server, clients)

    async def run() -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        answers = asyncio.gather(*(exchange(server.port, one.request(), one.leaves_after) for one in clients))
        refusals = asyncio.gather(*(exchange(server.port, request) for request in malformed))
        return await answers, await refusals

    answers, refusals = asyncio.run(run())
    for client, (status, reply), tokens in zip(clients, answers, wanted, strict=True):
        if client.leaves_after is None:
            assert status == 200, (client, reply)
            assert client.tokens(reply) == tokens, client
    for status, reply in refusals:
        assert 400 <= status < 500
        assert json.loads(reply)["error"]["message"]
    server.wait_until_idle()
