"""Commands and replies: each travels as it is, each is carried out, and those of several engines are joined."""

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import LLM, LoRARequest, SamplingParams
from specdec.async_engine.messages import ReplyTo, decode_command, decode_reply_to, encode, encode_command
from specdec.core.commands import (
    Abort,
    Add,
    AnyCommand,
    AnyReply,
    CheckIntegrity,
    Delta,
    Done,
    EngineCommand,
    EngineReply,
    GetStats,
    Integrity,
    LoadAdapter,
    News,
    Refused,
    Stats,
    Stop,
    Told,
    UnloadAdapter,
    Unloaded,
    UpdateDraft,
)
from specdec.core.engine_stats import EngineStats
from specdec.core.errors import QueueFullError
from specdec.core.outputs import Logprob, SpeculationStats, Step
from specdec.kernels.types.settings import ParameterError
from specdec.text.segment import Segment
from tests.specdec.world import World

TEXT, WHOLE = st.text(max_size=5), st.integers(-(2**63), 2**63 - 1)
TOKENS = st.lists(st.integers(0, 2**31), max_size=4)
ADAPTERS = st.builds(LoRARequest, TEXT.filter(str.strip), st.integers(1, 9), st.just("/a"), st.none() | st.just("/b"))
PARAMS = st.builds(
    SamplingParams,
    bad_words=st.just([]),
    n=st.integers(1, 3),
    seed=st.none() | st.integers(0, 2**63 - 1),
    temperature=st.floats(0.1, 2),
)
LOGPROBS = st.dictionaries(WHOLE, st.tuples(st.floats(-9, 0), WHOLE).map(lambda entry: Logprob(*entry)), max_size=2)
DELTAS = st.tuples(
    *(WHOLE, TOKENS, st.lists(st.booleans(), max_size=4)),
    *(st.lists(st.builds(Segment, TEXT, st.booleans()), max_size=2), TEXT),
    st.builds(SpeculationStats, st.integers(0, 9)),
    st.lists(st.tuples(WHOLE, WHOLE).map(lambda step: Step(*step)), max_size=2),
    *(st.none() | TEXT, st.none() | TEXT | WHOLE, st.none() | TEXT, st.none() | st.lists(LOGPROBS, max_size=2)),
    *(st.none() | st.lists(st.none() | LOGPROBS, max_size=2), st.none() | WHOLE),
).map(lambda fields: Delta(*fields))
STATS = st.builds(EngineStats, running=st.integers(0, 9), kv_usage=st.floats(0, 1))
# Those that are not here have no fields.
FIELDS: dict[type[Any], dict[str, st.SearchStrategy[Any]]] = {
    Add: {
        **{"prompt": TOKENS, "params": PARAMS, "priority": WHOLE, "cache_salt": st.none() | TEXT, "client": TEXT},
        **{"adapter": st.none() | ADAPTERS, "text": st.none() | TEXT, "trace": st.booleans()},
        "interval": st.floats(0, allow_infinity=True),
    },
    Abort: {"request_id": TEXT},
    UpdateDraft: {"folder": TEXT},
    LoadAdapter: {"adapter": ADAPTERS},
    UnloadAdapter: {"lora_int_id": WHOLE},
    News: {"deltas": st.lists(DELTAS, max_size=3)},
    Refused: {
        **{"message": TEXT, "kind": st.sampled_from(["wrong", "queue_full", "failed"])},
        **{"field": st.none() | TEXT, "code": st.none() | TEXT},
    },
    Stats: {"stats": STATS},
    Integrity: {"problem": st.none() | TEXT, "requests": WHOLE, "blocks": WHOLE},
    Unloaded: {"was_loaded": st.booleans()},
}


@pytest.mark.long
@pytest.mark.parametrize("kind", [*get_args(AnyCommand), *get_args(AnyReply)])
@given(data=st.data())
def test_each_travels_as_it_is(kind: type[Any], data: st.DataObject) -> None:
    fields = FIELDS.get(kind, {})
    assert [*kind.__match_args__] == [name for name in kind.__match_args__ if name in fields]
    sent = data.draw(st.builds(kind, **fields))
    if isinstance(sent, EngineCommand):
        assert decode_command(encode_command(sent)) == sent
    else:
        assert decode_reply_to(encode(ReplyTo.of(7, True, sent))).reply() == sent


@pytest.mark.parametrize(("base", "known"), [(EngineCommand, AnyCommand | Told), (EngineReply, AnyReply)])
def test_each_is_known_to_those_who_carry_it(base: type[Any], known: Any) -> None:
    assert {*base.__subclasses__()} == {*get_args(known)}


def test_what_is_no_command_is_not_passed_over(world: World) -> None:
    llm = LLM(world.folder / "target", draft=None, kv_cache_memory=1 << 22)
    with pytest.raises(TypeError, match="no command of an engine: Done"):
        llm.engine.handle(Done())  # type: ignore[call-overload]
    group = llm.engine.handle(Add([3], SamplingParams(max_tokens=9, ignore_eos=True)))
    for command in (Abort("no such request"), Abort(group.request_id), Stop()):
        assert llm.engine.handle(command) == Done()
    assert group.requests[0].finish_reason == "abort"
    assert llm.engine.handle(CheckIntegrity()) == Integrity(None, 0, 0)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("temperature is -1\nand more"), ValueError("temperature is -1")),
        (QueueFullError("2 requests wait"), QueueFullError("2 requests wait")),
        (FileNotFoundError("no such folder"), ValueError("no such folder")),
        (ParameterError("n", "n is 2"), ParameterError("n", "n is 2")),
        (ParameterError("n", "n is 2", "many"), ParameterError("n", "n is 2", "many")),
        (ZeroDivisionError("a bug"), RuntimeError("ZeroDivisionError: a bug")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_raised_again_where_the_user_stands(error: Exception, expected: Exception) -> None:
    found = Refused.of(error).error()
    assert (type(found), str(found), vars(found)) == (type(expected), str(expected), vars(expected))


REFUSED, GONE = Refused("no room", "queue_full"), "the actor died"


@pytest.mark.parametrize(
    ("command", "replies", "problem", "expected"),
    [
        (LoadAdapter, [Done(), Done()], None, Done()),
        (LoadAdapter, [Done(), REFUSED], None, REFUSED),
        (LoadAdapter, [], GONE, Refused("a replica did not answer: the actor died; try again", "queue_full")),
        (UnloadAdapter, [Unloaded(False), Unloaded(True)], None, Unloaded(True)),
        (UnloadAdapter, [Unloaded(False)], None, Unloaded(False)),
        (CheckIntegrity, [Integrity(None, 1, 2), Integrity("lost", 3, 4)], None, Integrity("lost", 4, 6)),
        (GetStats, [Stats(EngineStats(running=1)), Stats(EngineStats(running=2))], None, Stats(EngineStats(running=3))),
        (GetStats, [], GONE, Refused("a replica did not answer: the actor died; try again", "queue_full")),
    ],
)
def test_replies_of_several_engines_are_joined(
    command: type[Any], replies: list[EngineReply], problem: str | None, expected: EngineReply
) -> None:
    asked = command(*[None] * len(command.__match_args__))
    assert asked.joined(replies, problem) == expected
