"""The first half of a request where prefill and decoding are split: its prompt goes to a prefill replica."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from specdec.async_engine.messages import decode_replies, encode_command
from specdec.core.commands import Add, News, Refused
from specdec.core.sampling_params import SamplingParams
from specdec.ray_serve.replicas import Replicas, Route, reason_of

# Seconds that a request waits for its prompt.
PATIENCE = 5.0
# Seconds for which no replica is asked once none was there to take a call.
PAUSE = 5.0

logger = logging.getLogger(__name__)


class RemotePrefill:
    """Computation of prompts by replicas of role `prefill`, whose blocks the decode replicas find in a store.

    The client sees nothing of it. Whatever a prefill replica does not compute in time, the decode replica computes.

    Args:
        replicas: calls of the prefill replicas, which others start and end.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        # Set once no replica was there, 0 again once there is one.
        self._paused_until = 0.0

    async def run(self, name: str, add: Add, blocks: Sequence[bytes]) -> int | None:
        """Compute a request's prompt; return how many of its tokens the prefill replica had cached.

        None if it was not computed there: it has no whole block, its log-probabilities are asked for, or no replica has
        computed it in time.

        Args:
            name: the request's name.
            blocks: chained hashes of the prompt's full blocks.
        """
        now = time.monotonic()
        if not blocks or now < self._paused_until or _scores_prompt(add):
            return None
        if self._paused_until:
            # One request finds out whether there is one now; the others do not wait with it.
            self._paused_until = now + PATIENCE
        route = Route(blocks)
        try:
            async with asyncio.timeout(PATIENCE):
                num_cached = await self._call(f"{name}-prefill", add, route)
            self._paused_until = 0.0
            return num_cached
        except (Exception, asyncio.CancelledError) as error:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            self._paused_until = time.monotonic() + PAUSE if route.replica is None else 0.0
            reason = f"not done within {PATIENCE:g} s" if isinstance(error, TimeoutError) else reason_of(error)
            place = "no prefill replica" if route.replica is None else f"prefill replica {route.replica}"
            logger.warning("%s: %s; its decode replica computes the prompt of request %s", place, reason, name)
            return None
        finally:
            route.done = True

    async def tell(self, command: bytes) -> None:
        """Have all load or unload an adapter, by an encoded command, as far as they can in time.

        One that could not loads it with the first prompt that needs it, and gives up one that is not used any more when
        another needs its place.
        """
        try:
            async with asyncio.timeout(PATIENCE):
                await self._replicas.ask(command)
        except Exception as error:
            logger.warning("not all prefill replicas were told of an adapter: %s", reason_of(error))

    async def _call(self, name: str, add: Add, route: Route) -> int | None:
        # None of the request's own parameters has a part in the blocks.
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        request = replace(add, params=params, interval=0.0, trace=False)
        num_cached = None
        parts = cast("AsyncGenerator[bytes]", self._replicas.generate(name, encode_command(request), route))
        async with aclosing(parts):
            async for data in parts:
                for reply in decode_replies(data):
                    match reply.reply():
                        case News(deltas):
                            found = [delta.num_cached_tokens for delta in deltas if delta.num_cached_tokens is not None]
                            num_cached = found[0] if found else num_cached
                        case Refused() as refused:
                            raise refused.error()
                        case other:
                            raise TypeError(f"no reply to a request: {other!r:.60}")
        return num_cached


def _scores_prompt(add: Add) -> bool:
    return add.params.prompt_logprobs is not None
