"""Speculation figures of one request, in vLLM's and SGLang's shapes."""

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from specdec.core.outputs import CompletionOutput, Step
from specdec.openai.answer_settings import MetricsChoice


class SpecDecodeMetrics(Struct):
    """vLLM's figures of the steps with drafts. A draft token is a node of a draft tree.

    Attributes:
        mean_acceptance_length: tokens per step, the bonus token included.
        acceptance_histogram: steps by their number of accepted draft tokens, from 0 to `num_spec_tokens`.
        num_spec_tokens: most draft tokens in a row that the server's head drafts, or more where chains of the text or
            of a prediction were longer.
        per_step_accepted, per_step_drafted: per step its accepted draft tokens, and all of them.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | UnsetType = UNSET
    per_step_drafted: list[int] | UnsetType = UNSET


class SpeculationMetrics(Struct):
    """vLLM's field `metrics`."""

    speculative_decoding: SpecDecodeMetrics


class SpecTokensDetails(Struct):
    """SGLang's figures of the steps with drafts.

    Attributes:
        spec_verify_ct: number of these steps.
        spec_accept_length: their mean number of tokens, the bonus token included.
    """

    spec_verify_ct: int
    spec_accept_length: float
    spec_accept_rate: float
    spec_num_correct_drafts: int
    spec_num_proposed_drafts: int
    spec_correct_drafts_histogram: list[int]

    @classmethod
    def of(cls, output: CompletionOutput) -> "SpecTokensDetails":
        """Return the figures of one choice; they are 0 where it had no draft."""
        steps = output.tree_steps
        nodes, accepted = _totals(steps)
        histogram = _histogram(steps, max((step.accepted for step in steps), default=0))
        length = 1 + accepted / len(steps) if steps else 0.0
        return cls(len(steps), length, accepted / nodes if nodes else 0.0, accepted, nodes, histogram)


class SglExt(Struct):
    """SGLang's field `sglext`."""

    spec_tokens_details: SpecTokensDetails


def request_metrics(
    choice: MetricsChoice, outputs: Sequence[CompletionOutput], depth: int
) -> SpeculationMetrics | UnsetType | None:
    """Return vLLM's field `metrics`.

    Args:
        choice: none leaves the field out; detailed adds lists with an entry per step.
        depth: most levels of the engine's trees.

    Returns:
        None where there are several choices, or no step had drafts.
    """
    if choice == "none":
        return UNSET
    if len(outputs) != 1 or not (steps := outputs[0].tree_steps):
        return None
    nodes, accepted = _totals(steps)
    depth = max(depth, *(step.accepted for step in steps))
    figures = SpecDecodeMetrics(
        mean_acceptance_length=1 + accepted / len(steps),
        draft_acceptance_rate=accepted / nodes,
        acceptance_histogram=_histogram(steps, depth),
        num_spec_steps=len(steps),
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=nodes,
        num_spec_tokens=depth,
    )
    if choice == "detailed":
        figures.per_step_accepted = [step.accepted for step in steps]
        figures.per_step_drafted = [step.nodes for step in steps]
    return SpeculationMetrics(figures)


def sglext(asked: bool | None, outputs: Sequence[CompletionOutput]) -> SglExt | UnsetType | None:
    """Return SGLang's field `sglext`: left out unless asked for, None where there are several choices."""
    if not asked:
        return UNSET
    return SglExt(SpecTokensDetails.of(outputs[0])) if len(outputs) == 1 else None


def meta_info(asked: bool | None, output: CompletionOutput) -> SpecTokensDetails | UnsetType:
    """Return SGLang's field `meta_info` of a choice that has ended: left out unless asked for."""
    return SpecTokensDetails.of(output) if asked and output.finish_reason is not None else UNSET


def _totals(steps: Sequence[Step]) -> tuple[int, int]:
    return sum(step.nodes for step in steps), sum(step.accepted for step in steps)


def _histogram(steps: Sequence[Step], most: int) -> list[int]:
    counts = [0] * (most + 1)
    for step in steps:
        counts[step.accepted] += 1
    return counts
