"""Names and files that are wrong are told in one line, with the nearest right one, before a weight is read."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from specdec import LLM, AsyncLLM
from specdec.train_eagle.program import main
from tests.command_line import Run
from tests.fakes import edit_json, save_random_llama
from tests.specdec.gguf.gguf_writing import random_model, write_gguf
from tests.specdec.tiny_checkpoints import Tiny


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("specdec.building.build.load_target", never)


def shortened(file: Path, share: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])


@pytest.fixture
def place(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of models and heads, most of them spoilt."""
    for source, names in {
        tiny.target: ("target", "halved", "headless", "empty", "pointer", "untrained", "spoken"),
        tiny.head: ("head", "halved-head"),
    }.items():
        for name in names:
            shutil.copytree(source, tmp_path / name)
    edit_json(tmp_path / "head" / "config.json", training={"target": "Maker/Small"})
    weights = "model.safetensors"
    shortened(tmp_path / "halved" / weights, 0.5)
    shortened(tmp_path / "halved-head" / weights, 0.9)
    shortened(tmp_path / "headless" / weights, 0.001)
    (tmp_path / "empty" / weights).write_bytes(b"")
    (tmp_path / "pointer" / weights).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    (tmp_path / "untrained" / weights).unlink()
    save_random_llama(tmp_path / "other", vocab_size=50)
    whole = write_gguf(tmp_path / "Whole.gguf", random_model("llama"))
    (tmp_path / "ggufs").mkdir()
    for name, share in {"cut": 0.6, "begun": 0.1, "barely": 0.002, "ggufs/one": 1.0}.items():
        shortened(Path(shutil.copy(whole, tmp_path / f"{name}.gguf")), share)
    (tmp_path / "text.gguf").write_text("hello")
    cache = tmp_path / "cache"
    (cache / "models--Maker--Small-1M-Instruct").mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return tmp_path


WRONG: dict[str, tuple[list[str], str]] = {
    "draft: word": (["--draft", "ngarm"], "ngarm: no such folder; the nearest is ngram"),
    "draft: word of two": (
        ["--draft", "{0}/head,ngarm"],
        "one head or small model, and ngram or suffix; the nearest is ngram",
    ),
    "draft: folder": (["--draft", "{0}/hed"], "{0}/hed: no such folder; the nearest is {0}/head"),
    "draft: of another target": (["--draft", "{tiny.wide_head}"], "reads states of size 64, but the target's .* is 32"),
    "draft: a model": (["--draft", "{0}/other"], "{0}/other: a whole model and no head, .* vocab_size 50 does not fit"),
    "draft: cut off": (["--draft", "{0}/halved-head"], "cut off: it has [\\d,]+ of the [\\d,]+ bytes"),
    "draft: a file": (["--draft", "{0}/head/config.json"], "a file, not a folder; give the folder .*, {0}/head"),
    "model: folder": (["--model", "{0}/traget"], "{0}/traget: no such folder; the nearest is {0}/target"),
    "model: case": (["--model", "{0}/Target"], "{0}/Target: no such folder; the nearest is {0}/target"),
    "model: name on the hub": (["--model", "Maker/Smal-1M-Instruct"], "; the nearest is Maker/Small-1M-Instruct"),
    "model: a head": (
        ["--model", "{0}/head", "--draft", "auto"],
        r"{0}/head: a draft head \(EAGLE-1/2\) and no model; give it as the draft, and its target, Maker/Small, as the",
    ),
    "model: a head, drafts named": (["--model", "{0}/head"], "a draft head .* and no model; give it as the draft"),
    "model: cut off": (["--model", "{0}/halved"], "{0}/halved/model.safetensors: cut off: it has [\\d,]+ of the"),
    "model: cut off in its header": (["--model", "{0}/headless"], "headless/model.safetensors: cut off: it has"),
    "model: empty": (["--model", "{0}/empty"], "empty/model.safetensors: an empty file; download it again"),
    "model: a pointer": (["--model", "{0}/pointer"], "a pointer of Git LFS in place of the weights; run: git lfs pull"),
    "model: no weights": (["--model", "{0}/untrained"], "{0}/untrained: no weights"),
    "model: no tokenizer": (["--model", "{tiny.bare}"], "{tiny.bare}: no tokenizer.json; give prompts as token ids"),
    "model: folder of GGUF files": (["--model", "{0}/ggufs"], "no config.json; give {0}/ggufs/one.gguf"),
    "GGUF: name": (["--model", "{0}/whole.gguf"], "{0}/whole.gguf: no such file; the nearest is {0}/Whole.gguf"),
    "GGUF: cut off": (["--model", "{0}/cut.gguf"], "it is cut off at \\d+ bytes, .*; download it again"),
    "GGUF: cut off in its lists": (["--model", "{0}/begun.gguf"], "it is cut off at \\d+ bytes, .*; download it again"),
    "GGUF: cut off in its header": (["--model", "{0}/barely.gguf"], "it is cut off at \\d+ bytes, .*; download it"),
    "GGUF: none": (
        ["--model", "{0}/text.gguf"],
        "a GGUF file that can be read: it begins with b'hell' in place of",
    ),
    "cache": (
        ["--kv-cache-memory", "900TiB"],
        r"kv_cache_memory is \d+ \(9.22e\+05 GiB\); this machine has",
    ),
    "cache: unit": (["--kv-cache-memory", "4 gigs"], "kv_cache_memory is '4 gigs'; .* bytes, or a size such as 4GiB"),
    "ranks": (["--tensor-parallel-size", "3"], "tensor_parallel_size is 3; it must divide the model's \\d attention"),
    "context": (["--max-model-len", "9999"], "is more than the model's max_position_embeddings 256; give that at most"),
    "trace": (["--trace", "{0}/nowhere/t.jsonl"], "--trace {0}/nowhere/t.jsonl: {0}/nowhere is no folder; create it"),
    "prompts": (["--prompts", "{0}/target/tokeniser.json"], "no such file; the nearest is {0}/target/tokenizer.json"),
}


def filled(texts: list[str], place: Path, tiny: Tiny) -> list[str]:
    return [text.format(place, tiny=tiny) for text in texts]


@pytest.mark.parametrize("name", WRONG)
def test_generate_says_what_is_wrong(run: Run, place: Path, tiny: Tiny, name: str) -> None:
    options, message = WRONG[name]
    prompt = [] if name == "prompts" else ["hi"]
    result = run(*prompt, *filled(options, place, tiny))
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch("specdec: .*\n", result.err)
    assert re.search(*filled([message], place, tiny), result.err)


@pytest.mark.parametrize("name", [name for name in WRONG if name.startswith(("draft: ", "model: ", "GGUF: "))])
@pytest.mark.parametrize("make", [LLM, AsyncLLM])
def test_python_raises_the_same(place: Path, tiny: Tiny, name: str, make: Callable[..., Any]) -> None:
    if name == "model: no tokenizer":
        pytest.skip("prompts may be token ids")
    options, message = WRONG[name]
    options = filled(options, place, tiny)
    given = {"model": tiny.target, "draft": tiny.head} | {
        option.removeprefix("--"): value for option, value in zip(options[::2], options[1::2], strict=True)
    }
    with pytest.raises(ValueError, match=filled([message], place, tiny)[0]) as raised:
        make(**given, dtype="float32", device="cpu")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["inspect", "{0}/hed"], "{0}/hed: no such folder; the nearest is {0}/head"),
        (["inspect", "egale"], "egale: no such folder; the nearest is eagle"),
        (["inspect", "{0}/head", "--model", "{0}/head"], r"{0}/head: a draft head \(EAGLE-1/2\) and no model"),
        (["inspect", "{0}/halved-head"], "model.safetensors: cut off: it has"),
        (["chat", "--model", "{tiny.bare}", "--draft", "none"], "{tiny.bare}: no tokenizer.json"),
        (["trace", "--model", "{tiny.bare}", "--draft", "none", "--prompt", "hi"], "{tiny.bare}: no tokenizer.json"),
        (["profile", "--model", "{tiny.bare}", "--draft", "{tiny.head}"], "{tiny.bare}: no tokenizer.json"),
        (
            ["bench", "latency", "--output", "{0}/nowhere/r.json"],
            "--output {0}/nowhere/r.json: {0}/nowhere is no folder",
        ),
        (["bench", "latency", "--dataset", "dmeo"], "--dataset dmeo: no such file; the nearest is demo"),
        (["bench", "latency", "--draft", "eagle", "--draft", "eagel"], "eagel: no such folder; the nearest is eagle"),
        (["bench", "latency", "--model", "{0}/head"], "{0}/head: a draft head"),
        (["serve", "{0}/traget", "--port", "0"], "{0}/traget: no such folder; the nearest is {0}/target"),
        (["serve", "{0}/head", "--port", "0"], "{0}/head: a draft head"),
        (
            ["serve", "--ssl-certfile", "{0}/no.pem", "--ssl-keyfile", "{0}/no.pem", "--port", "0"],
            "--ssl-certfile {0}/no.pem cannot be read: No such file or directory",
        ),
        (["prepare", "--model", "{tiny.bare}", "--data", "{0}/d.jsonl", "--out", "{0}/o"], "bare: no tokenizer.json"),
        (
            ["export", "--draft", "{0}/target", "--out", "{0}/o"],
            "{0}/target: .* whole model; give the folder of",
        ),
        (["train", "--config", "{0}/no.yaml"], "{0}/no.yaml: cannot be read: No such file or directory\n"),
    ],
)
def test_other_commands_say_it_too(
    place: Path,
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    message: str,
) -> None:
    for variable in ("SPECDEC_MODEL", "SPECDEC_DRAFT", "SPECDEC_LOG_LEVEL"):
        monkeypatch.delenv(variable, raising=False)
    (place / "d.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(SystemExit) as exited:
        main(filled(args, place, tiny))
    assert exited.value.code == 2
    error = capsys.readouterr().err
    assert re.fullmatch("specdec: .*\n", error)
    assert re.search(*filled([message], place, tiny), error)


def test_a_head_needs_its_target_beside_it(place: Path) -> None:
    """Without a model the target is the demo, which the message says."""
    with pytest.raises(ValueError, match=r"; the target is the demo model, since no other is named$"):
        LLM(draft=place / "head")
