"""Write a target of 256M parameters, and heads of its size, that compute the same function as the demo's.

    python -m benchmarks.widen FOLDER

Writes FOLDER/target, and its heads FOLDER/eagle3, FOLDER/eagle and FOLDER/dspark, in bfloat16. They are for measuring
speed at a realistic size: a step costs what a step of a 256M model costs, while text, logits and acceptance are those
of the small demo. A table with figures of these checkpoints must say so.

- Channels, attention heads and MLP neurons that the demo lacks are zero.
- A norm over H channels of which h are used has the weights sqrt(h / H) and the epsilon h / H times the demo's.
- Added layers have zero output projections, so they pass their input on; their other weights repeat the layer before.
  They stand where the layers that the EAGLE-3 head reads become the default ones of 16 layers: 2, 8 and 13.

With H = 4h the factors are powers of two: every weight and epsilon is exact in every floating-point type. Logits differ
from the demo's by rounding alone, since sums may run in another order.
"""

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from specdec.config import DEMO


@dataclass(frozen=True)
class Sizes:
    """Sizes of the widened checkpoints; the head dimension, 64, and the vocabulary are the demo's.

    Attributes:
        inner: of MLPs as wide as the demo target's; narrower ones of a head keep their ratio to its hidden size.
        layers: the target layers that hold the demo's, in order; the others pass their input on.
    """

    hidden: int = 1024
    inner: int = 4096
    heads: int = 16
    kv_heads: int = 8
    num_layers: int = 16
    layers: tuple[int, ...] = (0, 1, 2, 3, 4, 8, 9, 13, 14, 15)

    def of(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return a demo config.json's entries that change with the sizes, for a target or a head."""
        is_narrow = config["intermediate_size"] < DEMO_INNER
        inner = config["intermediate_size"] * self.hidden // config["hidden_size"] if is_narrow else self.inner
        entries: dict[str, Any] = {
            "hidden_size": self.hidden,
            "intermediate_size": inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": config["rms_norm_eps"] * config["hidden_size"] / self.hidden,
        }
        taps = [self.layers[layer] for layer in config.get("eagle_aux_hidden_state_layer_ids", ())]
        if taps:
            entries["eagle_aux_hidden_state_layer_ids"] = taps
            counted = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]}
            entries["eagle_config"] = config["eagle_config"] | counted
        if "target_layer_ids" in config:
            # Outputs of layers; those that the next layer of the demo reads are the inputs of its place.
            entries["target_layer_ids"] = [self.layers[layer + 1] - 1 for layer in config["target_layer_ids"]]
        return entries


# Inner size of the demo target's MLPs.
DEMO_INNER = 704
# The axes of each kind of matrix, output first: entries of config.json, or None for the vocabulary.
AXES = {
    "embed_tokens": (None, "hidden_size"),
    "lm_head": (None, "hidden_size"),
    "fc": ("hidden_size", "hidden_size"),
    "q_proj": ("num_attention_heads", "hidden_size"),
    "k_proj": ("num_key_value_heads", "hidden_size"),
    "v_proj": ("num_key_value_heads", "hidden_size"),
    "o_proj": ("hidden_size", "num_attention_heads"),
    "gate_proj": ("intermediate_size", "hidden_size"),
    "up_proj": ("intermediate_size", "hidden_size"),
    "down_proj": ("hidden_size", "intermediate_size"),
    "markov_w1": (None, None),
    "markov_w2": (None, None),
}
# Norms of the numbers of an attention head, which are as many as before.
HEAD_NORMS = ("q_norm", "k_norm")


def widen_tensor(name: str, tensor: Tensor, old: dict[str, Any], new: dict[str, Any]) -> Tensor:
    """Return a tensor of a checkpoint with the config.json `old` for one with `new`."""
    kind = name.split(".")[-2] if "." in name else name
    if kind in ("d2t", "t2d", *HEAD_NORMS) or name in ("confidence_head.proj.bias", "markov_head.joint_proj.bias"):
        return tensor
    if name == "markov_head.joint_proj.weight":
        path, state = torch.split(tensor, [tensor.shape[1] - old["hidden_size"], old["hidden_size"]], 1)
        return torch.cat([path, _pad(state, 1, "hidden_size", old, new)], 1)
    if name == "confidence_head.proj.weight":
        state, before = torch.split(tensor, [old["hidden_size"], tensor.shape[1] - old["hidden_size"]], 1)
        return torch.cat([_pad(state, 1, "hidden_size", old, new), before], 1)
    if kind.endswith("norm"):
        scaled = tensor * (old["hidden_size"] / new["hidden_size"]) ** 0.5
        return F.pad(scaled, (0, new["hidden_size"] - old["hidden_size"]))
    for axis, entry in enumerate(AXES[kind]):
        if entry is not None:
            tensor = _pad(tensor, axis, entry, old, new)
    return tensor


def _pad(tensor: Tensor, axis: int, entry: str, old: dict[str, Any], new: dict[str, Any]) -> Tensor:
    """Put zeros behind each part of an axis, so that it is as long as `new` says.

    An axis of heads is one part. The input of a head's first products holds several states, each of them a part.
    """
    unit = old["head_dim"] if entry.startswith("num") else 1
    length, added = old[entry] * unit, (new[entry] - old[entry]) * unit
    parts = tensor.chunk(tensor.shape[axis] // length, axis)
    padded = [F.pad(part.movedim(axis, -1), (0, added)).movedim(-1, axis) for part in parts]
    return torch.cat(padded, axis).contiguous()


def widen_target(folder: Path, sizes: Sizes) -> None:
    """Write the widened demo target."""
    old, tensors = _read(DEMO / "target")
    new = old | sizes.of(old) | {"num_hidden_layers": sizes.num_layers}
    wide = {name: widen_tensor(name, tensor, old, new) for name, tensor in tensors.items()}
    layers = {name: tensor for name, tensor in wide.items() if ".layers." in name}
    target = {name: tensor for name, tensor in wide.items() if name not in layers}
    for layer in range(sizes.num_layers):
        own = layer in sizes.layers
        source = max(i for i, place in enumerate(sizes.layers) if place <= layer)
        prefix = f"model.layers.{source}."
        for name, tensor in layers.items():
            if name.startswith(prefix):
                part = name.removeprefix(prefix)
                silent = not own and part in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
                target[f"model.layers.{layer}.{part}"] = torch.zeros_like(tensor) if silent else tensor.clone()
    _write(folder, new, target)
    for file in (DEMO / "target").iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "generation_config")):
            shutil.copy(file, folder)


def widen_head(source: Path, folder: Path, sizes: Sizes) -> None:
    """Write a widened demo head for the widened target."""
    old, tensors = _read(source)
    # Figures of the training hold for the demo's sizes.
    new = {key: value for key, value in (old | sizes.of(old)).items() if key != "training"}
    _write(folder, new, {name: widen_tensor(name, tensor, old, new) for name, tensor in tensors.items()})


def widen(folder: Path, sizes: Sizes) -> None:
    """Write the target and its heads into a folder."""
    widen_target(folder / "target", sizes)
    for head in ("eagle3", "eagle", "dspark"):
        widen_head(DEMO / head, folder / head, sizes)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, load_file(folder / "model.safetensors")


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the target and its heads are written; 700 MB")
    folder = parser.parse_args().folder
    widen(folder, Sizes())
    print(folder)


if __name__ == "__main__":
    main()
