"""The Python API as vLLM's users would try it, and its errors."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec import LLM, DraftShape, SamplingParams
from specdec.core.errors import QueueFullError
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from tests.fakes import save_random_head, save_random_llama

pytestmark = pytest.mark.slow

FREE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm")
    save_random_llama(path / "target")
    save_random_head(path / "head")
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder / "target", folder / "head", dtype="float32", shape=DraftShape(3, 2, 6), max_model_len=64)


@pytest.mark.long
def test_an_engine_on_a_cpu_does_without_triton() -> None:
    """It is not there on every machine, and takes a second to import."""
    code = "import sys, specdec.building.engine_builder; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_outputs_read_like_vllms(llm: LLM) -> None:
    outputs = llm.generate([[3, 4, 5], [6]], FREE)
    assert [output.prompt_token_ids for output in outputs] == [[3, 4, 5], [6]]
    first = outputs[0].outputs[0]
    assert outputs[0].token_ids == first.token_ids
    assert len(first.token_ids) == len(first.accepted) == 12
    assert first.finish_reason == "length"
    assert outputs[0].finished
    assert outputs[0].text == first.text == ""
    assert outputs[0].stats.steps >= 1
    assert outputs[0].stats.tokens == 11


def test_one_prompt_of_token_ids_needs_no_list_around_it(llm: LLM) -> None:
    assert llm.generate([3, 4, 5], FREE)[0].token_ids == llm.generate([[3, 4, 5]], FREE)[0].token_ids


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 7)]
    outputs = llm.generate([[3, 4], [3, 4]], params)
    assert [len(output.token_ids) for output in outputs] == [2, 7]
    assert outputs[1].token_ids[:2] == outputs[0].token_ids


def test_stream_grows_to_what_generate_gives(llm: LLM) -> None:
    states = list(llm.stream([[3, 4, 5]], FREE))
    assert states[-1].token_ids == llm.generate([[3, 4, 5]], FREE)[0].token_ids
    for before, after in itertools.pairwise(states):
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
        assert len(after.token_ids) > len(before.token_ids)
    assert [state.finished for state in states] == [False] * (len(states) - 1) + [True]


def test_closing_a_stream_leaves_nothing_behind(llm: LLM) -> None:
    stream = llm.stream([[3, 4, 5], [9]], FREE)
    next(stream)
    stream.close()
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_unfinished
    assert scheduler.stats().kv_usage == 0


def test_a_seed_is_drawn_where_none_is_given(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=30, ignore_eos=True)
    assert llm.generate([3], params)[0].token_ids != llm.generate([3], params)[0].token_ids


def test_output_ends_with_the_context(llm: LLM) -> None:
    output = llm.generate([list(range(60))], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0]
    assert len(output.token_ids) == 4
    assert output.finish_reason == "length"


def test_end_and_stop_tokens_end_the_output_where_they_fall(llm: LLM) -> None:
    """A stop token inside an accepted run cuts the run there."""
    free = llm.generate([[7, 8]], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0].token_ids
    for token in set(free):
        params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[token], ignore_eos=True)
        output = llm.generate([[7, 8]], params)[0]
        assert output.token_ids == free[: free.index(token) + 1]
        assert output.finish_reason == "stop"
        assert output.outputs[0].stop_reason == token


def test_a_bad_prompt_is_refused_before_any_runs(llm: LLM) -> None:
    for prompt, message in [
        ([], "the prompt is empty"),
        ([1, 97], "prompt token 97 is outside the vocabulary of 97"),
        (list(range(64)), "too long: 64 tokens > 63 maximum; this model's maximum context length is 64 tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            llm.generate([[1], prompt], FREE)
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        llm.generate(["text"], FREE)
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate([[1]], [FREE, FREE])
    assert not llm.engine.has_unfinished


def test_prompts_of_numpy_and_torch_are_taken(llm: LLM) -> None:
    expected = llm.generate([[3, 4, 5]], FREE)[0].token_ids
    for prompts in (
        np.array([3, 4, 5]),
        np.array([[3, 4, 5]]),
        [np.array([3, 4, 5])],
        [np.int64(3), 4, np.int32(5)],
        [[np.int64(3), 4, 5]],
        torch.tensor([3, 4, 5]),
        (3, 4, 5),
        range(3, 6),
    ):
        (output,) = llm.generate(prompts, FREE)  # type: ignore[arg-type]
        assert output.token_ids == expected
        assert output.prompt_token_ids == [3, 4, 5]
        assert all(type(token) is int for token in output.prompt_token_ids)


def test_numbers_of_numpy_steer_as_pythons_do(llm: LLM) -> None:
    plain = SamplingParams(temperature=0.7, seed=5, max_tokens=8, stop_token_ids=[4], logit_bias={7: 2.0}, min_tokens=2)
    own = SamplingParams(
        temperature=np.float64(0.7),
        seed=np.int64(5),  # type: ignore[arg-type]
        max_tokens=np.int64(8),  # type: ignore[arg-type]
        stop_token_ids=np.array([4]),  # type: ignore[arg-type]
        logit_bias={np.int64(7): np.float64(2.0)},  # type: ignore[dict-item]
        min_tokens=np.int64(2),  # type: ignore[arg-type]
    )
    assert llm.generate([3], own)[0].token_ids == llm.generate([3], plain)[0].token_ids


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([1.5, 2.7], "a prompt token is 1.5; it must be a whole number"),
        ([[3, True]], "a prompt token is True; it must be a whole number"),
        (np.array([1.5]), "a prompt token is 1.5; it must be a whole number"),
        ([["3"]], "a prompt token is '3'; it must be a whole number"),
        (b"ab", "prompts is b'ab'; it must be text or token ids, or a list of these"),
        ([b"ab"], "the prompt is b'ab'; it must be text or a list of token ids"),
        (5, "prompts is 5; it must be text or token ids, or a list of these"),
        ("a\ud800", "the prompt is not valid text: its character 1 is half of a pair"),
        ([10**30], "outside the vocabulary"),
        (np.array([], dtype=int), "the prompt is empty"),
    ],
)
def test_prompts_of_a_wrong_kind_are_named(llm: LLM, prompts: object, message: str) -> None:
    if message == "the prompt is empty":
        prompts = [prompts]
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, FREE)  # type: ignore[arg-type]
    assert not llm.engine.has_unfinished


def test_salts_and_priorities_of_a_wrong_kind_are_named(llm: LLM) -> None:
    with pytest.raises(ValueError, match="cache_salt is 5; it must be text"):
        llm.generate([3], FREE, cache_salt=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"priority is 1\.5; it must be a whole number"):
        llm.generate([3], FREE, priority=[1.5])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -2}, "top_k is -2"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"seed": -2}, "seed is -2"),
        ({"stop": ["a", ""]}, "stop holds an empty string"),
    ],
)
def test_parameters_outside_their_range_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)  # type: ignore[arg-type]


def test_settings_outside_their_range_are_named(folder: Path) -> None:
    target = folder / "target"
    for settings, message in [
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
        ({"device": "abacus"}, "device 'abacus' is unknown"),
        ({"device": "meta"}, "device 'meta' is not supported; use auto, cpu or cuda"),
        ({"device": "mps"}, "device 'mps' is not supported"),
        ({"max_num_seqs": 2.5}, "max_num_seqs is 2.5; it must be a whole number"),
        ({"shape": (6, 10, 60)}, r"shape is \(6, 10, 60\); it must be a DraftShape"),
        ({"max_model_len": 1000}, "max_model_len 1000 is more than the model's max_position_embeddings 256"),
        ({"kv_cache_memory": 10}, "kv_cache_memory 10 is less than one block"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens 8 is below max_num_seqs 64"),
        ({"draft": "eagle"}, "draft 'eagle' is the demo model's own head"),
    ]:
        with pytest.raises(ValueError, match=message):
            LLM(target, **settings)  # type: ignore[arg-type]


def test_a_head_of_another_size_is_refused(folder: Path, tmp_path: Path) -> None:
    save_random_head(tmp_path / "wide", hidden_size=64)
    save_random_head(tmp_path / "words", vocab_size=50)
    with pytest.raises(CheckpointError, match="the head reads states of size 64, but the target's hidden_size is 32"):
        LLM(folder / "target", tmp_path / "wide")
    with pytest.raises(CheckpointError, match="vocab_size 50 does not fit the target's 97"):
        LLM(folder / "target", tmp_path / "words")


@pytest.mark.parametrize("values", [{"depth": 0}, {"branching": 65}, {"nodes": 0}, {"nodes": 2000}, {"min_reach": 1}])
def test_tree_shapes_are_bounded(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        DraftShape(**{"depth": 2, "branching": 2, "nodes": 4, **values})


def test_a_call_for_which_the_queue_is_too_short_leaves_nothing_in_it(folder: Path) -> None:
    llm = LLM(folder / "target", draft=None, dtype="float64", max_queued_requests=2)
    with pytest.raises(QueueFullError, match="2 requests wait"):
        llm.generate([[3], [4], [5]], FREE, use_tqdm=False)
    assert not llm.engine.has_unfinished
    assert len(llm.generate([[3], [4]], FREE, use_tqdm=False)) == 2


@pytest.mark.long
def test_a_head_with_few_positions_is_told_of(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    save_random_head(tmp_path / "short", max_position_embeddings=40)
    with caplog.at_level("WARNING", "specdec"):
        llm = LLM(folder / "target", tmp_path / "short", dtype="float64", shape=DraftShape(3, 2, 6))
        (record,) = caplog.records
        assert "short has 40 positions, fewer than the 256 tokens of a request" in record.getMessage()
        caplog.clear()
        llm.generate([list(range(35))], FREE, use_tqdm=False)
        assert not caplog.records
        for _ in range(2):
            (output,) = llm.generate([list(range(36))], FREE, use_tqdm=False)
            assert output.stats.drafted == 0
        assert [record.getMessage() for record in caplog.records] == [
            "a prompt of 36 tokens gets no drafts: the head drafts for requests of fewer than 37 tokens (shown once)"
        ]
        caplog.clear()
        # No longer than the head's positions.
        LLM(folder / "target", tmp_path / "short", dtype="float64", shape=DraftShape(3, 2, 6), max_model_len=40)
        assert not caplog.records
    assert capfd.readouterr().err == ""
