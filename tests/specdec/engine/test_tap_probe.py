"""Layer ids that can be counted in two ways are settled by what the head then guesses."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import LLM, SamplingParams
from specdec.building.tap_probe import NEW_TOKENS, QUESTIONS, TapProbe, prompts_for, settle_taps
from specdec.draft_heads.formats.head_kind import LoadedHead
from specdec.draft_heads.formats.head_kinds import KINDS, load_head
from specdec.draft_heads.formats.tap_ids import KEY
from specdec.draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.models.llama import LlamaModel, load_llama
from tests.checkpoints import TARGET_HIDDEN, TARGET_LAYERS, VOCAB
from tests.draft_heads.dense_head import DenseHead
from tests.fakes import TINY, edit_json, save_random_llama
from tests.head_formats import FORMATS
from tests.kernel_sets import TORCH
from tests.specdec.tiny_checkpoints import Tiny

CPU = torch.device("cpu")
IDS = [1, 3, 6]
INPUTS, OUTPUTS = (1, 3, 6), (2, 4, 7)


class Ambiguous(NamedTuple):
    """A target and a head whose `IDS` its config.json does not explain."""

    model: LlamaModel
    target: Path
    head: Path

    def load(self) -> LoadedHead:
        return load_head(self.head, self.model.parts, TORCH)


Make = Callable[..., Ambiguous]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """The head guesses all that the target says if it reads `trained_on`."""

    def build(trained_on: tuple[int, ...]) -> Ambiguous:
        save_random_llama(tmp_path / "target", num_hidden_layers=8, seed=5)
        model = load_llama(tmp_path / "target", torch.float64, CPU, TORCH)
        torch.manual_seed(1)
        sizes = {**TINY, "num_hidden_layers": 1, "hidden_size": 256, "head_dim": 8}
        config = Eagle3Config(LlamaConfig.from_json(sizes), trained_on, TINY["hidden_size"], TINY["vocab_size"])
        head = Eagle3Head(config)
        for parameter in head.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
        folder = tmp_path / "head"
        KINDS["eagle3"].save(head, folder, {})

        # Its output matrix is the least one by which its states tell the probe's texts.
        made = Ambiguous(model, tmp_path / "target", folder)
        probe = TapProbe(model, prompts_for(made.target, TINY["vocab_size"]), TINY["max_position_embeddings"], TORCH)
        states, tokens = probe.guessing(made.load().draft.head)
        assert len(tokens) == probe.num_guessed == len(QUESTIONS) * NEW_TOKENS
        wanted = torch.nn.functional.one_hot(tokens, TINY["vocab_size"]).double()
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = torch.linalg.lstsq(states, wanted, driver="gelsd").solution.T.contiguous()
        save_file(tensors, folder / "model.safetensors")
        edit_json(folder / "config.json", **{KEY: None}, eagle_config={KEY: IDS})
        return made

    return build


@pytest.mark.long
@pytest.mark.parametrize("trained_on", [INPUTS, OUTPUTS])
def test_the_head_reads_what_it_guesses_best_by(
    make: Make, trained_on: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    made = make(trained_on)
    loaded = made.load()
    assert loaded.draft.head.taps == OUTPUTS
    assert loaded.other is not None
    assert loaded.other.head.taps == INPUTS
    with caplog.at_level(logging.WARNING, "specdec"):
        chosen = settle_taps(loaded, made.model, made.target, TORCH)
    assert chosen.head.taps == trained_on
    (record,) = caplog.records
    hits = {OUTPUTS: record.args[2], INPUTS: record.args[4]}  # type: ignore[index]
    assert hits.pop(trained_on) == len(QUESTIONS) * NEW_TOKENS
    assert max(hits.values()) < len(QUESTIONS) * NEW_TOKENS  # type: ignore[type-var]
    which = "first" if trained_on == OUTPUTS else "second"
    assert record.getMessage().startswith(f"the head's {KEY} can be counted in two ways; of 128 tokens it predicts ")
    assert record.getMessage().endswith(f"[1, 3, 6]: the {which} are used")


@pytest.mark.long
def test_the_engine_drafts_with_what_was_settled(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    made = make(INPUTS)
    with caplog.at_level(logging.WARNING, "specdec"):
        llm = LLM(made.target, made.head, dtype="float64", adaptive_drafts=False)
    assert llm.engine.worker.runner.head is not None
    assert llm.engine.worker.runner.head.taps == INPUTS
    assert len(caplog.records) == 1


@pytest.mark.long
def test_known_taps_are_not_probed(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    made = make(INPUTS)
    edit_json(made.head / "config.json", **{KEY: list(OUTPUTS)}, eagle_config={KEY: list(INPUTS)})
    with caplog.at_level(logging.WARNING, "specdec"):
        llm = LLM(made.target, made.head, dtype="float64", adaptive_drafts=False)
    assert llm.engine.worker.runner.head is not None
    assert llm.engine.worker.runner.head.taps == OUTPUTS
    assert not caplog.records


@pytest.mark.long
def test_answers_are_the_targets_own(make: Make) -> None:
    made = make(INPUTS)
    prompts = [[3], [5, 6, 7], list(range(20))]
    probe = TapProbe(made.model, prompts, 64, TORCH)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = LLM(made.target, draft=None, dtype="float64").generate(prompts, params, use_tqdm=False)
    assert probe.texts == [[*prompt, *output.token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
    assert probe.num_guessed == 3 * NEW_TOKENS - 1


@torch.no_grad()
def test_guesses_are_the_heads_before_each_token_of_the_answers(tmp_path: Path) -> None:
    """Against the head's definition over what transformers says of the same texts."""
    sizes = {"vocab_size": VOCAB, "hidden_size": TARGET_HIDDEN, "num_hidden_layers": TARGET_LAYERS}
    target = save_random_llama(tmp_path / "target", **sizes)
    fixture = FORMATS["official_eagle3_whole"]()
    model = load_llama(tmp_path / "target", torch.float64, CPU, TORCH)
    draft = load_head(fixture.write(tmp_path / "head"), model.parts, TORCH).draft
    prompts = [[3], [5, 6, 7, 8], [1, 2]]
    probe = TapProbe(model, prompts, 64, TORCH)
    states, tokens = probe.guessing(draft.head)
    expected, following = [], []
    for prompt, text in zip(prompts, probe.texts, strict=True):
        hidden = target(torch.tensor([text]), output_hidden_states=True).hidden_states
        dense = DenseHead(fixture.head)
        features = dense.features(hidden[-1][0], [state[0] for state in hidden])
        logits = dense.logits(dense.states(text[1:], features[:-1]))
        for at in range(max(len(prompt), 2), len(text)):
            # Row i of `states` is after token i + 1.
            expected.append(logits[at - 2])
            following.append(text[at])
    assert tokens.tolist() == following
    torch.testing.assert_close(draft.readout(states).full(), torch.stack(expected), rtol=1e-9, atol=1e-9)
    assert probe.hits(draft) == sum(row.argmax() == token for row, token in zip(expected, following, strict=True))


@pytest.mark.long
def test_long_prompts_are_cut_to_leave_room_for_answers(make: Make) -> None:
    probe = TapProbe(make(INPUTS).model, [list(range(50)), [4, 5]], 40, TORCH)
    assert [len(text) for text in probe.texts] == [40, 22]
    assert probe.num_guessed == 40


def test_prompts_come_from_the_tokenizer_where_there_is_one(tiny: Tiny) -> None:
    llm = LLM(tiny.target, draft=None)
    assert prompts_for(tiny.target, 0) == [llm.chat_prompt([{"role": "user", "content": text}]) for text in QUESTIONS]
    drawn = prompts_for(tiny.bare, 9)
    assert all(0 <= token < 9 for prompt in drawn for token in prompt)
    assert drawn == prompts_for(tiny.bare, 9)
