"""Grammars that are compiled beside the steps: one that takes for ever keeps nobody waiting."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, SamplingParams, StructuredOutputsParams
from specdec.async_engine import compile_lanes
from specdec.async_engine.compile_lanes import NUM_LONG, NUM_QUICK
from specdec.async_engine.messages import Heartbeat, decode_from_engine
from specdec.core.call_grammar import forced_calls
from specdec.core.commands import CheckIntegrity, Integrity, Refused
from specdec.core.tool_choice import Function, ToolChoice
from tests.specdec.async_engine.loop_peer import WAIT_MS, Peer, add, call
from tests.specdec.async_engine.served import SETTINGS, SHORT
from tests.specdec.world import World

pytestmark = pytest.mark.slow


def endless(index: int) -> StructuredOutputsParams:
    """Make a form, another one for each number. The pattern takes 2^40 steps to miss the value."""
    return StructuredOutputsParams(json={"enum": ["a" * 40 + "!" * index], "pattern": "^(a+)+$"})


ENDLESS = endless(1)
ENDLESS_CALLS = forced_calls(
    ToolChoice("required"),
    [Function("f", {"type": "object", "properties": {"x": {"enum": ["a" * 40 + "!"], "pattern": "^(a+)+$"}}})],
    None,
    {},
    is_single=False,
)
CHAIN = [f'r{i} ::= r{i + 1} | "name of property {i}" r{i + 1}' for i in range(3500)]
# Most of a minute in xgrammar 0.2.8.
LARGE = StructuredOutputsParams(grammar="\n".join(["root ::= r0", *CHAIN, 'r3500 ::= "."']))


def structured(form: StructuredOutputsParams) -> SamplingParams:
    return replace(SHORT, structured_outputs=form)


SMALL = structured(StructuredOutputsParams(regex="[a-c]{4}"))


@pytest.fixture(scope="module")
def llm(world: World) -> LLM:
    return LLM(world.folder / "target", world.folder / "head", **{**SETTINGS, "max_num_seqs": 2})


@pytest.fixture(scope="module")
def peer(llm: LLM) -> Iterator[Peer]:
    peer = Peer(llm)
    yield peer
    peer.close()
    assert llm.stats().kv_usage == 0


def wait_until(holds: Callable[[], object]) -> None:
    for _ in range(WAIT_MS // 10):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen")


def wait_for_process(peer: Peer, number: int) -> int:
    """Return the id of the process that tries a request's grammar out, once there is one."""
    pids = list[int]()

    def is_there() -> bool:
        compiling = peer.loop._compiling.get(number)
        pids.extend([compiling.compilation.pid] if compiling is not None and compiling.compilation.pid else [])
        return bool(pids)

    wait_until(is_there)
    return pids[0]


def wait_for_end(pid: int) -> None:
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def compile_process(peer: Peer) -> int:
    assert peer.loop._lanes is not None
    assert peer.loop._lanes._process is not None
    return peer.loop._lanes._process.popen.pid


def tokens(peer: Peer, number: int) -> list[int]:
    return [token for delta in peer.ended(number)[number] for token in delta.token_ids]


@pytest.mark.long
def test_one_form_without_end_keeps_nobody_waiting(llm: LLM, peer: Peer) -> None:
    """Requests with and without forms are answered beside it. Aborting ends its process."""
    expected = llm.generate([[3, 4], [5]], [SMALL, SHORT], use_tqdm=False)
    peer.send(add(1, [3, 4], structured(LARGE)), add(2, [3, 4], SMALL))
    assert tokens(peer, 2) == expected[0].token_ids
    peer.send(add(3, [5]))
    assert tokens(peer, 3) == expected[1].token_ids
    process = wait_for_process(peer, 1)
    peer.send(call(7, CheckIntegrity()))
    assert peer.receive() == (7, Integrity(None, 1, 0))
    peer.cancel(1)
    assert peer.ended(1)[1][-1].finish_reason == "abort"
    wait_for_end(process)
    assert not peer.loop._compiling


def test_forms_without_end_leave_lanes_to_others(peer: Peer) -> None:
    """Those that take long wait for each other only, even of one client."""
    numbers = range(1, 2 * (NUM_QUICK + NUM_LONG))
    peer.send(*(add(number, [3, 4], structured(endless(number))) for number in numbers))
    for length in (5, 6):
        peer.send(add(20, [3, 4], structured(StructuredOutputsParams(regex=f"[a-c]{{{length}}}"))))
        assert tokens(peer, 20)
    for number in numbers:
        # Each begins again when others have ended.
        wait_for_process(peer, number)
        peer.cancel(number)
        peer.ended(number)


def test_an_endless_schema_is_aborted(peer: Peer) -> None:
    peer.send(add(1, [3, 4], structured(ENDLESS)))
    process = wait_for_process(peer, 1)
    peer.cancel(1)
    assert peer.ended(1)[1][-1].finish_reason == "abort"
    wait_for_end(process)


def test_the_engine_gives_signs_of_life_while_a_grammar_alone_is_waited_for(peer: Peer) -> None:
    peer.send(add(1, [3, 4], structured(LARGE)))
    wait_for_process(peer, 1)
    for _ in range(3):
        assert peer.socket.poll(WAIT_MS)
        assert isinstance(decode_from_engine(peer.socket.recv()), Heartbeat)
    assert list(peer.loop._compiling) == [1]
    peer.cancel(1)
    peer.ended(1)


def refusal(peer: Peer, number: int, form: StructuredOutputsParams) -> str:
    peer.send(add(number, [3, 4], structured(form)))
    replied, refused = peer.receive()
    assert isinstance(refused, Refused)
    assert (replied, refused.kind) == (number, "wrong")
    return refused.message


@pytest.mark.long
def test_limits_are_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_lanes, "MEMORY", 8 << 20)
    limits: dict[str, Any] = {"structured_compile_timeout": 2.0, "structured_max_bytes": 200_000}
    llm = LLM(world.folder / "target", **{**SETTINGS, **limits})
    peer = Peer(llm)
    late = r"^structured_outputs.json was not compiled within structured_compile_timeout, 2 seconds; make it smaller"
    with pytest.raises(ValueError, match=late):
        raise ValueError(refusal(peer, 1, ENDLESS))
    # Schemas of tools have the same limits.
    assert refusal(peer, 2, ENDLESS_CALLS).startswith("tools was not compiled within structured_compile_timeout, 2 sec")
    reason = refusal(peer, 3, LARGE)
    assert reason == "structured_outputs.grammar needs more than 8 MiB of memory to be compiled; make it smaller"
    large = StructuredOutputsParams(choice=["a" * 150_000, "b" * 50_001])
    message = "structured_outputs.choice has 200001 bytes, more than structured_max_bytes, 200000; make it smaller"
    # Before anything is made of it.
    with pytest.raises(ValueError, match=message):
        llm.generate([3], structured(large), use_tqdm=False)
    peer.close()


def test_invalid_grammars_are_refused(peer: Peer) -> None:
    reason = refusal(peer, 1, StructuredOutputsParams(regex="(a"))
    assert reason.startswith("structured_outputs.regex cannot be followed")
    reason = refusal(peer, 2, StructuredOutputsParams(json={"type": "string", "minLength": 3, "maxLength": 2}))
    assert reason.startswith("structured_outputs.json: at '/', no value follows minLength 3 and maxLength 2")


@pytest.mark.long
@pytest.mark.parametrize("which", ["compile process", "compilation"])
def test_a_process_that_is_killed_is_replaced(peer: Peer, which: str) -> None:
    peer.send(add(1, [3, 4], structured(ENDLESS)))
    process = wait_for_process(peer, 1)
    if which == "compile process":
        os.kill(compile_process(peer), signal.SIGKILL)
    os.kill(process, signal.SIGKILL)
    _, refused = peer.receive()
    assert isinstance(refused, Refused)
    assert "its process ended, by a fault or for want of memory" in refused.message
    again = structured(StructuredOutputsParams(choice=[f"{which} again"]))
    peer.send(add(2, [3, 4], again))
    assert peer.ended(2)[2][-1].finish_reason is not None


def test_compilations_go_on_after_sigterm(peer: Peer) -> None:
    """A service manager sends it to all processes of a service, whose requests may have time left."""
    peer.send(add(1, [3, 4], structured(StructuredOutputsParams(choice=["before SIGTERM"]))))
    peer.ended(1)
    process = compile_process(peer)
    os.kill(process, signal.SIGTERM)
    peer.send(add(2, [3, 4], structured(StructuredOutputsParams(choice=["after SIGTERM"]))))
    assert peer.ended(2)[2][-1].finish_reason is not None
    assert compile_process(peer) == process


@pytest.mark.long
def test_a_process_that_is_ending_is_replaced(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are closed before it can be seen to have ended."""
    peer.send(add(1, [3, 4], structured(StructuredOutputsParams(choice=["before it ends"]))))
    peer.ended(1)
    assert peer.loop._lanes is not None
    assert peer.loop._lanes._process is not None
    popen = peer.loop._lanes._process.popen
    # Until somebody waits for it.
    monkeypatch.setattr(popen, "poll", lambda: popen.returncode)
    os.kill(popen.pid, signal.SIGKILL)
    peer.send(add(2, [3, 4], structured(StructuredOutputsParams(choice=["after it has ended"]))))
    assert peer.ended(2)[2][-1].finish_reason is not None


@pytest.mark.long
def test_more_forms_than_lanes_wait(peer: Peer) -> None:
    """Those behind are compiled once others are aborted."""
    peer.send(*(add(number, [3, 4], structured(ENDLESS)) for number in range(1, 7)))
    processes = [wait_for_process(peer, number) for number in range(1, 5)]
    form = structured(StructuredOutputsParams(regex="[d-f]{4}"))
    peer.send(add(7, [3, 4], form))
    peer.cancel(5, 6, 1)
    assert peer.ended(1, 5, 6, 7)[7][-1].finish_reason != "abort"
    peer.cancel(2, 3, 4)
    peer.ended(2, 3, 4)
    for process in processes:
        wait_for_end(process)


@pytest.mark.long
def test_all_processes_end_with_the_loop(world: World) -> None:
    peer = Peer(LLM(world.folder / "target", **SETTINGS))
    peer.send(add(1, [3, 4], structured(ENDLESS)))
    process = wait_for_process(peer, 1)
    parent = compile_process(peer)
    peer.stop()
    peer.ended(1)
    peer.close()
    wait_for_end(parent)
    wait_for_end(process)
