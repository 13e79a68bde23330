"""Host memory and disk behind an engine: what is restored is computed by nobody again, and seen by nobody."""

import threading
from pathlib import Path
from typing import Any

import pytest

from specdec import BeamSearchParams, SamplingParams
from specdec.core.metrics import engine_metrics
from specdec.core.request import Request
from specdec.kv_transfer.disk_store import DiskStore
from specdec.kv_transfer.offloading_connector import OffloadingConnector
from tests.fakes import save_random_llama
from tests.new_groups import new_group
from tests.specdec.kv_transfer.engines import (
    DRAWN,
    GREEDY,
    PROMPT,
    SIZE,
    WHOLE,
    Computed,
    disk,
    engine,
    file_of_key,
    run,
)
from tests.specdec.world import World


class Shared(OffloadingConnector):
    """A connector that is not built in."""

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config.kv_connector_extra_config["blocks"], context.block_size, [], context.keys(""))


def plain(world: World, drafter: str, params: SamplingParams) -> Computed:
    with engine(world, drafter, None) as llm:
        return run(llm, [PROMPT], params)


@pytest.mark.long
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("drafter", ["eagle", "eagle3", "dspark", "llama", "none"])
def test_a_restart_finds_the_prefix_on_the_disk(
    world: World, tmp_path: Path, drafter: str, params: SamplingParams
) -> None:
    expected = plain(world, drafter, params)
    with engine(world, drafter, disk(tmp_path)) as llm:
        first = run(llm, [PROMPT], params)
    with engine(world, drafter, disk(tmp_path)) as llm:
        again = run(llm, [PROMPT], params)
        assert [output.num_cached_tokens for output in llm.generate([PROMPT], params, use_tqdm=False)] == [WHOLE]
        metrics = {each.name: each for each in engine_metrics(llm.stats(), "m")}
    assert first.tokens == again.tokens == expected.tokens
    assert first.tau == again.tau == expected.tau
    assert (first.loaded, again.loaded) == (0, WHOLE)
    assert again.known == first.known - WHOLE
    # Drafting starts on the restored prefix; nothing of it is read again.
    assert again.read == max(0, first.read - WHOLE)
    assert metrics["vllm:external_prefix_cache_hits"].value == WHOLE  # type: ignore[attr-defined]


@pytest.mark.long
def test_evicted_blocks_are_found_in_host_memory(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The cache holds little more than one request, and two prompts alternate."""
    other = [token + 1 for token in PROMPT]
    config = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}
    bytes_of_8_blocks = 8 * SIZE * (3 * 2 * 16 + 32) * 8
    with engine(world, "eagle", config, kv_cache_memory=bytes_of_8_blocks, max_model_len=64) as llm:
        results = [run(llm, [prompt], GREEDY) for prompt in (PROMPT, other, PROMPT, other)]
        num_loaded = llm.engine.connector._num_begun
    assert results[0].tokens == results[2].tokens == plain(world, "eagle", GREEDY).tokens
    assert results[1].tokens == results[3].tokens
    assert [result.loaded for result in results] == [0, 0, WHOLE, WHOLE]
    assert results[2].tau == results[0].tau
    assert num_loaded == 2 * WHOLE // SIZE
    assert "host memory" not in caplog.text


@pytest.mark.long
def test_a_store_without_the_heads_part_gives_the_targets_alone(world: World, tmp_path: Path) -> None:
    expected = plain(world, "eagle", DRAWN)
    with engine(world, "none", disk(tmp_path)) as llm:
        run(llm, [PROMPT], DRAWN)
    for drafter in ("eagle", "eagle3", "dflash", "llama"):
        with engine(world, drafter, disk(tmp_path)) as llm:
            result = run(llm, [PROMPT], DRAWN)
        assert result.tokens == expected.tokens
        assert result.loaded == WHOLE
        # The head reads the restored tokens before it drafts.
        assert result.read >= WHOLE
    # What was read without features is not stored as the head's, so a third engine finds the target's part alone too.
    with engine(world, "eagle", disk(tmp_path)) as llm:
        assert run(llm, [PROMPT], DRAWN).read >= WHOLE
    # A small model reads tokens alone, so its part is as good as ever.
    with engine(world, "llama", disk(tmp_path)) as llm:
        assert run(llm, [PROMPT], DRAWN).read < WHOLE


def test_heads_share_the_targets_part(world: World, tmp_path: Path) -> None:
    with engine(world, "eagle", disk(tmp_path)) as llm:
        first = run(llm, [PROMPT], GREEDY)
    with engine(world, "eagle3", disk(tmp_path)) as llm:
        second = run(llm, [PROMPT], GREEDY)
    assert second.loaded == WHOLE
    assert second.tokens == first.tokens


def test_other_models_and_precisions_share_nothing(
    world: World, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with engine(world, "none", disk(tmp_path)) as llm:
        run(llm, [PROMPT], GREEDY)
    for settings in ({"dtype": "float32"}, {"block_size": 16}):
        with engine(world, "none", disk(tmp_path), **settings) as llm:
            assert run(llm, [PROMPT], GREEDY).loaded == 0
    prefixed = disk(tmp_path, cache_prefix="mine")
    with engine(world, "none", prefixed) as llm:
        assert run(llm, [PROMPT], GREEDY).loaded == 0
    other = tmp_path_factory.mktemp("other")
    save_random_llama(other / "target", seed=1)
    with engine(World(other, world.target, world.tokenizer), "none", disk(tmp_path)) as llm:
        assert run(llm, [PROMPT], GREEDY).loaded == 0


@pytest.mark.long
def test_damaged_files_are_computed_instead(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = plain(world, "eagle", DRAWN)
    with engine(world, "eagle", disk(tmp_path)) as llm:
        run(llm, [PROMPT], DRAWN)
    for number, file in enumerate(sorted(tmp_path.glob("??/*.kv"))):
        data = bytearray(file.read_bytes())
        data[100 + number] ^= 4
        file.write_bytes(data if number % 2 else data[:90])
    with engine(world, "eagle", disk(tmp_path)) as llm:
        result = run(llm, [PROMPT], DRAWN)
        again = run(llm, [PROMPT], DRAWN)
    assert result.tokens == again.tokens == expected.tokens
    assert result.tau == again.tau == expected.tau
    assert result.loaded == 0
    assert "is ignored: wrong checksum" in caplog.text or "bytes where" in caplog.text
    with engine(world, "eagle", disk(tmp_path)) as llm:
        assert run(llm, [PROMPT], DRAWN).loaded == WHOLE


@pytest.mark.long
def test_blocks_that_vanish_between_query_and_read_are_computed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(world, "eagle", GREEDY)
    with engine(world, "eagle", disk(tmp_path)) as llm:
        run(llm, [PROMPT], GREEDY)
    read, calls = DiskStore.read, []

    def vanishing(self: DiskStore, keys: Any, payloads: Any) -> list[bool]:
        # The third block goes at the last moment.
        if not calls:
            file_of_key(self, keys[2]).unlink()
        calls.append(keys)
        return read(self, keys, payloads)

    monkeypatch.setattr(DiskStore, "read", vanishing)
    with engine(world, "eagle", disk(tmp_path)) as llm:
        result = run(llm, [PROMPT], GREEDY)
    assert result.tokens == expected.tokens
    assert result.loaded == 2 * SIZE


@pytest.mark.long
def test_a_store_that_hangs_delays_nobody(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Without a whole block it has nothing to look for.
    other = PROMPT[: SIZE - 1]
    with engine(world, "eagle", disk(tmp_path)) as llm:
        expected = run(llm, [PROMPT], GREEDY)
    hanging = threading.Event()

    def hang(*_: Any) -> int:
        hanging.wait(120)
        return 0

    monkeypatch.setattr(DiskStore, "count_held", hang)
    with engine(world, "eagle", disk(tmp_path, load_timeout=0.3)) as llm:
        late, early = (new_group(llm, prompt, GREEDY).requests[0] for prompt in (PROMPT, other))
        order: list[Request] = []
        for request in (late, early):
            llm.engine.scheduler.add(request)
        llm.engine.step()
        assert llm.stats().waiting_for_kv == 1
        while llm.engine.has_unfinished:
            order += [request for request in llm.engine.step() if request.finished]
        hanging.set()
    assert order == [early, late]
    assert late.completion().token_ids == expected.tokens[0]
    assert "took longer than 0.3 s" in caplog.text


def test_a_request_that_waits_for_blocks_can_be_aborted(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(world, "eagle", disk(tmp_path)) as llm:
        run(llm, [PROMPT], GREEDY)
    going = threading.Event()
    count_held = DiskStore.count_held
    monkeypatch.setattr(DiskStore, "count_held", lambda *given: going.wait(120) and count_held(*given))
    with engine(world, "eagle", disk(tmp_path)) as llm:
        request = new_group(llm, PROMPT, GREEDY).requests[0]
        llm.engine.scheduler.add(request)
        llm.engine.step()
        assert llm.engine.has_unfinished
        llm.engine.scheduler.abort(request)
        assert not llm.engine.has_unfinished
        going.set()
        assert run(llm, [PROMPT], GREEDY).loaded == WHOLE
        connector, tier = llm.engine.connector, llm.engine.connector.tier
    connector.update_connector_output(connector.get_finished())
    assert tier.pool.num_free == tier.pool.num_blocks


def test_roles(world: World, tmp_path: Path) -> None:
    with engine(world, "none", {**disk(tmp_path), "kv_role": "kv_consumer"}) as llm:
        run(llm, [PROMPT], GREEDY)
    assert not list(tmp_path.glob("??/*.kv"))
    for _ in range(2):
        with engine(world, "none", {**disk(tmp_path), "kv_role": "kv_producer"}) as llm:
            assert run(llm, [PROMPT], GREEDY).loaded == 0
    with engine(world, "none", {**disk(tmp_path), "kv_role": "kv_consumer"}) as llm:
        assert run(llm, [PROMPT], GREEDY).loaded == WHOLE


def test_a_connector_of_ones_own(world: World) -> None:
    own = {"kv_connector": "Shared", "kv_connector_module_path": __name__, "kv_connector_extra_config": {"blocks": 40}}
    with engine(world, "eagle", own) as llm:
        assert type(llm.engine.connector).__name__ == "Shared"
        assert run(llm, [PROMPT], GREEDY).tokens == plain(world, "eagle", GREEDY).tokens
    for wrong, message in (
        ({"kv_connector": "World"}, "must be a KVConnector"),
        ({"kv_connector": "x"}, "has no attr"),
    ):
        with pytest.raises(ValueError, match=message), engine(world, "none", {**own, **wrong}):
            pass


def test_too_little_host_memory_is_refused(world: World) -> None:
    config = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 100}}
    with pytest.raises(ValueError, match="must hold two blocks"), engine(world, "none", config):
        pass


def test_a_beam_search_waits_for_blocks_of_a_store(world: World, tmp_path: Path) -> None:
    """A step without rows is no sign that no beam can run."""
    params, found = BeamSearchParams(3, 5, ignore_eos=True), list[list[list[int]]]()
    for config in (None, disk(tmp_path), disk(tmp_path)):
        with engine(world, "none", config) as llm:
            (output,) = llm.beam_search([PROMPT], params)
            found.append([sequence.tokens for sequence in output.sequences])
            loaded = llm.stats().external_prefix_hits
    assert found[0] == found[1] == found[2]
    assert loaded == WHOLE
