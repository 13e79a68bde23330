"""End tokens: those of the model's configuration, and the tokenizer's."""

import json
import logging
from pathlib import Path

import pytest

from specdec import LLM, SamplingParams
from tests.fakes import edit_json
from tests.specdec.metaspace_llama import VOCAB, byte_ids, ids, save_chain

END, IM_END, THINK = ids("</s>", "<|im_end|>", "<think>")
CHAIN = [*byte_ids("t"), *ids("▁hello", "<|im_end|>", "▁world", "</s>", "▁cat", "<think>", "▁x")]


def checkpoint(folder: Path, config: object, generation: object, tokenizer: str | None) -> LLM:
    """Load a model that says "hello", one end token and "world", another and "cat", and a third."""
    save_chain(folder, CHAIN, eos=tokenizer or "</s>")
    edit_json(folder / "config.json", eos_token_id=config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    if tokenizer is None:
        edit_json(folder / "tokenizer_config.json", eos_token=None)
    return LLM(folder, None, dtype="float64", device="cpu", kv_cache_memory=8 << 20)


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "text"),
    [
        (END, None, "<|im_end|>", " hello"),
        (END, END, "<|im_end|>", " hello"),
        (THINK, [END, THINK], "<|im_end|>", " hello"),
        (None, None, "<|im_end|>", " hello"),
        (IM_END, None, "</s>", " hello"),
        (THINK, None, "</s>", " hello world"),
        (THINK, None, None, " hello world cat"),
        # A token that the vocabulary lacks.
        (END, None, "<|eot|>", " hello world"),
    ],
)
@pytest.mark.parametrize("ignore", [False, True])
def test_an_output_ends_with_each_of_them(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    config: object,
    generation: object,
    tokenizer: str | None,
    text: str,
    ignore: bool,
) -> None:
    with caplog.at_level(logging.INFO, "specdec"):
        llm = checkpoint(tmp_path / "target", config, generation, tokenizer)
    (output,) = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(temperature=0, ignore_eos=ignore))
    if ignore:
        assert output.text.startswith(" hello world cat x")
        return
    assert (output.text, output.finish_reason, output.outputs[0].stop_reason) == (text, "stop", None)
    named = [config, *(generation if isinstance(generation, list) else [generation])]
    added = [token for token in (END, IM_END) if token in llm.end_tokens and token not in named]
    told = [record.getMessage() for record in caplog.records if "end tokens: the tokenizer's" in record.getMessage()]
    assert len(told) == len(added)
    assert all(f"{token} (" in told[0] for token in added)
    assert llm.generation_config.end_tokens == llm.end_tokens
    assert max(llm.end_tokens) < VOCAB
