"""Block heads of every format: recognised by their tensors, loaded, equal to their definitions, saved, refused."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec.draft_heads.formats.block_settings import block_rows
from specdec.draft_heads.formats.head_kind import Source
from specdec.draft_heads.formats.head_kinds import KINDS, describe_folder
from specdec.draft_heads.heads.block_head import BlockForm
from specdec.draft_heads.heads.draft_head import TargetOutput
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from tests.block_formats import BLOCK_FORMATS
from tests.block_heads import Block, path_logits, slots, states
from tests.checkpoints import TARGET_HIDDEN, TARGET_LAYERS, VOCAB, Fixture
from tests.draft_heads.built_blocks import built
from tests.draft_heads.loading import load
from tests.draft_heads.served_block import served_states

KINDS_FOUND = {
    "zlab_dflash": ("DFlash", "z-lab and SpecForge"),
    "jetspec": ("DFlash", "z-lab and SpecForge"),
    "renamed_dflash": ("DFlash", "z-lab and SpecForge"),
    "deepspec_dspark": ("DSpark", "DeepSpec"),
    "specforge_dspark": ("DSpark", "z-lab and SpecForge"),
    "speculators_dflash": ("DFlash", "speculators"),
    "speculators_dspark": ("DSpark", "speculators"),
    "speculators_dspark_whole": ("DSpark", "speculators"),
    "specforge_domino": ("Domino", "z-lab and SpecForge"),
    "zlab_dflash2": ("DFlash2", "z-lab and SpecForge"),
    "speculators_dflash2": ("DFlash2", "speculators"),
}


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_format_is_told_by_its_tensors(name: str, tmp_path: Path) -> None:
    fixture = BLOCK_FORMATS[name]()
    found, head = describe_folder(fixture.write(tmp_path)), fixture.head
    assert isinstance(head, Block)
    assert (found.label, str(found.settings.layout)) == KINDS_FOUND[name]
    assert found.settings.verifier == fixture.facts.get("verifier")
    assert found.config.llama.max_position == 64
    assert found.config.llama.windows == fixture.head.windows
    assert (found.config.anchor_first, found.config.causal) == (head.anchor_first, head.causal)
    assert (found.embedding == Source.FILE) == ("embed_tokens.weight" in fixture.tensors)


@torch.no_grad()
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_rows_of_a_pass_that_no_tree_makes_fewer(name: str, tmp_path: Path) -> None:
    """Read from config.json alone, before the head is loaded."""
    fixture = BLOCK_FORMATS[name]()
    head = fixture.head
    assert isinstance(head, Block)
    assert block_rows(fixture.write(tmp_path)) == (None if all(head.causal) else head.size)


def test_rows_where_only_the_first_layer_is_causal(tmp_path: Path) -> None:
    fixture = BLOCK_FORMATS["zlab_dflash"]()
    fixture.config["layer_types"] = ["sliding_attention", "full_attention"]
    assert block_rows(fixture.write(tmp_path)) == fixture.config["block_size"]


def same_logits(head: BlockForm, block: Block, readout: torch.Tensor) -> None:
    """Compare the logits after a random path with those of the description."""
    generator = random.Random(3)
    tokens = [generator.randrange(VOCAB) for _ in range(11)]
    torch.manual_seed(1)
    final, *layers = torch.randn(2 + TARGET_LAYERS, len(tokens) - 1, TARGET_HIDDEN, dtype=torch.float64)
    assert head.taps == tuple(layer + 1 for layer in block.layer_ids)
    features = head.feature_of(TargetOutput(final, [layers[tap] for tap in head.taps]))
    found = slots(block, served_states(head, tokens, features))
    wanted = slots(block, states(block, tokens, [layers[layer + 1] for layer in block.layer_ids]))
    assert len(found) == head.config.num_slots
    path = [generator.randrange(VOCAB) for _ in range(len(found) - 1)]
    scorer = head.edge_scorer
    state = torch.zeros(1, scorer.state_size if scorer else 0, dtype=torch.float64)
    for slot, token in enumerate([tokens[-1], *path]):
        logits = readout @ found[slot]
        if scorer is not None:
            vectors, state = scorer(torch.tensor([token]), found[slot : slot + 1], state)
            if slot >= scorer.first_slot:
                best = logits.topk(min(scorer.candidates, len(logits))).indices
                logits = logits.index_add(0, best, scorer.successors[best] @ vectors[0])
        torch.testing.assert_close(logits, path_logits(block, wanted, tokens[-1], path[:slot]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_logits_equal_the_definition(name: str, tmp_path: Path) -> None:
    fixture = BLOCK_FORMATS[name]()
    draft = load(fixture.write(tmp_path)).draft
    assert isinstance(draft.head, BlockForm)
    assert isinstance(fixture.head, Block)
    tokens = draft.readout.tokens  # type: ignore[attr-defined]
    assert (None if tokens is None else tokens.tolist()) == fixture.head.tokens
    same_logits(draft.head, fixture.head, draft.readout.projection.weight)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [name for name in BLOCK_FORMATS if name != "speculators_dflash"])
def test_a_saved_head_is_the_same(name: str, tmp_path: Path) -> None:
    fixture = BLOCK_FORMATS[name]()
    loaded = load(fixture.write(tmp_path / "given"))
    kind = loaded.description.kind
    assert kind is KINDS[kind.name]
    saved = built(fixture.head, dtype=torch.float32)  # type: ignore[arg-type]
    kind.save(saved, tmp_path / "saved", {"num_target_layers": TARGET_LAYERS}, torch.float16)
    again = load(tmp_path / "saved")
    assert isinstance(again.draft.head, BlockForm)
    assert isinstance(fixture.head, Block)
    assert again.draft.head.config == saved.config
    same_logits(again.draft.head, fixture.head, again.draft.readout.projection.weight)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["zlab_dflash", "specforge_dspark", "speculators_dspark"])
def test_a_head_in_speculators_layout_is_the_same(name: str, tmp_path: Path) -> None:
    head = BLOCK_FORMATS[name]().head
    config, tensors = KINDS["dflash"].speculators(built(head, dtype=torch.float32), "org/target")  # type: ignore[arg-type]
    Fixture(config, tensors, head).write(tmp_path)
    again = load(tmp_path)
    assert (str(again.description.settings.layout), again.description.settings.verifier) == (
        "speculators",
        "org/target",
    )
    assert isinstance(again.draft.head, BlockForm)
    assert isinstance(head, Block)
    same_logits(again.draft.head, head, again.draft.readout.projection.weight)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "reason"), [("jetspec", "causal"), ("renamed_dflash", "norms of queries")])
def test_settings_without_a_place_in_speculators_layout_are_refused(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        KINDS["dflash"].speculators(built(BLOCK_FORMATS[name]().head), None)  # type: ignore[arg-type]


def say(**settings: object) -> Callable[[Fixture], None]:
    def change(fixture: Fixture) -> None:
        place = fixture.config.get("dflash_config", fixture.config)
        place.update(settings)

    return change


def gain(name: str, *shape: int) -> Callable[[Fixture], None]:
    return lambda fixture: fixture.tensors.update({name: torch.zeros(shape)})


def lose(name: str) -> Callable[[Fixture], None]:
    return lambda fixture: fixture.tensors.pop(name)


REFUSED: list[tuple[str, Callable[[Fixture], object], str]] = [
    (
        "zlab_dflash",
        gain("prefix_gru.weight_ih_l0", 3, 24),
        "missing tensors: embed_proj.0.weight, embed_proj.2",
    ),
    (
        "zlab_dflash",
        say(projector_type="domino"),
        "config.json names a domino head, but the tensors are those of",
    ),
    ("zlab_dflash", gain("candidate_selector.hidden_projection.weight", 1, 24), "missing tensors: candidate_selector."),
    (
        "zlab_dflash",
        gain("layers.0.mlp_conv.base_kernel", 2, 2, 24),
        "config.json: conv_group_size = 16 does not",
    ),
    ("zlab_dflash2", say(conv_kernel_size=2), "layers.0.attention_conv.base_kernel has shape [2, 3, 24], config.json"),
    ("zlab_dflash2", say(selector_top_k=65), "config.json: selector_top_k = 65 is not supported; it may be at most 64"),
    ("zlab_dflash2", say(output_multiplier=0.5), "config.json: output_multiplier = 0.5 is not supported; only 1 is"),
    ("zlab_dflash2", lose("layers.0.mlp_conv.base_kernel"), "missing tensors: layers.0.mlp_conv.base_kernel"),
    ("specforge_domino", say(gru_hidden_dim=8), "config.json: gru_hidden_dim = 8, but the tensors are those of 5"),
    ("specforge_domino", say(pure_draft_prefix_len=-1), "config.json: pure_draft_prefix_len = -1 must be a whole"),
    ("zlab_dflash", gain("lilicorr.out.weight", 2, 2), "a LiLiCorr head (tensor 'lilicorr"),
    ("zlab_dflash", gain("mix_l.weight", 2, 2), "an XPress head (tensor 'mix_l.weight')"),
    ("zlab_dflash", gain("mask_hidden", 1, 1, 72), "a P-EAGLE head (tensor 'mask_hidden')"),
    ("zlab_dflash", gain("extra.weight", 2, 2), "unexpected tensors: extra.weight"),
    ("zlab_dflash", lose("layers.1.mlp.up_proj.weight"), "missing tensors: layers.1.mlp.up_proj.weight"),
    ("zlab_dflash", say(mask_token_id=VOCAB), f"config.json: mask_token_id = {VOCAB} must be an id below"),
    ("zlab_dflash", say(mask_token_id=None), "config.json: mask_token_id = None must be an id below"),
    ("zlab_dflash", say(target_layer_ids=None), "config.json names no layers of the target to read"),
    ("zlab_dflash", say(target_layer_ids=[1, 1]), "target_layer_ids = [1, 1] names a layer twice"),
    ("zlab_dflash", say(target_layer_ids=[1, 3]), "fc.weight has shape [24, 72], config.json says [24, 48]"),
    ("zlab_dflash", say(causal="yes"), "config.json: causal = 'yes' must be true or false"),
    ("zlab_dflash", lambda fixture: fixture.config.update(block_size=1), "config.json: block_size = 1 leaves no"),
    ("zlab_dflash", lambda fixture: fixture.config.update(draft_vocab_size=12), "missing tensor 'lm_head.weight'"),
    ("deepspec_dspark", say(markov_rank=4), "config.json: markov_rank = 4, but the tensors are those of 8"),
    ("deepspec_dspark", say(markov_head_type="rnn"), "config.json: markov_head_type = 'rnn', but the tensors"),
    ("deepspec_dspark", say(logit_scale=0.5), "config.json: logit_scale = 0.5 is not supported"),
    ("speculators_dspark", say(sample_from_anchor=False), "a Markov head of kind 'rnn' with sample_from_anchor false"),
    ("speculators_dspark", say(speculators_model_type="dflash"), "speculators_model_type is 'dflash', the tensors are"),
]


@pytest.mark.parametrize(("name", "damage", "message"), REFUSED, ids=[case[2][:40] for case in REFUSED])
def test_refusals_are_one_line(name: str, damage: Callable[[Fixture], object], message: str, tmp_path: Path) -> None:
    fixture = BLOCK_FORMATS[name]()
    damage(fixture)
    folder = fixture.write(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        describe_folder(folder)
    said = str(refused.value)
    assert said.startswith(f"{folder}: {message}"), said
    assert "\n" not in said


def test_layers_beyond_the_target_are_refused(tmp_path: Path) -> None:
    fixture = BLOCK_FORMATS["zlab_dflash"]()
    fixture.config["dflash_config"]["target_layer_ids"] = [1, 3, TARGET_LAYERS]
    with pytest.raises(CheckpointError, match=r"target_layer_ids = \[1, 3, 8\] are no layers of a target that has 8"):
        load(fixture.write(tmp_path))


def test_a_silent_config_is_settled_by_the_tensors_and_told(tmp_path: Path) -> None:
    for name, sentence in {
        "zlab_dflash": "row 0 predicts nothing, as in DFlash",
        "deepspec_dspark": "as in DSpark",
    }.items():
        folder = BLOCK_FORMATS[name]().write(tmp_path / name)
        assert "sample_from_anchor" not in json.loads((folder / "config.json").read_text())
        assert any(said.endswith(sentence) for said in describe_folder(folder).assumptions)
