"""The loop of the engine process: take messages, step, send news."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import zmq

from specdec.async_engine.compile_lanes import Compilation, CompileLanes
from specdec.async_engine.messages import (
    Abort,
    AdapterChanged,
    Add,
    CheckIntegrity,
    Delta,
    DraftUpdated,
    GetStats,
    Heartbeat,
    Integrity,
    LoadAdapter,
    News,
    Refused,
    Stats,
    Stop,
    UnloadAdapter,
    UpdateDraft,
    decode_params,
    decode_to_engine,
    encode,
    one_line,
)
from specdec.async_engine.outbox import Outbox
from specdec.core.lora_request import LoRARequest
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.execution.executor import ExecutorDeadError
from specdec.llm import LLM
from specdec.scheduling.integrity import check_scheduler
from specdec.scheduling.scheduler import QueueFullError
from specdec.scheduling.step_plan import StepPlan

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

    message: Add
    params: SamplingParams
    compilation: Compilation[Outbox]


class EngineLoop:
    """Serves the requests that arrive at a socket.

    It never waits for the front end: news that cannot be sent now are merged with later ones.

    Args:
        socket: a connected DEALER socket.
    """

    def __init__(self, llm: LLM, socket: zmq.Socket[bytes]) -> None:
        self._llm, self._engine, self._socket = llm, llm.engine, socket
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
        self._lanes: CompileLanes | None = None
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
                self._send()
        finally:
            if self._lanes is not None:
                self._lanes.close()

    @property
    def _has_work(self) -> bool:
        return self._engine.has_unfinished or self._is_holding

    def _receive(self) -> None:
        """Handle messages that have arrived; sleep until there is one if there is nothing else to do.

        Raises:
            ExecutorDeadError: a worker is gone.
        """
        if not self._has_work:
            wanted = zmq.POLLIN | (zmq.POLLOUT if self._unsent or self._with_news else 0)
            while not self._socket.poll(_COMPILING_MS if self._compiling else _IDLE_MS, wanted):
                if self._compiling:
                    return
                # No step would notice that a worker is gone.
                self._engine.executor.check_health()
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
            case Add() as request:
                self._add(request)
            case Abort(number):
                self._abort(number)
            case GetStats(call_id):
                self._unsent.append(encode(Stats(call_id, self._engine.scheduler.stats())))
            case CheckIntegrity(call_id):
                self._unsent.append(encode(self._integrity(call_id)))
            case UpdateDraft(call_id, folder):
                self._unsent.append(encode(self._update_draft(call_id, folder)))
            case LoadAdapter(call_id, adapter):
                self._unsent.append(encode(self._load_adapter(call_id, adapter)))
            case UnloadAdapter(call_id, lora_int_id):
                was_loaded = self._llm.remove_lora(lora_int_id)
                self._unsent.append(encode(AdapterChanged(call_id, was_loaded=was_loaded)))
            case Stop():
                self._stopping = True
                for number in [*self._outboxes, *self._compiling]:
                    self._abort(number)

    def _add(self, message: Add) -> None:
        try:
            params = decode_params(message.params)
        except Exception as error:
            self._refuse(message.number, error)
            return
        work = partial(self._make, message, params)
        if params.structured_outputs is not None:
            # Adapters are loaded by this thread, between steps.
            if message.adapter is not None and (answer := self._load_adapter(0, message.adapter)).problem is not None:
                self._unsent.append(encode(Refused(message.number, answer.problem, answer.queue_full)))
                return
            if self._compile(message, params, work):
                return
        self._queue(message.number, work)

    def _make(self, message: Add, params: SamplingParams) -> Outbox:
        group = self._llm.new_group(
            message.prompt,
            params,
            priority=message.priority,
            cache_salt=message.cache_salt,
            lora_request=message.adapter,
        )
        for request in group.requests:
            request.client = message.client
        if message.trace:
            group.start_trace()
        return Outbox(message.number, group, message.interval)

    def _compile(self, message: Add, params: SamplingParams, work: Callable[[], Outbox]) -> bool:
        """Have the grammar of a request compiled; return False if it is known, or if the request is refused anyway."""
        requests, form = self._llm.request_maker, params.structured_outputs
        assert form is not None
        try:
            requests.check_form(form)
        except ValueError:
            return False
        compiler = requests.grammars
        if compiler.known(form) is not None:
            return False
        if self._lanes is None:
            self._lanes = CompileLanes(compiler, requests.config.structured_compile_timeout)
        self._compiling[message.number] = _Compiling(message, params, self._lanes.submit(form, work, message.client))
        return True

    def _add_compiled(self) -> None:
        """Queue the requests whose grammars have been compiled."""
        for number, each in list(self._compiling.items()):
            if each.compilation.future.done():
                del self._compiling[number]
                self._queue(number, each.compilation.future.result)

    def _queue(self, number: int, make: Callable[[], Outbox]) -> None:
        """Queue the requests that `make` returns, or refuse them."""
        queued: list[Request] = []
        try:
            outbox = make()
            for request in outbox.group.requests:
                self._engine.add_request(request)
                queued.append(request)
        except Exception as error:
            for request in queued:
                self._engine.abort(request)
            self._refuse(number, error)
            return
        self._outboxes[number] = outbox
        self._owners |= dict.fromkeys(outbox.group.requests, outbox)

    def _refuse(self, number: int, error: Exception) -> None:
        self._unsent.append(encode(Refused(number, one_line(error), isinstance(error, QueueFullError))))

    def _abort(self, number: int) -> None:
        """End the samples of a request that are not finished; its last deltas are sent."""
        if compiling := self._compiling.pop(number, None):
            compiling.compilation.cancel()
            # Its state is sent as that of any other request; it ends before a step.
            params = replace(compiling.params, structured_outputs=None)
            self._queue(number, partial(self._make, compiling.message, params))
        outbox = self._outboxes.get(number)
        if outbox is not None:
            running = [request for request in outbox.group.requests if not request.finished]
            for request in running:
                self._engine.abort(request)
            self._note(running)

    def _integrity(self, call_id: int) -> Integrity:
        scheduler = self._engine.scheduler
        problem = None
        try:
            check_scheduler(scheduler)
        except AssertionError as error:
            problem = one_line(error)
        pools = (scheduler.manager.pool, scheduler.manager.host)
        return Integrity(
            call_id,
            problem,
            len(self._outboxes) + len(self._compiling),
            sum(pool.num_blocks - pool.num_free for pool in pools),
        )

    def _update_draft(self, call_id: int, folder: str) -> DraftUpdated:
        try:
            self._llm.update_draft(folder)
        except ValueError as error:
            return DraftUpdated(call_id, one_line(error))
        except Exception as error:
            logger.exception("the draft head could not be replaced")
            return DraftUpdated(call_id, f"{type(error).__name__}: {one_line(error)}")
        return DraftUpdated(call_id, None)

    def _load_adapter(self, call_id: int, adapter: LoRARequest) -> AdapterChanged:
        try:
            self._llm.add_lora(adapter)
        except Exception as error:
            return AdapterChanged(call_id, one_line(error), isinstance(error, QueueFullError))
        return AdapterChanged(call_id)

    def _step(self) -> None:
        plan = self._engine.scheduler.schedule()
        if not plan.rows:
            self._engine.wait_for_kv()
            return
        try:
            updated = self._engine.run(plan)
        except Exception as error:
            self._fail(plan, error)
        else:
            self._num_failures = 0
            self._note(updated)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """End the requests of a step that raised. The others go on.

        The step published none of its blocks, and those of its requests are released with them.

        Raises:
            Exception: `error`, where a rank is gone, other requests' blocks may be lost, or steps fail again and again.
        """
        self._num_failures += 1
        if isinstance(error, ExecutorDeadError) or plan.moves or self._num_failures >= MOST_FAILURES:
            raise error
        logger.error("a step of %d requests failed", len(plan.rows), exc_info=error)
        for row in plan.rows:
            self._engine.scheduler.fail(row.request, f"the step failed: {one_line(error)}")
        self._note([row.request for row in plan.rows])

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
        while self._unsent or (deltas := self._take_news()):
            if not self._unsent:
                self._unsent.append(encode(News(deltas)))
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

    def _take_news(self) -> list[Delta]:
        """Return the news that are due, and forget requests that have ended."""
        now = time.monotonic()
        due = [outbox for outbox in self._with_news if outbox.is_due(now)]
        held = [outbox for outbox in due if self._is_held(outbox)]
        self._is_holding = bool(held)
        if held:
            due = [outbox for outbox in due if outbox not in held]
        deltas: list[Delta] = []
        for outbox in due:
            del self._with_news[outbox]
            deltas += outbox.take(now)
            if outbox.group.finished:
                del self._outboxes[outbox.number]
                for request in outbox.group.requests:
                    del self._owners[request]
        return deltas
