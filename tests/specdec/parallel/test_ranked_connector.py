"""Connectors over several ranks: each stores and loads its part of a block, and all of them go by the same blocks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import DraftShape, SamplingParams
from specdec.building.engine_builder import EngineBuilder
from specdec.kv_transfer.offloading_connector import OffloadingConnector
from specdec.parallel.ranks import RankDeadError
from tests.profiles import by_day
from tests.specdec.kv_transfer.engines import (
    DRAWN,
    GREEDY,
    HOST,
    OTHER,
    PROMPT,
    SIZE,
    WHOLE,
    Computed,
    disk,
    engine,
    flush,
    run,
)
from tests.specdec.kv_transfer.mooncake import mooncake_master, needs_mooncake
from tests.specdec.parallel.connected_ranks import connected_ranks
from tests.specdec.parallel.ranked_engine import PROMPTS, check_with_little_memory, texts
from tests.specdec.parallel.ranked_engine import engine as ranked_engine
from tests.specdec.parallel.thread_ranks import thread_ranks
from tests.specdec.world import World

pytestmark = pytest.mark.slow

# The draft model is split.
SPLIT = {"draft_tensor_parallel_size": 2}
STAGES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
BOTH = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


def plain(world: World, drafter: str, params: SamplingParams, prompt: list[int] = PROMPT) -> Computed:
    """What one rank computes without a connector."""
    with engine(world, drafter, None) as llm:
        return run(llm, [prompt], params)


def check_shared(config: dict[str, Any], world: World, drafter: str, params: SamplingParams, **settings: Any) -> None:
    """Check two engines of several ranks with one pool: a prompt and its answer, which the first has computed, the
    second one loads.
    """
    expected = plain(world, drafter, params)
    with thread_ranks(), engine(world, drafter, None, **{"tensor_parallel_size": 2, **settings}) as llm:
        without = run(llm, [PROMPT], params)
    assert (without.tokens, without.tau) == (expected.tokens, expected.tau)
    with connected_ranks(world, drafter, config, **settings) as one:
        first = run(one.llm, [PROMPT], params)
        flush(one.llm)
        with connected_ranks(world, drafter, config, **settings) as other:
            longer = [*PROMPT, *expected.tokens[0]]
            second = run(other.llm, [longer], params)
            other.check_alike()
    assert first == without
    again = plain(world, drafter, params, longer)
    assert (second.tokens, second.tau) == (again.tokens, again.tau)
    assert second.loaded == len(longer) // SIZE * SIZE
    assert second.known == again.known - second.loaded
    # Drafting starts on the loaded prefix; of it nothing is read again but what the first one had not read at its end.
    assert second.read <= max(0, again.read - second.loaded + SIZE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("drafter", "params", "settings"),
    by_day(
        [
            ("eagle3", DRAWN, STAGES),
            ("llama", DRAWN, SPLIT),
            ("dspark", DRAWN, {}),
            ("eagle", GREEDY, BOTH),
            ("dflash", GREEDY, SPLIT),
            ("eagle3", DRAWN, SPLIT),
            ("eagle", DRAWN, {}),
            ("none", GREEDY, {}),
        ],
        4,
    ),
)
def test_a_second_engine_computes_no_prefix_again(
    world: World, tmp_path: Path, drafter: str, params: SamplingParams, settings: dict[str, Any]
) -> None:
    check_shared(disk(tmp_path), world, drafter, params, **settings)


@needs_mooncake
def test_engines_share_a_mooncake_pool(world: World, tmp_path: Path) -> None:
    with mooncake_master(tmp_path) as master:
        check_shared(master.config(), world, "eagle3", DRAWN)


@pytest.mark.long
def test_a_restart_finds_the_prefix_on_the_disk(world: World, tmp_path: Path) -> None:
    """Ranks in processes of their own have written all of their parts when the engine has ended."""
    config = disk(tmp_path)
    with engine(world, "eagle3", config, tensor_parallel_size=2) as llm:
        first = run(llm, [PROMPT], DRAWN)
    with connected_ranks(world, "eagle3", config) as ranks:
        again = run(ranks.llm, [PROMPT], DRAWN)
        ranks.check_alike()
    expected = plain(world, "eagle3", DRAWN)
    assert first.tokens == again.tokens == expected.tokens
    assert first.tau == again.tau == expected.tau
    assert (first.loaded, again.loaded) == (0, WHOLE)


@pytest.mark.long
@pytest.mark.parametrize("settings", [SPLIT, STAGES])
def test_evicted_blocks_are_found_in_host_memory(
    world: World, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Two prompts alternate in a cache for one."""
    monkeypatch.setattr(EngineBuilder, "_num_blocks", lambda _: 8)
    with connected_ranks(world, "eagle", HOST, max_model_len=64, **settings) as ranks:
        found = [run(ranks.llm, [prompt], GREEDY) for prompt in (PROMPT, OTHER, PROMPT, OTHER)]
        ranks.check_alike()
        num_loaded = ranks.connectors[0]._num_begun
    assert [each.tokens for each in found] == 2 * [plain(world, "eagle", GREEDY, p).tokens for p in (PROMPT, OTHER)]
    assert found[2].tau == found[0].tau
    assert [each.loaded for each in found] == [0, 0, WHOLE, WHOLE]
    assert num_loaded == 2 * WHOLE // SIZE
    assert "host memory" not in caplog.text


@pytest.mark.long
@pytest.mark.parametrize(("drafter", "settings"), [("eagle3", {}), ("llama", SPLIT), ("eagle", STAGES)])
def test_tokens_are_those_of_one_rank_with_little_memory(
    world: World,
    expected: list[list[int]],
    drafter: str,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests are preempted, forked, and loaded from host memory with room for few blocks."""
    monkeypatch.setattr(EngineBuilder, "_num_blocks", lambda _: 16)
    tensor = settings.get("tensor_parallel_size", 2)
    own = {name: value for name, value in settings.items() if name != "tensor_parallel_size"}
    with ranked_engine(world, drafter, tensor, kv_transfer_config=HOST, **own) as llm:
        check_with_little_memory(llm, expected, drafts=True)
        llm.generate([[token + 20 for token in prompt] for prompt in PROMPTS], GREEDY, use_tqdm=False)
        assert texts(llm) == expected
        assert llm.stats().external_prefix_hits > 0


@pytest.mark.long
def test_accepted_nodes_are_in_place_when_their_block_is_stored(world: World) -> None:
    """Each stage stores of an answer what plain decoding gives, though earlier ones move nodes late."""
    found: list[list[dict[bytes, Tensor]]] = []
    for drafter in ("llama", "none"):
        with connected_ranks(world, drafter, HOST, shape=DraftShape(4, 4, 12), **STAGES) as ranks:
            run(ranks.llm, [PROMPT], SamplingParams(temperature=0, max_tokens=80, ignore_eos=True))
            pool = ranks.connectors[0].tier.pool
            hashes = [block_hash for block_hash in pool._hashes if block_hash is not None]
            memories = [each.memory._parts["target"] for _, each in sorted(ranks.connectors.items())]
            found.append([{each: memory[pool.find(each)].clone() for each in hashes} for memory in memories])
    for own, expected in zip(*found, strict=True):
        assert own.keys() == expected.keys()
        assert len(own) == (len(PROMPT) + 79) // SIZE
        assert all(torch.allclose(own[each], expected[each], atol=1e-9) for each in own)


@pytest.mark.long
def test_engines_of_different_sizes_share_nothing(world: World, tmp_path: Path) -> None:
    """Of two key-value heads a rank of two has one, and a rank of four a copy of one: blocks of the same shape."""
    names: list[str] = []
    with engine(world, "eagle", disk(tmp_path)) as llm:
        assert run(llm, [PROMPT], GREEDY).loaded == 0
        connector = llm.engine.connector
        assert isinstance(connector, OffloadingConnector)
        names += [connector._key(part, b"h") for part in ("target", "head")]
    for settings in ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}, BOTH):
        with connected_ranks(world, "eagle", disk(tmp_path), **settings) as each:
            assert run(each.llm, [PROMPT], GREEDY).loaded == 0
            assert each.workers[0].cache.target.shape[2] == 2
            names += [own._key(part, b"h") for own in each.connectors.values() for part in ("target", "head")]
    assert len(set(names)) == len(names) == 2 * (1 + 2 + 4 + 4)


@pytest.mark.long
def test_roles(world: World, tmp_path: Path) -> None:
    """What one engine of two ranks has prefilled another one decodes, and computes and reads none of it."""
    expected = plain(world, "eagle3", DRAWN)
    with connected_ranks(world, "eagle3", disk(tmp_path), role="decode") as decode:
        with connected_ranks(world, "eagle3", disk(tmp_path), role="prefill") as prefill:
            run(prefill.llm, [PROMPT], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
            flush(prefill.llm)
        found = run(decode.llm, [PROMPT], DRAWN)
    assert (found.tokens, found.tau, found.loaded) == (expected.tokens, expected.tau, WHOLE)
    assert (found.known, found.read) == (expected.known - WHOLE, expected.read - WHOLE)


class OfOneRank(OffloadingConnector):
    """A connector that is not built in, for a single rank."""

    supports_ranks = False

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config.kv_connector_extra_config["blocks"], context.block_size, [], context.keys(""))


class OfRanks(OfOneRank):
    supports_ranks = True


@pytest.mark.long
def test_a_connector_of_ones_own(world: World) -> None:
    own = {"kv_connector": "OfRanks", "kv_connector_module_path": __name__, "kv_connector_extra_config": {"blocks": 40}}
    with connected_ranks(world, "eagle", own) as ranks:
        assert all(isinstance(each, OfRanks) for each in ranks.connectors.values())
        assert run(ranks.llm, [PROMPT], GREEDY).tokens == plain(world, "eagle", GREEDY).tokens
    message = r"kv_connector 'OfOneRank' serves one rank \(supports_ranks\), and the model is split over 2; use one"
    with (
        pytest.raises(ValueError, match=message),
        connected_ranks(world, "eagle", {**own, "kv_connector": "OfOneRank"}),
    ):
        pass


def test_settings_that_rank_1_alone_refuses(world: World, tmp_path: Path) -> None:
    (tmp_path / "rank-1-of-2").write_text("no folder")
    with (
        pytest.raises(ValueError, match=r"root_dir .*rank-1-of-2.*; give a folder that can be written"),
        connected_ranks(world, "none", disk(tmp_path)),
    ):
        pass


def test_a_rank_that_fails_to_save_ends_the_engine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason is the error's, and the engine can still be closed."""
    with connected_ranks(world, "eagle", HOST) as ranks:
        monkeypatch.setattr(ranks.connectors[1], "wait_for_save", lambda _: 1 // 0)
        # What holds the rank's worker holds its connections.
        ranks.workers.clear()
        with pytest.raises(RankDeadError, match="rank 1 of 2 failed: ZeroDivisionError"):
            ranks.llm.generate([PROMPT], GREEDY, use_tqdm=False)
