"""Another head takes the place of the one that drafts, while requests run."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, DraftShape, RequestOutput, SamplingParams
from specdec.config import DEMO_HEAD
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.kernels.native.library import library_file
from specdec.scheduling.rank_values import FILE
from tests.fakes import edit_json, save_random_block, save_random_eagle3
from tests.specdec.saved_llama import edit_tensors
from tests.specdec.world import VOCAB, World

pytestmark = pytest.mark.slow

PROMPT = list(range(3, 40))
native = pytest.mark.skipif(library_file() is None, reason="the native kernels are not built here")


def load(world: World, head: Path | None, **settings: Any) -> LLM:
    """Make an engine whose trees do not depend on time."""
    given = {"dtype": "float32", "adaptive_drafts": False, "block_size": 8, **settings}
    return LLM(world.folder / "target", head, shape=DraftShape(4, 3, 9), **given)


def drafts(output: RequestOutput) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the draft trees of a traced request, as tokens and parents."""
    traces = [step.trace for step in output.outputs[0].steps if step.trace is not None]
    return [(trace.tokens, trace.parents) for trace in traces]


def traced(llm: LLM, params: SamplingParams, update: Path | None = None) -> RequestOutput:
    """Run a prompt; replace the head after three steps."""
    states = llm.stream(PROMPT, params, trace=True)
    for _ in range(3):
        next(states)
    if update is not None:
        llm.update_draft(update)
    *_, last = states
    return last


@pytest.mark.long
@pytest.mark.parametrize(
    ("draft", "temperature", "kernels"),
    [
        ("eagle", 0.0, "torch"),
        ("eagle3", 1.0, "torch"),
        ("dspark", 0.0, "torch"),
        pytest.param("eagle", 1.0, "native", marks=native),
        pytest.param("eagle3", 0.0, "native", marks=native),
        pytest.param("dspark", 1.0, "native", marks=native),
    ],
)
def test_tokens_stay_and_drafts_change(world: World, draft: str, temperature: float, kernels: str) -> None:
    """The head is replaced during a request; a later one drafts as in an engine that began with the new head."""
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=30, ignore_eos=True)
    plain = load(world, None, kernels=kernels).generate(PROMPT, params, use_tqdm=False)[0]
    new = traced(load(world, world.other(draft), kernels=kernels), params)
    llm = load(world, world.draft(draft), kernels=kernels)
    old = traced(llm, params)
    updated = traced(llm, params, world.other(draft))
    assert updated.token_ids == old.token_ids == new.token_ids == plain.token_ids
    assert drafts(updated)[:3] == drafts(old)[:3]
    assert drafts(updated)[3:] != drafts(old)[3:]
    assert llm.config.draft == world.other(draft)
    # Its prompt is that of the earlier requests, whose prefix is cached with features and entries of the old head.
    later = traced(llm, params)
    assert later.num_cached_tokens == 0
    assert drafts(later) == drafts(new)
    again = traced(llm, params)
    assert again.num_cached_tokens == 32
    assert drafts(again) == drafts(new)
    assert llm.stats().kv_usage == 0


@pytest.mark.long
def test_a_head_is_named_as_at_the_start() -> None:
    with LLM(draft="eagle") as llm:
        llm.update_draft("eagle")
        assert llm.config.draft == DEMO_HEAD
        with pytest.raises(CheckpointError, match="draft is None; it must be the folder of a head, or its name"):
            llm.update_draft(None)  # type: ignore[arg-type]


def test_salts_still_separate_prefixes(world: World) -> None:
    llm = load(world, world.draft("eagle"))
    llm.update_draft(world.other("eagle"))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    salts = (None, "a", None, "a", "b")
    outputs = [llm.generate(PROMPT, params, use_tqdm=False, cache_salt=salt)[0] for salt in salts]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 32, 32, 0]


def test_blocks_of_a_connector_are_those_of_their_head(world: World) -> None:
    """Blocks of the old head are not loaded again; those of the new one are, once the device has lost them."""
    connector = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 24}}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    new = traced(load(world, world.other("eagle3")), params)
    with load(world, world.draft("eagle3"), kv_transfer_config=connector, kv_cache_memory=1 << 17) as llm:

        def again() -> RequestOutput:
            """Run the prompt once others have taken the device's blocks."""
            others = [[50 + number] * 60 for number in range(8)]
            llm.generate(others, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
            return traced(llm, params)

        assert [traced(llm, params).num_cached_tokens, again().num_cached_tokens] == [0, 32]
        llm.update_draft(world.other("eagle3"))
        for found in (0, 32):
            output = again()
            assert output.num_cached_tokens == found
            assert drafts(output) == drafts(new)


@pytest.mark.parametrize("draft", ["eagle3", "eagle"])
def test_blocks_that_two_heads_have_made_are_not_found(world: World, tmp_path: Path, draft: str) -> None:
    """An answer in whose middle the head was replaced goes on in an engine that begins with the old one."""
    store = {"type": "fs", "root_dir": str(tmp_path)}
    extra = {"cpu_bytes_to_use": 1 << 24, "secondary_tiers": [store]}
    connector = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with load(world, world.draft(draft), kv_transfer_config=connector) as llm:
        answer = traced(llm, params, world.other(draft))
    prompt, found = [*PROMPT, *answer.token_ids], list[RequestOutput]()
    for config in (None, connector):
        with load(world, world.draft(draft), kv_transfer_config=config) as llm:
            found += list(llm.stream(prompt, params, trace=True))[-1:]
    new, later = found
    # Those that the old head made alone are.
    assert new.num_cached_tokens == 0
    assert 32 <= (later.num_cached_tokens or 0) <= len(PROMPT) + 9
    assert drafts(later) == drafts(new)


def test_figures_of_the_old_head_are_forgotten(world: World, tmp_path: Path) -> None:
    """The values of ranks that a head ships are its own."""
    shutil.copytree(world.other("eagle"), tmp_path / "new")
    (tmp_path / "new" / FILE).write_text(json.dumps({"values": [0.5, 0.25, 0.125]}))
    llm = load(world, world.draft("eagle"), adaptive_drafts=True)
    sizer = llm.engine.scheduler.draft_budget.tree_sizer
    assert sizer is not None
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    llm.update_draft(tmp_path / "new")
    assert sizer.ranks.values[:3] == [0.5, 0.25, 0.125]
    assert sizer.outlook is None
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    assert sizer.ranks.values[:3] != [0.5, 0.25, 0.125]


def test_an_unfit_head_is_refused_and_the_old_one_goes_on(world: World, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = traced(load(world, world.draft("eagle3")), params)
    llm = load(world, world.draft("eagle3"))
    save_random_eagle3(tmp_path / "fewer", draft_vocab_size=50)
    save_random_eagle3(tmp_path / "wider", num_key_value_heads=4)
    shutil.copytree(world.other("eagle3"), tmp_path / "taps")
    edit_json(tmp_path / "taps" / "config.json", eagle_aux_hidden_state_layer_ids=[0, 2, 1], eagle_config=None)
    shutil.copytree(world.other("eagle3"), tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"nothing")
    shutil.copytree(world.other("eagle3"), tmp_path / "nan")
    edit_tensors(tmp_path / "nan", lambda tensors: tensors["fc.weight"].view(-1)[5].fill_(math.nan))
    shutil.copytree(world.other("eagle3"), tmp_path / "values")
    (tmp_path / "values" / FILE).write_text("[]")
    refused = {
        world.draft(
            "eagle"
        ): "head: its kind is Eagle, not Eagle3 as in the present head; start the engine anew with it",
        tmp_path / "fewer": "its draft_vocab_size is 50, not 60 as in the present head",
        tmp_path / "wider": "its num_kv_heads is 4, not 2",
        tmp_path / "taps": r"its taps is \(0, 2, 1\), not \(0, 1, 2\)",
        world.draft("llama"): "small: a small model, which cannot replace a head",
        tmp_path / "damaged": "damaged",
        tmp_path / "nan": "nan: fc.weight holds nan; weights must be finite numbers of float32",
        tmp_path / "values": "holds no values of ranks",
        tmp_path / "nothing": "nothing",
    }
    states = llm.stream(PROMPT, params, trace=True)
    next(states)
    for folder, reason in refused.items():
        with pytest.raises(ValueError, match=reason) as caught:
            llm.update_draft(str(folder))
        assert "\n" not in str(caught.value)
    *_, last = states
    assert llm.config.draft == world.draft("eagle3")
    assert drafts(last) == drafts(expected)


def test_blocks_of_another_length_do_not_fit(world: World, tmp_path: Path) -> None:
    """A longer block would write beyond the cache entries that the scheduler reserves."""
    save_random_block(tmp_path, "domino")
    edit_json(tmp_path / "config.json", block_size=7)
    with pytest.raises(ValueError, match="its block_size is 7, not 5"):
        load(world, world.draft("domino")).update_draft(tmp_path)


@pytest.mark.parametrize("draft", ["none", "llama"])
def test_engines_without_a_head_have_none_to_replace(world: World, draft: str) -> None:
    with pytest.raises(ValueError, match="the engine drafts without a head"):
        load(world, world.draft(draft)).update_draft(world.draft("eagle") or "")


@native
@pytest.mark.parametrize("draft", ["eagle", "eagle3"])
def test_weights_in_8_bits(world: World, draft: str) -> None:
    """The target's output matrix is kept in packed form alone, from which EAGLE-1 heads are scored."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    settings: dict[str, Any] = {"kernels": "native", "quantization": "q8"}
    new = traced(load(world, world.other(draft), **settings), params)
    llm = load(world, world.draft(draft), **settings)
    assert traced(llm, params, world.other(draft)).token_ids == new.token_ids
    assert drafts(traced(llm, params)) == drafts(new)


@native
def test_with_weights_in_8_bits_the_target_has_rows_of_its_output_matrix_no_more(world: World, tmp_path: Path) -> None:
    """A head may be scored by all of it, in packed form; one that selects rows of it cannot come later."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    settings: dict[str, Any] = {"kernels": "native", "quantization": "q8"}
    for seed, name in enumerate(("own", "lent")):
        save_random_eagle3(tmp_path / name, seed, draft_vocab_size=VOCAB)
    edit_tensors(tmp_path / "lent", lambda tensors: tensors.pop("lm_head.weight"))
    edit_json(tmp_path / "lent" / "config.json", draft_vocab_size=None)
    new = traced(load(world, tmp_path / "lent", **settings), params)
    llm = load(world, tmp_path / "own", **settings)
    llm.update_draft(tmp_path / "lent")
    assert drafts(traced(llm, params)) == drafts(new)
    shutil.copytree(world.other("eagle"), tmp_path / "rows")
    edit_tensors(tmp_path / "rows", lambda tensors: tensors.update(token_map=torch.arange(50)))
    edit_json(tmp_path / "rows" / "config.json", architectures=["LlamaForCausalLMEagle"], hot_vocab_size=50)
    with pytest.raises(ValueError, match=r"rows: it scores some rows of .*; start the engine anew with it$"):
        load(world, world.draft("eagle"), **settings).update_draft(tmp_path / "rows")
