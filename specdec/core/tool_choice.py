"""Functions that a model may call, and which calls a request wants of it. Pure Python."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from specdec.kernels.types.settings import check_text

Mode = Literal["none", "auto", "required", "named"]


class Function(NamedTuple):
    """A function that a model may call.

    Attributes:
        parameters: JSON schema of its arguments.
    """

    name: str
    parameters: Mapping[str, Any]

    @classmethod
    def of(cls, given: Any) -> "Function":
        """Return the function that OpenAI's object describes. Without parameters it takes no arguments.

        Raises:
            ValueError: a name that is empty or no text, or parameters that are no schema.
        """
        name = given.get("name") if isinstance(given, Mapping) else None
        if not name:
            raise ValueError(f"tools holds the name {name!r:.60}; give each function a name")
        check_text("tools: a function's name", name)
        parameters = given.get("parameters")
        if not isinstance(parameters, Mapping | None):
            raise ValueError(
                f"tools: the parameters of {name!r:.60} are {parameters!r:.50}; they must be a JSON schema"
            )
        return cls(name, parameters or {"type": "object", "properties": {}})


class ToolChoice(NamedTuple):
    """Calls that a request wants.

    Attributes:
        mode: none, no calls; auto, the model decides; required, at least one; named, one of one function.
        names: functions that may be called; None for all.
    """

    mode: Mode
    names: Sequence[str] | None = None

    @property
    def is_forced(self) -> bool:
        """Return whether the output is calls and nothing else."""
        return self.mode in ("required", "named")

    def allows(self, name: Any) -> bool:
        """Return whether a function of this name may be called."""
        return self.names is None or name in self.names

    def shows(self, name: Any) -> bool:
        """Return whether the chat template shows a function: what is not shown is hardly called.

        Where calls are forced, it shows all. The grammar keeps to those that are allowed, and prompts share a prefix.
        """
        return self.mode != "none" and (self.is_forced or self.allows(name))


def read_tool_choice(given: Any, functions: Sequence[Any]) -> ToolChoice:
    """Return the choice that OpenAI's `tool_choice` describes, in the form of either of its APIs.

    Args:
        functions: OpenAI's objects of the functions of a request.

    Raises:
        ValueError: another value, a function that is not there, or calls that are wanted without functions.
    """
    if given == "none" or (given in (None, "auto") and not functions):
        return ToolChoice("none")
    if given in (None, "auto"):
        return ToolChoice("auto")
    if given == "required":
        choice = ToolChoice("required")
    elif isinstance(given, Mapping) and given.get("type") == "function":
        choice = ToolChoice("named", [_name(given)])
    elif isinstance(given, Mapping) and given.get("type") == "allowed_tools":
        choice = _allowed(given.get("allowed_tools", given))
    else:
        raise ValueError(
            f"tool_choice is {given!r:.60}; it must be 'none', 'auto', 'required', a function or allowed_tools"
        )
    if not functions:
        raise ValueError(f"tool_choice is {given!r:.60}, and the request offers no function; give at least one")
    known = [function.get("name") for function in functions if isinstance(function, Mapping)]
    for name in choice.names or ():
        if name not in known:
            raise ValueError(f"tool_choice names {name!r:.60}, which is not in tools; name one that is")
    return choice


def _allowed(given: Any) -> ToolChoice:
    mode, tools = (given.get("mode"), given.get("tools")) if isinstance(given, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise ValueError(
            "tool_choice is 'allowed_tools'; give its mode, 'auto' or 'required', and a list of at least one tool"
        )
    return ToolChoice(mode, [_name(tool) for tool in tools])


def _name(given: Any) -> str:
    """Return the name of a function that a choice refers to."""
    if isinstance(given, Mapping) and given.get("type") == "function":
        name = given.get("name", given.get("function"))
        name = name.get("name") if isinstance(name, Mapping) else name
        if isinstance(name, str):
            return name
    raise ValueError(f"tool_choice holds {given!r:.60}; it must be a function, by its type and its name")
