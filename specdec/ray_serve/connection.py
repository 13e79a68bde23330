"""The front end's connection to all replicas, through a deployment handle of Ray Serve."""

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from specdec.async_engine.connection import EngineConnection
from specdec.async_engine.errors import CLOSED, EngineDeadError
from specdec.async_engine.exchange import Exchange
from specdec.async_engine.messages import ReplyTo, decode_replies, decode_reply_to, encode_command
from specdec.cache.block_pool import extend_hashes
from specdec.core.commands import Add, AnyCommand, EngineReply, News, Refused
from specdec.ray_serve.remote_prefill import RemotePrefill
from specdec.ray_serve.replicas import Replicas, Route, reason_of

# Replicas that a request tries, as long as none of them has sent a token.
MOST_ATTEMPTS = 3

logger = logging.getLogger(__name__)


@dataclass
class _Run:
    """A pending request.

    Attributes:
        num_cached: tokens of its prompt that the prefill replica had cached; None where none computed it.
    """

    number: int
    name: str
    add: Add
    route: Route
    aborted: bool = False
    has_news: bool = False
    num_cached: int | None = None


class ReplicaConnection(EngineConnection):
    """All replicas as one engine. Ray Serve starts them again, and counts that.

    A request whose replica fails before the first token is sent to another one. After it, the request gets an error:
    its client has seen tokens, of which another replica knows nothing.

    Args:
        exchange: takes replies, and errors.
        block_size: tokens of a block, by which prefixes are known.
        prefill: computes prompts ahead of the replicas; None where each computes its own.

    Attributes:
        healthy: True from the end of `start` until `close`.
    """

    def __init__(
        self,
        replicas: Replicas,
        exchange: Exchange,
        block_size: int,
        prefill: RemotePrefill | None = None,
    ) -> None:
        self._replicas, self._exchange, self._block_size = replicas, exchange, block_size
        self._prefill = prefill
        # Several front ends call the same replicas.
        self._prefix = secrets.token_hex(8)
        self._runs: dict[int, _Run] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()
        self._closed = False
        self.healthy = False

    async def start(self) -> None:
        """Wait until a replica takes requests.

        Raises:
            ValueError: a setting or file that the replicas refuse.
            EngineDeadError: they do not start for another reason.
        """
        if self._closed:
            raise EngineDeadError(CLOSED)
        await self._replicas.start()
        self.healthy = True

    def send(self, number: int, command: AnyCommand) -> None:
        """Send a command without waiting: a request to one replica, others to all.

        Raises:
            EngineDeadError: not started, or closed.
        """
        if not self.healthy:
            raise EngineDeadError(CLOSED if self._closed else "the replicas are not started; await start()")
        if isinstance(command, Add):
            name = f"{self._prefix}-{number}"
            run = self._runs[number] = _Run(number, name, command, Route(self._hashes(command)))
            self._tasks[number] = asyncio.create_task(self._run(run))
        else:
            self._beside(self._ask(number, command))

    def cancel(self, number: int) -> None:
        """End a request, if it is pending."""
        if run := self._runs.get(number):
            self._beside(self._abort(run))

    def use_draft(self, draft: str | None) -> None:
        """Do nothing: `ReplicatedLLM` replaces no heads."""

    async def close(self) -> None:
        """Cancel all calls, and end what `start` started."""
        self._closed, self.healthy = True, False
        tasks = [*self._tasks.values(), *self._others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._replicas.close()

    def _hashes(self, add: Add) -> list[bytes]:
        hashes, salt = list[bytes](), add.cache_salt
        if add.adapter is not None:
            # Not the engine's own salt, which the adapter's files enter; it sets prefixes apart just as well.
            salt = f"{add.adapter} {salt}"
        # The last token is always computed.
        extend_hashes(hashes, add.prompt[:-1], self._block_size, salt)
        return hashes

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    async def _run(self, run: _Run) -> None:
        number = run.number
        try:
            if self._prefill is not None:
                run.num_cached = await self._prefill.run(run.name, run.add, run.route.blocks)
            for attempt in range(1, MOST_ATTEMPTS + 1):
                try:
                    await self._call(run)
                    # Nothing where the answer is complete.
                    self._exchange.fail(
                        number, EngineDeadError(f"replica {run.route.replica} ended the answer too early")
                    )
                    return
                except (Exception, asyncio.CancelledError) as error:
                    if (task := asyncio.current_task()) and task.cancelling():
                        raise
                    # Whatever Ray raises: the replica or its engine process died, could not be reached, or gave up.
                    reason = f"replica {run.route.replica} failed: {reason_of(error)}"
                    if run.has_news or run.aborted or attempt == MOST_ATTEMPTS:
                        self._exchange.fail(number, EngineDeadError(f"{reason}; try again", restarting=True))
                        return
                    logger.warning("%s; request %s is sent to another one", reason, run.name)
                    if run.route.replica is not None:
                        run.route.avoid.add(run.route.replica)
                    run.route.replica = None
        finally:
            run.route.done = True
            del self._runs[number], self._tasks[number]

    async def _call(self, run: _Run) -> None:
        async for data in self._replicas.generate(run.name, encode_command(run.add), run.route):
            run.has_news = True
            for reply in decode_replies(data):
                own = reply._replace(number=run.number)
                self._exchange.receive(own if run.num_cached is None else _with_cached(own, run.num_cached))

    async def _abort(self, run: _Run) -> None:
        run.aborted = True
        if run.route.replica is not None:
            try:
                await self._replicas.abort(run.name, Route(only=run.route.replica))
            except Exception as error:
                # It has failed, so its request ends as well.
                logger.warning("request %s could not be aborted: %s", run.name, reason_of(error))
            return
        # It waits for a replica that has room.
        if task := self._tasks.get(run.number):
            task.cancel()
        self._exchange.receive(ReplyTo.of(run.number, True, run.add.aborted()))

    async def _ask(self, number: int, command: AnyCommand) -> None:
        """Have all replicas carry out a command.

        A replica that starts later loads an adapter when a request asks for it. One that has loaded an adapter that
        another refuses keeps it until another adapter needs its place: no request names it.
        """
        encoded, replies, problem = encode_command(command), list[EngineReply](), None
        try:
            replies = [decode_reply_to(data).reply() for data in await self._replicas.ask(encoded)]
        except Exception as error:
            problem = reason_of(error)
            logger.warning("the replicas did not reply: %s", problem)
        reply = command.joined(replies, problem)
        if command.CHANGES_ENGINE and not isinstance(reply, Refused) and self._prefill is not None:
            await self._prefill.tell(encoded)
        self._exchange.receive(ReplyTo.of(number, True, reply))


def _with_cached(sent: ReplyTo, most: int) -> ReplyTo:
    """Return a reply that reports at most `most` cached tokens, without those computed for this request."""
    reply = sent.reply()
    if isinstance(reply, News):
        reply.deltas = [
            delta
            if delta.num_cached_tokens is None
            else delta._replace(num_cached_tokens=min(most, delta.num_cached_tokens))
            for delta in reply.deltas
        ]
    return ReplyTo.of(sent.number, sent.is_last, reply)
