"""Triton's interpreter, made to run with every numpy and in a third of the time."""

from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any


def patch_language_once(interpreter: Any) -> None:
    """Spare what takes most of the time of interpreted kernels.

    The interpreter patches `triton.language` at every launch; here once. After every sum and product of integers it
    computes whether it overflowed, but looks at that only while debugging.
    """
    tl = interpreter.tl
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: SimpleNamespace(restore=lambda: None)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    # A scalar is an array of one number, which numpy 2.5 no longer takes for a number; Triton 3.6 still does.
    tl.core.tensor.__index__ = lambda self: int(self.handle.data.squeeze())


def make_types_once(interpreter: Any) -> None:
    """Make the type of a block, its shape and numpy's name of its type once, not for every value."""
    interpreter._get_np_dtype = _once_for_each(interpreter._get_np_dtype, lambda dtype: dtype.name)
    block, tensor = interpreter.tl.core.block_type, interpreter.tl.core.tensor
    block.__init__ = _filled_once(block.__init__, lambda element, shape: (element.name, *map(int, shape)))
    tensor.__init__ = _filled_once(tensor.__init__, lambda _, type: type.name, changing="handle")


def _once_for_each(function: Callable[[Any], Any], key: Callable[[Any], Hashable]) -> Callable[[Any], Any]:
    found: dict[Hashable, Any] = {}

    def answer(argument: Any) -> Any:
        name = key(argument)
        if name not in found:
            found[name] = function(argument)
        return found[name]

    return answer


def _filled_once(
    begin: Callable[..., None], key: Callable[..., Hashable], changing: str | None = None
) -> Callable[..., None]:
    """Return an `__init__` that gives objects of the same key the same attributes; the first argument is `changing`."""
    found: dict[Hashable, dict[str, Any]] = {}

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        name = key(*args, **kwargs)
        if name not in found:
            begin(self, *args, **kwargs)
            found[name] = dict(vars(self))
        vars(self).update(found[name])
        if changing:
            setattr(self, changing, args[0])

    return init
