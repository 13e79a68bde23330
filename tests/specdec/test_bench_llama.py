"""The adapter of llama.cpp's server, on a stand-in for it that continues texts by a rule."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.bench.peers import PeerSetup, load_peer, parse_peers
from tests.specdec.continued_text import continued

PROMPTS = [[5, 6, 7], [1, 2, 1, 2, 1, 2], [3], [9, 9], [4, 1]]


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    file = tmp_path / "target.gguf"
    file.write_bytes(b"GGUF")
    return str(file)


def setup(draft: str | None = None, ends: tuple[int, ...] = (), **settings: str) -> PeerSetup:
    return PeerSetup("peer", Path("model"), "float32", 16, 8, frozenset(ends), draft, settings)


SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
sys.path.insert(0, {root!r})
from tests.specdec.continued_text import continued
json.dump(sys.argv[1:], open({log!r}, "w"))
if {broken!r}:
    sys.exit(3)

class Handler(BaseHTTPRequestHandler):
    def reply(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.reply({{"status": "ok"}})
    def do_POST(self):
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if given["prompt"] == [0]:
            self.reply({{"error": "too long"}}, 400)
        assert given["cache_prompt"] is False and given["temperature"] == 0
        tokens = continued(given["prompt"], given["n_predict"])
        timings = {{"predicted_n": len(tokens), "predicted_ms": 0.001, "draft_n": 6, "draft_n_accepted": 3}}
        self.reply({{"tokens": tokens, "timings": timings}})
    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A program named llama-server in the PATH; returns the file with its arguments."""
    folder, log = tmp_path / "bin", tmp_path / "arguments.json"
    folder.mkdir()
    program = folder / "llama-server"
    root, broken = str(Path(__file__).parents[2]), getattr(request, "param", "") == "broken"
    program.write_text(SERVER.format(python=sys.executable, root=root, log=str(log), broken=broken))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return log


@pytest.mark.parametrize(
    ("draft", "arguments"),
    [
        (None, []),
        ("ngram", ["--spec-ngram-simple-size-m", "4"]),
        ("{gguf}", ["-md", "{gguf}", "--spec-type", "draft-eagle3", "--spec-draft-n-max", "4"]),
    ],
)
def test_server_answers_every_prompt(server: Path, gguf: str, draft: str | None, arguments: list[str]) -> None:
    peer: Any = load_peer("llama-server", setup(draft and draft.format(gguf=gguf), gguf=gguf, tokens="4", batch="2"))
    try:
        run = peer.run(PROMPTS)
    finally:
        peer.close()
    assert [sample.token_ids for sample in run.samples] == [continued(prompt, 8) for prompt in PROMPTS]
    assert all(0 <= sample.first <= sample.seconds <= run.seconds for sample in run.samples)
    stats = run.samples[0].stats
    assert (stats.steps, stats.tokens, stats.drafted) == (4, 7, 6)
    given = json.loads(server.read_text())
    assert [given[given.index(name) + 1] for name in ("-m", "-np", "-c", "--host")] == [gguf, "2", "32", "127.0.0.1"]
    assert given[len(given) - len(arguments) :] == [word.format(gguf=gguf) for word in arguments]


@pytest.mark.usefixtures("server")
def test_refused_prompt_ends_the_benchmark(gguf: str) -> None:
    peer: Any = load_peer("llama-server", setup(gguf=gguf))
    try:
        with pytest.raises(ValueError, match=r"llama-server answered 400: \{'error': 'too long'\}"):
            peer.run([[0]])
    finally:
        peer.close()


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("server", ["broken"], indirect=True)
def test_server_that_ends_is_told_of(gguf: str) -> None:
    with pytest.raises(ValueError, match="llama-server ended with code 3"):
        load_peer("llama-server", setup(gguf=gguf))


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs the target as GGUF, made by llama.cpp's convert_hf_to_gguf.py; write peer:gguf=FILE"),
        ({"gguf": "/no/such.gguf"}, "/no/such.gguf: no such file"),
    ],
)
def test_mistakes_are_told(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_peer("llama-server", setup(**settings))


def test_missing_server_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="--peer 'llama-server': llama-server is not on the PATH"):
        parse_peers(["llama-server"])
