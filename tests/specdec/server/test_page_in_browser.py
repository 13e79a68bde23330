"""The page at `/` and a recorded page in headless Chromium. Skipped where there is no browser."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec import SamplingParams
from specdec.core.step_report import StepReporter
from specdec.server.viewer import recorded_page
from tests.specdec.server.running import Served

CHROMIUM = os.environ.get("SPECDEC_TEST_BROWSER") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PROMPT = "the cat <b>and</b> <img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium here: neither chromium, chromium-browser nor google-chrome is on the path")
    with playwright.sync_playwright() as driver:
        # The sandbox does not run as root, as which containers test.
        own = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield own
        own.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab that fails the test if the page reports an error, such as a violation of its policy."""
    context = browser.new_context()
    tab = context.new_page()
    tab.set_default_timeout(20_000)
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    tab.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}"))
    yield tab
    context.close()
    # A refused request is one of the network, not of the page.
    assert [error for error in errors if not re.search("status of 401|ERR_CONNECTION_REFUSED", error)] == []


def ask(tab: Any, text: str, most: int) -> None:
    tab.fill("#temperature", "0.8")
    tab.fill("#seed", "4")
    tab.fill("#max-tokens", str(most))
    tab.fill("#message", text)
    tab.press("#message", "Enter")


def send_on_without_an_end(route: Any) -> None:
    """Send a request to the server, for an answer that runs until it is stopped."""
    route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))


def check_open_tree(tab: Any) -> None:
    """A step with accepted tokens shows its tree, with the path marked and numbers under each token."""
    assert tab.locator("#drawing svg g.root").count() == 1
    assert tab.locator("#drawing svg g.accepted").count() >= 1
    assert tab.locator("#drawing svg line.accepted").count() == tab.locator("#drawing svg g.accepted").count()
    nodes = tab.locator("#drawing svg g.node, #drawing svg g.accepted")
    numbers = nodes.first.locator("text.numbers").text_content()
    assert numbers.startswith("path ")
    assert " · target " in numbers
    assert "accepted" in tab.locator("#title").text_content()
    assert tab.locator(".piece.chosen").count() >= 1
    assert re.fullmatch(r"step \d+ of \d+", tab.locator(".steps .place").text_content())


def test_a_chat_with_coloured_tokens_and_their_trees(server: Served, tab: Any) -> None:
    tab.goto(server.url)
    tab.wait_for_function("document.getElementById('model').textContent === 'tiny'")
    tab.route("**/v1/chat/completions", send_on_without_an_end)
    ask(tab, PROMPT, 8000)
    # While the answer still runs.
    tab.wait_for_selector(".piece.accepted")
    tab.wait_for_function("/tau [1-9].* tok.s/.test(document.querySelector('.figures').textContent)")
    assert tab.is_visible("#stop")
    colours = tab.evaluate(
        "['.piece.accepted', '.piece:not(.accepted)'].map((e) => getComputedStyle(document.querySelector(e)).color)"
    )
    assert colours[0] != colours[1]
    tab.click("#stop")
    tab.wait_for_selector("#send")
    server.wait_until_idle()
    assert tab.locator(".user").text_content() == PROMPT
    assert tab.locator("#chat img, #chat b").count() == 0
    tab.locator(".piece.accepted").first.click()
    check_open_tree(tab)
    # By the slider's keys, and by the buttons.
    tab.focus(".steps input")
    tab.press(".steps input", "Home")
    assert tab.locator("#title").text_content().startswith("Pass over the prompt")
    tab.click(".steps button:last-of-type")
    assert tab.locator("#title").text_content().startswith("Step 1: ")
    assert tab.locator(".end").text_content() == "Stopped.Go on"
    assert tab.locator(".steps > *").count() == 4
    # The next answer takes the conversation as it is, and its text is the API's.
    tab.click("#new")
    tab.uncheck("#markdown")
    ask(tab, "the cat", 40)
    tab.wait_for_selector("#send")
    body = {
        "messages": [{"role": "user", "content": "the cat"}],
        "temperature": 0.8,
        "seed": 4,
        "max_tokens": 40,
        "ignore_eos": True,
    }
    expected = server.send("POST", "/v1/chat/completions", body)[2]["choices"][0]["message"]["content"]
    assert tab.locator(".answer").text_content() == expected
    assert tab.locator(".end").text_content() == "Cut at 40 tokens, the limit above (max tokens).Go on"
    tab.click(".go-on")
    tab.wait_for_selector("#send")
    longer = tab.locator(".answer").text_content()
    assert longer.startswith(expected)
    assert len(longer) > len(expected)


MARKDOWN = "# Title\n**bold** `<img src=x onerror=alert(1)>`\n```html\n<script>alert(2)</script>\n```\n<b>no</b>"


def test_markdown_and_a_connection_that_breaks(server: Served, tab: Any) -> None:
    """An answer of markdown, whose stream ends before the answer does; then a server that is gone."""

    def answer(route: Any) -> None:
        piece = {"text": MARKDOWN, "accepted": False}
        token = {"token": 1, "text": "x", "accepted": False}
        step = {
            "seconds": 0.01,
            "plain_seconds": 0.01,
            "root": token,
            "nodes": [],
            "output": [token],
            "pieces": [piece],
        }
        part = {"choices": [{"delta": {"content": MARKDOWN}, "trace": [step], "finish_reason": None}]}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(part)}\n\n")

    tab.goto(server.url)
    tab.route("**/v1/chat/completions", answer)
    ask(tab, "a", 40)
    tab.wait_for_selector("#send")
    found = {kind: tab.locator(f".answer {kind}").all_text_contents() for kind in (".heading", "strong", "code", "pre")}
    assert found == {
        ".heading": ["Title"],
        "strong": ["bold"],
        "code": ["<img src=x onerror=alert(1)>"],
        "pre": ["<script>alert(2)</script>"],
    }
    assert tab.locator(".answer img, .answer script, .answer b").count() == 0
    assert tab.locator(".end").text_content().startswith("The connection broke before the answer's end.")
    tab.unroute("**/v1/chat/completions")
    tab.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    tab.click(".go-on")
    tab.wait_for_selector(".end .error")
    assert tab.locator(".end").text_content().startswith("The server does not answer.")


def test_it_asks_for_the_key_and_keeps_it_in_memory(engine: Served, tab: Any) -> None:
    with engine.again(api_key=["secret"]) as server:
        tab.goto(server.url)
        tab.wait_for_selector("#key")
        ask(tab, "a", 4)
        tab.wait_for_selector(".end .error")
        assert "the API key is missing or wrong" in tab.locator(".error").text_content()
        assert tab.input_value("#message") == "a"
        tab.fill("#key", "secret")
        tab.press("#message", "Enter")
        tab.wait_for_selector(".piece")
        assert tab.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        tab.reload()
        assert tab.input_value("#key") == ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_recorded_answer_needs_no_server(server: Served, tab: Any, tmp_path: Path, scheme: str) -> None:
    llm = server.offline
    assert llm.tokenizer is not None
    params = SamplingParams(temperature=0.8, seed=4, ignore_eos=True, max_tokens=64)
    *_, state = llm.stream(PROMPT, params, trace=True)
    steps = StepReporter(llm.tokenizer.backend, params).new_steps(state.outputs[0])
    file = tmp_path / "trace.html"
    file.write_text(recorded_page("tiny", PROMPT, steps), encoding="utf-8")
    tab.emulate_media(color_scheme=scheme)
    tab.goto(file.as_uri())
    tab.uncheck("#markdown")
    assert tab.locator(".answer").text_content() == state.text
    assert tab.locator(".user").text_content() == PROMPT
    assert not tab.is_visible("#form")
    check_open_tree(tab)
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
