"""Devices and dtypes by their names."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from specdec.kernels.reference.projection import is_bfloat16_fast

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """Return the device of a name; "auto" is the GPU where there is one.

    Raises:
        ValueError: neither a CPU nor a CUDA GPU, or one that this machine lacks.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ValueError(f"device {name!r} is unknown; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported; use auto, cpu or cuda")
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device {name!r} is not there: torch sees no CUDA GPU; use cpu")
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA GPUs")
    return device


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Run kernels and events that name no device on this one of several GPUs."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class StepScope:
    """The context of a step: inference mode, the device, a limit of torch's threads.

    All steps of an engine enter the same object. A forward pass leaves the processor's caches full of weights, so
    making such contexts anew in each step takes ten times as long as it does in a loop.
    """

    def __init__(self, device: torch.device, threads: AbstractContextManager[object]) -> None:
        # Inference mode last, which cannot fail.
        self._parts = on_device(device), threads, torch.inference_mode()

    def __enter__(self) -> None:
        for part in self._parts:
            part.__enter__()

    def __exit__(self, *error: Any) -> None:
        for part in reversed(self._parts):
            part.__exit__(*error)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a name; "auto" is bfloat16 where the device computes in it, float32 elsewhere.

    Raises:
        ValueError: an unknown name.
    """
    if name == "auto":
        return torch.bfloat16 if is_bfloat16_fast(device) else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype."""
    return str(dtype).removeprefix("torch.")
