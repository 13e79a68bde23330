"""GGUF files as targets: the tokens of transformers from the same file, or from the model that was written."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec import LLM, SamplingParams
from specdec.cli.app import main
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.rope import RopeConfig
from specdec.gguf import file as file_module
from specdec.models.generation_config import GenerationConfig
from specdec.models.llama import load_llama, read_llama_config
from specdec.models.tokenizer import Tokenizer, check_same_vocabulary, vocabulary_digest
from tests.kernel_sets import TORCH
from tests.specdec.gguf.gguf_writing import TOKENS, random_model, write_gguf

CPU = torch.device("cpu")
TEXT = "hello 123, it's ünïcode\n"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def answer(path: Path, **settings: Any) -> list[int]:
    llm = LLM(path, dtype="float64", device="cpu", **settings)
    return list(llm.generate(TEXT, GREEDY, use_tqdm=False)[0].token_ids)


@torch.no_grad()
def greedy(model: PreTrainedModel, tokens: list[int]) -> list[int]:
    found = model.generate(
        torch.tensor([tokens]), do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0
    )
    return list(found[0, len(tokens) :].tolist())


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "kind", "overrides"),
    [
        ("llama", Kind.F32, {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("llama", Kind.F16, {"tie_word_embeddings": True}),
        ("llama", Kind.Q8_0, {}),
        ("qwen2", Kind.BF16, {}),
        # transformers takes no other size of heads from such a file.
        ("qwen3", Kind.Q8_0, {"head_dim": 128}),
    ],
)
def test_tokens_equal_transformers(tmp_path: Path, architecture: str, kind: Kind, overrides: dict[str, Any]) -> None:
    written = random_model(architecture, **overrides)
    file = write_gguf(tmp_path / "model.gguf", written, kind)
    source = {"pretrained_model_name_or_path": str(tmp_path), "gguf_file": file.name}
    tokens = AutoTokenizer.from_pretrained(**source)(TEXT)["input_ids"]
    llm = LLM(file, draft=None, dtype="float64", device="cpu")
    (output,) = llm.generate(TEXT, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == tokens
    assert len(tokens) < len(TEXT.encode())
    assert llm.end_tokens == {2}
    assert llm.chat_prompt([{"role": "user", "content": "hell"}]) == [TOKENS.index("hell")]
    if kind == Kind.F32:
        # transformers leaves out the scaling of positions that the file names.
        read = written.float().double()
    else:
        read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float64)
    assert output.token_ids == greedy(read, tokens)


def test_end_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model("llama"), Kind.F32)
    assert Tokenizer(file).end_token == 2
    assert LLM(file, draft=None, dtype="float64", device="cpu").end_tokens == {2}


def test_the_factors_of_a_llama_3_are_told_by_the_file(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
    written = random_model("llama", rope_parameters={**rope, "original_max_position_embeddings": 8192})
    file = write_gguf(tmp_path / "model.gguf", written)
    found = read_llama_config(file).rope
    assert (found.rope_type, found.original_max_position) == ("llama3", 8192)
    assert found.factor == pytest.approx(8.0, rel=1e-5)
    tokens = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)(TEXT)["input_ids"]
    assert answer(file, draft=None) == greedy(written.float().double(), tokens)
    odd = random_model("llama", rope_parameters={**rope, "original_max_position_embeddings": 64})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight holds other factors than a Llama 3; take its"):
        read_llama_config(write_gguf(tmp_path / "odd.gguf", odd))


LINEAR = RopeConfig("linear", 10000.0, factor=4.0, original_max_position=256)
YARN = RopeConfig("yarn", 10000.0, factor=4.0, original_max_position=64)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"scale_linear": 4.0}, LINEAR),
        ({"scaling.factor": 4.0}, LINEAR),
        ({"scaling.factor": 4.0, "scale_linear": 8.0}, LINEAR),
        ({"scaling.type": "linear", "scale_linear": 4.0, "scaling.finetuned": 1}, LINEAR),
        ({"scaling.type": "none", "scaling.factor": 4.0}, replace(LINEAR, rope_type="default", factor=1.0)),
        ({"scaling.factor": 0.0}, replace(LINEAR, rope_type="default", factor=1.0)),
        ({"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64}, YARN),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64}
            | {"scaling.attn_factor": 0.5, "scaling.yarn_beta_fast": 32.0, "scaling.yarn_log_multiplier": 0.0},
            replace(YARN, attention_factor=0.5 * (0.1 * math.log(4.0) + 1.0)),
        ),
    ],
)
def test_scaling_of_positions_is_that_of_llama_cpp(tmp_path: Path, facts: dict[str, Any], expected: RopeConfig) -> None:
    keys = {f"rope.{key}": value for key, value in facts.items()}
    found = read_llama_config(write_gguf(tmp_path / "model.gguf", random_model("llama"), facts=keys)).rope
    assert replace(found, attention_factor=None) == replace(expected, attention_factor=None)
    assert found.attention_factor == pytest.approx(expected.attention_factor)


@pytest.mark.parametrize("key", ["rope.scale_linear", "rope.scaling.factor"])
def test_a_factor_without_a_type_changes_tokens_as_in_transformers(tmp_path: Path, key: str) -> None:
    scaled = random_model("llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    file = write_gguf(tmp_path / "model.gguf", random_model("llama"), facts={key: 4.0})
    assert answer(file, draft=None) == greedy(scaled.float().double(), Tokenizer(file).encode(TEXT))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"dimension_sections": [1, 2]}, r"rope\.dimension_sections .*is not supported$"),
        ({"freq_base_swa": 1e4}, r"rope\.freq_base_swa 10000\.0 is not supported$"),
        ({"dimension_count": 8}, r"rope\.dimension_count 8 of 16 is not supported$"),
        ({"scaling.alpha": 2.0}, r"rope\.scaling\.alpha 2\.0 is not supported$"),
        ({"scaling.type": "longrope"}, r"rope\.scaling 'longrope' is not supported; known: none, linear, yarn$"),
        ({"scaling.attn_factor": 0.5}, r"attn_factor 0\.5 is supported with the scaling 'yarn' only$"),
        ({"scaling.type": "yarn", "scaling.yarn_beta_fast": 16.0}, r"rope\.scaling\.yarn_beta_fast 16\.0 is not supp"),
        ({"scaling.factor": "4"}, r"rope\.scaling\.factor is '4'; it must be a number, at least 0$"),
        ({"something_new": 1}, r"rope\.something_new 1 is not supported$"),
    ],
)
def test_keys_of_positions_that_would_be_ignored_are_refused(
    tmp_path: Path, facts: dict[str, Any], message: str
) -> None:
    own = {f"rope.{key}": value for key, value in facts.items()}
    with pytest.raises(CheckpointError, match=message):
        read_llama_config(write_gguf(tmp_path / "model.gguf", random_model("llama"), facts=own))


def test_factors_beside_another_scaling_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
    written = random_model("llama", rope_parameters={**rope, "original_max_position_embeddings": 8192})
    with pytest.raises(
        CheckpointError, match=r"rope\.scaling 'linear' by 2 is not supported beside rope_freqs\.weight"
    ):
        read_llama_config(write_gguf(tmp_path / "model.gguf", written, facts={"rope.scaling.factor": 2.0}))


@pytest.mark.long
def test_it_drafts_and_is_drafted_for(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model("llama"))
    small = write_gguf(tmp_path / "small.gguf", random_model("llama", num_hidden_layers=1))
    expected = answer(file, draft=None)
    assert answer(file) == answer(file, draft=small, adaptive_drafts=False) == expected


def test_padding_of_the_output_matrix_is_no_other_vocabulary(tmp_path: Path) -> None:
    padded = write_gguf(tmp_path / "padded.gguf", random_model("llama", vocab_size=len(TOKENS) + 3))
    plain = write_gguf(tmp_path / "plain.gguf", random_model("llama"))
    folder = tmp_path / "folder"
    folder.mkdir()
    Tokenizer(plain).backend.save(str(folder / "tokenizer.json"))
    for other in (folder, plain):
        check_same_vocabulary(padded, other)
        check_same_vocabulary(other, padded)
        assert vocabulary_digest(padded) == vocabulary_digest(other)


def test_settings_of_each_layer_that_are_alike_are_those_of_all(tmp_path: Path) -> None:
    model, each = random_model("llama"), {"attention.head_count_kv": [2, 2], "feed_forward_length": [96, 96]}
    plain = write_gguf(tmp_path / "plain.gguf", model)
    listed = write_gguf(tmp_path / "listed.gguf", model, facts=each)
    assert read_llama_config(listed) == read_llama_config(plain)
    weights = load_llama(listed, torch.float32, CPU, TORCH).weights.state_dict()
    for name, weight in load_llama(plain, torch.float32, CPU, TORCH).weights.state_dict().items():
        assert torch.equal(weights[name], weight)


def test_a_model_in_several_files_is_one(tmp_path: Path) -> None:
    model = random_model("llama")
    plain = write_gguf(tmp_path / "plain.gguf", model)
    write_gguf(tmp_path / "split.gguf", model, tensors_a_file=9)
    first, second, third = sorted(tmp_path.glob("split-*.gguf"))
    assert first.name == "split-00001-of-00003.gguf"
    expected = load_llama(plain, torch.float32, CPU, TORCH).weights.state_dict()
    found = load_llama(first, torch.float32, CPU, TORCH).weights.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(
        CheckpointError, match=r"02-of-\d+.gguf: one of 3 parts; give the first, NAME-00001-of-00003.gguf"
    ):
        read_llama_config(second)
    third.unlink()
    file_module._opened.cache_clear()
    with pytest.raises(CheckpointError, match=r"split-00003-of-00003.gguf: no such file; split-00001-of-00003.gguf is"):
        read_llama_config(first)


def test_the_dtype_asked_for_is_the_one_of_the_weights(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model("llama"), Kind.Q8_0)
    for dtype in (torch.bfloat16, torch.float64):
        model = load_llama(file, dtype, CPU, TORCH)
        assert {parameter.dtype for parameter in model.weights.parameters()} == {dtype}


def test_unreadable_files_are_refused_by_name(tmp_path: Path) -> None:
    model = random_model("llama")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kind": Kind.Q8_1}, r"model.gguf: \S+ is quantised as Q8_1, which cannot be read; take the model in another"),
        (
            {"name": "gemma3"},
            r"Gemma-3 \(model_type 'gemma3'\) is not supported; this engine serves llama, .*, qwen3, baichuan$",
        ),
        ({"name": "baichuan"}, r"model_type 'baichuan in a GGUF file' is not supported"),
        ({"name": "phi3"}, r"model.gguf: Phi-3 \(model_type 'phi3'\) is not supported"),
        ({"facts": {"expert_count": 8}}, r"model.gguf: Mixtral \(model_type 'mixtral'\) is not supported"),
        ({"facts": {"attention.sliding_window": 64}}, r"model.gguf: .*sliding_window = 64 is not supported"),
        ({"facts": {"rope.scaling.type": 3}}, r"rope.scaling 3 is not supported"),
        (
            {"facts": {"attention.head_count_kv": 3}},
            r"model.gguf: .*4 attention heads are no multiple of 3 key-value heads",
        ),
        (
            {"facts": {"attention.head_count_kv": [2, 1]}},
            r"model.gguf: llama.attention.head_count_kv is \[2, 1\]; layers of different sizes are not supported",
        ),
        (
            {"facts": {"feed_forward_length": [96, 64]}},
            r"model.gguf: llama.feed_forward_length is \[96, 64\]; layers of different sizes are not supported",
        ),
        ({"facts": {"attention.head_count_kv": 1}}, r"model.gguf: layers.0.qkv_proj.weight has shape \[128, 64\]"),
        (
            {"facts": {"attention.head_count": 64, "attention.head_count_kv": 64}},
            r"model.gguf: \S+ has \d+ rows, which 64 heads cannot share",
        ),
    ]
    for options, message in cases:
        file = write_gguf(tmp_path / "model.gguf", model, **options)
        with pytest.raises(CheckpointError, match=message) as raised:
            load_llama(file, torch.float32, CPU, TORCH)
        assert "\n" not in str(raised.value)


def test_files_that_are_none_are_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent, broken = tmp_path / "absent.gguf", tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, but not for long")
    whole = write_gguf(tmp_path / "whole.gguf", random_model("llama")).read_bytes()
    cut, swapped, old = (tmp_path / f"{name}.gguf" for name in ("cut", "swapped", "old"))
    for size, where in (
        (len(whole) - 1, r"before the end of \S+ at \d+"),
        (1000, "inside its keys"),
        (20, "inside its"),
    ):
        cut.write_bytes(whole[:size])
        with pytest.raises(
            CheckpointError, match=rf"cut.gguf: .* is cut off at {size} bytes, {where}.*; download it aga"
        ):
            read_llama_config(cut)
    for file, version, message in ((swapped, b"\0\0\0\3", "of big-endian"), (old, b"\1\0\0\0", "of version 1;")):
        file.write_bytes(whole[:4] + version + whole[8:])
        with pytest.raises(CheckpointError, match=rf"{file.name}: not a GGUF file that can be read: it is {message}"):
            read_llama_config(file)
    with pytest.raises(CheckpointError, match=r"absent.gguf: no such file$"):
        LLM(absent)
    with pytest.raises(CheckpointError, match=r"broken.gguf: not a GGUF file that can be read: .+"):
        LLM(broken)
    monkeypatch.setattr("specdec.kernels.types.extras.find_spec", lambda _: None)
    with pytest.raises(CheckpointError, match=r"a GGUF file needs gguf; run: pip install 'specdec\[gguf\]'$"):
        LLM(broken)


@pytest.mark.long
def test_sampling_defaults_are_those_of_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, file = random_model("qwen3"), tmp_path / "model.gguf"
    used: dict[str, Any] = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.05}
    unused = {"sequence": "kpt", "xtc_probability": 0.1, "mirostat": 2, "penalty_last_n": 64}
    write_gguf(file, model, sampling={**used, **unused, "xtc_threshold": 0.2})
    with caplog.at_level(logging.WARNING, "specdec"):
        params = LLM(file, draft=None, dtype="float32", device="cpu").get_default_sampling_params()
    assert params == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.05)
    shown = ", ".join(f"general.sampling.{key} ({value!r})" for key, value in unused.items())
    assert caplog.text.count(f"model.gguf: not used: {shown}\n") == 1
    write_gguf(file, model, sampling={"xtc_probability": 0.0, "mirostat": 0, "mirostat_tau": 5.0, "penalty_last_n": -1})
    assert not GenerationConfig.read(file).unused
    write_gguf(file, model, sampling={"top_p": 1.5})
    with pytest.raises(CheckpointError, match=r"model.gguf: top_p is 1.5; it must be"):
        GenerationConfig.read(file)


def test_the_command_runs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model("llama"))
    with pytest.raises(SystemExit) as exited:
        main(["generate", "hello", "--model", str(file), "--raw", "--max-tokens", "4", "--draft", "none"])
    assert exited.value.code == 0
    assert "4 tokens" in capsys.readouterr().out
