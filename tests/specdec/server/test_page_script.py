"""The page's script, run in node on a document of its own: how answers look, how they end, and what is said of them."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.server.viewer import page

NODE = shutil.which("node")
RUNNER = Path(__file__).with_name("page_document.js")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NODE is None, reason="no JavaScript engine here: node is not installed"),
]
Script = Callable[[str], Any]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Run JavaScript with the page's text in `html` and what `page_document.js` has; return what it returns."""

    def run(code: str) -> Any:
        (tmp_path / "page.html").write_text(page()[0].decode(), encoding="utf-8")
        (tmp_path / "test.js").write_text(code, encoding="utf-8")
        command = [NODE or "", str(RUNNER), str(tmp_path / "page.html"), str(tmp_path / "test.js")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


MARKED = {
    "# One\n### Three": "<div.heading.level1>One</div><div.heading.level3>Three</div>",
    "a **b *c*** `d*e*` f": (
        "<div.paragraph.level0>a <strong>b </strong><strong><em>c</em></strong> <code>d*e*</code> f</div>"
    ),
    "snake_case_name 2 * 3 * 4 \\*a\\* **": "<div.paragraph.level0>snake_case_name 2 * 3 * 4 *a* **</div>",
    "- a\n  - b\n2. c": (
        "<div.item.level0><span.mark>•</span>a</div><div.item.level1><span.mark>•</span>b</div>"
        "<div.item.level0><span.mark>2.</span>c</div>"
    ),
    "```py\nx = '**'\n\ny\n```\nz": (
        "<div.code.level0><div.language>py</div><pre>x = '**'\n\ny</pre></div><div.paragraph.level0>z</div>"
    ),
    "~~~\n```\n~~~": "<div.code.level0><pre>```</pre></div>",
    "```\nnot **closed": "<div.code.level0><pre>not **closed</pre></div>",
    "> a\n> b": "<div.quote.level0>a\nb</div>",
    "| a |\n|---|": "<div.table.level0><pre>| a |\n|---|</pre></div>",
    "<b>x</b> [y](javascript:z)": "<div.paragraph.level0><b>x</b> [y](javascript:z)</div>",
}


@pytest.mark.long
@pytest.mark.parametrize("text", MARKED)
def test_markdown_is_shown_as_it_arrives(script: Script, text: str) -> None:
    """In pieces of any size: what is shown at the end is what a whole text shows."""
    for size in (1, 3, len(text)):
        code = f"""
            const text = {json.dumps(text)}, size = {size}, steps = [];
            for (let at = 0; at < text.length; at += size) steps.push(step(text.slice(at, at + size)));
            const page = openPage(html, [{{ parts: partsOf(steps, "stop", 9) }}]);
            await page.send("a");
            const [answer] = page.ids.chat.all("answer");
            return answer.markup;
        """
        assert script(code) == MARKED[text]


def test_elements_of_an_answer_are_of_few_kinds(script: Script) -> None:
    """Whatever an answer says, it makes no element that could run or load anything, and no attribute."""
    text = "# <img src=x onerror=alert(1)>\n```<script>\nalert(1)\n```\n"
    text += "![a](http://x/y.png) [b](javascript:c) <svg/onload=d>"
    kinds = script(f"""
        const page = openPage(html, [{{ parts: partsOf([step({json.dumps(text)})], "stop", 9) }}]);
        await page.send("<script>alert(2)</script>");
        const found = new Set();
        const visit = (one) => {{
          found.add(one.name);
          Object.keys(one.attributes).forEach((name) => found.add(name));
          one.children.forEach(visit);
        }};
        page.ids.chat.all("user").forEach(visit);
        page.ids.chat.all("answer").forEach(visit);
        return [...found].sort();
    """)
    assert set(kinds) <= {"div", "span", "pre", "code", "strong", "em", "role", "aria-level"}


def test_colours_and_steps_stay_with_the_text(script: Script) -> None:
    found = script("""
        const steps = [step("**a", []), step("b** `c", [true]), step("d`", [])];
        const page = openPage(html, [{ parts: partsOf(steps, "stop", 9) }]);
        await page.send("a");
        const spans = () => page.ids.chat.all("piece").map((one) => [one.textContent, one.className, one.dataset.step]);
        const before = spans();
        page.ids.chat.all("piece")[1].happen("click");
        const chosen = spans().filter((one) => one[1].includes("chosen"));
        page.ids.markdown.checked = false;
        page.ids.markdown.happen("change");
        return { before, chosen, title: page.ids.title.textContent, plain: page.ids.chat.all("answer")[0].textContent };
    """)
    accepted = "piece accepted"
    assert found["before"] == [
        ["a", "piece", "0"],
        ["b", accepted, "1"],
        [" ", accepted, "1"],
        ["c", accepted, "1"],
        ["d", "piece", "2"],
    ]
    assert [text for text, *_ in found["chosen"]] == ["b", " ", "c"]
    assert found["title"].startswith("Step 1: 1 draft tokens, 1 accepted, 2 tokens in 10.0 ms")
    assert found["plain"] == "**ab** `cd`"


def test_one_control_for_all_steps(script: Script) -> None:
    found = script("""
        const steps = Array.from({ length: 250 }, (_, number) => step(`${number} `, [true]));
        const page = openPage(html, [{ parts: partsOf(steps, "stop", 250) }]);
        await page.send("a");
        const [strip] = page.ids.chat.all("steps"), [before, slider, next, place] = strip.children, seen = [];
        const note = () => seen.push([place.textContent, slider.value, before.disabled, next.disabled]);
        note();
        next.happen("click");
        note();
        slider.value = "248";
        slider.happen("input");
        note();
        next.happen("click");
        note();
        before.happen("click");
        note();
        return { seen, most: slider.max, controls: strip.children.length, title: page.ids.title.textContent };
    """)
    assert found["controls"] == 4
    assert found["most"] == "249"
    assert found["seen"] == [
        ["249 steps", "0", True, False],
        ["step 0 of 249", "0", True, False],
        ["step 248 of 249", "248", False, False],
        ["step 249 of 249", "249", False, True],
        ["step 248 of 249", "248", False, False],
    ]
    assert found["title"].startswith("Step 248: ")


def test_an_answer_that_was_cut_goes_on(script: Script) -> None:
    found = script("""
        const page = openPage(html, [
          { parts: partsOf([step("one "), step("two ", [true])], "length", 256) },
          { parts: partsOf([step("three"), step(".", [true])], "stop", 3) },
          { parts: partsOf([step("four")], "length", 5) },
        ]);
        await page.send("count");
        const said = [], shown = (one) => one.hidden ? null : one.textContent;
        const note = () => said.push(page.ids.chat.all("end").map(shown));
        note();
        const [button] = page.ids.chat.all("go-on");
        button.happen("click");
        await page.settle();
        note();
        await page.send("more");
        note();
        const texts = page.ids.chat.all("answer").map((one) => one.textContent);
        return { said, texts, bodies: page.bodies, figures: page.ids.chat.all("figures")[0].textContent };
    """)
    assert found["said"] == [
        ["Cut at 256 tokens, the limit above (max tokens).Go on"],
        [None],
        [None, "Cut: the context is full. A new chat begins with an empty one."],
    ]
    assert found["texts"] == ["one two three.", "four"]
    first, second, third = found["bodies"]
    assert first["messages"] == [{"role": "user", "content": "count"}]
    assert "continue_final_message" not in first
    assert second["messages"] == [*first["messages"], {"role": "assistant", "content": "one two "}]
    assert (second["continue_final_message"], second["add_generation_prompt"]) == (True, False)
    assert [message["content"] for message in third["messages"]] == ["count", "one two three.", "more"]
    # Neither of the two passes over the prompt counts as a step.
    assert found["figures"].startswith("tau 2.00 · ")
    assert found["figures"].endswith(" · 6 tokens · 2 steps")


def test_a_server_that_is_gone(script: Script) -> None:
    found = script("""
        const page = openPage(html, [
          "gone",
          { parts: partsOf([step("one "), step("two")]), ends: "broken" },
          "gone",
          { parts: partsOf([step(" three"), step(" four")]) },
          { status: 400, error: { message: "no" } },
        ]);
        const said = [], note = () => said.push(page.ids.chat.all("end").map((one) => one.textContent));
        await page.send("count");
        note();
        const kept = page.ids.message.value;
        await page.send(kept);
        note();
        for (let again = 0; again < 3; again++) {
          page.ids.chat.all("go-on")[0].happen("click");
          await page.settle();
          note();
        }
        return { said, kept, text: page.ids.chat.all("answer")[1].textContent, last: page.bodies[4].messages };
    """)
    remedy = "If the server has ended, its log says why; start it again with specdec serve, and go on here."
    broke, gone = (
        f"The connection broke before the answer's end. {remedy}Go on",
        f"The server does not answer. {remedy}",
    )
    assert found["kept"] == "count"
    assert found["said"] == [[gone], ["", broke], ["", f"{gone}Go on"], ["", broke], ["", "noGo on"]]
    assert found["text"] == "one two three four"
    assert found["last"][1] == {"role": "assistant", "content": "one two three four"}


def test_a_stopped_answer_goes_on(script: Script) -> None:
    found = script("""
        const page = openPage(html, [
          { parts: partsOf([step("one")]), ends: "never" },
          { parts: partsOf([step(" two")], "stop", 1) },
        ]);
        await page.send("count");
        page.ids.stop.happen("click");
        await page.settle();
        const said = page.ids.chat.all("end")[0].textContent;
        page.ids.chat.all("go-on")[0].happen("click");
        await page.settle();
        return { said, text: page.ids.chat.all("answer")[0].textContent };
    """)
    assert found == {"said": "Stopped.Go on", "text": "one two"}


def test_speed_beside_that_without_drafts(script: Script) -> None:
    found = script("""
        const { figuresOf, compared } = openPage(html, []);
        const pass = step("a", [], 9, 9), two = step("b", [true], 0.015, 0.01), one = step("c", [false], 0.025, 0.01);
        const speed = (...kinds) => figuresOf([pass, ...kinds.flatMap((kind) => Array(8).fill(kind))]).speedup;
        const few = figuresOf([pass, ...Array(7).fill(two)]).speedup;
        const words = [2, 1.04, 0.97, 0.5, null].map(compared);
        const unknown = step("d", [true], 0.01, null);
        const none = speed(step("e"));
        return { fast: speed(two), slow: speed(two, one), none, unknown: speed(two, unknown), few, words };
    """)
    assert found["fast"] == pytest.approx(2 * 0.010 / 0.015)
    assert found["slow"] == pytest.approx(3 * 0.010 / 0.040)
    # Without drafts there is nothing to compare, and without measured costs nothing to compare with.
    assert (found["none"], found["unknown"], found["few"]) == (None, None, None)
    assert found["words"] == [
        "about 2.0 times faster than without drafts",
        "about as fast as without drafts",
        "about as fast as without drafts",
        "about 2.0 times slower than without drafts",
        "",
    ]


def test_a_recorded_answer_says_how_it_ended(script: Script) -> None:
    found = script("""
        const steps = [step("a"), step("**b**", [true])];
        const recorded = { model: "m", prompt: "p", steps, end: "cut at --max-tokens 2" };
        const page = openPage(html, [], recorded);
        const one = (word) => page.ids.chat.all(word)[0];
        return { end: one("end").textContent, text: one("answer").markup, place: one("place").textContent };
    """)
    assert found["end"] == "cut at --max-tokens 2"
    assert found["text"].startswith("<div.paragraph.level0>a<strong>")
    assert found["place"] == "step 1 of 1"


@pytest.mark.parametrize("traces", [True, False])
def test_thinking_is_folded_and_no_part_of_the_answer(script: Script, traces: bool) -> None:
    """The text of steps holds marks and thinking; the answer's keeps its steps."""
    found = script(f"""
        const event = (data) => `data: ${{JSON.stringify(data)}}\\n\\n`;
        const steps = [step("<think>Hm"), step(", so</think>**Y"), step("es**")], traces = {json.dumps(traces)};
        const [first, second] = [{{ reasoning: "Hm" }}, {{ reasoning: ", so" }}];
        const said = [[first], [second, {{ content: "**Y" }}], [{{ content: "es**" }}]];
        const parts = said.map((deltas, number) => deltas.map((delta, place) => event({{ choices: [
          {{ delta, finish_reason: null, ...(traces && place === 0 && {{ trace: [steps[number]] }}) }},
        ] }})).join(""));
        parts.push(event({{ choices: [{{ delta: {{}}, finish_reason: "stop" }}] }}), "data: [DONE]\\n\\n");
        const refused = {{ status: 400, error: {{ message: "no", param: "trace" }} }};
        const page = openPage(html, [...(traces ? [] : [refused]), {{ parts: [...parts] }}, {{ parts: [...parts] }}]);
        await page.send("a");
        await page.send("b");
        const pieces = page.ids.chat.all("piece").map((one) => [one.textContent, one.dataset.step]);
        const [folded] = page.ids.chat.all("thinking");
        const markup = page.ids.chat.all("answer")[0].markup;
        const last = page.bodies[page.bodies.length - 1].messages;
        const [kind, open, thinking] = [folded.name, folded.attributes.open, folded.children[1].textContent];
        return {{ kind, open, thinking, markup, pieces, last }};
    """)
    assert (found["kind"], found.get("open"), found["thinking"]) == ("details", None, "Hm, so")
    assert found["markup"] == "<div.paragraph.level0><strong>Yes</strong></div>"
    assert found["last"][1] == {"role": "assistant", "content": "**Yes**", "reasoning": "Hm, so"}
    if traces:
        assert found["pieces"][:2] == [["Y", "1"], ["es", "2"]]
