"""A small Llama as drafter: its trees against dense passes of transformers' model, and the checks of its folder."""

import math
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from specdec import LLM, SamplingParams
from specdec.building.checkpoint_checks import check_draft
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftRow, Proposal
from specdec.draft_heads.drafting.model_drafter import ModelDrafter
from specdec.draft_heads.heads.draft_head import DraftModel
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.models.llama import load_llama, read_llama_config
from specdec.models.llama_draft import draft_of, holds_llama
from specdec.verify.sampling import Context, Sampling
from specdec.verify.tree_batch import slots_of
from tests.draft_heads.dense_search import TokenPath, dense_search, paths_of
from tests.fakes import TINY, edit_json, save_random_eagle3, save_random_head, save_random_llama
from tests.kernel_sets import TORCH
from tests.profiles import num_cases
from tests.specdec.saved_llama import edit_tensors
from tests.specdec.world import World
from tests.strategies import draft_shapes, seeds, shuffled_tables

CPU = torch.device("cpu")
VOCAB = TINY["vocab_size"]
MOST_TOKENS = 70
SMALL = {"hidden_size": 16, "head_dim": 8, "num_hidden_layers": 2}


class Small(NamedTuple):
    folder: Path
    dense: LlamaForCausalLM


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("small")
    return Small(folder, save_random_llama(folder, seed=3, **SMALL))


def load_draft(folder: Path) -> DraftModel:
    return draft_of(load_llama(folder, torch.float64, CPU, TORCH), folder, LlamaConfig.from_json(TINY).max_position)


def dense_tree(model: LlamaForCausalLM, row: DraftRow, shape: DraftShape) -> set[TokenPath]:
    @cache
    def logits_after(path: TokenPath) -> Tensor:
        logits: Tensor = model(torch.tensor([[*row.token_ids, *path]])).logits
        return logits[0, -1]

    return dense_search(logits_after, row, shape)


@pytest.mark.long
@settings(max_examples=num_cases(10))
@given(
    shape=draft_shapes(max_depth=4, max_branching=4, max_nodes=40),
    seed=seeds,
    temperatures=st.tuples(*[st.sampled_from([0.0, 0.0, 0.7])] * 3),
    sizes=st.tuples(*[st.integers(1, 30)] * 3),
    restarted=st.integers(0, 5),
)
@example(DraftShape(4, 4, 40), 0, (0.0, 0.7, 0.0), (1, 30, 8), 1)
@example(DraftShape(4, 4, 40, min_reach=0.3), 1, (0.0, 0.7, 0.0), (3, 30, 1), 1)
@torch.no_grad()
def test_trees_equal_dense_passes_over_many_rounds(
    small: Small,
    shape: DraftShape,
    seed: int,
    temperatures: tuple[float, ...],
    sizes: tuple[int, ...],
    restarted: int,
) -> None:
    """Rows that read all, a part or nothing of what is known of them, from the very first token on."""
    draft = load_draft(small.folder)
    plan = shuffled_tables([MOST_TOKENS + shape.slots] * 3, 8, seed)
    llama = draft.head.llama
    kv = torch.full(
        (llama.num_layers, plan.num_blocks * 8, 2 * llama.num_kv_heads, llama.head_dim), torch.nan, dtype=torch.float64
    )
    drafter = ModelDrafter(draft.head, draft.readout, kv, None, 8, torch.float64, shape, Proposal.COUPLED, TORCH)
    chance = random.Random(seed)
    texts = [[chance.randrange(VOCAB) for _ in range(size)] for size in sizes]
    read = [0] * 3
    for number in range(4):
        rows = []
        for i, (table, temperature) in enumerate(zip(plan.tables, temperatures, strict=True)):
            nodes = chance.choice([0, shape.nodes, shape.nodes])
            draft_prefill_end = len(texts[i]) if nodes else chance.randint(0, len(texts[i]))
            context = Context(Sampling(temperature=temperature, seed=seed + i), texts[i], sizes[i])
            rows.append(DraftRow(table, read[i], draft_prefill_end, nodes, chance.choice([1, 2, 9, 9]), context))
        for i, (row, tree) in enumerate(zip(rows, drafter.propose(rows).read(), strict=True)):
            assert paths_of(tree) == dense_tree(small.dense, row, shape)
            read[i] = max(read[i], row.draft_prefill_end)
            texts[i] = texts[i] + [chance.randrange(VOCAB) for _ in range(chance.randint(1, 5))]
        if number == 1 and restarted < 3:
            # Its cache has gone.
            kv[:, slots_of(plan.tables[restarted], 0, MOST_TOKENS, 8)] = torch.nan
            read[restarted] = 0


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_drafter_that_is_the_target_is_accepted_to_the_end(world: World, temperature: float) -> None:
    llm = LLM(
        world.folder / "target",
        world.folder / "target",
        dtype="float64",
        shape=DraftShape(4, 1, 4),
        adaptive_drafts=False,
    )
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=41, ignore_eos=True)
    assert llm.engine.worker.cache.features is None
    for output in llm.generate([[5], [6, 7, 8], list(range(3, 40))], params, use_tqdm=False):
        assert output.stats.tau == 5.0
        assert output.stats.accepted_per_depth == [8, 8, 8, 8]


@pytest.mark.long
@pytest.mark.parametrize("model", [(MistralConfig, MistralForCausalLM), (Qwen2Config, Qwen2ForCausalLM)])
def test_other_families_draft_too(world: World, tmp_path: Path, model: tuple[Any, Any]) -> None:
    torch.manual_seed(2)
    model[1](model[0](**{**TINY, "hidden_size": 16, "initializer_range": 0.3})).save_pretrained(tmp_path)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    outputs = [
        LLM(world.folder / "target", draft, dtype="float64", adaptive_drafts=False).generate([[5, 6, 7]], params)[0]
        for draft in (None, tmp_path)
    ]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[1].stats.tau > 1


def test_a_llama_is_told_from_a_head(small: Small, tmp_path: Path) -> None:
    save_random_head(tmp_path / "head")
    save_random_eagle3(tmp_path / "head3")
    torch_file = tmp_path / "bin"
    torch_file.mkdir()
    shutil.copy(small.folder / "config.json", torch_file)
    torch.save(load_file(small.folder / "model.safetensors"), torch_file / "pytorch_model.bin")
    assert [holds_llama(small.folder), holds_llama(torch_file)] == [True, True]
    assert [holds_llama(tmp_path / name) for name in ("head", "head3", "nothing")] == [False] * 3


def _another_size(folder: Path, target: Path) -> None:
    save_random_llama(folder, vocab_size=VOCAB + 3)
    assert target.is_dir()


def _another_token(folder: Path, target: Path) -> None:
    save_random_llama(folder)
    text = (target / "tokenizer.json").read_text(encoding="utf-8")
    assert '"ab"' in text
    (folder / "tokenizer.json").write_text(text.replace('"ab"', '"xyz"'), encoding="utf-8")


def _no_json(folder: Path, target: Path) -> None:
    save_random_llama(folder)
    assert target.is_dir()
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")


def _another_family(folder: Path, target: Path) -> None:
    save_random_llama(folder)
    assert target.is_dir()
    edit_json(folder / "config.json", model_type="gemma")


def _not_finite(folder: Path, target: Path) -> None:
    save_random_llama(folder)
    assert target.is_dir()
    edit_tensors(folder, lambda tensors: tensors["model.norm.weight"][:1].fill_(-math.inf))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_not_finite, "model.norm.weight holds -inf; weights must be finite numbers of float64"),
        (_another_size, "the draft model's vocab_size 100 does not fit the target's 97"),
        (_another_token, r"its tokenizer is not the target's: token \d+ is 'xyz', the target's is 'ab'; take a draft"),
        (_no_json, "tokenizer.json: cannot be read: "),
        (_another_family, r"Gemma \(model_type 'gemma'\) is not supported"),
    ],
)
def test_models_that_cannot_draft_are_refused(
    world: World, tmp_path: Path, spoil: Callable[[Path, Path], None], message: str
) -> None:
    target = world.folder / "target"
    spoil(tmp_path, target)
    with pytest.raises(CheckpointError, match=message) as raised:
        LLM(target, tmp_path, dtype="float64")
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("more", [3, -1])
def test_a_model_of_the_same_tokens_may_have_another_number_of_rows(world: World, tmp_path: Path, more: int) -> None:
    """Qwen2.5's models pad 151,665 tokens to 151,936 or 152,064 rows. A drafter that is the target stays as good."""
    target, size = world.folder / "target", VOCAB + more
    shutil.copytree(target, tmp_path, dirs_exist_ok=True)

    def resize(tensors: dict[str, Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            # A row too many would win against all others.
            tensors[name] = torch.cat([tensors[name], 9 * torch.ones(3, tensors[name].shape[1])])[:size]

    edit_tensors(tmp_path, resize)
    edit_json(tmp_path / "config.json", vocab_size=size)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=41, ignore_eos=True)
    shape = DraftShape(4, 1, 4)
    plain, drafted = (
        LLM(target, draft, dtype="float64", shape=shape, adaptive_drafts=False).generate([[5, 6, 7]], params)[0]
        for draft in (None, tmp_path)
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.tau == 5.0 if more > 0 else drafted.stats.tau > 3
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=f"vocab_size {size} does not fit the target's 97; take one whose"):
        LLM(target, tmp_path, dtype="float64")


def test_the_same_tokenizer_is_taken(world: World, tmp_path: Path) -> None:
    save_random_llama(tmp_path, seed=3, **SMALL)
    shutil.copy(world.folder / "target" / "tokenizer.json", tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() == VOCAB
    target = world.folder / "target"
    assert check_draft(tmp_path, target, read_llama_config(target)) == "draft_model"


def test_it_has_no_more_positions_than_its_target(tmp_path: Path) -> None:
    save_random_llama(tmp_path)
    edit_json(tmp_path / "config.json", max_position_embeddings=10**9)
    draft = load_draft(tmp_path)
    assert draft.head.llama.max_position == LlamaConfig.from_json(TINY).max_position
