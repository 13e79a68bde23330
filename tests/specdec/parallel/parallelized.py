"""A Llama of transformers on two ranks, split by torch's `parallelize_module` after the model's own plan.

    python -m tests.specdec.parallel.parallelized FOLDER TOKEN …

FOLDER holds the checkpoint; the logits after each token are written beside it.
"""

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaForCausalLM

SIZE = 2
LOGITS = "logits"
STYLES = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
}


def parallelized_logits(folder: Path, rank: int, tokens: Sequence[int]) -> Tensor:
    """Return the logits after each token; all ranks must call it."""
    place = {"rank": rank, "world_size": SIZE, "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", **place)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    parallelize_module(
        model, DeviceMesh("cpu", list(range(SIZE))), {name: STYLES[word]() for name, word in model._tp_plan.items()}
    )
    assert model.model.layers[0].self_attn.o_proj.weight.to_local().shape[1] == model.config.hidden_size // SIZE
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0]


if __name__ == "__main__":
    checkpoint = Path(sys.argv[1])
    # A fork before any thread is started saves the imports, which take seconds.
    other = os.fork()
    found = parallelized_logits(checkpoint, int(other == 0), list(map(int, sys.argv[2:])))
    if other:
        assert os.waitpid(other, 0)[1] == 0
        save_file({LOGITS: found}, checkpoint / LOGITS)
    # Threads of a group whose other rank has ended cannot be ended in order.
    os._exit(0)
