"""The MLP of a decoder layer: its module, and what loading, ranks, adapters and the compiled layer must know of it."""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from specdec.draft_heads.llama.checkpoint_files import fuse
from specdec.draft_heads.llama.linear import Linear
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.reference.elementwise import silu_and_mul
from specdec.kernels.types.adapters import AdaptableProduct, adaptable
from specdec.kernels.types.fused import GatedWeights


class GatedMLP(nn.Module):
    """Llama's MLP, `down(silu(gate(x)) * up(x))`; one product makes gate and up.

    Attributes:
        plan: the words of its tensor-parallel plan, by names (or patterns) of its modules in a checkpoint; others are
            replicated. What the plan splits, it splits by neurons.
        reduce: sums outputs over ranks, where each has some of the neurons; None where one has all.
    """

    plan: ClassVar[Mapping[str, str]] = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    reduce: Callable[[Tensor], Tensor] | None = None

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    @property
    def linears(self) -> dict[str, Linear]:
        """The linear layers that adapters may change, by their names in `LayerAdapter`."""
        return {"gate_up": self.gate_up_proj, "down": self.down_proj}

    def form(self, kernels: KernelSet | None) -> "MLPForm":
        """Return the MLP as it is called; see `Linear`."""
        return MLPForm(self, kernels)

    def weights(self) -> GatedWeights | None:
        """Return the weights for a layer in one call; None where ranks share them.

        Then the parts of the layer are called one by one.
        """
        if self.reduce is not None:
            return None
        up, down = self.gate_up_proj, self.down_proj
        return GatedWeights((up.weight, up.bias), (down.weight, down.bias))

    @staticmethod
    def products(config: LlamaConfig) -> dict[str, AdaptableProduct]:
        """Return the products that adapters may change, by their names in `LayerAdapter`."""
        hidden, width = config.hidden_size, config.intermediate_size
        return {
            "gate_up": adaptable(hidden, {"mlp.gate_proj": width, "mlp.up_proj": width}),
            "down": adaptable(width, {"mlp.down_proj": hidden}),
        }

    @staticmethod
    def fuse(tensors: dict[str, Tensor], prefix: str) -> None:
        """Turn the MLP's tensors of a checkpoint into the module's parameters.

        Args:
            prefix: of their names, up to "mlp.".

        Raises:
            CheckpointError: parts that do not fit together.
        """
        for kind in ("weight", "bias"):
            fuse(tensors, f"{prefix}gate_up_proj.{kind}", [f"{prefix}{name}_proj.{kind}" for name in ("gate", "up")])

    @staticmethod
    def split(tensors: dict[str, Tensor], prefix: str) -> None:
        """Turn the module's parameters into the tensors of a checkpoint: the inverse of `fuse`."""
        for kind in ("weight", "bias"):
            if (gate_up := tensors.pop(f"{prefix}gate_up_proj.{kind}", None)) is not None:
                for name, part in zip(("gate", "up"), gate_up.chunk(2), strict=True):
                    tensors[f"{prefix}{name}_proj.{kind}"] = part.contiguous()

    @staticmethod
    def narrowed(tensors: dict[str, Tensor], prefix: str, width: int) -> None:
        """Keep `width` neurons, those with the largest weights, where the module's parameters hold more.

        A neuron's weight is the product of the norms of its gate, its input and its output.
        """
        down = tensors[f"{prefix}down_proj.weight"]
        if down.shape[1] <= width:
            return
        gate, up = tensors[f"{prefix}gate_up_proj.weight"].chunk(2)
        weights = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
        kept = weights.topk(width).indices.sort().values
        tensors[f"{prefix}down_proj.weight"] = down[:, kept].contiguous()
        tensors[f"{prefix}gate_up_proj.weight"] = torch.cat([gate[kept], up[kept]])


class MLPForm:
    """`GatedMLP` as it is called.

    Attributes:
        products: by their names in `LayerAdapter`.
    """

    def __init__(self, mlp: GatedMLP, kernels: KernelSet | None) -> None:
        self.products = {name: part.form(kernels) for name, part in mlp.linears.items()}
        self.activation = silu_and_mul if kernels is None else kernels.silu_and_mul
        self.reduce = mlp.reduce

    def __call__(self, x: Tensor) -> Tensor:
        """Run the MLP: `[rows, hidden_size]` to `[rows, hidden_size]`, summed over ranks."""
        output = self.products["down"](self.activation(self.products["gate_up"](x)))
        return output if self.reduce is None else self.reduce(output)


def mlp_kind(config: LlamaConfig) -> type[GatedMLP]:  # noqa: ARG001
    """Return the kind of a model's MLPs, by its sizes. So far there is one."""
    return GatedMLP
