"""An HTTP endpoint with OpenAI's API, which answers with the number of the call."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeEndpoint:
    """A started server.

    Attributes:
        bodies: paths and bodies of all calls.
        answer: replaces the answer to every call: status and body.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.answer: tuple[int, bytes] | None = None

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        self.bodies.append((path, body))
        if self.answer is not None:
            return self.answer
        is_chat = path == "/v1/chat/completions"
        if not is_chat and path != "/v1/completions":
            return 404, b"no such route"
        text = f"<{len(self.bodies)}>"
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"content": text}} if is_chat else {"text": text}
        usage = {"prompt_tokens": 7, "completion_tokens": len(text)}
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
