"""Baichuan in plain PyTorch, a whole text at a time, after its papers and model cards: transformers has none built in.

Baichuan-13B: ALiBi (Press et al. 2021), queries, keys and values in one matrix; Baichuan 2 (2309.10305): an output
matrix of normalised rows; the models of 7 billion parameters: rotary embeddings in place of ALiBi.
"""

import copy
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from tests.coded_cache import as_stored
from tests.fakes import TINY
from tests.roundings import to_float32

# config.json of a Baichuan-13B with sizes of a test.
CONFIG = {
    **{name: size for name, size in TINY.items() if name not in ("num_key_value_heads", "max_position_embeddings")},
    "architectures": ["BaichuanForCausalLM"],
    "hidden_act": "silu",
    "model_max_length": 256,
    "model_type": "baichuan",
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
# What makes it a Baichuan-7B, and a Baichuan 2.
ROTARY = {"architectures": ["BaiChuanForCausalLM"], "max_position_embeddings": 256, "model_max_length": None}
NORMALISED = {"vocab_size": 125696}


class Output(NamedTuple):
    """Logits `[texts, tokens, vocab_size]`, as transformers' models return them."""

    logits: Tensor


def slopes(heads: int) -> list[float]:
    """Return slopes as the paper's authors do: half of the missing heads' worth of a model of twice the size."""
    if heads & (heads - 1) == 0:
        first = 2 ** -(8 / heads)
        return [first ** (head + 1) for head in range(heads)]
    fewer = 2 ** math.floor(math.log2(heads))
    return slopes(fewer) + slopes(2 * fewer)[::2][: heads - fewer]


class Norm(nn.Module):
    """RMS norm in float32, as transformers computes that of a Llama in float64 too."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        single = to_float32(x)
        return self.weight * (single * (single.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)


class Attention(nn.Module):
    """Attributes: codes: the kind of 8-bit numbers that keys and values are read in, or None."""

    codes: torch.dtype | None = None

    def __init__(self, hidden: int, heads: int, rotary: bool) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.W_pack = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        texts, length, hidden = x.shape
        places = torch.arange(length)
        query, key, value = self.W_pack(x).view(texts, length, 3, self.heads, -1).unbind(2)
        bias = torch.zeros(self.heads, length, length, dtype=x.dtype)
        if self.rotary:
            query, key = self._turned(query, places), self._turned(key, places)
        else:
            distances = places[None, :] - places[:, None]
            bias = torch.tensor(slopes(self.heads), dtype=x.dtype)[:, None, None] * distances
        if self.codes is not None:
            key, value = as_stored(key, self.codes), as_stored(value, self.codes)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(hidden // self.heads) + bias
        scores = scores.masked_fill(places[None, :] > places[:, None], -math.inf)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value)
        output: Tensor = self.o_proj(mixed.reshape(x.shape))
        return output

    def _turned(self, x: Tensor, places: Tensor) -> Tensor:
        """Rotate pairs of numbers half a head apart, by angles in float32 as everywhere."""
        half = x.shape[-1] // 2
        angles = places[:, None].float() * (1 / 10000.0 ** (torch.arange(half).float() / half))
        cos, sin = (part.to(x.dtype)[:, None] for part in (angles.cos(), angles.sin()))
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any], rotary: bool) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = Attention(hidden, config["num_attention_heads"], rotary)
        self.mlp = MLP(hidden, config["intermediate_size"])
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden, eps), Norm(hidden, eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Decoder(nn.Module):
    def __init__(self, config: dict[str, Any], rotary: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, rotary) for _ in range(config["num_hidden_layers"]))
        self.norm = Norm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        output: Tensor = self.norm(x)
        return output


class Baichuan(nn.Module):
    """A random model in float64, its norms too. Its logits are far enough apart that no two tokens nearly tie.

    Args:
        config: as in config.json.
    """

    def __init__(self, config: dict[str, Any], seed: int = 0) -> None:
        super().__init__()
        self.config = config
        torch.manual_seed(seed)
        self.model = Decoder(config, "BaiChuanForCausalLM" in config["architectures"])
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        self.is_normalised = config["vocab_size"] == NORMALISED["vocab_size"]
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter, *((1.0, 0.2) if "norm" in name else (0.0, 0.3)))
        self.to(torch.float64).requires_grad_(False).eval()

    def forward(self, tokens: Tensor) -> Output:
        weight = self.lm_head.weight
        if self.is_normalised:
            weight = weight / weight.norm(dim=1, keepdim=True)
        return Output(self.model(tokens) @ weight.T)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Return the likeliest tokens behind a prompt, one after another."""
        text = list(prompt)
        for _ in range(count):
            text.append(int(self(torch.tensor([text])).logits[0, -1].argmax()))
        return text[len(prompt) :]

    def reading_codes(self, dtype: torch.dtype) -> "Baichuan":
        """Return the same model whose attention reads keys and values in 8 bits."""
        other = copy.deepcopy(self)
        for part in other.modules():
            if isinstance(part, Attention):
                part.codes = dtype
        return other


def save_baichuan(folder: Path, seed: int = 0, **overrides: Any) -> Baichuan:
    """Write a random float64 Baichuan as a checkpoint; None leaves a setting out."""
    config = {name: value for name, value in {**CONFIG, **overrides}.items() if value is not None}
    model = Baichuan(config, seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    return model
