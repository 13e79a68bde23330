"""A broken head is refused in one line that names what is wrong."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.draft_heads.formats.head_kinds import describe_folder
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from tests.block_formats import BLOCK_FORMATS
from tests.checkpoints import FEW, TARGET_HIDDEN, VOCAB, Fixture
from tests.draft_heads.loading import load
from tests.head_formats import FORMATS

Damage = Callable[[Fixture], Any]
IDS = "eagle_aux_hidden_state_layer_ids"


def lose(name: str) -> Damage:
    return lambda fixture: fixture.tensors.pop(name)


def gain(name: str, *shape: int) -> Damage:
    return lambda fixture: fixture.tensors.update({name: torch.zeros(shape)})


def turn(name: str) -> Damage:
    return lambda fixture: fixture.tensors.update({name: fixture.tensors[name].T.contiguous()})


def quantise(name: str) -> Damage:
    return lambda fixture: fixture.tensors.update({name: fixture.tensors[name].to(torch.int8)})


def say(**keys: Any) -> Damage:
    return lambda fixture: fixture.config.update(keys)


def say_inside(**keys: Any) -> Damage:
    return lambda fixture: fixture.config["transformer_layer_config"].update(keys)


def put(name: str, values: list[int]) -> Damage:
    return lambda fixture: fixture.tensors.update({name: torch.tensor(values)})


def keep(tokens: list[int]) -> Damage:
    """A `t2d` of other tokens."""
    return put("t2d", [int(token in tokens) for token in range(VOCAB)])


def both(first: Damage, second: Damage) -> Damage:
    return lambda fixture: (first(fixture), second(fixture))


def wrap(prefix: str) -> Damage:
    """Put all tensors under one prefix."""

    def damage(fixture: Fixture) -> None:
        fixture.tensors = {f"{prefix}{name}": tensor for name, tensor in fixture.tensors.items()}

    return damage


OFFSETS = [token - i for i, token in enumerate(FEW)]
NO_MASK = lose("t2d")
FAULTS: dict[str, list[tuple[Damage, str]]] = {
    "official_eagle": [
        (lose("fc.weight"), "no tensor 'hidden_norm.weight' of EAGLE-3, 'markov_head.markov_w1.weight' of "),
        (quantise("fc.weight"), "fc.weight is stored as int8"),
        (turn("fc.weight"), "fc.weight has shape [48, 24], config.json says [24, 48]: it is transposed"),
        (gain("norm.weight", TARGET_HIDDEN), "unexpected tensors: norm.weight"),
        (gain("lm_head.weight", VOCAB, TARGET_HIDDEN), "unexpected tensors: lm_head.weight"),
        (say(vocab_size=54), "the head's vocab_size 54 does not fit the target's 53"),
    ],
    "vllm_eagle": [(say(hidden_size=32), "the head reads states of size 32, but the target's hidden_size is 24")],
    "vllm_eagle_nested": [
        (lose("token_map"), "lm_head.weight has rows for 7 tokens, but there is no token_map to tell which")
    ],
    "vllm_eagle_mapped": [
        (put("token_map", [4, 4, 31]), "token_map names a token twice"),
        (put("token_map", [4, 53, 31]), "token_map holds a value that is no token id; ids are 0 to 52"),
        (put("token_map", [4, 5, 6, 7]), "token_map holds 4 tokens, config.json says 3"),
        (say(eagle_fc_bias=True), "missing tensors: fc.bias"),
    ],
    "official_eagle3": [
        (lose("d2t"), "missing tensor 'd2t', which a draft vocabulary of 12 tokens needs"),
        (put("d2t", FEW), "d2t, 0 to 52, must hold target id minus draft id; it holds ids themselves"),
        (both(NO_MASK, put("d2t", FEW)), "it holds ids themselves"),
        (put("d2t", list(range(12))), "d2t, 0 to 11, must hold target id minus draft id; it holds ids themselves"),
        (put("d2t", OFFSETS[:-1]), "d2t has shape [11], config.json says draft_vocab_size 12"),
        (both(NO_MASK, put("d2t", [*OFFSETS[:5], 0, *OFFSETS[6:]])), "an ascending map into 53 tokens; it does not"),
        (both(NO_MASK, put("d2t", [*OFFSETS[:-1], VOCAB])), "an ascending map into 53 tokens; it does not"),
        (keep([*FEW[:-1], 50]), "d2t and t2d name different tokens; d2t, 0 to 41, must hold"),
        (put("d2t", [FEW[1], FEW[0] - 1, *OFFSETS[2:]]), "d2t names the tokens of t2d in another order; sort it, with"),
        (wrap("draft_model."), "others (draft_model.d2t, draft_model.fc.weight, draft_model.lm_head.weight)"),
        (keep(FEW[:-1]), "t2d keeps 11 tokens, config.json says draft_vocab_size 12"),
        (put("t2d", [1] * 54), "t2d has shape [54], config.json says vocab_size 53"),
        (say(draft_vocab_size=13), "d2t has shape [12], config.json says draft_vocab_size 13"),
        (say(draft_vocab_size="12"), "config.json: draft_vocab_size = '12' must be a positive whole number"),
        (say(target_hidden_size=48), "the head reads states of size 48, but the target's hidden_size is 24"),
        (say(vocab_size=54), "t2d has shape [53], config.json says vocab_size 54"),
        (turn("fc.weight"), "fc.weight has shape [72, 24], config.json says [24, 72]: it is transposed"),
        (turn("lm_head.weight"), "lm_head.weight has shape [24, 12], config.json says [12, 24]: it is transposed"),
        (gain("lm_head.weight", VOCAB, TARGET_HIDDEN), "lm_head.weight has shape [53, 24], config.json says [12, 24]"),
        (lose("fc.weight"), "missing tensors: fc.weight"),
        (lose("lm_head.weight"), "missing tensors: lm_head.weight"),
        (lose("norm.weight"), "missing tensors: norm.weight"),
        (lose("midlayer.hidden_norm.weight"), "missing tensors: midlayer.hidden_norm.weight"),
        (say(fc_norm=True), "missing tensors: fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight"),
        (say(norm_before_fc=True), "missing tensors: input_norm.weight"),
        (say(num_hidden_layers="2"), "config.json: num_hidden_layers = '2' must be a positive whole number"),
        (gain("midlayer.extra.weight", 3), "unexpected tensors: midlayer.extra.weight"),
        (gain("layers.0.hidden_norm.weight", 24), "'layers.0.hidden_norm.weight' have the same meaning"),
        (say(num_attention_heads=2), "midlayer.self_attn.k_proj.weight has shape [12, 48], config.json says [24, 48]"),
        (lambda fixture: fixture.config.pop("vocab_size"), "config.json: 'vocab_size' is missing"),
        (say(hidden_act="gelu"), "config.json: hidden_act = 'gelu' is not supported"),
    ],
    "official_eagle3_own_size": [(lose("embed_tokens.weight"), "missing tensors: embed_tokens.weight")],
    "official_eagle3_whole": [
        (say(vocab_size=54, draft_vocab_size=54), "the head's vocab_size 54 does not fit the target's 53"),
        (say(norm_before_residual="false"), "config.json: norm_before_residual = 'false' must be true or false"),
        (say(norm_before_fc="true"), "config.json: norm_before_fc = 'true' must be true or false"),
        (say(use_aux_norm=1), "config.json: use_aux_norm = 1 must be true or false"),
        (say(norm_output="no"), "config.json: norm_output = 'no' must be true or false"),
        (both(say(draft_vocab_size=None), put("d2t", [])), "config.json: draft_vocab_size = 0 must be a positive"),
    ],
    "specforge_eagle3": [
        (say(eagle_config={IDS: [-2, 3, 4]}), f"{IDS} = [-2, 3, 4] are no layers of a target that has 8"),
        (say(eagle_config={IDS: [1, 4]}), f"fc.weight reads 3 states of size 24; {IDS} = [1, 4] names 2 layers"),
        (say(**{IDS: [1, 2, 6]}), f"config.json has two {IDS}, [1, 2, 6] and in eagle_config [1, 3, 4]"),
        (say(eagle_config=[1, 2, 3]), "config.json: eagle_config = [1, 2, 3] must be an object"),
        (say(rope_scaling={"rope_type": "mrope"}), "rope type 'mrope' is not supported"),
        (say(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state is false"),
    ],
    "specforge_eagle31": [(lose("fc_norm.1.weight"), "missing tensors: fc_norm.1.weight")],
    "sglang_eagle31_aliases": [(lose("aux_norm_mid.weight"), "missing tensors: aux_norm_mid.weight")],
    "sglang_eagle3_deep": [
        (say(eagle_config={}), f"fc.weight reads 4 states of size 24; config.json must say of which layers, by {IDS}"),
        (gain("layers.1.input_layernorm.weight", 24), "unexpected tensors: layers.1.hidden_norm.weight"),
    ],
    "vllm_eagle3": [
        (say(num_hidden_layers=3), "missing tensors: layers.2.input_layernorm.weight"),
        (lose("model.layers.1.self_attn.v_proj.weight"), "missing tensors: layers.1.self_attn.v_proj.weight"),
        (gain("layers.2.mlp.up_proj.weight", 2), "unexpected tensors: layers.2.mlp.up_proj.weight"),
    ],
    "speculators_eagle3": [
        (say(**{IDS: [3, 4, 9]}), f"{IDS} = [3, 4, 9] are no layers of a target that has 8"),
        (say(**{IDS: [1, 2, 3, 4]}), f"fc.weight reads 3 states of size 24; {IDS} = [1, 2, 3, 4] names 4 layers"),
        (say(**{IDS: [3, 3, 8]}), f"{IDS} = [3, 3, 8] names a layer twice"),
        (say(**{IDS: "2,4,5"}), f"{IDS} = '2,4,5' must be a list of layers"),
        (turn("fc.weight"), "fc.weight has shape [72, 24], config.json says [24, 72]: it is transposed"),
        (lose("embed_tokens.weight"), "missing tensors: embed_tokens.weight"),
        (say_inside(model_type="qwen3"), "layers.0.self_attn.k_norm.weight, layers.0.self_attn.q_norm.weight"),
        (say_inside(sliding_window="wide"), "sliding_window = 'wide' must be a positive whole number"),
        (say_inside(layer_types=["linear_attention"]), "layer_types ['linear_attention'] are not supported"),
        (say(transformer_layer_config=[1]), "config.json: transformer_layer_config = [1] must be an object"),
        (
            say(speculators_model_type="eagle"),
            "speculators_model_type is 'eagle', the tensors are those of an EAGLE-3.1",
        ),
    ],
}
CASES = [(name, damage, message) for name, cases in FAULTS.items() for damage, message in cases]
WITHOUT_TARGET = [case for case in CASES if "target's" not in case[2] and "no layers of" not in case[2]]


def ids(cases: list[tuple[str, Damage, str]]) -> list[str]:
    """Return an id for each case, the same in every process."""
    return [f"{name}: {message}" for name, _, message in cases]


def refusal(read: Callable[[Path], Any], fixture: Fixture, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(fixture.write(folder))
    said = str(caught.value)
    assert "\n" not in said
    return said.removeprefix(f"{folder}: ")


@pytest.mark.parametrize(("name", "damage", "message"), CASES, ids=ids(CASES))
def test_fault_is_named_in_one_line(name: str, damage: Damage, message: str, tmp_path: Path) -> None:
    fixture = FORMATS[name]()
    load(fixture.write(tmp_path / "whole"))
    damage(fixture)
    assert message in refusal(load, fixture, tmp_path / "broken")


@pytest.mark.parametrize(("name", "damage", "message"), WITHOUT_TARGET, ids=ids(WITHOUT_TARGET))
def test_fault_shows_without_a_target(name: str, damage: Damage, message: str, tmp_path: Path) -> None:
    fixture = FORMATS[name]()
    damage(fixture)
    assert message in refusal(describe_folder, fixture, tmp_path)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("read", [load, describe_folder])
def test_unreadable_weights_are_one_line(read: Callable[[Path], Any], file: str, tmp_path: Path) -> None:
    FORMATS["official_eagle3"]().write(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / file).write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match=rf"^{tmp_path / file}: cannot be read: [^\n]*$"):
        read(tmp_path)


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    FORMATS["official_eagle3"]().write(tmp_path)
    torch.save({"steps": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: cannot be read: not a dictionary of tensors"):
        load(tmp_path)


@pytest.mark.parametrize("name", [*FORMATS, *BLOCK_FORMATS])
def test_weights_that_are_not_finite_are_named(name: str, tmp_path: Path) -> None:
    """Such a head would draft nothing, or nonsense, and no output would tell."""
    make = (FORMATS | BLOCK_FORMATS)[name]
    load(make().write(tmp_path / "whole"))
    for number, tensor in enumerate(sorted(make().tensors)):
        fixture = make()
        fixture.tensors[tensor] = weight = fixture.tensors[tensor].clone(memory_format=torch.contiguous_format)
        if not weight.is_floating_point():
            continue
        value = (math.nan, math.inf, -math.inf)[number % 3]
        weight.view(-1)[number % weight.numel()] = value
        folder = fixture.write(tmp_path / str(number))
        assert refusal(load, fixture, folder).startswith(f"{tensor} holds {value}; weights must be finite numbers of ")


def test_weights_beyond_the_range_of_their_type_are_named(tmp_path: Path) -> None:
    fixture = FORMATS["official_eagle3"]()
    fixture.tensors["fc.weight"] = fixture.tensors["fc.weight"].float()
    fixture.tensors["fc.weight"][1, 2] = -1e6
    load(fixture.write(tmp_path))
    head = describe_folder(tmp_path)
    head.check_finite(torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"^fc.weight holds -1e\+06; weights must be finite numbers of float16"):
        head.check_finite(torch.float16)


FOREIGN: list[tuple[str, Damage, str]] = [
    ("vllm_eagle3", gain("mask_hidden", 1, 1, 72), "a P-EAGLE head (tensor 'mask_hidden')"),
    ("speculators_eagle3", say(speculators_model_type="peagle"), "a P-EAGLE head ('peagle' in config.json)"),
    ("specforge_eagle3", say(architectures=["PEagleDraftModel"]), "a P-EAGLE head ('PEagle' in config.json)"),
    ("official_eagle3", say(architectures=["LiLiCorrModel"]), "a LiLiCorr head ('LiLiCorr' in config.json)"),
    ("official_eagle3", say(medusa_num_heads=4), "a Medusa head (medusa_num_heads in config.json)"),
    ("official_eagle3", gain("0.0.linear.weight", 2, 2), "a Medusa head (tensor '0.0.linear.weight')"),
    ("official_eagle3", gain("model.layers.61.eh_proj.weight", 2), "an MTP head (tensor 'model.layers.61.eh_proj"),
    ("vllm_eagle", say(add_para_norm=True), "an EAGLE head with norms before fc (HASS) (add_para_norm in config.json)"),
    ("speculators_eagle", gain("embedding_layernorm.weight", 24), "an EAGLE head with norms before fc (HASS) (tensor"),
    ("official_eagle", say(model_type="mixtral", num_local_experts=8), "an EAGLE head with experts (num_local_experts"),
    ("official_eagle", gain("layers.0.mlp.experts.0.w1.weight", 2), "an EAGLE head with experts (tensor"),
    ("official_eagle3", gain("midlayer.self_attn.kv_a_proj_with_mqa.weight", 2), "an EAGLE head with latent attention"),
    ("official_eagle3", gain("midlayer.mlp.up_proj.weight_scale", 2), "a quantised EAGLE head (tensor 'midlayer.mlp"),
]


@pytest.mark.parametrize("read", [load, describe_folder])
@pytest.mark.parametrize(("name", "change", "message"), FOREIGN, ids=ids(FOREIGN))
def test_head_of_another_kind_is_refused_by_its_name(
    read: Callable[[Path], Any], name: str, change: Damage, message: str, tmp_path: Path
) -> None:
    fixture = FORMATS[name]()
    change(fixture)
    said = refusal(read, fixture, tmp_path)
    assert said.startswith(message)
    assert " is not supported" in said
    assert said.endswith("; the kinds of heads that are supported: EAGLE-3, DSpark, Domino, DFlash2, DFlash, EAGLE-1/2")


HOSTILE: list[tuple[str, Damage]] = [
    ("official_eagle", say(vocab_size=10**9)),
    ("official_eagle3", say(vocab_size=10**9)),
    ("official_eagle3", say(draft_vocab_size=10**9)),
    ("official_eagle3_whole", say(vocab_size=10**15, draft_vocab_size=10**15)),
    ("official_eagle", say(hidden_size=4 * 10**12)),
    ("official_eagle3", say(intermediate_size=10**30)),
    ("official_eagle", say(num_hidden_layers=10**9)),
    ("vllm_eagle3", say(num_hidden_layers=10**9)),
    ("official_eagle3", say(target_hidden_size=10**15)),
    ("official_eagle3", lambda fixture: fixture.tensors.update(d2t=torch.tensor(OFFSETS) + 0.5)),
]


@pytest.mark.parametrize("read", [load, describe_folder], ids=["load", "describe"])
@pytest.mark.parametrize("case", range(len(HOSTILE)))
def test_absurd_sizes_are_refused_at_once(read: Callable[[Path], Any], case: int, tmp_path: Path) -> None:
    """Without a tensor of such a size, or a million layers, being made."""
    name, damage = HOSTILE[case]
    fixture = FORMATS[name]()
    damage(fixture)
    assert refusal(read, fixture, tmp_path)


@pytest.mark.parametrize("read", [load, describe_folder], ids=["load", "describe"])
def test_a_config_nested_too_deep_is_one_line(read: Callable[[Path], Any], tmp_path: Path) -> None:
    FORMATS["official_eagle3"]().write(tmp_path)
    (tmp_path / "config.json").write_text('{"a": ' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json: [^\n]*$"):
        read(tmp_path)


def test_a_head_has_no_more_positions_than_its_target(tmp_path: Path) -> None:
    """The rotary table has a row per position, and must fit into memory whatever config.json says."""
    fixture = FORMATS["official_eagle3"]()
    fixture.config["max_position_embeddings"] = 10**9
    assert load(fixture.write(tmp_path)).draft.head.llama.max_position == 64
    assert describe_folder(tmp_path).config.llama.max_position == 10**9
