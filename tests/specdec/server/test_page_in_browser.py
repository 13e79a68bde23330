"""The page at `/` and a recorded page in headless Chromium. Skipped where there is no browser."""

import json
import os
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
    assert [error for error in errors if "status of 401" not in error] == []


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
    assert tab.locator(".steps button.chosen").count() == 1


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
    tab.locator(".steps button").first.click()
    assert tab.locator("#title").text_content().startswith("Pass over the prompt")
    # The next answer takes the conversation as it is, and its text is the API's.
    tab.click("#new")
    tab.unroute("**/v1/chat/completions")
    ask(tab, "the cat", 40)
    tab.wait_for_selector("#send")
    body = {"messages": [{"role": "user", "content": "the cat"}], "temperature": 0.8, "seed": 4, "max_tokens": 40}
    expected = server.send("POST", "/v1/chat/completions", body)[2]["choices"][0]["message"]["content"]
    assert tab.locator(".answer").text_content() == expected


def test_it_asks_for_the_key_and_keeps_it_in_memory(engine: Served, tab: Any) -> None:
    with engine.again(api_key=["secret"]) as server:
        tab.goto(server.url)
        tab.wait_for_selector("#key")
        ask(tab, "a", 4)
        tab.wait_for_selector(".error")
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
    assert tab.locator(".answer").text_content() == state.text
    assert tab.locator(".user").text_content() == PROMPT
    assert not tab.is_visible("#form")
    check_open_tree(tab)
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
