"""Programs over an HTTP endpoint: what is sent, and what its answers become."""

import re
import socket
import threading
from collections.abc import Iterator

import pytest

from specdec import Speculation
from specdec import programs as sp
from tests.specdec.programs.fake_endpoint import FakeEndpoint, fake_endpoint

GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeEndpoint]:
    with fake_endpoint() as fake:
        yield fake


@pytest.fixture
def fake(shared: FakeEndpoint) -> FakeEndpoint:
    shared.bodies.clear()
    shared.headers.clear()
    shared.answer = None
    return shared


@sp.function
def program(s: sp.ProgramState) -> None:
    s += "x" + sp.gen("a", stop="\n")


def test_text_and_conversations_go_to_their_routes(fake: FakeEndpoint) -> None:
    @sp.function
    def both(s: sp.ProgramState) -> None:
        s += sp.user("Go on.") + sp.assistant(sp.gen("first") + ", " + sp.gen("second"))

    with sp.Endpoint(fake.url) as endpoint:
        state = both.run(backend=endpoint, params=GREEDY)
        plain = program.run(backend=endpoint, params=GREEDY)
        assert endpoint.num_calls == 3
    assert (state["first"], state["second"], plain.text()) == ("<1>", "<2>", "x<3>")
    found = plain.get_meta_info("a")
    assert found == sp.Generated("<3>", "length", num_tokens=3, num_prompt_tokens=7)
    user = {"role": "user", "content": "Go on."}
    common = {"max_tokens": 128, "temperature": 0}
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert fake.bodies == [
        ("/v1/chat/completions", {"messages": [user], **common}),
        ("/v1/chat/completions", {"messages": [user, {"role": "assistant", "content": "<1>, "}], **goes_on, **common}),
        ("/v1/completions", {"prompt": "x", "stop": "\n", **common}),
    ]


def test_parameters_and_keys_are_sent_as_they_are_given(fake: FakeEndpoint) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> None:
        s += "x" + sp.gen("a", regex="a+", top_k=5, stop=["q"], speculation=Speculation(max_nodes=3))

    with sp.Endpoint(fake.url + "/", model="big", api_key="secret") as endpoint:
        program.run(backend=endpoint, params={"temperature": 0.5, "top_k": 9})
    assert fake.headers[0]["Authorization"] == "Bearer secret"
    form = {"regex": "a+", "disable_any_whitespace": True}
    assert fake.bodies == [
        (
            "/v1/completions",
            {
                **{"prompt": "x", "model": "big", "max_tokens": 128, "temperature": 0.5, "top_k": 5, "stop": ["q"]},
                **{"structured_outputs": form, "speculation": {"enabled": True, "max_nodes": 3}},
            },
        )
    ]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, b'{"error": {"message": "top_k is -5"}}'), "/v1/completions: status 400: top_k is -5"),
        ((500, b"<html>\nno</html>"), "/v1/completions: status 500: <html> no</html>"),
        ((200, b"no"), "/v1/completions: the answer is not JSON: "),
    ],
)
def test_refused_calls_are_errors_of_the_program(fake: FakeEndpoint, answer: tuple[int, bytes], message: str) -> None:
    fake.answer = answer
    with sp.Endpoint(fake.url) as endpoint, pytest.raises(sp.EndpointError, match=re.escape(message)) as caught:
        program.run(backend=endpoint)
    assert caught.value.status == (None if answer[0] == 200 else answer[0])


@pytest.mark.parametrize(
    ("answer", "message", "status"),
    [
        (b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\n{}", "IncompleteRead(2 bytes read, 7 more expected)", None),
        (b"SSH-2.0\r\n\r\n", "SSH-2.0", None),
        (b"HTTP/1.0 503 Busy\r\nContent-Length: 9\r\n\r\n{}", "status 503: Busy", 503),
    ],
)
def test_answers_that_break_off_are_errors_of_the_endpoint(answer: bytes, message: str, status: int | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            accepted, _ = server.accept()
            with accepted:
                request = b""
                while not request.endswith(b"}"):
                    request += accepted.recv(1 << 16)
                accepted.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        with sp.Endpoint(url) as endpoint, pytest.raises(sp.EndpointError, match=re.escape(message)) as caught:
            program.run(backend=endpoint)
        thread.join()
    assert caught.value.status == status


LACKS = "the answer lacks fields of OpenAI's API: "


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'{"ok": 1}', LACKS + "{'ok': 1}"),
        (b'{"choices": []}', LACKS),
        (b'{"choices": [{"text": 5}]}', LACKS),
        (b'{"choices": [{"text": "a"}], "usage": [1]}', LACKS),
        (b"[1]", LACKS + "[1]"),
        (b'{"choices": [{"text": "a", "finish_reason": "error"}]}', "the request ended with finish_reason 'error'"),
        (b'{"choices": [{"text": "a", "finish_reason": "abort"}]}', "the request ended with finish_reason 'abort'"),
    ],
)
def test_answers_that_are_no_completions_are_errors_of_the_endpoint(
    fake: FakeEndpoint, answer: bytes, message: str
) -> None:
    fake.answer = 200, answer
    with (
        sp.Endpoint(fake.url) as endpoint,
        pytest.raises(sp.EndpointError, match=re.escape(f"{fake.url}/completions: {message}")),
    ):
        program.run(backend=endpoint)


@pytest.mark.parametrize("answer", [b'{"ok": 1}', b'{"choices": [1]}', b"[1]"])
def test_answers_that_are_no_scores_are_errors_of_the_endpoint(fake: FakeEndpoint, answer: bytes) -> None:
    @sp.function
    def choosing(s: sp.ProgramState) -> None:
        s += "x" + sp.select("a", choices=["b", "c"])

    fake.answer = 200, answer
    with (
        sp.Endpoint(fake.url) as endpoint,
        pytest.raises(sp.EndpointError, match=re.escape(f"{fake.url}/score_choices: {LACKS}")),
    ):
        choosing.run(backend=endpoint)


def test_endpoints_that_cannot_do_it(fake: FakeEndpoint) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> None:
        s += "x" + sp.select("a", choices=["b", "c"])

    with sp.Endpoint(fake.url) as endpoint, pytest.raises(sp.EndpointError, match="select needs a server with /score"):
        program.run(backend=endpoint)
    with sp.Endpoint("http://127.0.0.1:9/v1") as endpoint, pytest.raises(sp.EndpointError, match="refused"):
        program.run(backend=endpoint)
    with pytest.raises(ValueError, match="url is 'localhost:80'; it must begin with http:// or https://"):
        sp.Endpoint("localhost:80")
