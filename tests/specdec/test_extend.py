"""The plug-ins of docs/extend.md, as they stand there, in commands, engine processes and ranks."""

import asyncio
import json
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from specdec import LLM, AsyncLLM, SamplingParams
from specdec.building import plugins
from specdec.cli.app import main
from specdec.draft_heads.drafting.chain_sources import SOURCES
from specdec.draft_heads.formats.head_kinds import KINDS
from specdec.kernels.types.registry import Registry
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.types import NoiseKey
from specdec.verify.chance import PhiloxChance
from specdec.verify.verifier import RULES, AcceptanceRule, CoupledVerifier
from tests.fakes import TINY
from tests.specdec.documented_plugins import EXAMPLES
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = pytest.mark.slow
FEW: dict[str, Any] = {"dtype": "float64", "kv_cache_memory": 1 << 20, "adaptive_drafts": False, "prefill_stretch": 0}
PROMPT = [5, 6, 7, 5, 6, 8, 5, 6, 7, 5, 6]


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples as modules that this process and its children find; the tables are as before afterwards."""
    for name, text in EXAMPLES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    for table in (SOURCES, RULES, KINDS):
        monkeypatch.setattr(table, "_found", dict(table))
    yield
    for name in EXAMPLES:
        sys.modules.pop(name, None)


@pytest.fixture
def mlp_head(tiny: Tiny, tmp_path: Path) -> Path:
    folder, size = tmp_path / "mlp", TINY["hidden_size"]
    folder.mkdir()
    vocab = json.loads((tiny.target / "config.json").read_text())["vocab_size"]
    config = {**TINY, "num_hidden_layers": 1, "vocab_size": vocab, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = {"up.weight": (size, 2 * size), "down.weight": (size, size)}
    save_file({k: torch.randn(s, generator=generator) for k, s in shapes.items()}, folder / "model.safetensors")
    return folder


def greedy(llm: LLM, count: int = 24) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return llm.generate([PROMPT], params, use_tqdm=False)[0].token_ids


def test_the_page_has_three_examples() -> None:
    assert set(EXAMPLES) == {"bigrams", "typical", "mlp_head"}


def test_a_source_has_a_name_an_option_and_figures(tiny: Tiny) -> None:
    plain = greedy(LLM(tiny.target, None, **FEW))
    llm = LLM(tiny.target, "ngram,bigrams", plugins=["bigrams"], draft_options=["bigrams=1"], **FEW)
    assert llm.config.chains == ("ngram", "bigrams")
    assert llm.config.sources == "ngram,bigrams"
    assert greedy(llm) == plain
    stats = llm.stats()
    assert stats.drafts_verified > 0
    assert set(stats.sources) == {"ngram", "bigrams"}
    assert stats.sources["bigrams"].tokens > stats.sources["bigrams"].right >= 0
    metrics = {(one.name, one.labels.get("source")) for one in llm.get_metrics()}
    assert ("specdec:draft_source_tokens", "bigrams") in metrics
    with pytest.raises(ValueError, match="draft_options has bigrams=few; it must be a whole number, the least count"):
        LLM(tiny.target, "bigrams", plugins=["bigrams"], draft_options=["bigrams=few"], **FEW)
    # Pairs that were seen this often there are none of.
    llm = LLM(tiny.target, "bigrams", plugins=["bigrams"], draft_options=["bigrams=1000"], **FEW)
    assert greedy(llm) == plain
    assert llm.stats().drafts_verified == 0


def test_without_the_plugin_its_names_are_unknown(tiny: Tiny, mlp_head: Path) -> None:
    with pytest.raises(ValueError, match="bigrams: no such folder"):
        LLM(tiny.target, "ngram,bigrams", **FEW)
    with pytest.raises(ValueError, match="verify is 'lossy-typical'; it must be one of coupled, "):
        LLM(tiny.target, None, verify="lossy-typical", **FEW)
    with pytest.raises(ValueError, match="verify is 'lossy-typical'; it must be one of coupled, "):
        LLM(tiny.target, None, verify="lossy-typical", plugins=["bigrams"], **FEW)
    with pytest.raises(ValueError, match="not a draft head of a known kind"):
        LLM(tiny.target, mlp_head, **FEW)


def test_a_lossy_rule_is_told_and_accepts_what_it_says(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    plain = LLM(tiny.target, None, **FEW)
    lossy = LLM(tiny.target, tiny.target, plugins=["typical"], verify="lossy-typical", **FEW)
    (told,) = [record for record in caplog.records if "lossy" in record.getMessage()]
    assert told.levelname == "WARNING"
    assert told.getMessage().startswith("verify lossy-typical: outputs may differ from the target's own")
    assert greedy(lossy) == greedy(plain)
    # The target drafts for itself, and is sure of its best token: each is accepted, and its draws are those of argmax.
    params = SamplingParams(temperature=0.001, seed=1, max_tokens=24, ignore_eos=True)
    (cold,) = lossy.generate([PROMPT], params, use_tqdm=False)
    assert cold.token_ids == greedy(plain)
    assert lossy.stats().drafts_accepted > 24
    # A sixth is too little, whatever the coins: no draft is accepted of a distribution with seven equal tokens.
    tree = DraftTree((3, 4, 5), (ROOT, ROOT, 0))
    for share, path in ((0.35, (0, 2)), (0.29, ())):
        p = torch.full((7,), (1 - share) / 6, dtype=torch.float64)
        after = {ROOT: p.index_fill(0, torch.tensor(3), share), 0: p.index_fill(0, torch.tensor(5), share)}
        rest = {2: p, 1: p}
        for position in range(8):
            chance = PhiloxChance(NoiseKey(1, 0, position))
            found = sys.modules["typical"].typical(tree, {**after, **rest}.get, chance)
            assert found.path == path
            assert 0 <= found.next_token < 7


def test_a_head_without_attention_drafts(tiny: Tiny, mlp_head: Path) -> None:
    plain = greedy(LLM(tiny.target, None, **FEW))
    llm = LLM(tiny.target, mlp_head, plugins=["mlp_head"], **FEW)
    assert greedy(llm) == plain
    assert llm.stats().drafts_verified > 0


@pytest.mark.long
def test_an_engine_process_and_ranks_import_it(tiny: Tiny, mlp_head: Path) -> None:
    given: dict[str, Any] = {**FEW, "plugins": ["bigrams", "mlp_head"], "draft_options": ["bigrams=1"]}
    plain = greedy(LLM(tiny.target, None, **FEW))
    with LLM(tiny.target, f"{mlp_head},bigrams", tensor_parallel_size=2, **given) as llm:
        assert greedy(llm) == plain

    async def served() -> list[int]:
        async with AsyncLLM(tiny.target, f"{mlp_head},bigrams", **given) as engine:
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            async for output in engine.generate(PROMPT, params):
                found = output
            stats = await engine.stats()
            assert set(stats.sources) == {"bigrams"}
            return list(found.outputs[0].token_ids)

    assert asyncio.run(served()) == plain


@pytest.mark.long
def test_commands_take_it(tiny: Tiny, mlp_head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "ab ab ab"}\n')
    shared = ["--model", tiny.target, "--dtype", "float64", "--plugin", "bigrams", "--plugin", "mlp_head", "--json"]
    few = ["--max-tokens", "8", "--ignore-eos"]
    own = {
        "generate": ["generate", "ab ab ab", "--draft", f"{mlp_head},bigrams", "--draft-option", "bigrams=1"],
        "bench": [
            "bench",
            "acceptance",
            "--draft",
            "bigrams",
            "--draft",
            mlp_head,
            "--dataset",
            tmp_path / "prompts.jsonl",
        ],
    }
    for name, words in own.items():
        with pytest.raises(SystemExit) as ended:
            main([*map(str, words), *map(str, shared), *few])
        captured = capsys.readouterr()
        assert ended.value.code == 0, captured.err
        if name == "bench":
            assert [mode["draft"] for mode in json.loads(captured.out)["modes"]] == [None, "bigrams", str(mlp_head)]


def test_the_name_of_an_entry_point_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [EntryPoint("pairs", "bigrams", plugins.GROUP)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: found if group == plugins.GROUP else [])
    plugins.import_plugins(["pairs", "pairs"])
    assert "bigrams" in SOURCES


def test_a_plugin_that_fails_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no\\nluck')\n")
    with pytest.raises(ValueError, match=r"^plugin 'broken_plugin' cannot be imported: no$"):
        plugins.import_plugins(["broken_plugin"])


def test_names_of_rules_say_whether_they_are_lossy() -> None:
    for name, rule in (
        ("typical", AcceptanceRule(CoupledVerifier, is_lossy=True)),
        ("lossy-typical", AcceptanceRule(CoupledVerifier)),
    ):
        with pytest.raises(ValueError, match=f"acceptance rule '{name}': the name of a rule with is_lossy="):
            RULES.register(name, rule)


@given(st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,5}", fullmatch=True), max_size=8))
def test_a_registry_has_the_newest_first_and_each_name_once(names: list[str]) -> None:
    table: Registry[int] = Registry("number", {"one": 1})
    expected = {"one": 1}
    for number, name in enumerate(names, 2):
        if name in expected:
            with pytest.raises(ValueError, match=f"number '{name}' is there already; take another name"):
                table.register(name, number)
        else:
            table.register(name, number)
            expected = {name: number, **expected}
    assert list(table.items()) == list(expected.items())
    with pytest.raises(ValueError, match="named is 'None'; it must be one of "):
        table.named("None", "named")
    with pytest.raises(ValueError, match="number 'a,b': a name has lower-case letters"):
        table.register("a,b", 0)
