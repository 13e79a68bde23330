"""Programs on an engine: the tokens and scores of plain requests, with what branches share computed once."""

import re
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, AsyncLLM, SamplingParams
from specdec import programs as sp
from specdec.programs.backend import Generated, Selected

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"dtype": "float64", "adaptive_drafts": False, "prefill_stretch": 0, "block_size": 16}
STEM = "I would like to find a cheap restaurant in the centre of town that serves food from the north of Italy. " * 3
BRANCHES = 20
DOCUMENT = Path(__file__).parents[3] / "docs" / "programs.md"


@pytest.fixture(scope="module")
def engine() -> Iterator[sp.Engine]:
    with sp.Engine(draft="eagle", **SETTINGS) as engine:
        yield engine
        # It may be closed twice.
        engine.close()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(draft="eagle", **SETTINGS)


@sp.function
def branching(s: sp.ProgramState, stem: str) -> None:
    s += stem
    forks = s.fork(BRANCHES)
    for number, fork in enumerate(forks):
        fork += f"Question {number}:" + sp.gen("answer", max_tokens=4)
    forks.join()


@pytest.mark.long
def test_branches_compute_what_they_share_once(engine: sp.Engine, llm: LLM) -> None:
    """Whole blocks of it; the tokens are those of requests without branches."""
    before = engine.stats()
    state = branching.run(STEM, backend=engine, params={"temperature": 0})
    after = engine.stats()
    prompts = [f"{STEM}Question {number}:" for number in range(BRANCHES)]
    expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert state["answer"] == [output.text for output in expected]
    infos = state.get_meta_info("answer")
    assert isinstance(infos, list)
    shared = len(llm.get_tokenizer()(STEM + "Question")["input_ids"]) // 16 * 16
    assert shared >= 48
    cached = sorted(info.num_cached_tokens or 0 for info in infos if isinstance(info, Generated))
    assert cached == [0, *[shared] * (BRANCHES - 1)]
    computed = sum(len(output.prompt_token_ids) for output in expected) - (BRANCHES - 1) * shared
    assert after.prefix_queries - before.prefix_queries - (after.prefix_hits - before.prefix_hits) == computed
    # One step for the first branch's prompt, one for the other branches' ends, and then all generate at once; on a busy
    # machine the branches arrive over some steps. One after the other they would take four steps each.
    assert after.steps - before.steps < BRANCHES


@sp.function
def choosing(s: sp.ProgramState) -> None:
    s += STEM + "The food is" + sp.select("food", choices=[" Italian", " Chinese food", " very good"])
    s += ", and" + sp.gen("more", max_tokens=6, stop=".")


@pytest.mark.long
def test_select_scores_in_one_pass_and_generation_goes_on(engine: sp.Engine, llm: LLM) -> None:
    choosing.run(backend=engine, params={"temperature": 0})
    before = engine.stats()
    state = choosing.run(backend=engine, params={"temperature": 0})
    info, more = state.get_meta_info("food"), state.get_meta_info("more")
    assert isinstance(info, Selected)
    assert isinstance(more, Generated)
    # One pass for the choices, whose prompt is cached, and one for each token at most.
    assert engine.stats().steps - before.steps <= 1 + more.num_tokens
    expected = [
        llm.generate(STEM + "The food is", SamplingParams(choices=[choice]))[0].choices
        for choice in (" Italian", " Chinese food", " very good")
    ]
    for score, own in zip(info.scores, expected, strict=True):
        assert own is not None
        assert score.logprobs == pytest.approx(own[0].logprobs, abs=1e-9)
    best = max(range(3), key=lambda place: info.scores[place].normalized_logprob)
    assert info.text == (" Italian", " Chinese food", " very good")[best]
    prompt = STEM + "The food is" + info.text + ", and"
    plain = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=6, stop="."))[0]
    assert (state["more"], more.finish_reason) == (plain.text, plain.finish_reason)


def test_roles_use_the_chat_template(engine: sp.Engine, llm: LLM) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> None:
        s += sp.user("Hello, I need a hotel.")
        s += sp.assistant("In which" + sp.gen("rest", max_tokens=5))
        s += sp.user("The centre.")
        s += sp.assistant(sp.gen("last", max_tokens=5))

    params = SamplingParams(temperature=0, max_tokens=5)
    state = program.run(backend=engine, params={"temperature": 0})
    messages = [{"role": "user", "content": "Hello, I need a hotel."}, {"role": "assistant", "content": "In which"}]
    prompt = llm.chat_prompt(messages, add_generation_prompt=False, continue_final_message=True)
    assert state["rest"] == llm.generate([prompt], params)[0].text
    (last,) = llm.chat(state.messages()[:-1], params)
    assert state["last"] == last.text


def test_choices_continue_a_message_in_the_tokens_of_the_whole_text(engine: sp.Engine, llm: LLM) -> None:
    @sp.function
    def program(s: sp.ProgramState, begun: str) -> None:
        s += sp.user("Hello, I need a place to eat.")
        s += sp.assistant(begun + sp.select("rest", choices=["aurant in the centre", " hotel"]))

    tokenizer = llm.get_tokenizer()
    for begun in ("I know a rest", ""):
        state = program.run(begun, backend=engine)
        info = state.get_meta_info("rest")
        assert isinstance(info, Selected)
        question = {"role": "user", "content": "Hello, I need a place to eat."}
        messages = [question, *([{"role": "assistant", "content": begun}] if begun else [])]
        arguments = {"add_generation_prompt": not begun, "continue_final_message": bool(begun), "tokenize": False}
        text = tokenizer.apply_chat_template(messages, **arguments)
        own = [score.token_ids for score in info.scores]
        whole = [
            tokenizer(text + choice, add_special_tokens=False)["input_ids"]
            for choice in ("aurant in the centre", " hotel")
        ]
        (start,) = {tuple(tokens[: -len(ids)]) for tokens, ids in zip(whole, own, strict=True)}
        assert [[*start, *ids] for ids in own] == whole
        (plain,) = llm.generate([list(start)], SamplingParams(choices=own))
        assert plain.choices is not None
        for score, other in zip(info.scores, plain.choices, strict=True):
            assert score.logprobs == pytest.approx(other.logprobs, abs=1e-9)


def test_forms_hold(engine: sp.Engine) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> None:
        s += "The price is " + sp.gen("price", regex="[1-9][0-9] pounds")
        s += ". As JSON: " + sp.gen("json", json_schema={"type": "object", "properties": {"n": {"enum": [1, 2]}}})

    state = program.run(backend=engine, params={"temperature": 1, "seed": 3})
    assert state["price"].endswith("0 pounds") or state["price"][2:] == " pounds"
    assert state["json"] in ('{"n": 1}', '{"n": 2}', "{}")


def test_a_stream_comes_in_parts(engine: sp.Engine) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> None:
        s += "Hello, " + sp.gen("rest", max_tokens=8)

    parts = list(program.run(backend=engine, params={"temperature": 0}, stream=True).text_iter())
    assert len(parts) > 2
    assert "".join(parts) == program.run(backend=engine, params={"temperature": 0}).text()


def test_the_python_of_the_document_runs(
    engine: sp.Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the engine of these tests, so that none is started for it."""
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.setattr(
        sp, "Engine", lambda **settings: nullcontext(engine) if settings == {"draft": "eagle"} else None
    )
    names: dict[str, Any] = {}
    exec(compile(block, str(DOCUMENT), "exec"), names)
    state = names["state"]
    assert state["price"] in (" cheap", " moderately priced", " expensive")
    assert len(state.ret_value) == 3
    assert state.text().startswith("I would like to find a restaurant in San Jose. It should be" + state["price"])
    assert state.text() in capsys.readouterr().out


@pytest.mark.long
def test_a_refused_request_is_an_error_of_the_program(engine: sp.Engine) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> None:
        s += "word " * engine.llm.max_model_len + sp.gen("rest")

    with pytest.raises(ValueError, match=r"the prompt is too long: .* maximum context length is"):
        program.run(backend=engine)
    assert engine.stats().running == 0


@pytest.mark.long
def test_an_engine_that_cannot_start_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(_: AsyncLLM) -> None:
        raise ValueError("too little memory")

    monkeypatch.setattr(AsyncLLM, "start", refused)
    before = threading.active_count()
    with pytest.raises(ValueError, match="too little memory"):
        sp.Engine(draft=None)
    assert threading.active_count() == before
