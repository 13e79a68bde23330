"""The answer of `/v1/completions`, whole or in parts."""

from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import UNSET

from specdec.core.outputs import CompletionOutput, RequestOutput
from specdec.core.sampling_params import SamplingParams
from specdec.core.step_report import StepReporter
from specdec.openai.completion_request import CompletionRequest
from specdec.openai.connection import DONE, error_event, event
from specdec.openai.logprob_replies import Entries, TokenPlaces, add_completion_logprobs, prompt_logprobs
from specdec.openai.replies import Completion, CompletionChoice, CompletionLogprobs, Usage, now
from specdec.openai.served_model import ServedModel
from specdec.openai.speculation_replies import meta_info


@dataclass
class _CompletionProgress:
    """Progress of a choice that is being sent.

    Attributes:
        steps: reports the steps that are not sent yet.
        tokens: generated tokens whose log-probabilities are sent.
        places: finds the texts of the tokens whose log-probabilities are sent.
        has_begun, has_ended: whether its first and its last part are sent.
    """

    steps: StepReporter
    places: TokenPlaces
    tokens: int = 0
    has_begun: bool = False
    has_ended: bool = False


class CompletionAnswer:
    """Makes the answer to a request of its states.

    Args:
        texts: the prompts as text, None for those given as token ids.
        prompts: their tokens.
    """

    error_event = staticmethod(error_event)

    def __init__(
        self,
        answer_id: str,
        served: ServedModel,
        body: CompletionRequest,
        texts: Sequence[str | None],
        prompts: Sequence[list[int]],
        params: SamplingParams,
    ) -> None:
        self._id, self._served, self._body = answer_id, served, body
        self._texts, self._prompts, self._params = texts, prompts, params
        self._created = now()
        reporters, skips = served.step_reporters(params), params.skip_special_tokens
        self._sent = [
            _CompletionProgress(next(reporters), TokenPlaces(served.tokenizer, () if body.echo else prompt, skips))
            for prompt in prompts
            for _ in range(params.n)
        ]

    def whole(self, states: Sequence[RequestOutput]) -> Completion:
        """Return the answer made of the prompts' last states."""
        choices = [
            self._choice(prompt, state, output, output.text)
            for prompt, state in enumerate(states)
            for output in state.outputs
        ]
        return self._with_figures(self._reply(choices, self._usage(states)), states)

    async def events(self, states: AsyncGenerator[tuple[int, RequestOutput]]) -> AsyncGenerator[bytes]:
        """Yield the answer in parts, as server-sent events."""
        body, latest = self._body, dict[int, RequestOutput]()
        async with aclosing(states) as news:
            async for prompt, state in news:
                latest[prompt] = state
                usage = self._usage(latest.values()) if body.continuous_usage else None
                if parts := list(self._parts(prompt, state)):
                    yield b"".join(event(self._reply([part], usage)) for part in parts)
        if body.include_usage:
            last = self._reply([], self._usage(latest.values()))
            yield event(self._with_figures(last, latest.values()))
        yield DONE

    def _reply(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        is_left_out = self._body.stream and not self._body.include_usage
        return Completion(
            id=self._id,
            created=self._created,
            model=self._served.answer_name(self._body.model),
            choices=choices,
            usage=UNSET if is_left_out else usage,
        )

    def _with_figures(self, reply: Completion, states: Collection[RequestOutput]) -> Completion:
        outputs = [output for state in states for output in state.outputs]
        reply.metrics, reply.sglext = self._served.speculation_figures(self._body, outputs)
        return reply

    def _usage(self, states: Collection[RequestOutput]) -> Usage:
        generated = sum(len(output.token_ids) for state in states for output in state.outputs)
        return Usage.of(sum(map(len, self._prompts)), 0 if self._body.only_echoes else generated, states)

    def _parts(self, prompt: int, state: RequestOutput) -> Iterator[CompletionChoice]:
        """Yield the choices of a prompt that have something new."""
        for output in state.outputs:
            if self._sent[prompt * self._params.n + output.index].has_ended:
                continue
            part = self._choice(prompt, state, output, "".join(segment.text for segment in output.segments))
            if part.text or part.logprobs is not None or part.finish_reason or part.token_ids or part.trace:
                yield part

    def _choice(self, prompt: int, state: RequestOutput, output: CompletionOutput, text: str) -> CompletionChoice:
        """Return what was not sent yet of a choice.

        Args:
            text: the output's new text.
        """
        body, number = self._body, prompt * self._params.n + output.index
        sent, begins = self._sent[number], not self._sent[number].has_begun
        logprobs, count = CompletionLogprobs(), body.logprobs or 0
        choice = CompletionChoice(number, text, None, output.finish_reason, output.stop_reason)
        if begins and body.echo:
            before = self._prompt_text(prompt)
            choice.text = before + text
            if body.logprobs is not None:
                tokens, scored = self._prompts[prompt], state.prompt_logprobs or []
                # An aborted request has not scored all of them.
                rows: Sequence[Entries | None] = [*scored, *[None] * (len(tokens) - len(scored))]
                add_completion_logprobs(logprobs, tokens, rows, count, sent.places)
                # Special tokens that the text holds as such are left out of the text of tokens.
                sent.places.offset = len(before)
        if begins and body.prompt_logprobs is not None and state.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(state.prompt_logprobs)
        if body.only_echoes:
            choice.text = self._prompt_text(prompt) if begins else ""
            choice.finish_reason, choice.stop_reason = output.finish_reason and "length", None
        elif output.logprobs is not None:
            tokens, rows = output.token_ids[sent.tokens :], output.logprobs[sent.tokens :]
            add_completion_logprobs(logprobs, tokens, rows, count, sent.places)
        choice.logprobs = logprobs if logprobs.tokens else None
        if body.return_token_ids:
            choice.token_ids = [] if body.only_echoes else output.token_ids[sent.tokens :]
            choice.prompt_token_ids = self._prompts[prompt] if begins else UNSET
        choice.meta_info = meta_info(body.return_meta_info, output)
        if body.trace:
            choice.trace = [] if body.only_echoes else sent.steps.new_steps(output)
        sent.tokens, sent.has_begun = len(output.token_ids), True
        sent.has_ended = output.finish_reason is not None
        return choice

    def _prompt_text(self, prompt: int) -> str:
        text = self._texts[prompt]
        return self._served.needed_tokenizer.text_before(self._prompts[prompt]) if text is None else text
