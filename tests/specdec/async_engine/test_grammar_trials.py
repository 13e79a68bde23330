"""Grammars that are compiled beside the steps, each tried out before in a process that can be killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, SamplingParams, StructuredOutputsParams
from specdec.async_engine import grammar_trials
from specdec.async_engine.grammar_trials import NUM_THREADS, GrammarTrials
from specdec.async_engine.messages import Heartbeat, decode_from_engine
from specdec.core.call_grammar import forced_calls
from specdec.core.commands import CheckIntegrity, Integrity, Refused
from specdec.core.tool_choice import Function, ToolChoice
from specdec.kernels.types.settings import ParameterError
from tests.specdec.async_engine.loop_peer import WAIT_MS, Peer, add, call
from tests.specdec.async_engine.served import SETTINGS, SHORT, is_alive
from tests.specdec.structured.byte_grammars import compiler
from tests.specdec.world import World

pytestmark = pytest.mark.slow


def endless(index: int) -> StructuredOutputsParams:
    """Make a form, another one for each number, that takes half a minute; those of schemas are refused early."""
    schema = {"type": "integer", "multipleOf": 700_001, "title": str(index)}
    return StructuredOutputsParams(grammar=f"start: %json {json.dumps(schema)}")


ENDLESS = endless(0)
# Most of a minute, before llguidance (1.9) has read it.
LARGE = StructuredOutputsParams(
    grammar="\n".join(f'{"root" if i == 0 else f"r{i}"} ::= r{i + 1} | "name {i}" r{i + 1}' for i in range(3500))
    + '\nr3500 ::= "."'
)


def structured(form: StructuredOutputsParams) -> SamplingParams:
    return replace(SHORT, structured_outputs=form)


def small(name: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(choice=[name])


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


@pytest.fixture
def trials() -> Iterator[GrammarTrials]:
    trials = GrammarTrials(compiler(), 1.0)
    yield trials
    trials.close()


def wait_until(holds: Callable[[], object]) -> None:
    for _ in range(WAIT_MS // 10):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen")


def trials_of(peer: Peer) -> GrammarTrials:
    """Return the trials of an engine, once it has had a form."""
    wait_until(lambda: peer.loop._trials is not None)
    assert peer.loop._trials is not None
    return peer.loop._trials


def running(trials: GrammarTrials) -> list[int]:
    """Return the ids of the processes that try grammars out, once there is one."""
    pids = list[int]()

    def are_there() -> bool:
        pids.extend(process.popen.pid for process in list(trials._running))
        return bool(pids)

    wait_until(are_there)
    return pids


def tokens(peer: Peer, number: int) -> list[int]:
    return [token for delta in peer.ended(number)[number] for token in delta.token_ids]


@pytest.mark.long
@pytest.mark.parametrize("form", [ENDLESS, LARGE], ids=["endless", "large"])
def test_one_form_without_end_keeps_nobody_waiting(llm: LLM, peer: Peer, form: StructuredOutputsParams) -> None:
    """Requests with and without forms are answered beside it. It can be aborted."""
    expected = llm.generate([[3, 4], [5]], [SMALL, SHORT], use_tqdm=False)
    begin = time.monotonic()
    peer.send(add(1, [3, 4], structured(form)), add(2, [3, 4], SMALL))
    assert tokens(peer, 2) == expected[0].token_ids
    peer.send(add(3, [5]))
    assert tokens(peer, 3) == expected[1].token_ids
    peer.send(call(7, CheckIntegrity()))
    assert peer.receive() == (7, Integrity(None, 1, 0))
    peer.cancel(1)
    assert peer.ended(1)[1][-1].finish_reason == "abort"
    assert time.monotonic() - begin < llm.config.structured_compile_timeout
    assert not peer.loop._compiling


@pytest.mark.long
def test_clients_have_turns(trials: GrammarTrials) -> None:
    """Forms without end of one client keep another one waiting once. Those that have not begun can be cancelled."""
    many = [trials.submit(endless(index), "many") for index in range(3 * NUM_THREADS)]
    trials.submit(small("few"), "few").result(WAIT_MS / 1000)
    assert sum(future.done() for future in many) <= NUM_THREADS
    cancelled = [future for future in many if future.cancel()]
    assert len(cancelled) >= NUM_THREADS
    for future in many:
        with pytest.raises((ParameterError, CancelledError)):
            future.result(WAIT_MS / 1000)
    assert trials.submit(small("then"), "many").result(WAIT_MS / 1000)


@pytest.mark.long
def test_a_trial_ends_at_the_timeout(trials: GrammarTrials) -> None:
    future = trials.submit(ENDLESS, "")
    pids = running(trials)
    with pytest.raises(ParameterError, match="was not compiled within structured_compile_timeout, 1 seconds"):
        future.result(WAIT_MS / 1000)
    assert not any(map(is_alive, pids))
    assert trials.submit(small("next"), "").result(WAIT_MS / 1000)


def test_the_engine_gives_signs_of_life_while_a_grammar_alone_is_waited_for(peer: Peer) -> None:
    peer.send(add(1, [3, 4], structured(ENDLESS)))
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
def test_limits_are_named(world: World) -> None:
    limits: dict[str, Any] = {"structured_compile_timeout": 1.0, "structured_max_bytes": 200_000}
    llm = LLM(world.folder / "target", **{**SETTINGS, **limits})
    peer = Peer(llm)
    late = "was not compiled within structured_compile_timeout, 1 seconds; make it smaller, or start the engine with"
    for number, form in enumerate((ENDLESS, LARGE)):
        assert refusal(peer, number, form).startswith(f"structured_outputs.grammar {late}")
    large = StructuredOutputsParams(choice=["a" * 150_000, "b" * 50_001])
    message = "structured_outputs.choice has 200001 bytes, more than structured_max_bytes, 200000; make it smaller"
    # Before anything is made of it.
    with pytest.raises(ValueError, match=message):
        llm.generate([3], structured(large), use_tqdm=False)
    peer.close()


@pytest.mark.long
def test_a_trial_without_memory_ends_alone(monkeypatch: pytest.MonkeyPatch, trials: GrammarTrials) -> None:
    script = "from specdec.async_engine import grammar_trial as trial; trial.MEMORY = 8 << 20; trial.main()"

    def start(_: str, number: str, **options: Any) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-c", script, number], stderr=subprocess.DEVNULL, **options)

    monkeypatch.setattr(trials, "_timeout", 60.0)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_trials, "start_module", start)
        reason = (
            r"structured_outputs.grammar cannot be compiled: .* for want of memory \(limit 1024 MiB\); make it smal"
        )
        with pytest.raises(ParameterError, match=reason):
            trials.submit(ENDLESS, "").result(60)
    assert trials.submit(small("next"), "").result(WAIT_MS / 1000)


def test_invalid_grammars_are_refused(peer: Peer) -> None:
    reason = refusal(peer, 1, StructuredOutputsParams(regex="(a"))
    assert reason.startswith("structured_outputs.regex cannot be followed")
    reason = refusal(peer, 2, StructuredOutputsParams(json={"type": "string", "minLength": 3, "maxLength": 2}))
    assert reason.startswith("structured_outputs.json cannot be followed")
    # What says so before the library does.
    parameters = {"type": "object", "properties": {"x": {"not": {}}}}
    choice = ToolChoice("required")
    calls = forced_calls(choice, [Function("f", parameters)], None, {}, is_single=False)
    assert refusal(peer, 3, calls).startswith("tools: the parameters of 'f' cannot be followed as an object: at")


@pytest.mark.long
def test_a_process_that_is_killed_is_replaced(peer: Peer) -> None:
    """Also one that waits for a form."""
    peer.send(add(1, [3, 4], structured(ENDLESS)))
    for pid in running(trials_of(peer)):
        os.kill(pid, signal.SIGKILL)
    _, refused = peer.receive()
    assert isinstance(refused, Refused)
    assert "its trial ended, by a fault or for want of memory" in refused.message
    peer.send(add(2, [3, 4], structured(small("again"))))
    assert peer.ended(2)[2][-1].finish_reason is not None
    for process in idle(peer):
        os.kill(process.popen.pid, signal.SIGKILL)
        assert process.popen.wait() == -signal.SIGKILL
    peer.send(add(3, [3, 4], structured(small("and again"))))
    assert peer.ended(3)[3][-1].finish_reason is not None


def idle(peer: Peer) -> list[grammar_trials._TrialProcess]:
    """Return the processes that wait for forms, once none works."""
    trials = trials_of(peer)
    wait_until(lambda: trials._idle and not trials._running)
    return list(trials._idle)


def test_compilations_go_on_after_sigterm(peer: Peer) -> None:
    """A service manager sends it to all processes of a service, whose requests may have time left."""
    peer.send(add(1, [3, 4], structured(small("before SIGTERM"))))
    peer.ended(1)
    processes = idle(peer)
    for process in processes:
        os.kill(process.popen.pid, signal.SIGTERM)
    peer.send(add(2, [3, 4], structured(small("after SIGTERM"))))
    assert peer.ended(2)[2][-1].finish_reason is not None
    assert set(idle(peer)) == set(processes)


@pytest.mark.long
def test_all_processes_end_with_the_loop(world: World) -> None:
    """At once: the engine process waits for the threads that wait for trials."""
    peer = Peer(LLM(world.folder / "target", **{**SETTINGS, "structured_compile_timeout": 3600.0}))
    for number, name in enumerate("ab"):
        peer.send(add(number, [3, 4], structured(small(name))))
        peer.ended(number)
    waiting = [process.popen.pid for process in idle(peer)]
    peer.send(*(add(number, [3, 4], structured(endless(number))) for number in range(2, 4)))
    trials = trials_of(peer)
    wait_until(lambda: len(trials._running) == NUM_THREADS)
    pids = {*waiting, *running(trials)}
    futures = [compiling.grammar for compiling in peer.loop._compiling.values()]
    peer.stop()
    peer.ended(2, 3)
    peer.close()
    for future in futures:
        with pytest.raises(ParameterError):
            future.result(WAIT_MS / 1000)
    wait_until(lambda: not any(map(is_alive, pids)))


ENGINE = f"""
from types import SimpleNamespace
from specdec import StructuredOutputsParams
from specdec.async_engine.grammar_trials import _TrialProcess
from specdec.models.grammar_tokens import GrammarTokens
tokens = GrammarTokens([bytes([byte]) for byte in range(256)] + [b"<end>"], [256], [256])
process = _TrialProcess(SimpleNamespace(token_texts=tokens))
assert process.answer(StructuredOutputsParams(regex="a"), {WAIT_MS / 1000})
print(process.popen.pid, flush=True)
process.answer(StructuredOutputsParams(grammar={ENDLESS.grammar!r}), {WAIT_MS / 1000})
"""


@pytest.mark.long
def test_a_trial_ends_with_an_engine_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        trial = int(engine.stdout.readline())
        # Until it works on the form.
        wait_until(lambda: processor_seconds(trial) > 2.0)
        engine.kill()
    wait_until(lambda: not is_alive(trial))


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")
