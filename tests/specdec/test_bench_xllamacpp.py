"""The adapter of xllamacpp, on a stand-in for its module whose server continues texts by a rule."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from specdec.bench.peers import PeerSetup, load_peer, parse_peers
from tests.specdec.continued_text import continued

PROMPTS = [[5, 6, 7], [1, 2, 1, 2, 1, 2], [3], [9, 9], [4, 1]]
TYPES = ("NONE", "DRAFT_SIMPLE", "DRAFT_EAGLE3", "DRAFT_DFLASH", "DRAFT_DSPARK", "NGRAM_SIMPLE")


class Handler(BaseHTTPRequestHandler):
    """Answers as llama.cpp's server does."""

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (given["cache_prompt"], given["temperature"]) == (False, 0)
        tokens = continued(given["prompt"], given["n_predict"])
        timings = {"predicted_n": len(tokens), "predicted_ms": 0.001, "draft_n": 6, "draft_n_accepted": 3}
        is_refused = given["prompt"] == [0]
        body = json.dumps({"error": "too long"} if is_refused else {"tokens": tokens, "timings": timings}).encode()
        self.send_response(400 if is_refused else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


class FakeModule(ModuleType):
    """What the adapter uses of xllamacpp."""

    def __init__(self) -> None:
        super().__init__("xllamacpp")
        self.common_speculative_type = SimpleNamespace(**{f"COMMON_SPECULATIVE_TYPE_{each}": each for each in TYPES})
        self.servers: list[ThreadingHTTPServer] = []
        self.params: Any = None

    def CommonParams(self) -> Any:
        own = SimpleNamespace
        draft = own(mparams=own(path=""), n_max=16)
        speculative = own(types=["NONE"], draft=draft, ngram_simple=own(size_n=12, size_m=48))
        return own(model=own(path=""), cpuparams=own(), cpuparams_batch=own(), speculative=speculative)

    def Server(self, params: Any) -> Any:
        if Path(params.model.path).stat().st_size == 0:
            raise RuntimeError("Failed to init server, please check the input params.")
        self.params = params
        server = ThreadingHTTPServer((params.hostnames[0], params.port), Handler)
        self.servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return SimpleNamespace(listening_address=f"http://127.0.0.1:{server.server_port}")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModule]:
    fake = FakeModule()
    monkeypatch.setitem(sys.modules, "xllamacpp", fake)
    monkeypatch.delitem(sys.modules, "specdec.bench.xllamacpp_peer", raising=False)
    yield fake
    sys.modules.pop("specdec.bench.xllamacpp_peer", None)
    for server in fake.servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    file = tmp_path / "target.gguf"
    file.write_bytes(b"GGUF")
    return str(file)


def setup(draft: str | None = None, **settings: str) -> PeerSetup:
    return PeerSetup("peer", Path("model"), "float32", 16, 8, frozenset(), draft, settings)


@pytest.mark.parametrize(
    ("draft", "kind", "wanted"),
    [
        (None, None, ("NONE", "", 12)),
        ("ngram", None, ("NGRAM_SIMPLE", "", 3)),
        ("{gguf}", None, ("DRAFT_EAGLE3", "{gguf}", 12)),
        ("{gguf}", "draft-dspark", ("DRAFT_DSPARK", "{gguf}", 12)),
    ],
)
def test_every_prompt_is_answered(
    module: FakeModule, gguf: str, draft: str | None, kind: str | None, wanted: tuple[str, str, int]
) -> None:
    settings = {"gguf": gguf, "tokens": "4", "batch": "2", **({"type": kind} if kind else {})}
    run = load_peer("xllamacpp", setup(draft and draft.format(gguf=gguf), **settings)).run(PROMPTS)
    assert [sample.token_ids for sample in run.samples] == [continued(prompt, 8) for prompt in PROMPTS]
    assert all(0 <= sample.first <= sample.seconds <= run.seconds for sample in run.samples)
    stats = run.samples[0].stats
    assert (stats.steps, stats.tokens, stats.drafted) == (4, 7, 6)
    params, given = module.params, module.params.speculative
    assert (params.model.path, params.n_parallel, params.n_ctx) == (gguf, 2, 32)
    found = ("".join(given.types), given.draft.mparams.path, given.ngram_simple.size_n)
    assert found == (wanted[0], wanted[1].format(gguf=gguf), wanted[2])
    assert given.draft.n_max == (4 if wanted[1] else 16)
    assert given.ngram_simple.size_m == (4 if draft == "ngram" else 48)


@pytest.mark.usefixtures("module")
def test_mistakes_are_told(gguf: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.gguf"
    empty.touch()
    for draft, settings, message in (
        (None, {}, "needs the target as GGUF, made by llama.cpp's convert_hf_to_gguf.py; write peer:gguf=FILE"),
        (None, {"gguf": str(empty)}, "xllamacpp cannot load these files: Failed to init server"),
        ("/no/head.gguf", {"gguf": gguf}, "/no/head.gguf: no such file; drafts are ngram or a GGUF file"),
        (gguf, {"gguf": gguf, "type": "draft-tree"}, "type is 'draft-tree'; it must be one of draft-simple, "),
    ):
        with pytest.raises(ValueError, match=f"^--peer 'peer': {message}"):
            load_peer("xllamacpp", setup(draft, **settings))
    with pytest.raises(ValueError, match=r"xllamacpp answered 400: \{'error': 'too long'\}"):
        load_peer("xllamacpp", setup(gguf=gguf)).run([[0]])


def test_what_to_install_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.bench.peers.find_spec", lambda _: None)
    with pytest.raises(ValueError, match="--peer 'xllamacpp': xllamacpp is not installed; run: pip install xllamacpp"):
        parse_peers(["xllamacpp"])
