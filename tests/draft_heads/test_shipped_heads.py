"""The heads under heads/: small, with cards that name their data, and fit for a target of their model's sizes."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import LLM, SamplingParams
from specdec.draft_heads.formats.head_kinds import describe_folder

pytestmark = pytest.mark.slow

HEADS = sorted(path.parent for path in (Path(__file__).parents[2] / "heads").glob("*/config.json"))
MOST_BYTES = 30e6
# Of SmolLM2-135M-Instruct, but for the inner size, on which no head depends.
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=64,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


def test_the_heads_are_found() -> None:
    assert [folder.name for folder in HEADS] == ["smollm2-135m-instruct-eagle3"]


@pytest.mark.parametrize("folder", HEADS, ids=lambda folder: folder.name)
def test_a_head_is_small_and_its_card_names_model_and_data(folder: Path) -> None:
    assert sum(file.stat().st_size for file in folder.iterdir()) <= MOST_BYTES
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in card
    for source in ("Apache-2.0", "Schema-Guided Dialogue", "GSM8K", "CC BY-SA 4.0", "Python Software Foundation"):
        assert source in card
    assert describe_folder(folder).kind.name == folder.name.rsplit("-", 1)[1]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    LlamaForCausalLM(SMOLLM2).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("folder", HEADS, ids=lambda folder: folder.name)
def test_a_head_drafts_beside_a_target_of_its_models_sizes(folder: Path, target: Path) -> None:
    """Random weights agree with no draft; the tokens are those of plain decoding."""
    prompt, params = [5, 17, 300, 49_000], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    plain = LLM(target, None, dtype="float32").generate(prompt, params)[0].outputs[0].token_ids
    output = LLM(target, folder, dtype="float32", adaptive_drafts=False).generate(prompt, params)[0].outputs[0]
    assert output.token_ids == plain
    assert output.stats.drafted > 0
