"""A backend without a model: it answers with counts of what precedes, and notes what runs at once."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from specdec.core.choices import ChoiceScore
from specdec.programs.backend import Generated, LoopThread
from specdec.programs.expressions import Gen
from specdec.programs.transcript import Transcript


class EchoBackend:
    """Answers with the number of characters before the answer; `fail` in the text makes it fail.

    Args:
        groups: of the first requests, how many have to run at once before any of them is answered; of later ones, one.

    Attributes:
        asked: transcripts in the order in which they came.
        aborted: requests that were cancelled.
    """

    def __init__(self, *groups: int) -> None:
        self.loop = LoopThread("echo")
        self.asked: list[Transcript] = []
        self.params: list[Any] = []
        self.aborted = 0
        self._groups = list(groups)
        self._waiting: list[asyncio.Event] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.close()

    async def generate(
        self, transcript: Transcript, asked: Gen, defaults: Mapping[str, Any], on_text: Callable[[str], None]
    ) -> Generated:
        self.asked.append(transcript)
        self.params.append(asked.params(defaults))
        try:
            await self._all_here()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        if transcript.text.endswith("fail"):
            raise RuntimeError("the model is tired")
        for part in ("<", f"{len(transcript.shown())}", ">"):
            on_text(part)
            await asyncio.sleep(0)
        return Generated(f"<{len(transcript.shown())}>", "stop", 3)

    async def _all_here(self) -> None:
        self._waiting.append(asyncio.Event())
        own = self._waiting[-1]
        if len(self._waiting) == (self._groups or [1])[0]:
            for event in self._waiting:
                event.set()
            self._waiting, self._groups = [], self._groups[1:]
        await own.wait()

    async def score(self, transcript: Transcript, choices: Sequence[str]) -> list[ChoiceScore]:
        """Prefer what occurs in the text, each character a token."""
        self.asked.append(transcript)
        return [
            ChoiceScore([ord(letter) for letter in one], [-float(letter not in transcript.text) for letter in one])
            for one in choices
        ]
