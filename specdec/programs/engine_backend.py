"""An engine as the backend of programs. Needs the extra `serve`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self, Unpack

from specdec.async_engine.async_llm import AsyncLLM
from specdec.building.vllm_keywords import LLMKeywords
from specdec.config import AUTO
from specdec.core.choices import ChoiceScore
from specdec.core.engine_stats import EngineStats
from specdec.core.outputs import RequestOutput
from specdec.core.sampling_params import SamplingParams
from specdec.engine.prompts import PlainPrompt
from specdec.programs.backend import Generated, LoopThread
from specdec.programs.expressions import DEFAULT_MAX_TOKENS, Gen
from specdec.programs.transcript import Transcript


class Engine:
    """A target model with a draft head, as `AsyncLLM`, which runs programs.

    with Engine(draft="eagle") as engine:
        state = program.run("a question", backend=engine)

    Args:
        model, draft, settings: as `LLM` takes them.

    Attributes:
        llm: the engine. Its calls belong to the event loop of this backend.

    Raises:
        CheckpointError: a checkpoint that cannot be read.
        ValueError: an unknown setting, or one outside its range.
    """

    def __init__(
        self, model: str | Path | None = None, draft: str | Path | None = AUTO, **settings: Unpack[LLMKeywords]
    ) -> None:
        self.llm = AsyncLLM(model, draft, **settings)
        self.loop = LoopThread("specdec-programs")
        try:
            self.loop.run(self.llm.start())
        except BaseException:
            self.loop.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine. What still runs fails."""
        if self.loop.is_running:
            self.loop.run(self.llm.close())
            self.loop.close()

    def stats(self) -> EngineStats:
        """Return counts since the start, and the current state."""
        return self.loop.run(self.llm.stats())

    async def generate(
        self, transcript: Transcript, asked: Gen, defaults: Mapping[str, Any], on_text: Callable[[str], None]
    ) -> Generated:
        """See `Backend.generate`."""
        params = asked.params({"max_tokens": DEFAULT_MAX_TOKENS, **defaults})
        state = await self._run(self._prompt(transcript), params, on_text)
        return Generated(
            state.text, state.finish_reason, len(state.token_ids), len(state.prompt_token_ids), state.num_cached_tokens
        )

    async def score(self, transcript: Transcript, choices: Sequence[str]) -> list[ChoiceScore]:
        """See `Backend.score`."""
        params = SamplingParams(choices=choices)
        given: PlainPrompt = transcript.text
        if transcript.is_conversation:
            arguments = _template_arguments(transcript)
            given, params = self.llm.texts.chat_choices(transcript.conversation(), params, arguments)
        state = await self._run(given, params, lambda _: None)
        assert state.choices is not None
        return state.choices

    def _prompt(self, transcript: Transcript) -> PlainPrompt:
        if not transcript.is_conversation:
            return transcript.text
        return self.llm.chat_prompt(transcript.conversation(), **_template_arguments(transcript))

    async def _run(self, prompt: PlainPrompt, params: SamplingParams, on_text: Callable[[str], None]) -> RequestOutput:
        """Return the last state of a request.

        Raises:
            RuntimeError: the request failed or was aborted.
        """
        async with aclosing(self.llm.generate(prompt, params)) as states:
            async for state in states:
                on_text("".join(segment.text for segment in state.segments))
        if state.finish_reason in ("error", "abort"):
            raise RuntimeError(state.outputs[0].error or "the request was aborted")
        return state


def _template_arguments(transcript: Transcript) -> dict[str, bool]:
    """Return arguments of the chat template: an open message goes on, or else the assistant's begins."""
    goes_on = bool(transcript.text)
    return {"add_generation_prompt": not goes_on, **({"continue_final_message": True} if goes_on else {})}
