"""The page at `/`, without a browser: how it is served, what it may load, and that it reads what the API gives."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from specdec.core.step_report import NodeReport, PieceReport, StepReport, TokenReport
from specdec.server import viewer
from specdec.server.viewer import page
from tests.specdec.server.running import Served

NODE = shutil.which("node")
HTML = page()[0].decode()
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the cat and the dog"}],
    "temperature": 0.8,
    "seed": 4,
    "ignore_eos": True,
    "max_tokens": 64,
    "trace": True,
    "stream": True,
}


def test_it_is_served_with_a_policy_that_allows_its_own_script_alone(server: Served) -> None:
    status, headers, body = server.send("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert body.decode() == HTML
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", HTML, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_it_refers_to_no_other_file_and_host() -> None:
    assert set(re.findall(r"\w+://[^\"'\s]+", HTML)) == {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"\b(?:src|href|action)=[\"']?([^\"'\s>]*)", HTML)) == {"data:,"}
    assert not re.search(r"@import|url\(|\bimport\b", HTML)
    assert set(re.findall(r"ask\([\"']([^\"']*)", HTML)) == {"v1/models", "v1/chat/completions"}


def test_it_reads_how_answers_end() -> None:
    """What needs no JavaScript engine to be seen: the fields that are read, and the words that follow."""
    script = HTML.split("<script>")[1]
    for field in ("finish_reason", "completion_tokens", "plain_seconds", "continue_final_message"):
        assert field in script
    for words in ("Cut at ", "the context is full", "The server does not answer", "start it again with specdec serve"):
        assert words in script
    assert '.type = "range"' in script


def test_it_is_put_together_of_all_its_files() -> None:
    folder = Path(viewer.__file__).with_name("page")
    for file in folder.iterdir():
        if file.suffix in (".js", ".css"):
            assert file.read_text(encoding="utf-8") in HTML
    assert "<!--" not in HTML


def test_text_becomes_no_markup() -> None:
    """No call that parses text as HTML or runs it, no handler and no style in the markup, and no storage of the key."""
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", "srcdoc"):
        assert word not in HTML
    for word in ("localStorage", "sessionStorage", "cookie", "indexedDB"):
        assert word not in HTML
    assert not re.search(r"<[^>]*\s(?:on\w+|style)=", HTML)


def test_it_is_no_way_around_the_key(engine: Served) -> None:
    with engine.again(api_key=["secret"]) as server:
        status, _, body = server.send("GET", "/")
        assert (status, body.decode()) == (200, HTML)
        for path in ("//", "/?", "/index.html", "/v1/models", "/openapi.json"):
            assert server.send("GET", path)[0] == (200 if path == "/?" else 401)
        assert server.send("POST", "/v1/chat/completions", BODY)[0] == 401
        status, _, reply = server.send("POST", "/", BODY)
        assert (status, set(reply)) == (405, {"error"})


READ = {
    "step": StepReport,
    "node": NodeReport,
    "token": TokenReport,
    "piece": PieceReport,
}


@pytest.mark.parametrize("name", READ)
def test_it_reads_fields_that_the_api_gives(name: str) -> None:
    script = HTML.split("<script>")[1]
    used = set(re.findall(rf"\b{name}\.(\w+)", script))
    assert used
    assert used <= {each.name for each in fields(READ[name])}


TEST = """
const { readFileSync } = require("node:fs");
const [page, stream] = process.argv.slice(1).map((file) => readFileSync(file, "utf8"));
const script = page.match(/<script>([^]*)<\\/script>/)[1];
const names = "{ readEvents, figuresOf, percent, shown, placeTree }";
const { readEvents, figuresOf, percent, shown, placeTree } = new Function(`${script}; return ${names}`)();
const events = [];
let rest = "";
// In pieces of any size.
for (let at = 0; at < stream.length; at += 701) {
  const found = readEvents(rest + stream.slice(at, at + 701));
  events.push(...found.events);
  rest = found.rest;
}
const steps = events.flatMap((event) => event.choices.flatMap((choice) => choice.trace || []));
console.log(JSON.stringify({
  rest, figures: figuresOf(steps), trees: steps.map(placeTree),
  text: steps.flatMap((step) => step.pieces.map((piece) => piece.text)).join(""),
  content: events.flatMap((event) => event.choices.map((choice) => choice.delta.content || "")).join(""),
  chances: [null, 1, 0.1234, 0.0123, 0.00001].map(percent),
  shown: [shown(" a\\n", 1), shown(null, 7), shown("x".repeat(20), 1)],
}));
"""


@pytest.mark.skipif(NODE is None, reason="no JavaScript engine here: node is not installed")
def test_its_functions_read_a_stream_of_the_api(server: Served, tmp_path: Any) -> None:
    status, _, stream = server.send("POST", "/v1/chat/completions", BODY)
    assert status == 200
    (tmp_path / "page.html").write_text(HTML)
    (tmp_path / "stream").write_bytes(stream)
    command = [NODE or "", "-e", TEST, "--", tmp_path / "page.html", tmp_path / "stream"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    whole = server.send("POST", "/v1/chat/completions", {**BODY, "stream": False})[2]["choices"][0]
    assert found["rest"] == ""
    assert found["text"] == found["content"] == whole["message"]["content"]
    steps = whole["trace"]
    later = sum(len(step["output"]) for step in steps[1:])
    count = len(steps) - 1
    figures = found["figures"]
    # Times are those of the stream.
    own = [
        step
        for line in stream.decode().splitlines()
        if line.startswith("data: {")
        for choice in json.loads(line.removeprefix("data: "))["choices"]
        for step in choice.get("trace") or ()
    ][1:]
    plain = sum(len(step["output"]) * step["plain_seconds"] for step in own)
    assert figures.pop("speedup") == pytest.approx(plain / sum(step["seconds"] for step in own))
    assert figures == {"tokens": 64, "steps": count, "tau": pytest.approx(later / count), "later": later}
    assert found["chances"] == ["–", "100%", "12%", "1.2%", "<0.1%"]
    assert found["shown"] == ["·a⏎", "#7", f"{'x' * 15}…"]
    for step, tree in zip(steps, found["trees"], strict=True):
        check_tree(step, tree)


def check_tree(step: dict[str, Any], tree: dict[str, Any]) -> None:
    """Boxes stand for the root, the nodes and the target's own token, and no two lie at the same place."""
    boxes = tree["boxes"]
    kinds = ["root", *("accepted" if node["accepted"] else "node" for node in step["nodes"])]
    own = [token for token in step["output"] if not token["accepted"]]
    assert [box["kind"] for box in boxes] == kinds + ["own"] * len(own)
    assert len({(box["depth"], box["line"]) for box in boxes}) == len(boxes)
    for box in boxes[1:]:
        assert box["depth"] == boxes[box["parent"]]["depth"] + 1
        assert 0 <= box["line"] < tree["lines"]
    if own:
        on_path = [place for place, kind in enumerate(kinds) if kind == "accepted"]
        assert boxes[-1]["parent"] == max(on_path, default=0)
