"""specdec: an inference engine for Llama-family models in which speculation is the normal case."""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.async_engine.async_llm import AsyncLLM
    from specdec.async_engine.errors import EngineDeadError
    from specdec.core.choices import ChoiceScore
    from specdec.core.engine_stats import EngineStats
    from specdec.core.errors import QueueFullError
    from specdec.core.lora_request import LoRARequest
    from specdec.core.metrics import Counter, Gauge, Metric, Vector
    from specdec.core.output_kind import RequestOutputKind
    from specdec.core.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
        SpeculationStats,
        Step,
        TreeTrace,
    )
    from specdec.core.sampling_params import BeamSearchParams, SamplingParams
    from specdec.core.speculation import Speculation
    from specdec.core.structured_outputs import StructuredOutputsParams
    from specdec.draft_heads.drafting.draft_shape import DraftShape
    from specdec.draft_heads.llama.checkpoint_files import CheckpointError
    from specdec.engine.prompts import TextPrompt, TokensPrompt
    from specdec.llm import LLM
    from specdec.text.segment import Segment

__version__ = "0.1.0"
# Quiet unless the program, or the command line, asks for logs.
logging.getLogger(__name__).addHandler(logging.NullHandler())
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CheckpointError",
    "ChoiceScore",
    "CompletionOutput",
    "Counter",
    "DraftShape",
    "EngineDeadError",
    "EngineStats",
    "Gauge",
    "LoRARequest",
    "Logprob",
    "Metric",
    "QueueFullError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "Segment",
    "Speculation",
    "SpeculationStats",
    "Step",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "TreeTrace",
    "Vector",
    "__version__",
]

_HOMES = {
    "LLM": "specdec.llm",
    "AsyncLLM": "specdec.async_engine.async_llm",
    "BeamSearchOutput": "specdec.core.outputs",
    "BeamSearchParams": "specdec.core.sampling_params",
    "BeamSearchSequence": "specdec.core.outputs",
    "CheckpointError": "specdec.draft_heads.llama.checkpoint_files",
    "ChoiceScore": "specdec.core.choices",
    "CompletionOutput": "specdec.core.outputs",
    "Counter": "specdec.core.metrics",
    "DraftShape": "specdec.draft_heads.drafting.draft_shape",
    "EngineDeadError": "specdec.async_engine.errors",
    "EngineStats": "specdec.core.engine_stats",
    "Gauge": "specdec.core.metrics",
    "LoRARequest": "specdec.core.lora_request",
    "Logprob": "specdec.core.outputs",
    "Metric": "specdec.core.metrics",
    "QueueFullError": "specdec.core.errors",
    "RequestMetrics": "specdec.core.outputs",
    "RequestOutput": "specdec.core.outputs",
    "RequestOutputKind": "specdec.core.output_kind",
    "SamplingParams": "specdec.core.sampling_params",
    "Segment": "specdec.text.segment",
    "Speculation": "specdec.core.speculation",
    "SpeculationStats": "specdec.core.outputs",
    "Step": "specdec.core.outputs",
    "StructuredOutputsParams": "specdec.core.structured_outputs",
    "TextPrompt": "specdec.engine.prompts",
    "TokensPrompt": "specdec.engine.prompts",
    "TreeTrace": "specdec.core.outputs",
    "Vector": "specdec.core.metrics",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that a kernel can be imported without transformers."""
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
