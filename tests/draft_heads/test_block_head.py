"""The block head's module against its description in plain words: packed blocks, conventions, scorers, gradients."""

import pytest
import torch
from torch import Tensor

from specdec.draft_heads.heads.block_attention import BlockAttention, block_mask, block_positions
from specdec.draft_heads.heads.block_head import BlockHead
from specdec.draft_heads.heads.draft_head import TargetOutput
from specdec.draft_heads.heads.edge_scorers import block_edges
from specdec.draft_heads.llama.rope import rotary_at
from tests.block_heads import Block, block, path_logits, slots, states
from tests.checkpoints import TARGET_HIDDEN, VOCAB
from tests.draft_heads.built_blocks import built

LENGTHS, ANCHORS = (7, 9), (2, 5, 7, 15)


def conversations(taps: int) -> tuple[Tensor, list[Tensor]]:
    """Return the tokens of two packed conversations, and the target's states of them."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB - 1, (sum(LENGTHS),), generator=generator)
    return tokens, [torch.randn(sum(LENGTHS), TARGET_HIDDEN, generator=generator).double() for _ in range(taps)]


def packed_states(module: BlockHead, tokens: Tensor, taps: list[Tensor], anchors: Tensor) -> Tensor:
    """Run the module as training does; return `[blocks, block_size, hidden]`."""
    config, llama, form = module.config, module.llama, module.form(None)
    documents = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    table = llama.rope.table(llama.head_dim, llama.max_position, torch.float64)
    context = form.context(form.feature_of(TargetOutput(taps[0], taps)))
    masks = [
        block_mask(documents, anchors, config.block_size, causal=causal, window=window)
        for causal, window in zip(config.causal, llama.layer_windows, strict=True)
    ]
    attentions = [
        BlockAttention(context[:, layer], rotary_at(table, positions), mask) for layer, mask in enumerate(masks)
    ]
    block_tokens = torch.full((len(anchors), config.block_size), config.mask_token)
    block_tokens[:, 0] = tokens[anchors]
    rotary = rotary_at(table, block_positions(positions[anchors], config.block_size))
    return form(block_tokens.flatten(), rotary, attentions).view(len(anchors), config.block_size, -1)


HEADS = {
    "dflash": lambda: block(1, anchor_first=False),
    "one causal layer of three": lambda: block(2, layers=3, causal=(False, True, False)),
    "within windows": lambda: block(5, layers=3, causal=(False, True, False), windows=(3, 6, 0)),
    "without norms of heads": lambda: block(3, layers=1, qk_norm=False, causal=True, theta=500.0),
}


@pytest.mark.parametrize("name", HEADS)
def test_packed_blocks_are_each_as_if_alone(name: str) -> None:
    head = HEADS[name]()
    tokens, taps = conversations(len(head.layer_ids))
    found = packed_states(built(head), tokens, taps, torch.tensor(ANCHORS))
    for place, anchor in enumerate(ANCHORS):
        start = 0 if anchor < LENGTHS[0] else LENGTHS[0]
        alone = states(head, tokens[start : anchor + 1].tolist(), [tap[start:anchor] for tap in taps])
        # RMS norms compute in float32 at least.
        torch.testing.assert_close(found[place], alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_edge_vectors_are_the_bias_of_the_description(kind: str) -> None:
    head: Block = block(4, layers=1, rank=6, kind=kind)
    module = built(head)
    hidden = torch.randn(3, head.size, TARGET_HIDDEN, dtype=torch.float64)
    before = torch.randint(VOCAB, (3, head.size))
    scorer = module.markov_head
    assert scorer is not None
    bias = block_edges(scorer, before, hidden) @ scorer.successors.T
    output = head.weights["lm_head.weight"].double()
    for row in range(3):
        anchor, *path = before[row].tolist()
        for slot in range(head.size):
            wanted = path_logits(head, slots(head, hidden[row]), anchor, path[:slot]) - output @ hidden[row, slot]
            torch.testing.assert_close(bias[row, slot], wanted)


def test_confidence_reads_state_and_previous_token() -> None:
    head = block(5, layers=1, rank=4, confidence=True)
    hidden, before = torch.randn(3, TARGET_HIDDEN, dtype=torch.float64), torch.tensor([3, 0, 52])
    found = built(head).form(None).confidence(before, hidden)
    weight = head.weights["confidence_head.proj.weight"].double()[0]
    rows = head.weights["markov_head.markov_w1.weight"].double()[before]
    wanted = torch.cat([hidden, rows], 1) @ weight + head.weights["confidence_head.proj.bias"].double()
    torch.testing.assert_close(found, wanted)


def test_gradients_reach_every_weight_that_is_trained() -> None:
    head = block(6, rank=4)
    tokens, taps = conversations(len(head.layer_ids))
    module, anchors = built(head), torch.tensor([3])
    packed_states(module, tokens, taps, anchors).pow(2).sum().backward()
    # One weight at a time, by the difference quotient of the description; a key's norm acts on context and block.
    for name in ("fc.weight", "layers.0.k_norm.weight", "hidden_norm.weight", "layers.1.qkv_proj.weight"):
        weight = module.get_parameter(name)
        assert weight.grad is not None
        place = weight.grad.abs().argmax()
        with torch.no_grad():
            sums = []
            for step in (0.01, -0.01):
                weight.view(-1)[place] += step
                sums.append(packed_states(module, tokens, taps, anchors).pow(2).sum())
                weight.view(-1)[place] -= step
        torch.testing.assert_close(weight.grad.view(-1)[place], (sums[0] - sums[1]) / 0.02, rtol=0.02, atol=1e-3)
