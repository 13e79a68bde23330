"""An HTTP endpoint with OpenAI's API over a model that is a function of the text."""

import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Few, so that stops and constant texts occur; the last one is the end.
TOKENS = ("a", "b", "ab", "ba\n", "\n", "b:", ":", "aa", None)


def next_token(text: str) -> str | None:
    """Return the token that follows a text, None for its end."""
    return TOKENS[zlib.crc32(text.encode()) % len(TOKENS)]


def continuation(text: str, count: int) -> tuple[list[str], bool]:
    """Return at most so many tokens that follow a text, and whether the model ends there."""
    tokens: list[str] = []
    while len(tokens) < count:
        token = next_token(text + "".join(tokens))
        if token is None:
            return tokens, True
        tokens.append(token)
    return tokens, False


class FakeEndpoint:
    """A started server.

    Attributes:
        bodies: paths and bodies of all calls.
        answer: replaces the answer to every call: status and body.
        hides_tokens: whether tokens are shown as texts that do not make up the text.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.answer: tuple[int, bytes] | None = None
        self.hides_tokens = False

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        self.bodies.append((path, body))
        if self.answer is not None:
            return self.answer
        is_chat = path == "/v1/chat/completions"
        if not is_chat and path != "/v1/completions":
            return 404, b"no such route"
        prompt = json.dumps(body["messages"]) if is_chat else body["prompt"]
        if is_chat and body.get("continue_final_message"):
            # So that text in the open message continues as it would have without a break.
            messages = body["messages"]
            prompt = json.dumps(messages[:-1]) + messages[-1]["content"]
        tokens, has_ended = continuation(prompt, body["max_tokens"])
        reason = "stop" if has_ended else "length"
        stops, text = body.get("stop") or [], ""
        stops = [stops] if isinstance(stops, str) else stops
        for count, token in enumerate(tokens, 1):
            text += token
            if any(stop in text for stop in stops):
                tokens, reason = tokens[:count], "stop"
                text = text[: min(place for stop in stops if (place := text.find(stop)) >= 0)]
                break
        shown = [f"<{token}>" for token in tokens] if self.hides_tokens else [*tokens, *(["</s>"] if has_ended else [])]
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice |= {"message": {"content": text}} if is_chat else {"text": text}
        if "logprobs" in body:
            choice["logprobs"] = {"content": [{"token": one} for one in shown]} if is_chat else {"tokens": shown}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        return 200, json.dumps({"choices": [choice], "usage": usage}).encode()


@contextmanager
def fake_endpoint() -> Iterator[FakeEndpoint]:
    """Start an endpoint in a thread."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.headers.append(dict(self.headers))
            status, answer = fake.reply(self.path, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake = FakeEndpoint(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
