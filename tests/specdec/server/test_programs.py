"""Programs over the server: texts and scores of the engine."""

import pytest

from specdec import SamplingParams
from specdec import programs as sp
from tests.specdec.server.running import Served

pytestmark = pytest.mark.slow

PROMPT = "a restaurant in"
GREEDY = {"temperature": 0}


@sp.function
def program(s: sp.ProgramState) -> None:
    s += PROMPT + sp.gen("first", max_tokens=6)
    forks = s.fork(3)
    for number, fork in enumerate(forks):
        fork += str(number) + sp.gen("part", max_tokens=5, temperature=0.7, seed=number)
    forks.join()
    s += sp.select("choice", choices=[" the north", " the south", " town"])


def test_texts_and_scores_are_those_of_the_engine(server: Served) -> None:
    with sp.Endpoint(f"{server.url}/v1", model="tiny") as endpoint:
        state = program.run(backend=endpoint, params=GREEDY)
        assert endpoint.num_calls == 5
    llm = server.offline
    first = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6))[0].text
    assert state["first"] == first
    params = [SamplingParams(temperature=0.7, seed=number, max_tokens=5) for number in range(3)]
    expected = llm.generate([f"{PROMPT}{first}{number}" for number in range(3)], params, use_tqdm=False)
    assert state["part"] == [output.text for output in expected]
    (scored,) = llm.generate(PROMPT + first, SamplingParams(choices=[" the north", " the south", " town"]))
    info = state.get_meta_info("choice")
    assert isinstance(info, sp.Selected)
    assert scored.choices is not None
    for own, other in zip(info.scores, scored.choices, strict=True):
        assert own.token_ids == other.token_ids
        assert own.logprobs == pytest.approx(other.logprobs, abs=1e-9)
    assert state.text() == PROMPT + first + info.text
