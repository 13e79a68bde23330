"""Programs in the manner of SGLang's: Python functions that generate, select, branch and take roles."""

from typing import TYPE_CHECKING, Any

from specdec.programs.backend import Generated, Selected
from specdec.programs.choice_methods import greedy_token_selection, token_length_normalized, total_logprob
from specdec.programs.endpoint import Endpoint, EndpointError
from specdec.programs.expressions import Expression, assistant, gen, role, select, system, user
from specdec.programs.program import Program, function
from specdec.programs.state import ProgramState, ProgramStateGroup

if TYPE_CHECKING:
    from specdec.programs.engine_backend import Engine

__all__ = [
    "Endpoint",
    "EndpointError",
    "Engine",
    "Expression",
    "Generated",
    "Program",
    "ProgramState",
    "ProgramStateGroup",
    "Selected",
    "assistant",
    "function",
    "gen",
    "greedy_token_selection",
    "role",
    "select",
    "system",
    "token_length_normalized",
    "total_logprob",
    "user",
]


def __getattr__(name: str) -> Any:
    """Load the engine on first use, so that programs over an endpoint start without torch."""
    if name != "Engine":
        raise AttributeError(f"module 'specdec.programs' has no attribute {name!r}")
    from specdec.programs.engine_backend import Engine

    return Engine
