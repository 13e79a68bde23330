"""Tiny random block heads in plain words: their tensors by the published names, and what they compute.

Nothing here uses the package.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.checkpoints import INTERMEDIATE, TARGET_EMBED, TARGET_HIDDEN, TARGET_OUT, VOCAB, random_weight

HEADS, KV_HEADS, DIM, EPS = 4, 2, 6, 1e-5
# Numbers of Domino's state; taps of DFlash2's convolutions, and channels that share a row's own kernel.
STATE, TAPS, GROUP = 5, 3, 4


@dataclass
class Block:
    """A head in plain words.

    Attributes:
        weights: by DeepSpec's names, with `embed_tokens.weight` and `lm_head.weight`, which may be the target's.
        causal: per layer.
        layer_ids: 0-based target layers whose outputs it reads.
        tokens: which ones it scores, in the order of `lm_head`; None for all.
    """

    weights: dict[str, Tensor]
    causal: tuple[bool, ...]
    layer_ids: tuple[int, ...] = (1, 4)
    size: int = 5
    mask_token: int = VOCAB - 1
    anchor_first: bool = True
    kind: str = "vanilla"
    theta: float = 10000.0
    tokens: list[int] | None = None
    qk_norm: bool = True
    # Per layer, the tokens of context that it sees, those of the block included where it is causal; none for all.
    windows: tuple[int, ...] = ()
    # Domino: slots without a correction. DFlash2: candidates that the selector scores.
    prefix: int = 1
    top_k: int = VOCAB
    facts: dict[str, object] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        return len(self.causal)


def block(
    seed: int,
    layers: int = 2,
    rank: int = 0,
    kind: str = "vanilla",
    tokens: list[int] | None = None,
    confidence: bool = False,
    qk_norm: bool = True,
    causal: bool | Sequence[bool] = False,
    **settings: object,
) -> Block:
    """Return a head of the target of `tests.checkpoints`: DSpark, Domino or DFlash2 with a `rank`, else DFlash.

    Args:
        kind: of DSpark's Markov head, or "domino" or "dflash2".
    """
    generator, hidden = torch.Generator().manual_seed(seed), TARGET_HIDDEN
    ids = settings.get("layer_ids", Block.layer_ids)
    assert isinstance(ids, tuple)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(ids) * hidden), "hidden_norm.weight": (hidden,)}
    for layer in range(layers):
        own = {
            **{
                f"self_attn.{name}_proj": (heads * DIM, hidden)
                for name, heads in zip("qkv", (HEADS, 2, 2), strict=True)
            },
            "self_attn.o_proj": (hidden, HEADS * DIM),
            **{f"self_attn.{name}_norm": (DIM,) for name in "qk" * qk_norm},
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (INTERMEDIATE, hidden),
            "mlp.up_proj": (INTERMEDIATE, hidden),
            "mlp.down_proj": (hidden, INTERMEDIATE),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in own.items()}
        if kind == "dflash2":
            for name in ("attention_conv", "mlp_conv"):
                shapes[f"layers.{layer}.{name}.base_kernel"] = (2, TAPS, hidden)
                shapes[f"layers.{layer}.{name}.kernel_projection.weight"] = (2 * TAPS * hidden // GROUP, hidden)
    shapes["norm.weight"] = (hidden,)
    if kind == "domino":
        shapes |= {"prefix_gru.weight_ih_l0": (3 * STATE, hidden), "prefix_gru.weight_hh_l0": (3 * STATE, STATE)}
        shapes |= {"embed_proj.0.weight": (rank, hidden + STATE), "embed_proj.2.weight": (VOCAB, rank)}
    elif kind == "dflash2":
        shapes |= {f"candidate_selector.{name}_codebook": (VOCAB, rank) for name in ("predecessor", "successor")}
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    elif rank:
        shapes["markov_head.markov_w1.weight"] = (VOCAB, rank)
        shapes["markov_head.markov_w2.weight"] = (len(tokens or range(VOCAB)), rank)
        if kind == "gated":
            shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
        if kind == "rnn":
            joint = {"weight": (3 * rank, 2 * rank + hidden), "bias": (3 * rank,)}
            shapes |= {f"markov_head.joint_proj.{name}": shape for name, shape in joint.items()}
    if confidence:
        shapes |= {"confidence_head.proj.weight": (1, hidden + rank), "confidence_head.proj.bias": (1,)}
    weights = {name: random_weight(generator, *shape) for name, shape in shapes.items()}
    weights |= {
        "embed_tokens.weight": TARGET_EMBED,
        "lm_head.weight": TARGET_OUT if tokens is None else TARGET_OUT[tokens],
    }
    which = (causal,) * layers if isinstance(causal, bool) else tuple(causal)
    return Block(weights, which, kind=kind, tokens=tokens, qk_norm=qk_norm, **settings)  # type: ignore[arg-type]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.to(x)


def rotate(x: Tensor, positions: Sequence[int], theta: float) -> Tensor:
    """Rotate `[rows, heads, dim]`."""
    half = x.shape[-1] // 2
    angles = torch.tensor([[p / theta ** (2 * i / x.shape[-1]) for i in range(half)] for p in positions]).to(x)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def convolved(x: Tensor, base: Tensor, own: Tensor) -> Tensor:
    """Return DFlash2's convolution along a block: `own` is `[rows, taps * groups]`, what each row adds to `base`."""
    found = torch.zeros_like(x)
    for row in range(len(x)):
        for tap in range(min(TAPS, row + 1)):
            kernel = base[tap] + own[row].view(TAPS, -1)[tap].repeat_interleave(GROUP)
            found[row] += kernel * x[row - tap]
    return found


def around(x: Tensor, own: dict[str, Tensor], name: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return a sublayer's input, and what finishes its output; both are as they are without convolutions."""
    if f"{name}.base_kernel" not in own:
        return x, lambda y: y
    first, second = (x @ own[f"{name}.kernel_projection.weight"].T).chunk(2, 1)
    base = own[f"{name}.base_kernel"]
    return convolved(x, base[0], first), lambda y: convolved(y, base[1], second)


def states(head: Block, tokens: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
    """Return the normed states of the block whose anchor is the last token, `[block_size, hidden]`.

    Args:
        taps: `[tokens - 1, hidden]` of each layer read, the target's states of the tokens before the anchor.
    """
    w = {name: tensor.to(taps[0]) for name, tensor in head.weights.items()}
    rows, start = len(taps[0]), len(tokens) - 1
    context = norm(torch.cat(list(taps), -1) @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = w["embed_tokens.weight"][[tokens[-1], *[head.mask_token] * (head.size - 1)]]
    places, group = [*range(rows), *range(start, start + head.size)], HEADS // KV_HEADS
    for layer in range(head.layers):
        own = {name.removeprefix(f"layers.{layer}."): t for name, t in w.items() if name.startswith(f"layers.{layer}.")}
        normed, finish = around(norm(x, own["input_layernorm.weight"]), own, "attention_conv")
        inputs = torch.cat([context, normed])
        query, key, value = (
            (given @ own[f"self_attn.{name}_proj.weight"].T).view(len(given), -1, DIM)
            for name, given in (("q", normed), ("k", inputs), ("v", inputs))
        )
        if head.qk_norm:
            query, key = norm(query, own["self_attn.q_norm.weight"]), norm(key, own["self_attn.k_norm.weight"])
        query, key = rotate(query, places[rows:], head.theta), rotate(key, places, head.theta)
        mixed = torch.empty(head.size, HEADS, DIM).to(x)
        for row in range(head.size):
            seen, first = rows + (row + 1 if head.causal[layer] else head.size), 0
            if head.windows and head.windows[layer]:
                first = max(0, rows - head.windows[layer] + (row + 1 if head.causal[layer] else 0))
            for h in range(HEADS):
                weights = (key[first:seen, h // group] @ query[row, h] / math.sqrt(DIM)).softmax(0)
                mixed[row, h] = weights @ value[first:seen, h // group]
        x = x + finish(mixed.flatten(1) @ own["self_attn.o_proj.weight"].T)
        normed, finish = around(norm(x, own["post_attention_layernorm.weight"]), own, "mlp_conv")
        gate, up = (normed @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + finish((gate * gate.sigmoid() * up) @ own["mlp.down_proj.weight"].T)
    return norm(x, w["norm.weight"])


def slots(head: Block, found: Tensor) -> Tensor:
    """Return the states that predict, `[slots, hidden]`: of the first token behind the anchor, and so on."""
    if not head.anchor_first:
        return found[1:]
    return found[:-1] if head.kind == "domino" else found


def path_logits(head: Block, found: Tensor, anchor: int, path: Sequence[int]) -> Tensor:
    """Return the logits after a path of drafted tokens, over the tokens that the head scores.

    Args:
        found: the normed states of the slots.
    """
    w = {name: tensor.to(found) for name, tensor in head.weights.items()}
    logits = w["lm_head.weight"] @ found[len(path)]
    if head.kind == "domino":
        state, inputs, own = torch.zeros(STATE).to(found), w["prefix_gru.weight_ih_l0"], w["prefix_gru.weight_hh_l0"]
        for token in (anchor, *path):
            read, kept = (inputs @ w["embed_tokens.weight"][token]).chunk(3), (own @ state).chunk(3)
            reset, update = (read[0] + kept[0]).sigmoid(), (read[1] + kept[1]).sigmoid()
            state = (1 - update) * (read[2] + reset * kept[2]).tanh() + update * state
        inner = w["embed_proj.0.weight"] @ torch.cat([found[len(path)], state])
        return logits if len(path) < head.prefix else logits + w["embed_proj.2.weight"] @ (inner * inner.sigmoid())
    if head.kind == "dflash2":
        before = w["candidate_selector.predecessor_codebook"][[anchor, *path][-1]]
        given = before * (w["candidate_selector.hidden_projection.weight"] @ found[len(path)])
        best = logits.topk(head.top_k).indices
        return logits.index_add(0, best, w["candidate_selector.successor_codebook"][best] @ given)
    if "markov_head.markov_w1.weight" not in w:
        return logits
    first, second = w["markov_head.markov_w1.weight"], w["markov_head.markov_w2.weight"]
    state = torch.zeros(first.shape[1]).to(found)
    for slot, token in enumerate([anchor, *path]):
        before = first[token]
        if head.kind == "gated":
            given = torch.cat([found[slot], before])
            before = (w["markov_head.gate_proj.weight"] @ given + w["markov_head.gate_proj.bias"]).sigmoid() * before
        elif head.kind == "rnn":
            given = torch.cat([state, before, found[slot]])
            gate, new, out = (w["markov_head.joint_proj.weight"] @ given + w["markov_head.joint_proj.bias"]).chunk(3)
            state, before = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh(), out.tanh()
    return logits + second @ before
