"""A conversation with a model, answer by answer."""

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING

from specdec.cli.timed_batch import TimedAnswer, TimedBatch, run_batch
from specdec.core.outputs import RequestOutput
from specdec.core.sampling_params import SamplingParams
from specdec.openai.reasoning_text import ServedReasoning, ThinkingText
from specdec.tool_calls.tagged_calls import Thought
from specdec.tool_calls.tool_parsers import PlainText

if TYPE_CHECKING:
    from specdec.llm import LLM


class Conversation:
    """A conversation through the model's chat template.

    Each prompt is the whole conversation. All of it but the end is in the engine's prefix cache.

    Attributes:
        params: sampling parameters of the next answer.
        system: the system message, empty for none.
        messages: what user and assistant have said.
        answers: all answers, those before a reset included.
        thinking: sets the running answer's thinking apart; None where it does not think.

    Raises:
        ValueError: the model has no chat template.
    """

    def __init__(self, llm: "LLM", params: SamplingParams, system: str = "") -> None:
        if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
            raise ValueError(
                f"{llm.config.model}: no tokenizer with a chat template; use specdec generate --raw, which needs none"
            )
        self.llm, self.params, self.system = llm, params, system
        self.messages: list[dict[str, str]] = []
        self.answers: list[TimedAnswer] = []
        self.thinking: ThinkingText | None = None
        self._reasoning = ServedReasoning.of(llm.config.reasoning_parser, llm.request_maker.thinking)

    def answer(self, text: str, listen: Callable[[RequestOutput], None]) -> TimedBatch:
        """Answer a message; an answer that Ctrl-C ends is kept as far as it got.

        Args:
            listen: is called with every state of the answer.

        Raises:
            ValueError: the template refuses the conversation, it is too long, or the answer failed. The message is
                not kept then.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt, params = self._prompt(messages), copy(self.params)
        if self._reasoning is not None and self.llm.tokenizer is not None:
            self._reasoning.begin(params, self.llm.tokenizer, prompt, {})
            self.thinking = None if params.reasoning_ended else self._parser()
        batch = run_batch(self.llm, [prompt], [params], "answering", lambda _, state: listen(state), trace=True)
        (answer,) = batch.answers
        self.answers.append(answer)
        if answer.output.error is not None:
            raise ValueError(answer.output.error)
        if answer.output.token_ids:
            self.messages = [*messages, self._message(answer.output.text)]
        return batch

    def _parser(self) -> ThinkingText:
        assert self._reasoning is not None
        return ThinkingText(self._reasoning.parser, PlainText(), ends_at_calls=self.params.structured_outputs is None)

    def _message(self, text: str) -> dict[str, str]:
        """Return an answer as a message. Its thinking stands apart, for the template to keep or drop."""
        if self.thinking is None:
            return {"role": "assistant", "content": text}
        parser = self._parser()
        items = [*parser.push(text), *parser.finish()]
        thought = "".join(item.text for item in items if isinstance(item, Thought))
        content = "".join(item for item in items if isinstance(item, str))
        return {"role": "assistant", "content": content, "reasoning_content": thought}

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.messages = []

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the conversation so far, as the next prompt begins."""
        return len(self._prompt(self.messages)) if self.messages else 0

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.llm.chat_prompt([*system, *messages])
