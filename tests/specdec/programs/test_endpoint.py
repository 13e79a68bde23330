"""Programs over an HTTP endpoint, and running ahead of their stops: the texts of plain execution, in fewer calls."""

import logging
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import Speculation
from specdec import programs as sp
from specdec.core.sampling_params import SamplingParams
from specdec.programs.backend import Generated
from specdec.programs.run_ahead import WrittenAhead
from tests.specdec.programs.fake_endpoint import FakeEndpoint, continuation, fake_endpoint

GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeEndpoint]:
    with fake_endpoint() as fake:
        yield fake


@pytest.fixture
def fake(shared: FakeEndpoint) -> FakeEndpoint:
    shared.bodies.clear()
    shared.headers.clear()
    shared.answer, shared.hides_tokens = None, False
    return shared


class Part(NamedTuple):
    """Constant text and the `gen` behind it.

    Attributes:
        as_written: how many characters of what the model writes the constant text repeats, before it goes on.
    """

    as_written: int
    constant: str
    max_tokens: int
    stop: list[str]


texts = st.text(alphabet="ab:\n", max_size=2)
parts = st.lists(
    st.builds(
        Part,
        st.integers(0, 4),
        st.sampled_from(["", "", "", "a", ":"]),
        st.integers(1, 7),
        st.lists(texts.filter(bool), max_size=2),
    ),
    min_size=2,
    max_size=6,
)


@given(prompt=texts, program_parts=parts, run_ahead=st.integers(1, 12), in_roles=st.booleans())
def test_running_ahead_changes_no_text(
    shared: FakeEndpoint, prompt: str, program_parts: list[Part], run_ahead: int, in_roles: bool
) -> None:
    shared.answer, shared.hides_tokens = None, False

    @sp.function
    def program(s: sp.ProgramState) -> None:
        if in_roles:
            s += sp.user("Go on.")
            with s.assistant():
                write(s)
        else:
            write(s)

    def write(s: sp.ProgramState) -> None:
        s += prompt + "x"
        for number, part in enumerate(program_parts):
            if number:
                so_far = s.text().partition("assistant: ")[2] if in_roles else s.text()
                before = '[{"role": "user", "content": "Go on."}]' if in_roles else ""
                written = "".join(continuation(before + so_far, 5)[0])
                s += written[: part.as_written] + part.constant
            s += sp.gen(f"part{number}", max_tokens=part.max_tokens, stop=part.stop or None)

    outcomes, calls = [], []
    for ahead in (0, run_ahead):
        with sp.Endpoint(shared.url, run_ahead=ahead) as endpoint:
            state = program.run(backend=endpoint, params=GREEDY)
            found = [state.get_meta_info(f"part{number}") for number in range(len(program_parts))]
            outcomes.append(
                (state.text(), [(one.text, one.finish_reason) for one in found if isinstance(one, Generated)])
            )
            calls.append(endpoint.num_calls)
            assert endpoint.num_served == 0 or ahead
            assert endpoint.num_served <= len(program_parts)
    assert outcomes[0] == outcomes[1]
    assert calls[0] == len(program_parts)


@sp.function
def card(s: sp.ProgramState, fields: int) -> None:
    """Constant texts that the model writes by itself, as a well-known form makes it do."""
    s += "x"
    for number in range(fields):
        s += sp.gen(f"field{number}", max_tokens=9, stop="\n")
        written = "".join(continuation(s.text(), 9)[0])
        s += written[: written.find("\n") + 1]


def test_gens_are_served_without_a_call(fake: FakeEndpoint) -> None:
    texts, calls = [], []
    for ahead in (0, 60):
        with sp.Endpoint(fake.url, run_ahead=ahead) as endpoint:
            texts.append(card.run(4, backend=endpoint, params=GREEDY).text())
            calls.append((endpoint.num_calls, endpoint.num_served))
    assert texts[0] == texts[1]
    assert calls[0] == (4, 0)
    assert calls[1][0] + calls[1][1] == 4
    assert calls[1][1] >= 2
    # It asks for more, and for no stop.
    assert fake.bodies[-1][1] == {
        "prompt": fake.bodies[-1][1]["prompt"],
        "max_tokens": 69,
        "temperature": 0,
        "logprobs": 0,
    }


@pytest.mark.parametrize(
    "more", [{"temperature": 0.5}, {"temperature": 0, "seed": 1}, {"temperature": 0, "regex": "a"}]
)
def test_only_plain_greedy_gens_run_ahead(fake: FakeEndpoint, more: dict[str, Any]) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> None:
        s += "x" + sp.gen("a", max_tokens=2, **more)

    with sp.Endpoint(fake.url, run_ahead=5) as endpoint:
        program.run(backend=endpoint)
    ((_, body),) = fake.bodies
    assert (body["max_tokens"], "logprobs" in body) == (2, False)


def test_tokens_that_are_not_the_text_end_running_ahead(fake: FakeEndpoint, caplog: pytest.LogCaptureFixture) -> None:
    fake.hides_tokens = True
    with sp.Endpoint(fake.url) as endpoint:
        expected = card.run(3, backend=endpoint, params=GREEDY).text()
    with sp.Endpoint(fake.url, run_ahead=5) as endpoint, caplog.at_level(logging.WARNING):
        assert card.run(3, backend=endpoint, params=GREEDY).text() == expected
        assert (endpoint.num_calls, endpoint.num_served) == (4, 0)
    assert caplog.messages == ["run_ahead is off: the endpoint's tokens do not make up its text"]


def test_a_gen_within_a_token_is_not_served() -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    ahead = WrittenAhead(["ab", "cd", "ef"], has_ended=False)
    inside = ahead.after("a")
    assert inside is not None
    assert (inside.text, inside.serve(params)) == ("bcdef", None)
    behind = inside.after("b")
    assert behind is not None
    served = behind.serve(params)
    assert served is not None
    assert (served.text, served.finish_reason, served.num_tokens, served.ahead.text) == ("cdef", "length", 2, "")
    assert ahead.after("b") is ahead.after("abx") is None
    # Too little is known of a third token.
    assert ahead.serve(SamplingParams(temperature=0, max_tokens=4)) is None
    # The stop begins within a token, and the text behind it too.
    stopped = ahead.serve(SamplingParams(temperature=0, max_tokens=3, stop=["de", "x"]))
    assert stopped is not None
    assert (stopped.text, stopped.finish_reason, stopped.ahead.text) == ("abc", "stop", "def")
    assert stopped.ahead.serve(params) is None


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
        card.run(1, backend=endpoint)
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
            card.run(1, backend=endpoint)
        thread.join()
    assert caught.value.status == status


def test_endpoints_that_cannot_do_it(fake: FakeEndpoint) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> None:
        s += "x" + sp.select("a", choices=["b", "c"])

    with sp.Endpoint(fake.url) as endpoint, pytest.raises(sp.EndpointError, match="select needs a server with /score"):
        program.run(backend=endpoint)
    with sp.Endpoint("http://127.0.0.1:9/v1") as endpoint, pytest.raises(sp.EndpointError, match="refused"):
        program.run(backend=endpoint)
    with pytest.raises(ValueError, match="run_ahead is -1; it must be a number of tokens from 0"):
        sp.Endpoint(fake.url, run_ahead=-1)
    with pytest.raises(ValueError, match="url is 'localhost:80'; it must begin with http:// or https://"):
        sp.Endpoint("localhost:80")
