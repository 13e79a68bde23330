"""specdec: an inference engine for Llama-family models in which speculation is the normal case."""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.async_engine.async_llm import AsyncLLM as AsyncLLM
    from specdec.async_engine.errors import EngineDeadError as EngineDeadError
    from specdec.core.choices import ChoiceScore as ChoiceScore
    from specdec.core.engine_stats import EngineStats as EngineStats
    from specdec.core.errors import QueueFullError as QueueFullError
    from specdec.core.lora_request import LoRARequest as LoRARequest
    from specdec.core.metrics import Counter as Counter
    from specdec.core.metrics import Gauge as Gauge
    from specdec.core.metrics import Metric as Metric
    from specdec.core.metrics import Vector as Vector
    from specdec.core.outputs import BeamSearchOutput as BeamSearchOutput
    from specdec.core.outputs import BeamSearchSequence as BeamSearchSequence
    from specdec.core.outputs import CompletionOutput as CompletionOutput
    from specdec.core.outputs import Logprob as Logprob
    from specdec.core.outputs import RequestMetrics as RequestMetrics
    from specdec.core.outputs import RequestOutput as RequestOutput
    from specdec.core.outputs import RequestOutputKind as RequestOutputKind
    from specdec.core.outputs import SpeculationStats as SpeculationStats
    from specdec.core.outputs import Step as Step
    from specdec.core.outputs import TreeTrace as TreeTrace
    from specdec.core.sampling_params import BeamSearchParams as BeamSearchParams
    from specdec.core.sampling_params import SamplingParams as SamplingParams
    from specdec.core.sampling_params import Speculation as Speculation
    from specdec.core.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from specdec.draft_heads.drafting.draft_shape import DraftShape as DraftShape
    from specdec.draft_heads.llama.checkpoint_files import CheckpointError as CheckpointError
    from specdec.engine.prompts import TextPrompt as TextPrompt
    from specdec.engine.prompts import TokensPrompt as TokensPrompt
    from specdec.kernels.types.settings import ParameterError as ParameterError
    from specdec.llm import LLM as LLM
    from specdec.text.segment import Segment as Segment

__version__ = "0.1.0"
# Quiet unless the program, or the command line, asks for logs.
logging.getLogger(__name__).addHandler(logging.NullHandler())
# The public names by their modules.
_MODULES = {
    "specdec.async_engine.async_llm": ["AsyncLLM"],
    "specdec.async_engine.errors": ["EngineDeadError"],
    "specdec.core.choices": ["ChoiceScore"],
    "specdec.core.engine_stats": ["EngineStats"],
    "specdec.core.errors": ["QueueFullError"],
    "specdec.core.lora_request": ["LoRARequest"],
    "specdec.core.metrics": ["Counter", "Gauge", "Metric", "Vector"],
    "specdec.core.outputs": [
        "BeamSearchOutput",
        "BeamSearchSequence",
        "CompletionOutput",
        "Logprob",
        "RequestMetrics",
        "RequestOutput",
        "RequestOutputKind",
        "SpeculationStats",
        "Step",
        "TreeTrace",
    ],
    "specdec.core.sampling_params": ["BeamSearchParams", "SamplingParams", "Speculation"],
    "specdec.core.structured_outputs": ["StructuredOutputsParams"],
    "specdec.draft_heads.drafting.draft_shape": ["DraftShape"],
    "specdec.draft_heads.llama.checkpoint_files": ["CheckpointError"],
    "specdec.engine.prompts": ["TextPrompt", "TokensPrompt"],
    "specdec.kernels.types.settings": ["ParameterError"],
    "specdec.llm": ["LLM"],
    "specdec.text.segment": ["Segment"],
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
if not TYPE_CHECKING:
    # Type checkers read no computed list. To them a name is public by `import ... as`.
    __all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that a kernel can be imported without transformers."""
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted((*_HOMES, "__version__"))
