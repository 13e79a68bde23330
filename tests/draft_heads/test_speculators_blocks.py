"""Block heads written by speculators load here, ours load there, and both give the same logits per slot."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

from specdec.draft_heads.formats.head_kinds import KINDS, load_head
from specdec.draft_heads.heads.block_head import BlockForm
from specdec.draft_heads.heads.draft_head import DraftModel, TargetOutput, TargetParts
from specdec.draft_heads.heads.edge_scorers import block_edges
from specdec.kernels.reference.projection import Projection
from tests.block_heads import block
from tests.checkpoints import FEW, INTERMEDIATE, TARGET_EMBED, TARGET_HIDDEN, TARGET_OUT, VOCAB
from tests.draft_heads.built_blocks import built
from tests.draft_heads.loading import PARTS
from tests.draft_heads.served_block import served_states
from tests.kernel_sets import TORCH

reason = "speculators and hs-connectors are not installed"
dflash = pytest.importorskip("speculators.models.dflash.core", reason=reason)
dspark = pytest.importorskip("speculators.models.dspark.core", reason=reason)
dflash2 = pytest.importorskip("speculators.models.dflash2.core", reason=reason)

PARTS_32 = TargetParts(TARGET_EMBED.float(), Projection(TARGET_OUT.float()), PARTS.config)
LENGTH, ANCHORS, TAPS = 20, [3, 9, 14], [2, 5]
CASES: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash, few tokens": {"draft_vocab_size": len(FEW)},
    "dspark vanilla": {"markov_rank": 6},
    "dspark gated": {"markov_rank": 6, "markov_head_type": "gated", "sample_from_anchor": False},
    "dspark rnn, few tokens": {"markov_rank": 6, "markov_head_type": "rnn", "draft_vocab_size": len(FEW)},
    "dflash2": {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 7},
}
MODULES = {"dflash": ("DFlash", dflash), "dspark": ("DSpark", dspark), "dflash2": ("DFlash2", dflash2)}


def kind_of(name: str) -> str:
    return re.split("[ ,]", name)[0]


def library_head(name: str) -> Any:
    """A head of the library's own making, with random weights."""
    torch.manual_seed(0)
    layer = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=TARGET_HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=64,
    )
    layer._attn_implementation = "eager"
    kind, module = MODULES[kind_of(name)]
    make = getattr(module, f"{kind}DraftModel")
    few = {"draft_vocab_size": VOCAB, **CASES[name]}
    config = make.config_class(
        transformer_layer_config=layer, block_size=5, aux_hidden_state_layer_ids=TAPS, mask_token_id=VOCAB - 1, **few
    )
    model = make(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    if few["draft_vocab_size"] < VOCAB:
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[FEW] = True
        model.load_vocab_mappings(known, torch.tensor(FEW) - torch.arange(len(FEW)))
    return lend(model)


def lend(model: Any) -> Any:
    """Give the library's model the target's parts, as it would load them from the target's folder."""
    model.embed_tokens.weight.data.copy_(TARGET_EMBED)
    if not model.use_draft_vocab:
        model.lm_head.weight.data.copy_(TARGET_OUT)
    return model.eval()


@torch.no_grad()
def library_logits(model: Any, tokens: Tensor, taps: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Logits of each slot of the blocks under the anchors by the library's own forward pass, `[anchors, slots, …]`."""
    anchors = torch.tensor(ANCHORS)
    monkeypatch.setattr(dflash, "select_anchors", lambda *_: (anchors, torch.ones(len(anchors), dtype=torch.bool)))
    hidden, logits, *_, places = model._backbone_forward(
        taps.permute(1, 0, 2).reshape(1, LENGTH, -1),
        tokens[None],
        torch.ones(1, LENGTH),
        torch.zeros(1, LENGTH, TARGET_HIDDEN),
        torch.zeros(1, LENGTH, dtype=torch.int64),
        max_anchors=len(anchors),
    )
    logits, states = (part.view(len(anchors), model.block_size, -1) for part in (logits, hidden))
    first = not model.config.sample_from_anchor
    if getattr(model, "markov_head", None) is not None:
        given = tokens[places].view(len(anchors), -1)
        before = torch.cat([given[:, :1], given[:, :-1]], 1) if first else given
        if first:
            # In training its recurrence also passes the unused first row; drafting begins behind it.
            assert model.markov_head.head_type != "rnn"
        logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=states)
    if isinstance(model, dflash2.DFlash2DraftModel):
        before = model._predecessor_ids(tokens[None], places)
        candidates, scores = model.candidate_selector.select(logits, states, before)
        logits = logits.scatter(2, candidates, scores)
    return logits[:, 1:] if first else logits


@torch.no_grad()
def our_logits(draft: DraftModel, tokens: Tensor, taps: Tensor) -> Tensor:
    """The same by our head over a paged cache."""
    head, found = draft.head, []
    assert isinstance(head, BlockForm)
    scorer = head.edge_scorer
    for anchor in ANCHORS:
        features = head.feature_of(TargetOutput(taps[0, :anchor], list(taps[:, :anchor])))
        states = served_states(head, tokens[: anchor + 1].tolist(), features)[-head.config.num_slots :]
        logits = draft.readout(states).scores
        if scorer is not None:
            edges = (
                block_edges(scorer, tokens[None, anchor : anchor + len(states)], states[None]) @ scorer.successors.T
            )[0]
            best = logits.topk(min(scorer.candidates, logits.shape[1])).indices
            logits = logits.scatter_add(1, best, edges.gather(1, best))
        found.append(logits)
    return torch.stack(found)


def texts() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB - 1, (LENGTH,), generator=generator)
    return tokens, torch.randn(len(TAPS), LENGTH, TARGET_HIDDEN, generator=generator)


@pytest.mark.parametrize("name", CASES)
def test_heads_of_speculators_load_and_give_its_logits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = library_head(name)
    model.save_pretrained(tmp_path)
    loaded = load_head(tmp_path, PARTS_32, TORCH)
    assert loaded.description.label == MODULES[kind_of(name)][0]
    assert loaded.draft.head.taps == tuple(TAPS)
    expected = library_logits(model, *texts(), monkeypatch)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(our_logits(loaded.draft, *texts()), expected, rtol=0, atol=1e-4)


OURS: dict[str, Callable[[], Any]] = {
    "dflash": lambda: block(51, anchor_first=False, layer_ids=(1, 4)),
    "dspark": lambda: block(52, rank=4, kind="gated", tokens=FEW, confidence=True, layer_ids=(1, 4)),
}


@pytest.mark.parametrize("name", OURS)
def test_heads_of_ours_load_in_speculators_and_give_our_logits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = KINDS["dflash"].speculators(built(OURS[name](), dtype=torch.float32), None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    make = dspark.DSparkDraftModel if name == "dspark" else dflash.DFlashDraftModel
    # It would read them from the target's folder.
    monkeypatch.setattr(make, "load_verifier_weights", lambda _: None)
    settings = make.config_class.from_pretrained(tmp_path)
    settings.transformer_layer_config._attn_implementation = "eager"
    model = make.from_pretrained(tmp_path, config=settings)
    ours = load_head(tmp_path, PARTS_32, TORCH).draft
    expected = our_logits(ours, *texts())
    found = library_logits(lend(model.float()), *texts(), monkeypatch)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
