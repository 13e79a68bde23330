"""Adapters of llama.cpp, on stand-ins for its library and for its server that continue texts by a rule."""

import ctypes
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from specdec.bench.peers import PeerSetup, load_peer, parse_peers
from tests.specdec.continued_text import VOCAB, continued, next_token

PROMPTS = [[5, 6, 7], [1, 2, 1, 2, 1, 2], [3], [9, 9], [4, 1]]
MODULES = ("llama_cpp", "llama_cpp.llama_speculative", "specdec.bench.llama_cpp_peer")


class FakeLibrary(ModuleType):
    """llama-cpp-python's functions that the adapter calls, over a cache that holds tokens."""

    def __init__(self) -> None:
        super().__init__("llama_cpp")
        self.cached: dict[int, list[int]] = {}
        self.rows: list[Any] = []
        self.context: Any = None
        self.sizes: list[int] = []
        nothing = itertools.repeat(None)
        for name in ("llama_log_set", "llama_backend_init"):
            setattr(self, name, lambda *_: next(nothing))
        self.llama_log_callback = lambda function: function
        self.llama_model_default_params = self.llama_context_default_params = SimpleNamespace
        self.llama_model_load_from_file = lambda file, _: file
        self.llama_get_memory = self.llama_model_get_vocab = lambda given: given
        self.llama_vocab_n_tokens = lambda _: VOCAB

    def llama_init_from_model(self, _: Any, params: Any) -> Any:
        self.context = params
        return params

    def llama_batch_init(self, size: int, _: int, width: int) -> Any:
        lists = {name: [0] * size for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(n_tokens=0, seq_id=[[0] * width for _ in range(size)], **lists)

    def llama_decode(self, _: Any, batch: Any) -> int:
        self.rows = [None] * batch.n_tokens
        self.sizes.append(batch.n_tokens)
        for row in range(batch.n_tokens):
            text = self.cached.setdefault(batch.seq_id[row][0], [])
            assert batch.n_seq_id[row] == 1
            assert batch.pos[row] == len(text)
            text.append(batch.token[row])
            assert len(text) <= self.context.n_ctx // self.context.n_seq_max
            if batch.logits[row]:
                logits = [0.0] * VOCAB
                logits[next_token(text)] = 1.0
                self.rows[row] = (ctypes.c_float * VOCAB)(*logits)
        return 0

    def llama_get_logits_ith(self, _: Any, row: int) -> Any:
        return ctypes.cast(self.rows[row], ctypes.POINTER(ctypes.c_float))

    def llama_memory_seq_rm(self, _: Any, seat: int, start: int, end: int) -> bool:
        assert end == -1
        self.cached[seat] = self.cached[seat][: max(start, 0)]
        return True


class FakeLookup:
    """Prompt lookup of one token: what followed the same token before."""

    def __init__(self, _: int, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, text: Any) -> Any:
        places = [place for place in range(len(text) - 1) if text[place] == text[-1]]
        return text[places[0] + 1 :][: self.tokens] if places else text[:0]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    before = {name: sys.modules.pop(name, None) for name in MODULES}
    fake, speculative = FakeLibrary(), ModuleType("llama_cpp.llama_speculative")
    speculative.LlamaPromptLookupDecoding = FakeLookup  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    yield fake
    sys.modules.pop(MODULES[-1], None)
    monkeypatch.undo()
    sys.modules.update({name: module for name, module in before.items() if module})


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    file = tmp_path / "target.gguf"
    file.write_bytes(b"GGUF")
    return str(file)


def setup(draft: str | None = None, ends: tuple[int, ...] = (), **settings: str) -> PeerSetup:
    return PeerSetup("peer", Path("model"), "float32", 16, 8, frozenset(ends), draft, settings)


@pytest.mark.parametrize("batch", ["1", "2", "8"])
@pytest.mark.parametrize("ends", [(), (1, 7)])
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_library_answers_every_prompt(
    library: FakeLibrary, gguf: str, batch: str, ends: tuple[int, ...], draft: str | None
) -> None:
    run = load_peer("llama.cpp", setup(draft, ends, gguf=gguf, batch=batch)).run(PROMPTS)
    assert [sample.token_ids for sample in run.samples] == [continued(prompt, 8, ends) for prompt in PROMPTS]
    assert all(0 < sample.first <= sample.seconds <= run.seconds for sample in run.samples)
    assert not any(library.cached.values())


def test_library_counts_accepted_drafts(library: FakeLibrary, gguf: str) -> None:
    run = load_peer("llama.cpp", setup("ngram", gguf=gguf)).run([PROMPTS[1]])
    stats = run.samples[0].stats
    assert (stats.tokens, stats.drafted) == (7, sum(library.sizes[1:]) - stats.steps)
    assert stats.steps == len(library.sizes) - 1 < 7
    assert stats.steps + sum(stats.accepted_per_depth) == 7
    plain = load_peer("llama.cpp", setup(gguf=gguf)).run([PROMPTS[1]]).samples[0].stats
    assert (plain.steps, plain.tokens, plain.drafted) == (7, 7, 0)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("draft", "settings", "message"),
    [
        (None, {}, "needs the target as GGUF, made by llama.cpp's convert_hf_to_gguf.py; write peer:gguf=FILE"),
        (None, {"gguf": "/no/such.gguf"}, "/no/such.gguf: no such file"),
        ("path/to/head", {}, "llama-cpp-python drafts by prompt lookup alone"),
    ],
)
def test_mistakes_are_told(draft: str | None, settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_peer("llama.cpp", setup(draft, **settings))


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


def test_missing_server_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="--peer 'llama-server': llama-server is not on the PATH"):
        parse_peers(["llama-server"])
