"""One client's many requests do not keep another client's waiting."""

import http.client
import json
import sys

import pytest

from tests.specdec.server.running import PATIENCE, Served, wait_until

pytestmark = pytest.mark.slow

# More than run at once, and longer than the test.
FLOOD = {"prompt": ["a"] * 80, "max_tokens": 6000, "ignore_eos": True, "stream": True}
SMALL = {"prompt": "b", "max_tokens": 2, "ignore_eos": True}


def connect(server: Served, address: str = "127.0.0.1") -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE, source_address=(address, 0))


def post(connection: http.client.HTTPConnection, body: dict[str, object], key: str) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    return reply


@pytest.mark.parametrize(
    ("keys", "address"),
    [
        (["many", "few"], "127.0.0.1"),
        pytest.param(
            [], "127.0.0.2", marks=pytest.mark.skipif(sys.platform != "linux", reason="one address of loopback")
        ),
    ],
    ids=["keys", "addresses"],
)
def test_a_client_with_many_requests_keeps_no_other_one_waiting(engine: Served, keys: list[str], address: str) -> None:
    """Clients are told apart by their keys, or else by their addresses."""
    with engine.again(api_key=keys) as server:
        many, few = connect(server), connect(server, address)
        try:
            post(many, FLOOD, "many")
            wait_until(lambda: server.call(server.llm.stats()).running == 64)
            before = server.call(server.llm.stats())
            for _ in range(3):
                assert post(few, SMALL, "few").read()
            after = server.call(server.llm.stats())
            assert after.finished - before.finished == 3
        finally:
            many.close()
            few.close()
        server.wait_until_idle()
