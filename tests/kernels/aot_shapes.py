"""Models that we name in figures, and signatures of kernels for them."""

import json
from pathlib import Path
from typing import NamedTuple

DEMO = Path(__file__).parents[2] / "specdec" / "demo" / "target" / "config.json"


class Shape(NamedTuple):
    """Sizes of a model, and the dtype it is served in."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    dtype: str = "bf16"


def shapes() -> list[Shape]:
    config = json.loads(DEMO.read_text(encoding="utf-8"))
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    demo = Shape("demo", *(config[name] for name in names))
    return [
        # The only one whose norms take the loop.
        Shape("405B", 16384, 53248, 128, 8, 128, 128256),
        Shape("8B", 4096, 14336, 32, 8, 128, 128256),
        Shape("1B", 2048, 8192, 32, 8, 64, 128256),
        demo,
        demo._replace(dtype="fp32"),
    ]


def typed(arguments: str, dtype: str) -> dict[str, str]:
    """Signature from `name:type` words, where a missing type is a pointer to `dtype`; all divisible by 16."""
    words = (word.partition(":") for word in arguments.split())
    return {name: f"{kind or '*' + dtype}" + ("" if kind in ("fp32", "int") else ":16") for name, _, kind in words}
