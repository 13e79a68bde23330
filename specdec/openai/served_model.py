"""The model as answers show it: its names, its texts, its form of tool calls, and figures of its drafts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec import UnsetType

from specdec.core.outputs import CompletionOutput
from specdec.core.sampling_params import SamplingParams
from specdec.core.step_report import StepReporter
from specdec.models.tokenizer import Tokenizer
from specdec.openai.answer_settings import MetricsChoice
from specdec.openai.errors import ApiError
from specdec.openai.reasoning_text import ServedReasoning, ThinkingText
from specdec.openai.sampling_fields import SamplingFields
from specdec.openai.speculation_replies import SglExt, SpeculationMetrics, request_metrics, sglext
from specdec.openai.tool_fields import ToolFields
from specdec.text.stop_strings import StopStrings
from specdec.tool_calls.tagged_calls import ToolParser
from specdec.tool_calls.tool_parsers import parser_of_answer


@dataclass(frozen=True)
class ServedModel:
    """Facts of the served model that answers need beside their requests.

    Attributes:
        names: the model's names; answers carry the first, or the name of the request's adapter.
        tokenizer: None for a model without one.
        tool_parser: makes the parser of an answer that may hold tool calls.
        reasoning: how it thinks; None for a model that does not.
        metrics: what the field `metrics` of an answer holds.
        depth: most levels of the engine's trees.
    """

    names: Sequence[str]
    tokenizer: Tokenizer | None
    tool_parser: type[ToolParser]
    reasoning: ServedReasoning | None
    metrics: MetricsChoice
    depth: int

    @property
    def needed_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ApiError: it has none.
        """
        if self.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer; give prompts as token ids", param="prompt")
        return self.tokenizer

    def answer_name(self, model: str | None) -> str:
        """Return the name that answers to a request for a model carry."""
        return self.names[0] if model is None or model in self.names else model

    def answer_parser(self, body: ToolFields, params: SamplingParams) -> ToolParser:
        """Return what separates the thinking and the calls of an answer from its text."""
        parser = parser_of_answer(self.tool_parser, body.calls, body.offered, is_single=body.is_single_call)
        if self.reasoning is None or params.reasoning_ended is not False:
            return parser
        return ThinkingText(self.reasoning.parser, parser, ends_at_calls=params.structured_outputs is None)

    def num_thinking(self, params: SamplingParams, outputs: Sequence[CompletionOutput]) -> int:
        """Return the number of tokens of thinking in outputs."""
        if self.reasoning is None or params.reasoning_ended is not False:
            return 0
        has_form = params.structured_outputs is not None
        return sum(self.reasoning.marks.num_thinking(output.token_ids, has_form) for output in outputs)

    def answer_place(self, params: SamplingParams, output: CompletionOutput) -> int:
        """Return the place of the first token behind an output's thinking."""
        if self.reasoning is None or params.reasoning_ended is not False:
            return 0
        return self.reasoning.marks.answer_place(output.token_ids, params.structured_outputs is not None)

    def step_reporters(self, params: SamplingParams) -> Iterator[StepReporter]:
        """Yield what reports the steps of each output of a request."""
        backend, stops = self.tokenizer.backend if self.tokenizer else None, StopStrings(params.stop_strings)
        while True:
            yield StepReporter(backend, params, stops)

    def speculation_figures(
        self, body: SamplingFields, outputs: Sequence[CompletionOutput]
    ) -> tuple[SpeculationMetrics | UnsetType | None, SglExt | UnsetType | None]:
        """Return the fields `metrics` and `sglext` of an answer made of these outputs."""
        return request_metrics(self.metrics, outputs, self.depth), sglext(body.return_spec_tokens_details, outputs)
