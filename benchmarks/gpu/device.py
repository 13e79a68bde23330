"""The device that a stage runs on."""

import os

import torch


def day_device() -> torch.device:
    """Return the GPU; in a rehearsal, which `TRITON_INTERPRET=1` makes of a run, the CPU.

    Call this before anything imports a kernel.

    Raises:
        SystemExit: torch sees no GPU.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.triton_interpreter import prepare_interpreter

        prepare_interpreter()
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    raise SystemExit("torch sees no GPU; bash benchmarks/gpu_day.sh all --rehearse runs without one")
