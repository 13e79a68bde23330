"""The loop of the engine process: take messages, step, send news."""

import logging
import time
from collections import deque
from concurrent.futures import Future
from typing import NamedTuple

import msgspec
import zmq

from specdec.async_engine.grammar_trials import GrammarTrials
from specdec.async_engine.messages import (
    Call,
    Cancel,
    Heartbeat,
    Replies,
    ReplyTo,
    decode_command,
    decode_to_engine,
    encode,
)
from specdec.async_engine.outbox import Outbox
from specdec.core.commands import (
    Abort,
    Add,
    EngineReply,
    Integrity,
    News,
    Refused,
    Stop,
)
from specdec.core.request import Request
from specdec.engine.engine import LLMEngine
from specdec.kernels.types.settings import one_line
from specdec.parallel.ranks import RankDeadError
from specdec.scheduling.step_plan import StepPlan
from specdec.verify.grammar_state import Grammar

# Messages handled between two steps: a flood of requests must not keep the running ones waiting.
MOST_TAKEN = 256
# The same in seconds: a request may have lists of a thousand entries, for each of its prompts.
LONGEST_TAKING = 0.02
# Steps that fail one after another before the process gives up: a device may be lost for good.
MOST_FAILURES = 3
# Seconds without another message after which a heartbeat is sent, if anything waits.
HEARTBEAT = 0.25
# Time between two looks at grammars that are being compiled, while nothing else happens.
_COMPILING_MS = 2
# Time between two looks at the workers of an idle engine.
_IDLE_MS = 1000

logger = logging.getLogger(__name__)


class _Compiling(NamedTuple):
    """A request whose grammar is being compiled."""

    add: Add
    grammar: Future[Grammar]


class EngineLoop:
    """Serves the requests that arrive at a socket.

    It never waits for the front end: news that cannot be sent now are merged with later ones. Those of a step are sent
    while a GPU computes the next one, which would otherwise wait for that: of 64 requests 0.9 ms.

    Args:
        socket: a connected DEALER socket.
    """

    def __init__(self, engine: LLMEngine, socket: zmq.Socket[bytes]) -> None:
        self._engine, self._socket = engine, socket
        self._outboxes: dict[int, Outbox] = {}
        self._owners: dict[Request, Outbox] = {}
        # Requests with news, in the order of their first news.
        self._with_news: dict[Outbox, None] = {}
        # Encoded messages to be sent before any news.
        self._unsent: deque[bytes] = deque()
        self._num_failures = 0
        self._last_sent = time.monotonic()
        self._stopping = False
        # Whether answers wait for blocks on their way to other engines.
        self._is_holding = False
        # Requests whose grammars are compiled beside the steps.
        self._trials: GrammarTrials | None = None
        self._compiling: dict[int, _Compiling] = {}

    def run(self) -> None:
        """Serve until the front end sends `Stop` and has taken the last news.

        Raises:
            Exception: a failure after which the engine's state is not sound, or one failed step too many.
        """
        try:
            while not self._stopping or self._unsent or self._with_news:
                self._receive()
                self._add_compiled()
                if self._has_work:
                    self._step()
                if self._has_work or self._compiling:
                    self._beat()
                if not (self._engine.works_beside and self._engine.has_unfinished):
                    self._send()
        finally:
            if self._trials is not None:
                self._trials.close()

    @property
    def _has_work(self) -> bool:
        return self._engine.has_unfinished or self._is_holding

    def _receive(self) -> None:
        """Handle messages that have arrived; sleep until there is one if there is nothing else to do.

        Raises:
            RankDeadError: a worker is gone.
        """
        if not self._has_work:
            wanted = zmq.POLLIN | (zmq.POLLOUT if self._unsent or self._with_news else 0)
            while not self._socket.poll(_COMPILING_MS if self._compiling else _IDLE_MS, wanted):
                if self._compiling:
                    return
                # No step would notice that a worker is gone.
                self._engine.ranks.check()
        end = time.monotonic() + LONGEST_TAKING
        for _ in range(MOST_TAKEN):
            if not self._socket.poll(0, zmq.POLLIN) or time.monotonic() > end:
                return
            try:
                self._handle(self._socket.recv())
            except Exception:
                logger.exception("a message was ignored")

    def _handle(self, data: bytes) -> None:
        match decode_to_engine(data):
            case Call(number, command):
                self._carry_out(number, command)
            case Cancel(number):
                self._cancel(number)
            case other:
                raise TypeError(f"no message to an engine process: {other!r:.60}")

    def _carry_out(self, number: int, encoded: msgspec.Raw) -> None:
        try:
            command = decode_command(encoded)
            match command:
                case Add():
                    if not self._compile(number, command):
                        self._add(number, command)
                case Stop():
                    self._stop(command)
                case _:
                    reply = self._engine.handle(command)
                    if isinstance(reply, Integrity):
                        # In use are also those whose end is not sent, and those whose grammars are being compiled.
                        reply.requests = len(self._outboxes) + len(self._compiling)
                    self._reply(number, reply)
        except Exception as error:
            self._refuse(number, error)

    def _reply(self, number: int, reply: EngineReply) -> None:
        self._unsent.append(encode(Replies([ReplyTo.of(number, True, reply)])))

    def _refuse(self, number: int, error: Exception) -> None:
        refused = Refused.of(error)
        if refused.kind == "failed":
            logger.error("a command failed", exc_info=error)
        self._reply(number, refused)

    def _compile(self, number: int, add: Add) -> bool:
        """Have the grammar of a request compiled; return False if it has none, or one that is known."""
        requests, form = self._engine.requests, add.params.structured_outputs
        if form is None or requests.grammars.known(form) is not None:
            return False
        if self._trials is None:
            self._trials = GrammarTrials(requests.grammars, requests.config.structured_compile_timeout)
        self._compiling[number] = _Compiling(add, self._trials.submit(form, add.client))
        return True

    def _add_compiled(self) -> None:
        """Queue the requests whose grammars have been compiled."""
        for number, (add, grammar) in list(self._compiling.items()):
            if grammar.done():
                del self._compiling[number]
                try:
                    # The future holds the grammar until the requests have it.
                    grammar.result()
                    self._add(number, add)
                except Exception as error:
                    self._refuse(number, error)

    def _add(self, number: int, add: Add) -> None:
        group = self._engine.handle(add)
        outbox = self._outboxes[number] = Outbox(number, group, add.interval)
        self._owners |= dict.fromkeys(group.requests, outbox)

    def _cancel(self, number: int) -> None:
        """End a request; its last news are sent."""
        if compiling := self._compiling.pop(number, None):
            compiling.grammar.cancel()
            self._reply(number, compiling.add.aborted())
        elif outbox := self._outboxes.get(number):
            running = [request for request in outbox.group.requests if not request.finished]
            self._engine.handle(Abort(outbox.group.request_id))
            self._note(running)

    def _stop(self, command: Stop) -> None:
        self._stopping = True
        for number in [*self._outboxes, *self._compiling]:
            self._cancel(number)
        self._engine.handle(command)

    def _step(self) -> None:
        plan = self._engine.plan()
        if not plan.rows:
            self._send()
            self._engine.wait_for_kv()
            return
        try:
            updated = self._engine.run(plan, self._send if self._engine.works_beside else None)
        except Exception as error:
            self._fail(plan, error)
        else:
            self._num_failures = 0
            self._note(updated)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """End the requests of a step that raised. The others go on, but for those that the step has lost.

        The step published none of its blocks, and those of its requests are released with them.

        Raises:
            Exception: `error`, where a rank is gone, or steps fail again and again.
        """
        self._num_failures += 1
        if isinstance(error, RankDeadError) or self._num_failures >= MOST_FAILURES:
            raise error
        logger.error("a step of %d requests failed", len(plan.rows), exc_info=error)
        for row in plan.rows:
            self._engine.scheduler.fail(row.request, f"the step failed: {one_line(error)}")
        self._note([*(row.request for row in plan.rows), *plan.lost])

    def _beat(self) -> None:
        """Show that this process works, unless other messages do."""
        if not self._unsent and time.monotonic() - self._last_sent >= HEARTBEAT:
            self._unsent.append(encode(Heartbeat()))

    def _note(self, requests: list[Request]) -> None:
        for request in requests:
            # The samples of a refused request have no owner.
            if outbox := self._owners.get(request):
                outbox.mark(request)
                self._with_news[outbox] = None

    def _send(self) -> None:
        """Send what the socket takes now."""
        while self._unsent or (news := self._take_news()):
            if not self._unsent:
                self._unsent.append(encode(Replies(news)))
            try:
                self._socket.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unsent.popleft()
            self._last_sent = time.monotonic()

    def _is_held(self, outbox: Outbox) -> bool:
        """Return whether the end of an answer waits until other engines can go on with its prompt."""
        return (
            outbox.group.finished
            and not self._stopping
            and any(self._engine.is_sending(request) for request in outbox.group.requests)
        )

    def _take_news(self) -> list[ReplyTo]:
        """Return the news that are due, and forget requests that have ended."""
        now = time.monotonic()
        due = [outbox for outbox in self._with_news if outbox.is_due(now)]
        held = [outbox for outbox in due if self._is_held(outbox)]
        self._is_holding = bool(held)
        if held:
            due = [outbox for outbox in due if outbox not in held]
        news: list[ReplyTo] = []
        for outbox in due:
            del self._with_news[outbox]
            reply, is_last = News(outbox.take(now)), outbox.group.finished
            news.append(ReplyTo.of(outbox.number, is_last, reply))
            if is_last:
                del self._outboxes[outbox.number]
                for request in outbox.group.requests:
                    del self._owners[request]
        return news
