"""Rounding to float32 in float64 models: errors of 1e-16 decide it for numbers half way between two of float32."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def to_float32(x: Tensor) -> Tensor:
    """Round to float32, float64 by way of 46 bits, as the engine's norms do.

    The engine and a test's own model add in different orders, so their sums differ by 1e-16. Such an error must not
    decide which way a number half way between two of float32 is rounded.
    """
    if x.dtype != torch.float64:
        return x.float()
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 2**46), exponent - 46).float()


def rounds_either_way(model: nn.Module, tokens: Sequence[int]) -> bool:
    """Return whether the order of a sum may decide how a float64 model rounds to float32; see `close_calls`."""
    with close_calls(model) as found, torch.inference_mode():
        model(torch.tensor([list(tokens)]))
    return any(found)


@contextmanager
def close_calls(model: nn.Module) -> Iterator[list[bool]]:
    """Yield what becomes a list: of each norm in each pass, whether the order of a sum may decide how it rounds.

    transformers' RMS norms compute in float32, in a float64 model too, and so does the engine. A number that lies half
    way between two of float32 is rounded up or down due to errors of 1e-16 of what was added, in transformers as well.
    Weights and cache entries of few bits, behind tokens that are all alike, give such sums; others meet one in some
    tens of passes.
    """
    found = list[bool]()

    def look(_: Any, given: tuple[Tensor, ...]) -> None:
        size = given[0].abs()
        # Of the number itself, and of those of its row, which were added with it.
        error = 1e-13 * size + 4e-15 * size.amax(-1, keepdim=True)
        found.append(bool(((given[0] - error).float() != (given[0] + error).float()).any()))

    norms = [module for module in model.modules() if type(module).__name__.endswith("Norm")]
    hooks = [norm.register_forward_pre_hook(look) for norm in norms]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
