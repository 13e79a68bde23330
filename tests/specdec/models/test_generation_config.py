"""A checkpoint's generation_config.json: the values read from it, and their effect."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig as TransformersConfig

from specdec import LLM, SamplingParams
from specdec.cli.app import main
from specdec.core.commands import Add
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.engine.request_maker import RequestMaker
from specdec.models.generation_config import GenerationConfig
from tests.new_groups import new_group
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = pytest.mark.slow

SAMPLED = {"temperature": 0.6, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A folder with generation_config.json and config.json; None leaves one out."""

    def files(generation: object, config: object = None) -> Path:
        for name, values in (("generation_config.json", generation), ("config.json", config)):
            if values is not None:
                (tmp_path / name).write_text(values if isinstance(values, str) else json.dumps(values))
        return tmp_path

    return files


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        (None, None, []),
        (None, {}, []),
        (None, {"eos_token_id": 2}, [2]),
        (None, {"eos_token_id": [2, 5]}, [2, 5]),
        ({}, {"eos_token_id": 0}, [0]),
        ({"temperature": 0.5}, {"eos_token_id": 2}, [2]),
        ({"eos_token_id": 7}, {"eos_token_id": 2}, [7]),
        ({"eos_token_id": 0}, {"eos_token_id": 2}, [0]),
        ({"eos_token_id": [7, 9, 7]}, {"eos_token_id": 2}, [7, 9]),
        ({"eos_token_id": 7}, None, [7]),
    ],
)
def test_end_tokens(write: Callable[..., Path], generation: object, config: object, ends: list[int]) -> None:
    assert GenerationConfig.read(write(generation, config)).end_tokens == frozenset(ends)


@pytest.mark.parametrize(
    ("generation", "params"),
    [
        (None, {}),
        ({"eos_token_id": 2, "pad_token_id": 0, "transformers_version": "5", "seed": 4, "stop": "x"}, {}),
        (SAMPLED, SAMPLED),
        ({**SAMPLED, "do_sample": True}, SAMPLED),
        ({**SAMPLED, "do_sample": None}, SAMPLED),
        # 0 and 1 are values like any other, null is none.
        ({"temperature": 0, "top_p": None, "top_k": 0, "min_p": 0.0}, {"temperature": 0, "top_k": 0, "min_p": 0.0}),
        ({**SAMPLED, "do_sample": False}, {"temperature": 0.0, "repetition_penalty": 1.2}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "max_new_tokens": 5, "top_p": 0.3}, {"temperature": 0.0, "max_tokens": 5}),
        ({"max_new_tokens": 5, "max_length": 20}, {"max_tokens": 5}),
        ({"max_new_tokens": None}, {}),
        ({"max_new_tokens": 5000}, {"max_tokens": 5000}),
        ({"stop_strings": "x"}, {"stop": "x"}),
        ({"stop_strings": ["x", "yz"], "do_sample": False}, {"stop": ["x", "yz"], "temperature": 0.0}),
        ({"stop_strings": None}, {}),
    ],
)
def test_defaults_of_sampling(write: Callable[..., Path], generation: object, params: dict[str, object]) -> None:
    assert GenerationConfig.read(write(generation, {"temperature": 0.1})).params == params


@pytest.mark.parametrize(
    ("generation", "named"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ({"temperature": -1}, "temperature is -1; it must be 0 or more"),
        ('{"temperature": NaN}', "temperature is nan"),
        ({"temperature": "warm"}, "temperature is 'warm'; it must be a number"),
        ({"top_p": 0}, "top_p is 0; it must be above 0 and at most 1"),
        ({"top_p": [0.5]}, "top_p is [0.5]; it must be a number"),
        ({"top_k": -5}, "top_k is -5"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"do_sample": False, "repetition_penalty": 0}, "repetition_penalty is 0"),
        ("[]", "not a JSON object"),
        ({"top_k": 50.0}, "top_k is 50.0; it must be a whole number"),
        ({"max_new_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"stop_strings": ["x", 5]}, "stop is ['x', 5]; it must be text, or a list of texts"),
        ({"stop_strings": ""}, "stop holds an empty string"),
    ],
)
def test_a_bad_file_is_named(write: Callable[..., Path], generation: object, named: str) -> None:
    folder = write(generation)
    with pytest.raises(CheckpointError) as caught:
        GenerationConfig.read(folder)
    assert str(caught.value).startswith(f"{folder / 'generation_config.json'}: ")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


# Every field of transformers' GenerationConfig is used, or named as not used, or of no effect on tokens here.
USED = {
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "stop_strings", "do_sample"),
    "eos_token_id",
}
UNUSED: dict[str, tuple[object, ...]] = {
    "max_length": (64, 19),
    "min_length": (5,),
    "min_new_tokens": (5,),
    "max_time": (0.5,),
    "num_beams": (4,),
    "num_return_sequences": (2,),
    "typical_p": (0.9,),
    "top_h": (0.4,),
    "epsilon_cutoff": (3e-4,),
    "eta_cutoff": (3e-4,),
    "encoder_repetition_penalty": (1.5,),
    "no_repeat_ngram_size": (3,),
    "bad_words_ids": ([[5]],),
    "forced_bos_token_id": (0, 5),
    "forced_eos_token_id": (0, [5]),
    "exponential_decay_length_penalty": ([5, 1.1],),
    "suppress_tokens": ([0],),
    "begin_suppress_tokens": ([0],),
    "sequence_bias": ([[[5], 1.0]],),
    "token_healing": (True,),
    "guidance_scale": (1.5,),
    "watermarking_config": ({"greenlist_ratio": 0.25},),
    "assistant_ensemble_weight": (0.5,),
    # Of earlier versions.
    "num_beam_groups": (2,),
    "diversity_penalty": (0.5,),
    "penalty_alpha": (0.6,),
    "dola_layers": ("low",),
    "constraints": ([5],),
    "force_words_ids": ([[5]],),
}
WITHOUT_EFFECT = {
    # Of beams, logits, and what is returned.
    *("early_stopping", "length_penalty", "renormalize_logits", "remove_invalid_values", "output_attentions"),
    *("output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    # Of caches and compilation.
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile"),
    *("continuous_batching_config", "low_memory", "prefill_chunk_size"),
    # Of its own drafts.
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
    *("target_lookbehind", "speculation_type", "use_mtp"),
    # Tokens of other models, and of padding.
    *("pad_token_id", "bos_token_id", "decoder_start_token_id", "encoder_no_repeat_ngram_size"),
}


def test_every_field_of_transformers_is_known() -> None:
    fields = {name for name in vars(TransformersConfig()) if not name.startswith("_")} - {"transformers_version"}
    assert fields <= USED | UNUSED.keys() | WITHOUT_EFFECT


@pytest.mark.parametrize("name", UNUSED)
def test_settings_that_transformers_applies_are_found(name: str, write: Callable[..., Path]) -> None:
    for value in UNUSED[name]:
        found = GenerationConfig.read(write({name: value}))
        assert (found.params, found.unused) == ({}, {name: value})


def test_unused_settings_are_named(checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoint(eos_token_id=2, temperature=0, typical_p=0.9, suppress_tokens=[0], num_beams=1)
    with caplog.at_level(logging.WARNING, "specdec"):
        llm = load(folder)
    assert caplog.text.count("generation_config.json: not used: typical_p (0.9), suppress_tokens ([0])") == 1
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0)


def test_values_that_ask_for_nothing_are_not_named(write: Callable[..., Path]) -> None:
    """What older versions of transformers saved as defaults."""
    old: dict[str, object] = {
        **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "typical_p"), 1),
        **dict.fromkeys(("encoder_repetition_penalty", "length_penalty", "guidance_scale"), 1.0),
        **dict.fromkeys(("min_length", "no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), 0),
        **dict.fromkeys(("max_time", "forced_eos_token_id", "suppress_tokens", "watermarking_config")),
        **{"max_length": 20, "diversity_penalty": 0.0, "early_stopping": False, "bad_words_ids": []},
        **dict.fromkeys(WITHOUT_EFFECT, 1),
    }
    assert GenerationConfig.read(write(old)).unused == {}
    context = {"max_position_embeddings": 64}
    assert GenerationConfig.read(write({"max_length": 64}, context)).unused == {}
    assert GenerationConfig.read(write({"max_length": 63}, context)).unused == {"max_length": 63}
    sampled: dict[str, object] = {"typical_p": 0.5, "top_h": 0.5, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1}
    assert GenerationConfig.read(write({**sampled, "do_sample": False})).unused == {}
    assert GenerationConfig.read(write(sampled)).unused == sampled


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_bytes(b'{"temperature": "\xff"}')
    with pytest.raises(CheckpointError, match=re.escape(f"{file}: not valid JSON")):
        GenerationConfig.read(tmp_path)


def test_a_bad_config_is_named_where_the_end_token_is_looked_for(write: Callable[..., Path]) -> None:
    folder = write({}, "[")
    with pytest.raises(CheckpointError, match=re.escape(f"{folder / 'config.json'}: not valid JSON")):
        GenerationConfig.read(folder)


@pytest.fixture
def checkpoint(tiny: Tiny, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny target with this generation_config.json."""

    def copy(**values: object) -> Path:
        folder = tmp_path / "target"
        shutil.copytree(tiny.target, folder)
        (folder / "generation_config.json").write_text(json.dumps(values))
        return folder

    return copy


def load(folder: Path) -> LLM:
    return LLM(folder, draft=None, dtype="float64", device="cpu")


def test_generate_without_parameters_takes_the_files(checkpoint: Callable[..., Path]) -> None:
    llm = load(checkpoint(eos_token_id=2, temperature=0, repetition_penalty=1.8, max_new_tokens=21))
    defaults = llm.get_default_sampling_params()
    assert defaults == SamplingParams(temperature=0, repetition_penalty=1.8, max_tokens=21)
    (unasked,) = llm.generate("Hello")
    assert unasked.token_ids == llm.generate("Hello", defaults)[0].token_ids
    assert len(unasked.token_ids) == 21
    # Greedy without the file's penalty is another text, so the file was heeded.
    assert unasked.token_ids != llm.generate("Hello", SamplingParams(temperature=0, max_tokens=21))[0].token_ids
    assert [state.token_ids for state in llm.stream("Hello")][-1] == unasked.token_ids


@pytest.mark.long
def test_its_stop_strings_end_an_output(checkpoint: Callable[..., Path], command: "Command") -> None:
    folder = checkpoint(eos_token_id=2)
    whole = load(folder).generate("Hello", SamplingParams(temperature=0, max_tokens=12))[0].text
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "stop_strings": ["~~~", whole[5]]}))
    llm = load(folder)
    (output,) = llm.generate("Hello")
    assert (output.text, output.finish_reason) == (whole[: whole.index(whole[5])], "stop")
    assert output.outputs[0].stop_reason == whole[5]
    _, params, _ = command(folder)
    assert params is not None
    assert params.stop_strings == ("~~~", whole[5])
    _, params, _ = command(folder, "--stop", "other")
    assert params is not None
    assert params.stop_strings == ("other",)


def test_without_a_tokenizer_its_stop_strings_are_named(
    checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(eos_token_id=2, do_sample=False, stop_strings="x")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with caplog.at_level(logging.WARNING, "specdec"):
        llm = load(folder)
    assert "stop_strings is not used, for there is no tokenizer" in caplog.text
    assert len(llm.generate([5, 6])[0].token_ids) == 16


def test_given_parameters_are_not_mixed_with_the_files(tiny: Tiny, checkpoint: Callable[..., Path]) -> None:
    llm = load(checkpoint(eos_token_id=2, **SAMPLED, max_new_tokens=3))
    params = SamplingParams(seed=5, ignore_eos=True)
    group = new_group(llm, "Hello", params)
    sampling = group.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    assert sampling.repetition_penalty == 1.0
    (output,) = llm.generate("Hello", params)
    assert len(output.token_ids) == 16
    assert output.token_ids == load(tiny.target).generate("Hello", params)[0].token_ids


def test_the_files_end_tokens_hold_whatever_is_asked(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(eos_token_id=2)
    params = SamplingParams(temperature=0, max_tokens=12)
    free = load(folder).generate("Hello", params)[0].token_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, free[4]]}))
    llm = load(folder)
    (output,) = llm.generate("Hello", params)
    assert output.token_ids == free[: free.index(free[4]) + 1]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    ignoring = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    on = llm.generate("Hello", ignoring)[0].token_ids
    assert (len(on), on[: len(output.token_ids)]) == (12, output.token_ids)


def test_a_bad_file_keeps_the_model_from_loading(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: top_p is 7"):
        load(checkpoint(top_p=7))


Command = Callable[..., tuple[int, SamplingParams | None, str]]


@pytest.fixture
def command(tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`specdec generate Hello --model FOLDER ...`: exit code, the parameters that its batch ran with, stderr."""
    for name in ("SPECDEC_MODEL", "SPECDEC_DRAFT"):
        monkeypatch.delenv(name, raising=False)

    def call(folder: Path, *args: object) -> tuple[int, SamplingParams | None, str]:
        seen: list[SamplingParams] = []
        real = RequestMaker.add

        def add(maker: RequestMaker, prompt: str | list[int], params: SamplingParams, *others: Any) -> Add:
            seen.append(params)
            return real(maker, prompt, params, *others)

        monkeypatch.setattr(RequestMaker, "add", add)
        fixed = ["--model", folder, "--draft", tiny.head, "--dtype", "float64", "--device", "cpu", "--json"]
        with pytest.raises(SystemExit) as exited:
            main(["generate", "Hello", *map(str, [*fixed, *args])])
        monkeypatch.setattr(RequestMaker, "add", real)
        assert isinstance(exited.value.code, int)
        return exited.value.code, seen[-1] if seen else None, capsys.readouterr().err

    return call


@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "changed"),
    [
        ((), {}),
        (("--temperature", 0), {"temperature": 0}),
        (("--top-k", 0, "--top-p", 1), {"top_k": 0, "top_p": 1}),
        (("--min-p", 0, "--repetition-penalty", 1), {"min_p": 0, "repetition_penalty": 1}),
        (("--max-tokens", 4), {"max_tokens": 4}),
        (("--seed", 3, "--min-tokens", 2), {"seed": 3, "min_tokens": 2}),
    ],
)
def test_the_command_prefers_options_to_the_file(
    checkpoint: Callable[..., Path], command: Command, args: tuple[object, ...], changed: dict[str, object]
) -> None:
    folder = checkpoint(eos_token_id=2, **SAMPLED, max_new_tokens=9)
    code, params, err = command(folder, *args)
    assert (code, err) == (0, "")
    assert params == SamplingParams(**{**SAMPLED, "max_tokens": 9, **changed})  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {"temperature": 0.0, "max_tokens": 256}),
        ({"top_k": 5}, {"temperature": 0.0, "max_tokens": 256, "top_k": 5}),
        ({"max_new_tokens": 7}, {"temperature": 0.0, "max_tokens": 7}),
        ({**SAMPLED, "do_sample": False}, {"temperature": 0.0, "max_tokens": 256, "repetition_penalty": 1.2}),
    ],
)
def test_the_command_is_greedy_where_neither_says_otherwise(
    checkpoint: Callable[..., Path], command: Command, generation: dict[str, object], expected: dict[str, object]
) -> None:
    code, params, _ = command(checkpoint(eos_token_id=2, **generation))
    assert (code, params) == (0, SamplingParams(**expected))  # type: ignore[arg-type]


def test_the_command_tells_of_a_bad_file_in_one_line(checkpoint: Callable[..., Path], command: Command) -> None:
    folder = checkpoint(min_p=3)
    code, params, err = command(folder)
    assert (code, params) == (2, None)
    file = folder / "generation_config.json"
    assert err == f"specdec: {file}: min_p is 3; it must be at least 0 and at most 1\n"


def test_an_option_that_does_not_fit_the_file_is_one_line(checkpoint: Callable[..., Path], command: Command) -> None:
    code, params, err = command(checkpoint(max_new_tokens=5), "--min-tokens", 8)
    assert (code, params, err) == (2, None, "specdec: min_tokens is 8; it must be at most max_tokens, 5\n")


@pytest.mark.parametrize("ends", ["</s>", 1.5, [[1]], -1, 500, True])
def test_end_tokens_outside_the_vocabulary_are_refused(write: Callable[..., Path], ends: object) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id is"):
        GenerationConfig.read(write({"eos_token_id": ends}, {"vocab_size": 97}))


@pytest.mark.parametrize("vocab", [None, "97", [97], {}])
def test_a_vocabulary_of_no_size_sets_no_bound(write: Callable[..., Path], vocab: object) -> None:
    """The model's own check refuses it."""
    assert GenerationConfig.read(write({"eos_token_id": 500}, {"vocab_size": vocab})).end_tokens == {500}


def test_no_end_token_there_leaves_that_of_the_other_file(write: Callable[..., Path]) -> None:
    assert GenerationConfig.read(write({"eos_token_id": None}, {"eos_token_id": 7})).end_tokens == {7}
